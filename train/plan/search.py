"""Every layout that a run can have on a number of GPUs, by time and memory."""

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
"""Most parts of the network that the search gives to one pipeline stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A layout and what it costs."""

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
    """All legal layouts, those that fit first, the fastest of them first; then by memory.

    Left out are what is legal and never the best: tensor parallelism beyond a node or without sequence parallelism,
    more than four parts on a pipeline stage, and recomputed attention, which costs time and saves next to nothing.
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
                    except UserError:  # the batch, the packs or the optimizer do not go with it
                        continue


def _is_sensible(sizes: ParallelSizes, config: RunConfig, gpu: Gpu) -> bool:
    exchange = sizes.head_exchange_size(config.model.num_attention_heads)
    is_both = 1 < exchange < sizes.context
    return (
        sizes.tensor <= gpu.per_node
        and sizes.sequence_parallel == (sizes.tensor > 1)
        and sizes.virtual_pipeline <= MAX_CHUNKS
        and (sizes.context_comm != "both" or is_both)  # else it is one of the two
    )
