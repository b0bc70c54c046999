"""`--caption_server URL`: captions of a real server on this machine, which answers well, badly, late and never."""

import base64
import io
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image

from megadit.models.shared.files import read_json
from megadit.train.data.ingest.clips import captions
from megadit.train.data.ingest.clips.captions import caption_of
from megadit.train.data.ingest.sources import http_retries as exchanges
from megadit.train.data.prepare import command as prepare
from megadit.train.dataset.dataset_info import DatasetInfo

COUNT = 9
ENDLESS = object()
COLOURS = np.random.default_rng(0).integers(0, 256, (COUNT, 3))


class Captioner(BaseHTTPRequestHandler):
    """Says which of the pictures it was shown; `server.trouble` has for some of them something else to do."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text, *pictures = question["messages"][0]["content"]
        frames = [_decoded(part["image_url"]["url"]) for part in pictures]
        number = int(np.abs(COLOURS - frames[0].mean(axis=(0, 1))).sum(1).argmin())
        server = self.server
        server.asked[number] += 1
        server.seen.append((self.path, self.headers["Authorization"], question["model"], text["text"], frames))
        if server.together is not None:
            server.together.wait(120)
        answer = server.trouble.get(number, _well(f"  number {number},\nseen "))
        answer = answer(server.asked[number]) if callable(answer) else answer
        if answer is None:
            server.stopped.wait(120)
            self.close_connection = True
            return
        if answer is ENDLESS:
            self._never_end()
            return
        code, body = answer
        self.send_response(code)
        self.send_header("Location", f"{server.url}/elsewhere")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.server.asked["by a redirect"] += 1
        self.send_error(404)

    def _never_end(self) -> None:
        """A body of no announced length, until the other side hangs up: or has read far too much."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            while self.server.poured < 64 * captions.MAX_BYTES:
                self.wfile.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
                self.server.poured += 0x10000
        except OSError:
            pass
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


def _decoded(url: str) -> np.ndarray:
    kind, _, content = url.partition(",")
    assert kind == "data:image/jpeg;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(content)), formats=("JPEG",)))


