"""Text features kept on disk: one file for each text, under a name made of the encoder and the text."""

import hashlib
import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megadit.models.shared.files import atomic_path


class FeatureFiles:
    """A directory that several processes may read and write at once."""

    def __init__(self, directory: str | os.PathLike, fingerprint: str) -> None:
        self._directory = Path(directory) / fingerprint

    def read(self, text: str) -> Tensor | None:
        """The features [L, E] of this text, or None where they are not kept; a damaged file counts as none."""
        try:
            return load_file(self._path(text))["features"]
        except (FileNotFoundError, SafetensorError, KeyError):
            return None

    def write(self, text: str, feature_LE: Tensor) -> None:
        with atomic_path(self._path(text)) as path:
            save_file({"features": feature_LE.contiguous()}, path)

    def _path(self, text: str) -> Path:
        name = hashlib.sha256(text.encode()).hexdigest()
        return self._directory / name[:2] / f"{name}.safetensors"
