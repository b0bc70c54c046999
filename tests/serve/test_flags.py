"""Options of the commands that serve: each reaches the server, the request or the files that it is for.

What these do with it is tested beside them; here only who starts and asks them is replaced.
"""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megadit.models.diffusion.settings import SERVED
from megadit.models.shared.cli import verbs
from megadit.models.shared.cli.setting import other_names
from megadit.serve import ask
from megadit.serve.client import Generation
from megadit.serve.contract import VideoRequest
from megadit.serve.events import UnavailableError, VideoResult
from megadit.serve.gateway import command
from megadit.serve.gateway.service import GatewaySettings
from megadit.serve.launch import run, up
from megadit.serve.page import demo
from megadit.serve.repository import build as build_repository


class ReachedError(Exception):
    """Thrown where a command would have gone on for good."""


@pytest.fixture
def note():
    """note(result): a stand-in that notes what it is called with; note.all is what was noted."""

    def note(result=None):
        def stand_in(*arguments, **settings):
            note.all.append((arguments, settings))
            return result() if callable(result) else result

        return stand_in

    note.all = []
    return note


def differing(seen, flags, *command):
    """The flags that change what is seen of the command."""
    plain = seen(*command)
    assert seen(*command) == plain, "the control"
    return [flag for flag, *values in flags if seen(*command, flag, *values) != plain]


# ----------------------------------------------------------------------------------------------- build-repository


REPOSITORY = (
    *(("--images",), ("--dtype", "bfloat16"), ("--device", "0,3"), ("--instances", "2"), ("--max_batch_size", "3")),
    *(("--max_queue_size", "5"), ("--queue_seconds", "7"), ("--batching_seconds", "0.5"), ("--max_videos", "2")),
    *(("--max_prompt_characters", "9"), ("--max_frames", "6"), ("--max_pixels", "5000"), ("--max_work", "90000")),
    *(("--max_text_tokens", "7"), ("--max_media_bytes", "8"), ("--max_media_pixels", "9"), ("--max_media_side", "6")),
    *(("--max_media_frames", "5"), ("--max_media_seconds", "4")),
    *(("--max_adapters", "3"), ("--max_adapter_bytes", "2"), ("--max_adapter_rank", "4")),
    *(("--adapters", "."), ("--adapter_bytes", "1")),
    ("--guardrail_dir", "guard"),
    ("--scorer_dir", "judge"),
)


def test_every_option_changes_the_repository(bundle_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "guard").mkdir()
    (tmp_path / "guard" / "guardrail.py").touch()
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "scorer.py").touch()

    def seen(*more):
        out = tmp_path / "repository"
        assert verbs.main(["serve", "build-repository", str(bundle_dir), str(out), *more]) == 0
        return {str(path.relative_to(out)): path.read_text() for path in out.glob("*/config.pbtxt")}

    assert differing(seen, REPOSITORY) == [flag for flag, *_ in REPOSITORY]


def test_exported_networks_and_runtimes_are_asked_for(bundle_dir, tmp_path, note, monkeypatch):
    monkeypatch.setattr(build_repository, "build_repository", note(lambda: tmp_path))

    def seen(*more):
        note.all.clear()
        assert verbs.main(["serve", "build-repository", str(bundle_dir), str(tmp_path / "out"), *more]) == 0
        return list(note.all)

    assert differing(seen, [("--networks",), ("--runtime", "onnx")]) == ["--networks", "--runtime"]


# ---------------------------------------------------------------------------------------------- run, up, gateway


RUN = (
    *(("--model", "text_to_image"), ("--host", "0.0.0.0")),
    *(("--http_port", "9000"), ("--grpc_port", "9001"), ("--metrics_port", "9002")),
)


def test_every_option_reaches_the_server(tmp_path, note, monkeypatch):
    monkeypatch.setattr(run, "LocalServer", note(lambda: SimpleNamespace(process=None)))
    monkeypatch.setattr(run, "keep_running", lambda *_, **__: 0)
    monkeypatch.setattr(run, "interrupt_at_ending_signals", lambda: None)

    def seen(*more):
        note.all.clear()
        assert verbs.main(["serve", "run", str(tmp_path), *more]) == 0
        return list(note.all)

    flags = (*RUN, ("--control_secret", str(tmp_path / "secret")))
    assert differing(seen, flags) == [flag for flag, *_ in flags]


def test_every_option_reaches_the_container(tmp_path, capsys):
    (tmp_path / "text_to_image").mkdir()
    (tmp_path / "text_to_image" / "config.pbtxt").touch()

    def seen(*more):
        assert verbs.main(["serve", "run", str(tmp_path), "--docker", "print", *more]) == 0
        return capsys.readouterr().out

    container = (("--image", "mine"), ("--gpus", "none"), ("--model", "text_to_image"), ("--http_port", "9000"))
    assert differing(seen, container) == [flag for flag, *_ in container]
    assert seen().startswith("docker run")


