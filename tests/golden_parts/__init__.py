"""What the golden record consists of: each group is a module whose `record` yields (name, value) pairs.

A value is a digest or the hexadecimal form of a float (str), a count (int), or a text (list of its lines).
"""

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

GROUPS = ("networks", "kept", "texts", "runs", "videos")


def record_groups(work: Path, only: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The entries that `only` asks for, group by group: a group's name, or a glob such as `runs/tp2_sp/*`."""
    for group in GROUPS:
        wanted = [pattern for pattern in only if pattern.split("/")[0] == group]
        if only and not wanted:
            continue
        start = time.monotonic()
        found = dict(import_module(f"golden_parts.{group}").record(work, chooser(group, wanted)))
        print(f"{group}: {len(found)} entries, {time.monotonic() - start:.0f} s", flush=True)
        yield {f"{group}/{name}": value for name, value in found.items()}


def chooser(group: str, wanted: list[str]) -> Callable[[str], bool]:
    """Whether a member of the group (the second part of an entry's name) is asked for."""
    if not wanted or group in wanted:
        return lambda member: True
    members = [pattern.split("/")[1] for pattern in wanted]
    return lambda member: any(fnmatch(member, pattern) for pattern in members)


def folded(entries: dict[str, Any]) -> dict[str, str]:
    """One digest of all entries whose names begin with the same four parts: a record small enough to be kept."""
    groups: dict[str, list] = defaultdict(list)
    for name, value in sorted(entries.items()):
        groups["/".join(name.split("/")[:4])].append([name, value])
    return {name: hashlib.sha256(json.dumps(group).encode()).hexdigest()[:24] for name, group in groups.items()}
