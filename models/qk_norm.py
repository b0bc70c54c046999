"""Per-head RMS normalisation of queries and keys, and their rotation by position, in one step.

Shapes: S tokens, B batch, N heads, K head dim.
"""

import torch
from torch import Tensor, nn

from megadit.models.config import DiTConfig
from megadit.models.embeddings import Rotary
from megadit.models.fusion import fused


class QKNorm(nn.Module):
    """x / rms(x) * weight per head (arXiv 2302.05442, with RMSNorm), turned by each token's angles (arXiv 2104.09864).

    Rotation pairs channel i with i + K/2. Without `qk_layernorm` it only rotates.
    """

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.eps = config.qk_layernorm_epsilon or config.layernorm_epsilon
        self.weight = nn.Parameter(torch.ones(config.dim_per_head)) if config.qk_layernorm else None

    def forward(self, x_SBNK: Tensor, rotary: Rotary | None = None) -> Tensor:
        cos, sin = rotary if rotary is not None else (None, None)
        if self.weight is None and cos is None:
            return x_SBNK
        if x_SBNK.requires_grad and not torch.compiler.is_compiling():
            return _NormRotate.apply(x_SBNK, self.weight, cos, sin, self.eps)
        return fused(_norm_rotate, x_SBNK, self.weight, cos, sin, self.eps)[0]


def _norm_rotate(x, weight, cos, sin, eps):
    """The result, and 1 / rms(x) (None where nothing is normalised).

    Half precision becomes float32 once and is rounded once: operations on a mixture take several times as long on a
    CPU, and the mean of squares would overflow.
    """
    y, rms_inverse = _wide(x), None
    if weight is not None:
        rms_inverse = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
        y = y * rms_inverse * _wide(weight)
    return _rotate(y, cos, sin).to(x.dtype), rms_inverse


def _wide(x: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x if x.dtype == wide else x.contiguous().to(wide)  # both at once takes several times as long


def _rotate(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    if cos is None:
        return x
    return torch.addcmul(x * cos.to(x.dtype), x.roll(x.shape[-1] // 2, dims=-1), sin.to(x.dtype))


def _norm_rotate_backward(grad, x, weight, cos, sin, rms_inverse):
    """Gradients of x and weight."""
    grad = _rotate(_wide(grad), cos, None if sin is None else -sin)
    if weight is None:
        return grad.to(x.dtype), None
    normed = _wide(x) * rms_inverse
    product = grad * normed
    grad_weight = product.sum((0, 1, 2)).to(weight.dtype)
    # d(x / rms) = (g - y mean(g y)) / rms, y = x / rms, g = grad * weight
    projection = (product @ _wide(weight) / x.shape[-1])[..., None]
    grad_x = (grad * _wide(weight)).addcmul_(normed, projection, value=-1).mul_(rms_inverse)
    return grad_x.to(x.dtype), grad_weight


class _NormRotate(torch.autograd.Function):
    """Keeps its input, which the fused projection holds anyway, rather than the five values between."""

    @staticmethod
    def forward(ctx, x, weight, cos, sin, eps):
        y, rms_inverse = fused(_norm_rotate, x, weight, cos, sin, eps)
        ctx.save_for_backward(x, weight, cos, sin, rms_inverse)
        return y

    @staticmethod
    def backward(ctx, grad):
        grad_x, grad_weight = fused(_norm_rotate_backward, grad, *ctx.saved_tensors)
        return grad_x, grad_weight, None, None, None
