"""Linears in eight bits by torch at the shapes of the 7B network, with all that finds scales and rounds: how fast they
are beside products of bfloat16 (products.py), and how far from the same roundings on the CPU."""

import torch
from products import SHAPES, TOKENS, told
from rows import DEVICE, DTYPE, attempt, normal, seconds, tell

from megadit.models.megatron.extensions import has_eight_bit_products
from megadit.models.megatron.linears.fp8 import E4M3, OF_GRADIENTS, Fp8Linear, codes_of, scale_of, turned_codes_of
from megadit.models.megatron.linears.shares import Share

BOUND = 1e-2
"""Of the forward, whose sums a Hopper GPU may keep in fewer bits than float32 has; each result is rounded by 2^-9."""
COMPARED = 64
"""Tokens whose results are compared."""


def rounded(x: torch.Tensor) -> torch.Tensor:
    scale = scale_of(x, E4M3)
    return codes_of(x, scale, E4M3).double().cpu() * scale.step.double().cpu()


def measure(name: str, inputs: int, outputs: int) -> None:
    flops = 2 * TOKENS * inputs * outputs
    layer = Fp8Linear(Share(outputs, inputs), OF_GRADIENTS["hybrid"]).to(DEVICE, DTYPE)
    layer.weight.data.copy_(normal(outputs, inputs))
    x, grad = normal(TOKENS, inputs).requires_grad_(), normal(TOKENS, outputs)
    exact = rounded(x.detach())[:COMPARED] @ rounded(layer.weight.detach()).T
    apart = ((layer(x)[:COMPARED].double().cpu() - exact).norm() / exact.norm()).item()
    tell(f"{name}: error", f"{apart:.1e}", failed=apart > BOUND, error=apart)
    of_grad = scale_of(grad, OF_GRADIENTS["hybrid"])
    plain, turned = turned_codes_of(grad, of_grad, OF_GRADIENTS["hybrid"], both=True)
    expected = (grad.cpu() * of_grad.factor.cpu()).to(plain.dtype).view(torch.uint8)
    same = torch.equal(plain.cpu().view(torch.uint8), expected) and torch.equal(
        turned.view(torch.uint8).T, plain.view(torch.uint8)
    )
    tell(f"{name}: codes, turned codes", "those of the CPU" if same else "others than the CPU's", failed=not same)
    told(f"{name}: x W^T", flops, seconds(lambda: layer(x)))
    told(f"{name}: with gradients", 3 * flops, seconds(lambda: torch.autograd.grad(layer(x), (x, layer.weight), grad)))


if __name__ == "__main__":
    if not has_eight_bit_products():
        tell("products in eight bits", "not measured: this torch, or this GPU, has none")
    for name, sizes in SHAPES.items() if has_eight_bit_products() else ():
        attempt(name, lambda name=name, sizes=sizes: measure(name, *sizes))
