"""Packed attention in one flash-attention call (bfloat16, GPU) against one dense attention per run (float32)."""

from importlib.util import find_spec

import pytest
import torch

from megadit.models.attention import attend_runs, attend_varlen, packed_kernel
from megadit.models.segments import Segment, SegmentLayout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("torch.nn.attention.varlen") is None, reason="this torch has no varlen_attn"),
]

NUM_HEADS, HEAD_DIM = 3, 72
# Two packs: one without spare text slots (its padding has none to attend to), one without spare video tokens.
LAYOUT = SegmentLayout.concatenate(
    [
        SegmentLayout.pack(
            [Segment((3, 8, 8), 20), Segment((3, 8, 8), 0), Segment((1, 5, 7), 9)], capacity=512, text_capacity=30
        ),
        SegmentLayout.pack([Segment((2, 16, 16), 33)], capacity=512, text_capacity=40),
    ]
)


def rounded_inputs(cross: bool) -> tuple[torch.Tensor, ...]:
    """q, k, v and the gradient of the output, float32 but representable in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    num_keys = LAYOUT.text_capacity if cross else LAYOUT.capacity
    shapes = [(LAYOUT.capacity, 1, NUM_HEADS, HEAD_DIM), *[(num_keys, 1, NUM_HEADS, HEAD_DIM)] * 2]
    shapes += [(LAYOUT.capacity, 1, NUM_HEADS * HEAD_DIM)]
    q, k, v, grad = (torch.randn(shape, generator=generator).bfloat16().float().cuda() for shape in shapes)
    return q, k, v, grad * LAYOUT.token_mask_S.cuda()[:, None, None]  # no loss looks at padding


def forward_backward(kernel, inputs: tuple[torch.Tensor, ...], dtype: torch.dtype, cross: bool) -> list[torch.Tensor]:
    """The output where there are samples, and the gradients of q, k and v."""
    *heads, grad = (x.to(dtype, copy=True) for x in inputs)
    for x in heads:
        x.requires_grad_()
    out = kernel(*heads, LAYOUT, cross, lambda x: x)
    gradients = torch.autograd.grad(out, heads, grad)
    return [x.detach().float() for x in (out[LAYOUT.token_mask_S.to(out.device)], *gradients)]


def largest_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("cross", [False, True])
def test_one_varlen_call_equals_the_runs_one_by_one(cross):
    inputs = rounded_inputs(cross)
    ours = forward_backward(attend_varlen, inputs, torch.bfloat16, cross)
    theirs = forward_backward(attend_runs, inputs, torch.float32, cross)
    # bfloat16 rounds by up to 2^-9 = 0.2 %: the probabilities, their gradients and each result are rounded once
    assert largest_difference(ours, theirs) <= 0.01
    reversed_values = (*inputs[:2], inputs[2].flip(0), inputs[3])
    assert largest_difference(forward_backward(attend_varlen, reversed_values, torch.bfloat16, cross), theirs) > 0.5


def test_the_kernel_is_chosen_by_precision_and_head_width():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("flash attention needs an Ampere GPU or newer")
    q, *_ = rounded_inputs(cross=False)
    assert packed_kernel(q.bfloat16()) is attend_varlen
    assert packed_kernel(q) is attend_runs
    assert packed_kernel(q[..., :12].bfloat16()) is attend_runs
