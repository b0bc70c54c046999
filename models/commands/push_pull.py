"""`megadit push` and `megadit pull`: bundles and adapters to and from a hub, or any store that fsspec reaches.

    megadit push runs/digits/bundle s3://models/digits
    megadit pull hf://somebody/digits digits
    megadit push adapter hf://somebody/subject

A hub's model is `hf://OWNER/NAME`; other places are URLs of fsspec (file://, s3://, gs://, memory:// ...). The manifest
is sent last and checked first, so that an interrupted copy is not valid.
"""

import glob
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megadit.models.bundle import Bundle
from megadit.models.convert.adapters.files import check_adapter, is_adapter
from megadit.models.shared.addresses import check_no_secret
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import MANIFEST_FILE, atomic_directory, check_replaceable, inner_path, read_json
from megadit.models.shared.outside import check_own
from megadit.models.shared.progress import tracked

HUB = "hf://"
_URL = "hf://OWNER/NAME, or a URL of fsspec such as s3://BUCKET/PATH"


@dataclass(frozen=True, kw_only=True, slots=True)
class PushOptions:
    bundle: Path = setting(help="a bundle, or the folder of an adapter", positional=True)
    url: str = setting(help=_URL, positional=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class PullOptions:
    url: str = setting(help=_URL, positional=True)
    out: Path = setting(help="folder to write; a bundle or adapter there is replaced", positional=True)


@command(PushOptions, prog="megadit push", description="Copies a bundle or an adapter to a hub or a store.")
def push(options: PushOptions) -> None:
    """Runs `megadit push`; returns its exit code."""
    push_bundle(options.bundle, options.url)
    print(options.url)


@command(PullOptions, prog="megadit pull", description="Copies a bundle or an adapter from a hub or a store.")
def pull(options: PullOptions) -> None:
    """Runs `megadit pull`; returns its exit code."""
    pull_bundle(options.url, options.out)
    print(options.out)


def push_bundle(bundle: str | os.PathLike, url: str) -> None:
    """Sends a bundle or an adapter, after a check that it is complete.

    Raises:
        UserError: if it is incomplete, contains links out of it, or the destination cannot be written to.
    """
    path = Path(bundle)
    check_own(path)
    _check_whole(path)
    files = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    files.sort(key=lambda name: name == MANIFEST_FILE)
    if url.startswith(HUB):
        _push_to_hub(path, files, url.removeprefix(HUB))
        return
    store, root = _store(url)
    try:
        for name in tracked(files, "sending"):
            store.makedirs(os.path.dirname(f"{root}/{name}"), exist_ok=True)
            store.put_file(str(path / name), f"{root}/{name}")
    except Exception as error:  # each store has its own exceptions
        raise UserError(f"{url} cannot be written to: {error}") from error


def pull_bundle(url: str, out: str | os.PathLike) -> None:
    """Fetches a bundle or an adapter; it appears at `out` complete, with correct checksums, or not at all.

    Files that the manifest does not list (a model card, foreign files) are not fetched.

    Raises:
        UserError: if there is none, it is damaged, or `out` holds something else.
    """
    out = Path(out)
    if not is_adapter(out):
        check_replaceable(out)
    with atomic_directory(out) as directory:
        if url.startswith(HUB):
            _pull_from_hub(url.removeprefix(HUB), directory)
        else:
            _pull_from_store(url, directory)
        _check_whole(directory)


def _check_whole(path: Path) -> None:
    """Raises UserError if `path` is neither a complete bundle nor a complete adapter of ours."""
    if is_adapter(path):
        check_adapter(path)
    else:
        Bundle.open(path, verify=True)


def _pull_from_store(url: str, directory: Path) -> None:
    store, root = _store(url)
    if not store.exists(f"{root}/{MANIFEST_FILE}"):
        raise UserError(f"{url} is neither a bundle nor an adapter: it has no {MANIFEST_FILE}")
    try:
        store.get_file(f"{root}/{MANIFEST_FILE}", str(directory / MANIFEST_FILE))
        names = _listed(directory)
        for name in tracked(names, "fetching"):
            target = inner_path(directory, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            store.get_file(f"{root}/{name}", str(target))
    except UserError:
        raise
    except Exception as error:  # each store has its own exceptions
        raise UserError(f"{url} cannot be read: {error}") from error


def _listed(directory: Path) -> list[str]:
    """The files in a manifest, which is fetched first."""
    manifest = read_json(directory / MANIFEST_FILE)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict):
        raise UserError(f"{MANIFEST_FILE} lists no files: it is not the manifest of a bundle")
    return sorted(files)


def _store(url: str) -> tuple[Any, str]:
    """(filesystem, path within it)."""
    try:
        from fsspec.core import url_to_fs
    except ModuleNotFoundError:
        raise UserError(f"{url} needs the library fsspec: pip install fsspec") from None
    if "://" not in url:
        raise UserError(f"{url!r} is no URL: write hf://OWNER/NAME, or for instance s3://BUCKET/PATH")
    check_no_secret(url, "the place")
    try:
        return url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UserError(f"{url} cannot be reached: {error}") from error


def _hub() -> Any:
    try:
        import huggingface_hub
    except ModuleNotFoundError:
        raise UserError(f"{HUB}... needs the library huggingface_hub: pip install huggingface_hub") from None
    return huggingface_hub


def _push_to_hub(path: Path, files: list[str], name: str) -> None:
    hub = _hub()
    add = [hub.CommitOperationAdd(path_in_repo=file, path_or_fileobj=path / file) for file in files]
    try:
        hub.HfApi().create_repo(name, exist_ok=True)
        # a single, atomic commit; `upload_folder` may make several
        hub.HfApi().create_commit(name, add, commit_message="From megadit")
    except Exception as error:  # no network, no permission, no such owner
        raise UserError(f"{HUB}{name} cannot be written to: {_one_line(error)}") from error


def _pull_from_hub(name: str, directory: Path) -> None:
    hub = _hub()
    try:
        newest = hub.HfApi().model_info(name)
        is_there = any(file.rfilename == MANIFEST_FILE for file in newest.siblings)
        if is_there:
            hub.hf_hub_download(name, MANIFEST_FILE, revision=newest.sha, local_dir=directory)
            listed = [glob.escape(file) for file in _listed(directory)]
            hub.snapshot_download(name, revision=newest.sha, local_dir=directory, allow_patterns=listed)
            shutil.rmtree(directory / ".cache", ignore_errors=True)  # the library's own records
    except UserError:
        raise
    except Exception as error:  # no network, no such model
        raise UserError(f"{HUB}{name} cannot be read: {_one_line(error)}") from error
    if not is_there:
        raise UserError(f"{HUB}{name} is neither a bundle nor an adapter: it has no {MANIFEST_FILE}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
