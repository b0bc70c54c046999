"""Search over all layouts of a run on a number of GPUs, by time and memory."""

from collections.abc import Iterator
from dataclasses import dataclass

from megadit.models.megatron.parallel_sizes import ParallelSizes, legal_layouts
from megadit.models.shared.errors import UserError
from megadit.train.config.schema import RunConfig
from megadit.train.plan.estimate import StepTime, estimate_step
from megadit.train.plan.hardware import Gpu
from megadit.train.plan.layout import Layout, with_layout
from megadit.train.plan.memory import RESERVE, Memory, memory_of

MAX_CHUNKS = 4
"""Maximum number of model chunks per pipeline stage in the search."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A layout with its estimated time and memory."""

    layout: Layout
    time: StepTime
    memory: Memory
    gpu: Gpu

    @property
    def fits(self) -> bool:
        return self.memory.total <= usable_memory(self.gpu)


def usable_memory(gpu: Gpu) -> float:
    return gpu.memory * (1 - RESERVE)


def assess(config: RunConfig, layout: Layout, gpu: Gpu) -> Choice:
    """Estimate time and memory of a layout."""
    return Choice(layout=layout, time=estimate_step(config, layout, gpu), memory=memory_of(config, layout), gpu=gpu)


def rank_layouts(config: RunConfig, gpus: int, gpu: Gpu) -> list[Choice]:
    """All legal layouts: those that fit, by time, then the others by memory.

    Layouts that are never the best are left out: tensor parallelism beyond a node or without sequence parallelism, more
    than four model chunks per pipeline stage, and recomputed attention, which saves almost no memory.
    """
    choices = [assess(config, layout, gpu) for layout in _candidates(config, gpus, gpu)]
    return sorted(choices, key=lambda one: (not one.fits, one.time.total if one.fits else one.memory.total))


def _candidates(config: RunConfig, gpus: int, gpu: Gpu) -> Iterator[Layout]:
    micro_sizes = sorted({1, config.data.micro_batch_size})
    for sizes in legal_layouts(config.model, gpus):
        if not _is_sensible(sizes, config, gpu):
            continue
        for data_parallel in ("fsdp",) if sizes.fully_sharded else ("ddp", "distributed_optimizer"):
            for recompute in ("none", "full"):
                for micro in micro_sizes:
                    try:
                        candidate = with_layout(
                            config, sizes, data_parallel=data_parallel, recompute=recompute, micro=micro
                        )
                        yield Layout.of(candidate, gpus)
                    except UserError:  # incompatible with the batch, the packs or the optimizer
                        continue


def _is_sensible(sizes: ParallelSizes, config: RunConfig, gpu: Gpu) -> bool:
    exchange = sizes.head_exchange_size(config.model.num_attention_heads)
    is_both = 1 < exchange < sizes.context
    return (
        sizes.tensor <= gpu.per_node
        and sizes.sequence_parallel == (sizes.tensor > 1)
        and sizes.virtual_pipeline <= MAX_CHUNKS
        and (sizes.context_comm != "both" or is_both)  # otherwise it equals one of the two
    )
