"""Adapter inputs of an exported network: low-rank factors for each sample of a batch.

    <group>.down   [B, N, R, I]      zeros in the rows beyond an adapter's rank
    <group>.up     [B, N, O, R]      multiplied by its scaling and its scale

A *group* are the N targets of one name, one in each block: `blocks.self_attention.q` (so that a network of 28 blocks
has some twenty such inputs, not hundreds); where blocks differ in width, of one name and size:
`blocks.attn1.to_q.320x320`. Several adapters of a sample are concatenated along R. Zeros are the base: they change no
output.

Shapes: B batch, N targets of a group, R rank of the inputs, I and O input and output features of a target.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megadit.models.configs.adapter import AdapterConfig
from megadit.models.configs.config import DiTConfig
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.configs.unet import UNetConfig
from megadit.models.lora.adapters import attached_to, chosen_targets
from megadit.models.lora.layers import SlotLowRank
from megadit.models.networks.registry import SavedNetwork
from megadit.models.shared.errors import UserError

NAME = "slots"
"""Name of the adapter inputs among the adapters of a linear."""
USUAL_TARGETS: Mapping[type, tuple[str, ...]] = {
    DiTConfig: AdapterConfig(rank=1).targets,
    UNetConfig: ("*.attentions.*",),
}
"""Configuration class -> patterns that adapters usually change: attention and MLPs."""
_BLOCK = re.compile(r"^blocks\.\d+\.|^network\.(\w+_blocks\.\d+|mid_block)\.\w+\.\d+\.(transformer_blocks\.\d+\.)?")
"""Prefix of a target's path that names its block, in a transformer and in a U-Net."""
State = Mapping[str, Tensor]


class Group(NamedTuple):
    """Targets of one name, in the order of their blocks."""

    targets: tuple[str, ...]
    in_features: int
    out_features: int


class Packed(NamedTuple):
    """An adapter as values of adapter inputs."""

    factors: dict[str, Tensor]
    """Input name -> factor, without the batch dimension: [N, r, I] and [N, O, r]."""
    ranks: dict[str, int]
    """Group -> its r."""


