"""What `megadit generate` is to make: one job for each prompt, guidance scale and seed, with its settings."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megadit.infer.conditions import GivenVideo
from megadit.infer.flags import SETTING_FLAGS, GenerateFlags, check_path, refuse
from megadit.infer.guidance import guidance_scale
from megadit.infer.settings import AUTO, resolve_settings
from megadit.infer.video_io import read_video
from megadit.models.bundle.bundle import SamplingDefaults
from megadit.models.shared.errors import UserError, nearest

SUBJECT = "{subject}"
"""The place in a prompt that --subject_name fills."""
DEFAULT_STRENGTH = 0.6


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenFile:
    """A file that a generation starts from; see `GivenVideo`."""

    path: str
    sha256: str
    strength: float | None
    keep_frames: int | None

    def load(self) -> GivenVideo:
        frames, _ = read_video(self.path)
        return GivenVideo(frames=frames, strength=self.strength, keep_frames=self.keep_frames)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One video to make."""

    prompt: str
    seed: int
    settings: SamplingDefaults
    given: GivenFile | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Jobs in the order of (prompt, guidance, seed)."""

    jobs: list[Job]
    num_columns: int
    """Jobs in a row of the contact sheet: the seeds of one prompt and scale."""


def plan_jobs(flags: GenerateFlags, defaults: SamplingDefaults, trained: SamplingDefaults | None = None) -> Grid:
    """All videos that the options ask for; `trained` are the checkpoint's defaults, where others are started from.

    Raises:
        UserError: for a prompt file that cannot be read, and for settings that no video can have.
    """
    lines = [*({"prompt": prompt} for prompt in flags.prompt), *_prompt_file(flags.prompt_file)]
    refuse(not lines, "there is no prompt; give --prompt TEXT or --prompt_file FILE")
    _check_subject([line["prompt"] for line in lines], flags.subject_name)
    rows = [row for line in lines for row in _rows(line, flags, defaults, trained)]
    return Grid(jobs=[job for row in rows for job in row], num_columns=max(map(len, rows)))


def _rows(
    line: Mapping[str, Any], flags: GenerateFlags, defaults: SamplingDefaults, trained: SamplingDefaults | None
) -> Iterator[list[Job]]:
    """The jobs of one prompt: a row for each guidance scale, a job for each seed."""
    values = {"num_frames": flags.num_video_frames} | {name: getattr(flags, name) for name in SETTING_FLAGS}
    values |= {key: value for key, value in line.items() if key not in _NO_SETTINGS}
    values["shift"] = _shift(values["shift"])
    if values["autoguidance"]:
        check_path("autoguidance", values["autoguidance"])
        values["autoguidance"] = str(Path(values["autoguidance"]).resolve())  # so that --repeat finds it from anywhere
    scales = [line["guidance"]] if "guidance" in line else list(flags.guidances) or [flags.guidance]
    seeds = [line["seed"]] if "seed" in line else line.get("seeds") or flags.seeds or [flags.seed or 0]
    prompt = line["prompt"].replace(SUBJECT, flags.subject_name)
    for scale in scales:
        guidance = None if scale is None else guidance_scale(scale, flags.guidance_convention)
        settings = resolve_settings(defaults, trained=trained, **values | {"guidance": guidance})
        given = _given_file(line, flags, settings)
        yield [Job(prompt=prompt, seed=seed, settings=settings, given=given) for seed in seeds]


_GIVEN = ("input_video", "strength", "continue_video", "keep_frames")
_NO_SETTINGS = ("prompt", "seed", "seeds", "guidance", *_GIVEN)


def _shift(value: str | float | None) -> str | float | None:
    if value in (None, AUTO):
        return value
    try:
        return float(value)
    except ValueError:
        raise UserError(f"shift={value} must be a number, or {AUTO}") from None


def _given_file(line: Mapping[str, Any], flags: GenerateFlags, settings: SamplingDefaults) -> GivenFile | None:
    source = line if "input_video" in line or "continue_video" in line else {**_given_flags(flags), **line}
    input_video, strength, continue_video, keep_frames = (source.get(name) for name in _GIVEN)
    refuse(input_video and continue_video, "give input_video or continue_video, not both")
    if input_video:
        strength = DEFAULT_STRENGTH if strength is None else strength
        return GivenFile(path=input_video, sha256=sha256(input_video), strength=strength, keep_frames=None)
    if continue_video:
        keep_frames = max(1, settings.num_frames // 2) if keep_frames is None else keep_frames
        return GivenFile(path=continue_video, sha256=sha256(continue_video), strength=None, keep_frames=keep_frames)
    return None


def _given_flags(flags: GenerateFlags) -> dict[str, Any]:
    return {name: getattr(flags, name) for name in _GIVEN}


def sha256(path: str) -> str:
    """The checksum of a file.

    Raises:
        UserError: if it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _check_subject(prompts: list[str], subject: str) -> None:
    has_place = any(SUBJECT in prompt for prompt in prompts)
    refuse(has_place and not subject, f"a prompt contains {SUBJECT}; say what it is with --subject_name")
    refuse(
        subject and not has_place,
        f"--subject_name={subject} has no place: write {SUBJECT} where a prompt should name it",
    )


# --------------------------------------------------------------------------------------------------- prompt files


def _prompt_file(path: str) -> list[dict[str, Any]]:
    """The lines of a prompt file, as objects that have a "prompt"."""
    if not path:
        return []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read --prompt_file {path}: {error}") from error
    numbered = [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]
    if Path(path).suffix.lower() == ".jsonl":
        return [_json_line(f"{path}, line {number}", line) for number, line in numbered]
    return [{"prompt": line} for _, line in numbered]


_ALLOWED: dict[str, tuple[type, ...]] = {
    "prompt": (str,), "seed": (int,), "seeds": (list,), "num_frames": (int,), "num_video_frames": (int,),
    "height": (int,), "width": (int,), "num_steps": (int,), "keep_frames": (int,),
    "negative_prompt": (str,), "autoguidance": (str,), "second_prompt": (str,), "sampler": (str,), "schedule": (str,),
    "input_video": (str,), "continue_video": (str,), "shift": (str, int, float),
    "sigmas": (list,), "guidance_interval": (list,), "churn_interval": (list,),
    **dict.fromkeys(
        ("guidance", "fps", "strength", "guidance_rescale", "second_guidance", "sigma_min", "sigma_max", "rho",
         "churn", "eta", "cache_budget"), (int, float)
    ),
}  # fmt: skip
"""What a line of a .jsonl prompt file may say, and the types of its values."""


def _json_line(place: str, text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{place} is not valid JSON: {error}") from None
    if not isinstance(line, dict) or not isinstance(line.get("prompt"), str):
        raise UserError(f'{place} must be an object with a "prompt", such as {{"prompt": "a red seven", "seed": 3}}')
    for name, value in line.items():
        if name not in _ALLOWED:
            near = nearest(name, _ALLOWED)
            raise UserError(f"{place}: {name!r} is unknown" + (f"; did you mean {near!r}?" if near else ""))
        if not _has_type(name, value):
            raise UserError(f"{place}: {name}={value!r} has the wrong type")
    refuse("seed" in line and "seeds" in line, f"{place}: give seed or seeds, not both")
    if "num_video_frames" in line:
        line["num_frames"] = line.pop("num_video_frames")
    return line


def _has_type(name: str, value: Any) -> bool:
    if isinstance(value, list):
        items = (int,) if name == "seeds" else (int, float)
        return list in _ALLOWED[name] and bool(value) and all(type(item) in items for item in value)
    return isinstance(value, _ALLOWED[name]) and not isinstance(value, bool)
