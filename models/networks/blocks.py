"""The blocks a video DiT is stacked from.

Shapes: S video tokens, L text tokens, I image tokens, B batch, D width, G modulation rows (of a pack, or the
batch).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass

from megadit.models.configs.block import BlockConfig
from megadit.models.configs.config import DiTConfig
from megadit.models.networks.attention import AxialInputs, CrossAttention, Rotary, SelfAttention
from megadit.models.networks.axial import Arrangement, move
from megadit.models.networks.modulation import NormWeight, Vectors, build_modulation
from megadit.models.ops.ledger import cheap, cheap_values_recomputed
from megadit.models.ops.reference import Linear, fuses_gelu, gated_residual, linear, modulated_norm, rms_norm
from megadit.models.packing.layout import Layout, Rows

TokenMove = Callable[[Tensor, Layout, Arrangement, Arrangement], Tensor]
"""Signature of `axial.move`; `megatron.parallelize` sets one that sends tokens between ranks."""
MLP_SLICE = 8192
"""Maximum tokens that go through an MLP at once: enough to keep any device busy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockInputs:
    """Inputs of every block, in addition to the tokens."""

    layout: Layout
    condition_GD: Tensor | None = None
    """Embedding of noise level and frame rate, or class, for each modulation row; None in networks without
    denoising."""
    text_LBD: Tensor | None = None
    """Text features for keys and values; None where the sample is conditioned on a class, or unconditional."""
    image_IBD: Tensor | None = None
    """Features of a conditioning image for keys and values, in networks that attend to one."""
    rotary: Rotary | None = None
    shared_GM: Tensor | None = None
    """Added to every modulation (`Structure.shared_modulation`)."""
    positions_SBD: Tensor | None = None
    """Learned positions, added in every block."""
    time: AxialInputs | None = None
    """Inputs of attention along time (here) and along space (next), in ST-DiT blocks."""
    space: AxialInputs | None = None


# FSDP looks for the tensors in a block's inputs that need gradients
register_dataclass(BlockInputs)


class MLP(nn.Module):
    """Two linears around an activation: GELU, or SwiGLU with the rows of both factors interleaved, (M, [gate
    value])."""

    def __init__(self, config: BlockConfig, hidden: int | None = None) -> None:
        """`hidden` is the width between the linears (None: `config.mlp_size`)."""
        super().__init__()
        width, bias, hidden = config.hidden_size, config.structure.linear_bias, hidden or config.mlp_size
        self.fc1 = Linear(width, config.mlp_factors * hidden, bias=bias)
        self.fc2 = Linear(hidden, width, bias=bias)
        self.activation = cheap(activation(config))
        self.gelu_form = _gelu_form(config)

    def forward(self, x_SBD: Tensor, layout: Layout | None = None) -> Tensor:
        """fc2(activation(fc1(x))) of each token; `layout` is not used."""
        # a slice at a time: the hidden activations, and in backward their gradients, are a block's largest tensors;
        # a compiled or exported graph has no fixed number of slices, and plans its own memory
        is_one = torch.compiler.is_compiling() or len(x_SBD) <= MLP_SLICE  # one slice copies the gradient
        parts = [x_SBD] if is_one else x_SBD.split(MLP_SLICE)
        slices = [self.fc2(self._hidden(x)) for x in parts]
        return slices[0] if len(slices) == 1 else torch.cat(slices)

    def _hidden(self, x_SBD: Tensor) -> Tensor:
        if self.gelu_form is not None and fuses_gelu(self.fc1):
            return linear(x_SBD, self.fc1.weight, self.fc1.bias, self.gelu_form)
        return self.activation(self.fc1(x_SBD))


MakeMLP = Callable[[BlockConfig], nn.Module]
"""Makes the module in the place of a block's MLP: `MLP` or `experts.ExpertMLP`."""


