"""Loaders of packed batches: one reader per data-parallel rank.

Noise, sigma and text dropout are functions of a sample (`models/diffusion/noise.py`), not of ranks, and every epoch
visits each sample once, on any number of ranks. Packing follows Energon's reproducible scaling: the data are divided
among `ranks x max(1, workers)` readers, and reader k reads, shuffles and packs the same on any rank. If that product
stays constant, and each step takes equally many micro-batches from every reader, the packs of each step are the same on
all ranks together. Mock data and validation packs are the same for every number of ranks.

A saved state (plain JSON) belongs to one rank of one layout; to restore it with settings that would change the order of
samples is an error. `redistribute` converts states to another number of ranks.
"""

import gc
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from megadit.models.shared.errors import UserError
from megadit.train.config.rules import check_dataset
from megadit.train.config.schema import RunConfig
from megadit.train.data.packs.conditioning import parse_kinds
from megadit.train.data.packs.mock import MockLoader
from megadit.train.data.packs.packed_batch import PackedBatch, PackFormat
from megadit.train.data.packs.rules import Rules
from megadit.train.data.packs.training_sample import TrainingSample
from megadit.train.data.redistribute import RANK, RANKS, WORKERS
from megadit.train.dataset.dataset_info import DatasetInfo, iter_captions
from megadit.train.dataset.energon_files import CRUDE
from megadit.train.dataset.places import place

if TYPE_CHECKING:  # a run on mock data needs no Energon
    from megatron.energon import SavableDataLoader, WorkerConfig
    from megatron.energon.flavors import SavableDataset
    from megatron.energon.metadataset.loader_interface import LoadedDatasetList

MAX_SAMPLES_PER_SEQUENCE = 100
"""Maximum consecutive samples read from one position of a shard before jumping elsewhere."""
CHECKPOINT_INTERVAL = 10.0
"""Seconds between state snapshots of reader processes; a resume re-reads at most this much."""


