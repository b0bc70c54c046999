"""Output files of `megadit generate`: videos with all their settings, inside the file and in a .json next to it."""

import json
import mimetypes
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from megadit.infer.conditioning.items import ConditioningFile
from megadit.infer.generate.options import GenerateOptions, check, refuse
from megadit.infer.generate.specs import (
    MEDIA,
    VideoSpec,
    adapters_of,
    as_record,
    check_unchanged,
    options_of,
    recorded_files,
)
from megadit.infer.media.animations import encode_image
from megadit.infer.media.signing import Marker
from megadit.infer.media.video_io import IMAGE_SUFFIXES, VIDEO_SUFFIXES, check_fps, read_comment, stream_mp4
from megadit.infer.pipeline.adapters import ScaledAdapter
from megadit.infer.pipeline.results import GeneratedVideo, origin_of
from megadit.infer.runtimes.options import RuntimeOptions
from megadit.models.bundle import Bundle
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.shared.cli.setting import check_json, settings_of
from megadit.models.shared.documents import parse_json
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import (
    RECORD_SUFFIX,
    atomic_directory,
    atomic_path,
    check_local,
    read_json,
    record_path,
    write_json,
)

LATENTS_SUFFIX = ".safetensors"
_MAX_RECORD_BYTES = 1 << 18
"""Maximum bytes of a record: those of a story of a thousand prompts."""


# ---------------------------------------------------------------------------------------------------------- names


def output_paths(save_path: str, specs: Sequence[VideoSpec], format: str | None = None) -> list[Path]:
    """Return the file of each spec's video: `save_path` itself, or numbered names next to or inside it.

    A name without a suffix is a folder of frames.

    Raises:
        UserError: for a URL, a file type that cannot be written, and a directory that cannot be made or written to.
    """
    check_local(save_path)
    path = Path(save_path)
    is_file = not path.is_dir() and _names_file(path, max(spec.settings.num_frames for spec in specs), format)
    directory = path.parent if is_file else path
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise UserError(f"--video_save_path={save_path}: cannot make the directory {directory}: {error}") from error
    refuse(not os.access(directory, os.W_OK), f"--video_save_path={save_path}: {directory} may not be written to")
    try:  # some directories take no file though they may be written to
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(f"--video_save_path={save_path}: {directory} accepts no file: {error.strerror}") from error
    if is_file and len(specs) == 1:
        paths = [path]
    elif is_file:
        paths = [directory / f"{path.stem}_{i:04d}{path.suffix}" for i in range(len(specs))]
    else:
        paths = [
            directory / f"{i:04d}_{_slug(spec.prompt)}{_scale(spec, specs)}_seed{spec.seed}"
            f"{_suffix(format, spec.settings.num_frames)}"
            for i, spec in enumerate(specs)
        ]
    for path, spec in zip(paths, specs, strict=True):
        if path.suffix.lower() in VIDEO_SUFFIXES and spec.settings.num_frames > 1:
            check_fps(path.suffix.lower(), spec.settings.fps)
    return paths


def _names_file(path: Path, num_frames: int, format: str | None) -> bool:
    """Whether this is the name of a video or image, rather than of a directory."""
    suffix = path.suffix.lower()
    if suffix not in (*VIDEO_SUFFIXES, *IMAGE_SUFFIXES, LATENTS_SUFFIX):
        media_type = mimetypes.guess_type(path.name)[0] or ""
        known = ", ".join((*VIDEO_SUFFIXES, *IMAGE_SUFFIXES, LATENTS_SUFFIX))
        is_other = media_type.startswith(("video/", "image/"))
        refuse(is_other, f"--video_save_path={path}: cannot write {suffix}; use {known}")
        return False
    refuse(format and suffix != f".{format}", f"--video_save_path={path} says {suffix}, --format says {format}")
    is_short = suffix not in IMAGE_SUFFIXES or num_frames == 1
    refuse(
        not is_short,
        f"--video_save_path={path} is an image; use .mp4 for {num_frames} frames, or a directory and --format "
        f"{suffix[1:]} for one file each",
    )
    return True


