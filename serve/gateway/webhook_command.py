"""`megadit serve webhooks`: lists webhooks that were not delivered, and sends them again."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import group, setting
from megadit.models.shared.errors import UserError
from megadit.serve.gateway.jobs.webhooks import send
from megadit.serve.gateway.service import GatewaySettings
from megadit.serve.gateway.store.database import Database, is_there, one_line_errors
from megadit.serve.gateway.store.keys import KeyRing
from megadit.serve.gateway.store.store import JobStore


@dataclass(frozen=True, kw_only=True, slots=True)
class WebhookOptions:
    action: Literal["list", "resend"] = setting(positional=True)
    video: str | None = setting(
        None, "id for `resend`; without it, all that failed for good", positional=True, metavar="VIDEO"
    )
    gateway: GatewaySettings = group(GatewaySettings, only=("store", "private_webhooks"))


@command(
    WebhookOptions,
    prog="megadit serve webhooks",
    description="Webhooks of finished and failed videos that were not delivered.",
)
def main(options: WebhookOptions) -> int:
    """Lists or sends webhooks; returns the exit code, 1 if a delivery fails."""
    place = options.gateway.store
    if not is_there(place):
        raise UserError(f"there is no store at {Path(place).absolute()}; give the gateway's --store")
    with one_line_errors(place):
        database = Database(place)
        return (_list if options.action == "list" else _resend)(
            options, JobStore(database, owner=""), KeyRing(database)
        )


def _list(options: WebhookOptions, store: JobStore, keys: KeyRing) -> int:
    addresses = {key.id: key.webhook_url for key in keys.all()}
    for job, state in store.with_webhook():
        if state != "delivered":
            ended = datetime.fromtimestamp(job.completed_at, UTC).isoformat(timespec="seconds")
            print(f"{job.id}  {state.replace('_', ' ')}  {job.status} {ended}  {job.key_id}  {addresses[job.key_id]}")
    return 0


def _resend(options: WebhookOptions, store: JobStore, keys: KeyRing) -> int:
    """Sends webhooks, even while a gateway runs; a duplicate is harmless: receivers recognize it by its id."""
    jobs = [
        job
        for job, state in store.with_webhook()
        if options.video == job.id or not options.video and state == "given_up"
    ]
    if options.video and not jobs:
        raise UserError(f"{options.video} is not an ended video of a key with a webhook; `megadit serve webhooks list`")
    results, private = [], options.gateway.private_webhooks
    for job in jobs:
        key = keys.find(job.key_id)
        results.append("key revoked" if key is None or key.is_revoked else send(key, job, may_be_private=private))
        if results[-1].startswith("2"):
            store.note_called(job, "delivered")
        print(f"{job.id}  {results[-1]}")
    return int(not all(result.startswith("2") for result in results))
