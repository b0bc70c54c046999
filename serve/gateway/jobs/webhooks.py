"""Webhooks: notify a key's address when a video is completed or has failed, signed by standardwebhooks.com's rules.

The operator sets the address of a key: no request makes the gateway call an address. The owner of its host name may
resolve it to any machine, so the address of each connection is checked before a byte is sent.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
from sqlalchemy.exc import SQLAlchemyError

from megadit.models.shared.addresses import guard, is_address, is_link_local, is_public, tls_context
from megadit.serve.gateway.logs import log
from megadit.serve.gateway.metrics import Metrics
from megadit.serve.gateway.store.database import in_a_line
from megadit.serve.gateway.store.jobs import Job
from megadit.serve.gateway.store.keys import Key, KeyRing
from megadit.serve.gateway.store.store import JobStore

_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_ANSWER = 10.0
"""Time limit of the whole exchange."""
_SECONDS_OF_A_TURN = 10.0
"""Time after which a key with more webhooks waits for its next turn."""
_PAUSES = (5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0, 72_000.0, 86_400.0)
"""Pauses after failed attempts, as standardwebhooks.com recommends: three days in total."""
_AT_ONCE = 8


class Webhooks:
    """Sends the webhooks of jobs that this gateway ended, with retries.

    The calls of one key run in sequence: an address that does not respond delays no other key.
    """

    def __init__(self, store: JobStore, keys: KeyRing, metrics: Metrics, *, may_be_private: bool = False) -> None:
        """`may_be_private`: host names may resolve to this machine and its network."""
        self._store, self._keys, self._metrics = store, keys, metrics
        self._may_be_private = may_be_private
        self._tries: dict[str, dict[str, tuple[int, float]]] = {}
        """Key -> job -> (failed attempts, time of the next one (monotonic))."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._send_what_is_due, name="webhooks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop; undelivered webhooks are sent when this gateway starts again."""
        self._stopping.set()
        self._thread.join()

    def _send_what_is_due(self) -> None:
        calls: dict[str, Future] = {}
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="webhook") as pool:
            while not self._stopping.wait(_SECONDS_BETWEEN_LOOKS):
                try:
                    for key_id in self._store.keys_to_call():
                        if key_id not in calls or calls[key_id].done():
                            calls[key_id] = pool.submit(self._deliver, key_id)
                except SQLAlchemyError as error:
                    log("store failed", reason=in_a_line(error))

    def _deliver(self, key_id: str) -> None:
        """Sends one key's webhooks, until a call fails or its turn is over."""
        end = time.monotonic() + _SECONDS_OF_A_TURN
        try:
            key, jobs, known = self._keys.find(key_id), self._store.undelivered(key_id), self._tries.pop(key_id, {})
            tries = self._tries[key_id] = {job.id: known[job.id] for job in jobs if job.id in known}
            for job in jobs:
                is_due = tries.get(job.id, (0, 0.0))[1] <= time.monotonic()
                is_over = self._stopping.is_set() or time.monotonic() > end
                if is_over or (is_due and not self._try(key, job, tries)):
                    return
        except SQLAlchemyError as error:
            log("store failed", reason=in_a_line(error))

    def _try(self, key: Key | None, job: Job, tries: dict[str, tuple[int, float]]) -> bool:
        is_active = key is not None and not key.is_revoked
        result = send(key, job, may_be_private=self._may_be_private) if is_active else "key revoked"
        count = tries.get(job.id, (0, 0.0))[0] + 1
        is_taken = result.startswith("2")
        self._metrics.webhook_attempts.labels(f"{result[0]}xx" if result.isdecimal() else result).inc()
        about = {"job": job.id, "key": job.key_id, "attempt": count, "result": result}
        if not is_taken and is_active and count <= len(_PAUSES):
            pause = _PAUSES[count - 1] * random.uniform(0.9, 1.1)
            tries[job.id] = (count, time.monotonic() + pause)
            log("webhook failed", **about, next_in_seconds=round(pause))
            return False
        outcome = "delivered" if is_taken else "given_up"
        self._store.note_called(job, outcome)
        self._metrics.webhooks.labels(outcome).inc()
        log(f"webhook {outcome.replace('_', ' ')}", **about)
        return is_taken


def send(key: Key, job: Job, *, may_be_private: bool) -> str:
    """Send a webhook; returns the HTTP status of the response, or the error."""
    event = {
        "id": f"evt_{job.id}",
        "object": "event",
        "created_at": int(job.completed_at or 0),
        "type": f"video.{job.status}",
        "data": {"id": job.id},
    }
    body = json.dumps(event).encode()
    headers = {"content-type": "application/json", **signature(key.webhook_secret, event["id"], body)}
    try:
        post = _post(key.webhook_url, body, headers, may_be_private=may_be_private)
        return asyncio.run(asyncio.wait_for(post, _SECONDS_TO_ANSWER))
    except TimeoutError:
        return "timeout"
    except _PrivateAddressError:
        return "private address"
    except Exception:  # httpx passes on those of idna, ssl and sockets
        return "unreachable"


class _PrivateAddressError(Exception):
    pass


async def _post(url: str, body: bytes, headers: dict[str, str], *, may_be_private: bool) -> str:
    """The status of the response, within a total timeout; httpx's timeouts restart with every byte."""
    host = httpx.URL(url).host
    may_be_private |= is_address(host) or host == "localhost"

    def is_forbidden(address: str) -> bool:
        return is_link_local(address) or not (may_be_private or is_public(address))

    extensions = {"trace": guard(is_forbidden, _PrivateAddressError())}
    async with httpx.AsyncClient(timeout=None, verify=tls_context()) as client:
        async with client.stream("POST", url, content=body, headers=headers, extensions=extensions) as answer:
            return str(answer.status_code)  # the body is not read


def signature(secret: str, event_id: str, body: bytes) -> dict[str, str]:
    """Headers with which a receiver that has the secret verifies the sender and the time."""
    timestamp = str(int(time.time()))
    signed = hmac.new(
        base64.b64decode(secret.removeprefix("whsec_")), f"{event_id}.{timestamp}.".encode() + body, hashlib.sha256
    )
    return {
        "webhook-id": event_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": f"v1,{base64.b64encode(signed.digest()).decode()}",
    }
