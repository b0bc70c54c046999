"""Layout of a run for the planner: sizes of the groups, and other settings that determine memory and time."""

from dataclasses import dataclass, replace

import numpy as np

from megadit.models.megatron.parallel_sizes import SETTINGS, ParallelSizes
from megadit.train.config.rules import check_layout
from megadit.train.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Division of a run among `gpus` ranks."""

    gpus: int
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    """Model chunks per pipeline rank."""
    context: int = 1
    context_comm: str = "ulysses"
    expert: int = 1
    expert_tensor: int = 1
    head_exchange: int = 1
    """Context-parallel ranks that exchange heads; such groups pass keys and values around a ring."""
    sequence_parallel: bool = False
    data_parallel: str = "ddp"
    recompute: str = "none"
    recompute_share: float = 1.0
    """Fraction of the blocks recomputed with `recompute="full"`."""
    offloaded_share: float = 0.0
    """Fraction of the blocks whose activations are in host memory until their backward."""
    micro_batch_size: int = 1
    global_batch_size: int = 1

    @classmethod
    def of(cls, config: RunConfig, gpus: int) -> "Layout":
        """The layout of a run on `gpus` ranks. Raises UserError if there is none."""
        check_layout(config, gpus)
        sizes = config.parallel.sizes
        return cls(
            gpus=gpus,
            **{name: getattr(sizes, name) for name in _SIZES},
            head_exchange=sizes.head_exchange_size(config.model.num_attention_heads),
            data_parallel=config.parallel.data_parallel,
            recompute=_recompute(config),
            recompute_share=_recompute_share(config),
            offloaded_share=_offloaded_share(config),
            micro_batch_size=config.data.micro_batch_size,
            global_batch_size=config.data.global_batch_size,
        )

    @property
    def ring(self) -> int:
        """Number of context-parallel ranks that pass keys and values round; 1: each attends to whole samples."""
        return self.context // self.head_exchange

    @property
    def data(self) -> int:
        """Number of model replicas."""
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        """Number of ranks that hold the same experts."""
        return self.gpus // (self.pipeline * self.expert * self.expert_tensor)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per step on each rank."""
        return self.global_batch_size // (self.micro_batch_size * self.data)

    def groups(self) -> dict[str, np.ndarray]:
        """Rank groups of each parallel dimension, [groups, members]: Megatron's order, tensor fastest, then context,
        data, pipeline."""
        ranks_pdct = np.arange(self.gpus).reshape(self.pipeline, self.data, self.context, self.tensor)
        axes = {"tensor": 3, "context": 2, "data": 1, "pipeline": 0}
        groups = {
            name: np.moveaxis(ranks_pdct, axis, -1).reshape(-1, ranks_pdct.shape[axis]) for name, axis in axes.items()
        }
        if self.expert * self.expert_tensor > 1:
            ranks_pdet = np.arange(self.gpus).reshape(self.pipeline, self.expert_data, self.expert, self.expert_tensor)
            for name, axis in {"expert tensor": 3, "expert": 2, "expert data": 1}.items():
                groups[name] = np.moveaxis(ranks_pdet, axis, -1).reshape(-1, ranks_pdet.shape[axis])
        return groups

    def overrides(self) -> list[str]:
        """Overrides that give a run this layout."""
        values = {SETTINGS[name]: getattr(self, name) for name in _SIZES}
        values["parallel.data_parallel"] = self.data_parallel
        values["parallel.recompute_granularity"] = self.recompute
        values["data.micro_batch_size"] = self.micro_batch_size
        return [f"{name}={str(value).lower()}" for name, value in values.items()]

    def __str__(self) -> str:
        """Short name, such as "TP2 SP PP4x2 CP2 ring DP16 distributed_optimizer, full recompute, 8 x 1"."""
        parts = [f"TP{self.tensor}"] if self.tensor > 1 else []
        parts += ["SP"] if self.sequence_parallel else []
        if self.pipeline > 1:
            parts.append(f"PP{self.pipeline}" + (f"x{self.virtual_pipeline}" if self.virtual_pipeline > 1 else ""))
        parts += [f"CP{self.context} {self.context_comm}"] if self.context > 1 else []
        parts += [f"EP{self.expert}"] if self.expert > 1 else []
        parts += [f"ETP{self.expert_tensor}"] if self.expert_tensor > 1 else []
        parts.append(f"DP{self.data} {self.data_parallel}")
        again = {"none": "", "selective": ", attention recomputed", "full": ", blocks recomputed"}[self.recompute]
        again += ", blocks offloaded" if self.offloaded_share else ""
        return " ".join(parts) + again + f", {self.num_micro_batches} x {self.micro_batch_size}"


def _recompute(config: RunConfig) -> str:
    """Recomputation of a run; `auto` counts as none until it is resolved (`memory.py`)."""
    granularity = config.parallel.recompute_granularity
    return "none" if granularity == "auto" else granularity


def _recompute_share(config: RunConfig) -> float:
    count = config.parallel.recompute_num_layers
    return 1.0 if count is None else min(1.0, count * config.parallel.sizes.num_chunks / config.model.num_layers)


def _offloaded_share(config: RunConfig) -> float:
    recomputed = _recompute_share(config) if _recompute(config) == "full" else 0.0
    count = config.parallel.cpu_offloading_num_layers
    return min(1.0 - recomputed, count * config.parallel.sizes.num_chunks / config.model.num_layers)


_SIZES = (
    *("tensor", "pipeline", "virtual_pipeline", "context", "context_comm", "sequence_parallel"),
    *("expert", "expert_tensor"),
)


def with_layout(
    config: RunConfig, sizes: ParallelSizes, *, data_parallel: str, recompute: str, micro: int
) -> RunConfig:
    """`config` in another layout. Raises UserError if the configuration does not support the layout."""
    parallel = replace(
        config.parallel,
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual_pipeline,
        context_parallel_size=sizes.context,
        context_parallel_comm=sizes.context_comm,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,
        sequence_parallel=sizes.sequence_parallel,
        data_parallel=data_parallel,
        recompute_granularity=recompute,
        recompute_num_layers=None,
        cpu_offloading_num_layers=0,
    )
    return replace(config, parallel=parallel, data=replace(config.data, micro_batch_size=micro))
