"""A service that is not what it says: no video, too much, somewhere else, in one line each."""

import functools

import httpx
import pytest

from megadit.infer.evaluate import service
from megadit.infer.media.video_io import encode_mp4
from megadit.models.diffusion.settings import SERVED
from megadit.models.shared.errors import UserError

from .test_videos import pixels

DEFAULTS = {"num_steps": 2, "guidance": 2.0, "num_frames": 5, "height": 15, "width": 24, "fps": 8.0}
MP4 = encode_mp4(pixels(1, 5, 15, 24)[0], 8.0)


@pytest.fixture
def asked(monkeypatch):
    """Opens a service whose answers are given by path, and keeps what it was asked."""
    requests = []

    def open_service(tmp_path, **answers):
        known = {
            "models": {"data": [{"id": "text_to_video", "service": {"defaults": DEFAULTS}}]},
            "videos": {"id": "one", "status": "queued"},
            "one": {"id": "one", "status": "completed"},
            "content": MP4,
        } | answers

        def answer(request: httpx.Request) -> httpx.Response:
            requests.append(request)
            found = known[request.url.path.rsplit("/", 1)[1]]
            if isinstance(found, httpx.Response):
                return found
            return httpx.Response(200, content=found) if isinstance(found, bytes) else httpx.Response(200, json=found)

        client = functools.partial(httpx.Client, transport=httpx.MockTransport(answer))
        monkeypatch.setattr(service.httpx, "Client", client)
        (tmp_path / "key").write_text("secret")
        maker = service.open_service("http://service:1/", tmp_path / "key")
        return lambda: list(maker.videos(["a red seven"], [7], maker.defaults))

    open_service.requests = requests
    return open_service


def test_a_video_is_asked_for_fetched_and_deleted(asked, tmp_path):
    (video_THWC,) = asked(tmp_path)()
    assert video_THWC.shape == (5, 15, 24, 3)  # the row that an mp4 adds is left out
    _, made, *_, deleted = asked.requests
    body = httpx.Response(200, content=made.content).json()
    assert (body["prompt"], body["seed"], body["size"], body["model"]) == ("a red seven", 7, "24x15", "text_to_video")
    assert set(SERVED) - {"width", "height"} <= set(body)
    assert (deleted.method, deleted.url.path) == ("DELETE", "/v1/videos/one")
    assert all(each.headers["authorization"] == "Bearer secret" for each in asked.requests)


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"content": b"no video"}, "cannot read the video of seed 7 from http://service:1"),
        ({"content": encode_mp4(pixels(1, 3, 15, 24)[0], 8.0)}, r"has \(3, 15, 24\) frames, height, width in place of"),
        ({"content": b"0" * 70_000}, "is longer than"),
        ({"models": httpx.Response(302, headers={"location": "http://elsewhere/"})}, "refuses: it answers 302"),
        ({"models": b"<html>"}, "is not valid JSON"),
        ({"models": {"data": []}}, "is not a megadit video API"),
        ({"models": {"data": [{"id": "x", "service": {"defaults": {"rm": 1}}}]}}, "does not give valid defaults of x"),
        ({"videos": {"status": "queued"}}, "returned no valid video ID"),
        ({"videos": {"id": "../../keys"}}, "returned no valid video ID"),
        (
            {"one": {"status": "failed", "error": {"message": "no memory"}}},
            "failed to generate 'a red seven': no",
        ),
        (
            {"videos": httpx.Response(429, headers={"retry-after": "3600"}, json={"error": {"message": "quota"}})},
            "quota",
        ),
        ({"models": httpx.Response(503, headers={"retry-after": b"\xb2"}, content=b"busy")}, "it answers 503"),
        ({"models": httpx.Response(400, content=b"[" * 50_000)}, "refuses: it answers 400"),
    ],
)
def test_a_service_that_is_none_is_one_line(asked, tmp_path, monkeypatch, answers, says):
    monkeypatch.setattr(service, "_MAX_VIDEO_BYTES", 60_000)
    monkeypatch.setattr(service, "PATIENCE_SECONDS", 0.0)
    with pytest.raises(UserError, match=says):
        asked(tmp_path, **answers)()
    assert {each.url.host for each in asked.requests} == {"service"}


def test_an_answer_that_drips_is_given_up(asked, tmp_path, monkeypatch):
    videos = asked(tmp_path, content=httpx.Response(200, content=iter([b"a", b"b"])))
    monkeypatch.setattr(service, "_SECONDS_OF_AN_ANSWER", -1.0)
    with pytest.raises(UserError, match="is too slow: [0-9]+ bytes in 0 s"):
        videos()
