"""Linear layers for sampling on a CPU: float32 products by oneDNN, with the activation behind them in the same pass.

torch leaves float32 products to MKL, which reaches less than half of oneDNN's rate on some processors (AMD's with
AVX-512) and about the same on others.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEWEST_ROWS = 4
"""With fewer tokens a product only reads its matrix, which MKL does as well."""
_BY_ONEDNN = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
"""What torch's own compiler calls on CPUs: (x, weight, bias, activation, its numbers, its form)."""


class Linear(nn.Linear):
    """x W^T + b, as `torch.nn.Linear` has it."""

    def forward(self, x: Tensor) -> Tensor:
        return self._by_onednn(x, "none", "") if _suits_onednn(x) else F.linear(x, self.weight, self.bias)

    def _by_onednn(self, x: Tensor, activation: str, form: str) -> Tensor:
        return _BY_ONEDNN(x, self.weight, self.bias, activation, [], form)


def linear_gelu(linear: nn.Module, x: Tensor, approximate: str) -> Tensor | None:
    """GELU(linear(x)) in one pass; None where that is not to be had. `approximate`: as in `F.gelu`."""
    is_watched = linear._forward_pre_hooks or linear._forward_hooks  # and must be called, and give its own output
    if type(linear) is Linear and not is_watched and _suits_onednn(x):
        return linear._by_onednn(x, "gelu", approximate)
    return None


def _suits_onednn(x: Tensor) -> bool:
    """Gradients need torch's own product; a compiler chooses by itself; half precision is oneDNN's anyway."""
    return (
        not torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and x.is_cpu
        and x.dtype == torch.float32
        and _BY_ONEDNN is not None
        and x.numel() >= FEWEST_ROWS * x.shape[-1]
        and torch.backends.mkldnn.matmul.fp32_precision != "bf16"  # torch takes oneDNN's reduced products by itself
    )