def swiglu(x: Tensor) -> Tensor:
    """SiLU(gate) * value of neighbouring numbers (arXiv 2002.05202), [..., 2 M] -> [..., M]."""
    gate, value = x.unflatten(-1, (-1, 2)).unbind(-1)
    return F.silu(gate) * value


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x) (arXiv 1606.08415, section 2), of any shape."""
    return x * torch.sigmoid(1.702 * x)


def activation(config: BlockConfig) -> Callable[[Tensor], Tensor]:
    """The function between the two linears of an MLP."""
    if config.structure.gated_mlp:
        return swiglu
    return quick_gelu if config.quick_gelu else partial(F.gelu, approximate=_gelu_form(config))


def _gelu_form(config: BlockConfig) -> str | None:
    """`approximate` for `F.gelu`; None where the MLP has another activation."""
    if config.structure.gated_mlp or config.quick_gelu:
        return None
    return "tanh" if config.structure.gelu_tanh else "none"


def norm(x_SBD: Tensor, vectors: Vectors, eps: float, rows: Rows | None, weight_D: Tensor | None = None) -> Tensor:
    """LayerNorm(x) * (1 + scale) + shift; `weight_D`: RMSNorm with this weight instead."""
    shift, scale, *_ = vectors
    return modulated_norm(x_SBD, shift, scale, eps, rows, weight_D)


def gated(x_SBD: Tensor, vectors: Vectors, y_SBD: Tensor, rows: Rows | None) -> Tensor:
    """x + gate * y, [S, B, D]."""
    return gated_residual(x_SBD, vectors[2], y_SBD, rows)


def with_positions(x_SBD: Tensor, c: BlockInputs) -> Tensor:
    """x + positions, [S, B, D], where a network adds them in every block."""
    return x_SBD if c.positions_SBD is None else x_SBD + c.positions_SBD


class DiTBlock(nn.Module):
    """Self-attention, cross-attention to text and an MLP, each modulated and gated by the sample's noise level."""

    def __init__(self, config: BlockConfig, make_mlp: MakeMLP = MLP) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.mlp_eps = config.mlp_layernorm_epsilon or config.layernorm_epsilon
        self.modulation = build_modulation(config, sublayers=3, groups=config.structure.modulation_groups)
        self.self_attention = SelfAttention(config)
        self.cross_attention = CrossAttention(config)
        self.mlp = make_mlp(config)

    def forward(self, x_SBD: Tensor, c: BlockInputs) -> Tensor:
        # calls are nested: names for intermediate values would keep them in memory
        """Tokens after this block, [S, B, D]."""
        sa, ca, mlp = self.modulation(c.condition_GD, c.shared_GM)
        rows, eps = c.layout.rows, self.eps
        x_SBD = with_positions(x_SBD, c)
        x_SBD = gated(x_SBD, sa, self.self_attention(norm(x_SBD, sa, eps, rows), c.layout, c.rotary), rows)
        x_SBD = gated(x_SBD, ca, self.cross_attention(norm(x_SBD, ca, eps, rows), c.text_LBD, c.layout), rows)
        return gated(x_SBD, mlp, self.mlp(norm(x_SBD, mlp, self.mlp_eps, rows), c.layout), rows)


class ClassDiTBlock(nn.Module):
    """Self-attention and an MLP: the block of a network conditioned on a class (arXiv 2212.09748)."""

    def __init__(self, config: BlockConfig, make_mlp: MakeMLP = MLP) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.mlp_eps = config.mlp_layernorm_epsilon or config.layernorm_epsilon
        self.modulation = build_modulation(config, sublayers=2, groups=config.structure.modulation_groups)
        self.self_attention = SelfAttention(config)
        self.mlp = make_mlp(config)

    def forward(self, x_SBD: Tensor, c: BlockInputs) -> Tensor:
        """Tokens after this block, [S, B, D]."""
        sa, mlp = self.modulation(c.condition_GD, c.shared_GM)
        rows = c.layout.rows
        x_SBD = with_positions(x_SBD, c)
        x_SBD = gated(x_SBD, sa, self.self_attention(norm(x_SBD, sa, self.eps, rows), c.layout, c.rotary), rows)
        return gated(x_SBD, mlp, self.mlp(norm(x_SBD, mlp, self.mlp_eps, rows), c.layout), rows)


