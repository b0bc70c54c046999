"""Real gateways in front of a real tritonserver: the videos of `generate`, progress, cancels, drains and deaths."""

import base64
import io
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import av
import httpx
import numpy as np
import pytest

from megadit.infer.media.video_io import encode_mp4
from megadit.models.shared.cli import verbs
from megadit.models.shared.errors import UserError
from megadit.serve.events import CancelledError, StepDone
from megadit.serve.gateway.client import GatewayClient
from megadit.serve.page.studio import Studio

VIDEO = {"prompt": "a red seven", "seed": 11, "guidance": 3.0, "num_steps": 5}
LONG = {"prompt": "a long one", "num_steps": 5000}
JPEG = b"\xff\xd8"


@pytest.fixture(scope="module")
def triton(server):
    return f"grpc://{server.grpc_url}"


@pytest.fixture
def gateway(start_gateway, triton):
    return start_gateway(triton)


def frames_of(data: bytes) -> np.ndarray:
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def create(client: httpx.Client, **body) -> str:
    answer = client.post("/v1/videos", json=VIDEO | body)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def status(client: httpx.Client, video_id: str) -> str:
    return client.get(f"/v1/videos/{video_id}").json()["status"]


@pytest.fixture
def wait_until(eventually):
    def wait(client: httpx.Client, video_id: str, *wanted: str) -> dict:
        eventually(lambda: status(client, video_id) in wanted)
        return client.get(f"/v1/videos/{video_id}").json()

    return wait


@pytest.mark.slow
def test_one_gateway_s_day(gateway, pipeline, wait_until, tmp_path):
    """What needs no death of anybody, on one gateway."""
    client = gateway.client()
    video_id = create(client)
    video = wait_until(client, video_id, "completed", "failed")
    assert (video["status"], video["progress"], video["error"]) == ("completed", 100, None)
    answer = client.get(f"/v1/videos/{video_id}/content")
    assert answer.headers["content-type"] == "video/mp4" and "attachment" in answer.headers["content-disposition"]
    settings = {name: VIDEO[name] for name in ("guidance", "num_steps")}
    expected = pipeline([VIDEO["prompt"]], seeds=11, **settings)[0]
    assert np.array_equal(frames_of(answer.content), frames_of(encode_mp4(expected.video, 8)))
    part = client.get(f"/v1/videos/{video_id}/content", headers={"range": "bytes=4-7"})
    assert (part.status_code, part.content) == (206, b"ftyp")
    image = wait_until(client, create(client, num_frames=1), "completed")
    assert image["media_type"] == "image/png"

    shown_by_the_demo(gateway, expected)
    follow_to_the_end(client)
    cancel_while_it_runs(client, wait_until)
    refused_by_the_model(client, wait_until)
    told_to_prometheus(gateway)
    one_line_for_each_request(gateway)


def shown_by_the_demo(gateway, expected) -> None:
    """The page's own work, with a key."""
    studio = Studio(GatewayClient(gateway.url, gateway.new_key()))
    request = studio.request(**{name: value for name, value in VIDEO.items()})
    *progress, video = list(studio.run("me", request))
    assert all(isinstance(event, StepDone) for event in progress)
    assert np.array_equal(frames_of(video.data), frames_of(encode_mp4(expected.video, 8)))
    assert studio.keep(request, video).path.read_bytes() == video.data
    running = studio.run("me", replace(request, num_steps=5000))
    assert next(running).preview.startswith(JPEG)
    studio.cancel("me")
    with pytest.raises(CancelledError):
        list(running)
    assert studio.client._ask("GET", "/v1/videos")["data"] == [], "what was shown or cancelled is not kept there"
    with pytest.raises(UserError, match="valid key"):
        GatewayClient(gateway.url, "wrong")


def follow_to_the_end(client: httpx.Client) -> None:
    video_id = create(client, num_steps=800, preview_every=100)
    with client.stream("GET", f"/v1/videos/{video_id}/events") as answer:
        lines = [line for line in answer.iter_lines() if line]
    kinds = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    videos = [each for each in told if each["object"] == "video"]
    previews = [each for each in told if each["object"] == "video.preview"]
    assert kinds[-1] == "video.completed" and videos[-1]["progress"] == 100
    steps = [video["step"] for video in videos]
    assert steps == sorted(steps) and "video.in_progress" in kinds
    assert previews and all(base64.b64decode(each["data"]).startswith(JPEG) for each in previews)
    assert len({each["step"] for each in previews}) == len(previews), "none is sent twice"


