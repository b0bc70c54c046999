"""Bytes that a block keeps for its backward, and the peak of a whole step, as the allocator counts them.

A block's are the difference of a network of two layers and one of one: what belongs to a pack or to the ends of a
network drops out. Packs are large enough that cheap values are computed again.
"""

import gc
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from golden_parts.digests import digest_tensor, digest_tensors
from golden_parts.names import make_config, make_pack
from golden_parts.networks import DTYPES, LOW_RANK, MOVIEGEN, normal, random_network

COMMON = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "in_channels": 4,
    "patch_spatial": 1,
    "crossattn_emb_size": 32,
}
LARGEST = {"learned_positions": (4, 32, 32)}
NETWORKS: dict[str, dict[str, Any]] = {
    "megadit": {},
    "cosmos": {**LOW_RANK, **LARGEST, "family": "cosmos"},
    "dit_of_classes": {
        "family": "dit",
        "position_embedding": "sincos",
        "qk_layernorm": False,
        "num_classes": 600,
        "crossattn_emb_size": 2,
    },
    "moviegen": MOVIEGEN | LARGEST,
    "st_dit": {**LOW_RANK, **LARGEST, "family": "st_dit"},
    "token_choice": {"experts": {"num_experts": 4, "top_k": 2, "shared_ffn_hidden_size": 256}},
    "expert_choice": {"experts": {"num_experts": 4, "routing": "expert_choice"}},
}
SEGMENTS = [((4, 16, 16), 12), ((4, 16, 16), 0), ((1, 32, 32), 20), ((2, 16, 16), 7), ((1, 16, 16), 3)]
CAPACITY, TEXT_CAPACITY = 4096, 64


def record(work: Path, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
    torch.set_num_threads(1)
    for name in filter(is_wanted, NETWORKS):
        for dtype_name, dtype in DTYPES.items():
            one, two = (random_network(make_config(**COMMON | NETWORKS[name], num_layers=n)).to(dtype) for n in (1, 2))
            measure(one)  # whatever is made once is made here
            kept_by_one, _ = measure(one)
            kept_by_two, peak = measure(two)
            yield f"{name}/{dtype_name}/block", kept_by_two - kept_by_one
            yield f"{name}/{dtype_name}/peak", peak
            yield from digest_tensors(gradients(two), f"{name}/{dtype_name}/gradients/")
            yield f"{name}/{dtype_name}/output", digest_tensor(step_inputs(two)())


def gradients(dit: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in dit.named_parameters() if parameter.grad is not None}


def step_inputs(dit: nn.Module) -> Callable[[], Tensor]:
    """The forward of one pack, with everything ready that comes from outside."""
    layout = make_pack(SEGMENTS, capacity=CAPACITY, text_capacity=TEXT_CAPACITY)
    num_rows, config = len(SEGMENTS) + 1, dit.config
    tokens_S1P = normal(CAPACITY, 1, config.patch_dim).to(dit.dtype)
    text_L1E = normal(TEXT_CAPACITY, 1, config.crossattn_emb_size, seed=2).to(dit.dtype)
    if config.num_classes is not None:
        text_L1E = text_L1E.abs().round()
    c_noise_G, fps_G = normal(num_rows, seed=4), torch.full((num_rows,), 24.0)
    return lambda: dit.forward_packed(tokens_S1P, c_noise_G, text_L1E, fps_G, layout)


def measure(dit: nn.Module) -> tuple[int, int]:
    """(bytes more after the forward than before, most bytes more at any time of forward and backward)."""
    forward = step_inputs(dit)
    dit.zero_grad()
    gc.collect()
    gc.disable()
    try:
        with memory() as forward_profile:
            out = forward()
        with memory() as backward_profile:
            out.backward(torch.ones_like(out))
    finally:
        gc.enable()
    sizes: dict[int, int] = {}
    in_forward, in_backward = changes(forward_profile, sizes), changes(backward_profile, sizes)
    return sum(in_forward), max(accumulate([*in_forward, *in_backward]))


def memory() -> profile:
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def changes(profiled: profile, sizes: dict[int, int]) -> list[int]:
    """What each allocation added, and each release took, in order; `sizes` of the blocks that live is kept up to date.

    The release of a block that is not among them is left out: it was there before.
    """
    found = []
    for event in sorted(_allocations(profiled), key=lambda event: event.start_time_ns):
        pointer, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        if size > 0:
            sizes[pointer] = size
            found.append(size)
        else:
            found.append(-sizes.pop(pointer, 0))
    return found


def _allocations(profiled: profile) -> Iterator[Any]:
    events = list(profiled.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events.extend(event.children)
        if event.tag == _EventType.Allocation:
            yield event
