"""Names of published models, and where their files are on this machine.

This module downloads nothing: `megadit pull` and the hub's own `hf download` do.
"""

import os
from pathlib import Path

from megadit.models.shared.errors import UserError


def local_directory(name: str, kind: str, files: str) -> Path:
    """The directory of `name`: a path, or a model in the hub's cache.

    Raises:
        UserError: if it is neither; says what to download and where to put it.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if cached := cached_model(name):
        return cached
    looks_like_id = name.count("/") == 1 and not name.startswith((".", "/"))
    if not looks_like_id:
        raise UserError(f"the {kind} {name} does not exist: expected a directory with {files}")
    offline = " (on a machine with a network: HF_HUB_OFFLINE is set here)" if _is_offline() else ""
    raise UserError(
        f"the {kind} {name} is not on this machine: run `hf download {name}`{offline}, or put {files} into a "
        f"directory and give that"
    )


def cached_model(name: str) -> Path | None:
    """The newest snapshot in the hub's cache; None without one, or without the hub's library."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ModuleNotFoundError:
        return None
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
