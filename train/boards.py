"""TensorBoard and Weights & Biases: where the numbers and videos of a run are looked at.

A board takes the scalars of a step and the videos of a validation. One whose package is missing is left out, with one
line that says so: no run ends over it.
"""

import importlib.util
import os
import secrets
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import imageio.v3 as iio

from megadit.infer.video_io import read_video
from megadit.models.support import read_json, write_json
from megadit.train.config import RunConfig
from megadit.train.overrides import to_plain_values

VIDEO_TAG = "validation_generation"
WANDB_RUN = "wandb.json"
"""In the run's folder: the id under which Weights & Biases knows it, so that a resumed run goes on in one chart."""


class Board(Protocol):
    def scalars(self, step: int, values: dict[str, float]) -> None: ...

    def videos(self, step: int, videos: Iterable[tuple[str, Path]]) -> None:
        """Shows (caption, mp4 or png) pairs."""

    def close(self) -> None: ...


def open_boards(config: RunConfig, *, start: int) -> list[Board]:
    """The boards that `config.logger` asks for, continued after step `start`."""
    boards: list[Board] = []
    if config.logger.tensorboard and _is_there("tensorboard", "logger.tensorboard", "megadit[train]"):
        boards.append(TensorBoard(Path(config.train.output_dir) / "tensorboard", start))
    if config.logger.wandb_exp_name and _is_there("wandb", "logger.wandb_exp_name", "megadit[wandb]"):
        boards.append(WeightsAndBiases(config))
    return boards


def _is_there(package: str, field: str, extra: str) -> bool:
    if importlib.util.find_spec(package) is not None:
        return True
    print(f"{field} is off: {package} is not installed (pip install '{extra}')", file=sys.stderr, flush=True)
    return False


class TensorBoard:
    """Event files in the run's folder. Videos are animated images, as its own `add_video` makes them with moviepy."""

    def __init__(self, folder: Path, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        # steps after the one that a resumed run starts from were told by a process that is gone
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
    """A run there, the same one after a resume. Without an API key its files wait for `wandb sync`."""

    def __init__(self, config: RunConfig) -> None:
        import wandb

        self._wandb = wandb
        logger, folder = config.logger, Path(config.train.output_dir)
        save_dir = Path(logger.wandb_save_dir or folder)
        save_dir.mkdir(parents=True, exist_ok=True)
        mode = os.environ.get("WANDB_MODE") or ("online" if "WANDB_API_KEY" in os.environ else None)
        if mode is None:  # it would ask on the terminal
            where = f"Weights & Biases writes to {save_dir / 'wandb'}, for `wandb sync`"
            print(f"no WANDB_API_KEY: {where} (WANDB_MODE=online uses a stored login)", flush=True)
        self._run = wandb.init(
            project=logger.wandb_project,
            entity=logger.wandb_entity,
            name=logger.wandb_exp_name,
            dir=str(save_dir),
            config=to_plain_values(config),
            id=_run_id(folder),
            resume="allow",
            mode=mode or "offline",
            settings=wandb.Settings(silent=True),
        )

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def videos(self, step: int, videos: Iterable[tuple[str, Path]]) -> None:
        shown = {}
        for number, (caption, path) in enumerate(videos):
            is_image = path.suffix == ".png"
            media = self._wandb.Image if is_image else self._wandb.Video
            shown[f"{VIDEO_TAG}/{number:02d}"] = media(str(path), caption=caption)
        if shown:
            self._run.log(shown, step=step)

    def close(self) -> None:
        self._run.finish()


def _run_id(folder: Path) -> str:
    path = folder / WANDB_RUN
    if not path.is_file():
        write_json(path, {"id": secrets.token_hex(4)})
    return read_json(path)["id"]
