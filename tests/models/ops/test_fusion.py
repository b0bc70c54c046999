"""What a GPU compiles of the ops: each chain of operations one graph, for all sizes."""

import torch

from megadit.models.ops import gated_residual, modulated_norm, qk_norm_rope
from megadit.models.segments import RowsByToken

ROWS = [torch.tensor([0, 0, 1, 2, 2, 2]), torch.tensor([1, 0, 0])]


def numbers(row_S, *, is_rms):
    """Results and gradients of the three ops whose operations are fused."""
    torch.manual_seed(0)
    rows = RowsByToken(row_S)
    x, y = (torch.randn(len(row_S), 1, 24, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    shift, scale, gate = (torch.randn(3, 24, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    weight = torch.randn(24, dtype=torch.bfloat16) if is_rms else None
    cos, sin = torch.randn(2, len(row_S), 1, 1, 12, dtype=torch.bfloat16)
    heads = modulated_norm.by_token(x, shift, scale, 1e-6, rows, weight).unflatten(-1, (2, 12))
    turned = qk_norm_rope.qk_norm_rope(heads, torch.ones(12), cos, sin, 1e-6)
    out = gated_residual.by_token(x, gate, turned.flatten(2), rows)
    return [out, *torch.autograd.grad(out.square().sum(), (x, shift, scale, gate))]


def test_chains_compile_whole_and_stay_what_they_are(monkeypatch):
    """As on a GPU; the compiled operations still run one by one."""
    compiled, plain = {}, [numbers(row_S, is_rms=is_rms) for row_S in ROWS for is_rms in (False, True)]

    def as_on_a_gpu(function, *inputs):
        if function not in compiled:
            compiled[function] = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
        return compiled[function](*inputs)

    for module in (modulated_norm, gated_residual, qk_norm_rope):
        monkeypatch.setattr(module, "fused", as_on_a_gpu)
    found = [numbers(row_S, is_rms=is_rms) for row_S in ROWS for is_rms in (False, True)]
    for ours, theirs in zip(found, plain, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert len(compiled) == 6
