"""Checkpoints of a run: written atomically, found automatically, and resumed exactly.

    checkpoints/iter_0000100/
        state.json      progress of the run (`RunState`) and the versions that wrote it
        config.yaml     the resolved configuration
        loaders/        state of each data-parallel rank's reader, as JSON
        tensors/        weights, EMA weights, optimizer state (see models.megatron.checkpoint)
        SHA256SUMS      the checksum of every file (see models.megatron.integrity)

A directory gets its final name only when all its contents are synced to disk: a run may be killed at any moment. A
damaged checkpoint is reported, and the one before it is used.
"""

import dataclasses
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megadit.models.megatron.checkpoint import (
    CONFIG,
    STATE,
    TENSORS,
    check_checkpoint,
    checkpoint_name,
    find_checkpoints,
    named_checkpoints,
    read_state,
)
from megadit.models.megatron.groups import Groups, computed_by_first
from megadit.models.megatron.integrity import DamagedCheckpointError, checksums, file_names, write_sums
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json, write_json
from megadit.train.checkpoints.fixed_settings import check_fixed, fixed_settings
from megadit.train.checkpoints.mirror import SecondCopy, outdated
from megadit.train.checkpoints.tensors import TrainedTensors
from megadit.train.checkpoints.writer import (
    DISK_FULL,
    UNFINISHED,
    BackgroundWrite,
    delete,
    publish,
    reason_of,
    space_left,
    unfinished_name,
)
from megadit.train.config.load import to_yaml
from megadit.train.config.schema import RunConfig

Fence = Callable[[], None]
FORMAT_VERSION = 2
LOADERS = "loaders"


@dataclass(slots=True)
class RunState:
    """Progress of a run, saved with its tensors."""

    iteration: int = 0
    """Optimizer steps done."""
    consumed_samples: int = 0
    consumed_tokens: int = 0
    """Video tokens of samples, padding excluded."""
    refused_samples: dict[str, int] = field(default_factory=dict)
    """Number of samples that readers have rejected so far, by reason."""
    metrics_bytes: int = 0
    """Length of metrics.jsonl in bytes."""
    validation: dict[str, Any] = field(default_factory=dict)
    """Newest validation: its step, and the loss of each EMA profile ("none": the weights without EMA)."""
    lowest: dict[str, float] = field(default_factory=dict)
    """`step` and mean `loss` of the best validation and the number of later ones, `since`, for `validation.patience`.
    """
    untold: dict[str, Any] | None = None
    """Values of the last step that metrics.jsonl still lacks: a request to stop postponed its validation."""
    skipped_steps: int = 0
    """Number of steps whose update was skipped."""
    recent_losses: list[float] = field(default_factory=list)
    """Losses of the last steps, for spike detection."""
    expert_counts: list[list[int]] = field(default_factory=list)
    """Tokens of each expert of each layer in the last step, for load balancing."""
    loss_scaler: dict[str, float] | None = None
    """State of the fp16 loss scaler: scale, and steps since its last change."""
    num_threads: int = 0
    """CPU threads of a rank as chosen (`train/engine/threads.py`); 0: not yet."""


MAX_READER_BYTES = 1 << 28
"""Maximum size of one reader's state, whose buffers may hold the keys of many thousand samples."""


