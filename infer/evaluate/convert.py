"""`megadit evaluate convert`: converts public weights of Inception and I3D to extractors of tensors alone.

    megadit evaluate convert inception pt_inception-2015-12-05-6726825d.pth inception.safetensors
    megadit evaluate convert i3d i3d_pretrained_400.pt i3d.safetensors

Files are pickles (`weights_only`), TorchScript archives (whose code is not read) or safetensors.
"""

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from megadit.infer.evaluate.extractors.files import ARGUMENTS, KIND, KINDS
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path
from megadit.models.storage.tensor_archive import read_archive
from megadit.models.storage.tensor_source import TensorSource
from megadit.models.storage.wrapped import open_tensor_file

CONVERTED = {"inception": ("fc.", "AuxLogits."), "i3d": ()}
"""Kind -> prefixes of tensors that do not affect features."""
COUNTER = "num_batches_tracked"
"""Suffix of batch normalization's training counter, which some files have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertOptions:
    kind: str = setting(help="network of the weights", positional=True, choices=tuple(CONVERTED))
    source: Path = setting(help="published file of weights", positional=True, metavar="FILE")
    out: Path = setting(help=".safetensors file to write", positional=True, metavar="OUT")


@command(
    ConvertOptions,
    prog="megadit evaluate convert",
    description="Converts public weights to an extractor of `megadit evaluate`.",
)
def main(options: ConvertOptions) -> None:
    """Runs `megadit evaluate convert`; returns its exit code."""
    convert(options.kind, options.source, options.out)
    print(options.out)


def convert(kind: str, source: Path, out: Path, *, narrow: int = 1) -> None:
    """Writes the extractor; `narrow` divides the network's channels, for tests. Raises UserError if the file's tensors
    are not those of the network."""
    if out.suffix != ".safetensors":
        raise UserError(f"{out}: use a name that ends in .safetensors")
    found = _opened(source)
    names = {name.removeprefix("module."): name for name in found.stored}
    with torch.device("meta"):
        network = KINDS[kind].network(narrow=narrow)
    expected = {name: tensor for name, tensor in network.state_dict().items() if not name.endswith(COUNTER)}
    others = [
        name for name in names if name not in expected and not name.startswith(CONVERTED[kind]) and COUNTER not in name
    ]
    wrong = [name for name, tensor in expected.items() if found.shapes.get(names.get(name, "")) != tuple(tensor.shape)]
    if wrong or others:
        raise UserError(
            f"{source} is not {kind}: {len(wrong)} tensors are missing or of another shape ({', '.join(wrong[:3])}), "
            f"{len(others)} are not known ({', '.join(others[:3])})"
        )
    tensors = {name: found.read(names[name]).float().contiguous() for name in expected}
    counters = {name: torch.zeros((), dtype=torch.int64) for name in network.state_dict() if name.endswith(COUNTER)}
    with atomic_path(out) as temporary:
        metadata = {KIND: kind, ARGUMENTS: json.dumps({"narrow": narrow})}
        save_file(tensors | counters, temporary, metadata=metadata)


def _opened(path: Path) -> TensorSource:
    if not path.is_file():
        raise UserError(f"{path} does not exist")
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if any("/code/" in name for name in archive.namelist()):
                return read_archive(path)
    return open_tensor_file(path)
