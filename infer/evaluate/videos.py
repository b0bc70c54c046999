"""Sets of videos to evaluate: folders of files, and data sets of `megadit prepare`.

A set is read in chunks. The key of a chunk is the hash of its content; features are cached under it.

Shapes: N videos, T/H/W frames, height, width, C colour channels. Pixels are uint8, RGB, 0..255.
"""

import hashlib
import io
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import av
import numpy as np
import safetensors.torch
import torch
from PIL import Image
from safetensors import SafetensorError

from megadit.infer.decoding.pictures import check_searched
from megadit.infer.decoding.rules import IMAGE_SUFFIXES, VIDEO_SUFFIXES, Rules, UnusableSourceError
from megadit.infer.decoding.sampling import read_all
from megadit.infer.generate.options import refuse
from megadit.infer.generate.specs import prompts_alone
from megadit.infer.media.video_io import open_container
from megadit.models.shared.captions import captions_in, texts_of
from megadit.models.shared.documents import check_size, check_tensor_header, parse_json
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json, record_path, sha256_of
from megadit.models.shared.outside import files_under, leads_out
from megadit.models.shared.tar_files import MAX_MEMBER_BYTES, UntrustedTarFile
from megadit.models.tokenizers import VideoTokenizer, load_tokenizer

VIDEOS_PER_CHUNK = 16
"""Videos of a chunk, which are generated, read and evaluated together; a killed command loses at most one chunk."""
MAX_VIDEO_BYTES = 1 << 31
MAX_FILE_BYTES = 1 << 34
"""Maximum size of a file in a folder: each is read whole for its checksum."""
MAX_CAPTION_BYTES = 1 << 16
Decode = Callable[[bytes, str], np.ndarray]
"""Frames (THWC) of stored latents, and their place for messages."""


@dataclass(frozen=True, slots=True)
class Clip:
    """A video, its frames per second (0 if unknown), and its prompt or caption ("" if none)."""

    video_THWC: np.ndarray
    fps: float
    prompt: str


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoChunk:
    key: str
    """Hash of its content."""
    names: tuple[str, ...]
    """Names of its videos, for messages."""
    prompts: tuple[str, ...]
    read: Callable[[], Sequence[Clip]]


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoSet:
    label: str
    parts: list[VideoChunk]
    unread: tuple[str, ...] = ()
    """Files of the folder that could not be read as videos, and were left out."""

    @property
    def key(self) -> str:
        return hashed(*(part.key for part in self.parts))[:12]

    @property
    def prompts(self) -> list[str]:
        return [prompt for part in self.parts for prompt in part.prompts]

    @property
    def count(self) -> int:
        return sum(len(part.names) for part in self.parts)


def hashed(*texts: str) -> str:
    """A checksum of a sequence of texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def open_videos(path: Path, most: int | None = None, split: str | None = None) -> VideoSet:
    """The videos of a folder, or of a split of a data set (val, or train if that is empty), at most `most`. Raises
    UserError if there are none."""
    if not path.is_dir():
        raise UserError(f"{path} is not a folder of videos, nor a data set of `megadit prepare`")
    unread: list[str] = []
    is_dataset = (path / "megadit.json").is_file()
    parts = _of_dataset(path, most, split) if is_dataset else _of_folder(path, most, unread)
    if not parts:
        known = ", ".join((*VIDEO_SUFFIXES, *IMAGE_SUFFIXES))
        if unread:
            raise UserError(
                f"{path} holds no video that can be read, only {', '.join(unread[:3])}; give another folder"
            )
        raise UserError(f"{path} holds no videos: files that end in {known}, or the shards of a data set")
    return VideoSet(label=path.resolve().name, parts=parts, unread=tuple(unread))


def prompts_of(path: str, real: VideoSet | None, source: Path | None, count: int | None) -> list[str]:
    """Prompts for `count` videos of a model: from the file `path`, or the captions of the real videos. Raises UserError
    for a file without prompts, or with settings, and for real videos without captions."""
    prompts = prompts_alone(path)
    if not path:
        prompts = real.prompts
        refuse(not all(prompts), f"{source} has videos without captions: give --prompts FILE")
    refuse(not prompts, f"{path} holds no prompt")
    return [prompts[number % len(prompts)] for number in range(count or len(prompts))]


def videos_in_memory(label: str, video_NTHWC: np.ndarray, prompts: Sequence[str], fps: float) -> VideoSet:
    """Videos in memory, uint8 NTHWC, as a set."""
    clips = [Clip(video, fps, prompt) for video, prompt in zip(video_NTHWC, prompts, strict=True)]
    parts = []
    for first in range(0, len(clips), VIDEOS_PER_CHUNK):
        chosen = slice(first, first + VIDEOS_PER_CHUNK)
        pixels = np.ascontiguousarray(video_NTHWC[chosen])
        parts.append(
            VideoChunk(
                key=hashed(hashlib.sha256(pixels).hexdigest(), str(pixels.shape), *prompts[chosen]),
                names=tuple(f"video {number} of {label}" for number in range(len(clips))[chosen]),
                prompts=tuple(prompts[chosen]),
                read=lambda chosen=chosen: clips[chosen],
            )
        )
    return VideoSet(label=label, parts=parts)


# ---------------------------------------------------------------------------------------------------------- folders


def _of_folder(folder: Path, most: int | None, unread: list[str]) -> list[VideoChunk]:
    """Chunks of the files that can be opened; the names of the others are added to `unread`."""
    suffixes = (*VIDEO_SUFFIXES, *IMAGE_SUFFIXES)
    files: list[Path] = []
    for path in (path for path in files_under(folder) if path.suffix.lower() in suffixes):
        if len(files) == most:
            break
        if _opens(path):
            files.append(path)
        else:
            unread.append(str(path.relative_to(folder)))
    return [
        _chunk_of_files(folder, files[first : first + VIDEOS_PER_CHUNK])
        for first in range(0, len(files), VIDEOS_PER_CHUNK)
    ]


def _opens(path: Path) -> bool:
    """Whether a file begins like a video or an image; the rest may still be damaged."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return False
        if path.suffix.lower() in IMAGE_SUFFIXES:  # and so a GIF
            with path.open("rb") as file:
                check_searched(file)
            with Image.open(path):
                return True
        with open_container(str(path)) as container:
            return bool(container.streams.video)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, av.FFmpegError):
        return False


