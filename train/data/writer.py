"""Writes data sets of latents and text features as WebDataset shards for Energon.

On disk: `train-000000.tar`, ... with two members per sample, `<key>.json` (caption and sizes) and `<key>.safetensors`
(`latent` [C, T, H, W]; `text` [L, E] unless the caption is empty; optionally the `reference` clip of an edit, and
`frames` encoded as images); `megadit.json` (`DatasetInfo`); `tokenizer/` and `text_encoder/`, which bundles need; and
Energon's `.nv-meta/`.

Shapes: C latent channels, T/H/W latent frames, height, width, L text tokens, E text feature width.
"""

import contextlib
import io
import json
import logging
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import yaml
from torch import Tensor

from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_directory, atomic_path
from megadit.models.shared.folder_lock import FolderLock
from megadit.models.shared.shards import describe_shards
from megadit.models.text_encoders.base import TextEncoder
from megadit.models.tokenizers.base import VideoTokenizer
from megadit.train.data.packs.training_sample import Frames
from megadit.train.dataset.dataset_info import INFO_FILE, DatasetInfo
from megadit.train.dataset.energon_files import CRUDE, DEFINITIONS, FOLDER

LATENT_DTYPES = (torch.float16, torch.float32)
_LONGEST_NAME = 100
"""Maximum bytes of a name in a tar file (ustar)."""

logger = logging.getLogger(__name__)