@dataclass(frozen=True, kw_only=True)
class AdapterInputs:
    """The adapter inputs that a network was exported with."""

    config: NetworkConfig
    rank: int
    """Maximum sum of the ranks of a sample's adapters."""
    targets: tuple[str, ...] = ()
    """Patterns of targets; none: the usual ones."""

    def __post_init__(self) -> None:
        if not self.targets:
            object.__setattr__(self, "targets", USUAL_TARGETS[type(self.config)])

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], config: NetworkConfig) -> "AdapterInputs":
        return cls(config=config, rank=values["rank"], targets=tuple(values["targets"]))

    def to_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, "targets": list(self.targets)}

    @cached_property
    def groups(self) -> dict[str, Group]:
        """Group by name.

        Raises:
            UserError: for a pattern that names no target.
        """
        found: dict[str, dict[tuple[int, int], list[str]]] = {}
        for name, target in chosen_targets(self.config, self.targets).items():
            of_name = found.setdefault(_BLOCK.sub("blocks.", name), {})
            of_name.setdefault((target.in_features, target.out_features), []).append(name)
        return {
            name if len(of_name) == 1 else f"{name}.{sizes[0]}x{sizes[1]}": Group(tuple(targets), *sizes)
            for name, of_name in found.items()
            for sizes, targets in of_name.items()
        }

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """The shape of each input without the batch, by its name, in order."""
        shapes = {}
        for name, group in self.groups.items():
            shapes[f"{name}.down"] = (len(group.targets), self.rank, group.in_features)
            shapes[f"{name}.up"] = (len(group.targets), group.out_features, self.rank)
        return shapes

    def packed(self, state: State, adapter: AdapterConfig) -> Packed:
        """Convert an adapter state, as for `load_adapter`, to input values at scale 1.

        Raises:
            UserError: for an adapter that the inputs cannot represent.
        """
        self.check(state)
        packed = Packed({}, {})
        for name, group in self.groups.items():
            ranks = [len(state[f"{target}.down"]) for target in group.targets if f"{target}.down" in state]
            if not ranks:
                continue
            packed.ranks[name] = most = max(ranks)
            down = torch.zeros(len(group.targets), most, group.in_features)
            up = torch.zeros(len(group.targets), group.out_features, most)
            for place, target in enumerate(group.targets):
                if f"{target}.down" in state:
                    rank = len(state[f"{target}.down"])
                    down[place, :rank] = state[f"{target}.down"]
                    up[place, :, :rank] = adapter.scaling * state[f"{target}.up"]
            packed.factors[f"{name}.down"], packed.factors[f"{name}.up"] = down, up
        return packed

    def check(self, state: State) -> None:
        """Raises UserError for an adapter state that the inputs cannot represent."""
        known = {target for group in self.groups.values() for target in group.targets}
        names = dict.fromkeys(key.rpartition(".")[0] for key in state)
        if any(key.endswith(".magnitude") for key in state):
            raise UserError(
                "a DoRA scales the output of its base, which low-rank inputs cannot: merge it into its base (megadit "
                "bundle BASE OUT --merge ADAPTER) and export that, or use the torch runtime"
            )
        if any(key.endswith(".bias") for key in state):
            raise UserError(
                "the adapter changes biases, which low-rank inputs cannot: merge it into its base (megadit bundle "
                "BASE OUT --merge ADAPTER) and export that, or use the torch runtime"
            )
        if others := [name for name in names if name not in known]:
            raise UserError(
                f"the adapter changes {others[0]}, which was exported without inputs for adapters: export again with "
                f"--adapter_targets, or use the torch runtime"
            )
        self.check_rank(max(len(value) for key, value in state.items() if key.endswith(".down")))

    def check_rank(self, rank: int) -> None:
        """Raises UserError if a rank, of one adapter or the sum for a video, exceeds that of the inputs."""
        if rank > self.rank:
            raise UserError(
                f"the adapters have rank {rank} together, the exported networks at most {self.rank}: export again with "
                f"--adapter_rank {rank}, or use the torch runtime"
            )

    def check_together(self, adapters: Sequence[Mapping[str, int]]) -> None:
        """Raises UserError if the adapters of one video, with these `Packed.ranks`, exceed the rank of the inputs."""
        self.check_rank(max((sum(ranks.get(group, 0) for ranks in adapters) for group in self.groups), default=0))

    def filled(
        self, batch: int, adapters: Sequence[tuple[Packed, Tensor]], device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """The inputs for a batch, float32, from adapters (`packed`) and their scales [B].

        Raises:
            UserError: if the adapters of a sample exceed the rank of the inputs.
        """
        inputs = {name: torch.zeros(batch, *shape, device=device) for name, shape in self.inputs.items()}
        for sample in range(batch):
            used = [(packed, scale_B[sample].item()) for packed, scale_B in adapters if scale_B[sample] != 0]
            self.check_together([packed.ranks for packed, _ in used])
            ends = dict.fromkeys(self.groups, 0)
            for packed, scale in used:
                for name, rank in packed.ranks.items():
                    rows = slice(ends[name], ends[name] + rank)
                    inputs[f"{name}.down"][sample, :, rows] = packed.factors[f"{name}.down"].to(device)
                    inputs[f"{name}.up"][sample, :, :, rows] = scale * packed.factors[f"{name}.up"].to(device)
                    ends[name] += rank
        return inputs


class AdapterInputLinears:
    """The linears of a network that adapter inputs are attached to."""

    def __init__(self, dit: SavedNetwork, slots: AdapterInputs) -> None:
        """Attaches empty adapter inputs."""
        targets = chosen_targets(slots.config, slots.targets)
        self._inputs = tuple(slots.inputs)
        self._places: list[tuple[SlotLowRank, list[tuple[str, int]]]] = []
        """Each with the (group, index in it) of its targets."""
        by_linear: dict[str, list[tuple[str, int]]] = {}
        for name, group in slots.groups.items():
            for place, target in enumerate(group.targets):
                by_linear.setdefault(targets[target].linear, []).append((name, place))
        modules: dict[str, nn.Module] = dict(dit.named_modules())
        for path, places in by_linear.items():
            rows = [targets[slots.groups[name].targets[place]].rows for name, place in places]
            low_rank = SlotLowRank(rows, samples_first=slots.config.samples_first)
            attached_to(modules[path])[NAME] = low_rank
            self._places.append((low_rank, places))

    @contextmanager
    def filled(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Apply these adapters within the block: the inputs in their order, [B, N, R, I] and [B, N, O, R]."""
        factors = dict(zip(self._inputs, values, strict=True))
        try:
            for low_rank, places in self._places:
                low_rank.factors = [
                    (factors[f"{name}.down"][:, place], factors[f"{name}.up"][:, place]) for name, place in places
                ]
            yield
        finally:
            for low_rank, _ in self._places:
                low_rank.factors = ()