class SavedReaders:
    """Saved state of the reader of each data-parallel rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __len__(self) -> int:
        return len(list(self._folder.iterdir()))

    def __getitem__(self, data_rank: int) -> Any:
        if not 0 <= data_rank < len(self):
            raise IndexError(data_rank)
        return read_json(self._folder / _loader_file(data_rank), max_bytes=MAX_READER_BYTES)


class CheckpointStore:
    """Writes and finds the checkpoints of one run; every rank calls the same methods."""

    def __init__(
        self,
        config: RunConfig,
        groups: Groups,
        base: str | None = None,
        teacher: str | None = None,
        fence: Fence = lambda: None,
        mark: Callable[[], None] = lambda: None,
    ) -> None:
        """`base`, `teacher`: fingerprints of an adapter's base and of a student's teacher. `fence` ends this process if
        another one has locked the folder meanwhile, `mark` reports progress to the watchdog.
        """
        self._fence, self._mark = fence, mark
        self.root = Path(config.train.output_dir) / "checkpoints"
        self._config = config
        self._groups = groups
        self._base = base
        self._teacher = teacher
        self._copy = None
        self._pending: tuple[Path, BackgroundWrite] | None = None
        self._saved: str | None = None
        """Name of a checkpoint that is never deleted."""
        if groups.is_first:
            self._copy = SecondCopy.at(config.checkpoint.copy_to)
            self.root.mkdir(parents=True, exist_ok=True)
            for leftover in self.root.glob(f"*{UNFINISHED}"):
                shutil.rmtree(leftover, ignore_errors=True)
        dist.barrier()

    def latest(self) -> Path | None:
        """The newest intact checkpoint: of this run, of its second copy, or of `checkpoint.load`.

        Damaged ones are reported.

        Raises:
            UserError: if all of them are damaged, or `checkpoint.load` is another run without a checkpoint.
        """
        damaged = []
        for candidates in (self._own, self._copied, self._of_other_run):
            for path in self._agree_on(candidates):
                problem = self._problem(path)
                if problem is None:
                    return path
                damaged.append(path)
                if self._groups.is_first:
                    print(f"{problem}; looking for the one before it", flush=True)
        if damaged:
            raise UserError(f"no checkpoint in {self.root} is intact; to start anew, choose another train.output_dir")
        return None

    def save(self, state: RunState, tensors: TrainedTensors, loader_state: Any) -> None:
        """Write a checkpoint, with `checkpoint.async_save` in the background (see `poll`).

        `loader_state`: state of this data-parallel rank's reader, None on ranks without one.

        Raises:
            UserError: if the disk is full or fails; earlier checkpoints remain.
        """
        self.finish()
        path = self.root / checkpoint_name(state.iteration)
        self._saved = checkpoint_name(state.lowest["step"]) if state.lowest else None
        unfinished = unfinished_name(path)
        with self._all_or_nothing(unfinished):
            self._pending = path, self._start(unfinished, state, tensors, loader_state)
        if not self._config.checkpoint.async_save:
            self.finish()

    def poll(self) -> None:
        """Complete the checkpoint that is being written, once all ranks have written their files.

        Raises:
            UserError: see `save`.
        """
        if self._pending is None:
            return
        is_done = torch.tensor(self._pending[1].is_done, dtype=torch.int, device=self._groups.device)
        dist.all_reduce(is_done, dist.ReduceOp.MIN)
        if is_done:
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, and delete those beyond `checkpoint.keep_last`.

        It gets its name when everything is synced to disk; a run killed before resumes from the previous checkpoint.

        Raises:
            UserError: see `save`.
        """
        if self._pending is None:
            return
        (path, write), self._pending = self._pending, None
        unfinished = unfinished_name(path)
        with self._all_or_nothing(unfinished):
            mine = {f"{TENSORS}/{name}": digest for name, digest in write.finish().items()}
        found = self._checksums(unfinished, known=mine)
        with self._all_or_nothing(unfinished):
            if self._groups.is_first:
                self._fence()
                write_sums(unfinished, found)
                publish(unfinished, path)
        self._finish_copy()  # it may still read the previous checkpoint
        if self._groups.is_first:
            print(f"checkpoint: {path}", flush=True)
            _delete_old(path, self._config.checkpoint.keep_last, self._saved)
            if self._copy is not None:
                self._copy.start(path, keep_last=self._config.checkpoint.keep_last, preserved=self._saved)
        dist.barrier()

    def close(self) -> None:
        """Wait for the last checkpoint and its second copy."""
        self.finish()
        self._finish_copy()

    def _finish_copy(self) -> None:
        if self._config.checkpoint.copy_to is not None:
            computed_by_first(lambda: self._copy.finish(), self._mark, is_first=self._groups.is_first)

    def load(self, path: Path, tensors: TrainedTensors) -> tuple[RunState, SavedReaders]:
        """Restore the tensors of a checkpoint that `latest` found; return the state of the run and of all readers.
        Raises UserError if the checkpoint was written by a newer version, or with settings that cannot be changed."""
        description = read_state(path)
        try:
            self._check(path, description)
            state = RunState(**description["run"])
        except (KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpointError(f"{path / STATE} is damaged or hostile: {error!r}") from error
        try:
            tensors.load(path / TENSORS, step=state.iteration - state.skipped_steps)
        except (CheckpointException, CheckpointingException, pickle.UnpicklingError) as error:
            raise DamagedCheckpointError(f"{path} is damaged or hostile: {reason_of(error, path)}") from error
        return state, SavedReaders(path / LOADERS)

    # ------------------------------------------------------------------------------------------------- finding

    def _agree_on(self, candidates) -> Iterator[Path]:
        """Broadcast the candidates that the first rank finds, one by one (the next may have to be fetched)."""
        iterator = candidates() if self._groups.is_first else None
        while True:
            found = computed_by_first(lambda: _next_or_error(iterator), self._mark, is_first=self._groups.is_first)
            if isinstance(found, UserError):
                raise found
            if found is None:
                return
            yield found

    def _own(self) -> Iterator[Path]:
        yield from reversed(named_checkpoints(self.root))

    def _copied(self) -> Iterator[Path]:
        for name in reversed(self._copy.names()) if self._copy is not None else ():
            if not (self.root / name).exists():
                yield self._copy.fetch(name, self.root, self.root / (name + UNFINISHED))

    def _of_other_run(self) -> Iterator[Path]:
        other = self._config.checkpoint.load
        if other is None or Path(other).resolve() == self.root.parent.resolve():
            return
        found = named_checkpoints(Path(other) / "checkpoints")
        if not found:
            remedy = "give the folder of a run" if Path(other).exists() else "it does not exist"
            raise UserError(f"checkpoint.load={other} has no checkpoint; {remedy}")
        yield from reversed(found)

    def _problem(self, path: Path) -> str | None:
        """Return what is wrong with a checkpoint, or None, on all ranks, among which the reading is divided."""
        found = self._checksums(path)
        problem = [None]
        if self._groups.is_first:
            try:
                check_checkpoint(path, found)
            except UserError as error:
                problem = [str(error)]
        dist.broadcast_object_list(problem, src=0)
        return problem[0]

    def _checksums(self, path: Path, *, known: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
        """Checksums of all files, each computed by one rank; unreadable files have none. `known`: checksums of files
        that this rank has just written."""
        found = self._everyones(known)
        names = [[name for name in file_names(path) if name not in found] if self._groups.is_first else None]
        dist.broadcast_object_list(names, src=0)
        mine: dict[str, str] = {}
        for name in names[0][dist.get_rank() :: self._groups.world_size]:
            try:
                mine |= checksums(path, [name])
            except OSError:
                continue
        return found | self._everyones(mine)

    def _everyones(self, mine: Mapping[str, str]) -> dict[str, str]:
        parts: list[dict[str, str]] = [{}] * self._groups.world_size
        dist.all_gather_object(parts, dict(mine))
        return {name: digest for part in parts for name, digest in part.items()}

    # ------------------------------------------------------------------------------------------------- writing

    def _start(self, unfinished: Path, state: RunState, tensors: TrainedTensors, loader_state: Any) -> BackgroundWrite:
        if self._groups.is_first:
            shutil.rmtree(unfinished, ignore_errors=True)
            (unfinished / TENSORS).mkdir(parents=True)
        dist.barrier()
        if loader_state is not None:
            write_json(unfinished / LOADERS / _loader_file(self._groups.readers.rank()), loader_state)
        if self._groups.is_first:
            write_json(unfinished / STATE, self._describe(state))
            (unfinished / CONFIG).write_text(to_yaml(self._config), encoding="utf-8")
        return tensors.start_save(unfinished / TENSORS)

    @contextmanager
    def _all_or_nothing(self, unfinished: Path) -> Iterator[None]:
        """Within the block, a failure to write on any rank is a failure on all, and deletes the unfinished folder."""
        problem = None
        try:
            yield
        except (OSError, CheckpointException, CheckpointingException) as error:
            problem = reason_of(error, self.root)
        problems: list[str | None] = [None] * self._groups.world_size
        dist.all_gather_object(problems, problem)
        if not any(problems):
            return
        if self._groups.is_first:
            shutil.rmtree(unfinished, ignore_errors=True)
        kept, reason = named_checkpoints(self.root)[-1:], next(filter(None, problems))
        remedy = f"Free some space ({space_left(self.root, kept)})" if reason == DISK_FULL else "Correct this"
        raise UserError(
            f"{unfinished.name.removesuffix(UNFINISHED)} could not be written to {self.root} "
            f"({reason}); {f'{kept[0].name} is kept' if kept else 'there is none yet'}. "
            f"{remedy} and run the same command to continue"
        )

    # ------------------------------------------------------------------------------------------------ describing

    def _describe(self, state: RunState) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "run": dataclasses.asdict(state),
            "ema_sigma_rels": list(self._config.ema.sigma_rels),
            "data_parallel_size": self._groups.readers.size(),
            "settings": fixed_settings(self._config),
            "base": self._base,
            "teacher": self._teacher,
        }

    def _check(self, path: Path, description: dict[str, Any]) -> None:
        if description["format_version"] != FORMAT_VERSION:
            raise UserError(
                f"{path} has format {description['format_version']}, this version of megadit reads {FORMAT_VERSION}: "
                "continue with the version that wrote it"
            )
        check_fixed(self._config, path, description["settings"])
        if (base := description.get("base")) != self._base:
            raise UserError(
                f"{path} has an adapter of a base with the fingerprint {base}, not {self._base} of "
                f"checkpoint.init_from={self._config.starting_weights}; give the base it started with"
            )
        if (teacher := description.get("teacher")) != self._teacher:
            raise UserError(
                f"{path} has a student of a teacher with the fingerprint {teacher}, not {self._teacher} of "
                f"{self._config.train.distill.teacher}; give the teacher it started with"
            )


def _next_or_error(iterator: Iterator[Path]) -> Path | UserError | None:
    try:
        return next(iterator, None)
    except UserError as error:
        return error


def _loader_file(data_rank: int) -> str:
    return f"{data_rank:05d}.json"


def _delete_old(written: Path, keep_last: int, preserved: str | None = None) -> None:
    for old in outdated(find_checkpoints(written.parent), written, keep_last):
        if old.name != preserved:
            delete(old)
