"""HTTP as RFC 9110 has it, and a description of it of which other people's programs make clients that work."""

import importlib
import json
import re
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.testclient import TestClient

from megadit.models.shared.errors import UserError
from megadit.serve.gateway.http.app import create_app
from megadit.serve.gateway.service import GatewaySettings

MODELS = frozenset({"text_to_video"})
VIDEO = {"prompt": "a red seven"}
DATA = b"what a Triton made" * 1000


@pytest.fixture
def make(gateway, eventually):
    """Makes the next video, or has it fail."""

    def make(failure: tuple[str, str] | None = None):
        eventually(gateway.store.has_queued)
        job = gateway.store.claim(MODELS)
        if failure:
            gateway.store.fail(job, *failure)
        else:
            gateway.store.complete(job, gateway.results.put(job.id, DATA, "video/mp4"), seconds_to_live=1000)
        return job

    return make


@pytest.fixture
def completed(visit, make):
    """(client, id) of a video that is there."""
    client = visit()
    client.post("/v1/videos", json=VIDEO)
    return client, make().id


def test_head_is_get_without_its_body(completed, url):
    client, video_id = completed
    client = httpx.Client(base_url=url, headers=client.headers, timeout=120)  # h11 refuses lengths that are not kept
    for path in ("", "/content", "/events", "/nothing"):
        full, head = (client.request(method, f"/v1/videos/{video_id}{path}") for method in ("GET", "HEAD"))
        assert head.status_code == full.status_code and head.content == b""
        same = [
            {name: each.headers.get(name) for name in ("content-length", "content-type", "etag")}
            for each in (full, head)
        ]
        assert same[0] == same[1] and (path == "/events" or int(head.headers["content-length"]) == len(full.content))
    for path in (
        "/health/live",
        "/health/ready",
        "/health/idle",
        "/v1/models",
        "/v1/adapters",
        "/",
        "/docs",
        "/openapi.json",
    ):
        full, head = client.get(path), client.head(path)
        assert (head.status_code, head.headers["content-length"]) == (full.status_code, full.headers["content-length"])


ALLOWED = {
    "/v1/videos": "GET, HEAD, POST",
    "/v1/videos/x": "GET, HEAD, DELETE",
    "/v1/videos/x/remix": "POST",
    "/v1/videos/sync": "GET, HEAD, POST, DELETE",  # by its name it might be a video
    "/v1/adapters": "GET, HEAD, POST",
    "/v1/adapters/x": "DELETE",
    "/health/live": "GET, HEAD",
}


def test_a_method_that_a_path_does_not_take_is_told_those_that_it_takes(visit):
    client = visit()
    answers = {path: client.put(path) for path in ALLOWED}
    assert {answer.status_code for answer in answers.values()} == {405}
    assert {path: answer.headers["allow"] for path, answer in answers.items()} == ALLOWED


def test_bytes_that_a_client_has_are_not_sent_again(completed):
    client, video_id = completed
    path = f"/v1/videos/{video_id}/content"
    etag = client.head(path).headers["etag"]
    for known in (etag, f"W/{etag}", f'"x", {etag}', "*"):
        answer = client.get(path, headers={"if-none-match": known, "range": "bytes=0-3"})
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", etag), known
    other = client.get(path, headers={"if-none-match": '"x"'})
    assert other.status_code == 200 and other.content == DATA


def test_a_video_expires_at_one_time_whenever_it_is_asked_for(completed, gateway, monkeypatch):
    client, video_id = completed
    seen = set()
    for ahead in (0.0, 0.4, 0.9):
        monkeypatch.setattr("time.time", lambda ahead=ahead: 2e9 + ahead)
        seen.add(client.get(f"/v1/videos/{video_id}").json()["expires_at"])
    assert len(seen) == 1


def test_pages_of_other_origins_may_ask_only_where_they_are_named(gateway, new_key):
    origin, key = {"origin": "https://a.example"}, {"authorization": f"Bearer {new_key()[0]}"}
    asks = origin | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    client = TestClient(create_app(gateway))
    assert client.options("/v1/videos", headers=asks).status_code == 405
    assert "access-control-allow-origin" not in client.get("/v1/videos", headers=origin | key).headers
    object.__setattr__(gateway.settings, "cors_origins", ("https://a.example",))
    client = TestClient(create_app(gateway))
    assert client.options("/v1/videos", headers=asks).headers["access-control-allow-origin"] == "https://a.example"
    for headers in (origin, origin | key):  # errors, too
        assert client.get("/v1/videos", headers=headers).headers["access-control-allow-origin"] == "https://a.example"
    assert client.options("/v1/videos", headers=asks | {"origin": "https://b.example"}).status_code == 400
    with pytest.raises(UserError, match="scheme and host alone"):
        GatewaySettings(cors_origins=("a.example",))


# ------------------------------------------------------------------------------------------- what describes it


def references(part) -> list[str]:
    if isinstance(part, list):
        return [each for value in part for each in references(value)]
    if not isinstance(part, dict):
        return []
    return [each for name, value in part.items() for each in ([value] if name == "$ref" else references(value))]


def test_every_reference_of_the_description_leads_somewhere(visit):
    described = visit().get("/openapi.json").json()
    found = references(described)
    assert "#/components/schemas/ScaledAdapter" in found
    for reference in found:
        place = described
        for name in reference.removeprefix("#/").split("/"):
            place = place[name]


