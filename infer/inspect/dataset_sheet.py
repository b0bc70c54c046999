"""`megadit info DATASET --sheet FILE`: a contact sheet of a few samples of a dataset, decoded, with facts.

Frames are uint8 THWC, RGB, 0..255.
"""

import tarfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import safetensors.torch
from PIL import Image

from megadit.infer.evaluate.videos import decoded, decoded_latents
from megadit.infer.media.contact_sheet import contact_sheet, grid_columns
from megadit.models.shared.documents import check_size, parse_json
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path
from megadit.models.shared.tar_files import MAX_MEMBER_BYTES, UntrustedTarFile
from megadit.models.tokenizers import VideoTokenizer, load_tokenizer

FRAMES_OF_A_STRIP = 6
THUMBNAIL_HEIGHT = 128
GAP = 6
MAX_WIDTH = 1600


def write_sheet(dataset: Path, path: Path, *, num_samples: int = 12) -> None:
    """Draws samples from the beginning, middle and end of the dataset. Raises UserError if nothing in it can be
    decoded, or `path` is not the name of a picture."""
    if path.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise UserError(f"--sheet {path}: use a name that ends in .png, .jpg or .webp")
    tokenizer = load_tokenizer(dataset / "tokenizer")
    drawn = [draw_strip(key, members, tokenizer) for key, members in sample_members(dataset, num_samples)]
    if not drawn:
        raise UserError(f"{dataset} holds no samples to draw")
    strips, labels = zip(*drawn, strict=True)
    widest = max(strip.shape[2] for strip in strips)
    num_columns = min(grid_columns(len(strips)), max(1, MAX_WIDTH // widest))
    (sheet,) = contact_sheet(strips, labels, num_columns)
    with atomic_path(path) as temporary:
        Image.fromarray(sheet).save(temporary)


def sample_members(dataset: Path, count: int) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Keys and files of up to `count` samples: the first ones of shards that are spread over all of them."""
    shards = sorted(dataset.glob("[!.]*.tar"))
    chosen = shards[:: max(1, len(shards) // count)][:count]
    return islice((sample for shard in chosen for sample in islice(_members(shard), -(-count // len(chosen)))), count)


def _members(shard: Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    key, members = None, {}
    try:
        with UntrustedTarFile.open(shard, "r:") as tar:
            for member in tar:
                name, _, suffix = member.name.rpartition(".")
                if key not in (None, name):
                    yield key, members
                    members = {}
                key = name
                if member.isfile():
                    check_size(member.size, f"{member.name} of {shard}", MAX_MEMBER_BYTES)
                    members[suffix] = tar.extractfile(member).read()
    except tarfile.TarError as error:
        raise UserError(f"{shard} cannot be read: {error}") from None
    if key is not None:
        yield key, members


def draw_strip(key: str, members: dict[str, bytes], tokenizer: VideoTokenizer) -> tuple[np.ndarray, str]:
    """A few frames of a sample side by side, [1, H, W, 3], and its caption and facts."""
    caption, fps = "(no caption)", 0.0
    try:
        description = parse_json(members["json"], "its description")
        caption, fps = str(description.get("caption") or "(no caption)"), float(description.get("fps") or 0)
        frames_THWC, stored = _decoded(members, tokenizer)
        facts = f"{_in_words(frames_THWC, fps)}; {stored}"
    except Exception as error:  # decoders raise any exception
        frames_THWC, facts = np.zeros((1, 64, 64, 3), np.uint8), f"cannot be decoded: {error}"
    count, height, width = frames_THWC.shape[:3]
    places = np.linspace(0, count - 1, min(FRAMES_OF_A_STRIP, count)).round().astype(int)
    size = min(MAX_WIDTH, max(1, round(width * THUMBNAIL_HEIGHT / height))), THUMBNAIL_HEIGHT
    thumbnails = [np.asarray(Image.fromarray(frames_THWC[place]).resize(size)) for place in places]
    strip = np.concatenate([np.pad(each, ((0, 0), (0, GAP), (0, 0)), constant_values=255) for each in thumbnails], 1)
    return strip[None, :, :-GAP], f"{caption}\n{key}: {facts}"


def _in_words(frames_THWC: np.ndarray, fps: float) -> str:
    count, height, width = frames_THWC.shape[:3]
    return f"{count} frames of {height}x{width} at {fps:g} fps" if count > 1 else f"an image of {height}x{width}"


def _decoded(members: dict[str, bytes], tokenizer: VideoTokenizer) -> tuple[np.ndarray, str]:
    """Frames, and a description of the stored tensors."""
    for suffix in ("mp4", "png"):
        if suffix in members:
            return decoded(members[suffix], "it")[0], f"stored as {suffix}"
    frames_THWC = decoded_latents(members["safetensors"], tokenizer, "it")
    tensors = safetensors.torch.load(members["safetensors"])
    shapes = ", ".join(f"{name} {'x'.join(map(str, tensor.shape))}" for name, tensor in sorted(tensors.items()))
    return frames_THWC, shapes
