"""What the measurements of `make gpu-check` share: rows that are told as they come, and how something is timed.

Without a GPU they run too, in small: that shows that they run, not how fast anything is.
"""

import json
import statistics
import time
from collections.abc import Callable

import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPE = torch.bfloat16


def tell(name: str, found: str, *, failed: bool = False, **figures: float | str | None) -> None:
    """One row of the table; `figures` go into the report beside it."""
    print(json.dumps({"name": name, "found": found, "failed": failed, "figures": figures}), flush=True)


def size(of_gpu: int, small: int) -> int:
    return of_gpu if HAS_GPU else small


def seconds(function: Callable[[], object], *, at_most: float = 1.0) -> float:
    """The median time of a call, after one to warm up: repeated for `at_most` seconds, three times at least."""
    function()
    taken, begin = [], time.perf_counter()
    while len(taken) < 3 or (time.perf_counter() - begin < at_most and len(taken) < 50):
        synchronize()
        start = time.perf_counter()
        function()
        synchronize()
        taken.append(time.perf_counter() - start)
        if not HAS_GPU and len(taken) == 3:
            break
    return statistics.median(taken)


def synchronize() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def normal(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def attempt(name: str, function: Callable[[], None]) -> None:
    """Tells of a failure as a row; the measurements after it go on."""
    try:
        function()
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        tell(name, f"{type(error).__name__}: {reason}", failed=True)