UP = (
    *(("--model", "text_to_image"), ("--host", "0.0.0.0"), ("--port", "9003"), ("--drain_seconds", "5")),
    *(("--hang_seconds", "6"), ("--http_port", "9000"), ("--grpc_port", "9001"), ("--triton_metrics_port", "9002")),
    ("--", "--slots=3"),
)


def test_every_option_reaches_what_is_kept_up(tmp_path, note, monkeypatch):
    monkeypatch.setattr(up, "LocalServer", note(lambda: SimpleNamespace(grpc_url="127.0.0.1:8001", process=None)))
    monkeypatch.setattr(up, "gateway_process", note())
    monkeypatch.setattr(up, "supervise", lambda *_: 0)

    def seen(*more):
        note.all.clear()
        assert verbs.main(["serve", "up", str(tmp_path), *more]) == 0
        return list(note.all)

    flags = (("--control_secret", str(tmp_path / "secret")), *UP)
    assert differing(seen, flags) == [flag for flag, *_ in flags]


GATEWAY = (
    *(("--server", "grpc://elsewhere:1"), ("--model", "text_to_image"), ("--store", "other.sqlite")),
    *(("--results", "other"), ("--result_seconds", "1"), ("--host", "0.0.0.0"), ("--port", "9003")),
    *(("--metrics_host", "0.0.0.0"), ("--metrics_port", "9004"), ("--name", "mine"), ("--slots", "3")),
    *(("--job_seconds", "2"), ("--hang_seconds", "3"), ("--max_body_bytes", "99"), ("--max_streams", "4")),
    *(("--min_free_bytes", "5"), ("--history_seconds", "6"), ("--drain_seconds", "7")),
    *(("--max_connections", "20"), ("--max_upload_bytes", "8"), ("--max_uploads", "9"), ("--adapters", "zogs")),
    *(("--c2pa_certificate", "mine.crt"), ("--c2pa_key", "mine.key"), ("--private_webhooks",)),
    ("--cors_origin", "https://a.example"),
)


def test_every_option_reaches_the_gateway(note, monkeypatch):
    gateway = SimpleNamespace(metrics=SimpleNamespace(registry=None), start=lambda: None)
    gateway.store = SimpleNamespace(owner="")
    monkeypatch.setattr(command, "Gateway", note(lambda: gateway))
    for name in ("_listen", "serve_metrics", "most_connections", "Door"):
        monkeypatch.setattr(command, name, note())
    monkeypatch.setattr(command, "serve", note(0))
    monkeypatch.setattr(command, "log_as_json", lambda: None)
    monkeypatch.setattr(command, "log", lambda *_, **__: None)

    def seen(*more):
        note.all.clear()
        assert verbs.main(["serve", "gateway", *more]) == 0
        return [(arguments[:3], settings) for arguments, settings in note.all]

    assert differing(seen, GATEWAY) == [flag for flag, *_ in GATEWAY]
    settings = GatewaySettings()
    assert seen()[3][0] == (settings,) and replace(settings, slots=3) == seen("--slots", "3")[3][0][0]


def test_every_option_of_a_key_is_written_down(tmp_path, capsys):
    def keys(*words):
        assert verbs.main(["serve", "keys", *words]) == 0
        return capsys.readouterr().out

    limits = (("--requests_per_minute", "7"), ("--max_active", "8"), ("--videos_per_day", "9"))
    limits += (
        ("--max_stored_bytes", "10"),
        ("--max_upload_bytes", "11"),
        ("--max_adapters", "12"),
        ("--max_adapter_bytes", "13"),
    )
    for number, (flag, value) in enumerate((*limits, ("--webhook", "https://example.org/told"))):
        store = f"--store={tmp_path / str(number)}.sqlite"
        keys("add", "alice", store, flag, value)
        assert keys("list", store).replace(",", "").split().count(value) == 1, flag
    other = f"--store={tmp_path / 'other.sqlite'}"
    keys("add", "bob", other)
    assert "alice" not in keys("list", other)


# ---------------------------------------------------------------------------------------------------- ask, demo


REQUEST = (
    *(("--negative_prompt", "blue"), ("--sampler", "heun"), ("--seed", "5"), ("--guidance", "3"), ("--height", "32")),
    *(("--width", "32"), ("--num_steps", "7"), ("--num_frames", "9"), ("--fps", "12"), ("--num_videos", "2")),
    *(("--num_video_frames", "9"), ("--eta", "0.5"), ("--image_guidance", "3"), ("--input_video", "a.png")),
    *((f"--{other}", "3") for other in other_names(SERVED)),
    *(("--strength", "0.5"), ("--continue_video", "a.png"), ("--lead_to_video", "a.png"), ("--keep_frames", "2")),
    *(("--image", "a.png"), ("--first_frame", "a.png"), ("--conditioned_image_or_video_path", "a.png")),
    *(("--last_image", "a.png"), ("--last_frame", "a.png"), ("--keyframe", "3:a.png"), ("--video", "a.png")),
    *(("--mask", "a.png"), ("--instruction", "make it red"), ("--adapter", "zog:0.8"), ("--evaluate",)),
)
ASKED = (("--url", "grpc://elsewhere:1"), ("--model", "text_to_image"), ("--timeout", "9"), ("--priority", "1"))


