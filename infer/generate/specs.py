"""The videos of a `megadit generate` command: one for each prompt, guidance scale and seed, with its settings, and its
conditioning files, which options name and a record keeps."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megadit.infer.conditioning.items import VIDEO_TO_VIDEO, ConditioningFile, ConditioningItem, named_media
from megadit.infer.generate.options import GenerateOptions, check_path, refuse
from megadit.infer.media.video_io import read_video
from megadit.infer.pipeline.adapters import ScaledAdapter, adapted_defaults, scaled_adapters
from megadit.infer.sampling.guidance import guidance_scale
from megadit.infer.sampling.resolve import resolve_settings
from megadit.models.diffusion.conditioning_settings import KINDS
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.lora.named import parse_adapters, split_expert
from megadit.models.shared.cli.setting import check_json, settings_of, under_own_names
from megadit.models.shared.documents import check_yaml, parse_json, parse_yaml
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import MAX_MEDIA_BYTES, read_limited, sha256_of
from megadit.models.shared.text_encoding import decoded

MEDIA = {name: kind for name, kind in KINDS.items() if name != "keyframe"}
"""Options that name one file -> its kind; a `video` with a `mask` is for inpaint. `keyframe` names several."""
OPTIONS = (*MEDIA, "keyframe", "mask", "strength", "keep_frames")
"""All options of conditioning files, and the keys of a .jsonl prompt file's lines."""
SUBJECT = "{subject}"
"""The place in a prompt that --subject_name fills."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoSpec:
    """One video to make."""

    prompt: str
    seed: int
    settings: SamplingSettings
    conditioning: tuple[ConditioningFile, ...] = ()
    adapters: tuple[ScaledAdapter, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Videos in the order of (prompt, guidance, seed)."""

    specs: list[VideoSpec]
    most_seeds: int
    """Most seeds of one prompt and scale, which are a row of the contact sheet; near a square for a single seed."""


def video_grid(options: GenerateOptions, defaults: SamplingSettings, recorded: SamplingSettings | None = None) -> Grid:
    """All videos of the options with a checkpoint's defaults; settings in `recorded` take precedence over the defaults
    of the checkpoint and its adapters.

    Raises:
        UserError: for a prompt file that cannot be read, and for invalid settings.
    """
    prompts = (*options.prompt, *filter(None, [options.instruction]))
    lines = [*({"prompt": prompt} for prompt in prompts), *prompt_lines(options.prompt_file)]
    refuse(not lines, "there is no prompt; give --prompt TEXT or --prompt_file FILE")
    _check_subject([line["prompt"] for line in lines], options.subject_name)
    rows = [row for line in lines for row in _rows(line, options, defaults, recorded)]
    specs = [spec for row in rows for spec in row]
    has_interval = any(spec.settings.adapter_interval for spec in specs)
    refuse(has_interval and not any(spec.adapters for spec in specs), "adapter_interval needs an adapter")
    return Grid(specs=specs, most_seeds=max(map(len, rows)))


def _rows(
    line: Mapping[str, Any],
    options: GenerateOptions,
    defaults: SamplingSettings,
    recorded: SamplingSettings | None,
) -> Iterator[list[VideoSpec]]:
    """The videos of one prompt: a row for each guidance scale, a video for each seed."""
    values = asdict(options.settings) | {name: value for name, value in line.items() if name in _SETTINGS}
    if values["autoguidance"]:
        check_path("autoguidance", values["autoguidance"])
        values["autoguidance"] = str(Path(values["autoguidance"]).resolve())  # so that --repeat finds it from anywhere
    scales = [line["guidance"]] if "guidance" in line else list(options.guidances) or [options.guidance]
    seeds = [line["seed"]] if "seed" in line else line.get("seeds") or options.seeds or [options.seed or 0]
    prompt = line["prompt"].replace(SUBJECT, options.subject_name)
    begun, adapters = recorded or defaults, ()
    if texts := line.get("adapter", options.adapter):
        adapters = adapters_of(texts)
        begun = recorded or adapted_defaults(defaults, {adapter.path: adapter.scale for adapter in adapters})
    for scale in scales:
        guidance = None if scale is None else guidance_scale(scale, options.guidance_convention)
        settings = resolve_settings(begun, trained=defaults, **values | {"guidance": guidance})
        conditioning = conditioning_files(line, options, settings.num_frames)
        yield [
            VideoSpec(prompt=prompt, seed=seed, settings=settings, conditioning=conditioning, adapters=adapters)
            for seed in seeds
        ]


