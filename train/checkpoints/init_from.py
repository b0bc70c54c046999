"""Initial weights and teachers of a run, read from bundles, checkpoints or folders of runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from megadit.models.bundle import Bundle, check_single, check_transformer
from megadit.models.configs.config import DiTConfig
from megadit.models.convert.adapters.files import read_adapter
from megadit.models.lora.adapters import chosen_targets, fingerprint
from megadit.models.megatron.checkpoint import CONFIG, read_network
from megadit.models.networks.initialize import initial_value
from megadit.models.networks.vit import resized_positions
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import is_bundle
from megadit.models.storage.components import TENSOR_FILE, network_shapes
from megadit.models.storage.tensor_source import open_safetensors
from megadit.train.checkpoints.to_bundle import find_checkpoint
from megadit.train.config.load import load_config
from megadit.train.config.schema import RunConfig

Weights = Callable[[str], Tensor]
"""Function from a name to a whole tensor of the network."""
UNTRAINED = (
    "it is not trained here, where packs and parallel layouts are those of transformers; train a DiT on images "
    "instead: megadit train --recipe image_xl_256"
)
"""Remedy for weights of another kind of network."""
MAY_CHANGE = ("conditioning_sigma", "parameterization")
"""Settings of a network on which no tensor depends: a run may change them."""
MAY_CHANGE_OF_POSITIONS = ("rope_scale", "rope_interpolation")
"""Further such settings, for another resolution; but an adapter must have those of its base."""
MAY_COME = ("guidance_embedding_range",)
"""Settings that a network may gain or change, but not lose; an adapter's base may not gain them either."""
MAY_CHANGE_OF_CLASSIFIER = ("learned_positions", "num_classes")
"""Settings that may change in a classifier: positions are resized, and other classes get a new head."""


@dataclass(frozen=True, eq=False)
class InitialWeights:
    """A network with which a run starts, or from which it learns."""

    config: DiTConfig
    read: Weights
    adapter: Mapping[str, Tensor] | None = None
    """State of an adapter on these weights (`models/lora/adapters.py`)."""

    @cached_property
    def fingerprint_of_base(self) -> str:
        """`adapters.fingerprint` of the weights without adapter, all of which are read."""
        return fingerprint(network_shapes(self.config), self.read)

    @property
    def fingerprint(self) -> str:
        """`adapters.fingerprint` of weights and adapter."""
        if (adapter := self.adapter) is None:
            return self.fingerprint_of_base
        names = [*network_shapes(self.config), *adapter]
        return fingerprint(names, lambda name: adapter[name] if name in adapter else self.read(name))


def initial_weights(config: RunConfig) -> InitialWeights | None:
    """Initial weights of a run: those of `checkpoint.init_from`, or a student's teacher with its adapter; None for
    random initialization. Raises UserError as `read_initial_weights`, and for an adapter that does not fit the
    run's."""
    source = config.starting_weights
    return None if source is None else _with_teachers_adapter(config, read_initial_weights(config, source))


def read_teacher(config: RunConfig) -> InitialWeights:
    """The teacher of a student, with its adapter, if any. Raises UserError as `initial_weights`; if the teacher was not
    trained with the samples' conditioning; and for guidance scales outside its range."""
    source = config.train.distill.teacher
    teacher = read_initial_weights(config, source)
    if config.data.conditioning and teacher.config.conditioning_sigma is None:
        raise UserError(f"the teacher {source} was not trained with conditioning: leave out data.conditioning")
    check_scales(config.model.guidance_embedding_range, teacher.config.guidance_embedding_range, source)
    return _with_teachers_adapter(config, teacher)


def check_scales(asked: tuple[float, float] | None, known: tuple[float, float] | None, teacher: str | Path) -> None:
    """Raises UserError for guidance scales of a student outside the range of its guidance-distilled teacher."""
    if known is None:
        return
    (low, high), (least, most) = asked, known
    if low < least or high > most:
        raise UserError(
            f"model.guidance_embedding_range=[{low:g},{high:g}] exceeds {least:g} to {most:g}, the range of the "
            f"guidance-distilled teacher {teacher}"
        )


