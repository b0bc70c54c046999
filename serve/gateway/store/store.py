"""Jobs in a persistent store, which survives crashes of gateways.

A change of a running job checks its owner and attempt: a gateway that was declared dead and returns changes nothing.
"""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, bindparam, delete, func, select, update

from megadit.serve.gateway.store.clock import store_seconds
from megadit.serve.gateway.store.database import CLAIMING, JOBS, KEYS, PREVIEWS, Database
from megadit.serve.gateway.store.jobs import (
    COMPLETED,
    DELETED,
    FAILED,
    IN_PROGRESS,
    QUEUED,
    Job,
    NewJob,
    Result,
    failure,
    job_of,
    new_id,
)
from megadit.serve.gateway.store.keys import Key
from megadit.serve.gateway.store.quotas import DAY, check_quotas

_REQUESTED = "wanted"
"""State of a webhook that is still to be delivered."""
_AT_ONCE = 500

# Frequent statements, built once: building one takes longer than running it.
_WITH_ID = select(JOBS).where(
    JOBS.c.key_id == bindparam("of_key"), JOBS.c.status != DELETED, JOBS.c.id == bindparam("with_id")
)
_ANY_QUEUED = select(JOBS.c.number).where(JOBS.c.status == QUEUED).limit(1)
_IS_WAITING = and_(JOBS.c.status == QUEUED, JOBS.c.model.in_(bindparam("models", expanding=True)))
_RUNNING = (
    select(JOBS.c.key_id, func.count().label("jobs"))
    .where(JOBS.c.status == IN_PROGRESS)
    .group_by(JOBS.c.key_id)
    .subquery()
)
_TURNS = (
    select(KEYS.c.id)
    .where(KEYS.c.id.in_(select(JOBS.c.key_id).where(_IS_WAITING).distinct()))
    .outerjoin(_RUNNING, _RUNNING.c.key_id == KEYS.c.id)
    .order_by(func.coalesce(_RUNNING.c.jobs, 0), KEYS.c.turn, KEYS.c.id)
)
"""Selects keys with a waiting job, in the order of their turns."""
_NEXT_OF_KEY = (
    select(JOBS.c.number)
    .where(_IS_WAITING, JOBS.c.key_id == bindparam("of_key"))
    .order_by(JOBS.c.priority, JOBS.c.number)
    .limit(1)
)
_LATEST_TURN = select(func.max(KEYS.c.turn))


class KeyRevokedError(Exception):
    """The key was revoked during the request."""


class IdempotencyMismatchError(Exception):
    """The idempotency key belongs to another request, or to a job that was deleted."""