def _suffix(format: str | None, num_frames: int) -> str:
    if format is None:
        return ".png" if num_frames == 1 else ".mp4"
    is_folder = f".{format}" in IMAGE_SUFFIXES and num_frames > 1
    return "" if is_folder else f".{format}"


def _scale(spec: VideoSpec, specs: Sequence[VideoSpec]) -> str:
    """Return the guidance scale in a file name where one prompt has several scales; "" for a single scale."""
    alike = {other.settings.guidance for other in specs if other.prompt == spec.prompt}
    return f"_guidance{spec.settings.guidance:g}" if len(alike) > 1 else ""


def _slug(prompt: str) -> str:
    """A prompt in a file name: letters, digits and dashes only, so that no prompt leads out of the directory."""
    return re.sub("[^a-z0-9]+", "-", prompt.lower())[:48].strip("-") or "video"


# --------------------------------------------------------------------------------------------------------- writing


def save(
    path: Path,
    result: GeneratedVideo,
    record: Mapping[str, Any],
    format: str | None = None,
    mark: Marker | None = None,
) -> None:
    """Writes a video (or its latents, or a folder of its frames) with its record inside, and next to it as .json.

    `mark` signs videos and frames, not latents.
    """
    comment = json.dumps(record)
    if path.suffix.lower() == LATENTS_SUFFIX:
        with atomic_path(path) as temporary:
            save_file({"latents_CTHW": result.latents_CTHW.contiguous()}, temporary, metadata={"comment": comment})
    elif not path.suffix:
        with atomic_directory(path) as folder:
            for number, frame in enumerate(result.video):
                data = encode_image(frame, f".{format}", comment)
                (folder / f"{number:05d}.{format}").write_bytes(mark(data, f".{format}") if mark else data)
    else:
        result.save(path, record=record, mark=mark)
    write_json(record_path(path), record)


def save_long(
    path: Path,
    parts: Iterable[np.ndarray],
    spec: VideoSpec,
    story: Sequence[str],
    options: GenerateOptions,
    bundle: Bundle,
    mark: Marker | None = None,
) -> None:
    """Writes a video whose frames come in several arrays, with its record inside and next to it."""
    record = {
        **origin_of(
            bundle,
            dtype=options.running.dtype,
            runtime=options.running.name,
            cache_measure=options.running.cache_measure,
        ),
        **_files_of(spec),
        "prompt": story[0],
        "seed": spec.seed,
        **asdict(spec.settings),
        "total_frames": options.total_frames,
        "keep_frames": options.keep_frames,
        "keep_first": options.keep_first,
        "story": list(story),
    }
    comment = {"comment": json.dumps(record), "title": story[0]}
    stream_mp4(path, parts, spec.settings.fps, metadata=comment, mark=mark)
    write_json(record_path(path), record)


def make_record(result: GeneratedVideo, spec: VideoSpec) -> dict[str, Any]:
    """Everything that made a video; `--repeat` reads it."""
    return {**result.record(), **_files_of(spec)}


def _files_of(spec: VideoSpec) -> dict[str, Any]:
    return {"conditioning": as_record(spec.conditioning), "adapters": [asdict(adapter) for adapter in spec.adapters]}


# -------------------------------------------------------------------------------------------------------- repeating


def read_record(path: str) -> dict[str, Any]:
    """The record inside a file that `save` wrote, or in the .json next to it.

    Raises:
        UserError: if there is none.
    """
    file = Path(path).resolve()
    if file.is_dir():
        file = next(iter(sorted(file.glob("00000.*"))), record_path(file))
    if file.suffix.lower() in (RECORD_SUFFIX, LATENTS_SUFFIX):
        record_file = file if file.suffix.lower() == RECORD_SUFFIX else record_path(file)
        record = read_json(record_file, max_bytes=_MAX_RECORD_BYTES)
    else:
        comment = read_comment(file)
        try:
            record = parse_json(comment or "null", "it", max_bytes=_MAX_RECORD_BYTES, is_finite=False)
        except UserError:  # another program's comment
            record = None
    if not isinstance(record, dict) or "megadit_record" not in record:
        raise UserError(f"--repeat={path} has no record of its settings: give a file that this command wrote")
    return record


