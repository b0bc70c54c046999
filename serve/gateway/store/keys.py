"""API keys: created, stored as hashes, and checked in constant time.

A key is `mdk_ID_SECRET`. The id finds its row and is public; the secret has 256 random bits, so that one SHA-256 of it
is as safe as a slow password hash.
"""

import base64
import hashlib
import hmac
import json
import re
import secrets
import time
from dataclasses import asdict, dataclass, fields
from urllib.parse import urlsplit

from sqlalchemy import Row, bindparam, delete, func, select, update

from megadit.models.shared.addresses import is_address, is_link_local
from megadit.models.shared.cli.setting import check_settings, setting
from megadit.models.shared.errors import UserError
from megadit.serve.gateway.store.clock import store_seconds
from megadit.serve.gateway.store.database import JOBS, KEYS, PREVIEWS, Database
from megadit.serve.gateway.store.jobs import IN_PROGRESS, QUEUED, failure

_FORM = re.compile(r"mdk_([0-9a-f]{12})_([0-9A-Za-z_-]{43})")
_WEB = re.compile(r"https?://[^\s/]+\S*")
_NOBODY = "0" * 64
"""Hash that unknown keys are compared with; no text is known to have it."""
_WITH_ID = select(KEYS).where(KEYS.c.id == bindparam("key_id"))


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyLimits:
    """Limits of one key; requests beyond them get 429."""

    requests_per_minute: int = setting(600, "requests in a minute (default: {default})", low=1, metavar="N")
    max_active: int = setting(64, "videos waiting or running (default: {default})", low=1, metavar="N")
    videos_per_day: int = setting(10_000, "videos in a day (default: {default})", low=1, metavar="N")
    max_stored_bytes: int = setting(10 << 30, "bytes of finished videos (default: 10 GiB)", low=1, metavar="N")

    max_upload_bytes: int = setting(48 << 20, "bytes of a request with files (default: 48 MiB)", low=1, metavar="N")

    max_adapters: int = setting(16, "adapters that the key uploaded (default: {default})", low=0, metavar="N")
    max_adapter_bytes: int = setting(1 << 30, "total bytes of these adapters (default: 1 GiB)", low=1, metavar="N")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """A key's record, without the secret of the key."""

    id: str
    name: str
    limits: KeyLimits
    webhook_url: str | None = None
    webhook_secret: str | None = None
    """Signs webhooks to `webhook_url`, and therefore cannot be stored as a hash."""
    is_revoked: bool = False


class KeyRing:
    """The keys of a store."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, name: str, *, limits: KeyLimits | None = None, webhook_url: str | None = None) -> tuple[str, Key]:
        """Create a key; returns its text, which is not stored, and its record. Raises UserError for a webhook that is
        not an http or https address."""
        if webhook_url is not None and not _is_webhook(webhook_url):
            raise UserError(f"{webhook_url!r} is not an address for a webhook; give https://HOST/PATH")
        key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
        key = Key(
            id=key_id,
            name=name,
            limits=limits or KeyLimits(),
            webhook_url=webhook_url,
            webhook_secret=f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}" if webhook_url else None,
        )
        with self._database.writing() as connection:
            latest = connection.execute(select(func.coalesce(func.max(KEYS.c.turn), 0))).scalar_one()
            connection.execute(
                KEYS.insert().values(
                    id=key_id,
                    name=name,
                    hash=_hash(secret),
                    limits=json.dumps(asdict(key.limits)),
                    webhook_url=key.webhook_url,
                    webhook_secret=key.webhook_secret,
                    turn=latest,
                    created_at=time.time(),
                )
            )
        return f"mdk_{key_id}_{secret}", key

    def revoke(self, key_id: str) -> None:
        """Revokes a key: its jobs fail, on any gateway, and their streams end. Raises UserError if there is no such
        key."""
        with self._database.writing() as connection:
            changed = connection.execute(update(KEYS).where(KEYS.c.id == key_id).values(revoked_at=time.time()))
            if not changed.rowcount:
                raise UserError(f"there is no key {key_id!r}; `megadit serve keys list` shows them")
            active = (JOBS.c.key_id == key_id) & JOBS.c.status.in_((QUEUED, IN_PROGRESS))
            connection.execute(delete(PREVIEWS).where(PREVIEWS.c.number.in_(select(JOBS.c.number).where(active))))
            ended = failure(store_seconds(connection), "key_revoked", "its key was revoked")
            connection.execute(update(JOBS).where(active).values(**ended))

    def all(self) -> list[Key]:
        with self._database.reading() as connection:
            return [_key(row) for row in connection.execute(select(KEYS).order_by(KEYS.c.created_at))]

    def find(self, key_id: str) -> Key | None:
        with self._database.reading() as connection:
            row = connection.execute(_WITH_ID, {"key_id": key_id}).one_or_none()
        return None if row is None else _key(row)

    def check(self, text: str) -> Key | None:
        """The key of `text`, or None; malformed, unknown and wrong keys all take one hash and one comparison."""
        parts = _FORM.fullmatch(text)
        key_id, secret = parts.groups() if parts else ("", text)
        with self._database.reading() as connection:
            row = connection.execute(_WITH_ID, {"key_id": key_id}).one_or_none()
        is_right = hmac.compare_digest(_hash(secret), _NOBODY if row is None else row.hash)
        return _key(row) if is_right and row is not None and row.revoked_at is None else None


def _key(row: Row) -> Key:
    known = {field.name for field in fields(KeyLimits)}
    limits = {name: value for name, value in json.loads(row.limits).items() if name in known}
    return Key(
        id=row.id,
        name=row.name,
        limits=KeyLimits(**limits),
        webhook_url=row.webhook_url,
        webhook_secret=row.webhook_secret,
        is_revoked=row.revoked_at is not None,
    )


def _is_webhook(url: str) -> bool:
    """Whether it is an http URL with a host; cloud metadata addresses are not allowed."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        return bool(_WEB.fullmatch(url) and host and parts.port != 0) and not (is_address(host) and is_link_local(host))
    except ValueError:  # the port is not one
        return False


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()
