"""Arithmetic of a training step, and how fast a device could do it.

Counted are the multiplications and additions (two operations) of matrix products: the linears of the blocks, of the
embedders and of the final layer; self-attention, whose cost is the square of each sample's tokens; cross-attention,
its tokens times its text; modulation once per sample. Padding, norms and activations count nothing. The backward takes
twice the forward.
"""

import time

import torch

from megadit.models.config import DiTConfig
from megadit.models.segments import Segment, SegmentLayout

DATASHEET = {
    ("GB200", torch.bfloat16): 2500e12,
    ("B200", torch.bfloat16): 2250e12,
    ("H100 PCIe", torch.bfloat16): 756e12,
    ("H100", torch.bfloat16): 989e12,
    ("H200", torch.bfloat16): 989e12,
    ("A100", torch.bfloat16): 312e12,
    ("L40S", torch.bfloat16): 362e12,
}
"""Dense operations per second from NVIDIA's data sheets, by a part of the device's name; the first match counts."""


def training_flops(layout: SegmentLayout, model: DiTConfig) -> int:
    """Floating-point operations of forward and backward for the samples of a pack."""
    return 3 * sum(_forward_flops(segment, model) for segment in layout.segments if not segment.is_padding)


def _forward_flops(segment: Segment, model: DiTConfig) -> int:
    S, L = segment.num_tokens, segment.text_slots
    D, A, M = model.hidden_size, model.attention_size, model.mlp_size
    P, E = model.patch_dim, model.crossattn_emb_size
    self_attention = S * 2 * (3 * D * A + A * D) + 4 * S * S * A
    cross_attention = S * 2 * (D * A + A * D) + L * 2 * D * 2 * A + 4 * S * L * A
    mlp = S * 2 * 2 * D * M
    modulation = 2 * D * 9 * D
    outside = S * 2 * 2 * P * D + L * 2 * E * D + 2 * (2 * (256 * D + D * D) + D * 2 * D)
    return model.num_layers * (self_attention + cross_attention + mlp + modulation) + outside


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of one device: the data sheet's where it is known, else measured in a large product."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for (part, of_dtype), flops in DATASHEET.items():
            if part in name and of_dtype == dtype:
                return flops
    return _measured_flops(device, dtype)


def _measured_flops(device: torch.device, dtype: torch.dtype, size: int = 1024, repeats: int = 5) -> float:
    """The best of several square matrix products on this process's threads."""
    a = torch.ones(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(repeats):
        _synchronize(device)
        start = time.perf_counter()
        a @ a
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
