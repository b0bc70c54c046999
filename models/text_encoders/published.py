"""Files of published text encoders in `transformers`' format (vocabulary, network, single tensors), and our settings
files."""

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megadit.models.machine import computing_dtype, cost_in_words, free_memory
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path, sha256_of
from megadit.models.storage import components as parts
from megadit.models.storage import hub
from megadit.models.storage.pretrained import (
    Encoder,
    check_encoder,
    encoder_tensors,
    load_encoder,
    transformers_library,
)
from megadit.models.storage.tensor_source import TensorSource
from megadit.models.storage.tokenizer_file import load_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
AnyEncoder = TypeVar("AnyEncoder")


def device_of(loaded: Mapping[str, Any], placement: str = "auto") -> torch.device:
    """Device of an encoder's network: `loaded["device"]`, else the current GPU, if there is one; with the placement
    `cpu`, the CPU."""
    if placement == "cpu":
        return torch.device("cpu")
    return loaded.get("device") or torch.device("cuda" if torch.cuda.is_available() else "cpu")


def loading_dtype(name: str, directory: Path, device: torch.device) -> torch.dtype:
    """Dtype in which to load the weights of a directory or a file, for a network on `device`.

    float32 if this processor does not multiply the requested dtype natively and memory has room for twice the weights;
    else the requested dtype, with a warning of its cost where it is not native.
    """
    asked = DTYPES[name]
    if computing_dtype(device, asked) == asked:
        return asked
    files = [file for ending in ("safetensors", "bin") for file in directory.glob(f"*.{ending}")]
    size = sum(file.stat().st_size for file in (files if directory.is_dir() else [directory]))
    if 2 * size < free_memory(device):
        return torch.float32
    warnings.warn(f"{cost_in_words(device, asked)}, for which {directory} leaves no memory", stacklevel=2)
    return asked


@dataclass(frozen=True, slots=True)
class PublishedNetwork:
    """A network of `transformers`, as its files lie on this machine."""

    class_name: str
    place: Path
    """Folder, or a release's only file."""
    load: Callable[[], Any]
    """Load it, in the dtype of its file."""
    load_words: Callable[[], Any]
    """Load what prepares its input: the tokenizer of a text encoder, the processor of an image encoder."""


@dataclass(frozen=True, slots=True)
class PublishedText:
    """Files of one kind of text encoder."""

    what: str
    """Name of the encoder in messages."""
    vocabularies: tuple[str, ...]
    """Possible vocabulary files; the first one present is used."""
    encoder: Encoder = Encoder(marks=())
    """Tensor names by which the network is recognised."""
    padding: str | None = None
    """Token that is put in place of one that a tokenizer does not name."""
    beginning: str | None = None
    """Token that must begin every text."""
    ending: str | None = None
    """Token that must end every text."""
    released: tuple[str, Path] | None = None
    """Pattern of the weight file, and folder of the vocabulary, in a release of another form."""

    @property
    def files(self) -> str:
        """Files that its folder must contain."""
        return f"config.json, {self.vocabularies[0]} and model.safetensors (or pytorch_model.bin)"

    def root(self, model: str) -> Path:
        """Find the directory of a model, given as a path or as a name on the hub.

        Raises:
            UserError: if it is not on this machine; says what to download, and where to put it.
        """
        return hub.local_directory(model, "text encoder", self.files)

    def folders(self, model: str) -> tuple[Path, Path]:
        """Find the weights (a folder, or the only file) and the vocabulary folder of a model: together, or in
        `text_encoder` and `tokenizer` (a pipeline), or as `released`.

        Raises:
            UserError: as `root`.
        """
        if Path(model).is_file():
            return Path(model), self._words_near(Path(model).absolute().parent)
        root = self.root(model)
        if (root / "text_encoder").is_dir():
            return root / "text_encoder", root / "tokenizer"
        if self.released is not None and (files := sorted(root.glob(self.released[0]))):
            return files[0], root / self.released[1]
        return root, root

    def _words_near(self, folder: Path) -> Path:
        """The vocabulary folder for a weight file: its own folder, or `tokenizer` in it or next to it."""
        near = [folder, folder / "tokenizer", folder.parent / "tokenizer"]
        near += [] if self.released is None else [folder / self.released[1]]
        return next((place for place in near if any((place / name).is_file() for name in self.vocabularies)), folder)

    def tensors(self, place: Path) -> TensorSource:
        """Open the tensors at `place`, one of `folders`, under transformers' names.

        Raises:
            UserError: if they cannot be read.
        """
        return encoder_tensors(place, self.encoder, self.files)

    def load_tokenizer(self, directory: Path, size: int | None = None) -> Any:
        """The tokenizer of `transformers`, for a network with `size` embeddings (None: any number).

        Raises:
            UserError: if its files are missing or damaged, do not say how texts end and are padded, or have tokens that
                the network lacks.
        """
        self._vocabulary(directory)  # without one, transformers creates an empty tokenizer
        try:
            tokenizer = load_tokenizer(directory)
        except UserError as error:
            raise UserError(f"{error}; needs {self.files}") from error
        words = tokenizer.get_vocab()
        if tokenizer.pad_token is None and self.padding in words:
            tokenizer.pad_token = self.padding
        if tokenizer.pad_token is None:
            raise UserError(f"{directory} has a tokenizer without a pad_token: give its tokenizer_config.json too")
        tokens = tokenizer("a").input_ids
        if size is not None and (most := 1 + max(*tokens, tokenizer.pad_token_id, tokenizer.vocab_size - 1)) > size:
            raise UserError(f"{directory} has a tokenizer of {most:,} tokens, and its network {size:,}: give its own")
        for ends, token, found in (("begins", self.beginning, tokens[:1]), ("ends", self.ending, tokens[-1:])):
            if token is not None and found != [words.get(token)]:
                raise UserError(f"{directory} has a tokenizer that {ends} no text with {token}: give its own")
        tokenizer.truncation_side = "right"  # what is cut off is said to be the end
        return tokenizer

    def load_network(self, directory: Path, class_name: str, **options: Any) -> Any:
        """The network of this class of `transformers`, in evaluation mode; `options` are those of `from_pretrained`.

        Raises:
            UserError: if its files are missing or damaged, or hold other tensors, by name.
        """
        network_class = getattr(transformers_library(self.what), class_name)
        return load_encoder(network_class, directory, self.encoder, self.files, **options)

    def check_network(self, directory: Path, class_name: str, **options: Any) -> None:
        """Raise what `load_network` would, from names and shapes alone."""
        network_class = getattr(transformers_library(self.what), class_name)
        check_encoder(network_class, directory, self.encoder, self.files, **options)

    def vocabulary_hash(self, directory: Path, size: int | None = None) -> str:
        """Hash of the vocabulary file, for a network with `size` embeddings (None: any number).

        Raises:
            UserError: if there is none, it is damaged, or has more tokens than `size`.
        """
        self.load_tokenizer(directory, size)
        return sha256_of(self._vocabulary(directory))

    def read_tensor(self, directory: Path, *names: str) -> Tensor:
        """One tensor of the network, of any shape, under the first name that exists of those `transformers` has used.

        Raises:
            UserError: if it is not there.
        """
        tensors = self.tensors(directory)
        if found := next((name for name in names if name in tensors.stored), None):
            return tensors.read(found)
        some = ", ".join(list(tensors.stored)[:3])
        raise UserError(f"{directory} has no tensor {names[0]}, but {some} ...; needs {self.files}")

    def _vocabulary(self, directory: Path) -> Path:
        for name in self.vocabularies:
            if (directory / name).is_file():
                if not (directory / name).stat().st_size:
                    raise UserError(f"{directory / name} is empty; needs {self.files}")
                return directory / name
        raise UserError(f"{directory} has neither {' nor '.join(self.vocabularies)}; needs {self.files}")


