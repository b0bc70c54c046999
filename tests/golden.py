"""The golden record: digests of what a checkout computes, to show that a refactoring changes no bit of it.

    python tests/golden.py record FILE [--only GLOB ...] [--work DIR] [--add] [--fold]
    python tests/golden.py compare BEFORE AFTER [--only GLOB ...] [--allow GLOB ...]

`record` describes the `megadit` of the interpreter that runs it; the same script records older checkouts too. Records
of one machine (CPU, torch) may be compared; a whole one takes about five minutes on two idle cores. `--work` belongs to
one checkout: what one has trained says nothing of another. The groups of entries:

    runs       20 steps of `digits` in six layouts: losses, gradient norms, every checkpoint tensor, sampled videos
    videos     a bundle of the first run, its ONNX graphs, videos of both by every sampler
    networks   a small network of each structure: outputs, gradients and traced graphs, float32 and bfloat16
    kept       bytes that a block keeps for its backward, and the peak of a step
    texts      `--help` of every verb, the resolved recipes, config.pbtxt, openapi.json
"""

import argparse
import difflib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

PEAK_FACTOR = 1.03
"""Entries that end with `/peak` may grow by this factor."""

os.environ.update(
    OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", COLUMNS="100", TOKENIZERS_PARALLELISM="false", MEGADIT_VARIANTS="rule"
)
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def record(file: Path, options: argparse.Namespace) -> None:
    """Writes the entries that `options.only` names (all without any), each group as soon as it is there."""
    from golden_parts import folded, record_groups
    from golden_parts.machine import machine

    entries = json.loads(file.read_text(encoding="utf-8"))["entries"] if options.add and file.exists() else {}
    with tempfile.TemporaryDirectory(prefix="golden-") as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        for group in record_groups(work, tuple(options.only)):
            entries |= folded(group) if options.fold else group
            text = json.dumps({"machine": machine(), "entries": entries}, indent=0, sort_keys=True)
            file.write_text(text + "\n", encoding="utf-8")
    print(f"{file}: {len(entries)} entries")


def compare(before: Path, after: Path, only: Sequence[str], allow: Sequence[str]) -> int:
    """Prints every difference of the entries in `only` (all without any); the number of those that `allow` lacks."""
    old, new = (json.loads(path.read_text(encoding="utf-8")) for path in (before, after))
    if old["machine"] != new["machine"]:
        print(f"note: two machines, whose last bits may differ:\n  {old['machine']}\n  {new['machine']}")
    old, new = old["entries"], new["entries"]
    num_refused = 0
    names = [name for name in sorted(old.keys() | new.keys()) if not only or is_named(name, only)]
    for name in names:
        if name in old and name in new and is_equal(name, old[name], new[name]):
            continue
        is_allowed = is_named(name, allow)
        num_refused += not is_allowed
        print(f"{'allowed' if is_allowed else 'DIFFERS'} {name}: {difference(old.get(name), new.get(name))}")
    print(f"{len(names)} entries compared, {num_refused} differences")
    return num_refused


def is_named(name: str, patterns: Sequence[str]) -> bool:
    """By a glob of it, or of its first parts."""
    return any(fnmatch(name, pattern) or fnmatch(name, f"{pattern}/*") for pattern in patterns)


def is_equal(name: str, old: Any, new: Any) -> bool:
    return old == new or (name.endswith("/peak") and new <= PEAK_FACTOR * old)


def difference(old: Any, new: Any) -> str:
    if old is None or new is None:
        return "is new" if old is None else "is missing"
    if not isinstance(old, list):
        return f"{old} -> {new}"
    lines = difflib.unified_diff(old, new, "before", "after", lineterm="", n=1)
    return "\n" + "\n".join(f"    {line}" for line in lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--only", nargs="+", default=[], metavar="GLOB", help="groups, or globs of entries")
    recording.add_argument(
        "--work",
        type=Path,
        metavar="DIR",
        help="keep runs and bundles here; finished runs that are there are not run again",
    )
    recording.add_argument("--add", action="store_true", help="keep the other entries of FILE")
    recording.add_argument("--fold", action="store_true", help="one digest for each way of a network, and so on")
    comparing = verbs.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--only", nargs="+", default=[], metavar="GLOB", help="groups, or globs of entries")
    comparing.add_argument("--allow", nargs="+", default=[], metavar="GLOB", help="entries that may differ")
    options = parser.parse_args(argv)
    if options.verb == "record":
        record(options.file, options)
        return 0
    return int(compare(options.before, options.after, options.only, options.allow) > 0)


if __name__ == "__main__":
    sys.exit(main())
