"""Checkpoints of a run: complete or absent, found again by themselves, and exact.

    checkpoints/iter_0000100/
        state.json      where the run stood (`RunState`) and what wrote it
        config.yaml     the resolved configuration
        loaders/        where each data-parallel rank's reader stood, as JSON
        tensors/        weights, averages, optimizer state (see models.megatron.checkpoint)

A directory bears its final name only when everything is in it and on the disk: a run may be killed at any moment.
"""

import dataclasses
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megadit.models.megatron.checkpoint import CONFIG, STATE, TENSORS, checkpoint_name, find_checkpoints
from megadit.models.megatron.groups import Groups
from megadit.models.support import UserError, read_json, write_json
from megadit.train.checkpoint_tensors import TrainedTensors
from megadit.train.config import RunConfig
from megadit.train.overrides import to_yaml

FORMAT_VERSION = 1
LOADERS = "loaders"
_UNFINISHED = ".unfinished"


@dataclass(slots=True)
class RunState:
    """Where a run stands, beside its tensors."""

    iteration: int = 0
    """Optimizer steps done."""
    consumed_samples: int = 0
    consumed_tokens: int = 0
    """Video tokens of samples, padding excluded."""
    metrics_bytes: int = 0
    """Length of metrics.jsonl."""
    validation: dict[str, Any] = field(default_factory=dict)
    """The newest validation: its step, and the loss of each average ("none" for the weights themselves)."""


class CheckpointStore:
    """Writes and finds the checkpoints of one run; every rank calls the same methods."""

    def __init__(self, config: RunConfig, groups: Groups) -> None:
        self.root = Path(config.train.output_dir) / "checkpoints"
        self._config = config
        self._groups = groups
        if groups.is_first:
            self.root.mkdir(parents=True, exist_ok=True)
            for leftover in self.root.glob(f"*{_UNFINISHED}"):
                shutil.rmtree(leftover, ignore_errors=True)
        dist.barrier()

    def latest(self) -> Path | None:
        """The newest complete checkpoint of this run, or else of `checkpoint.load`; the first rank looks for all.

        Raises:
            UserError: if neither has one, and `checkpoint.load` is another run.
        """
        found = [find_checkpoints(self.root)[-1:] or self._of_other_run() if self._groups.is_first else None]
        dist.broadcast_object_list(found, src=0)
        return found[0][0] if found[0] else None

    def _of_other_run(self) -> list[Path]:
        other = self._config.checkpoint.load
        if other is None or Path(other).resolve() == self.root.parent.resolve():
            return []
        found = find_checkpoints(Path(other) / "checkpoints")
        if not found:
            raise UserError(f"checkpoint.load={other} has no complete checkpoint; give the folder of a run")
        return found[-1:]

    def save(self, state: RunState, tensors: TrainedTensors, loader_state: Any) -> Path:
        """Writes a checkpoint and deletes those beyond the last `checkpoint.keep_last`.

        `loader_state` is that of this data-parallel rank's reader, None on ranks that do not read.
        """
        path = self.root / checkpoint_name(state.iteration)
        unfinished = path.with_name(path.name + _UNFINISHED)
        if self._groups.is_first:
            shutil.rmtree(unfinished, ignore_errors=True)
            (unfinished / TENSORS).mkdir(parents=True)
        dist.barrier()
        tensors.save(unfinished / TENSORS)
        if loader_state is not None:
            write_json(unfinished / LOADERS / _loader_file(self._groups.data.rank()), loader_state)
        if self._groups.is_first:
            write_json(unfinished / STATE, self._describe(state))
            (unfinished / CONFIG).write_text(to_yaml(self._config), encoding="utf-8")
        dist.barrier()
        if self._groups.is_first:
            _publish(unfinished, path)
            for old in find_checkpoints(self.root)[: -self._config.checkpoint.keep_last]:
                shutil.rmtree(old)
        dist.barrier()
        return path

    def load(self, path: Path, tensors: TrainedTensors) -> tuple[RunState, Any]:
        """Restores tensors; gives the state of the run and of this data-parallel rank's reader.

        Raises:
            UserError: if the checkpoint was written by a newer version, or under settings that cannot be continued.
        """
        description = read_json(path / STATE)
        self._check(path, description)
        state = RunState(**description["run"])
        tensors.load(path / TENSORS, step=state.iteration)
        own = path / LOADERS / _loader_file(self._groups.data.rank())
        # a rank that was not there takes the first one's state: the reader knows whether that is possible
        return state, read_json(own if own.is_file() else path / LOADERS / _loader_file(0))

    def _describe(self, state: RunState) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "run": dataclasses.asdict(state),
            "optimizer": self._config.optimizer.optimizer,
            "learned_uncertainty": self._config.diffusion.learned_uncertainty,
            "ema_sigma_rels": list(self._config.ema.sigma_rels),
            "model": self._config.model.to_dict(),
            "data_parallel_size": self._groups.data.size(),
        }

    def _check(self, path: Path, description: dict[str, Any]) -> None:
        if description["format_version"] > FORMAT_VERSION:
            raise UserError(
                f"{path} has format {description['format_version']}; this version of megadit reads up to "
                f"{FORMAT_VERSION}: update megadit"
            )
        now = self._describe(RunState())
        for name, setting in (
            ("model", "model"),
            ("optimizer", "optimizer.optimizer"),
            ("learned_uncertainty", "diffusion.learned_uncertainty"),
            ("ema_sigma_rels", "ema.sigma_rels"),
        ):
            if description[name] != now[name]:
                raise UserError(
                    f"{path} was written with {setting}={_changed(description[name], now[name])}; "
                    "set it back, or choose another train.output_dir"
                )


def _changed(before: Any, now: Any) -> str:
    """`before`, or the entries of it that differ."""
    if isinstance(before, dict):
        before = {key: value for key, value in before.items() if now.get(key) != value}
    return str(before)


def _loader_file(data_rank: int) -> str:
    return f"{data_rank:05d}.json"


def _publish(unfinished: Path, path: Path) -> None:
    """Gives a finished directory its name, once its contents are on the disk."""
    for file in unfinished.rglob("*"):
        _sync(file)
    _sync(unfinished)
    if path.exists():  # saved at this step before, by a run that was continued from an older checkpoint
        shutil.rmtree(path)
    unfinished.rename(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
