"""Each fused chain of a block: how fast it moves memory, how far it is from float64, how long it takes to compile."""

import time

import torch
from rows import DEVICE, DTYPE, HAS_GPU, attempt, normal, seconds, size, synchronize, tell

from megadit.models.configs.config import DiTConfig
from megadit.models.networks.embeddings import rotary_table
from megadit.models.ops import fusion
from megadit.models.ops.reference import gated_residual, modulated_norm, qk_norm_rope
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment

TOKENS, WIDTH, HEADS = size(8192, 256), size(3072, 64), size(24, 2)
BOUND = 2e-2
"""Error of a whole tensor, relative: some roundings of bfloat16."""


def measure(name: str, op, inputs: tuple, passes: tuple[float, float]) -> None:
    """`passes`: how often each number of [S, D] must go through memory, forward and backward."""
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    start = time.perf_counter()
    out = op(*inputs)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, grad)
    synchronize()
    first = time.perf_counter() - start
    wide = [x.detach().double().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in inputs]
    exact = op.reference.compute(*wide)
    gradients = torch.autograd.grad(
        exact, [x for x in wide if isinstance(x, torch.Tensor) and x.requires_grad], grad.double()
    )
    pairs = zip((out, *found), (exact, *gradients), strict=True)
    apart = max(((a.double() - b).norm() / b.norm().clamp(min=1e-30)).item() for a, b in pairs)
    ahead, whole = seconds(lambda: op(*inputs)), seconds(lambda: torch.autograd.grad(op(*inputs), leaves, grad))
    rates = [count * out.nbytes / taken / 1e9 for count, taken in zip(passes, (ahead, whole - ahead), strict=True)]
    told = f"forward {rates[0]:,.0f} GB/s, backward {rates[1]:,.0f} of what must be moved, {whole * 1e3:.2f} ms"
    told += f", error {apart:.1e}, first call {first:.1f} s"
    tell(name, told, failed=apart > BOUND, ms=whole * 1e3, forward=rates[0], backward=rates[1], error=apart)


def rows() -> None:
    segments = [Segment((1, 1, TOKENS // 8), 1)] * 7
    layout = PackLayout.pack(segments, capacity=TOKENS, text_capacity=16)
    x, y = (normal(TOKENS, 1, WIDTH).requires_grad_() for _ in range(2))
    shift, scale, gate = (normal(layout.num_segments, WIDTH).requires_grad_() for _ in range(3))
    measure("norm and modulation", modulated_norm, (x, shift, scale, 1e-6, layout.rows), (2, 3))
    measure("gate", gated_residual, (x, gate, y, layout.rows), (3, 3))


def warps() -> None:
    """The backward of a norm by Triton's kernel, with more warps to a program than it takes by itself, and fewer."""
    from megadit.models.ops import row_sums

    layout = PackLayout.pack([Segment((1, 1, TOKENS // 8), 1)] * 7, capacity=TOKENS, text_capacity=16)
    x, grad = normal(TOKENS, 1, WIDTH), normal(TOKENS, 1, WIDTH)
    factor, mean, root = normal(layout.num_segments, WIDTH), *(normal(TOKENS, 1, 1).float() for _ in range(2))
    rows = layout.rows.of_token(DEVICE), layout.rows.starts_of_runs(DEVICE)
    chosen = row_sums.num_warps
    try:
        for count in (4, 8, 16, 32):
            row_sums.num_warps = lambda block, count=count: count
            taken = seconds(lambda: row_sums.norm_backward(grad, x, factor, mean, root, *rows, False))
            rate = 3 * x.nbytes / taken / 1e9
            mark = ", the one chosen" if chosen(4096) == count else ""
            tell(f"norm backward, {count} warps", f"{taken * 1e3:.3f} ms, {rate:,.0f} GB/s{mark}", ms=taken * 1e3)
    finally:
        row_sums.num_warps = chosen


def heads() -> None:
    config = DiTConfig(hidden_size=WIDTH, num_attention_heads=HEADS)
    positions = torch.stack([torch.arange(TOKENS, device=DEVICE)] * 3, dim=-1) % 32
    rotary = rotary_table(positions, config, DTYPE)
    fused_projection = normal(TOKENS, 1, HEADS, 3, WIDTH // HEADS)
    for index, name in enumerate(("queries", "keys")):
        x = fused_projection[:, :, :, index].detach().requires_grad_()
        weight = normal(WIDTH // HEADS).requires_grad_()
        measure(f"norm and rotation of {name}", qk_norm_rope, (x, weight, *rotary, 1e-6), (2, 3))


if __name__ == "__main__":
    torch.manual_seed(0)
    for name, of in {"chains of rows": rows, "chains of heads": heads}.items():
        attempt(name, of)
    if HAS_GPU:
        attempt("norm backward", warps)
        from torch._dynamo.utils import counters

        tell(
            "compiled",
            f"{counters['stats']['unique_graphs']} graphs, {len(fusion._AS_WRITTEN)} chains could not be",
            failed=bool(fusion._AS_WRITTEN),
        )
