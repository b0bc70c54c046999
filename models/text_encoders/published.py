"""Published text encoders: their files in the form of `transformers` (words, network, single tensors), and what we save
of them."""

import hashlib
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from megadit.models.bundle import components as parts
from megadit.models.bundle import hub
from megadit.models.bundle.pretrained import PRETRAINED, check_weights, transformers_library
from megadit.models.bundle.tensor_source import load_pickled
from megadit.models.machine import computing_dtype, cost_in_words, free_memory
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import inner_path, read_json

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Encoder = TypeVar("Encoder")


def loading_dtype(name: str, directory: Path) -> torch.dtype:
    """In which the weights of a directory are loaded: float32 where this processor does not multiply what was asked
    for, as long as memory has room for the weights twice; else as asked, with a warning of what that costs."""
    asked, place = DTYPES[name], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if computing_dtype(place, asked) == asked:
        return asked
    size = sum(file.stat().st_size for ending in ("safetensors", "bin") for file in directory.glob(f"*.{ending}"))
    if 2 * size < free_memory(place):
        return torch.float32
    warnings.warn(f"{cost_in_words(place, asked)}, for which {directory} leaves no memory", stacklevel=2)
    return asked


@dataclass(frozen=True, slots=True)
class PublishedText:
    """How text encoders of one kind lie on disk."""

    what: str
    """As messages call it."""
    vocabularies: tuple[str, ...]
    """Files that its words may come from, the first that is there."""

    @property
    def files(self) -> str:
        """What its folder has to hold."""
        return f"config.json, {self.vocabularies[0]} and model.safetensors (or pytorch_model.bin)"

    def root(self, model: str) -> Path:
        """Where the files of a model are, which is a directory or the name of one on the hub.

        Raises:
            UserError: if they are not on this machine; says what to download, and where to put it.
        """
        return hub.local_directory(model, "text encoder", self.files)

    def folders(self, model: str) -> tuple[Path, Path]:
        """Where the files of its network are, and those of its words: together, or in `text_encoder` and `tokenizer`
        (a pipeline).

        Raises:
            UserError: as `root`.
        """
        root = self.root(model)
        is_pipeline = (root / "text_encoder").is_dir()
        return (root / "text_encoder", root / "tokenizer") if is_pipeline else (root, root)

    def load_tokenizer(self, directory: Path) -> Any:
        """The tokenizer of `transformers`.

        Raises:
            UserError: if its files are missing or damaged.
        """
        self._vocabulary(directory)  # without one, transformers makes a tokenizer that knows no word
        try:
            return transformers_library(self.what).AutoTokenizer.from_pretrained(directory, **PRETRAINED)
        except (OSError, ValueError) as error:
            raise UserError(f"{directory} has no readable tokenizer ({_reason(error)}); needs {self.files}") from error

    def load_network(self, directory: Path, class_name: str, **options: Any) -> Any:
        """The network of this class of `transformers`, in evaluation mode; `options` are those of `from_pretrained`.

        Raises:
            UserError: if its files are missing or damaged.
        """
        network_class = getattr(transformers_library(self.what), class_name)
        check_weights(directory)
        try:
            return network_class.from_pretrained(directory, **PRETRAINED, **options).eval()
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"{directory} cannot be loaded ({_reason(error)}); needs {self.files}") from error

    def vocabulary_hash(self, directory: Path) -> str:
        """Of the file that the words come from.

        Raises:
            UserError: if there is none.
        """
        return hashlib.sha256(self._vocabulary(directory).read_bytes()).hexdigest()

    def read_tensor(self, directory: Path, *names: str) -> Tensor:
        """One tensor of the network, of any shape, under the first of the names that `transformers` gave it over time.

        Raises:
            UserError: if it is not there.
        """
        shards = directory / "model.safetensors.index.json"
        try:
            if shards.exists():
                places = read_json(shards)["weight_map"]
                paths = {inner_path(directory, places[name], follow_links=True) for name in names if name in places}
            else:
                paths = {directory / "model.safetensors"}
            for path in filter(Path.exists, paths):
                with safe_open(path, framework="pt") as file:
                    return file.get_tensor(_first(names, file.keys()))
            pickled = load_pickled(directory / "pytorch_model.bin")
            return pickled[_first(names, pickled)]
        except (OSError, KeyError, RuntimeError, TypeError) as error:
            raise UserError(f"{directory} has no readable tensor {names[0]}: {error}; needs {self.files}") from error

    def _vocabulary(self, directory: Path) -> Path:
        for name in self.vocabularies:
            if (directory / name).is_file():
                return directory / name
        raise UserError(f"{directory} has neither {' nor '.join(self.vocabularies)}; needs {self.files}")


def settings_of(encoder: type) -> list[str]:
    """What config.json holds of an encoder of this class: the fields that its repr shows, neither tensors nor what was
    loaded."""
    return [field.name for field in fields(encoder) if field.repr]


def save_settings(
    encoder: Any, directory: str | os.PathLike, kind: str, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Writes the settings, with the name of the model, whose weights stay where they are, and these tensors."""
    settings = {name: getattr(encoder, name) for name in settings_of(type(encoder))}
    parts.write_part(directory, {"type": kind, **settings, "fingerprint": encoder.fingerprint()}, tensors or {})


def load_settings(encoder: type[Encoder], directory: str | os.PathLike, **more: Any) -> Encoder:
    """The inverse of `save_settings`; `more` are fields that it does not write.

    Raises:
        UserError: if config.json is missing or has other settings.
    """
    settings = parts.read_settings(directory, [*settings_of(encoder), "fingerprint"])
    fingerprint = settings.pop("fingerprint")
    return encoder(**settings, **more, _loaded={"fingerprint": fingerprint})


def _first(names: Sequence[str], known: Collection[str]) -> str:
    """The first of the names that is known, or the first of all."""
    return next((name for name in names if name in known), names[0])


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
