"""Self- and cross-attention: projections, per-head norms and rotation around `ops.attention`.

Shapes: S video tokens, L text tokens, I image tokens, B batch, D width, N heads, K head dim, G groups of heads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from megadit.models.configs.block import BlockConfig
from megadit.models.ops.reference import Linear, attention, qk_norm_rope
from megadit.models.packing.layout import Layout

AttentionCore = Callable[[Tensor, Tensor, Tensor, Layout, bool], Tensor]
"""Signature of `ops.attention`; `megatron.parallelize` replaces that of self-attention."""


class Rotary(NamedTuple):
    """Rotary factors of each token's channels, [S, 1 or B, 1, K] each: x * cos + swap(x) * sin; `swap` swaps halves."""

    cos: Tensor
    sin: Tensor
    """Negative in the first half."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AxialInputs:
    """Layout and rotary of axial attention."""

    layout: Layout
    rotary: Rotary | None = None


class QKNorm(nn.Module):
    """x / rms(x) * weight per head (arXiv 2302.05442, with RMSNorm), then rotary embedding (arXiv 2104.09864).

    Without `qk_layernorm`, only rotary embedding.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.eps = config.qk_layernorm_epsilon or config.layernorm_epsilon
        has_weight = config.qk_layernorm and not config.structure.norm_across_heads
        self.weight = nn.Parameter(torch.ones(config.dim_per_head)) if has_weight else None

    def forward(self, x_SBNK: Tensor, rotary: Rotary | None = None) -> Tensor:
        """Normed and rotated heads, shaped like `x_SBNK`."""
        cos, sin = rotary if rotary is not None else (None, None)
        if self.weight is None and cos is None:
            return x_SBNK
        return qk_norm_rope(x_SBNK, self.weight, cos, sin, self.eps)


class WidthNorm(nn.Module):
    """x / rms(x) * weight over all heads of a token together, in float32."""

    def __init__(self, config: BlockConfig, num_heads: int) -> None:
        super().__init__()
        self.eps = config.qk_layernorm_epsilon or config.layernorm_epsilon
        self.width = num_heads * config.dim_per_head
        self.weight = nn.Parameter(torch.ones(self.width))
        self.sum_over_ranks: Callable[[Tensor], Tensor] = _of_all_heads
        """Replaced by `megatron.parallelize` where ranks share the heads."""

    def forward(self, x_SBNK: Tensor) -> Tensor:
        """Normed heads, shaped like `x_SBNK`."""
        y = x_SBNK.to(torch.promote_types(x_SBNK.dtype, torch.float32))
        squares = self.sum_over_ranks(y.square().sum((-2, -1), keepdim=True))
        y = y * torch.rsqrt(squares / self.width + self.eps) * self.weight.view(x_SBNK.shape[-2:])
        return y.to(x_SBNK.dtype)


def _of_all_heads(squares: Tensor) -> Tensor:
    """Return the sum unchanged: all heads are on this rank."""
    return squares


def width_norm(config: BlockConfig, num_heads: int) -> nn.Module:
    """The norm of queries or keys over all heads, in networks that have it."""
    is_across = config.qk_layernorm and config.structure.norm_across_heads
    return WidthNorm(config, num_heads) if is_across else nn.Identity()


class SelfAttention(nn.Module):
    """Every video token attends to all tokens of its own sample.

    Heads are grouped by shared keys and values (grouped-query attention). The rows of the fused projection are
    (groups, [q ... q k v], K), so that any run of them is whole groups. Kernels see keys and values repeated.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.core: AttentionCore = attention
        self.head_dim = config.dim_per_head
        width, size, bias = config.hidden_size, config.attention_size, config.structure.linear_bias
        self.per_group = config.num_attention_heads // config.key_heads
        rows = size + 2 * config.key_heads * self.head_dim
        self.qkv = Linear(width, rows, bias=bias)
        self.proj = Linear(size, width, bias=bias)
        self.q_norm = width_norm(config, config.num_attention_heads)
        self.k_norm = width_norm(config, config.key_heads)
        self.q_layernorm, self.k_layernorm = QKNorm(config), QKNorm(config)

    def forward(self, x_SBD: Tensor, layout: Layout, rotary: Rotary | None) -> Tensor:
        return self.proj(self.core(*self._heads(x_SBD, rotary), layout, False))

    def _heads(self, x_SBD: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, [S, B, N, K]."""
        grouped = rearrange(self.qkv(x_SBD), "S B (G j K) -> S B G j K", j=self.per_group + 2, K=self.head_dim)
        q, k, v = grouped.split([self.per_group, 1, 1], dim=-2)
        q, k, v = q.flatten(2, 3), k.squeeze(-2), v.squeeze(-2)
        q, k = self.q_layernorm(self.q_norm(q), rotary), self.k_layernorm(self.k_norm(k), rotary)
        if self.per_group > 1:
            k, v = (repeat(x, "S B G K -> S B (G n) K", n=self.per_group) for x in (k, v))
        return q, k, v


class CrossAttention(nn.Module):
    """Every video token attends to the text of its own sample; rows are laid out head by head: (N, [k v], K).

    A network that reads image features attends to them separately, and adds both results.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.core: AttentionCore = attention
        self.head_dim = config.dim_per_head
        width, size, bias = config.hidden_size, config.attention_size, config.structure.linear_bias
        self.q = Linear(width, size, bias=bias)
        self.kv = Linear(config.text_size, 2 * size, bias=bias)
        self.proj = Linear(size, width, bias=bias)
        self.q_norm, self.k_norm = (width_norm(config, config.num_attention_heads) for _ in "qk")
        self.q_layernorm, self.k_layernorm = QKNorm(config), QKNorm(config)
        self.image_kv = self.image_k_norm = None
        if config.image_size is not None:
            self.image_kv = Linear(width, 2 * size, bias=bias)
            self.image_k_norm = width_norm(config, config.num_attention_heads)

    def forward(self, x_SBD: Tensor, text_LBD: Tensor, layout: Layout, image_IBD: Tensor | None = None) -> Tensor:
        q = self.q_layernorm(self.q_norm(rearrange(self.q(x_SBD), "S B (N K) -> S B N K", K=self.head_dim)))
        k, v = layout.per_condition(CrossAttention._keys_and_values, self, text_LBD)
        y_SBD = self.core(q, k, v, layout, True)
        if image_IBD is not None:
            k, v = layout.per_condition(CrossAttention._keys_and_values_of_image, self, image_IBD)
            y_SBD = y_SBD + self.core(q, k, v, layout.seeing(image_IBD), True)
        return self.proj(y_SBD)

    def _keys_and_values(self, text_LBD: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self._two(self.kv(text_LBD))
        return self.k_layernorm(self.k_norm(k)), v

    def _keys_and_values_of_image(self, image_IBD: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self._two(self.image_kv(image_IBD))
        return self.image_k_norm(k), v

    def _two(self, kv_LBD: Tensor) -> tuple[Tensor, Tensor]:
        # `unbind` along the axis where it lies: the gradient is one tensor in the product's own order
        return rearrange(kv_LBD, "L B (N kv K) -> L B N kv K", kv=2, K=self.head_dim).unbind(-2)