class TrainLoader:
    """Endless micro-batches of one data-parallel rank."""

    def __init__(self, build_dataset: "Callable[[int], SavableDataset]", order: dict[str, Any]) -> None:
        """`build_dataset`: function of the number of the first epoch."""
        self._build_dataset = build_dataset
        self._loader = savable_loader(build_dataset(0))
        self._order = order
        self._first_pass = 0
        self._batches: Iterator[PackedBatch] | None = None

    def __iter__(self) -> "TrainLoader":
        return self

    def __next__(self) -> PackedBatch:
        # Energon's iterator is created with the first batch: before, it has no workers to ask for their state
        if self._batches is None:
            # Forked workers would collect this process's garbage. A process group in it, left by an earlier run, would
            # wait there for threads that do not exist after a fork.
            if self._loader.num_workers:
                gc.collect()
            self._batches = iter(self._loader)
        return next(self._batches)

    def __del__(self) -> None:
        """End the readers now: when collected as garbage, torch's iterator has lost the queues to them, and waits five
        seconds for each."""
        if getattr(self, "_batches", None) is not None:
            self._batches.close()

    def save_state(self) -> dict[str, Any]:
        """State of this rank's reader, as plain JSON values."""
        from megadit.train.data.state import to_plain

        reader = to_plain(self._loader.save_state_rank())
        return {"order": self._order, "first_pass": self._first_pass, "reader": reader}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Continue with the batch after the last one before `save_state`; call it before iterating.

        Raises:
            UserError: if a setting that determines the order of samples has changed.
        """
        from megadit.train.data.state import from_plain

        if "order" not in state:
            raise UserError("cannot resume the data reader: the state is that of mock data; set data.mock=true")
        for name in self._order | state["order"]:
            value, saved = self._order.get(name), state["order"].get(name)
            if saved != value:
                raise UserError(
                    f"cannot resume the data reader: {name} was {saved} and is {value} now; "
                    "set it back, or start a new run from the saved weights"
                )
        assert self._batches is None, "restore_state must come before the first batch"
        if state.get("first_pass", 0) != self._first_pass:
            self._first_pass = state["first_pass"]
            self._loader = savable_loader(self._build_dataset(self._first_pass))
        if state["reader"] is not None:  # None: a new epoch
            self._loader.restore_state_rank(from_plain(state["reader"]))


class ValidationLoader:
    """The first `num_packs` packs of a split, the same in every iteration and for every number of ranks.

    Rank r of n gets packs r, r + n, ..., so ranks may get different numbers of packs, or none. A split too small for
    `num_packs` is repeated, with other noise.
    """

    def __init__(
        self, build_dataset: "Callable[[], SavableDataset]", *, num_packs: int, rank: int, world_size: int
    ) -> None:
        self._build_dataset = build_dataset
        self.num_packs = num_packs
        self.rank = rank
        self.world_size = world_size

    def __iter__(self) -> Iterator[PackedBatch]:
        return islice(self._packs(), self.rank, self.num_packs, self.world_size)

    def _packs(self) -> Iterator[PackedBatch]:
        loader = savable_loader(self._build_dataset())
        while True:
            yield from loader


def build_train_loader(config: RunConfig, *, rank: int, world_size: int, group: Any = None) -> TrainLoader | MockLoader:
    """The training data of data-parallel rank `rank` of `world_size`; `group` is the process group of these ranks.

    Raises:
        UserError: if `data.path` is not a prepared data set, or does not fit the model.
    """
    data = config.data
    pack_format = _pack_format(config, training=True)
    if data.mock:
        return MockLoader(
            pack_format,
            latent_shapes=data.mock_latent_shapes,
            micro_batch_size=data.micro_batch_size,
            rank=rank,
            world_size=world_size,
        )
    from megadit.train.data.packs.task_encoder import LatentTaskEncoder

    info = check_dataset(config)
    num_readers = world_size * max(1, data.num_workers)
    if info.num_samples["train"] < num_readers:
        raise UserError(
            f"{data.path} has {info.num_samples['train']} training samples for {num_readers} readers "
            f"({world_size} ranks x data.num_workers={data.num_workers}); use fewer"
        )
    worker_config = _worker_config(config, rank, world_size, data.num_workers, group)

    rules, read = Rules.of(data, pack_format, training=True), _reader(config, info)

    def build_dataset(first_pass: int) -> "SavableDataset":
        split = _read_split(config, "train", worker_config, training=True)
        return LatentTaskEncoder(
            rules,
            read=read,
            first_pass=first_pass,
            balances_work=data.balance != "tokens",
            packs_together=max(1, data.global_batch_size // num_readers) if data.balance == "step" else 1,
        ).build_train_datasets(
            datasets=split.datasets,
            blend_mode=split.blend_mode,
            worker_config=worker_config,
            batch_size=data.micro_batch_size,
            packing_buffer_size=data.packing_buffer_size,
            shuffle_buffer_size=data.shuffle_buffer_size,
        )

    return TrainLoader(build_dataset, _order(config, info, rank, world_size))


def build_validation_loader(
    config: RunConfig, *, rank: int, world_size: int, group: Any = None
) -> ValidationLoader | MockLoader:
    """`validation.num_batches` packs, divided among the data-parallel ranks, one pack per batch, without text dropout.

    Raises:
        UserError: if `data.path` is not a prepared data set, does not fit the model, or has no validation samples.
    """
    pack_format = _pack_format(config, training=False)
    num_packs = config.validation.num_batches
    if config.data.mock:
        return MockLoader(
            pack_format,
            latent_shapes=config.data.mock_latent_shapes,
            micro_batch_size=1,
            rank=rank,
            world_size=world_size,
            name="mock-validation",
            num_batches=num_packs,
        )
    from megadit.train.data.packs.task_encoder import LatentTaskEncoder

    info = check_dataset(config)
    split = _validation_split(config, info)

    rules, read = Rules.of(config.data, pack_format, training=False), _reader(config, info)

    def build_dataset() -> "SavableDataset":
        # every rank reads everything, so that packs do not depend on the number of ranks
        worker_config = _worker_config(config, rank=0, world_size=1, num_workers=0, group=None)
        return LatentTaskEncoder(rules, read=read).build_val_datasets(
            datasets=_read_split(config, split, worker_config, training=False).datasets,
            worker_config=worker_config,
            batch_size=1,
            packing_buffer_size=config.data.packing_buffer_size,
        )

    return ValidationLoader(build_dataset, num_packs=num_packs, rank=rank, world_size=world_size)


def validation_captions(config: RunConfig, count: int) -> list[str]:
    """The first captions of the validation split, at most `count`; empty for mock data."""
    if config.data.mock:
        return []
    info = check_dataset(config)
    return list(islice(iter_captions(info.root, _validation_split(config, info)), count))


def _validation_split(config: RunConfig, info: DatasetInfo) -> str:
    split = "train" if config.data.use_train_split_for_val else "val"
    if not info.num_samples.get(split):
        raise UserError(f"{info.root} has no samples in its split 'val'; set data.use_train_split_for_val=true")
    return split


def _pack_format(config: RunConfig, *, training: bool) -> PackFormat:
    """Pack format; validation has no text dropout and no mixup."""
    data = config.data
    return PackFormat(
        model=config.model,
        seq_length=data.seq_length,
        text_seq_length=data.text_seq_length,
        seed=config.train.seed,
        text_dropout=data.text_dropout if training else 0.0,
        prior_text_dropout=data.prior_text_dropout if training else None,
        prior_weight=data.prior_weight,
        extras=() if config.train.distill is None else config.train.distill.extras,
        conditioning=parse_kinds(data.conditioning),
        conditioning_dropout=data.conditioning_dropout,
        mixup=data.mixup if training else 0.0,
    )


def _worker_config(config: RunConfig, rank: int, world_size: int, num_workers: int, group: Any) -> "WorkerConfig":
    from megatron.energon import WorkerConfig, errors

    errors.print = lambda *_: None  # exceptions are printed once, where the run ends
    return WorkerConfig(
        rank=rank,
        world_size=world_size,
        num_workers=num_workers,
        data_parallel_group=group,
        seed_offset=config.train.seed,
        global_error_handler=errors.reraise_exception,  # broken samples are skipped elsewhere
    )


def _reader(config: RunConfig, info: DatasetInfo) -> Callable[[dict[str, Any]], TrainingSample]:
    from megadit.train.data.on_the_fly import FrozenEncoders
    from megadit.train.data.packs.samples import decode

    if config.data.encode == "on_the_fly":
        return FrozenEncoders(info.tokenizer_folder, info.text_encoder_folder)
    return decode


def _read_split(config: RunConfig, split: str, worker_config: "WorkerConfig", *, training: bool) -> "LoadedDatasetList":
    from megatron.energon.metadataset import load_dataset

    from megadit.train.data.packs.task_encoder import LatentTaskEncoder

    try:
        return load_dataset(place(config.data.path)).get_datasets(
            dataset_config=CRUDE,
            training=training,
            split_part=split,
            worker_config=worker_config,
            max_samples_per_sequence=MAX_SAMPLES_PER_SEQUENCE,
            decoder=LatentTaskEncoder.decoder,
        )
    except Exception as error:  # Energon has no exceptions of its own for inconsistent metadata
        reason = f"{type(error).__name__} {error}".splitlines()[0]
        raise UserError(
            f"data.path={config.data.path} cannot be read by Energon ({reason}); prepare it anew"
        ) from error


def _order(config: RunConfig, info: DatasetInfo, rank: int, world_size: int) -> dict[str, Any]:
    """All settings that determine the order of samples; a saved position is invalid with other values."""
    data = config.data
    return {
        RANK: rank,
        RANKS: world_size,
        WORKERS: data.num_workers,
        "data.micro_batch_size": data.micro_batch_size,
        "data.seq_length": data.seq_length,
        "data.text_seq_length": data.text_seq_length,
        "data.packing_buffer_size": data.packing_buffer_size,
        "data.shuffle_buffer_size": data.shuffle_buffer_size,
        **({"data.balance": data.balance} if data.balance != "tokens" else {}),
        "data.max_frames": data.max_frames,
        "data.max_latent": data.max_latent,
        "data.min_aesthetic_score": data.min_aesthetic_score,
        "data.keep": list(data.keep),
        **(
            {"data.conditioning": list(data.conditioning)} if data.conditioning else {}
        ),  # of how many tokens samples are
        "train.seed": config.train.seed,
        "number of training samples": info.num_samples["train"],
        "tokenizer of the data": info.tokenizer_fingerprint,
        "text encoder of the data": info.text_encoder_fingerprint,
    }


def savable_loader(dataset: "SavableDataset") -> "SavableDataLoader":
    """Energon's loader with the settings of training."""
    from megatron.energon import get_savable_loader
    from megatron.energon.wrappers.gc_dataset import GC_DEFAULT_EVERY_N_ITER

    loader = get_savable_loader(
        dataset,
        checkpoint_every_sec=CHECKPOINT_INTERVAL,
        gc_collect_every_n_steps=GC_DEFAULT_EVERY_N_ITER if dataset.worker_config.num_workers else 0,
        watchdog_timeout_seconds=None,  # the first buffers of a large run may take minutes
    )
    loader.pin_memory = False  # packs are pinned when they are copied
    return loader