class MovieGenBlock(nn.Module):
    """Llama's block with cross-attention to text (arXiv 2410.13720, section 3.1.2), RMS norms and grouped queries:

        x = x + positions
        x = x + gate SelfAttention(modulated norm(x))
        x = x + CrossAttention(norm(x), text)
        x = x + gate MLP(modulated norm(x))

    With `Structure.text_reaches_only_mlp` as NeMo built it: c = CrossAttention(x, text), x = x + gate MLP(norm(c)).
    """

    def __init__(self, config: BlockConfig, make_mlp: MakeMLP = MLP) -> None:
        super().__init__()
        width, is_apart = config.hidden_size, not config.structure.text_reaches_only_mlp
        self.eps = config.layernorm_epsilon
        self.mlp_eps = config.mlp_layernorm_epsilon or config.layernorm_epsilon
        self.modulation = build_modulation(config, sublayers=2)
        self.attention_layernorm = NormWeight(width)
        self.self_attention = SelfAttention(config)
        self.text_layernorm = NormWeight(width) if is_apart else None
        self.cross_attention = CrossAttention(config)
        self.mlp_layernorm = NormWeight(width) if is_apart else None
        self.mlp = make_mlp(config)

    def forward(self, x_SBD: Tensor, c: BlockInputs) -> Tensor:
        """Tokens after this block, [S, B, D]."""
        sa, mlp = self.modulation(c.condition_GD)
        rows, eps, weight = c.layout.rows, self.eps, self.attention_layernorm.weight
        x_SBD = with_positions(x_SBD, c)
        x_SBD = gated(x_SBD, sa, self.self_attention(norm(x_SBD, sa, eps, rows, weight), c.layout, c.rotary), rows)
        if self.text_layernorm is None:
            text_SBD = self.cross_attention(x_SBD, c.text_LBD, c.layout)
            return gated(x_SBD, mlp, self.mlp(norm(text_SBD, mlp, self.mlp_eps, rows, weight), c.layout), rows)
        x_SBD = x_SBD + self.cross_attention(rms_norm(x_SBD, self.text_layernorm.weight, eps), c.text_LBD, c.layout)
        weight = self.mlp_layernorm.weight
        return gated(x_SBD, mlp, self.mlp(norm(x_SBD, mlp, self.mlp_eps, rows, weight), c.layout), rows)


class WanBlock(nn.Module):
    """Self-attention, text and an MLP (arXiv 2503.20314, section 4.2):

    x = x + gate SelfAttention(modulated norm(x))
    x = x + CrossAttention(norm(x), text)
    x = x + gate MLP(modulated norm(x))
    """

    def __init__(self, config: BlockConfig, make_mlp: MakeMLP = MLP) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.mlp_eps = config.mlp_layernorm_epsilon or config.layernorm_epsilon
        self.modulation = build_modulation(config, sublayers=2)
        self.self_attention = SelfAttention(config)
        self.text_layernorm = nn.LayerNorm(config.hidden_size, self.eps)
        self.cross_attention = CrossAttention(config)
        self.mlp = make_mlp(config)

    def forward(self, x_SBD: Tensor, c: BlockInputs) -> Tensor:
        """Tokens after this block, [S, B, D]."""
        sa, mlp = self.modulation(c.condition_GD, c.shared_GM)
        rows = c.layout.rows
        x_SBD = with_positions(x_SBD, c)
        x_SBD = gated(x_SBD, sa, self.self_attention(norm(x_SBD, sa, self.eps, rows), c.layout, c.rotary), rows)
        x_SBD = x_SBD + self.cross_attention(self.text_layernorm(x_SBD), c.text_LBD, c.layout, c.image_IBD)
        return gated(x_SBD, mlp, self.mlp(norm(x_SBD, mlp, self.mlp_eps, rows), c.layout), rows)


