"""Tasks timed in turns, and fractions of computing time by kind of operation."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from megadit.models.shared.progress import Progress

Key, Value = TypeVar("Key"), TypeVar("Value")

OPERATIONS = (
    ("attention", ("scaled_dot_product", "flash", "fmha", "varlen")),
    ("communication", ("nccl", "gloo", "c10d")),
    ("matrix products", ("gemm", "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn", "nvjet")),
    ("convolutions", ("conv",)),
    ("update and averages", ("adam", "_foreach_", "multi_tensor", "lerp")),
    ("copies and casts", ("copy", "memcpy", "memset", "aten::cat", "catarray", "aten::fill_", "aten::zero_")),
)
"""Kind -> substrings of names of operations and kernels; the first match counts, others are `elementwise`."""
ELEMENTWISE = "elementwise"


def in_turns(
    tasks: Mapping[Key, Callable[[], object]], rounds: int, timed: Callable[[Callable[[], object]], Value], what: str
) -> dict[Key, list[Value]]:
    """Results of `timed` for each task, `rounds` times in turns, so that a slowdown of the machine affects all; a first
    round prepares and does not count. `what` is said beside the progress."""
    found: dict[Key, list[Value]] = {key: [] for key in tasks}
    with Progress((rounds + 1) * len(tasks), what) as bar:
        for turn in range(rounds + 1):
            for key, task in tasks.items():
                value = timed(task)
                if turn:
                    found[key].append(value)
                bar.advance()
    return found


def watch(function: Callable[[], Any], device: torch.device, trace: str | None = None) -> dict[str, float]:
    """Runs `function` once; returns each kind of operation's fraction of the device's computing time.

    `trace` is a file for a Chrome trace.
    """
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu) as profiler:
        function()
    if trace is not None:
        profiler.export_chrome_trace(trace)
    seconds: defaultdict[str, float] = defaultdict(float)
    for event in profiler.events():
        seconds[kind_of(event.name)] += _own_time(event, on_gpu)
    return shares(seconds)


def shares(seconds: dict[str, float]) -> dict[str, float]:
    """Fractions of the sum, the largest first."""
    total = sum(seconds.values())
    found = {name: value / total for name, value in seconds.items() if value}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def kind_of(name: str) -> str:
    """The kind of an operation or kernel of this name, in `OPERATIONS`."""
    name = name.lower()
    return next((kind for kind, parts in OPERATIONS if any(part in name for part in parts)), ELEMENTWISE)


def _own_time(event: FunctionEvent, on_gpu: bool) -> float:
    """Time of an event without its children, on the device that computes; 0 for events of other devices."""
    is_kernel = event.device_type == torch.autograd.DeviceType.CUDA
    if is_kernel != on_gpu or getattr(event, "is_user_annotation", False):
        return 0.0
    return event.self_device_time_total if on_gpu else event.self_cpu_time_total
