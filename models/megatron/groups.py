"""Process groups: torch.distributed and Megatron's model-parallel groups, from the sizes of a layout."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megadit.models.configs.config import DiTConfig
from megadit.models.megatron.interfaces import join_ranks
from megadit.models.megatron.parallel_sizes import ParallelSizes
from megadit.models.megatron.parallelism.context import ContextGroups
from megadit.models.megatron.plan import Axes
from megadit.models.packing.segments import TokenMesh
from megadit.models.shared.errors import UserError

Result = TypeVar("Result")
SECONDS_OF_A_SIGN = 30.0
"""Interval in which the first rank tells the others that a long task goes on."""
_TIMEOUT = timedelta(minutes=30)  # a rank may wait this long while another reads data or writes a checkpoint


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups this rank belongs to."""

    tensor: ProcessGroup
    pipeline: ProcessGroup
    context: ContextGroups
    mesh: TokenMesh
    """The ranks that share the tokens of a pack."""
    data: ProcessGroup
    """Ranks that hold the same parameters: data-parallel replicas, and the context-parallel ranks of each."""
    readers: ProcessGroup
    """Ranks at the same position in all replicas, which read different data."""
    copy: ProcessGroup
    """Ranks that together compute one replica of the model, and see the same data."""
    expert: ProcessGroup
    """Ranks that hold different experts."""
    expert_tensor: ProcessGroup
    """Ranks that share the matrices of their experts."""
    expert_data: ProcessGroup
    """Ranks that hold the same shards of the same experts."""
    device: torch.device

    @property
    def axes(self) -> Axes:
        """The groups over which parameters are split."""
        return {"tensor": self.tensor, "expert": self.expert, "expert_tensor": self.expert_tensor}

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.pipeline.rank() == self.pipeline.size() - 1

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes files."""
        return dist.get_rank() == 0


def claims_report(what: str) -> bool:
    """True on exactly one rank, the first that calls this, so that an error on all ranks is printed once."""
    try:
        return dist.distributed_c10d._get_default_store().add(f"told/{what}", 1) == 1
    except RuntimeError:  # the rank that holds the store has printed it, and has left
        return False


def world_size() -> int:
    """Ranks of this job: torchrun's WORLD_SIZE, 1 without it."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def initialize(layout: ParallelSizes, model: DiTConfig) -> Groups:
    """Starts torch.distributed where it is not running (gloo, or nccl with CUDA) and builds Megatron's groups.

    Raises:
        UserError: if the layout does not fit the number of ranks.
    """
    layout.check(model, world_size())
    _order_kernels(layout)
    device = _local_device()
    if not dist.is_initialized():
        _start_torch_distributed(device)
    from megatron.core import parallel_state

    width = layout.head_exchange_size(model.num_attention_heads)
    with _shared_by_the_same_ranks() if device.type == "cpu" else nullcontext():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            hierarchical_context_parallel_sizes=[width, layout.context // width],
            create_gloo_process_groups=False,
            get_embedding_ranks=_first_rank,  # no embedding is tied to the last stage
            get_position_embedding_ranks=_first_rank,
        )
    heads, ring = parallel_state.get_hierarchical_context_parallel_groups()
    readers = parallel_state.get_data_parallel_group()
    tensor = parallel_state.get_tensor_model_parallel_group()
    context = ContextGroups(parallel_state.get_context_parallel_group(), heads, ring)
    return Groups(
        tensor=tensor,
        pipeline=parallel_state.get_pipeline_model_parallel_group(),
        context=context,
        mesh=_token_mesh(context.group, tensor if layout.sequence_parallel else None),
        data=parallel_state.get_data_parallel_group(with_context_parallel=True),
        readers=readers,
        copy=_copy_group(readers),
        expert=parallel_state.get_expert_model_parallel_group(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_group(),
        expert_data=parallel_state.get_expert_data_parallel_group(),
        device=device,
    )


@contextmanager
def _shared_by_the_same_ranks() -> Iterator[None]:
    """Makes Megatron reuse one process group for the same ranks.

    It creates dozens of groups, and each gloo group has threads that wake a hundred times a second.
    """
    from megatron.core import parallel_state

    create: Callable[..., ProcessGroup] = parallel_state.create_group
    made: dict[tuple[int, ...], ProcessGroup] = {}

    def shared(ranks: list[int], **settings: object) -> ProcessGroup:
        if tuple(ranks) not in made:
            made[tuple(ranks)] = create(ranks, **settings)
        return made[tuple(ranks)]

    parallel_state.create_group = shared
    try:
        yield
    finally:
        parallel_state.create_group = create


def _token_mesh(context: ProcessGroup, sequence: ProcessGroup | None) -> TokenMesh:
    """Megatron numbers the ranks of sequence parallelism first, then those of context parallelism."""
    slices, place = (1, 0) if sequence is None else (sequence.size(), sequence.rank())
    return TokenMesh(context=context.size(), slices=slices, rank=context.rank() * slices + place)


def _first_rank(ranks: list[int], *split: int | None) -> list[int]:
    return ranks[:1]


def _copy_group(readers: ProcessGroup) -> ProcessGroup:
    """The ranks at this rank's position among the readers, for which Megatron has no group."""
    places: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(places, readers.rank())
    members = [[rank for rank, place in enumerate(places) if place == copy] for copy in range(readers.size())]
    return dist.new_subgroups_by_enumeration(members)[0]


def release() -> None:
    """Destroys the groups of a layout, but not torch.distributed: another `initialize` may follow.

    Every rank calls this. Megatron only forgets its groups, whose threads would continue: a gloo group has several,
    which wake a hundred times a second.
    """
    from megatron.core import parallel_state
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    parallel_state.destroy_model_parallel()
    _clear_sharding_prop_cache()  # it would reuse meshes of destroyed groups
    for group in [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)


def destroy() -> None:
    """The inverse of `initialize`."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def computed_by_first(compute: Callable[[], Result], mark: Callable[[], None], *, is_first: bool) -> Result:
    """The result, on all ranks, of what the first one computes; others wait however long it takes: neither the
    watchdog, to which `mark` reports, nor a collective's limit of time ends them."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        future = thread.submit(compute) if is_first else None
        found: list[tuple[Result] | None] = [None]
        while found[0] is None:
            mark()
            if future is not None and wait([future], SECONDS_OF_A_SIGN).done:
                found = [(future.result(),)]
            dist.broadcast_object_list(found, src=0)
    return found[0][0]


@contextmanager
def destroyed_at_end() -> Iterator[None]:
    """Context after which the groups are destroyed; after an error at once, though others may wait for this rank in a
    collective: NCCL would wait here for them, and nobody would learn of the error."""
    from megatron.core import parallel_state

    try:
        yield
    except BaseException:
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()
        raise
    destroy()


def _order_kernels(layout: ParallelSizes) -> None:
    """Sets the number of CUDA queues, before CUDA starts: one under tensor parallelism, so that communication starts
    before the product that overlaps with it; more for FSDP, whose gathers overlap with computation."""
    if layout.tensor > 1 and not layout.fully_sharded:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _local_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device, num_gpus = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))), torch.cuda.device_count()
    if device.index >= num_gpus:
        raise UserError(
            f"each rank takes a GPU of its own, and this machine has {num_gpus} for "
            f"{os.environ.get('LOCAL_WORLD_SIZE', 'more')} ranks: start {num_gpus}, or set CUDA_VISIBLE_DEVICES= "
            "for the CPU"
        )
    torch.cuda.set_device(device)
    return device


def _start_torch_distributed(device: torch.device) -> None:
    # gloo, in addition to nccl, for objects on the CPU and checkpoint plans
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if "RANK" in os.environ:
        join_ranks(backend, timeout=_TIMEOUT)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT)