def test_every_option_reaches_the_service(tmp_path, note, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").write_bytes(b"a picture")
    facts = {"index": 0, "prompt": "a", "seed": 1, "settings": {"fps": 8.0}, "seconds": 1.0, "batch_size": 1}
    video = VideoResult(data=b"video", media_type="video/mp4", **facts)

    class Client:
        def __init__(self, *arguments, **settings):
            note()(arguments, settings)

        def stream(self, request, **settings):
            note()(request, settings)

        def info(self):
            return SimpleNamespace(warning=lambda request: f"of {request.prompt}")

    monkeypatch.setattr(ask, "VideoClient", Client)
    monkeypatch.setattr(ask, "GatewayClient", Client)
    monkeypatch.setattr(ask, "_watch", lambda _: [video])
    (tmp_path / "key").write_text("secret")

    def seen(*more):
        note.all.clear()
        assert verbs.main(["serve", "ask", "a", *more]) == 0
        told = capsys.readouterr()
        assert told.err == "warning: of a\n"
        return list(note.all), told.out

    flags = (*REQUEST, *ASKED, ("--output", "elsewhere.mp4"), ("--key_file", "key"))
    assert differing(seen, flags) == [flag for flag, *_ in flags]
    patient = seen("--key_file", "key", "--patience", "9")[0][0]
    assert patient == ((("http://127.0.0.1:8080", "secret"), {"model": "text_to_video", "patience": 9.0}), {})
    (_, ((request, _), _)), _ = seen("--seed", "5")
    assert request == VideoRequest(prompt="a", seed=5)
    assert json.loads((tmp_path / "elsewhere.mp4.json").read_text())["seed"] == 1


def test_a_service_that_goes_away_is_asked_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ask, "_PAUSE", 0.01)
    facts = {"index": 0, "prompt": "a", "seed": 1, "settings": {"fps": 8.0}, "seconds": 1.0, "batch_size": 1}
    responds = iter([UnavailableError("it is gone")] * 3 + [VideoResult(data=b"v", media_type="video/mp4", **facts)])

    class Client:
        def __init__(self, *arguments, **settings):
            pass

        def stream(self, request, **settings):
            def events(cancelled):
                if isinstance(answer := next(responds), Exception):
                    raise answer
                yield answer

            return Generation(events)

        def info(self):
            return SimpleNamespace(warning=lambda request: None)

    monkeypatch.setattr(ask, "VideoClient", Client)
    assert verbs.main(["serve", "ask", "a"]) == 0
    assert capsys.readouterr().err == "it is gone; asking again for 300 s\n"
    responds = iter([UnavailableError("it is gone")] * 2)
    assert verbs.main(["serve", "ask", "a", "--patience", "0"]) == 1
    assert verbs.main(["serve", "ask", "a", "--timeout", "0.001"]) == 1


def test_every_option_reaches_the_page(tmp_path, note, monkeypatch, capsys):
    monkeypatch.setattr(demo, "interrupt_at_ending_signals", lambda: None)
    monkeypatch.setattr(demo, "VideoClient", note(lambda: SimpleNamespace(info=dict)))
    monkeypatch.setattr(demo, "GatewayClient", note(lambda: SimpleNamespace(info=dict)))
    monkeypatch.setattr(demo, "Studio", lambda client: None)
    monkeypatch.setitem(sys.modules, "megadit.serve.page.layout", SimpleNamespace(show=note()))

    def seen(*more):
        note.all.clear()
        code = verbs.main(["serve", "demo", *more])
        return code, list(note.all), capsys.readouterr().err

    (tmp_path / "key").write_text("secret")
    flags = (("--url", "grpc://elsewhere:1"), ("--host", "0.0.0.0"), ("--port", "9005"))
    flags += (("--key_file", str(tmp_path / "key")),)
    flags += (("--bundle", "no/such/bundle"), ("--student", "no/such/student"))
    assert differing(seen, flags) == [flag for flag, *_ in flags]
    assert "no/such/bundle does not exist" in seen("--bundle", "no/such/bundle")[2]


def test_a_key_of_a_new_store_says_where_it_is(tmp_path, monkeypatch, capsys):
    """In another folder than the service, it would be a key that nobody takes."""
    monkeypatch.chdir(tmp_path)
    assert verbs.main(["serve", "keys", "list"]) == 2
    assert f"there is no store at {tmp_path}/gateway/jobs.sqlite" in capsys.readouterr().err
    for is_new in (True, False):
        assert verbs.main(["serve", "keys", "add", "me"]) == 0
        error = capsys.readouterr().err
        assert f"is stored in {tmp_path}/gateway/jobs.sqlite" in error and ("this store is new" in error) == is_new
