"""Allow-list for the contents of files that Energon reads.

Energon builds any object and calls any function that one of its files names, at any depth. Data sets may be untrusted,
so each file is checked against the schemas here before Energon reads it, and anything not listed is refused. Files are
parsed with Energon's own parser, because two parsers may read one text differently.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadit.models.shared.documents import MAX_BYTES, parse_json, parse_yaml
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import is_inner_name, is_possible_name
from megadit.train.dataset.places import STORES, energon_url, is_url

if TYPE_CHECKING:
    from megatron.energon.epathlib import EPath

FOLDER = ".nv-meta"
CRUDE = "crude.yaml"
MODULE = "megatron.energon"
DEFINITIONS = {
    "dataset.yaml": (
        f"sample_type:\n  __module__: {MODULE}\n  __class__: TextSample\nfield_map:\n  text: json[caption]\n"
    ),
    CRUDE: f"__module__: {MODULE}\n__class__: CrudeWebdataset\n",
}
"""Files that define the samples for Energon: as captions, or as crude samples. Energon's tools (info, lint, preview;
7.4) do not support crude samples and read dataset.yaml; loaders read the other (`dataset_config="crude.yaml"`)."""

MOST_SAMPLES = 10**9
"""Maximum number of samples of a data set; readers index every hundredth."""
MOST_SHARDS = 10**6
MOST_BLENDS = 1000
"""Maximum number of blends, nested or not."""
_RANGES = re.compile(r"\{(\d{1,9})\.\.(\d{1,9})\}")

Schema = Callable[[Any], bool] | Mapping[str, Any] | list
"""A predicate; a mapping of keys to schemas ("*": any other key); or a list of one schema, that of all items."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _is_count(value: Any) -> bool:
    return value is None or isinstance(value, int) and -1 <= value < 1000


def _is_word(value: Any) -> bool:
    return isinstance(value, str)


def _is_place(value: Any) -> bool:
    return isinstance(value, str) and is_possible_name(value)


def _is_sample_type(value: Any) -> bool:
    return isinstance(value, str) and value.isidentifier() and value.endswith("Sample")


def _is_plain(value: Any) -> bool:
    """Whether a value has no key that Energon takes for the name of an object."""
    if isinstance(value, dict):
        return all(_is_plain(item) and not key.startswith("__") for key, item in value.items())
    return all(map(_is_plain, value)) if isinstance(value, list) else True


def _is_shard(value: Any) -> bool:
    return isinstance(value, str) and is_inner_name(value)


def _is_pattern(value: Any) -> bool:
    """Whether a value is a pattern of shards as Energon's `prepare` writes them: `train-{000000..000012}.tar`."""
    if not _is_shard(value) or set("{}") & set(_RANGES.sub("", value)):
        return False
    counts = (abs(int(last) - int(first)) + 1 for first, last in _RANGES.findall(value))
    return math.prod(counts) <= MOST_SHARDS


def _one_of(*names: str) -> Callable[[Any], bool]:
    return lambda value: value in names


_REFERENCE: Schema = {
    "path": _is_place,
    "weight": _is_number,
    "repetitions": _is_number,
    "split_part": _is_word,
    "subflavor": _is_word,
    "subflavors": _is_plain,
    "split_config": _one_of("split.yaml", "split.json"),
    "dataset_config": _one_of("dataset.yaml", CRUDE),
    "shuffle_over_epochs_multiplier": _is_count,
    "subset": {"range": [_is_plain]},
}
_BLEND: Schema = {
    "__module__": _one_of(MODULE),
    "__class__": _one_of("Metadataset", "MetadatasetV2"),
    "splits": {
        "*": {**_REFERENCE, "datasets": [_REFERENCE], "blend": [_REFERENCE], "blend_epochized": [_REFERENCE]},
    },
}
_FILES: dict[str, Schema] = {
    CRUDE: {"__module__": _one_of(MODULE), "__class__": _one_of("CrudeWebdataset"), "subflavors": _is_plain},
    "dataset.yaml": {
        "sample_type": {"__module__": _one_of(MODULE), "__class__": _is_sample_type},
        "field_map": {"*": _is_word},
        "subflavors": _is_plain,
    },
    "split.yaml": {"split_parts": {"*": [_is_pattern]}, "exclude": [_is_pattern]},
    "split.json": {"split_parts": {"*": [_is_pattern]}, "exclude": [_is_pattern]},
    ".info.json": {"energon_version": _is_word, "shard_counts": {"*": _is_number}},
    ".info.yaml": {"energon_version": _is_word, "shard_counts": {"*": _is_number}},
}
"""Files that Energon reads of a data set before its samples, with their schemas."""


