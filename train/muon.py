"""Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon), for matrices that may be split over ranks.

The update is that of `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, computed on whole matrices: where
tensor-parallel ranks hold parts of one, each gathers it, orthogonalises it and keeps its own part.
"""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megadit.models.megatron.mcore_layers import split_dim

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic that grows small singular values fastest
_STEPS = 5
_EPS = 1e-7


def orthogonalize(matrix: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly: singular values of about 1 (0.7 to 1.2), in bfloat16.

    Five steps of the quintic Newton-Schulz iteration X <- a X + (b A + c A^2) X, A = X X^T.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    X = (matrix.mT if is_tall else matrix).bfloat16()
    X = X / X.norm().clamp(min=_EPS)
    for _ in range(_STEPS):
        A = X @ X.mT
        X = torch.addmm(X, torch.addmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.mT if is_tall else X


class Muon(torch.optim.Optimizer):
    """SGD with Nesterov momentum whose updates are orthogonalised, at AdamW's scale (arXiv 2502.16982, eq. 4).

    Args:
        params: groups of matrices; those split over `tensor_group` say so in Megatron's way.
    """

    def __init__(
        self,
        params: Iterable[dict],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        tensor_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.tensor_group = tensor_group

    @torch.no_grad()
    def step(self, closure=None) -> None:
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
        whole = self._gather(parameter.grad.lerp(momentum, group["momentum"]), parameter)
        rms_of_adamw = 0.2 * math.sqrt(max(whole.shape))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(self._own_part(orthogonalize(whole), parameter), alpha=-group["lr"] * rms_of_adamw)

    def _gather(self, part: Tensor, parameter: Tensor) -> Tensor:
        dim = split_dim(parameter)
        if dim is None or self.tensor_group is None or self.tensor_group.size() == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.tensor_group.size())]
        dist.all_gather(parts, part.contiguous(), group=self.tensor_group)
        return torch.cat(parts, dim)

    def _own_part(self, whole: Tensor, parameter: Tensor) -> Tensor:
        dim = split_dim(parameter)
        if whole.shape == parameter.shape:
            return whole
        return whole.narrow(dim, self.tensor_group.rank() * parameter.shape[dim], parameter.shape[dim])