class JobStore:
    """The jobs of all keys."""

    def __init__(self, database: Database, *, owner: str) -> None:
        """`owner`: the unique name of this gateway at the store, under which it runs jobs."""
        self._database = database
        self.owner = owner

    # ------------------------------------------------------------------------------------------- what clients do

    def create(self, key: Key, new: NewJob) -> tuple[Job, bool]:
        """Create a job; returns it, and whether it is new: a known idempotency key returns its existing job.

        Raises:
            IdempotencyMismatchError, KeyRevokedError, TooManyActiveError, QuotaExceededError
        """
        with self._database.writing() as connection:
            one_at_a_time = select(KEYS.c.revoked_at).where(KEYS.c.id == key.id).with_for_update()
            if connection.execute(one_at_a_time).scalar_one() is not None:
                raise KeyRevokedError("this key was revoked")
            now = store_seconds(connection)
            if new.idempotency_key is not None:
                known = _one(connection, JOBS.c.key_id == key.id, JOBS.c.idempotency_key == new.idempotency_key)
                if known is not None:
                    return self._repeated(connection, known, new), False
            conditioning, job_id = new.conditioning, new.id or new_id()
            check_quotas(connection, key, now, conditioning.num_bytes if conditioning else 0)
            connection.execute(
                JOBS.insert().values(
                    id=job_id,
                    key_id=key.id,
                    model=new.model,
                    request=json.dumps(new.request.without_media().to_inputs()),
                    conditioning_name=conditioning.name if conditioning else None,
                    conditioning_bytes=conditioning.num_bytes if conditioning else None,
                    remixed_from=new.remixed_from,
                    priority=new.priority,
                    status=QUEUED,
                    step=0,
                    attempts=0,
                    created_at=time.time(),
                    queued_at=time.time(),
                    traceparent=new.traceparent,
                    created_tick=now,
                    idempotency_key=new.idempotency_key,
                    fingerprint=new.fingerprint,
                    webhook=_REQUESTED if key.webhook_url else None,
                )
            )
            return _one(connection, JOBS.c.id == job_id), True

    def _repeated(self, connection: Connection, job: Job, new: NewJob) -> Job:
        fingerprint = connection.execute(select(JOBS.c.fingerprint).where(JOBS.c.id == job.id)).scalar_one()
        if fingerprint != new.fingerprint:
            raise IdempotencyMismatchError("this idempotency key was used with another request")
        if job.status == DELETED:
            raise IdempotencyMismatchError("the video that this idempotency key made was deleted")
        return job

    def get(self, key_id: str, job_id: str) -> Job | None:
        """A job of this key that was not deleted."""
        with self._database.reading() as connection:
            row = connection.execute(_WITH_ID, {"of_key": key_id, "with_id": job_id}).one_or_none()
            return None if row is None else job_of(row)

    def preview(self, job: Job, *, but: int) -> tuple[int, bytes] | None:
        """(step, JPEG) of a running job's preview; None if there is none, or it is of step `but`."""
        with self._database.reading() as connection:
            other = select(PREVIEWS.c.step, PREVIEWS.c.data).where(
                PREVIEWS.c.number == job.number, PREVIEWS.c.step != but
            )
            row = connection.execute(other).one_or_none()
            return None if row is None else (row.step, row.data)

    def page(self, key_id: str, *, after: str | None, limit: int, newest_first: bool) -> tuple[list[Job], bool] | None:
        """Jobs of a key, and whether there are more; None if `after` is not one of them."""
        conditions = list(_of_key(key_id))
        with self._database.reading() as connection:
            if after is not None:
                last = _one(connection, *conditions, JOBS.c.id == after)
                if last is None:
                    return None
                conditions.append(JOBS.c.number < last.number if newest_first else JOBS.c.number > last.number)
            order = JOBS.c.number.desc() if newest_first else JOBS.c.number
            rows = connection.execute(select(JOBS).where(*conditions).order_by(order).limit(limit + 1)).all()
        return [job_of(row) for row in rows[:limit]], len(rows) > limit

    def delete(self, key_id: str, job_id: str) -> Job | None:
        """Delete a job; returns it as it was before, None if there was none."""
        with self._database.writing() as connection:
            now = store_seconds(connection)
            job = _one(connection, *_of_key(key_id), JOBS.c.id == job_id)
            if job is not None:
                values = {"status": DELETED, "ended_tick": now, "expires_tick": None}
                connection.execute(update(JOBS).where(JOBS.c.number == job.number).values(**values))
                connection.execute(delete(PREVIEWS).where(PREVIEWS.c.number == job.number))
            return job

    # ------------------------------------------------------------------------------------------- what runners do

    def has_queued(self) -> bool:
        with self._database.reading() as connection:
            return connection.execute(_ANY_QUEUED).first() is not None

    def claim(self, models: frozenset[str]) -> Job | None:
        """Takes the next job for this gateway to run.

        Keys take turns: the key with the fewest running jobs is next, and among equals the one with the oldest last
        turn. A key's own jobs are ordered by priority, then by age.
        """
        parameters = {"models": list(models)}
        with self._database.writing() as connection:
            self._database.alone(connection, CLAIMING)
            for key_id in connection.execute(_TURNS, parameters).scalars():
                first = connection.execute(_NEXT_OF_KEY, parameters | {"of_key": key_id})
                if (number := first.scalar_one_or_none()) is not None:
                    if self._take(connection, number, key_id):
                        return _one(connection, JOBS.c.number == number)
        return None

    def _take(self, connection: Connection, number: int, key_id: str) -> bool:
        taken = connection.execute(
            update(JOBS)
            .where(JOBS.c.number == number, JOBS.c.status == QUEUED)  # another gateway may have been faster
            .values(status=IN_PROGRESS, owner=self.owner, attempts=JOBS.c.attempts + 1, step=0, started_at=time.time())
        )
        latest = connection.execute(_LATEST_TURN).scalar_one()
        connection.execute(update(KEYS).where(KEYS.c.id == key_id).values(turn=latest + 1))
        return taken.rowcount == 1

    def note_step(self, job: Job, step: int, preview: bytes = b"") -> bool:
        """Record a step; False if this gateway no longer owns the job. A preview stays until the next, or the end."""
        return self._change(job, lambda now: {"step": step}, preview)

    def complete(
        self, job: Job, result: Result, *, seconds_to_live: float, scores: Mapping[str, float] | None = None
    ) -> bool:
        """Complete a job; False if this gateway no longer owns it, so that its result must be removed."""

        def values(now: float) -> dict[str, Any]:
            return {
                "status": COMPLETED,
                "error_code": None,
                "step": job.request.num_steps or 0,
                "result_name": result.name,
                "media_type": result.media_type,
                "num_bytes": result.num_bytes,
                "sha256": result.sha256,
                "scores": None if scores is None else json.dumps(scores),
                "completed_at": time.time(),
                "ended_tick": now,
                "expires_tick": now + seconds_to_live,
            }

        return self._change(job, values) or self._has(job, result)

    def _has(self, job: Job, result: Result) -> bool:
        """Whether the job was completed with this result by a transaction whose response was lost."""
        with self._database.reading() as connection:
            same = select(JOBS.c.number).where(JOBS.c.number == job.number, JOBS.c.result_name == result.name)
            return connection.execute(same.where(JOBS.c.status == COMPLETED)).first() is not None

    def is_deleted(self, job: Job) -> bool:
        with self._database.reading() as connection:
            deleted = select(JOBS.c.number).where(JOBS.c.number == job.number, JOBS.c.status == DELETED)
            return connection.execute(deleted).first() is not None

    def fail(self, job: Job, code: str, message: str) -> bool:
        return self._change(job, lambda now: failure(now, code, message))

    def give_back(self, job: Job) -> bool:
        """Puts it back into the queue as if it had not been started."""
        return self._change(job, lambda now: _waiting() | {"attempts": job.attempts - 1})

    def interrupt(self, job: Job, *, suspicion: str | None = None) -> bool:
        """Puts it back into the queue, or fails it if a server has failed while running it before.

        `suspicion` is the code of a server failure that it may have caused, and is stored with it.
        """
        if job.is_suspected:
            return self.fail(job, "server_failed", "interrupted twice by a server")
        return self._change(job, lambda now: _waiting() | {"error_code": suspicion})

    def running(self, owner: str) -> list[Job]:
        """The jobs that a gateway runs, by the store."""
        with self._database.reading() as connection:
            rows = connection.execute(select(JOBS).where(JOBS.c.status == IN_PROGRESS, JOBS.c.owner == owner)).all()
        return [job_of(row) for row in rows]

    def requeue(self, job: Job) -> bool:
        """Puts it back into the queue, any number of times."""
        return self._change(job, lambda now: _waiting())

    def interrupt_all(self, owner: str) -> list[Job]:
        """Puts the running jobs of a dead gateway back into the queue, any number of times: they are not at fault."""
        jobs = [job for job in self.running(owner) if self.requeue(job)]
        with self._database.writing() as connection:  # its webhooks become those of this gateway
            undelivered = and_(JOBS.c.webhook == _REQUESTED, JOBS.c.status != IN_PROGRESS, JOBS.c.owner == owner)
            connection.execute(update(JOBS).where(undelivered).values(owner=self.owner))
        return jobs

    def _change(self, job: Job, values: Callable[[float], dict[str, Any]], preview: bytes = b"") -> bool:
        """Changes a running job if its owner and attempt are unchanged."""
        still_ours = and_(
            JOBS.c.number == job.number,
            JOBS.c.status == IN_PROGRESS,
            JOBS.c.owner == job.owner,
            JOBS.c.attempts == job.attempts,
        )
        with self._database.writing() as connection:
            changes = values(store_seconds(connection))
            is_ours = connection.execute(update(JOBS).where(still_ours).values(**changes)).rowcount == 1
            if is_ours and (preview or "status" in changes):
                connection.execute(delete(PREVIEWS).where(PREVIEWS.c.number == job.number))
            if is_ours and preview:
                connection.execute(PREVIEWS.insert().values(number=job.number, step=changes["step"], data=preview))
            return is_ours

    def keys_to_call(self) -> list[str]:
        """Keys with undelivered webhooks of jobs that this gateway ended."""
        with self._database.reading() as connection:
            return list(connection.execute(select(JOBS.c.key_id).where(self._is_undelivered()).distinct()).scalars())

    def has_unfinished(self) -> bool:
        """Whether running jobs or undelivered webhooks of this gateway are left."""
        return bool(self.running(self.owner) or self.keys_to_call())

    def undelivered(self, key_id: str) -> list[Job]:
        """The oldest jobs of a key with undelivered webhooks."""
        with self._database.reading() as connection:
            undelivered = select(JOBS).where(self._is_undelivered(), JOBS.c.key_id == key_id).order_by(JOBS.c.number)
            return [job_of(row) for row in connection.execute(undelivered.limit(_AT_ONCE))]

    def _is_undelivered(self) -> ColumnElement[bool]:
        return and_(JOBS.c.webhook == _REQUESTED, JOBS.c.status.in_((COMPLETED, FAILED)), JOBS.c.owner == self.owner)

    def with_webhook(self) -> list[tuple[Job, str]]:
        """Ended jobs of keys with a webhook, the oldest first, and the state of the webhook."""
        ended = select(JOBS).where(JOBS.c.webhook.is_not(None), JOBS.c.status.in_((COMPLETED, FAILED)))
        with self._database.reading() as connection:
            return [(job_of(row), row.webhook) for row in connection.execute(ended.order_by(JOBS.c.number))]

    def note_called(self, job: Job, outcome: str) -> None:
        with self._database.writing() as connection:
            connection.execute(update(JOBS).where(JOBS.c.number == job.number).values(webhook=outcome))

    # ------------------------------------------------------------------------------------------- keeping house

    def expired(self) -> list[Job]:
        """Jobs with an expired result that is not yet removed (see `forget_result`)."""
        with self._database.reading() as connection:
            now = store_seconds(connection)
            gone = select(JOBS).where(JOBS.c.num_bytes.is_not(None), JOBS.c.expires_tick < now).limit(_AT_ONCE)
            return [job_of(row) for row in connection.execute(gone)]

    def forget_result(self, job: Job) -> None:
        with self._database.writing() as connection:
            connection.execute(update(JOBS).where(JOBS.c.number == job.number).values(num_bytes=None))

    def ended_with_conditioning(self) -> list[Job]:
        """Jobs that have ended, whose conditioning media are not yet removed (see `forget_conditioning`)."""
        with self._database.reading() as connection:
            ended = JOBS.c.conditioning_name.is_not(None) & JOBS.c.status.not_in((QUEUED, IN_PROGRESS))
            return [job_of(row) for row in connection.execute(select(JOBS).where(ended).limit(_AT_ONCE))]

    def forget_conditioning(self, job: Job) -> None:
        with self._database.writing() as connection:
            forgotten = {"conditioning_name": None, "conditioning_bytes": None}
            connection.execute(update(JOBS).where(JOBS.c.number == job.number).values(**forgotten))

    def check_quotas(self, key: Key) -> None:
        """Raises TooManyActiveError or QuotaExceededError if a key may not create another video now."""
        with self._database.reading() as connection:
            check_quotas(connection, key, store_seconds(connection), 0)

    def purge(self, seconds: float) -> int:
        """Removes jobs that ended, and whose result was removed, `seconds` ago; not the last day's, for quotas."""
        with self._database.writing() as connection:
            now = store_seconds(connection)
            old = and_(
                JOBS.c.ended_tick < now - seconds,
                JOBS.c.created_tick < now - DAY,
                JOBS.c.num_bytes.is_(None) | (JOBS.c.status != COMPLETED),
            )
            return connection.execute(delete(JOBS).where(old)).rowcount

    def has_result(self, job_id: str, name: str) -> bool:
        """Whether a stored file is the result of its job, or may become it."""
        is_result = and_(JOBS.c.status == COMPLETED, JOBS.c.num_bytes.is_not(None), JOBS.c.result_name == name)
        with self._database.reading() as connection:
            is_counted = JOBS.c.status.in_((QUEUED, IN_PROGRESS)) | is_result
            return connection.execute(select(JOBS.c.number).where(JOBS.c.id == job_id, is_counted)).first() is not None

    def knows(self, job_id: str) -> bool:
        """Whether there is, or was, a job of this id."""
        with self._database.reading() as connection:
            return connection.execute(select(JOBS.c.number).where(JOBS.c.id == job_id)).first() is not None

    def counts(self) -> dict[tuple[str, str], int]:
        """(key, status) -> number of waiting or running jobs."""
        active = (
            select(JOBS.c.key_id, JOBS.c.status, func.count())
            .where(JOBS.c.status.in_((QUEUED, IN_PROGRESS)))
            .group_by(JOBS.c.key_id, JOBS.c.status)
        )
        with self._database.reading() as connection:
            return {(key, status): count for key, status, count in connection.execute(active)}


def _waiting() -> dict[str, Any]:
    """The columns of a job that goes back into the queue."""
    return {"status": QUEUED, "owner": None, "step": 0, "queued_at": time.time()}


def _of_key(key_id: str) -> tuple[ColumnElement[bool], ...]:
    return JOBS.c.key_id == key_id, JOBS.c.status != DELETED


def _one(connection: Connection, *conditions: ColumnElement[bool]) -> Job | None:
    row = connection.execute(select(JOBS).where(*conditions)).one_or_none()
    return None if row is None else job_of(row)
