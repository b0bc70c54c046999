"""Trackers of a run: TensorBoard, Weights & Biases and curves.png.

A tracker accepts the scalars of a step and the videos of a validation. A tracker that is missing or fails does not end
the run: a warning is printed and it is no longer used. Weights & Biases then writes files for `wandb sync`, if it can.
"""

import contextlib
import importlib.util
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import imageio.v3 as iio

from megadit.infer.media.video_io import read_video
from megadit.models.shared.cli.command import python_module
from megadit.models.shared.files import read_json, write_json
from megadit.train.config.schema import RunConfig
from megadit.train.monitoring.curves import AGAIN, CURVES_FILE, END, FOLLOW

VIDEO_TAG = "validation_generation"
SECONDS_BETWEEN_CURVES = 120.0
SECONDS_TO_ANSWER, SECONDS_TO_FINISH = 20.0, 60.0
"""Timeouts of Weights & Biases at its start and at its end; in between a separate process uploads."""
WANDB_RUN = "wandb.json"
"""File in the run's folder with its Weights & Biases id, so that a resumed run continues the same chart."""


class Board(Protocol):
    def scalars(self, step: int, values: dict[str, float]) -> None: ...

    def videos(self, step: int, videos: Iterable[tuple[str, Path]]) -> None:
        """Show videos, as (caption, mp4 or png)."""

    def close(self) -> None: ...


def open_trackers(config: RunConfig, *, start: int, taken_back: int = 0) -> list[Board]:
    """The trackers of `config.logger`, continued after step `start`.

    `taken_back`: number of later steps that were reported before, and will be reported anew with other numbers.
    """
    trackers: list[Board] = []
    if config.logger.tensorboard and _is_there("tensorboard", "logger.tensorboard", "megadit[train]"):
        folder = Path(config.train.output_dir) / "tensorboard"
        trackers.append(_Guarded("TensorBoard", lambda: TensorBoard(folder, start)))
    if config.logger.wandb_exp_name and _is_there("wandb", "logger.wandb_exp_name", "megadit[wandb]"):
        trackers.append(_Guarded("Weights & Biases", lambda: WeightsAndBiases(config, taken_back)))
    if config.logger.curves and _is_there("matplotlib", "logger.curves", "megadit[train]"):
        trackers.append(_Guarded(CURVES_FILE, lambda: Curves(Path(config.train.output_dir))))
    return trackers


def _is_there(package: str, field: str, extra: str) -> bool:
    if importlib.util.find_spec(package) is not None:
        return True
    print(f"{field} is off: {package} is not installed (pip install '{extra}')", file=sys.stderr, flush=True)
    return False


