"""`megadit slurm validate`: checks nodes; faulty ones are reported, and excluded from later jobs.

Each node alone runs NVIDIA's diagnosis (`dcgmi diag`, where it is installed) and `megadit doctor --distributed`, which
checks its devices and the bandwidth of all-reduces between every two of them; then all nodes do so together. The last
line of the batch script (`validate.sh`) evaluates the results with this module.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from megadit.models.shared.cli.command import entry_point
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path

BLAMED = re.compile(r"^(broken|slow): (?:rank \d+ on (\S+) \(.*?\)|node \d+ \((\S+?)\))(?! with (?:rank|node) )(.*)$")
"""A line of the doctor that blames one node (for a bad link between two, the faulty one is unknown)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A faulty node, and why."""

    node: str
    said: str


def faults_of(results: Path) -> list[Fault]:
    """Faults of the nodes in a folder of results; a node may have several. Raises UserError if it is not such a
    folder."""
    listed = results / "nodes"
    if not listed.is_file():
        raise UserError(f"{results} holds no results of nodes (`nodes` is missing)")
    nodes = listed.read_text(encoding="utf-8").split()
    faults = [fault for node in nodes for fault in _faults_of(results, node)]
    together = results / "all.doctor"
    if together.is_file():
        silent = {fault.node for fault in faults}
        faults += [fault for fault in _blamed(together, nodes) if fault.node not in silent]
    return faults


def _faults_of(results: Path, node: str) -> list[Fault]:
    code = _code(results / f"{node}.doctor.code")
    if code is None:
        return [Fault(node=node, said="it did not answer")]
    faults = []
    if _code(results / f"{node}.dcgmi.code"):
        faults.append(Fault(node=node, said=f"dcgmi diag: {_last_failure(results / f'{node}.dcgmi')}"))
    if code:
        blamed = list(_blamed(results / f"{node}.doctor", [node])) if code == 1 else []
        faults += blamed or [Fault(node=node, said=f"megadit doctor ended with {code}; see {node}.doctor")]
    return faults


def _blamed(path: Path, nodes: list[str]) -> list[Fault]:
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        match = BLAMED.match(line.strip())
        host = (match[2] or match[3]) if match else None
        node = next((node for node in nodes if host in (node, *_short(node))), nodes[0] if len(nodes) == 1 else None)
        if match and node:
            found.append(Fault(node=node, said=line.strip()))
    return found


def _short(node: str) -> tuple[str]:
    return (node.partition(".")[0],)


def _code(path: Path) -> int | None:
    text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    return int(text) if text.isdecimal() else None


def _last_failure(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    failures = [" ".join(line.strip(" |").split()) for line in lines if "fail" in line.lower()]
    return (failures or ["it failed"])[0][:200]


@entry_point
def main(argv: list[str]) -> int:
    """Evaluate a folder of results, and record the nodes to exclude; return 1 if there are any."""
    if len(argv) != 2:
        raise UserError("give the folder of results and the file of nodes to leave out")
    results, exclude = map(Path, argv)
    faults = faults_of(results)
    nodes = (results / "nodes").read_text(encoding="utf-8").split()
    bad = sorted({fault.node for fault in faults})
    left_out = set(exclude.read_text(encoding="utf-8").split() if exclude.is_file() else ())
    lines = [f"{len(nodes) - len(bad)} of {len(nodes)} nodes are sound", *(f"{f.node}: {f.said}" for f in faults)]
    for path, text in (
        (results / "report.txt", "\n".join(lines)),
        (exclude, "\n".join(sorted(left_out - set(nodes) | set(bad)))),
    ):
        with atomic_path(path) as temporary:
            temporary.write_text(text + "\n" if text else "", encoding="utf-8")
    print("\n".join(lines))
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
