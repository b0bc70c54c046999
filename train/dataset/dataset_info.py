"""Properties of a data set: the contents of its `megadit.json`, alone or as part of a blend."""

import random
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megadit.models.shared.documents import MAX_BYTES, parse_json
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import write_json
from megadit.models.shared.tar_files import UntrustedTarFile, latent_shapes
from megadit.train.dataset.description import (
    MAX_DESCRIPTION_BYTES,
    Description,
    UnreadableSampleError,
    read_description,
)
from megadit.train.dataset.energon_files import CRUDE, FOLDER, check_blend, check_data_set
from megadit.train.dataset.places import is_url, local_copy, place

if TYPE_CHECKING:
    from megatron.energon.epathlib import EPath

FORMAT_VERSION = 1
INFO_FILE = "megadit.json"
REMEDY = "write it with `megadit prepare`"
CAPTIONS_LOOKED_AT = 100
"""Maximum number of captions read per drawn one; many samples may have the same caption."""
SHAPES_LOOKED_AT = 500
"""Maximum number of samples whose shapes are read, from the first shard."""
Store = Literal["latents", "raw"]
STORES_BY_SUFFIX: dict[str, Store] = {"safetensors": "latents", "mp4": "raw", "png": "raw"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetInfo:
    """Properties of a data set and its encoders: the contents of its `megadit.json`."""

    root: "Path | EPath"
    tokenizer_fingerprint: str
    text_encoder_fingerprint: str
    sigma_data: float
    """Standard deviation of all latents."""
    latent_channels: int
    text_width: int
    """Width of the text features."""
    num_samples: dict[str, int]
    """Number of samples of each split."""

    @property
    def store(self) -> Store | None:
        """Whether samples are latents or pixels, by the first training sample; None if unknown."""
        return _store_of(self.root)

    @property
    def latent_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """(T, H, W) of the latents of some training samples, shuffled; empty for pixels and for data sets in a
        store."""
        first = self.root / "train-000000.tar"
        if not isinstance(first, Path) or not first.is_file():
            return ()
        found = list(islice(latent_shapes(first), SHAPES_LOOKED_AT))
        random.Random(0).shuffle(found)
        return tuple(found)

    @property
    def has_keyframes(self) -> bool:
        """Whether the first clips have frames encoded as images, or to be encoded by the reader."""
        clips = (description for description in iter_descriptions(self.root, "train") if description.fps)
        return any(clip.frame_times or clip.keyframes for clip in islice(clips, 20))

    @property
    def tokenizer_folder(self) -> Path:
        return local_copy(self.root / "tokenizer", f"tokenizer-{self.tokenizer_fingerprint}")

    @property
    def text_encoder_folder(self) -> Path:
        return local_copy(self.root / "text_encoder", f"text_encoder-{self.text_encoder_fingerprint}")

    def write(self) -> None:
        values = asdict(self)
        del values["root"]
        write_json(self.root / INFO_FILE, {"format_version": FORMAT_VERSION, **values})

    @classmethod
    def read(cls, path: "str | Path | EPath") -> "DatasetInfo":
        """Read megadit.json from a folder or a store; for a YAML file that blends data sets, merge theirs.

        Raises:
            UserError: if `path` is missing, was not prepared, or was written by a newer version.
        """
        root = place(path)
        if root.name.endswith((".yaml", ".yml")):
            return _read_blend(root)
        if not is_url(path) and not root.is_dir():
            what = "is not a folder" if root.exists() else "does not exist"
            raise UserError(f"data.path={path} {what}; {REMEDY}")
        values = _read_info(root)
        version = values.pop("format_version", None)
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise UserError(
                f"{root / INFO_FILE} has format_version {version}, this megadit reads up to {FORMAT_VERSION}; update it"
            )
        for name, is_valid in _VALUES.items():
            if not is_valid(values.get(name)):
                raise UserError(f"{root / INFO_FILE} is not the description of a data set (its {name}); {REMEDY}")
        return cls(root=root, **{name: values[name] for name in _VALUES})


def _is_fingerprint(value: Any) -> bool:
    """Whether a value is a fingerprint, which is safe in the name of a folder."""
    return isinstance(value, str) and re.fullmatch(r"[\w-]{1,64}", value) is not None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 40


_VALUES: dict[str, Callable[[Any], bool]] = {
    "tokenizer_fingerprint": _is_fingerprint,
    "text_encoder_fingerprint": _is_fingerprint,
    "sigma_data": lambda value: isinstance(value, int | float) and 0 < value < 1e6,
    "latent_channels": _is_count,
    "text_width": _is_count,
    "num_samples": lambda value: isinstance(value, dict) and all(map(_is_count, value.values())),
}
"""Keys of `megadit.json`, each with the check of its value."""


def _store_of(root: "Path | EPath") -> Store | None:
    """Return the kind of the first training sample, latents or pixels; None if that is unclear."""
    first = root / "train-000000.tar"
    if not first.is_file():
        return None
    found: set[Store] = set()
    try:
        with first.open("rb") as file, UntrustedTarFile.open(fileobj=file, mode="r:") as shard:
            name = None
            for member in shard:
                key, _, suffix = member.name.partition(".")
                if name not in (None, key):
                    break
                name = key
                found |= {STORES_BY_SUFFIX[suffix]} if suffix in STORES_BY_SUFFIX else set()
    except (OSError, tarfile.TarError):  # readers of samples report what is broken
        return None
    return found.pop() if len(found) == 1 else None


def _read_info(root: "Path | EPath") -> dict[str, Any]:
    for name in (INFO_FILE, f"{FOLDER}/{CRUDE}"):
        try:
            is_there = (root / name).is_file()
        except Exception as error:  # each store has exceptions of its own
            raise UserError(f"data.path={root} cannot be read: {error}") from None
        if not is_there:
            raise UserError(f"data.path={root} has no {name}; {REMEDY}")
    check_data_set(root)
    with (root / INFO_FILE).open("rb") as file:
        values = parse_json(file.read(MAX_BYTES + 1), str(root / INFO_FILE))
    if not isinstance(values, dict):
        raise UserError(f"{root / INFO_FILE} is not the description of a data set; {REMEDY}")
    return values


def _read_blend(path: "Path | EPath") -> DatasetInfo:
    """Merge the data sets of a blend: common properties, summed samples, and `root` of the first one."""
    if not path.is_file():
        raise UserError(f"data.path={path} does not exist")
    check_blend(path)
    splits = {split: _leaves(path, split) for split in ("train", "val")}
    everything = [info for leaves in splits.values() for info, _ in leaves]
    if not splits["train"]:
        raise UserError(f"{path} lists no data set in its split 'train'")
    first = everything[0]
    parts = ("tokenizer_fingerprint", "text_encoder_fingerprint", "latent_channels", "text_width", "sigma_data")
    for name in (*parts, "store"):
        expected = getattr(first, name)
        for info in everything:
            found = getattr(info, name)
            if expected != found and None not in (expected, found):
                raise UserError(
                    f"{path} cannot blend data sets whose {name} differs: {expected} in {first.root}, {found} in "
                    f"{info.root}; prepare both alike"
                )
    counts = {split: sum(info.num_samples.get(part, 0) for info, part in leaves) for split, leaves in splits.items()}
    return replace(first, num_samples=counts)


def _leaves(path: "Path | EPath", split: str) -> list[tuple[DatasetInfo, str]]:
    """Data sets that a blend mixes in a split, each with its own name of the split."""
    from megatron.energon.metadataset.loader import traverse_metadataset

    try:
        leaves = traverse_metadataset(path, split_part=split)
    except KeyError:
        return []  # a blend need not have a validation split
    except (ValueError, AssertionError, TypeError, OSError) as error:
        raise UserError(f"{path} is not a blend of data sets ({error}); see Energon's metadatasets") from None
    return [(DatasetInfo.read(str(leaf.path)), leaf.split_part) for leaf in leaves]


def folders_of(path: "str | Path | EPath") -> list[Path]:
    """Local folders of a data set, or of all data sets of a blend; empty for a store, whose uploads are atomic."""
    root = place(path)
    is_blend = root.name.endswith((".yaml", ".yml"))
    leaves = [info.root for split in ("train", "val") for info, _ in _leaves(root, split)] if is_blend else [root]
    return list(dict.fromkeys(folder for folder in leaves if isinstance(folder, Path)))


def captions_of(path: "str | Path | EPath", split: str) -> Iterator[str]:
    """Captions of a split of a data set, or of all data sets that a blend mixes in it."""
    root = place(path)
    is_blend = root.name.endswith((".yaml", ".yml"))
    for info, part in _leaves(root, split) if is_blend else [(DatasetInfo.read(path), split)]:
        yield from iter_captions(info.root, part)


def iter_descriptions(root: "Path | EPath", split: str) -> Iterator[Description]:
    """Yield the description of each sample of a split in shard order; broken ones are skipped, as in training."""
    for path in sorted(root.glob(f"{split}-*.tar")):
        yield from _descriptions_of(path)


def _descriptions_of(shard: "Path | EPath") -> Iterator[Description]:
    with (
        shard.open("rb") as file,
        suppress(tarfile.TarError),
        UntrustedTarFile.open(fileobj=file, mode="r:") as members,
    ):
        for member in members:
            if member.name.endswith(".json") and member.isreg() and member.size <= MAX_DESCRIPTION_BYTES:
                with suppress(UnreadableSampleError):
                    yield read_description(members.extractfile(member).read())


def iter_captions(root: "Path | EPath", split: str) -> Iterator[str]:
    """Captions of a split in shard order."""
    return (description.caption for description in iter_descriptions(root, split))


def draw_captions(root: "Path | EPath", split: str, count: int) -> list[str]:
    """Draw at most `count` different captions of a split, in a reproducible random order.

    Only as many shards are opened as needed, and at most `CAPTIONS_LOOKED_AT` captions read per drawn one.
    """
    shards = sorted(root.glob(f"{split}-*.tar"))
    random.Random(0).shuffle(shards)
    captions = (description.caption for shard in shards for description in _descriptions_of(shard))
    found: dict[str, None] = {}
    for caption in islice(captions, count * CAPTIONS_LOOKED_AT):
        found[caption] = None
        if len(found) == count:
            break
    return list(found)
