"""What a data set says of itself: the contents of its `megadit.json`, alone or as part of a blend."""

import json
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from megadit.models.shared.errors import UserError
from megadit.models.shared.files import write_json
from megadit.train.data.places import STORES, energon_url, is_url, local_copy, place

if TYPE_CHECKING:
    from megatron.energon.epathlib import EPath

FORMAT_VERSION = 1
INFO_FILE = "megadit.json"
ENERGON_FOLDER = ".nv-meta"
CRUDE = "crude.yaml"
DEFINITIONS = {
    "dataset.yaml": (
        "sample_type:\n  __module__: megatron.energon\n  __class__: TextSample\nfield_map:\n  text: json[caption]\n"
    ),
    CRUDE: "__module__: megatron.energon\n__class__: CrudeWebdataset\n",
}
"""What the shards are to Energon: their captions, or crude samples. Its tools (info, lint, preview; 7.4) know no crude
samples and look into dataset.yaml; loaders are told to take the other (`dataset_config="crude.yaml"`)."""
REMEDY = "write it with `megadit prepare`"
Store = Literal["latents", "raw"]
STORES_BY_SUFFIX: dict[str, Store] = {"safetensors": "latents", "mp4": "raw", "png": "raw"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetInfo:
    """What a data set was made with: the contents of its `megadit.json`."""

    root: "Path | EPath"
    tokenizer_fingerprint: str
    text_encoder_fingerprint: str
    sigma_data: float
    """Standard deviation of the latents, all together."""
    latent_channels: int
    text_width: int
    """Width of the text features."""
    num_samples: dict[str, int]
    """Samples of each split."""

    @property
    def store(self) -> Store | None:
        """Whether samples are latents or pixels, as the first one of training shows; None if it cannot be told."""
        return _store_of(self.root)

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
        """Reads what `write` wrote, in a folder or a store; of a YAML file that blends several data sets, all of them
        as one.

        Raises:
            UserError: if `path` is missing, was not prepared, or was written by a newer version.
        """
        root = place(path)
        if root.name.endswith((".yaml", ".yml")):
            return _read_blend(root)
        if not is_url(path) and not root.is_dir():
            raise UserError(f"data.path={path} is not a folder; {REMEDY}")
        values = _read_info(root)
        version = values.pop("format_version", None)
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise UserError(
                f"{root / INFO_FILE} has format_version {version}, this megadit reads up to {FORMAT_VERSION}; update it"
            )
        try:
            return cls(root=root, **values)
        except TypeError as error:
            raise UserError(f"{root / INFO_FILE} is not the description of a data set ({error}); {REMEDY}") from None


def _store_of(root: "Path | EPath") -> Store | None:
    """What the first training sample holds."""
    first = root / "train-000000.tar"
    if not first.is_file():
        return None
    found: set[Store] = set()
    try:
        with first.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as shard:
            name = None
            for member in shard:
                key, _, suffix = member.name.partition(".")
                if name not in (None, key):
                    break
                name = key
                found |= {STORES_BY_SUFFIX[suffix]} if suffix in STORES_BY_SUFFIX else set()
    except (OSError, tarfile.TarError):  # what is broken is told by those who read samples
        return None
    return found.pop() if len(found) == 1 else None


def _read_info(root: "Path | EPath") -> dict[str, Any]:
    for name in (INFO_FILE, f"{ENERGON_FOLDER}/{CRUDE}"):
        try:
            is_there = (root / name).is_file()
        except Exception as error:  # each store has exceptions of its own
            raise UserError(f"data.path={root} cannot be read: {error}") from None
        if not is_there:
            raise UserError(f"data.path={root} has no {name}; {REMEDY}")
    for name in DEFINITIONS:
        _read_definition(root / ENERGON_FOLDER / name)
    try:
        values = json.loads(_content(root / INFO_FILE))
    except ValueError as error:
        raise UserError(f"{root / INFO_FILE} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{root / INFO_FILE} is not the description of a data set; {REMEDY}")
    return values


def _read_blend(path: "Path | EPath") -> DatasetInfo:
    """What the data sets of a blend have in common, and the sum of their samples; `root` is that of the first."""
    from megatron.energon.metadataset.loader import traverse_metadataset

    if not path.is_file():
        raise UserError(f"data.path={path} does not exist")
    _read_definition(path)
    splits: dict[str, list[tuple[DatasetInfo, str]]] = {}
    for split in ("train", "val"):
        try:
            leaves = traverse_metadataset(path, split_part=split)
        except KeyError:
            leaves = []  # a blend need not say how to validate
        except (ValueError, AssertionError, TypeError, OSError) as error:
            raise UserError(f"{path} is not a blend of data sets ({error}); see Energon's metadatasets") from None
        splits[split] = [(DatasetInfo.read(str(leaf.path)), leaf.split_part) for leaf in leaves]
    everything = [info for leaves in splits.values() for info, _ in leaves]
    if not splits["train"]:
        raise UserError(f"{path} blends nothing in its split 'train'")
    first = everything[0]
    parts = ("tokenizer_fingerprint", "text_encoder_fingerprint", "latent_channels", "text_width", "sigma_data")
    for name in (*parts, "store"):
        expected = getattr(first, name)
        for info in everything:
            found = getattr(info, name)
            if expected != found and None not in (expected, found):
                raise UserError(
                    f"{path} blends what cannot be blended: {name} is {expected} of {first.root} and "
                    f"{found} of {info.root}; prepare both alike"
                )
    counts = {split: sum(info.num_samples.get(part, 0) for info, part in leaves) for split, leaves in splits.items()}
    return replace(first, num_samples=counts)


def _read_definition(path: "Path | EPath") -> None:
    """Checks a file of Energon's: it builds any object that such a file names; one from elsewhere must name none but
    Energon's, and places that Energon knows.

    Raises:
        UserError: if it does not.
    """

    def values(content: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(content, dict):
            yield from content.items()
        if isinstance(content, dict | list):
            for item in content.values() if isinstance(content, dict) else content:
                yield from values(item)

    try:
        content = yaml.safe_load(_content(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    for name, value in values(content):
        if name in ("__module__", "__function__") and str(value) != "megatron.energon":
            raise UserError(f"{path} names {value}, and only megatron.energon is let build objects; remove it")
        if name == "path" and str(value).startswith(tuple(f"{kind}://" for kind in STORES)):
            raise UserError(f"{path}: to Energon, the place {value} is called {energon_url(value)}; write that")


def _content(path: "Path | EPath") -> str:
    with path.open("rb") as file:
        return file.read().decode("utf-8")


def iter_descriptions(root: "Path | EPath", split: str) -> Iterator[dict[str, Any]]:
    """What is known of each sample of a split, in the order of its shards."""
    for path in sorted(root.glob(f"{split}-*.tar")):
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as shard:
            for member in shard:
                if member.name.endswith(".json"):
                    yield json.load(shard.extractfile(member))


def iter_captions(root: "Path | EPath", split: str) -> Iterator[str]:
    """Captions of a split in the order of its shards."""
    return (description["caption"] for description in iter_descriptions(root, split))
