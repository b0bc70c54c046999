"""Data of the objective `regression`: pairs of noise and the teacher's video."""

import json
import random
from collections.abc import Iterable
from pathlib import Path

from megadit.models.bundle import Bundle
from megadit.models.megatron.launch import launch
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path

DATASET = "dataset"
"""Folder of the samples within the folder of the pairs."""
SAMPLER = "euler"
"""Deterministic sampler: added noise would make the video independent of its initial noise."""


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
    """Generate a data set of `count` videos for some of the captions, by `megadit prepare trajectories`.

    A finished folder is left unchanged, an interrupted one is completed.

    Raises:
        UserError: if they cannot be generated; the command has printed why.
    """
    chosen = sorted(set(captions))
    random.Random(0).shuffle(chosen)
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / "captions.jsonl"
    with atomic_path(prompts) as temporary:
        temporary.write_text(
            "".join(json.dumps({"prompt": caption}) + "\n" for caption in chosen[:count]), encoding="utf-8"
        )
    request = [str(teacher.path), str(folder / DATASET), "--prompt_file", str(prompts), "--count", str(count)]
    variant = ["--sampler", SAMPLER, "--eta", "0", "--churn", "0"]
    variant += ["--num_steps", str(num_steps), "--guidance", f"{guidance:g}"]
    if launch("megadit.train.data.prepare.command", ["trajectories", *request, *variant], num_processes=num_processes):
        raise UserError(f"the teacher's videos in {folder / 'dataset'} are incomplete; run the command again")
