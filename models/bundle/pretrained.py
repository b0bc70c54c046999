"""Networks of published encoders by `transformers`: the library, and a look at files before it reads them."""

from importlib.util import find_spec
from pathlib import Path

from megadit.models.bundle.tensor_source import check_archive_file
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import inner_path, read_json


def check_weights(directory: Path) -> None:
    """Raises UserError for files of weights that lie elsewhere, or are larger than they seem.

    transformers runs no code of theirs.
    """
    files = set(directory.glob("*.bin"))
    for index in directory.glob("*.index.json"):
        names = read_json(index)["weight_map"].values()
        files |= {inner_path(directory, name, follow_links=True) for name in set(names)}
    for path in sorted(file for file in files if file.suffix == ".bin" and file.is_file()):
        check_archive_file(path)


PRETRAINED = {"local_files_only": True, "trust_remote_code": False}
"""To every `from_pretrained` of transformers: by itself it asks, on standard input, whether to run a folder's code."""


def transformers_library(what: str):
    """The library, which `what` needs.

    Raises:
        UserError: if it is not installed.
    """
    require("transformers", what)
    import transformers

    return transformers


def require(library: str, what: str) -> None:
    """Raises UserError where a library is not installed that `what` needs."""
    if find_spec(library) is None:
        raise UserError(f"{what} needs the library {library}: pip install 'megadit[t5]' {library}")
