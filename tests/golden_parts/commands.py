"""Commands of this checkout, run to their end."""

import os
import subprocess
from pathlib import Path

from golden_parts.names import megadit_command

TIMEOUT = 300


def environment() -> dict[str, str]:
    """With which a Python process finds these modules."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "PYTHONHASHSEED": "0"}


def megadit(*arguments: str | Path) -> None:
    """Runs the verb; RuntimeError with what it printed if it fails."""
    words = list(map(str, (*megadit_command(), *arguments)))
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=TIMEOUT)
    if done.returncode:
        command = " ".join(map(str, arguments))
        raise RuntimeError(f"megadit {command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