def _with_teachers_adapter(config: RunConfig, initial: InitialWeights) -> InitialWeights:
    """Add the adapter of a student's teacher, with which the adapters of student and critic start. Raises UserError if
    it belongs to other weights, or differs in shape from what the run trains."""
    asked, source = config.train.adapter, config.train.distill and config.train.distill.teacher_adapter
    if source is None:
        return initial
    adapter = read_adapter(source, initial.config)
    if adapter.base not in (None, found := initial.fingerprint_of_base):
        raise UserError(
            f"the adapter {source} was trained with other weights ({adapter.base}) than these ({found}); give its base"
        )
    state, its = adapter.to_state()
    ranks = {change.rank for change in adapter.changes.values()}
    theirs = (its.kind, its.scaling, ranks, {*adapter.changes})
    if theirs != (asked.kind, asked.scaling, {asked.rank}, {*chosen_targets(config.model, asked.targets)}):
        raise UserError(
            f"the adapter {source} is a {its.kind} of rank {', '.join(map(str, sorted(ranks)))} and scaling "
            f"{its.scaling:g} of {len(adapter.changes)} linears, with which that of the run starts: give train.adapter "
            "the same kind, rank, alpha and targets"
        )
    return replace(initial, adapter=state)


def read_initial_weights(config: RunConfig, source: str) -> InitialWeights:
    """The network of a bundle, checkpoint or folder of a run, for a run with the same network. Raises UserError if
    `source` is neither, or has another network (another parameterization is allowed)."""
    if not is_bundle(source):
        checkpoint = find_checkpoint(Path(source))
        model = load_config(checkpoint / CONFIG).model
        _check_same_network(config, model, source)
        return InitialWeights(
            model, _adapted(read_network(checkpoint).__getitem__, model, config.model, config.train.seed)
        )
    bundle = Bundle.open(source)
    check_single(bundle)
    check_transformer(bundle, UNTRAINED)
    _check_same_network(config, bundle.config, source)
    read = open_safetensors(bundle.path / "transformer" / TENSOR_FILE).read
    return InitialWeights(bundle.config, _adapted(read, bundle.config, config.model, config.train.seed))


def _adapted(read: Weights, theirs: DiTConfig, ours: DiTConfig, seed: int) -> Weights:
    """Adapt tensors to a network with other settings: with a guidance embedding; or a classifier of another size or
    with other classes."""
    if ours.denoises and (ours.guidance_embedding_range is None or theirs.guidance_embedding_range is not None):
        return read

    def value(name: str) -> Tensor:
        if name.startswith("guidance_embedder."):
            return initial_value(name, torch.Size(network_shapes(ours)[name]), seed)
        if ours.denoises:
            return read(name)
        if name.removeprefix("image_tower.") == "x_embedder.positions":
            return resized_positions(read(name), theirs.learned_positions, ours.learned_positions)
        if name.startswith("head.linear.") and theirs.num_classes != ours.num_classes:
            return initial_value(name, torch.Size(network_shapes(ours)[name]), seed=0)
        return read(name)

    return value


def _check_same_network(config: RunConfig, model: DiTConfig, source: str) -> None:
    ours, theirs = config.model.to_dict(), model.to_dict()
    may_change = (
        *MAY_CHANGE,
        *MAY_CHANGE_OF_POSITIONS * (config.train.adapter is None and config.train.distill is None),
        *(name for name in MAY_COME if ours[name] is not None and config.train.adapter is None),
        *MAY_CHANGE_OF_CLASSIFIER * (not config.model.denoises),
    )
    if differing := [name for name in ours if ours[name] != theirs[name] and name not in may_change]:
        differences = ", ".join(f"model.{name}={theirs[name]} (not {ours[name]})" for name in differing[:6])
        raise UserError(f"the network of {source} has {differences}; give the run the same")
