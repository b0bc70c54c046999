"""Descriptions of a user's files: a video or an image, and the samples in the shards of a data set."""

import tarfile
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

from megadit.infer.decoding.rules import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from megadit.infer.generate.outputs import read_record
from megadit.infer.media.animations import ANIMATION_SUFFIXES
from megadit.infer.media.video_io import open_container, read_video
from megadit.models.configs.named import NAMED_CONFIGS
from megadit.models.flops import forward_flops
from megadit.models.packing.segments import Segment
from megadit.models.shared.documents import MAX_BYTES, parse_json
from megadit.models.shared.errors import UserError
from megadit.models.shared.tar_files import UntrustedTarFile, latent_shapes

MEDIA_SUFFIXES = (*VIDEO_SUFFIXES, *IMAGE_SUFFIXES)
MOST_PROBED = 500
"""Most samples of a data set to read."""
MOST_SIZES = 6
EXAMPLES = 3
EXAMPLE_MODEL = "cosmos_7b"
"""Network whose work is counted."""
HIGH = 1.15
"""Imbalance from which on a remedy is named."""


def describe_media(path: Path) -> dict[str, Any]:
    """Size and length of a video or an image, and its generation settings if it holds them. Raises UserError if it
    cannot be decoded."""
    frames, fps = read_video(path)
    count, height, width = frames.shape[:3]
    kind = "image" if count == 1 else "video"
    facts: dict[str, Any] = {kind: str(path), "size": f"{height}x{width} (height x width)"}
    if kind == "video":
        seconds = round(count / fps, 2) if fps else None
        facts |= {"frames": count, "frames per second": round(fps, 3), "seconds": seconds, "codec": _codec(path)}
    try:
        record = read_record(str(path))
    except UserError:
        return facts | {"settings": "none inside: `megadit generate` did not make it"}
    return facts | {f"made with {name}": value for name, value in record.items() if value not in (None, "", [], {})}


def _codec(path: Path) -> str | None:
    if path.suffix.lower() in ANIMATION_SUFFIXES:
        return None
    with open_container(str(path)) as container:
        return container.streams.video[0].codec_context.name


def describe_samples(dataset: Path) -> dict[str, str | None]:
    """Sizes, lengths and captions of the first training samples, in words; {} if there are none."""
    found = list(islice(_descriptions(dataset), MOST_PROBED))
    if not found:
        return {}
    sizes = Counter(f"{_shown(one.get('height', '?'))}x{_shown(one.get('width', '?'))}" for one in found)
    lengths = Counter(_length(one) for one in found)
    captions = Counter(str(one.get("caption") or "") for one in found)
    without = captions.pop("", 0)
    shown = "; ".join(_shown(caption, 60) for caption, _ in captions.most_common(EXAMPLES))
    return {
        "looked at": f"{len(found):,} samples of training",
        "sizes": _counted(sizes),
        "lengths": _counted(lengths),
        "longest": _longest(found),
        "max / mean work": _imbalance(dataset),
        "captions": f"{len(captions):,} different ({shown})" + (f", {without:,} without one" if without else ""),
    }


def _longest(found: list[dict[str, Any]]) -> str | None:
    """The largest sample against the mean, which decides how long ranks wait for one another; None for equal sizes."""
    pixels = [prod(_count(one.get(side)) for side in ("num_frames", "height", "width")) for one in found]
    if len(set(pixels)) == 1:
        return None
    ratio = max(pixels) * len(pixels) / sum(pixels)
    return f"{ratio:.1f} times the mean sample"


def _imbalance(dataset: Path) -> str | None:
    """The work of a pack of the longest latents over the mean of packs of as many tokens; None for equal sizes."""
    shards = sorted(dataset.glob("train-*.tar"))
    shapes = islice((shape for shard in shards for shape in latent_shapes(shard)), MOST_PROBED)
    segments = [Segment((frames, -(-height // 2), -(-width // 2)), 1) for frames, height, width in shapes]
    if len({segment.num_tokens for segment in segments}) < 2:
        return None
    tokens = [segment.num_tokens for segment in segments]
    work = [forward_flops(segment, NAMED_CONFIGS[EXAMPLE_MODEL]) for segment in segments]
    ratio = max(w / n for w, n in zip(work, tokens, strict=True)) * sum(tokens) / sum(work)
    remedy = "; data.balance=work deals equal ones to all ranks (`megadit train --dry-run`)" if ratio > HIGH else ""
    return f"up to {ratio:.2f} for packs of equal tokens of {EXAMPLE_MODEL}{remedy}"


def _count(value: Any) -> int:
    """An untrusted number of frames or pixels; 1 for what is none."""
    return value if isinstance(value, int) and 1 <= value < 1 << 20 else 1


def _length(description: dict[str, Any]) -> str:
    frames, fps = description.get("num_frames") or 1, description.get("fps") or 0
    if frames == 1 or not (isinstance(frames, int | float) and isinstance(fps, int | float) and fps):
        return "image" if frames == 1 else f"{_shown(frames)} frames"
    return f"{frames} frames ({frames / fps:.2g} s)"


def _shown(value: Any, most: int = 20) -> str:
    """The beginning of an untrusted value, without control characters."""
    return "".join(each if each.isprintable() else " " for each in str(value)[:most])


def _counted(values: Counter[str]) -> str:
    """Counts in words: `64x64: 480, 64x96: 20`; a single value without its count."""
    if len(values) == 1:
        return next(iter(values))
    listed = [f"{value}: {count:,}" for value, count in values.most_common(MOST_SIZES)]
    return ", ".join([*listed, *(["..."] if len(values) > MOST_SIZES else [])])


def _descriptions(dataset: Path) -> Iterator[dict[str, Any]]:
    """The JSON of samples, which is untrusted."""
    for shard in sorted(dataset.glob("train-*.tar")):
        try:
            with UntrustedTarFile.open(shard, "r:") as tar:
                for member in tar:
                    if member.isfile() and member.name.endswith(".json") and member.size <= MAX_BYTES:
                        yield dict(parse_json(tar.extractfile(member).read(), member.name))
        except (OSError, UserError, ValueError, TypeError, tarfile.TarError):  # errors are reported by other readers
            return
