"""Attention forward and backward at the size of the 7B network: which kernel is fastest for which packs, how far it is
from float32, and whether two backwards agree to the bit.

cuDNN with cumulative lengths is measured and never chosen: torch (to 2.13) has it as a private operation, for its own
nested tensors. `varlen_attn` has it switched off, and gives its backward arguments of another order: switched on, it
would fail. Where the row here is the fastest, a variant is due.

Where FlashAttention-3 is installed, which runs then use, rows that end in FA3 are measured with it, others without.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from einops import rearrange
from rows import DEVICE, HAS_GPU, attempt, normal, seconds, size, synchronize, tell
from torch.nn.attention import SDPBackend, sdpa_kernel

from megadit.models.megatron.parallelism.block_attention import attend_block, attend_block_backward
from megadit.models.ops.attention import attend_by_length_group, attend_varlen, switch_to_flash_attention_3
from megadit.models.ops.reference import attention
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment

TOKENS, HEADS, WIDTH = size(8192, 256), size(24, 2), size(128, 16)
EIGHTH = TOKENS // 8
PACKS = {
    "1 sample": [TOKENS],
    "8 samples": [EIGHTH] * 8,
    "9 mixed": [EIGHTH // 4] * 4 + [EIGHTH] * 3 + [2 * EIGHTH, TOKENS - 6 * EIGHTH],
}


def attend_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackLayout, cross: bool) -> torch.Tensor:
    """All segments in one call of cuDNN's kernel, [S, 1, N*K]: q [S, 1, N, K], k and v [L, 1, N, K]."""
    tensors = layout.on(q.device)
    bounds_k, longest_k = (tensors.text_bounds, layout.longest_text) if cross else (tensors.bounds, layout.longest)
    sizes = (tensors.bounds, bounds_k, layout.longest, longest_k)
    keeps_sums, dropout, is_causal, keeps_mask = True, 0.0, False, False
    out_SNK, *_ = torch.ops.aten._cudnn_attention_forward(
        q[:, 0], k[:, 0], v[:, 0], None, *sizes, keeps_sums, dropout, is_causal, keeps_mask
    )
    return rearrange(out_SNK, "S N K -> S 1 (N K)")


KERNELS = {
    "by groups": (attend_by_length_group, nullcontext),
    "by groups, flash": (attend_by_length_group, partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)),
    "by groups, cuDNN": (attend_by_length_group, partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)),
    "varlen": (attend_varlen, nullcontext),
    "varlen, cuDNN": (attend_cudnn, nullcontext),
}
"""Kernel -> how it is called, and what within."""


def measure(
    name: str, layout: PackLayout, cross: bool, compute: Callable, within: Callable[[], AbstractContextManager]
) -> None:
    keys = layout.text_capacity if cross else layout.capacity
    q, k, v = (normal(n, 1, HEADS, WIDTH).requires_grad_() for n in (TOKENS, keys, keys))
    grad = normal(TOKENS, 1, HEADS * WIDTH)

    def forward() -> torch.Tensor:
        with within():
            return compute(q, k, v, layout, cross)

    def both() -> tuple[torch.Tensor, ...]:
        with within():
            return torch.autograd.grad(forward(), (q, k, v), grad)

    whole, ahead = seconds(both), seconds(forward)
    pairs = sum(n * (layout.text_places[i] if cross else n) for i, n in enumerate(layout.lengths))
    flops = 4 * pairs * HEADS * WIDTH
    same = all(torch.equal(a, b) for a, b in zip(both(), both(), strict=True))
    exact = attend_by_length_group(*(x.detach().float() for x in (q, k, v)), layout, cross)
    apart = ((forward().float() - exact).norm() / exact.norm()).item()
    chosen = attention.choose(q, k, v, layout, cross).compute is compute and within is nullcontext
    rates = [flops / ahead / 1e12, 3 * flops / whole / 1e12]
    found = f"forward {rates[0]:,.0f} TFLOP/s, with backward {rates[1]:,.0f}, {whole * 1e3:.2f} ms"
    found += f", error {apart:.1e}, backwards {'the same' if same else 'differ'}{', the one chosen' if chosen else ''}"
    tell(name, found, failed=apart > 2e-2, ms=whole * 1e3, tflops=rates[1], error=apart)


