"""Training blocks as CUDA graphs: the forward and backward of each are recorded once and replayed for every pack.

Every pack has as many tokens and text places, but other segments. A recording reads these as tensors of fixed size: the
segment of each token, and the bounds of the maximum number of segments, of which unused ones are empty.

Shapes: S video tokens, L text places, D width, G segments of a pack.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadit.models.networks.attention import Rotary
from megadit.models.networks.blocks import BlockInputs, BlockStack
from megadit.models.ops.ledger import cheap_values_recomputed
from megadit.models.packing.segments import LONGEST_RUN, RowsByToken, attended_in_segments
from megadit.models.shared.errors import UserError

Compute = Callable[..., Tensor]
Record = Callable[[tuple[Compute, ...], tuple[tuple[Tensor, ...], ...]], tuple[Compute, ...]]
"""Functions with the results and gradients of other functions, for inputs of the same shapes. They are called in this
order, and their backwards in reverse; each call overwrites the result of the previous one."""


def record_cuda_graphs(functions: tuple[Compute, ...], samples: tuple[tuple[Tensor, ...], ...]) -> tuple[Compute, ...]:
    """Records the forwards and backwards of `functions` on the GPU.

    `samples` are inputs of each function, with the shapes of all later calls.

    Raises:
        UserError: if a function synchronizes with the device, which cannot be recorded.
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
    """Lets other threads use the GPU during a recording, such as the one that pins the memory of batches."""
    graph = torch.cuda.graph
    torch.cuda.graph = partial(graph, capture_error_mode="thread_local")
    try:
        yield
    finally:
        torch.cuda.graph = graph


@dataclass(frozen=True, slots=True)
class FixedLayout:
    """A layout with the same sizes for every pack: what a block reads of a `PackLayout`, as tensors."""

    bounds: Tensor
    text_bounds: Tensor
    longest: int
    """Maximum length of a segment: the pack's length."""
    longest_text: int
    rows: RowsByToken
    is_causal: bool = False
    """Always False: causal text towers are not recorded."""

    def on(self, device: torch.device) -> "FixedLayout":
        return self

    def attended(self, num_queries: int, num_keys: int, device: torch.device, *, cross: bool) -> Tensor:
        """bool [1, S, L or S]: see `Layout`."""
        key_bounds = self.text_bounds if cross else self.bounds
        return attended_in_segments(self.bounds, key_bounds, num_queries, num_keys, causal=False)

    def per_condition(self, function: Callable[..., Any], owner: nn.Module, *inputs: Any) -> Any:
        return function(owner, *inputs)


class GraphedBlocks(BlockStack):
    """Blocks that are replayed if a backward follows; without one, or for packs with too many segments or token spans,
    they are called."""

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
        shared = tuple(_place(tensor) for tensor in tensors.values())  # shared by all blocks
        weights = (tuple(_own(parameter) for parameter in block.parameters()) for block in self.values())
        return self._record(functions, tuple((_place(x_SBD), *shared, *own) for own in weights))


def _most_starts(num_tokens: int, num_segments: int) -> int:
    """Maximum number of starts of runs of tokens: two for each segment, and one for each run of full length."""
    return num_tokens // LONGEST_RUN + 2 * num_segments + 1


def _place(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _own(parameter: Tensor) -> Tensor:
    """A view of a parameter, as an input of a recording.

    Autograd would accumulate the gradient of the parameter itself on the default stream, for which a recording may not
    wait.
    """
    return parameter.detach().requires_grad_(parameter.requires_grad)


def _tensors(inputs: BlockInputs, num_segments: int) -> dict[str, Tensor]:
    """All inputs of a block except its tokens, with the size for `num_segments` segments."""
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
    """A block as a function of tensors: those with these `names`, then its own parameters."""
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