def check_data_set(root: "Path | EPath") -> None:
    """Check every file of a data set that Energon reads.

    Raises:
        UserError: naming the file and what is wrong with it.
    """
    for name, schema in _FILES.items():
        path = root / FOLDER / name
        if path.is_file():
            values = _read(path)
            _check(values, schema, str(path))
            if name.startswith(".info"):
                _check_counts(values.get("shard_counts", {}), str(path))


def check_blend(path: "Path | EPath") -> None:
    """Check the blend at `path` and all blends within it; the data sets that they name are not read.

    Raises:
        UserError: naming the file and what is wrong with it; also for cyclic blends.
    """
    from megatron.energon.epathlib import EPath  # a second to import

    waiting, seen = [(EPath(path), ())], 0
    while waiting:
        blend, above = waiting.pop()
        seen += 1
        if blend in above or seen > MOST_BLENDS:
            raise UserError(f"{path} nests blends in a cycle, or more than {MOST_BLENDS} of them; see {blend}")
        values = _read(blend)
        _check(values, _BLEND, str(blend))
        for place in _places(values):
            found = blend.parent / _checked_place(place, blend)
            if found.name.endswith(".yaml") and found.is_file():
                waiting.append((found, (*above, blend)))


def _places(values: Any) -> Iterator[str]:
    """All values of `path` in a checked blend."""
    if isinstance(values, dict):
        yield from (value for name, value in values.items() if name == "path")
    for item in values.values() if isinstance(values, dict) else values if isinstance(values, list) else ():
        yield from _places(item)


def _checked_place(value: str, blend: "EPath") -> str:
    kind = value.partition("://")[0] if is_url(value) else ""
    if kind in STORES:
        raise UserError(f"{blend} names {value}, whose address in Energon is {energon_url(value)}; write that")
    if kind not in ("", "msc"):
        raise UserError(f"{blend} names {value}; give a folder, or msc://PROFILE/PATH")
    if value.startswith("/") and not blend.is_local():
        raise UserError(f"{blend} lies in a store and names {value} on this machine; give its address in the store")
    return value


def _read(path: "Path | EPath") -> Any:
    """Contents of a file, as Energon parses them."""
    from megatron.energon.eyaml import load_yaml

    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if path.name.endswith(".json"):
        return parse_json(content, str(path))
    parse_yaml(content, str(path))
    try:
        return load_yaml(content)
    except Exception as error:  # ryml's errors have no common class
        raise UserError(f"{path} is YAML that Energon cannot read ({type(error).__name__}); write it plainly") from None


_NOT_READ = {"join": "it joins samples of several data sets, and training reads whole ones; blend the data sets"}
"""Keys of Energon that training does not support."""


def _check(value: Any, schema: Schema, where: str) -> None:
    if callable(schema):
        if not schema(value):
            raise UserError(f"{where} says {_shown(value)}, which no data set needs; do not trust its source")
    elif not isinstance(value, list if isinstance(schema, list) else dict):
        expected = "a list" if isinstance(schema, list) else "names and values"
        raise UserError(f"{where} is {_shown(value)}, not {expected}")
    elif isinstance(schema, list):
        for item in value:
            _check(item, schema[0], where)
    else:
        for name, item in value.items():
            if name not in schema and ("*" not in schema or name.startswith("__")):
                if name in _NOT_READ:
                    raise UserError(f"{where} says {_shown(name)}: {_NOT_READ[name]}")
                raise UserError(f"{where} says {_shown(name)}, which no data set needs; do not trust its source")
            _check(item, schema.get(name, schema.get("*")), f"{where}: {_shown(name)}")


def _check_counts(counts: Mapping[str, int], where: str) -> None:
    for name, count in counts.items():
        if not _is_shard(name) or not isinstance(count, int):
            raise UserError(f"{where} counts {_shown(count)} samples in {_shown(name)}, no shard of this folder")
    if sum(counts.values()) > MOST_SAMPLES:
        raise UserError(f"{where} counts {sum(counts.values()):,} samples; at most {MOST_SAMPLES:,} can be read")


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
