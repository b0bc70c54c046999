"""Definitions of all ops, for any inputs and devices. The other files have their fast variants.

Shapes: S video tokens, L keys (video or text tokens), B batch, D width, N heads, K head dim, G modulation rows, I and O
input and output features, E experts.
"""

from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from megadit.models.ops.ledger import cheap
from megadit.models.ops.registry import Op
from megadit.models.packing.layout import Layout, Rows

QUERIES = 1024
"""Number of queries whose scores `batch_attention` holds in memory at once."""


@Op
def batch_attention(q_BNSK: Tensor, k_BNLK: Tensor, v_BNLK: Tensor, mask_B11L: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(K)) v, [B, N, S, K]; `mask_B11L` is True where a key may be attended to; it may also have a
    row for each query."""
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q_BNSK, k_BNLK, v_BNLK))
    outputs, start = [], 0
    for some in q.split(QUERIES, dim=2):  # for a long video, all scores would not fit in memory
        score_BNSL = some @ k.mT * q.shape[-1] ** -0.5
        if mask_B11L is not None:
            rows = mask_B11L if mask_B11L.shape[2] == 1 else mask_B11L[:, :, start : start + QUERIES]
            score_BNSL = score_BNSL.masked_fill(~rows, float("-inf"))
        outputs.append(score_BNSL.softmax(-1) @ v)
        start += QUERIES
    return torch.cat(outputs, dim=2).to(q_BNSK.dtype)


@Op
def attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, cross: bool) -> Tensor:
    """softmax(q k^T / sqrt(K), masked) v with all scores in memory, heads concatenated: [S, B, N*K].

    Args:
        q: [S, B, N, K]; B is 1 for a pack.
        k: [S, B, N, K], or [L, B, N, K] with `cross`.
        v: shaped like k.
        layout: which tokens form a sample, and which text belongs to it.
        cross: attend to text instead of video tokens; a sample without text has the null token's place. Results of
            padding have no meaning.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    score_BNSL = torch.einsum("sbnk,lbnk->bnsl", q.to(wide), k.to(wide)) * q.shape[-1] ** -0.5
    mask_BSL = layout.attended(len(q), len(k), q.device, cross=cross)
    has_key_BS1 = mask_BSL.any(-1, keepdim=True)
    score_BNSL = score_BNSL.masked_fill(~mask_BSL[:, None] & has_key_BS1[:, None], float("-inf"))
    out_BNSK = score_BNSL.softmax(-1) @ rearrange(v.to(wide), "L B N K -> B N L K") * has_key_BS1[:, None]
    return rearrange(out_BNSK, "B N S K -> S B (N K)").to(q.dtype)


@Op
def gated_residual(x_SBD: Tensor, gate_GD: Tensor, y_SBD: Tensor, rows: Rows | None = None) -> Tensor:
    """x + gate * y, [S, B, D] (adaLN-Zero, arXiv 2212.09748, section 3.2).

    `rows` says which gate each token has; without it, batch element b has gate b.
    """
    gate = gate_GD if rows is None else of_each_token(gate_GD, rows)
    return torch.addcmul(x_SBD, gate, y_SBD)


def of_each_token(x_GD: Tensor, rows: Rows) -> Tensor:
    """The row of each token, [S, B, D]; B is 1 for a pack."""
    row = rows.of_token(x_GD.device)
    return x_GD[row if row.ndim == 2 else row[:, None]]


@Op
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, gelu: str | None = None, counts_E: Tensor | None = None
) -> Tensor:
    """x W^T + b, [..., I] -> [..., O].

    Args:
        x: [..., I].
        weight: [O, I], or [E, O, I] with `counts_E`.
        bias: [O].
        gelu: `approximate` of `F.gelu`, which is applied to the result; None applies nothing.
        counts_E: x is [N, I], and expert e computes `counts_E[e]` consecutive rows, after those of expert e - 1.
    """
    if counts_E is not None:
        parts = zip(x.split(counts_E.tolist()), weight.unbind(), strict=True)
        return torch.cat([F.linear(x_nI, weight_OI) for x_nI, weight_OI in parts])
    y = F.linear(x, weight, bias)
    return y if gelu is None else F.gelu(y, approximate=gelu)


class Linear(nn.Linear):
    """`torch.nn.Linear` with this op."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return linear(x, self.weight, self.bias)


def fuses_gelu(layer: nn.Module) -> bool:
    """Whether nothing else reads a layer's output before its GELU: linear(..., gelu=...) may then compute both."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or type(layer) is not Linear:
        return False
    return not (layer._forward_pre_hooks or layer._forward_hooks)  # hooks must see the layer's call


@partial(Op, cheap=True)
def modulated_norm(
    x_SBD: Tensor,
    shift_GD: Tensor,
    scale_GD: Tensor,
    eps: float,
    rows: Rows | None = None,
    rms_weight_D: Tensor | None = None,
) -> Tensor:
    """LayerNorm(x) * (1 + scale) + shift (adaLN, arXiv 2212.09748, section 3.2).

    With `rms_weight_D`, RMSNorm(x) * weight in place of LayerNorm(x). `rows` says which row each token of a pack
    (B = 1) has; without it, batch element b has row b.
    """
    shift, factor = shift_GD, modulation_factor(scale_GD, rms_weight_D)
    if rows is not None:
        shift, factor = of_each_token(shift, rows), of_each_token(factor, rows)
    is_rms = rms_weight_D is not None
    y_SBD = rms_normalized(x_SBD, eps)[0] if is_rms else F.layer_norm(x_SBD, x_SBD.shape[-1:], eps=eps)
    return torch.addcmul(shift, y_SBD, factor)


def modulation_factor(scale_GD: Tensor, rms_weight_D: Tensor | None) -> Tensor:
    """The factor of normed tokens, [G, D]."""
    return 1 + scale_GD if rms_weight_D is None else rms_weight_D * (1 + scale_GD)


def rms_normalized(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x / rms(x), shaped like x, and 1 / rms(x), [..., 1])."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # the mean of squares overflows half precision
    rms_inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (x * rms_inverse).to(x.dtype), rms_inverse


@cheap
def rms_norm(x_SBD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight, [S, B, D], the same for every sample."""
    return rms_normalized(x_SBD, eps)[0] * weight_D


@Op
def qk_norm_rope(
    x_SBNK: Tensor, weight_K: Tensor | None, cos_SBNK: Tensor | None, sin_SBNK: Tensor | None, eps: float
) -> Tensor:
    """y = x / rms(x) * weight per head, then rotary embedding: y * cos + swap(y) * sin, [S, B, N, K]; `swap` swaps
    halves.

    QK-norm is arXiv 2302.05442 with RMSNorm, the rotation arXiv 2104.09864 with channel i paired with i + K/2. If
    the weight is None it only rotates, if cos and sin are None it only normalises.
    """
    y = x_SBNK.to(torch.promote_types(x_SBNK.dtype, torch.float32))
    if weight_K is not None:
        y = F.rms_norm(y, y.shape[-1:], eps=eps) * weight_K
    if cos_SBNK is not None:
        first, second = y.chunk(2, dim=-1)
        y = y * cos_SBNK + torch.cat([second, first], dim=-1) * sin_SBNK
    return y.to(x_SBNK.dtype)