def cancel_while_it_runs(client: httpx.Client, wait_until) -> None:
    video_id = create(client, **LONG)
    wait_until(client, video_id, "in_progress")
    assert client.get(f"/v1/videos/{video_id}/content").json()["error"]["code"] == "not_completed"
    assert client.delete(f"/v1/videos/{video_id}").status_code == 200
    assert client.get(f"/v1/videos/{video_id}").status_code == 404
    wait_until(client, create(client), "completed")


def refused_by_the_model(client: httpx.Client, wait_until) -> None:
    """What only the model can tell to be wrong ends the job at once."""
    video = wait_until(client, create(client, eta=0.5, sampler="dpmpp_2m"), "completed", "failed")
    if video["status"] == "failed":
        assert video["error"]["code"] == "invalid_request"


def told_to_prometheus(gateway) -> None:
    told = gateway.metrics()
    for name in ("megadit_jobs", "megadit_stage_seconds_bucket", "megadit_videos_total", "megadit_server_up"):
        assert name in told
    assert 'outcome="cancelled"' in told


def one_line_for_each_request(gateway) -> None:
    lines = [json.loads(line) for line in gateway.log.read_text().splitlines() if line.startswith("{")]
    requests = [line for line in lines if line["event"] == "request"]
    assert {"request_id", "route", "status", "seconds"} <= set(requests[0])
    assert "/v1/videos/{video_id}" in {line["route"] for line in requests}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
def test_the_openai_client_works(gateway, wait_until, tmp_path, monkeypatch):
    openai = pytest.importorskip("openai")
    from megadit.serve.examples import with_openai

    key = gateway.new_key()
    monkeypatch.chdir(tmp_path)
    with_openai.main(gateway.url, key, "a red seven")
    assert len(frames_of(Path("video.mp4").read_bytes())) == 5
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, timeout=120)
    video = client.videos.create_and_poll(
        prompt="a red seven", size="24x16", seconds="1", model="text_to_video", poll_interval_ms=100
    )
    assert (video.status, video.progress, video.size, video.error) == ("completed", 100, "24x16", None)
    assert len(frames_of(client.videos.download_content(video.id).content)) == 8
    for variant, beginning in (("thumbnail", b"RIFF"), ("spritesheet", b"\xff\xd8\xff")):
        assert client.videos.download_content(video.id, variant=variant).content.startswith(beginning)
    second = client.videos.create(prompt="b", extra_body={"seed": 3, "num_steps": 2})
    assert client.videos.poll(second.id, poll_interval_ms=100).status == "completed"
    listed = [each.id for each in client.videos.list(limit=1)]
    assert listed[:2] == [second.id, video.id] and len(listed) == 3, "pages follow each other"
    assert client.videos.retrieve(second.id).status == "completed"
    assert client.videos.delete(second.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(second.id)
    with pytest.raises(openai.BadRequestError, match="multiple of 4"):
        client.videos.create(prompt="a", size="25x16")
    assert [model.id for model in client.models.list()] == ["text_to_video"]
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="wrong").videos.list()


@pytest.mark.slow
def test_a_drain_finishes_what_runs_and_keeps_the_rest(start_gateway, triton, wait_until):
    gateway = start_gateway(triton, arguments=("--slots=1", "--drain_seconds=300"))
    client = gateway.client()
    running = create(client, num_steps=600)
    wait_until(client, running, "in_progress", "completed")
    waiting = create(client)
    os.kill(gateway.process.pid, signal.SIGTERM)
    assert gateway.process.wait(timeout=300) == 0
    again = gateway.restart()
    try:
        while not again.is_ready():
            time.sleep(0.1)
        assert status(client, running) == "completed", "it was finished, not begun anew"
        wait_until(client, waiting, "completed")
    finally:
        again.process.terminate()
        assert again.process.wait(timeout=120) == 0


def test_keys_by_command(tmp_path, capsys):
    store = f"--store={tmp_path / 'jobs.sqlite'}"
    assert verbs.main(["serve", "keys", "add", "alice", store, "--max_active", "3"]) == 0
    text = capsys.readouterr().out.strip()
    assert text.startswith("mdk_")
    assert verbs.main(["serve", "keys", "list", store]) == 0
    listed = capsys.readouterr().out
    assert "alice" in listed and "max_active 3" in listed and text not in listed
    key_id = text.split("_")[1]
    assert verbs.main(["serve", "keys", "revoke", key_id, store]) == 0
    assert verbs.main(["serve", "keys", "list", store]) == 0
    assert "revoked" in capsys.readouterr().out
    assert verbs.main(["serve", "keys", "revoke", "nobody", store]) == 2
    assert verbs.main(["serve", "keys", "add", "bob", store, "--webhook", "file:///etc/passwd"]) == 2