def _chunk_of_files(folder: Path, files: Sequence[Path]) -> VideoChunk:
    captions = [_caption(file, folder) for file in files]
    return VideoChunk(
        key=hashed(*(sha256_of(file) for file in files), *captions),
        names=tuple(str(file.relative_to(folder)) for file in files),
        prompts=tuple(captions),
        read=lambda: [Clip(*read_file(file), caption) for file, caption in zip(files, captions, strict=True)],
    )


def _caption(video: Path, folder: Path) -> str:
    """Read the caption file of a video: NAME.mp4.json (by `megadit generate`), NAME.json or NAME.txt."""
    for file in (record_path(video), video.with_suffix(".json"), video.with_suffix(".txt")):
        if not file.is_file() or leads_out(file, folder):
            continue
        if file.suffix == ".json":
            values = read_json(file, max_bytes=MAX_CAPTION_BYTES, is_finite=False)
            captions = (isinstance(values, dict) and captions_in(values)) or ()
        else:
            with open(file, "rb") as opened:
                content = opened.read(MAX_CAPTION_BYTES)
            try:
                captions = texts_of(content)
            except ValueError as error:
                raise UserError(f"{file} cannot be read: {error}") from None
        if captions:
            return captions[0]
    return ""


def read_file(path: Path) -> tuple[np.ndarray, float]:
    """Frames (THWC) and frames per second of an untrusted file. Raises UserError if it cannot be decoded, or exceeds
    the limits."""
    try:
        with path.open("rb") as file:
            return _frames(file, str(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}") from None


def decoded(content: bytes, where: str) -> tuple[np.ndarray, float]:
    """Frames (THWC) and frames per second (0 for a picture) of an untrusted video or picture. Raises UserError as
    `read_file`."""
    return _frames(io.BytesIO(content), where)


def _frames(file: BinaryIO, where: str) -> tuple[np.ndarray, float]:
    def check(num_frames: int, height: int, width: int, seconds: float) -> None:
        check_size(3 * num_frames * height * width, f"{where}, decoded,", MAX_VIDEO_BYTES)

    try:
        return read_all(file, Rules(), check)
    except UnusableSourceError as error:
        raise UserError(f"cannot read {where}: {error}") from None


# --------------------------------------------------------------------------------------------------------- data sets


def _of_dataset(root: Path, most: int | None, split: str | None) -> list[VideoChunk]:
    """Samples of more than one frame, or pictures if there are no others; stored latents are decoded by the data set's
    tokenizer."""
    splits = [split] if split else ["val", "train"]
    found = [path for path in files_under(root) if path.parent == root]  # no pipes, no links that lead out
    by_split = {name: [path for path in found if path.match(f"{name}-*.tar")] for name in splits}
    shards = next((shards for shards in by_split.values() if shards), [])
    tokenizer: list[VideoTokenizer] = []  # loaded at the first decoding

    def decode(tensors: bytes, where: str) -> np.ndarray:
        if not tokenizer:
            tokenizer.append(load_tokenizer(root / "tokenizer"))
        return decoded_latents(tensors, tokenizer[0], where)

    return _of_shards(shards, most, decode, fewest_frames=2) or _of_shards(shards, most, decode, fewest_frames=1)


def _of_shards(shards: Sequence[Path], most: int | None, decode: Decode, *, fewest_frames: int) -> list[VideoChunk]:
    """Samples of shards with `fewest_frames` or more."""
    parts, left = [], most
    for shard in shards:
        if left == 0:
            break
        captions = {
            key: str(about.get("caption") or "")
            for key, about in _descriptions(shard)
            if about.get("num_frames", 0) >= fewest_frames
        }
        names = list(captions)[:left]
        left = None if left is None else left - len(names)
        checksum = sha256_of(shard)
        for first in range(0, len(names), VIDEOS_PER_CHUNK):
            chosen = tuple(names[first : first + VIDEOS_PER_CHUNK])
            parts.append(
                VideoChunk(
                    key=hashed(checksum, *chosen),
                    names=chosen,
                    prompts=tuple(captions[name] for name in chosen),
                    read=partial(_read, shard, chosen, decode),
                )
            )
    return parts


def _descriptions(shard: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, suffix, content in _members(shard, lambda name, suffix: suffix == "json"):
        yield key, _description(content, f"{key}.{suffix} of {shard}")


def _description(content: bytes, where: str) -> dict[str, Any]:
    about = parse_json(content, where, max_bytes=MAX_CAPTION_BYTES)
    is_one = isinstance(about, dict) and isinstance(about.get("num_frames", 0), int)
    if not is_one or not isinstance(about.get("fps") or 0, int | float):
        raise UserError(f"{where} does not describe a sample")
    return about


def _read(shard: Path, names: Sequence[str], decode: Decode) -> list[Clip]:
    found: dict[str, dict[str, bytes]] = {name: {} for name in names}
    for key, suffix, content in _members(shard, lambda name, suffix: name in found):
        found[key][suffix] = content
    return [_clip(f"{name} of {shard}", members, decode) for name, members in found.items()]


def _clip(where: str, members: dict[str, bytes], decode: Decode) -> Clip:
    about = _description(members["json"], where)
    prompt, fps = str(about.get("caption") or ""), about.get("fps") or 0
    if content := members.get("mp4") or members.get("png"):
        return Clip(decoded(content, where)[0], float(fps), prompt)
    if "safetensors" not in members:
        raise UserError(f"{where} holds neither a video nor latents")
    return Clip(decode(members["safetensors"], where), float(fps), prompt)


@torch.inference_mode()
def decoded_latents(content: bytes, tokenizer: VideoTokenizer, where: str) -> np.ndarray:
    """Frames (THWC) of the latents in an untrusted safetensors file. Raises UserError if it holds no latents of this
    tokenizer, or exceeds the limits."""
    check_tensor_header(content[:8], where)
    try:
        latent = safetensors.torch.load(content)["latent"]
    except (SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"{where} holds no latents: {error}") from None
    if latent.ndim != 4 or len(latent) != tokenizer.latent_channels or not latent.is_floating_point():
        found = f"{latent.dtype} {list(latent.shape)}"
        raise UserError(f"{where} has latents {found}, not of {tokenizer.latent_channels} channels, times and places")
    compression = tokenizer.temporal_compression * tokenizer.spatial_compression**2
    check_size(3 * latent[0].numel() * compression, f"{where}, decoded,", MAX_VIDEO_BYTES)
    video_CTHW = tokenizer.decode(latent[None].float())[0].clamp(-1, 1)
    return ((video_CTHW + 1) * 127.5).round().byte().permute(1, 2, 3, 0).cpu().numpy()


def _members(shard: Path, wants: Callable[[str, str], bool]) -> Iterator[tuple[str, str, bytes]]:
    """(sample, suffix, content) of the members that `wants` selects."""
    try:
        with UntrustedTarFile.open(shard, "r:") as tar:
            for member in tar:
                key, _, suffix = member.name.partition(".")
                if member.isfile() and wants(key, suffix):
                    check_size(member.size, f"{member.name} of {shard}", MAX_MEMBER_BYTES)
                    yield key, suffix, tar.extractfile(member).read()
    except tarfile.TarError as error:
        raise UserError(f"{shard} cannot be read: {error}") from None