def repeated(options: GenerateOptions, record: Mapping[str, Any]) -> tuple[GenerateOptions, SamplingSettings]:
    """Return the options with the record's values where none were given, and the record's settings.

    Raises:
        UserError: if the record is incomplete, names files without `options.recorded_files`, or one of its adapters and
            conditioning files has changed.
    """
    where = f"--repeat={options.repeat}: "
    try:
        names = SamplingSettings.__dataclass_fields__.keys() & record.keys()
        settings = SamplingSettings.from_dict({name: record[name] for name in names})
        adapters = [] if options.adapter else [ScaledAdapter(**adapter) for adapter in record.get("adapters", ())]
        has_own = any(getattr(options, name) for name in (*MEDIA, "keyframe"))
        files = [] if has_own else recorded_files(record["conditioning"])
        values = check_json(_values_of(options, record, files, adapters), GenerateOptions, where=f"{where}its ")
    except (KeyError, TypeError) as error:
        raise UserError(f"{where}its record is incomplete ({error})") from error
    _refuse_strangers_paths(options, values, settings)
    check_unchanged(files)
    for adapter, now in zip(adapters, adapters_of(values.get("adapter", ())), strict=True):
        refuse(adapter.sha256 != now.sha256, f"{where}the adapter {adapter.path} has changed since")
    running = {name: values.pop(name) for name in settings_of(RuntimeOptions).keys() & values.keys()}
    options = replace(options, **values, running=replace(options.running, **running))
    check(options)
    return options, settings


def _values_of(
    options: GenerateOptions,
    record: Mapping[str, Any],
    files: Sequence[ConditioningFile],
    adapters: Sequence[ScaledAdapter],
) -> dict[str, Any]:
    """Return the values of the options that a record fills; nothing is opened."""
    values = {} if options.checkpoint_path else {"checkpoint_path": record["checkpoint_path"]}
    if not options.prompt and not options.prompt_file:
        values["prompt"] = (record["prompt"],)
    if options.seed is None and not options.seeds:
        values["seed"] = record["seed"]
    values |= {name: record[name] for name in ("dtype", "runtime") if not getattr(options.running, name)}
    if options.running.cache_measure == RuntimeOptions().cache_measure and "cache_measure" in record:
        values["cache_measure"] = record["cache_measure"]
    if "total_frames" in record and options.total_frames is None:
        values |= _length_of(options, record)
    values |= {name: value for name, value in options_of(files).items() if getattr(options, name) in (None, "", ())}
    return values | ({"adapter": [f"{each.path}:{each.scale!r}" for each in adapters]} if adapters else {})


def _length_of(options: GenerateOptions, record: Mapping[str, Any]) -> dict[str, Any]:
    found = {"total_frames": record["total_frames"], "keep_frames": options.keep_frames or record["keep_frames"]}
    found["keep_first"] = options.keep_first or record.get("keep_first", False)
    if len(record["story"]) > 1 and not options.prompt and not options.prompt_file:
        found |= {"prompt": tuple(record["story"]), "story": True}
    return found


def _refuse_strangers_paths(options: GenerateOptions, values: Mapping[str, Any], settings: SamplingSettings) -> None:
    """Raises UserError for paths that only the record names: a video from somebody else may name any file."""
    about = settings_of(GenerateOptions) | settings_of(RuntimeOptions) | settings_of(SamplingSettings)
    named = {**values} if options.settings.autoguidance else {**values, "autoguidance": settings.autoguidance}
    paths = [
        f"--{name} {path!a}"
        for name, value in named.items()
        if value and "PATH" in (about[name].metavar or "")
        for path in (value if isinstance(value, tuple) else [value])
    ]
    refuse(
        paths and not options.recorded_files,
        f"--repeat={options.repeat} names files of its own to open; if you trust it, add --recorded_files, else give "
        f"your own: {' '.join(paths)}",
    )
