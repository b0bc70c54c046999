"""Loads extractors from disk. Weights are safetensors: no code runs, nothing is downloaded.

| path                                                                  | extractors                         |
|-----------------------------------------------------------------------|------------------------------------|
| a .safetensors file of `megadit evaluate convert`, or the demo's      | the row of `KINDS` that it names   |
| a folder as transformers saves it (config.json, model.safetensors)     | CLIP; VideoMAE                     |
| a bundle (megadit.json)                                                | CLIP; ViT of pictures, or of clips |
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from megadit.infer.evaluate.extractors.base import Extractor
from megadit.infer.evaluate.extractors.bundles import open_bundle_extractor
from megadit.infer.evaluate.extractors.digits import DigitClips, DigitPictures, DigitReader
from megadit.infer.evaluate.extractors.i3d import I3D, I3DClips
from megadit.infer.evaluate.extractors.inception import Inception, InceptionPictures
from megadit.infer.evaluate.extractors.published import open_published
from megadit.models.shared.documents import check_tensor_header, parse_json
from megadit.models.shared.errors import UserError, choose_one
from megadit.models.shared.files import sha256_of
from megadit.models.storage.manifest import MANIFEST_FILE

KIND = "extractor"
"""Key of a file's metadata that names its row in `KINDS`."""
ARGUMENTS = "arguments"
"""Key of a file's metadata with the arguments of its network, as JSON."""


class Row:
    """A network, and its extractors: (network, fingerprint, device) -> extractor."""

    def __init__(self, network: type[nn.Module], *extractors: Callable[..., Extractor]) -> None:
        self.network, self.extractors = network, extractors


KINDS: dict[str, Row] = {
    "digits": Row(DigitReader, DigitPictures, DigitClips),
    "inception": Row(Inception, InceptionPictures),
    "i3d": Row(I3D, I3DClips),
}


def open_extractors(path: Path, device: torch.device) -> list[Extractor]:
    """Open the extractors of a file or folder of weights.

    Raises:
        UserError: if the path holds no extractor, or its tensors do not fit the network.
    """
    if (path / MANIFEST_FILE).is_file():
        return [open_bundle_extractor(path, device)]
    if path.is_dir():
        return open_published(path, device)
    kind, arguments, tensors = _read(path)
    row = KINDS[choose_one(kind, KINDS, f"{path} is an extractor of the unknown kind {kind!r}")]
    try:
        network = row.network(**arguments)
        network.load_state_dict(tensors)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{path} does not hold the weights of {kind}: {str(error).splitlines()[0]}") from None
    network = network.to(device).eval().requires_grad_(False)
    return [make(network, sha256_of(path)[:12]) for make in row.extractors]


def _read(path: Path) -> tuple[str, Mapping[str, int], dict[str, Tensor]]:
    if not path.is_file():
        raise UserError(
            f"there are no weights at {path}: give a file of `megadit evaluate convert`, a folder of CLIP or VideoMAE "
            "as transformers saves it, the bundle of a CLIP or a ViT, or classifier.safetensors of `megadit demo`"
        )
    try:
        with open(path, "rb") as file:
            check_tensor_header(file.read(8), str(path))
        with safe_open(path, framework="pt") as stored:
            about = stored.metadata() or {}
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}
        return about.get(KIND, ""), parse_json(about.get(ARGUMENTS, "{}"), str(path)), tensors
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}") from None
