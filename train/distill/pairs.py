"""The pairs that `regression` learns from: noise, and the videos that a teacher makes of it."""

import json
import random
from collections.abc import Iterable
from pathlib import Path

from megadit.models.bundle import Bundle
from megadit.models.megatron.launch import launch
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path

DATASET = "dataset"
"""Folder of the samples in that of the pairs."""
SAMPLER = "euler"
"""An ODE's: what is added on the way would hide which noise a video comes of."""


def make_trajectories(
    folder: Path,
    teacher: Bundle,
    captions: Iterable[str],
    *,
    count: int,
    num_steps: int,
    guidance: float,
    num_processes: int,
) -> None:
    """Makes the data set of `count` videos of some of the captions, by `megadit prepare trajectories`.

    A folder that is finished stays as it is, one that was cut off is completed.

    Raises:
        UserError: if they cannot be made; the command has said why.
    """
    chosen = sorted(set(captions))
    random.Random(0).shuffle(chosen)
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / "captions.jsonl"
    with atomic_path(prompts) as temporary:
        temporary.write_text("".join(json.dumps({"prompt": caption}) + "\n" for caption in chosen[:count]))
    request = [str(teacher.path), str(folder / DATASET), "--prompt_file", str(prompts), "--count", str(count)]
    variant = ["--sampler", SAMPLER, "--eta", "0", "--churn", "0"]
    variant += ["--num_steps", str(num_steps), "--guidance", f"{guidance:g}"]
    if launch("megadit.train.data.prepare.command", ["trajectories", *request, *variant], num_processes=num_processes):
        raise UserError(f"no videos were made to learn from: {folder / 'dataset'} is not whole; run the command again")
