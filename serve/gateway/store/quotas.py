"""Quotas of a key: active videos, videos per day, stored bytes.

Jobs stay in the store for at least a day, for counting.
"""

from sqlalchemy import Connection, func, select

from megadit.serve.gateway.store.database import JOBS
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
