"""Sizes from which a variant is faster than the one after it: measured once for a machine, and kept.

Two libraries compute the same up to rounding, and which of them is faster depends on processor, instruction set and
size. `tune_for_cpu` times both in turns, in some 0.5 s, and keeps what it found in the user's cache. One thread is
timed, as several wait for each other beside a busy process; freed memory is kept before, or page faults would be timed
too. Until then, where nothing can be written, and with MEGADIT_VARIANTS=rule, a rule decides.
"""

import ctypes
import json
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata

import torch

from megadit.models.machine import one_thread, processor
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import cache_folder, held_alone, read_json, write_json

CROSSOVERS: dict[str, "Crossover"] = {}
"""All of them by name."""
NEVER = math.inf
FEWEST_ROUNDS, MOST_ROUNDS, ENOUGH_SECONDS = 3, 15, 0.02
"""Pairs of calls: the fewest, and the most that take less time together."""
MARGIN = 0.1
"""Logarithm of a ratio, summed over sizes, below which the rule stays: noise would change last bits."""
INSTRUCTIONS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
"""Environment variables that keep the libraries from using all that a processor has."""

Candidates = Callable[[int], tuple[Callable[[], object], Callable[[], object]]]


class Crossover:
    """The smallest size at which a variant pays: `size`, `NEVER` where it does not."""

    def __init__(self, name: str, sizes: tuple[int, ...], candidates: Candidates, rule: Callable[[], float]) -> None:
        """
        Args:
            name: its name in `CROSSOVERS` and in the cache.
            sizes: those that are timed, ascending.
            candidates: size -> (calls the variant, calls what is used instead).
            rule: the size where nothing was measured.
        """
        self.name, self._sizes, self._candidates, self._rule = name, sizes, candidates, rule
        self.size = rule()
        CROSSOVERS[name] = self

    def measure(self) -> float:
        """The size that loses least in all that were timed; the rule's, unless it loses noticeably more."""
        ratios = {size: _ratio(*self._candidates(size)) for size in self._sizes}

        def cost(crossover: float) -> float:
            return sum(math.log(ratio) for size, ratio in ratios.items() if size >= crossover)

        rule, best = self._rule(), min((*self._sizes, NEVER), key=cost)
        return best if cost(rule) - cost(best) > MARGIN else rule

    def use(self, size: float | None) -> None:
        """Sets `size`; None: by the rule."""
        self.size = self._rule() if size is None else size


def tune_for_cpu() -> None:
    """Keeps freed memory, and sets all sizes for this processor and its instructions, as the first process measured."""
    keep_freed_memory()
    if os.environ.get("MEGADIT_VARIANTS") == "rule":
        return
    path, machine = cache_folder() / "variants.json", _machine()
    known = _read(path, machine)
    if known is None:
        with suppress(UserError, OSError), held_alone(path.with_suffix(".lock")):
            known = _read(path, machine) or _measure(path, machine)
    for name, crossover in CROSSOVERS.items():
        crossover.use((known or {}).get(name))


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # of glibc's malloc.h
_MIB = 2**20


def keep_freed_memory() -> None:
    """Stops glibc from handing the memory of freed tensors back to the kernel, up to tensors of 32 MiB.

    By default every step of training or sampling faults in the same pages again, which takes up to a fifth of a small
    network's time. The process stays as large as its largest step. Other C libraries, and settings of MALLOC_*
    environment variables, are left unchanged.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt(_M_MMAP_THRESHOLD, 32 * _MIB)  # the most it takes
    mallopt(_M_TRIM_THRESHOLD, 1024 * _MIB)
    mallopt(_M_TOP_PAD, 64 * _MIB)


def _measure(path: os.PathLike, machine: str) -> dict[str, float]:
    """Measure all sizes, and keep them; the caller's random numbers stay as they were."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), one_thread():
        found = {name: crossover.measure() for name, crossover in CROSSOVERS.items()}
    write_json(path, _read_all(path) | {machine: found})
    return found


def describe_crossovers() -> dict[str, str]:
    """Name -> from which size on, in words."""
    return {
        name: "never" if one.size == NEVER else f"from {one.size / 2**20:g} Mi on" for name, one in CROSSOVERS.items()
    }


def _machine() -> str:
    held = {name: os.environ[name] for name in INSTRUCTIONS if name in os.environ}
    versions = torch.__version__, metadata.version("megadit")  # both sides of a race are code of one of them
    return json.dumps((processor(), torch.backends.cpu.get_cpu_capability(), held, *versions))


def _read_all(path: os.PathLike) -> dict:
    with suppress(UserError):
        found = read_json(path, is_finite=False)
        return found if isinstance(found, dict) else {}
    return {}


def _read(path: os.PathLike, machine: str) -> dict[str, float] | None:
    """Sizes in the cache for this machine; None unless all are there."""
    found = _read_all(path).get(machine)
    is_whole = isinstance(found, dict) and found.keys() == CROSSOVERS.keys()
    return found if is_whole and all(type(size) in (int, float) and size > 0 for size in found.values()) else None


def _ratio(ours: Callable[[], object], theirs: Callable[[], object]) -> float:
    """Processor time of ours / theirs, the least of each, in turns: neighbours and changes of clock slow both."""
    ours(), theirs()
    pairs: list[tuple[float, float]] = []
    while len(pairs) < FEWEST_ROUNDS or (len(pairs) < MOST_ROUNDS and sum(map(sum, pairs)) < ENOUGH_SECONDS):
        pairs.append((_seconds(ours), _seconds(theirs)))
    return min(ours for ours, _ in pairs) / min(theirs for _, theirs in pairs)


def _seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start
