"""Blocks in training as CUDA graphs: each one's forward and backward, recorded once and replayed for every pack.

A pack always has as many tokens and text slots, but its segments are others each time. What tells them apart is given
to a recording as tensors of one size: the segment of each token, and the bounds of as many segments as a pack may have,
of which those that it has not have no tokens.

Shapes: S video tokens, L text slots, D width, G segments of a pack.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadit.models.networks.blocks import BlockInputs, BlockStack
from megadit.models.networks.embeddings import Rotary
from megadit.models.ops.ledger import cheap_values_recomputed
from megadit.models.packing.segments import LONGEST_RUN, RowsByToken
from megadit.models.shared.errors import UserError

Compute = Callable[..., Tensor]
Record = Callable[[tuple[Compute, ...], tuple[tuple[Tensor, ...], ...]], tuple[Compute, ...]]
"""Functions that compute what others do with other tensors of the samples' shapes, and its gradients. They are called
in this order, and their backwards in the opposite one; what a function gives, its next call overwrites."""


def record_cuda_graphs(functions: tuple[Compute, ...], samples: tuple[tuple[Tensor, ...], ...]) -> tuple[Compute, ...]:
    """Records the forwards and backwards of `functions` on the GPU.

    `samples` are the inputs of each function, whose shapes a recording keeps.

    Raises:
        UserError: if one asks the device for anything meanwhile, which no recording can.
    """
    try:
        with _other_streams_allowed():
            return torch.cuda.make_graphed_callables(functions, samples, allow_unused_input=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"these blocks cannot be recorded as CUDA graphs ({reason}); leave out parallel.cuda_graph_max_segments"
        ) from error


@contextmanager
def _other_streams_allowed() -> Iterator[None]:
    """A recording is not spoilt by what other threads do, such as the one that pins the memory of batches."""
    graph = torch.cuda.graph
    torch.cuda.graph = partial(graph, capture_error_mode="thread_local")
    try:
        yield
    finally:
        torch.cuda.graph = graph


@dataclass(frozen=True, slots=True)
class FixedLayout:
    """Layout with the same sizes for every pack: the part of a `PackLayout` that a block reads, as tensors."""

    bounds: Tensor
    text_bounds: Tensor
    longest: int
    """Maximum length of a segment: that of the pack."""
    longest_text: int
    rows: RowsByToken
    is_causal: bool = False
    """Always False: causal text towers are not recorded."""

    def on(self, device: torch.device) -> "FixedLayout":
        return self

    def per_condition(self, function: Callable[..., Any], owner: nn.Module, *inputs: Any) -> Any:
        return function(owner, *inputs)


class GraphedBlocks(BlockStack):
    """Blocks that are replayed where a backward follows, and called where not, or where a pack has more
    segments or pieces."""

    def __init__(self, blocks: dict[str, nn.Module], max_segments: int, record: Record = record_cuda_graphs) -> None:
        super().__init__(blocks)
        self.max_segments = max_segments
        self._record = record
        self._graphs: tuple[Callable[..., Tensor], ...] | None = None

    def forward(self, x_SBD: Tensor, inputs: BlockInputs) -> Tensor:
        """Tokens [S, B, D] after all blocks."""
        is_watched = any(block._forward_hooks for block in self.values())
        if not torch.is_grad_enabled() or is_watched or not self._fits(inputs, len(x_SBD)):
            return super().forward(x_SBD, inputs)
        tensors = _tensors(inputs, self.max_segments)
        if self._graphs is None:
            self._graphs = self._recorded(x_SBD, tensors)
        for graph, block in zip(self._graphs, self.values(), strict=True):
            x_SBD = graph(x_SBD, *tensors.values(), *block.parameters())
        return x_SBD

    def _fits(self, inputs: BlockInputs, num_tokens: int) -> bool:
        if inputs.layout.is_causal:
            return False
        num_starts = len(inputs.layout.rows.starts_of_runs(inputs.condition_GD.device))
        fits = num_starts <= _most_starts(num_tokens, self.max_segments)
        return fits and len(inputs.condition_GD) <= self.max_segments

    def _recorded(self, x_SBD: Tensor, tensors: dict[str, Tensor]) -> tuple[Compute, ...]:
        functions = tuple(partial(_of_tensors, block, tuple(tensors)) for block in self.values())
        shared = tuple(_place(tensor) for tensor in tensors.values())  # every block reads the same there
        weights = (tuple(_own(parameter) for parameter in block.parameters()) for block in self.values())
        return self._record(functions, tuple((_place(x_SBD), *shared, *own) for own in weights))


def _most_starts(num_tokens: int, num_segments: int) -> int:
    """Maximum number of starts of runs of tokens: two stretches for each segment, and each run of full length."""
    return num_tokens // LONGEST_RUN + 2 * num_segments + 1


def _place(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _own(parameter: Tensor) -> Tensor:
    """The same memory as an input of a recording.

    Autograd adds a parameter's gradient up on the stream on which Megatron first asked where that happens, the default
    one, which no recording may wait for.
    """
    return parameter.detach().requires_grad_(parameter.requires_grad)


def _tensors(inputs: BlockInputs, num_segments: int) -> dict[str, Tensor]:
    """All that a block reads beside its tokens, of the size that it has with `num_segments` segments."""
    layout, device = inputs.layout, inputs.condition_GD.device
    missing = num_segments - layout.num_segments
    missing_rows = num_segments - len(inputs.condition_GD)
    row_S, starts_P = layout.rows.of_token(device), layout.rows.starts_of_runs(device)
    missing_starts = _most_starts(len(row_S), num_segments) - len(starts_P)

    def extended(bounds: Tensor) -> Tensor:
        return torch.cat([bounds, bounds[-1:].expand(missing)])

    found = {
        "condition": F.pad(inputs.condition_GD, (0, 0, 0, missing_rows)),
        "text": inputs.text_LBD,
        "row": row_S,
        "starts": F.pad(starts_P, (0, missing_starts), value=len(row_S)),
        "token_bounds": extended(layout.on(device).bounds),
        "text_bounds": extended(layout.on(device).text_bounds),
        "shared": None if inputs.shared_GM is None else F.pad(inputs.shared_GM, (0, 0, 0, missing_rows)),
        "positions": inputs.positions_SBD,
        **({} if inputs.rotary is None else inputs.rotary._asdict()),
    }
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _of_tensors(block: nn.Module, names: tuple[str, ...], x_SBD: Tensor, *tensors: Tensor) -> Tensor:
    """A block as a function of tensors alone: those with these `names`, then its own parameters."""
    named = dict(zip(names, tensors, strict=False))
    parameters = zip((name for name, _ in block.named_parameters()), tensors[len(names) :], strict=True)
    text_LBD = named.get("text")
    layout = FixedLayout(
        bounds=named["token_bounds"],
        text_bounds=named["text_bounds"],
        longest=len(x_SBD),
        longest_text=0 if text_LBD is None else len(text_LBD),
        rows=RowsByToken(named["row"], named["starts"]),
    )
    inputs = BlockInputs(
        condition_GD=named["condition"],
        text_LBD=text_LBD,
        layout=layout,
        rotary=Rotary(named["cos"], named["sin"]) if "cos" in named else None,
        shared_GM=named.get("shared"),
        positions_SBD=named.get("positions"),
    )
    with cheap_values_recomputed():
        return torch.func.functional_call(block, dict(parameters), (x_SBD, inputs))
