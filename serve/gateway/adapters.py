"""Adapters that keys upload: files in the folder from which Triton reads them.

NAME.safetensors, NAME/                     the service's own, for every key
NAME.KEY.NUMBER.safetensors                 of one key; each upload has a number of its own, so that a job which waits
                                            for an adapter never gets another one of the same name

The folder is the only record: gateways that share it have the same adapters.
"""

import fcntl
import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from megadit.models.lora.named import OF_A_KEY, SUFFIX, adapters_in, check_name, of_expert, shown_name, split_expert
from megadit.models.shared.cli.command import python_module
from megadit.models.shared.errors import UserError
from megadit.serve.contract import VideoRequest
from megadit.serve.events import AdapterNotFoundError
from megadit.serve.gateway.errors import ApiError, unavailable
from megadit.serve.gateway.store.keys import Key
from megadit.serve.service_info import AdapterInfo

_LONGEST_NAME = 100
_UNFINISHED = ".upload."
_SECONDS_OF_YOUTH = 600.0
_SECONDS_TO_CHECK = 120.0
_CHECK = "megadit.infer.commands.check_adapter"
"""A module that needs torch, which this process does not import."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredAdapter:
    name: str
    """Name in the requests of its key."""
    stored: str
    """Name at Triton."""
    key_id: str | None
    """Id of the key that owns it; None: for every key."""
    num_bytes: int
    created_at: float
    """Wall-clock seconds since 1970."""


class Adapters:
    """The adapters of a folder, or, without one, those that the service was built with."""

    def __init__(self, folder: str) -> None:
        """`folder`: "" means none. Raises UserError if there is no such folder."""
        self._folder = Path(folder) if folder else None
        if self._folder is not None and not self._folder.is_dir():
            raise UserError(f"--adapters={folder} is not a folder; give that of `megadit serve build-repository`")

    def all(self, key: Key, info: AdapterInfo | None) -> list[StoredAdapter]:
        """Return the adapters that a key may use: its own, and the service's of other names."""
        if self._folder is None:
            names = () if info is None else info.names
            return [StoredAdapter(name=name, stored=name, key_id=None, num_bytes=0, created_at=0) for name in names]
        found = [each for each in self._found() if each.key_id in (None, key.id)]
        chosen = {each.name: each for each in sorted(found, key=lambda each: each.key_id is not None)}
        return [chosen[name] for name in sorted(chosen)]

    def resolved(self, key: Key, request: VideoRequest, info: AdapterInfo | None) -> VideoRequest:
        """The request with Triton's names of its adapters. Raises AdapterNotFoundError for an adapter that this key
        does not have; UserError for an invalid name."""
        scales = request.adapter_scales()
        if not scales:
            return request
        known = {each.name: each.stored for each in self.all(key, info)}
        resolved = []
        for asked, scale in scales.items():
            expert, name = split_expert(asked)
            if name not in known:
                raise AdapterNotFoundError(f"there is no adapter {name!r}; `GET /v1/adapters` lists them")
            resolved.append(f"{of_expert(expert, known[name])}:{scale!r}")
        return replace(request, adapters=tuple(resolved))

    def put(self, key: Key, name: str, file: IO[bytes], info: AdapterInfo) -> StoredAdapter:
        """Stores an uploaded file, after checking that it is an adapter of this service's network. Raises ApiError for
        an invalid file, a name that is in use, and more than the key's quota."""
        folder = self._writable()
        try:
            check_name(name)
        except UserError as error:
            raise ApiError(400, "invalid_request", str(error), param="name") from None
        if len(name) > _LONGEST_NAME or OF_A_KEY.fullmatch(name):
            raise ApiError(400, "invalid_request", f"choose a name of up to {_LONGEST_NAME} characters", param="name")
        file.seek(0, 2)
        size = file.tell()
        file.seek(0)
        self._check_quota(key, name, size)
        stored = f"{name}.{key.id}.{secrets.token_hex(8)}"
        temporary = folder / f"{_UNFINISHED}{stored}{SUFFIX}"
        try:
            with open(temporary, "xb", opener=_for_its_owner) as copy:
                shutil.copyfileobj(file, copy)
            self._check_file(temporary, info)
            with self._alone():
                self._check_quota(key, name, size)
                temporary.rename(folder / f"{stored}{SUFFIX}")
        except OSError as error:
            raise unavailable("storage_unavailable", f"the adapter cannot be kept: {error.strerror}") from None
        finally:
            temporary.unlink(missing_ok=True)
        return next(each for each in self._found() if each.stored == stored)

    def remove(self, key: Key, name: str) -> None:
        """Removes an adapter of the key; a job that waits for it fails. Raises ApiError if the key has no adapter of
        this name."""
        folder = self._writable()
        own = next((each for each in self._found() if (each.name, each.key_id) == (name, key.id)), None)
        if own is None:
            raise ApiError(404, "not_found", f"this key has no adapter {name[:_LONGEST_NAME]!r}", param="name")
        (folder / f"{own.stored}{SUFFIX}").unlink(missing_ok=True)

    def sweep(self, is_revoked: Callable[[str], bool]) -> None:
        """Removes the adapters of revoked keys, and incomplete files of crashes."""
        if self._folder is None:
            return
        for each in self._found():
            if each.key_id is not None and is_revoked(each.key_id):
                (self._folder / f"{each.stored}{SUFFIX}").unlink(missing_ok=True)
        for path in self._folder.glob(f"{_UNFINISHED}*"):
            if time.time() - path.stat().st_mtime > _SECONDS_OF_YOUTH:
                path.unlink(missing_ok=True)

    def _found(self) -> Iterator[StoredAdapter]:
        for stored in adapters_in(self._folder):
            path = self._folder / f"{stored}{SUFFIX}"
            path = path if path.exists() else self._folder / stored
            try:
                about = path.stat()
            except FileNotFoundError:  # removed just now
                continue
            of_key = OF_A_KEY.fullmatch(stored)
            yield StoredAdapter(
                name=shown_name(stored),
                stored=stored,
                key_id=of_key["key"] if of_key else None,
                num_bytes=sum(each.stat().st_size for each in path.iterdir()) if path.is_dir() else about.st_size,
                created_at=about.st_mtime,
            )

    def _writable(self) -> Path:
        if self._folder is None:
            raise ApiError(400, "unsupported", "this gateway stores no adapters: it was started without --adapters")
        return self._folder

    def _check_quota(self, key: Key, name: str, size: int) -> None:
        own = [each for each in self._found() if each.key_id == key.id]
        if any(each.name == name for each in own):
            raise ApiError(409, "adapter_exists", f"this key has an adapter {name!r}; delete it first", param="name")
        if len(own) >= key.limits.max_adapters:
            raise ApiError(429, "insufficient_quota", f"this key keeps {len(own)} adapters, as many as it may")
        num_bytes = size + sum(each.num_bytes for each in own)
        if num_bytes > key.limits.max_adapter_bytes:
            most = key.limits.max_adapter_bytes
            message = f"the adapters of this key would have {num_bytes:,} bytes; it may keep {most:,}"
            raise ApiError(429, "insufficient_quota", message)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Context in which no other gateway of this folder checks quotas."""
        with (self._folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _check_file(self, path: Path, info: AdapterInfo) -> None:
        asked = {"network": info.network, "base": info.base, "slots": info.slots, "max_rank": info.max_rank}
        command, settings = python_module(_CHECK, str(path)), {"text": True, "timeout": _SECONDS_TO_CHECK}
        try:
            checked = subprocess.run(command, input=json.dumps(asked), capture_output=True, **settings)
            problem = json.loads(checked.stdout)["error"]
        except (subprocess.TimeoutExpired, json.JSONDecodeError):
            problem = "the file cannot be read: its reader crashed or took too long"
        if problem is not None:
            raise ApiError(400, "invalid_adapter", problem[:500], param="file")


def _for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