class STDiTBlock(nn.Module):
    """Self-attention over all tokens, along time and along space, then text and an MLP, each modulated and gated.

    Where ranks share the tokens of a sample, tokens move so that each rank has whole columns of time, then whole
    frames: both attentions along one axis need no communication (`axial.py`).
    """

    def __init__(self, config: BlockConfig, make_mlp: MakeMLP = MLP) -> None:
        super().__init__()
        self.move: TokenMove = move
        self.eps = config.layernorm_epsilon
        self.mlp_eps = config.mlp_layernorm_epsilon or config.layernorm_epsilon
        self.modulation = build_modulation(config, sublayers=5)
        self.self_attention = SelfAttention(config)
        self.temporal_attention = SelfAttention(config)
        self.spatial_attention = SelfAttention(config)
        self.cross_attention = CrossAttention(config)
        self.mlp = make_mlp(config)

    def forward(self, x_SBD: Tensor, c: BlockInputs) -> Tensor:
        """Tokens after this block, [S, B, D]."""
        sa, time, space, ca, mlp = self.modulation(c.condition_GD)
        layout, rows, eps = c.layout, c.layout.rows, self.eps
        x_SBD = with_positions(x_SBD, c)
        x_SBD = self._attend(self.self_attention, x_SBD, sa, AxialInputs(layout=layout, rotary=c.rotary))
        x_SBD = self.move(x_SBD, layout, "home", "time")
        x_SBD = self._attend(self.temporal_attention, x_SBD, time, c.time)
        x_SBD = self.move(x_SBD, layout, "time", "space")
        x_SBD = self._attend(self.spatial_attention, x_SBD, space, c.space)
        x_SBD = self.move(x_SBD, layout, "space", "home")
        x_SBD = gated(x_SBD, ca, self.cross_attention(norm(x_SBD, ca, eps, rows), c.text_LBD, layout), rows)
        return gated(x_SBD, mlp, self.mlp(norm(x_SBD, mlp, self.mlp_eps, rows), c.layout), rows)

    def _attend(self, attention: SelfAttention, x_SBD: Tensor, vectors: Vectors, at: AxialInputs) -> Tensor:
        h_SBD = attention(norm(x_SBD, vectors, self.eps, at.layout.rows), at.layout, at.rotary)
        return gated(x_SBD, vectors, h_SBD, at.layout.rows)


class ViTBlock(nn.Module):
    """Pre-norm self-attention and an MLP (arXiv 2010.11929, eq. 2 and 3):

    x = x + SelfAttention(norm(x))
    x = x + MLP(norm(x))
    """

    def __init__(self, config: BlockConfig, make_mlp: MakeMLP = MLP) -> None:
        super().__init__()
        self.attention_layernorm = nn.LayerNorm(config.hidden_size, config.layernorm_epsilon)
        self.self_attention = SelfAttention(config)
        self.mlp_layernorm = nn.LayerNorm(config.hidden_size, config.layernorm_epsilon)
        self.mlp = make_mlp(config)

    def forward(self, x_SBD: Tensor, c: BlockInputs) -> Tensor:
        """Tokens after this block, [S, B, D]."""
        x_SBD = x_SBD + self.self_attention(self.attention_layernorm(x_SBD), c.layout, c.rotary)
        return x_SBD + self.mlp(self.mlp_layernorm(x_SBD), c.layout)


BLOCKS: dict[str, type[nn.Module]] = {
    "dit": DiTBlock,
    "class_dit": ClassDiTBlock,
    "moviegen": MovieGenBlock,
    "st_dit": STDiTBlock,
    "wan": WanBlock,
    "vit": ViTBlock,
}
"""`Structure.block` -> the class of a network's blocks."""


class BlockStack(nn.ModuleDict):
    """Blocks in order, each under its global index, so that keys do not depend on the pipeline stage."""

    def forward(self, x: Tensor, *context) -> Tensor:
        """Apply all blocks to tokens [S, B, D]."""
        for block in self.values():
            with cheap_values_recomputed():
                x = block(x, *context)
        return x

    def first(self, count: int) -> "BlockStack":
        """Return the first `count` blocks as a stack that shares their modules."""
        return BlockStack(dict(islice(self.items(), count)))


class FinalLayer(nn.Module):
    """Maps tokens of the network's width back to patches of latents."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        structure = config.structure
        self.eps = config.layernorm_epsilon
        self.in_channels = config.in_channels
        self.modulation = None
        if structure.final_modulation:
            self.modulation = build_modulation(config, sublayers=1, vectors=2)
        self.layernorm = NormWeight(config.hidden_size) if structure.final_rms else None
        self.out_channels = (2 if config.learned_variance else 1) * config.in_channels
        patch = config.patch_dim // config.in_channels
        self.linear = Linear(config.hidden_size, patch * self.out_channels, bias=structure.final_bias)

    def forward(self, x_SBD: Tensor, c: BlockInputs) -> Tensor:
        """Patches of each token, [S, B, P]."""
        if self.modulation is not None:
            (vectors,) = self.modulation(c.condition_GD, c.shared_GM)
            weight_D = None if self.layernorm is None else self.layernorm.weight
            x_SBD = norm(x_SBD, vectors, self.eps, c.layout.rows, weight_D)
        out = self.linear(x_SBD)
        if self.out_channels == self.in_channels:
            return out
        # the mean comes first, then the variance, which ODE sampling does not need
        return out.unflatten(-1, (-1, self.out_channels))[..., : self.in_channels].flatten(-2)
