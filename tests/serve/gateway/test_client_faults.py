"""`GatewayClient` over a network that fails: what was accepted is fetched, once, and nobody but its caller ends it."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from sqlalchemy import func, select

from megadit.serve.contract import VideoRequest
from megadit.serve.events import CancelledError, UnavailableError
from megadit.serve.gateway import client as client_module
from megadit.serve.gateway.client import GatewayClient
from megadit.serve.gateway.store.database import JOBS

from .faulty_proxy import FAULTS, Fault, FaultyProxy

MODELS = frozenset({"text_to_video"})
REQUEST = VideoRequest(prompt="a", num_steps=4)
VIDEO = "GET /v1/videos/video_[0-9a-f]+"
ASKED = {"post": "POST /v1/videos", "stream": f"{VIDEO}/events", "poll": VIDEO, "content": f"{VIDEO}/content"}


@pytest.fixture
def proxy(url, monkeypatch, request):
    if request.node.name.endswith("[hang]"):  # which alone is waited for in vain
        monkeypatch.setattr(client_module, "_SILENT_SECONDS", 1.0)
    monkeypatch.setattr(client_module, "_FIRST_PAUSE", 0.02)
    monkeypatch.setattr(client_module, "_LONGEST_PAUSE", 0.1)
    proxy = FaultyProxy([(urlsplit(url).hostname, urlsplit(url).port)])
    yield proxy
    proxy.close()


@pytest.fixture
def client(proxy, new_key):
    return GatewayClient(proxy.url, new_key()[0], patience=60)


@pytest.fixture
def make(gateway, eventually):
    """Makes the video of the one job there is, while its client looks on."""

    def make(until=lambda: True):
        eventually(gateway.store.has_queued)
        job = gateway.store.claim(MODELS)
        gateway.store.note_step(job, 1)
        eventually(until)
        gateway.store.note_step(job, 3)
        gateway.store.complete(job, gateway.results.put(job.id, b"the video" * 99, "video/mp4"), seconds_to_live=1000)

    return make


def num_jobs(gateway) -> int:
    with gateway.database.reading() as connection:
        return connection.execute(select(func.count()).select_from(JOBS)).scalar_one()


@pytest.mark.parametrize("kind", FAULTS)
def test_whatever_breaks_wherever_the_video_comes(kind, proxy, client, gateway, make):
    """All that is asked of a gateway breaks in turn; it is polled for where no stream comes through."""
    times = 1 if kind == "hang" else 2
    proxy.faults = [*before, content] = [Fault(asked, kind, times) for asked in ASKED.values()]
    with ThreadPoolExecutor(1) as threads:
        made = threads.submit(make, lambda: not any(fault.times for fault in before))
        (video,) = client.generate(REQUEST)
        made.result()
    assert video.data == b"the video" * 99 and content.times == 0
    assert num_jobs(gateway) == 1, "its request was taken once"
    deleted = [asked.startswith("DELETE") for asked in proxy.asked]
    assert any(deleted) and deleted == sorted(deleted), "in the end, when it was here"


def test_bytes_that_are_not_the_video_are_fetched_again(proxy, client, make):
    proxy.faults = [Fault(ASKED["content"], "garbled", 2)]
    with ThreadPoolExecutor(1) as threads:
        made = threads.submit(make)
        (video,) = client.generate(REQUEST)
        made.result()
    assert video.data == b"the video" * 99 and proxy.faults[0].times == 0


@pytest.mark.parametrize("place", ("stream", "poll", "content"))
def test_a_gateway_that_stays_away_has_the_video_all_the_same(place, proxy, client, gateway, make):
    client._patience = 0.5
    proxy.faults = [Fault(ASKED[place], "kill", 10**6)]
    if place == "poll":
        proxy.faults.append(Fault(ASKED["stream"], "kill", 10**6))
    if place == "stream":  # nor does any poll come through
        proxy.faults.append(Fault(ASKED["poll"], "kill", 10**6))
    with ThreadPoolExecutor(1) as threads:
        made = threads.submit(make)
        with pytest.raises(UnavailableError, match="video_") as error:
            client.generate(REQUEST)
        made.result()
    video_id = re.search("video_[0-9a-f]+", str(error.value))[0]
    assert not [asked for asked in proxy.asked if asked.startswith("DELETE")]
    proxy.faults = []
    assert client._ask("GET", f"/v1/videos/{video_id}")["status"] == "completed"


def test_a_request_that_is_never_answered_names_its_key(proxy, client, gateway):
    client._patience = 0.3
    proxy.faults = [Fault(ASKED["post"], "kill", 10**6)]
    with pytest.raises(UnavailableError, match="Idempotency-Key megadit-"):
        client.generate(REQUEST)
    assert num_jobs(gateway) == 1, "it may have been taken"


def test_a_cancel_while_the_answer_is_lost_leaves_nothing_behind(proxy, client, gateway, eventually):
    proxy.faults = [Fault(ASKED["post"], "kill", 1), Fault(ASKED["post"], "bad gateway", 10**6)]
    generation = client.stream(REQUEST)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(list, generation)
        eventually(lambda: proxy.faults[1].times < 10**6)
        proxy.faults.pop()
        generation.cancel()
        with pytest.raises(CancelledError):
            asked.result(60)
    assert not gateway.store.has_queued()


def test_streams_that_a_key_may_not_have_are_no_end(client, gateway, make, monkeypatch):
    most = iter([0] * 4)
    monkeypatch.setattr(gateway.settings.__class__, "max_streams", property(lambda _: next(most, 1)), raising=False)
    with ThreadPoolExecutor(1) as threads:
        made = threads.submit(make)
        (video,) = client.generate(REQUEST)
        made.result()
    assert video.data


def test_who_leaves_does_not_wait_for_a_gateway_that_stands_still(proxy, client, make, monkeypatch):
    monkeypatch.setattr(client_module, "_SECONDS_TO_DELETE", 0.1)
    proxy.faults, looked = [Fault(ASKED["poll"].replace("GET", "DELETE"), "hang", 1)], threading.Event()
    with ThreadPoolExecutor(1) as threads:
        made = threads.submit(make, looked.is_set)
        events = iter(client.stream(REQUEST))
        next(events)
        began = time.monotonic()
        events.close()
        seconds = time.monotonic() - began
        looked.set()
        made.result()
    assert seconds < client_module._SILENT_SECONDS / 2 and not proxy.faults[0].times


def test_leaving_early_cancels(client, gateway, make):
    looked = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        made = threads.submit(make, looked.is_set)
        events = iter(client.stream(REQUEST))
        next(events)
        events.close()
        looked.set()
        made.result()
    assert client._ask("GET", "/v1/videos")["data"] == []
