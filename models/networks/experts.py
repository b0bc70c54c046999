"""A mixture of experts in place of an MLP: each token is computed by a few of many small MLPs.

    p = softmax(W x)                        weight of each expert for a token, in float32
    chosen                                  by the tokens, or by the experts (`ExpertConfig.routing`)
    y = sum of p_e FFN_e(x) over chosen e   and FFN_shared(x), where there is a shared expert

Shapes: S video tokens of this rank, B batch, D width, E experts, M width of an expert, N tokens sorted by expert
(repeated for each expert that computes them).
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadit.models.configs.block import BlockConfig, ExpertConfig
from megadit.models.networks.blocks import MLP, activation
from megadit.models.ops.reference import linear
from megadit.models.packing.dense_layout import DenseLayout
from megadit.models.packing.layout import Layout
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import ConditionRows, LengthGroup


class Experts(nn.Module):
    """MLPs of one shape, each of which computes its own tokens.

    The first linears have one output for each hidden number, or two interleaved ones (SwiGLU).
    """

    def __init__(
        self, num_experts: int, width: int, hidden: int, activation: Callable[[Tensor], Tensor], factors: int
    ) -> None:
        super().__init__()
        self.activation = activation
        self.fc1 = nn.Parameter(torch.empty(num_experts, factors * hidden, width))
        self.fc2 = nn.Parameter(torch.empty(num_experts, width, hidden))

    def forward(self, x_ND: Tensor, weight_N: Tensor, counts_E: Tensor) -> Tensor:
        """weight * FFN_e(x): expert e computes `counts_E[e]` consecutive tokens, after those of expert e - 1."""
        return self._compute(x_ND, weight_N[:, None], lambda x, weight: linear(x, weight, None, None, counts_E))

    def on_all_tokens(self, x_SBD: Tensor, weight_SBE: Tensor) -> Tensor:
        """sum of weight_e FFN_e(x) over all experts: E times the work, but no shape depends on values."""

        def of_expert(index: int) -> Tensor:
            return self._compute(x_SBD, weight_SBE[..., index, None], lambda x, weight: linear(x, weight[index]))

        return sum(of_expert(index) for index in range(len(self.fc1)))

    def _compute(self, x: Tensor, weight: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        h = self.activation(product(x, self.fc1)) * weight
        return product(h.to(x.dtype), self.fc2)


def compute_here(experts: Experts, x_SBD: Tensor, weight_SBE: Tensor, chosen_SBE: Tensor) -> Tensor:
    """sum of weight_e FFN_e(x), [S, B, D], over each token's chosen experts, all of which are on this rank."""
    if torch.compiler.is_exporting():  # a graph has no tensors whose size depends on values
        return experts.on_all_tokens(x_SBD, weight_SBE * chosen_SBE)
    x_TD, chosen_ET = x_SBD.flatten(0, 1), chosen_SBE.flatten(0, 1).T
    expert_N, token_N = chosen_ET.nonzero(as_tuple=True)
    weight_N = weight_SBE.flatten(0, 1)[token_N, expert_N]
    y_ND = experts(x_TD[token_N], weight_N, chosen_ET.sum(1))
    return torch.zeros_like(x_TD).index_add(0, token_N, y_ND).view_as(x_SBD)


def chosen_by_tokens(score_SBE: Tensor, experts: ExpertConfig) -> Tensor:
    """bool [S, B, E]: the `top_k` experts of each token."""
    best = score_SBE.topk(experts.top_k, dim=-1).indices
    return torch.zeros_like(score_SBE, dtype=torch.bool).scatter(-1, best, True)


def chosen_by_experts(score_SBE: Tensor, layout: PackLayout | DenseLayout, *, experts: ExpertConfig) -> Tensor:
    """bool [S, B, E]: the tokens that each expert chooses in every sample (arXiv 2410.02098, section 3.2)."""
    if layout.groups is None:
        best = score_SBE.topk(experts.capacity(score_SBE.shape[0]), dim=0).indices
        return torch.zeros_like(score_SBE, dtype=torch.bool).scatter(0, best, True)
    chosen_SBE = torch.zeros_like(score_SBE, dtype=torch.bool)
    for group in layout.groups:
        if not group.is_padding:
            sample_csE, score_csE = (_samples(tensor, group) for tensor in (chosen_SBE, score_SBE))
            sample_csE.scatter_(1, score_csE.topk(experts.capacity(group.length), dim=1).indices, True)
    return chosen_SBE


def _samples(x_S1E: Tensor, group: LengthGroup) -> Tensor:
    """A group's tokens sample by sample: a view [c, s, E]."""
    return x_S1E[group.start : group.stop, 0].unflatten(0, (group.count, group.length))