def adapters_of(texts: Sequence[str]) -> tuple[ScaledAdapter, ...]:
    """Parse adapters of the form PATH:SCALE.

    Raises:
        UserError: for a scale that is no number, a path that is not an adapter, or an adapter named twice.
    """
    scales = parse_adapters(texts)
    for path in scales:
        check_path("adapter", split_expert(path)[1])
    return scaled_adapters(scales)


def load_media(specs: Iterable[VideoSpec]) -> dict[ConditioningFile, ConditioningItem]:
    """Load the conditioning media of the videos, each file once."""
    return {file: load_file(file) for file in dict.fromkeys(file for spec in specs for file in spec.conditioning)}


def _check_subject(prompts: list[str], subject: str) -> None:
    has_place = any(SUBJECT in prompt for prompt in prompts)
    refuse(has_place and not subject, f"a prompt contains {SUBJECT}; say what it is with --subject_name")
    refuse(
        subject and not has_place,
        f"--subject_name={subject} has no place: write {SUBJECT} where a prompt should name it",
    )


# --------------------------------------------------------------------------------------------------- prompt files


_SETTINGS = settings_of(SamplingSettings)
_KEYS = (*_SETTINGS, "seed", "seeds", "adapter", *OPTIONS)
"""Keys of a line of a .jsonl prompt file in addition to its prompt; each means the option of that name."""


_FLAG = re.compile(r"\s(--(?:w|h|f|d|s|g|l|n|i|fs|ar|v|no)\s+\S+|@@\S+)")
"""Settings in lines of kohya's scripts, musubi and Midjourney, and CogVideo's file of a first frame."""
_NO_FLAG = (
    "no setting here, and would be read as words of the prompt; settings of single prompts are keys of a .jsonl file, "
    'such as {"prompt": "a red seven", "width": 832, "seed": 3}'
)


def prompt_lines(path: str) -> list[dict[str, Any]]:
    """The lines of a prompt file, as objects that have a "prompt"."""
    if not path:
        return []
    try:
        text = decoded(read_limited(path))
    except (UserError, ValueError) as error:
        raise UserError(f"{path}: the prompts cannot be read: {error}") from error
    lines = re.split("\r\n|\r|\n", text)  # and at no other separator of lines, which prompts may contain
    numbered = [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]
    match Path(path).suffix.lower():
        case ".jsonl":
            return [
                _described(f"{path}, line {number}", parse_json(line, f"{path}, line {number}", is_by_hand=True))
                for number, line in numbered
            ]
        case ".json":
            return _listed(path, parse_json(text, path, is_by_hand=True))
        case ".yaml" | ".yml":
            check_yaml(text, path)
            return _listed(path, parse_yaml(text, path))
        case ".txt" | "":
            for number, line in numbered:
                found = _FLAG.search(line)
                refuse(found, f"{path}, line {number}: {found and found[1]!r} is {_NO_FLAG}")
            return [{"prompt": line} for _, line in numbered if not line.startswith(COMMENT)]
    raise UserError(f"{path}: give prompts in a file that ends in .txt (one a line), .jsonl, .json or .yaml (a list)")


def prompts_alone(path: str) -> list[str]:
    """The prompts of a file whose lines have no settings.

    Raises:
        UserError: for lines that have some, and as `prompt_lines`.
    """
    lines = prompt_lines(path)
    refuse(
        any(len(line) > 1 for line in lines),
        f"{path} has settings of single prompts, and all samples share theirs: leave them out",
    )
    return [line["prompt"] for line in lines]


COMMENT = "#"
"""Beginning of a comment line in a text file of prompts."""


