"""Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon) for matrices that may be sharded over ranks.

The update is that of `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, computed on whole matrices: where
tensor-parallel ranks hold shards of one, each gathers it, orthogonalises it and keeps its own shard.
"""

import math
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megadit.models.machine import computing_dtype
from megadit.models.megatron.shards import full_shape, shard, splits

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic that increases small singular values fastest
_STEPS = 5
_EPS = 1e-7
_ELEMENTS_AT_ONCE = 2**26
"""Maximum elements of matrices of one shape that are orthogonalised together, which bounds memory."""


def orthogonalize(matrices: Tensor) -> Tensor:
    """Approximately nearest semi-orthogonal matrices (singular values of 0.7 to 1.2), [n, a, b], in bfloat16, or
    float32 on CPUs without bf16 products.

    Five steps of the quintic Newton-Schulz iteration X <- a X + (b A + c A^2) X, A = X X^T.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    X = (matrices.mT if is_tall else matrices).to(computing_dtype(matrices.device, torch.bfloat16))
    X = X / X.norm(dim=(1, 2), keepdim=True).clamp(min=_EPS)
    for _ in range(_STEPS):
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.mT if is_tall else X


class Muon(torch.optim.Optimizer):
    """SGD with Nesterov momentum whose updates are orthogonalised, at AdamW's scale (arXiv 2502.16982, eq. 4).

    Args:
        params: groups of matrices; those sharded over `tensor_group` have Megatron's attributes.
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
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            updates = self._updates(parameters, group["momentum"])
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, updates, alpha=-group["lr"])

    def _updates(self, parameters: list[Tensor], momentum: float) -> list[Tensor]:
        """Update of each parameter for a learning rate of 1; equal shapes are orthogonalised together."""
        averaged = dict(zip(parameters, self._nesterov(parameters, momentum), strict=True))
        updates = {}
        for shape, alike in _group_by(parameters, self._whole_shape).items():
            rms_of_adamw = 0.2 * math.sqrt(max(shape))
            for part in _chunks(alike, max(1, _ELEMENTS_AT_ONCE // math.prod(shape))):
                whole = torch.stack([self._gather(averaged[parameter], parameter) for parameter in part])
                for parameter, update in zip(part, rms_of_adamw * orthogonalize(whole).float(), strict=True):
                    updates[parameter] = self._own_shard(update, parameter)
        return [updates[parameter] for parameter in parameters]

    def _nesterov(self, parameters: list[Tensor], momentum: float) -> list[Tensor]:
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        means = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        grads = [parameter.grad for parameter in parameters]
        torch._foreach_lerp_(means, grads, 1 - momentum)
        return torch._foreach_lerp(grads, means, momentum)

    @property
    def _axes(self) -> dict[str, ProcessGroup]:
        return {"tensor": self.tensor_group}

    def _splits(self, parameter: Tensor) -> int:
        """Number of ranks over which a parameter is sharded."""
        return self.tensor_group.size() if splits(parameter) and self.tensor_group is not None else 1

    def _whole_shape(self, parameter: Tensor) -> torch.Size:
        return parameter.shape if self._splits(parameter) == 1 else full_shape(parameter, self._axes)

    def _gather(self, part: Tensor, parameter: Tensor) -> Tensor:
        if self._splits(parameter) == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.tensor_group.size())]
        dist.all_gather(parts, part.contiguous(), group=self.tensor_group)
        [(dim, _)] = splits(parameter)
        return torch.cat(parts, dim)

    def _own_shard(self, whole: Tensor, parameter: Tensor) -> Tensor:
        return whole if self._splits(parameter) == 1 else shard(parameter, whole, self._axes)


def _group_by(items: list[Tensor], key: Callable[[Tensor], torch.Size]) -> dict[torch.Size, list[Tensor]]:
    groups: dict[torch.Size, list[Tensor]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _chunks(items: list[Tensor], size: int) -> Iterator[list[Tensor]]:
    return (items[start : start + size] for start in range(0, len(items), size))
