"""The blocks a video DiT is stacked from.

Shapes: S video tokens, L text tokens, B batch, D width, G rows of conditioning (segments of a pack, or the batch).
"""

from functools import partial
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
    """Noise level and frame rate, or class, of each sample."""
    text_LBD: Tensor | None
    """What keys and values read; None where the sample is conditioned on a class instead."""
    layout: Layout
    runs: tuple[Run, ...] | None
    """Which sample each of this rank's tokens belongs to; None in a dense batch."""
    rotary: Rotary | None
    shared_GM: Tensor | None = None
    """Added to every modulation (`Structure.shared_modulation`)."""
    positions_SBD: Tensor | None = None
    """Learned positions, added in every block."""


class MLP(nn.Module):
    def __init__(self, config: DiTConfig, layers: "LayerKit") -> None:
        super().__init__()
        bias = config.structure.linear_bias
        self.fc1 = layers.column_linear(config.hidden_size, config.mlp_size, sequence="sharded", bias=bias)
        self.fc2 = layers.row_linear(config.mlp_size, config.hidden_size, bias=bias)
        self.gelu = partial(F.gelu, approximate="tanh") if config.structure.gelu_tanh else F.gelu

    def forward(self, x_SBD: Tensor) -> Tensor:
        # a slice at a time: the hidden activations, and in backward their gradients, are a block's largest tensors;
        # an exported graph has no fixed number of slices, and its runtime plans its own memory
        parts = [x_SBD] if torch.compiler.is_exporting() else x_SBD.split(MLP_SLICE)
        slices = [through(self.gelu, self.fc1(x), into=self.fc2) for x in parts]
        return slices[0] if len(slices) == 1 else torch.cat(slices)


class Modulation(nn.Module):
    """Shift, scale and gate for `count` sublayers (adaLN-Zero, arXiv 2212.09748, section 3.2): [G, D] each."""

    def __init__(self, config: DiTConfig, layers: "LayerKit", count: int) -> None:
        super().__init__()
        self.count = count
        self.linear = layers.replicated_linear(
            config.hidden_size, count * config.hidden_size, sequence="sharded", bias=config.structure.linear_bias
        )

    def forward(self, condition_GD: Tensor, shared_GM: Tensor | None = None) -> tuple[Tensor, ...]:
        return self.linear(F.silu(condition_GD)).chunk(self.count, dim=-1)


class LowRankModulation(nn.Module):
    """`Modulation` through a bottleneck (adaLN-LoRA, arXiv 2501.03575, section 5.2.1), in `groups` with one each.

    Each group adds the beginning of the vector that all modulations share, where there is one.
    """

    def __init__(self, config: DiTConfig, layers: "LayerKit", count: int, groups: int) -> None:
        super().__init__()
        rank, width = config.adaln_lora_dim, config.hidden_size
        self.count = count // groups
        self.down = layers.replicated_linear(width, groups * rank, sequence="sharded", bias=False)
        self.up = nn.ModuleList(
            layers.replicated_linear(rank, self.count * width, sequence="sharded", bias=False) for _ in range(groups)
        )

    def forward(self, condition_GD: Tensor, shared_GM: Tensor | None = None) -> tuple[Tensor, ...]:
        vectors = []
        for up, hidden in zip(self.up, self.down(F.silu(condition_GD)).chunk(len(self.up), dim=-1), strict=True):
            modulation = up(hidden)
            if shared_GM is not None:
                modulation = modulation + shared_GM[:, : modulation.shape[-1]]
            vectors += modulation.chunk(self.count, dim=-1)
        return tuple(vectors)


def build_modulation(config: DiTConfig, layers: "LayerKit", *, count: int, groups: int = 1) -> nn.Module:
    if config.adaln_lora_dim is None:
        return Modulation(config, layers, count)
    return LowRankModulation(config, layers, count, groups)


class DiTBlock(nn.Module):
    """Self-attention, cross-attention to text and an MLP, each modulated and gated by the sample's noise level.

    A network conditioned on a class has no cross-attention.
    """

    def __init__(self, config: DiTConfig, layers: "LayerKit") -> None:
        super().__init__()
        structure = config.structure
        self.eps = config.layernorm_epsilon
        self.mlp_eps = config.mlp_layernorm_epsilon or config.layernorm_epsilon
        num_sublayers = 3 if structure.cross_attention else 2
        self.modulation = build_modulation(config, layers, count=3 * num_sublayers, groups=structure.modulation_groups)
        self.self_attention = SelfAttention(config, layers)
        self.cross_attention = CrossAttention(config, layers) if structure.cross_attention else None
        self.mlp = MLP(config, layers)

    def forward(self, x_SBD: Tensor, context: Context) -> Tensor:
        layout, runs = context.layout, context.runs
        shift_sa, scale_sa, gate_sa, *of_text, shift_mlp, scale_mlp, gate_mlp = self.modulation(
            context.condition_GD, context.shared_GM
        )

        def norm(x, shift, scale, into, eps=self.eps):
            return through(modulated_norm, x, shift, scale, eps, runs, into=into)

        if context.positions_SBD is not None:
            x_SBD = x_SBD + context.positions_SBD
        h = norm(x_SBD, shift_sa, scale_sa, into=lambda h: self.self_attention(h, layout, context.rotary))
        x_SBD = gated_residual(x_SBD, gate_sa, h, runs)
        if self.cross_attention is not None:
            shift_ca, scale_ca, gate_ca = of_text
            h = norm(x_SBD, shift_ca, scale_ca, into=lambda h: self.cross_attention(h, context.text_LBD, layout))
            x_SBD = gated_residual(x_SBD, gate_ca, h, runs)
        h = norm(x_SBD, shift_mlp, scale_mlp, into=self.mlp, eps=self.mlp_eps)
        return gated_residual(x_SBD, gate_mlp, h, runs)


class FinalLayer(nn.Module):
    """From tokens of the network's width back to patches of latents."""

    def __init__(self, config: DiTConfig, layers: "LayerKit") -> None:
        super().__init__()
        structure = config.structure
        self.eps = config.layernorm_epsilon
        self.in_channels = config.in_channels
        self.modulation = build_modulation(config, layers, count=2) if structure.final_modulation else None
        self.out_channels = (2 if config.learned_variance else 1) * config.in_channels
        patch = config.patch_dim // config.in_channels
        self.linear = layers.replicated_linear(
            config.hidden_size, patch * self.out_channels, sequence="sharded", bias=structure.final_bias
        )

    def forward(self, x_SBD: Tensor, context: Context) -> Tensor:
        if self.modulation is not None:
            shift, scale = self.modulation(context.condition_GD, context.shared_GM)
            x_SBD = modulated_norm(x_SBD, shift, scale, self.eps, context.runs)
        out = self.linear(x_SBD)
        if self.out_channels == self.in_channels:
            return out
        # of each pixel the mean comes first, then the variance, which sampling along the ODE does not need
        return out.unflatten(-1, (-1, self.out_channels))[..., : self.in_channels].flatten(-2)
