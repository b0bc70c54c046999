"""Loaders of packed batches: one reader per data-parallel rank.

Noise, sigma and text dropout belong to samples (`models/diffusion/noise.py`), not to ranks, and every
pass over the data visits each sample once, on any number of ranks. Which samples meet in one pack follows Energon's
reproducible scaling: the data are dealt to `ranks x max(1, workers)` readers, and reader k reads, shuffles and packs
the same whatever rank it runs on. With that product constant, the packs of all ranks together are the same, step by
step, if each step takes equally many micro-batches from every reader. Mock data, and the packs of validation, are the
same for every number of ranks.

A saved state belongs to one rank of one layout; it is plain JSON, and restoring it under settings that would change the
order of samples is an error, never a silent restart. `redistribute` makes the states of another number of ranks.
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
"""Samples read in a row from one place of a shard, before jumping elsewhere."""
CHECKPOINT_INTERVAL = 10.0
"""Seconds between the states that reader processes keep; a resume re-reads at most this much."""


class TrainLoader:
    """Endless micro-batches of one data-parallel rank."""

    def __init__(self, build_dataset: "Callable[[int], SavableDataset]", order: dict[str, Any]) -> None:
        """`build_dataset` takes the number of the first pass over the data."""
        self._build_dataset = build_dataset
        self._loader = savable_loader(build_dataset(0))
        self._order = order
        self._first_pass = 0
        self._batches: Iterator[PackedBatch] | None = None

    def __iter__(self) -> "TrainLoader":
        return self

    def __next__(self) -> PackedBatch:
        # Energon's iterator is made with the first batch: made but not begun, it has no workers to ask for their state
        if self._batches is None:
            # Workers collect the garbage they are forked with. A process group among it, left by an earlier run of this
            # process, would wait there for the end of threads that no fork has.
            if self._loader.num_workers:
                gc.collect()
            self._batches = iter(self._loader)
        return next(self._batches)

    def __del__(self) -> None:
        """Ends the readers now: as garbage, torch's iterator has lost the queues by which it tells them, and waits five
        seconds for each."""
        if getattr(self, "_batches", None) is not None:
            self._batches.close()

    def save_state(self) -> dict[str, Any]:
        """State of this rank's reader, as plain JSON values."""
        from megadit.train.data.state import to_plain

        reader = to_plain(self._loader.save_state_rank())
        return {"order": self._order, "first_pass": self._first_pass, "reader": reader}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Goes on with the batch after the last one given before `save_state`; call it before iterating.

        Raises:
            UserError: if a setting that decides the order of samples has changed.
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
        if state["reader"] is not None:  # None begins a pass
            self._loader.restore_state_rank(from_plain(state["reader"]))


class ValidationLoader:
    """The first packs of a split, the same in every iteration and for every number of ranks; rank r of n takes the
    packs r, r + n, ... of `num_packs`, so ranks may receive different numbers of packs, or none.

    A split too small for `num_packs` is read again, with other noise.
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
        UserError: if `data.path` is no prepared data set, or does not fit the model.
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
        return LatentTaskEncoder(rules, read=read, first_pass=first_pass).build_train_datasets(
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
    """`validation.num_batches` packs, dealt to the data-parallel ranks, one pack in each batch; no text is dropped.

    Raises:
        UserError: if `data.path` is no prepared data set, does not fit the model, or has no validation samples.
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
        # every rank reads all of it, as one reader: the packs must not depend on the number of ranks
        worker_config = _worker_config(config, rank=0, world_size=1, num_workers=0, group=None)
        return LatentTaskEncoder(rules, read=read).build_val_datasets(
            datasets=_read_split(config, split, worker_config, training=False).datasets,
            worker_config=worker_config,
            batch_size=1,
            packing_buffer_size=config.data.packing_buffer_size,
        )

    return ValidationLoader(build_dataset, num_packs=num_packs, rank=rank, world_size=world_size)


def validation_captions(config: RunConfig, count: int) -> list[str]:
    """The first `count` captions of the validation split, or fewer if it has fewer; none of mock data."""
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
    """Validation keeps every text, and mixes nothing."""
    data = config.data
    return PackFormat(
        model=config.model,
        seq_length=data.seq_length,
        text_seq_length=data.text_seq_length,
        seed=config.train.seed,
        text_dropout=data.text_dropout if training else 0.0,
        prior_text_dropout=data.prior_text_dropout if training else None,
        prior_weight=data.prior_weight,
        needs_seed=config.train.distill is not None and config.train.distill.is_regression,
        conditioning=parse_kinds(data.conditioning),
        conditioning_dropout=data.conditioning_dropout,
        mixup=data.mixup if training else 0.0,
    )


def _worker_config(config: RunConfig, rank: int, world_size: int, num_workers: int, group: Any) -> "WorkerConfig":
    from megatron.energon import WorkerConfig, errors

    errors.print = lambda *_: None  # what is raised is said once, by whoever ends the run
    return WorkerConfig(
        rank=rank,
        world_size=world_size,
        num_workers=num_workers,
        data_parallel_group=group,
        seed_offset=config.train.seed,
        global_error_handler=errors.reraise_exception,  # broken samples are skipped by name; anything else is a fault
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
    except Exception as error:  # Energon has no errors of its own for metadata that do not fit each other
        reason = f"{type(error).__name__} {error}".splitlines()[0]
        raise UserError(
            f"data.path={config.data.path} cannot be read by Energon ({reason}); prepare it anew"
        ) from error


def _order(config: RunConfig, info: DatasetInfo, rank: int, world_size: int) -> dict[str, Any]:
    """Everything that decides which sample follows which: a saved position means nothing under other values."""
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
    """Energon's loader as training uses it."""
    from megatron.energon import get_savable_loader
    from megatron.energon.wrappers.gc_dataset import GC_DEFAULT_EVERY_N_ITER

    loader = get_savable_loader(
        dataset,
        checkpoint_every_sec=CHECKPOINT_INTERVAL,
        gc_collect_every_n_steps=GC_DEFAULT_EVERY_N_ITER if dataset.worker_config.num_workers else 0,
        watchdog_timeout_seconds=None,  # the first buffers of a large run may take minutes
    )
    loader.pin_memory = False  # packs go through pinned memory when they are sent
    return loader