def _well(text: object, **choice: object) -> tuple[int, bytes]:
    return 200, json.dumps({"choices": [{"message": {"content": text}, "finish_reason": "stop"} | choice]}).encode()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(exchanges, "FIRST_PAUSE", 0.01)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Captioner)
    server.daemon_threads = True
    server.asked, server.seen, server.trouble, server.together, server.poured = Counter(), [], {}, None, 0
    server.stopped = threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.stopped.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def pictures(tmp_path):
    """Nine of noise around a colour each; the last has a caption of its own."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    generator = np.random.default_rng(1)
    for number, colour in enumerate(COLOURS):
        noise = generator.integers(-40, 41, (8, 8, 1))
        pixels = np.clip(colour + noise - noise.mean(), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).resize((64, 64), Image.Resampling.NEAREST).save(folder / f"{number}.png")
    (folder / f"{COUNT - 1}.txt").write_text("its own")
    return folder


@pytest.fixture
def run(server, pictures, tmp_path):
    """run(*options): the code of a preparation."""

    def run(*options: str, kind: str = "images", source=pictures, out=tmp_path / "out") -> int:
        command = [kind, str(source), str(out), "--sizes", "32x32", "--num_frames", "1", "--tokenizer", "pixels"]
        command += ["--num_workers", "0", "--val_share", "0", "--max_duplicate_bits", "-1", "--min_contrast", "0"]
        return prepare.main([*command, "--caption_server", server.url, "--caption_model", "see", *options])

    return run


def captions_of(out) -> dict[str, str]:
    clips = map(json.loads, (out / "prepare" / "train.jsonl").read_text().splitlines())
    return {clip["source"]["name"]: clip["source"]["caption"] for clip in clips}


def skips_of(out) -> dict[str, int]:
    return read_json(out / "report.json")["skips"]


def test_clips_without_a_caption_get_one(server, run, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGADIT_CAPTION_KEY", "secret")
    assert run("--caption_prompt", "What is it?") == 0
    expected = {f"{number}.png": f"number {number}, seen" for number in range(COUNT - 1)}
    assert captions_of(tmp_path / "out") == expected | {f"{COUNT - 1}.png": "its own"}
    assert {seen[:4] for seen in server.seen} == {("/v1/chat/completions", "Bearer secret", "see", "What is it?")}
    assert server.asked == dict.fromkeys(range(COUNT - 1), 1)
    assert all(frames[0].shape == (32, 32, 3) for *_, frames in server.seen)
    assert not any(b"secret" in path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())


def test_as_many_are_under_way_as_asked_for(server, run):
    """The server answers none before all have asked: one after another, they would never come."""
    server.together = threading.Barrier(COUNT - 1)
    assert run("--caption_requests", str(COUNT - 1)) == 0


def test_frames_of_a_video_are_shown_in_their_order(server, run, tmp_path, make_clip):
    fading = np.linspace(0, 200, 17)[:, None, None, None] + np.random.default_rng(0).integers(0, 40, (64, 64, 3))
    (tmp_path / "videos").mkdir()
    make_clip(tmp_path / "videos" / "clip.mp4", fading.astype(np.uint8))
    options = ("--num_frames", "17", "--caption_frames", "3", "--stages", "fetch,scan,select")
    assert run(*options, kind="videos", source=tmp_path / "videos") == 0
    ((*_, frames),) = server.seen
    assert np.allclose([frame.mean() for frame in frames], [20, 120, 220], atol=6)


@pytest.mark.parametrize(
    ("answer", "reason", "attempts"),
    [
        ((500, b""), "http 500", 3),
        ((400, b""), "http 400", 1),
        ((302, b""), "http 302", 1),
        ((200, b"<html>"), "not an answer", 1),
        ((200, b"[" * 100_000), "not an answer", 1),
        ((200, b'{"choices": []}'), "not an answer", 1),
        (_well(None), "not an answer", 1),
        (_well("\ud800"), "not an answer", 1),
        (_well(" \n\0"), "empty", 1),
        (_well("word " * 1000), "too long", 1),
        (_well("half a sen", finish_reason="length"), "not finished", 1),
        ((200, b" " * (captions.MAX_BYTES + 1)), "too large", 1),
    ],
)
def test_a_failure_has_its_reason_and_leaves_out_one_clip(server, run, tmp_path, answer, reason, attempts):
    server.trouble[3] = answer
    assert run("--stages", "fetch,scan,select") == 0
    skips = [json.loads(line) for line in (tmp_path / "out/prepare/skips.jsonl").read_text().splitlines()]
    assert [(skip["source"], skip["reason"]) for skip in skips] == [("3.png", f"not captioned: {reason}")]
    assert server.asked[3] == attempts and len(captions_of(tmp_path / "out")) == COUNT - 1
    assert not server.asked["by a redirect"]


def test_of_an_answer_without_end_no_more_is_read_than_of_any(server, run, tmp_path):
    server.trouble[3] = ENDLESS
    assert run("--stages", "fetch,scan,select") == 0
    skips = [json.loads(line) for line in (tmp_path / "out/prepare/skips.jsonl").read_text().splitlines()]
    assert [skip["reason"] for skip in skips] == ["not captioned: too large"]
    assert server.poured < 32 * captions.MAX_BYTES  # what lies in the sockets included


def test_a_busy_server_is_asked_again_and_a_hanging_one_given_up(server, run, tmp_path):
    server.trouble[2] = lambda attempt: (503, b"") if attempt < 3 else _well("at last")
    server.trouble[5] = None
    assert run("--caption_seconds", "10") == 0
    assert captions_of(tmp_path / "out")["2.png"] == "at last" and server.asked[2] == 3
    assert skips_of(tmp_path / "out") == {"not captioned: timed out": 1}


def test_a_killed_run_asks_for_nothing_twice(server, run, tmp_path):
    """Killed after some answers, in the midst of writing one."""
    kept = tmp_path / "out" / "prepare" / "captions.jsonl"
    assert run() == 0
    whole, answers = captions_of(tmp_path / "out"), kept.read_bytes()
    lines = answers.splitlines(keepends=True)
    for path in ("selection.json", "train.jsonl", "val.jsonl", "skips.jsonl"):
        (tmp_path / "out" / "prepare" / path).unlink()
    kept.write_bytes(b"".join(lines[:5]) + lines[5][:20])
    server.asked.clear()
    assert run("--stages", "select") == 0
    assert captions_of(tmp_path / "out") == whole and sorted(kept.read_bytes().splitlines(keepends=True)) == sorted(
        lines
    )
    assert set(server.asked.values()) == {1} and server.asked.total() == len(lines) - 5


def test_what_failed_is_asked_for_again(server, run, tmp_path):
    """The data set is then the one of a server in good health."""
    server.trouble[3] = (400, b"")
    assert run() == 0 and skips_of(tmp_path / "out") == {"not captioned: http 400": 1}
    assert run() == 0 and server.asked[3] == 1  # nothing to do
    server.trouble.clear()
    assert run("--redo", "failed") == 0
    assert server.asked == dict.fromkeys(range(COUNT - 1), 1) | {3: 2}
    assert DatasetInfo.read(tmp_path / "out").num_samples["train"] == COUNT and not skips_of(tmp_path / "out")
    assert run(out=tmp_path / "healthy") == 0
    for name in ("train-000000.tar", "report.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "healthy" / name).read_bytes()


def test_a_server_that_captions_nothing_ends_the_run_which_goes_on_with_another(server, run, tmp_path, capsys):
    server.trouble = dict.fromkeys(range(COUNT), (401, b""))
    assert run() == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "returns no captions: 8 x http 401" in error
    server.trouble.clear()
    assert run() == 0 and len(captions_of(tmp_path / "out")) == COUNT


def test_a_server_that_ends_midway_ends_the_run_which_goes_on_with_what_it_said(
    server, run, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(captions, "HOPELESS", 3)
    server.trouble = dict.fromkeys(range(2, COUNT), (401, b""))
    assert run("--caption_requests", "1") == 2
    assert "returns no captions any more: 3 x http 401; 2 captions" in capsys.readouterr().err.splitlines()[-1]
    server.trouble = dict.fromkeys(range(2, COUNT - 1), (400, b""))  # each the clip's own
    assert run("--caption_requests", "1") == 0 and server.asked[0] == server.asked[1] == 1
    assert skips_of(tmp_path / "out") == {"not captioned: http 400": COUNT - 3}


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://a b", "http://[::1"])
def test_what_is_no_server_is_refused_before_anything_is_read(run, tmp_path, url, capsys):
    assert run("--caption_server", url) == 2
    assert "write an address such as" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_model_without_a_server_is_refused_and_so_is_another_model(run, pictures, tmp_path, capsys):
    assert prepare.main(["images", str(pictures), str(tmp_path / "new"), "--caption_model", "see"]) == 2
    assert "belong together" in capsys.readouterr().err
    assert run("--stages", "fetch") == 0
    assert run("--caption_model", "look") == 2
    assert "caption_model=see" in capsys.readouterr().err


def test_addresses_with_and_without_the_version_are_the_same(server, run, tmp_path):
    assert run("--caption_server", f"{server.url}/v1/", "--stages", "fetch,scan,select") == 0
    assert {path for path, *_ in server.seen} == {"/v1/chat/completions"}


def test_a_caption_is_one_line():
    assert caption_of(_well("A\tred\u0000 ball.\n\nIt rolls. ")[1]) == "A red ball. It rolls."