def test_a_page_of_the_description_needs_nothing_from_elsewhere(visit):
    answer = visit().get("/docs")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert not re.search(r"<script|<link|src=|https?://(?!HOST)", answer.text)
    for said in ("/v1/videos/{video_id}/content", "guidance", "Idempotency-Key", "If-None-Match".lower()):
        assert said in answer.text


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """A package that openapi-python-client makes of the description."""
    pytest.importorskip("openapi_python_client", reason="openapi-python-client of the extra [dev] is not installed")
    from unittest.mock import MagicMock

    folder = tmp_path_factory.mktemp("generated")
    gateway = MagicMock()
    gateway.settings.cors_origins = ()
    (folder / "openapi.json").write_text(json.dumps(create_app(gateway).openapi()))
    words = ["generate", "--path", "openapi.json", "--output-path", "generated_client", "--meta", "none"]
    command = [sys.executable, "-c", "from openapi_python_client.cli import app; app()", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and "will not be generated" not in done.stdout, done.stdout + done.stderr
    sys.path.insert(0, str(folder))
    yield importlib.import_module("generated_client")
    sys.path.remove(str(folder))


def test_a_generated_client_makes_a_video(generated, url, new_key, make):
    videos = {
        name: importlib.import_module(f"generated_client.api.videos.{name}")
        for name in ("create_video", "get_video", "get_content", "list_videos", "delete_video", "make_video")
    }
    models = importlib.import_module("generated_client.models")
    client = generated.AuthenticatedClient(base_url=url, token=new_key()[0], timeout=httpx.Timeout(120))
    body = models.CreateVideo(prompt="a red seven", num_steps=2, size="16x16")
    body.adapters = [models.ScaledAdapter(name="nothing")]
    assert "adapter" in videos["create_video"].sync(client=client, body=body).error.message
    body.adapters = []
    video = videos["create_video"].sync(client=client, body=body)
    assert (video.status, video.settings["num_steps"]) == ("queued", 2)
    make()
    assert videos["get_video"].sync(video.id, client=client).status == "completed"
    assert videos["get_content"].sync_detailed(video.id, client=client).content == DATA
    assert [each.id for each in videos["list_videos"].sync(client=client).data] == [video.id]
    assert videos["delete_video"].sync(video.id, client=client).deleted
    with ThreadPoolExecutor(1) as threads:
        made = threads.submit(make)
        assert videos["make_video"].sync_detailed(client=client, body=body).content == DATA
        made.result()


# ------------------------------------------------------------------------------- answers that are the video itself


@pytest.mark.parametrize("path", ["sync", "generations"])
def test_a_request_may_wait_for_its_video(visit, make, path):
    """As clients of vLLM-Omni (a form with width and height) and of TensorRT-LLM ask."""
    client = visit()
    asked = {"data": VIDEO | {"width": "16", "height": "8", "num_inference_steps": "3", "guidance_scale": "2"}}
    with ThreadPoolExecutor(1) as threads:
        made = threads.submit(make)
        answer = client.post(f"/v1/videos/{path}", **asked)
        job = made.result()
    assert (answer.status_code, answer.content, answer.headers["content-type"]) == (200, DATA, "video/mp4")
    assert (job.request.width, job.request.height, job.request.num_steps) == (16, 8, 3)
    assert answer.headers["x-video-id"] == job.id and client.get(f"/v1/videos/{job.id}").json()["status"] == "completed"


def test_a_video_that_is_waited_for_fails_with_its_reason(visit, make):
    client = visit()
    for code, status in {"guardrail": 400, "timed_out": 504, "server_failed": 500}.items():
        with ThreadPoolExecutor(1) as threads:
            made = threads.submit(make, (code, "it cannot be"))
            answer = client.post("/v1/videos/sync", json=VIDEO)
            job = made.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert "it cannot be" in answer.text and job.id in answer.text


@pytest.mark.parametrize("is_named", [False, True], ids=["without a key of its own", "with one"])
def test_a_client_that_hangs_up_is_waited_for_only_if_it_can_ask_again(gateway, url, new_key, eventually, is_named):
    key, about = new_key()
    headers = {"authorization": f"Bearer {key}"} | ({"idempotency-key": "mine"} if is_named else {})
    body = json.dumps(VIDEO).encode()
    headers |= {"host": "x", "content-type": "application/json", "content-length": str(len(body))}
    lines = ["POST /v1/videos/sync HTTP/1.1", *(": ".join(each) for each in headers.items()), "", ""]
    with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port)) as client:
        client.sendall("\r\n".join(lines).encode() + body)
        eventually(gateway.store.has_queued)
    told = {"route": "/v1/videos/sync", "status": "499", "method": "POST"}
    eventually(lambda: gateway.metrics.requests.labels(**told)._value.get() == 1)
    assert gateway.store.has_queued() == is_named
    assert gateway.metrics.streams._value.get() == 0


def test_waiting_counts_as_a_stream_and_ends_where_the_gateway_ends(visit, gateway):
    client = visit()
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(client.post, "/v1/videos/sync", json=VIDEO)
        waited = threading.Event()
        while not gateway.store.has_queued():
            waited.wait(0.02)
        gateway.runner._draining.set()
        answer = asked.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining") and "video_" in answer.text
