"""A cache of text features on disk: one file for each text and encoder."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megadit.models.shared.files import atomic_path

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
