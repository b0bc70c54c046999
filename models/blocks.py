"""The blocks a video DiT is stacked from.

Shapes: S video tokens, L text tokens, B batch, D width, G rows of conditioning (segments of a pack, or the batch).
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadit.models.attention import CrossAttention, SelfAttention
from megadit.models.config import DiTConfig
from megadit.models.embeddings import Rotary
from megadit.models.experts import ExpertMLP
from megadit.models.linear import linear_gelu
from megadit.models.modulation import NormWeight, gated_residual, modulated_norm, rms_norm
from megadit.models.recompute import through
from megadit.models.segments import Layout, Run

if TYPE_CHECKING:
    from megadit.models.layers import LayerKit


MLP_SLICE = 8192
"""Most tokens that go through an MLP at once: enough to keep any device busy."""


class Place(NamedTuple):
    """What self-attention along one axis reads about the tokens."""

    layout: Layout
    runs: tuple[Run, ...] | None
    rotary: Rotary | None


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
    time: Place | None = None
    """Of attention along time and along space alone, in blocks that have it."""
    space: Place | None = None


class MLP(nn.Module):
    """Two linears around an activation: GELU, or SwiGLU with the rows of both factors in turn, (M, [gate value])."""

    def __init__(self, config: DiTConfig, layers: "LayerKit", hidden: int) -> None:
        super().__init__()
        width, bias = config.hidden_size, config.structure.linear_bias
        self.fc1 = layers.column_linear(width, config.mlp_factors * hidden, sequence="sharded", bias=bias)
        self.fc2 = layers.row_linear(hidden, width, bias=bias)
        self.activation = _activation(config)
        self.gelu_form = _gelu_form(config)

    def forward(self, x_SBD: Tensor, layout: Layout | None = None, runs: tuple[Run, ...] | None = None) -> Tensor:
        """Each token by itself: which sample it belongs to makes no difference."""
        # a slice at a time: the hidden activations, and in backward their gradients, are a block's largest tensors;
        # a compiled or exported graph has no fixed number of slices, and plans its own memory
        parts = [x_SBD] if torch.compiler.is_compiling() else x_SBD.split(MLP_SLICE)
        slices = [self._of_slice(x) for x in parts]
        return slices[0] if len(slices) == 1 else torch.cat(slices)

    def _of_slice(self, x_SBD: Tensor) -> Tensor:
        if self.gelu_form is not None and (hidden := linear_gelu(self.fc1, x_SBD, self.gelu_form)) is not None:
            return self.fc2(hidden)
        return through(self.activation, self.fc1(x_SBD), into=self.fc2)


def swiglu(x: Tensor) -> Tensor:
    """SiLU(gate) * value of neighbouring numbers (arXiv 2002.05202), [..., 2 M] -> [..., M]."""
    gate, value = x.unflatten(-1, (-1, 2)).unbind(-1)
    return F.silu(gate) * value


def _activation(config: DiTConfig) -> Callable[[Tensor], Tensor]:
    if config.structure.gated_mlp:
        return swiglu
    return partial(F.gelu, approximate=_gelu_form(config))


def _gelu_form(config: DiTConfig) -> str | None:
    """`approximate` of `F.gelu`; None where the MLP has another activation."""
    if config.structure.gated_mlp:
        return None
    return "tanh" if config.structure.gelu_tanh else "none"


def build_mlp(config: DiTConfig, layers: "LayerKit") -> nn.Module:
    """The MLP of a block, or the experts that stand for it."""
    if not config.experts.num_experts:
        return MLP(config, layers, config.mlp_size)
    shared_size = config.experts.shared_ffn_hidden_size
    shared = MLP(config, layers, shared_size) if shared_size else None
    return ExpertMLP(config, layers, _activation(config), shared)


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
        self.mlp = build_mlp(config, layers)

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
        h = norm(x_SBD, shift_mlp, scale_mlp, into=lambda h: self.mlp(h, layout, runs), eps=self.mlp_eps)
        return gated_residual(x_SBD, gate_mlp, h, runs)


class MovieGenBlock(nn.Module):
    """Llama's block with text between (arXiv 2410.13720, section 3.1.2), RMS norms and grouped queries:

        x = x + positions
        x = x + gate SelfAttention(modulated norm(x))
        x = x + CrossAttention(norm(x), text)
        x = x + gate MLP(modulated norm(x))

    With `Structure.text_reaches_only_mlp` as NeMo built it: c = CrossAttention(x, text), x = x + gate MLP(norm(c)).
    """

    def __init__(self, config: DiTConfig, layers: "LayerKit") -> None:
        super().__init__()
        width, is_apart = config.hidden_size, not config.structure.text_reaches_only_mlp
        self.eps = config.layernorm_epsilon
        self.mlp_eps = config.mlp_layernorm_epsilon or config.layernorm_epsilon
        self.modulation = build_modulation(config, layers, count=6)
        self.attention_layernorm = NormWeight(width, layers)
        self.self_attention = SelfAttention(config, layers)
        self.text_layernorm = NormWeight(width, layers) if is_apart else None
        self.cross_attention = CrossAttention(config, layers)
        self.mlp_layernorm = NormWeight(width, layers) if is_apart else None
        self.mlp = build_mlp(config, layers)

    def forward(self, x_SBD: Tensor, context: Context) -> Tensor:
        runs = context.runs
        shift_sa, scale_sa, gate_sa, shift_mlp, scale_mlp, gate_mlp = self.modulation(context.condition_GD)
        if context.positions_SBD is not None:
            x_SBD = x_SBD + context.positions_SBD
        h = through(
            modulated_norm, x_SBD, shift_sa, scale_sa, self.eps, runs, self.attention_layernorm.weight,
            into=lambda h: self.self_attention(h, context.layout, context.rotary),
        )  # fmt: skip
        x_SBD = gated_residual(x_SBD, gate_sa, h, runs)
        x_SBD, c_SBD = self._attend_to_text(x_SBD, context)
        weight = (self.mlp_layernorm or self.attention_layernorm).weight

        def mlp(h):
            return self.mlp(h, context.layout, runs)

        h = through(modulated_norm, c_SBD, shift_mlp, scale_mlp, self.mlp_eps, runs, weight, into=mlp)
        return gated_residual(x_SBD, gate_mlp, h, runs)

    def _attend_to_text(self, x_SBD: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """(the tokens, what the MLP reads)."""
        if self.text_layernorm is None:
            return x_SBD, self.cross_attention(x_SBD, context.text_LBD, context.layout)
        h = through(
            rms_norm, x_SBD, self.text_layernorm.weight, self.eps,
            into=lambda h: self.cross_attention(h, context.text_LBD, context.layout),
        )  # fmt: skip
        x_SBD = x_SBD + h
        return x_SBD, x_SBD


class STDiTBlock(nn.Module):
    """Self-attention over all tokens, along time and along space, then text and an MLP, each modulated and gated.

    Where ranks share the tokens of a sample, these move so that each rank has whole columns of time, then whole frames:
    both attentions along one axis send nothing (`lines.py`).
    """

    def __init__(self, config: DiTConfig, layers: "LayerKit") -> None:
        super().__init__()
        self.layers = layers
        self.eps = config.layernorm_epsilon
        self.mlp_eps = config.mlp_layernorm_epsilon or config.layernorm_epsilon
        self.modulation = build_modulation(config, layers, count=15)
        self.self_attention = SelfAttention(config, layers)
        self.temporal_attention = SelfAttention(config, layers)
        self.spatial_attention = SelfAttention(config, layers)
        self.cross_attention = CrossAttention(config, layers)
        self.mlp = build_mlp(config, layers)

    def forward(self, x_SBD: Tensor, context: Context) -> Tensor:
        layout, runs = context.layout, context.runs
        vectors = self.modulation(context.condition_GD)
        of_all, of_time, of_space, of_text, of_mlp = (vectors[i : i + 3] for i in range(0, 15, 3))

        def attend(attention: SelfAttention, x: Tensor, place: Place, modulation: tuple[Tensor, ...]) -> Tensor:
            return self._sublayer(x, modulation, place.runs, lambda h: attention(h, place.layout, place.rotary))

        if context.positions_SBD is not None:
            x_SBD = x_SBD + context.positions_SBD
        x_SBD = attend(self.self_attention, x_SBD, Place(layout, runs, context.rotary), of_all)
        x_SBD = self.layers.move(x_SBD, layout, "home", "time")
        x_SBD = attend(self.temporal_attention, x_SBD, context.time, of_time)
        x_SBD = self.layers.move(x_SBD, layout, "time", "space")
        x_SBD = attend(self.spatial_attention, x_SBD, context.space, of_space)
        x_SBD = self.layers.move(x_SBD, layout, "space", "home")
        x_SBD = self._sublayer(x_SBD, of_text, runs, lambda h: self.cross_attention(h, context.text_LBD, layout))
        return self._sublayer(x_SBD, of_mlp, runs, lambda h: self.mlp(h, layout, runs), self.mlp_eps)

    def _sublayer(
        self,
        x_SBD: Tensor,
        modulation: tuple[Tensor, ...],
        runs: tuple[Run, ...] | None,
        sublayer: Callable[[Tensor], Tensor],
        eps: float | None = None,
    ) -> Tensor:
        shift, scale, gate = modulation
        h = through(modulated_norm, x_SBD, shift, scale, eps or self.eps, runs, into=sublayer)
        return gated_residual(x_SBD, gate, h, runs)


BLOCKS: dict[str, type[nn.Module]] = {"dit": DiTBlock, "moviegen": MovieGenBlock, "st_dit": STDiTBlock}
"""`Structure.block` -> what a network is stacked from."""


class FinalLayer(nn.Module):
    """From tokens of the network's width back to patches of latents."""

    def __init__(self, config: DiTConfig, layers: "LayerKit") -> None:
        super().__init__()
        structure = config.structure
        self.eps = config.layernorm_epsilon
        self.in_channels = config.in_channels
        self.modulation = build_modulation(config, layers, count=2) if structure.final_modulation else None
        self.layernorm = NormWeight(config.hidden_size, layers) if structure.final_rms else None
        self.out_channels = (2 if config.learned_variance else 1) * config.in_channels
        patch = config.patch_dim // config.in_channels
        self.linear = layers.replicated_linear(
            config.hidden_size, patch * self.out_channels, sequence="sharded", bias=structure.final_bias
        )

    def forward(self, x_SBD: Tensor, context: Context) -> Tensor:
        if self.modulation is not None:
            shift, scale = self.modulation(context.condition_GD, context.shared_GM)
            weight = None if self.layernorm is None else self.layernorm.weight
            x_SBD = modulated_norm(x_SBD, shift, scale, self.eps, context.runs, weight)
        out = self.linear(x_SBD)
        if self.out_channels == self.in_channels:
            return out
        # of each pixel the mean comes first, then the variance, which sampling along the ODE does not need
        return out.unflatten(-1, (-1, self.out_channels))[..., : self.in_channels].flatten(-2)
