"""Quotas of a key: active videos, videos per day, stored bytes.

Jobs stay in the store for at least a day, for counting.
"""

import threading
from collections import Counter

from sqlalchemy import Connection, func, select, update
from sqlalchemy.exc import SQLAlchemyError

from megadit.serve.gateway.logs import log
from megadit.serve.gateway.store.clock import store_seconds
from megadit.serve.gateway.store.database import JOBS, KEYS, Database, in_a_line
from megadit.serve.gateway.store.jobs import COMPLETED, IN_PROGRESS, QUEUED
from megadit.serve.gateway.store.keys import Key

DAY = 86_400.0
"""Seconds."""


class TooManyActiveError(Exception):
    """The key has too many active jobs."""


class QuotaExceededError(Exception):
    """The key has reached its videos per day, or its stored bytes."""


def check_quotas(connection: Connection, key: Key, now: float, num_bytes: int) -> None:
    """Raises TooManyActiveError or QuotaExceededError for one more video with `num_bytes` of files."""
    active = select(func.count()).where(JOBS.c.key_id == key.id, JOBS.c.status.in_((QUEUED, IN_PROGRESS)))
    if connection.execute(active).scalar_one() >= key.limits.max_active:
        raise TooManyActiveError(f"this key may have {key.limits.max_active} videos waiting or running at once")
    ticks = select(JOBS.c.created_tick).where(JOBS.c.key_id == key.id).order_by(JOBS.c.number.desc())
    so_many_ago = connection.execute(ticks.offset(key.limits.videos_per_day - 1).limit(1)).scalar_one_or_none()
    if so_many_ago is not None and so_many_ago > now - DAY:
        raise QuotaExceededError(f"this key may ask for {key.limits.videos_per_day} videos a day")
    kept = select(func.coalesce(func.sum(JOBS.c.num_bytes), 0)).where(
        JOBS.c.key_id == key.id, JOBS.c.status == COMPLETED, JOBS.c.num_bytes > 0
    )
    conditioning = select(func.coalesce(func.sum(JOBS.c.conditioning_bytes), 0)).where(
        JOBS.c.conditioning_name.is_not(None), JOBS.c.key_id == key.id
    )
    cached_bytes = connection.execute(kept).scalar_one() + connection.execute(conditioning).scalar_one()
    if cached_bytes + max(1, num_bytes) > key.limits.max_stored_bytes:
        most = f"{key.limits.max_stored_bytes:,} bytes"
        raise QuotaExceededError(
            f"this key may keep {most} of videos and files: delete some, or wait until they expire"
        )


# Rate limits of keys over all gateways of a store: a token bucket for each key, in the store.
# A gateway takes the tokens of one second at once, so that a fast key does not need a write for each request. All
# gateways share the bucket, so that the limit holds for them together.


class Rates:
    """One gateway's tokens from the shared buckets."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._held: Counter[str] = Counter()
        """Key -> unused tokens that were taken from its bucket."""
        self._lock = threading.Lock()

    def take(self, key_id: str, per_minute: int) -> float:
        """Count a request and return 0 if the key may make it now; else the seconds until it may.

        After an idle minute a key may make `per_minute` requests at once. While the store cannot be written (a full
        disk), nothing is counted: finished videos are still served, and new ones are not accepted anyway.
        """
        if self._take_token(key_id):
            return 0.0
        try:
            taken, seconds = self._fetch(key_id, per_minute)
        except SQLAlchemyError as error:
            log("store failed", reason=in_a_line(error))
            return 0.0
        if taken:
            with self._lock:
                self._held[key_id] += taken - 1
        return seconds

    def _take_token(self, key_id: str) -> bool:
        with self._lock:
            is_held = self._held[key_id] > 0
            self._held[key_id] -= is_held
        return is_held

    def _fetch(self, key_id: str, per_minute: int) -> tuple[int, float]:
        """Tokens taken from the bucket, and the seconds until the next one if there was none."""
        with self._database.writing() as connection:
            bucket = select(KEYS.c.tokens, KEYS.c.tokens_tick).where(KEYS.c.id == key_id).with_for_update()
            tokens, since = connection.execute(bucket).one()
            now = store_seconds(connection)
            tokens = per_minute if tokens is None else min(per_minute, tokens + (now - since) * per_minute / 60)
            if tokens < 1:
                return 0, (1 - tokens) * 60 / per_minute
            taken = min(int(tokens), max(1, per_minute // 60))
            rest = {"tokens": tokens - taken, "tokens_tick": now}
            connection.execute(update(KEYS).where(KEYS.c.id == key_id).values(**rest))
        return taken, 0.0
