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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadit.models.blocks import Context
from megadit.models.embeddings import Rotary
from megadit.models.layers import BlockStack
from megadit.models.ops.condition_rows import row_of_token
from megadit.models.ops.ledger import cheap_values_recomputed
from megadit.models.shared.errors import UserError

Record = Callable[[tuple[nn.Module, ...], tuple[tuple[Tensor, ...], ...]], tuple[Callable[..., Tensor], ...]]
"""Functions that compute what modules do with other tensors of the samples' shapes, and its gradients. They are called
in this order, and their backwards in the opposite one; what a function gives, its next call overwrites."""


def record_cuda_graphs(
    modules: tuple[nn.Module, ...], samples: tuple[tuple[Tensor, ...], ...]
) -> tuple[Callable[..., Tensor], ...]:
    """Records the forwards and backwards of `modules` on the GPU.

    Raises:
        UserError: if one asks the device for anything meanwhile, which no recording can.
    """
    try:
        with _others_may_use_the_gpu():
            return torch.cuda.make_graphed_callables(modules, samples, allow_unused_input=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"these blocks cannot be recorded as CUDA graphs ({reason}); leave out parallel.cuda_graph_max_segments"
        ) from error


@contextmanager
def _others_may_use_the_gpu() -> Iterator[None]:
    """A recording is not spoilt by what other threads do, such as the one that pins the memory of batches."""
    graph = torch.cuda.graph
    torch.cuda.graph = partial(graph, capture_error_mode="thread_local")
    try:
        yield
    finally:
        torch.cuda.graph = graph


@dataclass(frozen=True, slots=True)
class FixedLayout:
    """What a block reads of a `SegmentLayout`, as tensors and sizes that are those of every pack."""

    token_bounds: Tensor
    """int32 [G + 1]: the first token of each segment, and the number of all."""
    text_bounds: Tensor
    num_tokens: int
    num_slots: int

    def bounds(self, device: torch.device, *, of_text: bool) -> tuple[Tensor, int]:
        """As `SegmentLayout` has them; a segment may be as long as a pack."""
        return (self.text_bounds, self.num_slots) if of_text else (self.token_bounds, self.num_tokens)

    def constant(self, key: object, compute: Callable[[], object]) -> object:
        return compute()


class GraphedBlocks(BlockStack):
    """Blocks that are replayed where a backward follows, and called where not, or where a pack has more segments."""

    def __init__(self, blocks: dict[str, nn.Module], max_segments: int, record: Record = record_cuda_graphs) -> None:
        super().__init__(blocks)
        self.max_segments = max_segments
        self._record = record
        self._graphs: tuple[Callable[..., Tensor], ...] | None = None

    def forward(self, x_SBD: Tensor, context: Context) -> Tensor:
        is_watched = any(block._forward_hooks for block in self.values())
        if not torch.is_grad_enabled() or is_watched or context.layout.num_segments > self.max_segments:
            return super().forward(x_SBD, context)
        tensors = _tensors(context, self.max_segments)
        if self._graphs is None:
            self._graphs = self._recorded(x_SBD, tensors)
        for graph in self._graphs:
            x_SBD = graph(x_SBD, *tensors.values())
        return x_SBD

    def _recorded(self, x_SBD: Tensor, tensors: dict[str, Tensor]) -> tuple[Callable[..., Tensor], ...]:
        modules = tuple(_OfTensors(block, tuple(tensors)) for block in self.values())
        shared = tuple(_place(tensor) for tensor in tensors.values())  # every block reads the same there
        return self._record(modules, tuple((_place(x_SBD), *shared) for _ in modules))


def _place(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _tensors(context: Context, num_segments: int) -> dict[str, Tensor]:
    """All that a block reads beside its tokens, of the size that it has with `num_segments` segments."""
    layout, device = context.layout, context.condition_GD.device
    missing = num_segments - layout.num_segments

    def bounds(of_text: bool) -> Tensor:
        bounds, _ = layout.bounds(device, of_text=of_text)
        return torch.cat([bounds, bounds[-1:].expand(missing)])

    found = {
        "condition": F.pad(context.condition_GD, (0, 0, 0, missing)),
        "text": context.text_LBD,
        "row": row_of_token(context.runs, device),
        "token_bounds": bounds(of_text=False),
        "text_bounds": bounds(of_text=True),
        "shared": None if context.shared_GM is None else F.pad(context.shared_GM, (0, 0, 0, missing)),
        "positions": context.positions_SBD,
        **({} if context.rotary is None else context.rotary._asdict()),
    }
    return {name: tensor for name, tensor in found.items() if tensor is not None}


class _OfTensors(nn.Module):
    """A block as a function of tensors alone, with these `names`."""

    def __init__(self, block: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.block, self.names = block, names

    def forward(self, x_SBD: Tensor, *tensors: Tensor) -> Tensor:
        given = dict(zip(self.names, tensors, strict=True))
        text_LBD = given.get("text")
        layout = FixedLayout(
            given["token_bounds"], given["text_bounds"], len(x_SBD), 0 if text_LBD is None else len(text_LBD)
        )
        rotary = Rotary(given["cos"], given["sin"]) if "cos" in given else None
        shared, positions = given.get("shared"), given.get("positions")
        context = Context(given["condition"], text_LBD, layout, given["row"], rotary, shared, positions)
        with cheap_values_recomputed():
            return self.block(x_SBD, context)
