"""Finds the weight files of a network in a folder: diffusers' and transformers' names, shards and variants.

STEM.safetensors               STEM.safetensors.index.json          and shards
STEM.bin                       STEM.bin.index.json                  pickled; only tensors are read
STEM.fp16.safetensors          STEM.safetensors.index.fp16.json     a variant, if it is the only one
"""

import re
from pathlib import Path

from torch import Tensor

from megadit.models.shared.errors import UserError
from megadit.models.shared.files import inner_path, is_inner_name, is_possible_name, read_json
from megadit.models.storage.tensor_source import TensorSource, from_state_dict, open_safetensors
from megadit.models.storage.wrapped import open_tensor_file

KINDS = ("safetensors", "bin")
_FORMS = (
    r"(?P<stem>{stems})\.(?P<kind>{kinds})\.index(\.(?P<variant>\w+))?\.json",
    r"(?P<stem>{stems})(\.(?P<variant>\w+))?\.(?P<kind>{kinds})",
)
"""An index of several files, and a single file."""


def weight_files(directory: Path, *stems: str) -> list[Path]:
    """The weight files in a folder whose names begin with one of `stems`; [] if there are none.

    Raises:
        UserError: for several variants without the plain one, and for an index of files elsewhere.
    """
    found: dict[tuple[str, int, int], Path] = {}
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        for place, form in enumerate(_FORMS):
            match = re.fullmatch(form.format(stems="|".join(map(re.escape, stems)), kinds="|".join(KINDS)), path.name)
            if match and path.is_file():
                found.setdefault((match["variant"] or "", KINDS.index(match["kind"]), place), path)
    variants = {variant for variant, _, _ in found}
    if "" not in variants and len(variants) > 1:
        names = ", ".join(sorted(path.name for path in found.values()))
        raise UserError(f"{directory} has several variants of its weights ({names}): keep one of them there")
    if not found:
        return []
    chosen = found[min(found)]
    if chosen.suffix != ".json":
        return [chosen]
    values = read_json(chosen)
    places = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise UserError(f"{chosen} is no index of weights: it has no weight_map of names")
    return sorted({_shard(directory, name) for name in places.values()})


def _shard(directory: Path, name: str) -> Path:
    """A file that an index lists, or else the one of its name beside the index, which may be of another folder."""
    is_there = is_inner_name(name) and (directory / name).is_file()
    sibling = directory / Path(name).name
    is_moved = not is_there and is_possible_name(name) and ".." not in Path(name).parts and sibling.is_file()
    return sibling if is_moved else inner_path(directory, name, follow_links=True)


def open_weights(paths: list[Path]) -> TensorSource:
    """The tensors of these files, the shards of one checkpoint.

    Raises:
        UserError: if a file is missing, damaged or contains other objects than tensors.
    """
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path} does not exist, although the index in its folder lists it")
    if len(paths) == 1:
        return open_tensor_file(paths[0])
    if all(path.suffix == ".safetensors" for path in paths):
        return open_safetensors(*paths)
    together: dict[str, Tensor] = {}
    for part in map(open_tensor_file, paths):
        if twice := next(filter(together.__contains__, part.stored), None):
            raise UserError(f"{part.label} holds the tensor {twice}, as does a file before it; keep one of them")
        together |= part.state_dict()
    return from_state_dict(together, f"{paths[0].parent} ({len(paths)} files)")