class _Guarded:
    """A tracker that is switched off, with one warning, at its first failure."""

    def __init__(self, name: str, open_board: Callable[[], Board]) -> None:
        self._name, self._board = name, None
        self._try(lambda: setattr(self, "_board", open_board()))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        if self._board is not None:
            self._try(lambda: self._board.scalars(step, values))

    def videos(self, step: int, videos: Iterable[tuple[str, Path]]) -> None:
        if self._board is not None:
            self._try(lambda: self._board.videos(step, videos))

    def close(self) -> None:
        if self._board is not None:
            self._try(self._board.close)

    def _try(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception as error:  # trackers raise whatever their networks and disks do
            self._board = None
            print(f"warning: the run goes on without {self._name}: {in_a_line(error)}", file=sys.stderr, flush=True)


def in_a_line(error: Exception) -> str:
    """First line of any library's error message, cut to 200 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


class TensorBoard:
    """Event files in the run's folder. Videos are animated images, as its own `add_video` makes them with moviepy."""

    def __init__(self, folder: Path, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        # purge steps after the checkpoint, which a killed process reported
        self._writer = SummaryWriter(str(folder), purge_step=start + 1)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def videos(self, step: int, videos: Iterable[tuple[str, Path]]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for number, (caption, path) in enumerate(videos):
            frames_THWC, fps = read_video(path)
            encoded = iio.imwrite("<bytes>", frames_THWC, extension=".gif", duration=1000 / (fps or 1), loop=0)
            height, width, colours = frames_THWC.shape[1:]
            image = Summary.Image(height=height, width=width, colorspace=colours, encoded_image_string=encoded)
            tag = f"{VIDEO_TAG}/{number:02d}"
            self._writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)
            self._writer.add_text(f"{tag}/caption", caption, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A Weights & Biases run, the same one after a resume. Without an API key it writes files for `wandb sync`.

    Its own step counter can only increase. So after a rollback the counter goes on, and charts use the logged `step` as
    their axis, where a repeated step has both values. (`resume_from` would drop the first, but few servers support it.)
    """

    def __init__(self, config: RunConfig, taken_back: int) -> None:
        import wandb

        self._wandb = wandb
        logger, folder = config.logger, Path(config.train.output_dir)
        run_id, self._ahead = _identity(folder, taken_back)
        save_dir = Path(logger.wandb_save_dir or folder)
        save_dir.mkdir(parents=True, exist_ok=True)
        mode = os.environ.get("WANDB_MODE") or ("online" if "WANDB_API_KEY" in os.environ else None)
        if mode is None:  # otherwise it would prompt on the terminal
            where = f"Weights & Biases writes to {save_dir / 'wandb'}, for `wandb sync`"
            print(f"no WANDB_API_KEY: {where} (WANDB_MODE=online uses a stored login)", flush=True)
        settings = {
            "project": logger.wandb_project,
            "entity": logger.wandb_entity,
            "name": logger.wandb_exp_name,
            "dir": str(save_dir),
            "config": asdict(config),
            "id": run_id,
            "resume": "allow",
        }
        try:
            self._run = self._begin(mode or "offline", settings)
        except Exception as error:  # network, server or key
            print(
                f"warning: Weights & Biases does not take this run ({in_a_line(error)}): it writes to "
                f"{save_dir / 'wandb'}, for `wandb sync`",
                file=sys.stderr,
                flush=True,
            )
            wandb.teardown()  # releases the id
            self._run = self._begin("offline", settings)
        self._run.define_metric("*", step_metric="step")

    def _begin(self, mode: str, settings: dict[str, Any]) -> Any:
        limits = {"init_timeout": SECONDS_TO_ANSWER, "finish_timeout": SECONDS_TO_FINISH, "finish_timeout_raises": True}
        return self._wandb.init(**settings, mode=mode, settings=self._wandb.Settings(silent=True, **limits))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._run.log({**values, "step": step}, step=step + self._ahead)

    def videos(self, step: int, videos: Iterable[tuple[str, Path]]) -> None:
        shown = {}
        for number, (caption, path) in enumerate(videos):
            is_image = path.suffix == ".png"
            media = self._wandb.Image if is_image else self._wandb.Video
            shown[f"{VIDEO_TAG}/{number:02d}"] = media(str(path), caption=caption)
        if shown:
            self._run.log({**shown, "step": step}, step=step + self._ahead)

    def close(self) -> None:
        try:
            self._run.finish()
        except Exception as error:
            raise RuntimeError(
                f"not all has been sent ({in_a_line(error)}): wandb sync {Path(self._run.dir).parent}"
            ) from error


class Curves:
    """curves.png in the run's folder, drawn by a separate process from metrics.jsonl after each validation, every few
    minutes and at the end; no step waits for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._drawn = time.monotonic()
        self._process: subprocess.Popen | None = None

    def scalars(self, step: int, values: dict[str, float]) -> None:
        is_due = time.monotonic() - self._drawn > SECONDS_BETWEEN_CURVES
        if is_due or any(name.startswith("validation/") for name in values):
            self._draw()

    def videos(self, step: int, videos: Iterable[tuple[str, Path]]) -> None:
        """Do nothing: curves show no videos."""

    def close(self) -> None:
        self._draw()
        self._process.communicate(END)  # closing its input is not enough: workers that were forked later hold it open
        if self._process.returncode:
            command = f"python -m megadit.train.monitoring.curves {self._folder}"
            print(f"{CURVES_FILE} could not be drawn; `{command}` says why", file=sys.stderr, flush=True)

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(BrokenPipeError):  # it has failed: its exit code is checked
                self._process.stdin.write(AGAIN)
                self._process.stdin.flush()
            return
        self._process = subprocess.Popen(
            python_module("megadit.train.monitoring.curves", str(self._folder), FOLLOW),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C must not end the last drawing
        )


def _identity(folder: Path, taken_back: int) -> tuple[str, int]:
    """Id of the Weights & Biases run, and the lead of its step counter over the run's steps."""
    path = folder / WANDB_RUN
    known = read_json(path) if path.is_file() else {"id": secrets.token_hex(4), "ahead": 0}
    known["ahead"] = known.get("ahead", 0) + taken_back
    write_json(path, known)
    return known["id"], known["ahead"]
