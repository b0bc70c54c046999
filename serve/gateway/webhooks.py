"""Tells the addresses that keys named when a video is completed or has failed; signed as standardwebhooks.com says.

The address belongs to the key and is set by who runs the gateway: no request makes the gateway call anybody.
"""

import base64
import hashlib
import hmac
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
from sqlalchemy.exc import SQLAlchemyError

from megadit.serve.gateway.keys import Key, KeyRing
from megadit.serve.gateway.logs import log
from megadit.serve.gateway.metrics import Metrics
from megadit.serve.gateway.store import Job, JobStore

_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_ANSWER = 10.0
_FIRST_PAUSE, _MOST_TRIES = 1.0, 10
_AT_ONCE = 8


class Webhooks:
    """Sends what is due of the jobs that this gateway ended, again with doubled pauses until it is taken."""

    def __init__(self, store: JobStore, keys: KeyRing, metrics: Metrics) -> None:
        self._store, self._keys, self._metrics = store, keys, metrics
        self._tries: dict[str, tuple[int, float]] = {}
        """Job -> tries that failed, and when the next is due (monotonic)."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._send_what_is_due, name="webhooks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """What is not delivered is sent by the next life of this gateway."""
        self._stopping.set()
        self._thread.join()

    def _send_what_is_due(self) -> None:
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="webhook") as pool:
            while not self._stopping.wait(_SECONDS_BETWEEN_LOOKS):
                try:
                    now = time.monotonic()
                    due = [job for job in self._store.untold() if self._tries.get(job.id, (0, now))[1] <= now]
                    list(pool.map(self._try, due))
                except SQLAlchemyError as error:
                    log("store failed", reason=str(error).splitlines()[0])

    def _try(self, job: Job) -> None:
        key = self._keys.find(job.key_id)
        if key is None or key.is_revoked or not _send(key, job):
            tries = self._tries.get(job.id, (0, 0.0))[0] + 1
            self._tries[job.id] = (tries, time.monotonic() + _FIRST_PAUSE * 2 ** (tries - 1))
            if tries < _MOST_TRIES and key is not None and not key.is_revoked:
                return
            outcome = "given_up"
        else:
            outcome = "delivered"
        self._tries.pop(job.id, None)
        self._store.note_told(job, outcome)
        self._metrics.webhooks.labels(outcome).inc()
        log(f"webhook {outcome.replace('_', ' ')}", job=job.id, key=job.key_id)


def _send(key: Key, job: Job) -> bool:
    event = {
        "id": f"evt_{job.id}",
        "object": "event",
        "created_at": int(job.completed_at or 0),
        "type": f"video.{job.status}",
        "data": {"id": job.id},
    }
    body = json.dumps(event).encode()
    try:
        headers = {"content-type": "application/json", **signature(key.webhook_secret, event["id"], body)}
        return httpx.post(key.webhook_url, content=body, headers=headers, timeout=_SECONDS_TO_ANSWER).is_success
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


def signature(secret: str, event_id: str, body: bytes) -> dict[str, str]:
    """The headers by which a receiver that has the secret knows who sent this, and when."""
    timestamp = str(int(time.time()))
    signed = hmac.new(
        base64.b64decode(secret.removeprefix("whsec_")), f"{event_id}.{timestamp}.".encode() + body, hashlib.sha256
    )
    return {
        "webhook-id": event_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": f"v1,{base64.b64encode(signed.digest()).decode()}",
    }