class DatasetWriter:
    """Writes one data set; the folder gets its name only when it is complete.

        with DatasetWriter(root, tokenizer=tokenizer, text_encoder=text_encoder) as writer:
            writer.add("train", "clip-000017", latent_CTHW=..., text_LE=..., caption="a red seven", fps=8, ...)

    Readers shuffle slices of shards, not single samples: `add` samples in random order.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        tokenizer: VideoTokenizer,
        text_encoder: TextEncoder,
        shard_size: int = 1000,
        splits: Sequence[str] = ("train", "val"),
    ) -> None:
        self.root = Path(root)
        self.tokenizer = tokenizer
        self.text_encoder = text_encoder
        self.shard_size = shard_size
        self.splits = tuple(splits)
        self._counts: Counter[str] = Counter()
        self._keys: set[str] = set()
        self._shards: dict[str, tarfile.TarFile] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "DatasetWriter":
        self._folder = self._stack.enter_context(atomic_directory(self.root))
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        with self._stack:  # renames the folder; removes it after an error of the caller or of `_finish`
            for shard in self._shards.values():
                shard.close()
            if error is not None:
                raise error
            self._finish()

    def add(
        self,
        split: str,
        key: str,
        *,
        latent_CTHW: Tensor,
        text_LE: Tensor,
        caption: str,
        num_frames: int,
        height: int,
        width: int,
        fps: float,
        aesthetic_score: float | None = None,
        is_prior: bool = False,
        reference_CTHW: Tensor | None = None,
        image_text_LE: Tensor | None = None,
        frames: Frames | None = None,
    ) -> None:
        """Append one sample.

        `key`: permanent name, from which training draws the sample's noise. `num_frames`, `height`, `width`: size of
        the decoded video in pixels. `fps`: frames per second, 0 for images. Latents keep their dtype (float16 or
        float32); text features become float16 if the latents are. `reference_CTHW`: source clip of an edit, whose
        instruction is the caption. `image_text_LE`: features of another caption, used when conditioning frames already
        show what the first one describes. `frames`: some frames, encoded as images.

        Raises:
            UserError: for a key used twice, or tensors that do not fit the tokenizer and the text encoder.
        """
        text_LE = text_LE.to(latent_CTHW.dtype)
        self._check(split, key, latent_CTHW, text_LE)
        tensors = {"latent": latent_CTHW}
        if reference_CTHW is not None:
            tensors["reference"] = reference_CTHW.to(latent_CTHW.dtype)
        if frames is not None:
            tensors["frames"] = frames.latents_CTHW.to(latent_CTHW.dtype)
        for name in tensors.keys() - {"latent"}:
            self._check(split, key, tensors[name], text_LE)
        if image_text_LE is not None:
            tensors["image_text"] = image_text_LE.to(latent_CTHW.dtype)
            self._check(split, key, latent_CTHW, tensors["image_text"])
        if len(text_LE):
            tensors["text"] = text_LE
        description = {
            "caption": caption,
            "num_frames": num_frames,
            "height": height,
            "width": width,
            "fps": fps,
        }
        if aesthetic_score is not None:
            description["aesthetic_score"] = aesthetic_score
        if is_prior:
            description["prior"] = True
        if frames is not None:
            description["frame_times"] = list(frames.times)
        shard = self._shard(split)
        for name, content in sample_members(key, description, tensors):
            _add_member(shard, name, content)
        self._keys.add(key)
        self._counts[split] += 1

    def _check(self, split: str, key: str, latent_CTHW: Tensor, text_LE: Tensor) -> None:
        if split not in self.splits:
            raise UserError(f"unknown split {split!r}; this data set has {', '.join(self.splits)}")
        if not key or "." in key or "__" in key:
            raise UserError(f"sample key {key!r} must not be empty nor contain '.' or '__'")
        if len(f"{key}.safetensors".encode()) > _LONGEST_NAME:
            raise UserError(f"sample key {key!r} is too long for the name of a file in a tar file")
        if key in self._keys:
            raise UserError(f"sample key {key!r} is used twice; keys must be unique over all splits")
        channels, text_width = self.tokenizer.latent_channels, self.text_encoder.dim
        if latent_CTHW.ndim != 4 or latent_CTHW.shape[0] != channels or latent_CTHW.dtype not in LATENT_DTYPES:
            raise UserError(
                f"the latent of {key} is {latent_CTHW.dtype} {tuple(latent_CTHW.shape)}; "
                f"expected float16 or float32 [{channels}, T, H, W]"
            )
        if text_LE.ndim != 2 or text_LE.shape[1] != text_width:
            raise UserError(f"the text of {key} has shape {tuple(text_LE.shape)}; expected [L, {text_width}]")
        if not (torch.isfinite(latent_CTHW).all() and torch.isfinite(text_LE).all()):
            raise UserError(f"the latent or the text of {key} holds NaN or infinite values as {latent_CTHW.dtype}")

    def _shard(self, split: str) -> tarfile.TarFile:
        index, position = divmod(self._counts[split], self.shard_size)
        if position == 0:
            if split in self._shards:
                self._shards[split].close()
            self._shards[split] = tarfile.open(
                self._folder / f"{split}-{index:06d}.tar", "w", format=tarfile.USTAR_FORMAT
            )
        return self._shards[split]

    def _finish(self) -> None:
        if not self._counts[self.splits[0]]:
            raise UserError(f"{self.root}: no sample was written to the split {self.splits[0]!r}")
        write_encoders(self._folder, self.tokenizer, self.text_encoder)
        num_samples = {split: self._counts[split] for split in self.splits}
        describe_dataset(self._folder, self.tokenizer, self.text_encoder, num_samples)
        logger.info("%s: %s", self.root, ", ".join(f"{n} {split}" for split, n in self._counts.items()))


def write_encoders(folder: Path, tokenizer: VideoTokenizer, text_encoder: TextEncoder) -> None:
    """Write the encoders into the folder of the data set."""
    tokenizer.save(folder / "tokenizer")
    text_encoder.save(folder / "text_encoder")


def describe_dataset(
    folder: Path, tokenizer: VideoTokenizer, text_encoder: TextEncoder, num_samples: dict[str, int]
) -> None:
    """Complete a folder of shards to a data set: write Energon's metadata, checksums, and megadit.json last."""
    prepare_for_energon(folder, [split for split, count in num_samples.items() if count])
    describe_shards(folder)
    DatasetInfo(
        root=folder,
        tokenizer_fingerprint=tokenizer.fingerprint(),
        text_encoder_fingerprint=text_encoder.fingerprint(),
        sigma_data=tokenizer.sigma_data,
        latent_channels=tokenizer.latent_channels,
        text_width=text_encoder.dim,
        num_samples=num_samples,
    ).write()


