"""The blocks a video DiT is stacked from.

Shapes: S video tokens, L text tokens, B batch, D width, G rows of conditioning (segments of a pack, or the batch).
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadit.models.attention import CrossAttention, SelfAttention
from megadit.models.config import DiTConfig
from megadit.models.embeddings import Rotary
from megadit.models.modulation import gated_residual, modulated_norm
from megadit.models.recompute import through
from megadit.models.segments import Layout, Run

if TYPE_CHECKING:
    from megadit.models.layers import LayerKit


MLP_SLICE = 8192
"""Most tokens that go through an MLP at once: enough to keep any device busy."""


class Context(NamedTuple):
    """What every block reads beside the tokens."""

    condition_GD: Tensor
    """Noise level and frame rate of each sample."""
    text_LBD: Tensor
    layout: Layout
    runs: tuple[Run, ...] | None
    """Which sample each of this rank's tokens belongs to; None in a dense batch."""
    rotary: Rotary | None


class MLP(nn.Module):
    def __init__(self, config: DiTConfig, layers: "LayerKit") -> None:
        super().__init__()
        self.fc1 = layers.column_linear(config.hidden_size, config.mlp_size, sequence="sharded")
        self.fc2 = layers.row_linear(config.mlp_size, config.hidden_size)

    def forward(self, x_SBD: Tensor) -> Tensor:
        # a slice at a time: the hidden activations, and in backward their gradients, are a block's largest tensors
        slices = [through(F.gelu, self.fc1(x), into=self.fc2) for x in x_SBD.split(MLP_SLICE)]
        return slices[0] if len(slices) == 1 else torch.cat(slices)


class Modulation(nn.Module):
    """Shift, scale and gate for `count` sublayers (adaLN-Zero, arXiv 2212.09748, section 3.2): [G, D] each."""

    def __init__(self, config: DiTConfig, layers: "LayerKit", count: int) -> None:
        super().__init__()
        self.count = count
        self.linear = layers.replicated_linear(
            config.hidden_size, count * config.hidden_size, sequence="sharded", bias=False
        )

    def forward(self, condition_GD: Tensor) -> tuple[Tensor, ...]:
        return self.linear(F.silu(condition_GD)).chunk(self.count, dim=-1)


class DiTBlock(nn.Module):
    """Self-attention, cross-attention to text and an MLP, each modulated and gated by the sample's noise level."""

    def __init__(self, config: DiTConfig, layers: "LayerKit") -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.modulation = Modulation(config, layers, count=9)
        self.self_attention = SelfAttention(config, layers)
        self.cross_attention = CrossAttention(config, layers)
        self.mlp = MLP(config, layers)

    def forward(self, x_SBD: Tensor, context: Context) -> Tensor:
        condition, text, layout, runs, rotary = context
        shift_sa, scale_sa, gate_sa, shift_ca, scale_ca, gate_ca, shift_mlp, scale_mlp, gate_mlp = self.modulation(
            condition
        )

        def norm(x, shift, scale, into):
            return through(modulated_norm, x, shift, scale, self.eps, runs, into=into)

        h = norm(x_SBD, shift_sa, scale_sa, into=lambda h: self.self_attention(h, layout, rotary))
        x_SBD = gated_residual(x_SBD, gate_sa, h, runs)
        h = norm(x_SBD, shift_ca, scale_ca, into=lambda h: self.cross_attention(h, text, layout))
        x_SBD = gated_residual(x_SBD, gate_ca, h, runs)
        h = norm(x_SBD, shift_mlp, scale_mlp, into=self.mlp)
        return gated_residual(x_SBD, gate_mlp, h, runs)


class FinalLayer(nn.Module):
    """From tokens of the network's width back to patches of latents."""

    def __init__(self, config: DiTConfig, layers: "LayerKit") -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.modulation = Modulation(config, layers, count=2)
        self.linear = layers.replicated_linear(config.hidden_size, config.patch_dim, sequence="sharded")

    def forward(self, x_SBD: Tensor, condition_GD: Tensor, runs: tuple[Run, ...] | None) -> Tensor:
        shift, scale = self.modulation(condition_GD)
        return self.linear(modulated_norm(x_SBD, shift, scale, self.eps, runs))
