"""Modulation of a block by its conditioning: shift, scale and gate of each sublayer, and the weights of norms.

Shapes: G modulation rows (segments of a pack, or the batch), D width, M width of the shared modulation.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadit.models.configs.block import BlockConfig
from megadit.models.ops.reference import Linear

Vectors = tuple[Tensor, ...]
"""Shift, scale and gate of one sublayer, [G, D] each; the final layer has no gate."""


class NormWeight(nn.Module):
    """The learned weight of an RMS norm, [D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class Modulation(nn.Module):
    """Linear(SiLU(condition)) as `sublayers` times `vectors` vectors (adaLN-Zero, arXiv 2212.09748, section 3.2)."""

    def __init__(self, config: BlockConfig, sublayers: int, vectors: int) -> None:
        super().__init__()
        self.sublayers, self.vectors = sublayers, vectors
        width = config.hidden_size
        self.linear = Linear(width, sublayers * vectors * width, bias=config.structure.linear_bias)

    def forward(self, condition_GD: Tensor, shared_GM: Tensor | None = None) -> tuple[Vectors, ...]:
        """The vectors of each sublayer; `shared_GM` is not used."""
        parts = self.linear(F.silu(condition_GD)).chunk(self.sublayers * self.vectors, dim=-1)
        return _by_sublayer(parts, self.vectors)


class LowRankModulation(nn.Module):
    """`Modulation` through a bottleneck (adaLN-LoRA, arXiv 2501.03575, section 5.2.1), with one bottleneck for each
    group.

    Each group adds the first vectors of the shared modulation, where there is one.
    """

    def __init__(self, config: BlockConfig, sublayers: int, vectors: int, groups: int) -> None:
        super().__init__()
        rank, width = config.adaln_lora_dim, config.hidden_size
        self.vectors, self.per_group = vectors, sublayers * vectors // groups
        self.down = Linear(width, groups * rank, bias=False)
        self.up = nn.ModuleList(Linear(rank, self.per_group * width, bias=False) for _ in range(groups))

    def forward(self, condition_GD: Tensor, shared_GM: Tensor | None = None) -> tuple[Vectors, ...]:
        """The vectors of each sublayer."""
        parts = []
        for up, hidden in zip(self.up, self.down(F.silu(condition_GD)).chunk(len(self.up), dim=-1), strict=True):
            modulation = up(hidden)
            if shared_GM is not None:
                modulation = modulation + shared_GM[:, : modulation.shape[-1]]
            parts += modulation.chunk(self.per_group, dim=-1)
        return _by_sublayer(parts, self.vectors)


class TableModulation(nn.Module):
    """A learned table, added to the output of one linear shared by all blocks (adaLN-single, arXiv 2310.00426, 2.3).

    The last layer, which has only shift and scale, adds its table to the condition itself.
    """

    def __init__(self, config: BlockConfig, sublayers: int, vectors: int) -> None:
        super().__init__()
        self.sublayers, self.vectors = sublayers, vectors
        self.table = nn.Parameter(torch.zeros(sublayers * vectors * config.hidden_size))

    def forward(self, condition_GD: Tensor, shared_GM: Tensor) -> tuple[Vectors, ...]:
        """The vectors of each sublayer."""
        count = self.sublayers * self.vectors
        common_GM = condition_GD.repeat(1, count) if count == 2 else shared_GM
        return _by_sublayer((common_GM + self.table).chunk(count, dim=-1), self.vectors)


class SharedModulation(nn.Module):
    """Linear(SiLU(condition)), [G, M]: each block's `TableModulation` is added to it."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.linear = Linear(config.hidden_size, 6 * config.hidden_size, bias=config.structure.linear_bias)

    def forward(self, condition_GD: Tensor) -> Tensor:
        """Shift, scale and gate of two sublayers."""
        return self.linear(F.silu(condition_GD))


def _by_sublayer(parts: "tuple[Tensor, ...] | list[Tensor]", vectors: int) -> tuple[Vectors, ...]:
    return tuple(tuple(parts[i : i + vectors]) for i in range(0, len(parts), vectors))


def build_modulation(config: BlockConfig, *, sublayers: int, vectors: int = 3, groups: int = 1) -> nn.Module:
    """`Modulation`; low-rank where `config.adaln_lora_dim` is set; a table where all blocks share a modulation."""
    if config.structure.single_modulation:
        return TableModulation(config, sublayers, vectors)
    if config.adaln_lora_dim is None:
        return Modulation(config, sublayers, vectors)
    return LowRankModulation(config, sublayers, vectors, groups)