def sample_members(key: str, description: dict[str, Any], tensors: dict[str, Tensor]) -> list[tuple[str, bytes]]:
    """(name, content) of the members of one sample."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return [json_member(key, description), (f"{key}.safetensors", safetensors.torch.save(contiguous))]


def json_member(key: str, description: dict[str, Any]) -> tuple[str, bytes]:
    """(name, content) of the description of one sample."""
    return f"{key}.json", json.dumps(description, ensure_ascii=False).encode()


def write_members(path: Path, members: Iterable[tuple[str, bytes | Path]]) -> None:
    """Write a tar file of (name, content or the path of a file with it), atomically."""
    with atomic_path(path) as temporary, tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as shard:
        for name, content in members:
            _add_member(shard, name, content)


def prepare_for_energon(folder: Path, splits: Sequence[str]) -> None:
    """Index the shards and write `.nv-meta/`, as `energon prepare` does, without prompts."""
    from megatron.energon.flavors.webdataset import BaseWebdatasetFactory  # takes a second to import

    shutil.rmtree(folder / FOLDER, ignore_errors=True)  # an incomplete index, if a process was killed here
    shards = sorted(path.name for path in folder.glob("[!.]*.tar") if _has_members(path))
    chatter = io.StringIO()
    with contextlib.redirect_stdout(chatter):
        BaseWebdatasetFactory.prepare_dataset(
            folder,
            shards,
            split_parts_patterns=[(split, f"{split}-[0-9]+[.]tar") for split in splits],
            workers=min(16, 1 + len(shards) // 32),  # starting a process takes longer than indexing a shard
        )
    logger.debug(chatter.getvalue())
    split_file = folder / FOLDER / "split.yaml"
    split_config = yaml.safe_load(split_file.read_text(encoding="utf-8"))
    parts = split_config["split_parts"]
    # Energon's lint fails without a named split, and skips one without shards
    split_config["split_parts"] = {
        name: parts.get(name, []) for name in dict.fromkeys([*parts, "train", "val", "test"])
    }
    split_file.write_text(yaml.safe_dump(split_config, sort_keys=False), encoding="utf-8")
    for name, definition in DEFINITIONS.items():
        (folder / FOLDER / name).write_text(definition, encoding="utf-8")


def _has_members(shard: Path) -> bool:
    """Whether a shard has members; prints a warning if not, because Energon would refuse the whole data set."""
    try:
        with tarfile.open(shard) as tar:
            if tar.next() is not None:
                return True
    except tarfile.ReadError:
        pass
    logger.warning("left out %s: it holds no samples", shard.name)
    return False


def _add_member(shard: tarfile.TarFile, name: str, content: bytes | Path) -> None:
    member = tarfile.TarInfo(name)  # without time, owner and mode: equal data give equal files
    with open(content, "rb") if isinstance(content, Path) else io.BytesIO(content) as file:
        member.size = file.seek(0, io.SEEK_END)
        file.seek(0)
        shard.addfile(member, file)


def is_prepared(folder: Path) -> bool:
    """Whether a folder holds a finished data set."""
    return (folder / INFO_FILE).is_file() and (folder / FOLDER / CRUDE).is_file()


def lock_of(out: Path, part: str = "") -> FolderLock:
    """Lock of a data set, or of a `part` of the work, next to the folder (which `--overwrite` removes)."""
    place = out if out.name else out.resolve()  # "." has none
    return FolderLock(out, "prepares", path=place.with_name(f".{place.name}{part}.lock"))


def is_done(out: Path, *, overwrite: bool = False) -> bool:
    """Whether a finished data set exists at `out` and is to be left unchanged, which is then printed.

    Raises:
        UserError: if `out` holds something else.
    """
    is_data_set = is_prepared(out)
    if is_data_set and not overwrite:
        print(f"{out} is already prepared; nothing to do (--overwrite replaces it)")
        return True
    if out.exists() and not is_data_set and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not a prepared data set; give another folder, or remove it")
    return False
