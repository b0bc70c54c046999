"""Loads published encoders with `transformers`: the library, checks of files before it reads them, and checks of the
loaded tensors."""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from megadit.models.shared.errors import UserError, library_errors
from megadit.models.shared.files import inner_path, read_json
from megadit.models.storage.components import listed
from megadit.models.storage.tensor_source import TensorSource, check_archive_file, check_numbers
from megadit.models.storage.weight_files import open_weights, weight_files
from megadit.models.storage.wrapped import unwrapped

STEMS = ("model", "pytorch_model")
"""Stems of transformers' weight files."""
_DEPTH, _SPARE = ("num_layers", "num_hidden_layers", "depth"), 1 << 20
"""Names of numbers of layers; numbers of a network beyond twice those of its files that take no memory to speak of."""
_OTHER_FILES = (".safetensors", ".pth", ".pt", ".bin")


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """Tensor names of one kind of encoder."""

    marks: tuple[str, ...]
    """Names that one tensor has had over time, by which a prefix of all names is found."""
    others: str = "$^"
    """Pattern of tensors that no feature depends on: files may have or lack them."""
    rename: Callable[[TensorSource], TensorSource] = lambda source: source
    """Renames tensors of other releases to transformers' names."""


def find_weights(place: Path, needs: str) -> list[Path]:
    """The files of the weights at `place`, a folder or the only file.

    Raises:
        UserError: if there are none, or it is not clear which.
    """
    if place.is_file():
        return [place]
    if found := weight_files(place, *STEMS):
        return found
    others = sorted(path for path in place.iterdir() if path.suffix in _OTHER_FILES) if place.is_dir() else []
    if len(others) == 1:
        return others
    there = f"there are {', '.join(path.name for path in others)}: keep one" if others else f"needs {needs}"
    raise UserError(f"{place} has no weight file with a known name; {there}")


def encoder_tensors(place: Path, encoder: Encoder, needs: str) -> TensorSource:
    """The tensors at `place` under transformers' names.

    Raises:
        UserError: as `find_weights`, and for files that cannot be read.
    """
    return encoder.rename(unwrapped(open_weights(find_weights(place, needs)), encoder.marks))


def load_encoder(network_class: type, place: Path, encoder: Encoder, needs: str, **options: Any) -> Any:
    """A network of this `transformers` class with the weights at `place`, in evaluation mode.

    `options` are those of `from_pretrained`; its `config` defaults to that of the folder.

    Raises:
        UserError: if files are missing or damaged; for tensors that are missing, unexpected or misshapen, by name.
    """
    files = find_weights(place, needs)
    raw = open_weights(files)
    tensors = encoder.rename(unwrapped(raw, encoder.marks))
    _check_sizes(network_class, place, encoder, tensors, **options)
    if tensors is raw and place.is_dir() and files == _plain_files(place):
        check_weights(place)
        return _loaded(network_class, place, place, encoder, needs, **options)
    return _loaded(network_class, None, place, encoder, needs, state_dict=tensors.state_dict(), **options)


def check_encoder(network_class: type, place: Path, encoder: Encoder, needs: str, **options: Any) -> None:
    """Raise what `load_encoder` would, from names and shapes (with accelerate alone).

    Raises:
        UserError: also for weights that are no finite numbers, which it would load as they are.
    """
    tensors = encoder_tensors(place, encoder, needs)
    _check_sizes(network_class, place, encoder, tensors, **options)
    if find_spec("accelerate") is not None:
        state = {name: torch.empty(of.shape, dtype=of.dtype, device="meta") for name, of in tensors.stored.items()}
        _loaded(network_class, None, place, encoder, needs, state_dict=state, device_map="meta", **options)
    check_numbers(tensors, [name for name in tensors.stored if not re.search(encoder.others, name)])


def _check_sizes(network_class: type, place: Path, encoder: Encoder, tensors: TensorSource, **options: Any) -> None:
    """Raises UserError for settings of a far larger network than the tensors are of, before it takes memory and time;
    what else does not fit is found by name when they are loaded."""
    with library_errors(lambda reason: f"{place} cannot be loaded ({reason})"):
        config = options.get("config") or _config_of(network_class, place)
        values = config.to_dict()
        for section in (values, *filter(lambda value: isinstance(value, dict), values.values())):
            for name in _DEPTH:
                value = section.get(name)
                if isinstance(value, int) and value > len(tensors.stored):
                    raise UserError(f"{place}: {name}={value} are more than its {len(tensors.stored)} tensors are for")
        with torch.device("meta"):
            parameters = dict(network_class(config).named_parameters())
    asked = sum(each.numel() for name, each in parameters.items() if not re.search(encoder.others, name))
    found = sum(math.prod(each.shape) for each in tensors.stored.values())
    if asked > 2 * found + _SPARE:
        raise UserError(f"{place}: config.json is of a network of {asked:,} numbers, and its tensors have {found:,}")


def _config_of(network_class: type, place: Path) -> Any:
    return network_class.config_class.from_pretrained(place if place.is_dir() else place.parent, **PRETRAINED)


def _plain_files(place: Path) -> list[Path]:
    """Return the weight files of a folder that transformers itself would load."""
    found = weight_files(place, *STEMS)
    names = {f"{stem}.{kind}{index}" for stem, kind in zip(STEMS, ("safetensors", "bin"), strict=True)
             for index in ("", ".index.json")}  # fmt: skip
    return found if any((place / name).is_file() for name in names) else []


def _loaded(network_class: type, folder: Path | None, place: Path, encoder: Encoder, needs: str, **options: Any) -> Any:
    """Load with transformers, from files in `folder` or from `state_dict`; `place` names either in messages."""
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with library_errors(lambda reason: f"{place} cannot be loaded ({reason}); needs {needs}"), _quiet():
        if folder is None and "config" not in options:
            options["config"] = _config_of(network_class, place)
        network, found = network_class.from_pretrained(folder, **PRETRAINED, **options)
    problems = {
        "missing": sorted(found["missing_keys"]),
        "unexpected": sorted(found["unexpected_keys"]),
        "misshapen": sorted(f"{name} {list(a)}, not {list(b)}" for name, a, b in found["mismatched_keys"]),
    }
    kept = {kind: [name for name in names if not re.search(encoder.others, name)] for kind, names in problems.items()}
    if any(kept.values()):
        raise UserError(f"{place}: its tensors are not those of a {network_class.__name__}; {listed(kept)}")
    return network.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' own report of tensors and its progress bars."""
    logging = transformers_library("an encoder").utils.logging
    before, had_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if had_bar:
            logging.enable_progress_bar()


def check_weights(directory: Path) -> None:
    """Raises UserError for weight files that are links to elsewhere, or would decompress to more than their size.

    transformers runs no code from them.
    """
    files = set(directory.glob("*.bin"))
    for index in directory.glob("*.index.json"):
        names = read_json(index)["weight_map"].values()
        files |= {inner_path(directory, name, follow_links=True) for name in set(names)}
    for path in sorted(file for file in files if file.suffix == ".bin" and file.is_file()):
        check_archive_file(path)


PRETRAINED = {"local_files_only": True, "trust_remote_code": False}
"""Argument of every `from_pretrained`: otherwise transformers asks on standard input whether to run a folder's code."""


def transformers_library(what: str):
    """Import transformers, which `what` needs.

    Raises:
        UserError: if it is not installed.
    """
    require("transformers", what)
    import transformers

    return transformers


def require(library: str, what: str) -> None:
    """Raises UserError if a library that `what` needs is not installed."""
    if find_spec(library) is None:
        raise UserError(f"{what} needs the library {library}: pip install 'megadit[t5]' {library}")
