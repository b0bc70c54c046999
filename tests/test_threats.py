"""THREATS.md: what it says holds is held by tests that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "THREATS.md").read_text(encoding="utf-8")
HANDED_OVER = "| from | input |"
"""The table of all that others may hand over."""


def named_tests() -> set[tuple[str, str]]:
    """(file, function) of every test that a table names; "" names a whole file."""
    found = set()
    for line in TEXT.splitlines():
        if line.startswith("|"):
            folder, file = "", ""
            for name in re.findall(r"`([^`]*)`", line):
                path, _, function = name.partition("::")
                if not re.fullmatch(r"([\w./]+\.py)?(::test_\w+)?", name) or not name:
                    continue
                if path:
                    if "test_" not in Path(path).name and not path.startswith("tests/"):
                        continue  # code that is named, not a test
                    folder = "" if path.startswith("tests/") else "tests/serve/"
                    file = str((ROOT / folder / path).resolve().relative_to(ROOT))
                found.add((file, function))
    return found


def test_every_test_that_is_named_is_there():
    missing = []
    for file, function in sorted(named_tests()):
        code = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else ""
        if not code or (function and f"def {function}(" not in code):
            missing.append(f"{file}::{function}")
    assert not missing and len(named_tests()) > 80


def test_everything_that_others_hand_over_has_its_cost_and_a_test():
    table = TEXT[TEXT.index(HANDED_OVER) :].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]
    assert all(len(row) == 4 and all(row) and "test_" in row[3] for row in rows)
    assert {row[0] for row in rows} >= {"a key", "data", "weights", "adapters", "another user of the machine"}