def _listed(path: str, values: Any) -> list[dict[str, Any]]:
    """Prompts of a list of texts, or of objects as a line of a .jsonl file holds one."""
    if not isinstance(values, list):
        raise UserError(f'{path} must be a list, such as ["a red seven", {{"prompt": "a blue two", "seed": 3}}]')
    numbered = [(f"{path}, number {number}", value) for number, value in enumerate(values, start=1)]
    return [{"prompt": value} if isinstance(value, str) else _described(place, value) for place, value in numbered]


def _described(location: str, line: Any) -> dict[str, Any]:
    if not isinstance(line, dict) or not isinstance(line.get("prompt"), str):
        raise UserError(f'{location} must be an object with a "prompt", such as {{"prompt": "a red seven", "seed": 3}}')
    prompt = line.pop("prompt")
    line = under_own_names(line, _SETTINGS, where=f"{location}: ")
    line = check_json(line, GenerateOptions, where=f"{location}: ", only=_KEYS)
    refuse("seed" in line and "seeds" in line, f"{location}: give seed or seeds, not both")
    refuse(line.get("seeds") == (), f"{location}: seeds=[] holds no seed")
    return {"prompt": prompt} | {name: value for name, value in line.items() if value is not None}


def load_file(file: ConditioningFile) -> ConditioningItem:
    """Decode a file of a command."""
    return file.load(lambda path: np.ascontiguousarray(read_video(path)[0]))


def conditioning_files(
    line: Mapping[str, Any], options: GenerateOptions, num_frames: int
) -> tuple[ConditioningFile, ...]:
    """Return the conditioning files of a video of `num_frames`, from a line of a prompt file or else from the options.

    Raises:
        UserError: for options that exclude each other, a malformed keyframe, and files that cannot be read.
    """
    named = {name: getattr(options, name) for name in OPTIONS}
    has_own = any(name in line for name in (*MEDIA, "keyframe"))
    values = {**dict.fromkeys(OPTIONS), **line} if has_own else {**named, **line}
    if not any(map(values.get, KINDS)):
        return ()
    return tuple(
        replace(file, sha256=_checksum(file.source), mask_sha256=_checksum(file.mask) if file.mask else "")
        for file in named_media(values, num_frames)
    )


def as_record(files: Sequence[ConditioningFile]) -> list[dict[str, Any]]:
    """Return files in the form of a video's record."""
    rows = ({"path" if name == "source" else name: value for name, value in asdict(file).items()} for file in files)
    return [{name: value for name, value in row.items() if value not in (None, "")} for row in rows]


def recorded_files(recorded: Any) -> list[ConditioningFile]:
    """Return the conditioning files of a record, which are not opened.

    Raises:
        UserError: if the conditioning came from Python and is in no file.
        KeyError, TypeError: if this is no record.
    """
    kinds = ", ".join(values["kind"] for values in recorded if "path" not in values)
    if kinds:
        raise UserError(f"its {kinds} came from Python and is in no file; pass it as an option, such as --image FILE")
    return [
        ConditioningFile(source=values["path"], **{name: values[name] for name in values.keys() - {"path"}})
        for values in recorded
    ]


def check_unchanged(files: Sequence[ConditioningFile]) -> None:
    """Raises UserError if one of the files is not what it was when it was recorded."""
    for file in files:
        for path, known in ((file.source, file.sha256), (file.mask, file.mask_sha256)):
            if path and _checksum(path) != known:
                raise UserError(f"{path}, one of its conditioning files, has changed")


def options_of(files: Sequence[ConditioningFile]) -> dict[str, Any]:
    """Return the options that name these conditioning files."""
    found: dict[str, Any] = {}
    names = {kind: name for name, kind in MEDIA.items()} | {"inpaint": "video"}
    for file in files:
        kind = file.kind or ("prefix" if file.strength is None else VIDEO_TO_VIDEO)
        if kind == "keyframe":
            found["keyframe"] = (*found.get("keyframe", ()), f"{file.frame}:{file.source}")
            continue
        found[names[kind]] = file.source
        settings = {"strength": file.strength, "keep_frames": file.keep_frames, "mask": file.mask or None}
        found |= {name: value for name, value in settings.items() if value is not None}
    return found


def _checksum(path: str) -> str:
    return sha256_of(path, MAX_MEDIA_BYTES)
