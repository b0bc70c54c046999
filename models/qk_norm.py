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
    """The result, and 1 / rms(x) in float32 (None where nothing is normalised)."""
    rms_inverse = None
    if weight is not None:
        # float32, as the mean of squares overflows half precision
        rms_inverse = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        x = (x * rms_inverse).to(x.dtype) * weight
    return _rotate(x, cos, sin), rms_inverse


def _rotate(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    if cos is None:
        return x
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def _norm_rotate_backward(grad, x, weight, cos, sin, rms_inverse):
    """Gradients of x and weight."""
    grad = _rotate(grad, cos, None if sin is None else -sin)
    if weight is None:
        return grad, None
    normed = x * rms_inverse
    grad_weight = (grad * normed).sum((0, 1, 2), dtype=torch.float32).to(weight.dtype)
    grad = grad * weight
    # d(x / rms) = (g - y mean(g y)) / rms, y = x / rms
    projection = (grad * normed).mean(-1, keepdim=True, dtype=torch.float32)
    return ((grad - normed * projection) * rms_inverse).to(x.dtype), grad_weight


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
