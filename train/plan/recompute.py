"""`parallel.recompute_granularity=auto`: recomputes the fewest blocks with which a run fits into memory."""

from dataclasses import replace

from megadit.train.config.schema import RunConfig
from megadit.train.plan.layout import Layout
from megadit.train.plan.memory import memory_of

MARGIN = 0.1
"""Fraction of the available memory that is left free, because estimates are accurate to a tenth."""
SMALLER = (
    "more ranks or GPUs, `megadit train --plan --gpus N --gpu NAME` for a layout that fits, a smaller model, "
    "data.seq_length or data.micro_batch_size reduce it"
)
"""Remedies for a run that does not fit into memory."""


def with_recompute(config: RunConfig, ranks: int, available: float) -> RunConfig:
    """`config` with `auto` resolved for ranks that have `available` bytes each; any other value is left unchanged.

    The fewest blocks of each model chunk are recomputed with which the estimate of `memory_of` fits; all, if none do.
    """
    if config.parallel.recompute_granularity != "auto":
        return config
    layers_per_chunk = config.model.num_layers // config.parallel.sizes.num_chunks
    choices = (_recomputing(config, count) for count in range(layers_per_chunk + 1))
    fits = (one for one in choices if needed_memory(one, ranks) <= available * (1 - MARGIN))
    return next(fits, _recomputing(config, layers_per_chunk))


def needed_memory(config: RunConfig, ranks: int) -> float:
    """Estimated bytes that each rank needs."""
    return memory_of(config, Layout.of(config, ranks)).total


def choice_in_words(config: RunConfig) -> str:
    """Describe the choice of `with_recompute`."""
    parallel = config.parallel
    layers_per_chunk = config.model.num_layers // parallel.sizes.num_chunks
    count = 0 if parallel.recompute_granularity == "none" else parallel.recompute_num_layers or layers_per_chunk
    return f"{count} of {layers_per_chunk} blocks"


def _recomputing(config: RunConfig, count: int) -> RunConfig:
    """`config` with `count` recomputed blocks in each model chunk."""
    choice = {"recompute_granularity": "full", "recompute_num_layers": count} if count else _NOTHING
    return replace(config, parallel=replace(config.parallel, **choice))


_NOTHING = {"recompute_granularity": "none", "recompute_num_layers": None}