ExpertCompute = Callable[[Experts, Tensor, Tensor, Tensor], Tensor]
"""Signature of `compute_here`; `megatron.parallelize` sets one that sends tokens to their experts' ranks."""
ExpertChoice = Callable[[Tensor, Layout], Tensor]
"""Maps scores [S, B, E] of this rank's tokens to the tokens that each expert chooses; `megatron.parallelize` sets one
that chooses among the tokens of all ranks."""


class ExpertLoad:
    """Number of tokens that each expert of a layer computes: in the whole previous step, and so far in this step here.

    The fractions of the previous step are the same on all ranks and for all micro-batches, however a batch is divided.
    """

    def __init__(self, num_experts: int) -> None:
        self._counts_E = torch.zeros(num_experts, dtype=torch.long, device="cpu")
        self.share_E = torch.full((num_experts,), 1 / num_experts, device="cpu")

    def count(self, chosen_SBE: Tensor) -> None:
        self._counts_E = self._counts_E.to(chosen_SBE.device) + chosen_SBE.sum((0, 1))

    def take_counts(self) -> Tensor:
        """int64 [E]: the counts since the last call."""
        counts_E, self._counts_E = self._counts_E, torch.zeros_like(self._counts_E)
        return counts_E

    def set_counts(self, counts_E: Tensor) -> None:
        """Set the experts' fractions from the token counts of a whole step."""
        if counts_E.sum() > 0:
            self.share_E = (counts_E.double() / counts_E.sum()).float()


class _Balance(torch.autograd.Function):
    """Returns scores unchanged; adds the gradient of the load-balancing loss to theirs.

    The loss is coefficient * E * sum_e f_e p_e for each token (arXiv 2101.03961, eq. 4), f_e the fraction of expert e
    in the previous step. It is added as a gradient because a pipeline stage has no loss to add it to. The backward runs
    once, also with recomputation, and therefore counts the tokens too.
    """

    @staticmethod
    def forward(ctx, score, chosen, load, coefficient):
        ctx.save_for_backward(chosen)
        ctx.load, ctx.coefficient = load, coefficient
        return score.view_as(score)

    @staticmethod
    def backward(ctx, grad):
        (chosen,) = ctx.saved_tensors
        ctx.load.count(chosen)
        share_E = ctx.load.share_E.to(grad)
        is_no_padding = chosen.any(-1, keepdim=True)
        return grad + ctx.coefficient * len(share_E) * share_E * is_no_padding, None, None, None


class Router(nn.Module):
    """softmax(W x), in float32 or more."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_experts, width))

    def forward(self, x_SBD: Tensor) -> Tensor:
        """Each expert's weight, [S, B, E]."""
        precision = torch.promote_types(x_SBD.dtype, torch.float32)
        return F.linear(x_SBD.to(precision), self.weight.to(precision)).softmax(-1)


class ExpertMLP(nn.Module):
    """Experts, some of which a router chooses for each token, and optionally a shared expert."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config, width = config.experts, config.hidden_size
        num_experts = self.config.num_experts
        self.router = Router(width, num_experts)
        self.experts = Experts(num_experts, width, config.expert_size, activation(config), config.mlp_factors)
        shared_size = self.config.shared_ffn_hidden_size
        self.shared = MLP(config, shared_size) if shared_size else None
        self.compute: ExpertCompute = compute_here
        self.expert_choice: ExpertChoice = partial(chosen_by_experts, experts=self.config)
        self.load = ExpertLoad(self.config.num_experts)

    def forward(self, x_SBD: Tensor, layout: Layout) -> Tensor:
        """[S, B, D] of tokens; `layout` says which sample each belongs to. Padding has no expert."""
        score_SBE = self.router(x_SBD)
        chosen_SBE = self.choose(score_SBE.detach(), layout)
        if self.config.routing == "token_choice" and torch.is_grad_enabled():
            score_SBE = _Balance.apply(score_SBE, chosen_SBE, self.load, self.config.balance_coefficient)
        y_SBD = self.compute(self.experts, x_SBD, score_SBE, chosen_SBE)
        return y_SBD if self.shared is None else y_SBD + self.shared(x_SBD)

    def choose(self, score_SBE: Tensor, layout: Layout) -> Tensor:
        """bool [S, B, E]: which experts compute which tokens."""
        if self.config.routing == "expert_choice":
            return self.expert_choice(score_SBE, layout)
        chosen_SBE = chosen_by_tokens(score_SBE, self.config)
        for group in layout.rows.groups if isinstance(layout.rows, ConditionRows) else ():
            if group.is_padding:
                chosen_SBE[group.start : group.stop] = False
        return chosen_SBE