def check_tokens(tokenizer: Any, tokens_BL: Tensor, size: int) -> None:
    """Raises UserError for tokens that a network of `size` embeddings lacks, as some lack T5's <extra_id_0>."""
    if tokens_BL.numel() and (most := int(tokens_BL.max())) >= size:
        token = tokenizer.convert_ids_to_tokens(most)
        raise UserError(f"a text has {token!r}, token {most:,} of a text encoder that knows {size:,}: leave it out")


def settings_of(encoder: type) -> list[str]:
    """Names of an encoder's settings in config.json: the fields in its repr, without tensors and loaded networks."""
    return [field.name for field in fields(encoder) if field.repr]


def save_settings(
    encoder: Any, directory: str | os.PathLike, kind: str, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Writes the settings, with the name of the model (its weights are not copied), and these tensors."""
    settings = {name: getattr(encoder, name) for name in settings_of(type(encoder))}
    parts.write_component(directory, {"type": kind, **settings, "fingerprint": encoder.fingerprint()}, tensors or {})


def load_settings(encoder: type[AnyEncoder], directory: str | os.PathLike, **more: Any) -> AnyEncoder:
    """The inverse of `save_settings`; `more` are fields that it does not write.

    Raises:
        UserError: if config.json is missing or has other settings.
    """
    settings = parts.read_settings(directory, [*settings_of(encoder), "fingerprint"])
    fingerprint = settings.pop("fingerprint")
    return encoder(**settings, **more, _loaded={"fingerprint": fingerprint})


TextTensors = Mapping[str, Tensor]
"""Tensors of one text: its `features`, and others that the encoder returns."""


class FeatureFiles:
    """A cache directory that several processes may read and write at once."""

    def __init__(self, directory: str | os.PathLike, fingerprint: str) -> None:
        self._directory = Path(directory) / fingerprint

    def read(self, text: str) -> TextTensors | None:
        """Return the cached tensors of a text; None if there are none, or their file is damaged."""
        try:
            tensors = load_file(self._path(text))
            return tensors if "features" in tensors else None
        except (FileNotFoundError, SafetensorError):
            return None

    def write(self, text: str, tensors: TextTensors) -> None:
        with atomic_path(self._path(text)) as path:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)

    def _path(self, text: str) -> Path:
        name = hashlib.sha256(text.encode()).hexdigest()
        return self._directory / name[:2] / f"{name}.safetensors"


def cached_or_computed(
    texts: Iterable[str], compute: Callable[[Sequence[str]], Sequence[TextTensors]], files: FeatureFiles | None
) -> dict[str, TextTensors]:
    """Return the tensors of each text; those not cached in `files` are computed in one call and stored there."""
    found = {text: files and files.read(text) for text in texts}
    missing = [text for text, tensors in found.items() if tensors is None]
    for text, tensors in zip(missing, compute(missing), strict=True):
        found[text] = tensors
        if files is not None:
            files.write(text, tensors)
    return found
