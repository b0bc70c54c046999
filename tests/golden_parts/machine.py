"""What decides the last bits of a record beside the code."""

import platform
from pathlib import Path


def machine() -> dict[str, str]:
    import torch

    return {
        "cpu": cpu_model(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def cpu_model() -> str:
    names = ("model name", "cpu family", "model")
    file = Path("/proc/cpuinfo")
    if not file.exists():
        return platform.processor()
    pairs = dict(line.split(":", 1) for line in file.read_text().split("\n\n")[0].splitlines() if ":" in line)
    found = {key.strip(): value.strip() for key, value in pairs.items()}
    return ", ".join(found.get(name, "") for name in names)