def measure_block(name: str) -> None:
    """Attention of a rank's tokens to those of another, as around a ring of eight."""
    q, k, v, grad = (normal(1, EIGHTH, HEADS, WIDTH) for _ in range(4))
    out, lse = attend_block(q, k, v)
    ahead, back = (
        seconds(function)
        for function in (lambda: attend_block(q, k, v), lambda: attend_block_backward(grad, q, out, lse, k, v))
    )
    exact, _ = attend_block(*(x.float() for x in (q, k, v)))
    apart = ((out.float() - exact).norm() / exact.norm()).item()
    flops = 4 * EIGHTH**2 * HEADS * WIDTH
    rates = [flops / ahead / 1e12, 3 * flops / (ahead + back) / 1e12]
    found = f"forward {rates[0]:,.0f} TFLOP/s, with backward {rates[1]:,.0f}, error {apart:.1e}"
    tell(name, found, failed=apart > 2e-2, ms=(ahead + back) * 1e3, tflops=rates[1], error=apart)


def captioned(num_packs: int) -> list[PackLayout]:
    """Packs of eight samples whose captions have lengths as people write them: normal around 180 words."""
    draws = torch.randn(num_packs, 8, generator=torch.Generator().manual_seed(0)) * 70 + 180
    texts = draws.round().clamp(8, 512).int().tolist()
    capacity = max(map(sum, texts))
    return [
        PackLayout.pack([Segment((1, 1, EIGHTH), n) for n in of], capacity=TOKENS, text_capacity=capacity)
        for of in texts
    ]


def measure_captions(title: str, compute: Callable) -> None:
    """What a pack costs where each has captions of its own: plans of new shapes are part of it."""
    layouts = captioned(size(24, 2))
    q, grad = normal(TOKENS, 1, HEADS, WIDTH).requires_grad_(), normal(TOKENS, 1, HEADS * WIDTH)
    k, v = (normal(layouts[0].text_capacity, 1, HEADS, WIDTH).requires_grad_() for _ in range(2))

    def attend(layout: PackLayout) -> None:
        layout.on(DEVICE)
        torch.autograd.grad(compute(q, k, v, layout, True), (q, k, v), grad)

    attend(layouts[0])
    synchronize()
    start = time.perf_counter()
    for layout in layouts[1:]:
        attend(layout)
    synchronize()
    new = (time.perf_counter() - start) / (len(layouts) - 1)
    known = seconds(lambda: attend(layouts[0]))
    found = f"{new * 1e3:.2f} ms a pack of new lengths, {known * 1e3:.2f} ms a known one"
    tell(title, found, ms=new * 1e3, known_ms=known * 1e3)


def measure_all(kernels: dict[str, tuple[Callable, Callable]], ring: str) -> None:
    """A row for each pack and kernel, and one called `ring` for a block of keys."""
    cases = [(name, lengths, size(512, 32), False) for name, lengths in PACKS.items()]
    cases += [(f"1 sample, {words} words", [TOKENS], words, True) for words in (16, size(512, 32))]
    for name, lengths, words, cross in cases:
        segments = [Segment((1, 1, n), words // len(lengths)) for n in lengths]
        slots = sum(segment.text_places for segment in segments)
        layout = PackLayout.pack(segments, capacity=TOKENS, text_capacity=slots)
        assert layout.on(DEVICE).bounds.device.type == DEVICE.type  # sent before anything is timed
        for kernel, how in kernels.items():
            title = f"{'cross-' if cross else ''}attention, {name}, {kernel}"
            attempt(title, lambda t=title, la=layout, c=cross, h=how: measure(t, la, c, *h))
    attempt(f"attention, {ring}", lambda: measure_block(f"attention, {ring}"))


if __name__ == "__main__":
    torch.manual_seed(0)
    has_flash_attention_3 = HAS_GPU and switch_to_flash_attention_3()
    if has_flash_attention_3:
        torch.nn.attention.restore_flash_attention_impl()
    measure_all(KERNELS if HAS_GPU else {"by groups": KERNELS["by groups"]}, "ring")
    for kernel, compute in (("by groups", attend_by_length_group), ("varlen", attend_varlen)):
        if HAS_GPU or kernel == "by groups":
            title = f"cross-attention, varied captions, {kernel}"
            attempt(title, lambda t=title, c=compute: measure_captions(t, c))
    if has_flash_attention_3:
        torch.nn.attention.activate_flash_attention_impl("FA3")
        measure_all({"varlen, FA3": KERNELS["varlen"]}, "ring, FA3")
