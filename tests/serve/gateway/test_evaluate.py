"""`megadit evaluate` of a service: the videos of `generate`, over the video API, kept, gone on with, and refused."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from megadit.infer.evaluate import command, generated, service
from megadit.infer.evaluate.videos import VIDEOS_PER_CHUNK, decoded
from megadit.infer.media.video_io import encode_mp4
from megadit.models.diffusion.settings import SERVED
from megadit.models.shared.files import read_json
from tests.infer.evaluate.conftest import write_folder

COUNT, PART = 8, 6
"""Videos, and how many are asked for at once."""
FIGURES = ["--metrics", "motion", "flicker", "--num_steps", "2"]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("real") / "real", COUNT)


@pytest.fixture
def key_file(tmp_path):
    def write(key: str):
        (tmp_path / "key").write_text(f"{key}\n")
        return str(tmp_path / "key")

    return write


@pytest.fixture
def asked(gateway, pipeline):
    """What the service was asked for; it is made in a thread, as a Triton would. Prompts of `bad` fail."""
    requests, ended = [], threading.Event()

    def work() -> None:
        while not ended.wait(0.02):
            if (job := gateway.store.claim(frozenset({"text_to_video"}))) is None:
                continue
            requests.append(job.request)
            if job.request.prompt == "bad":
                gateway.store.fail(job, "invalid_request", "nobody makes this")
                continue
            settings = {name: getattr(job.request, name) for name in SERVED}
            made = pipeline([job.request.prompt], seeds=job.request.seed, **settings)[0]
            result = gateway.results.put(job.id, encode_mp4(made.video, 8), "video/mp4")
            gateway.store.complete(job, result, seconds_to_live=1000)

    thread = threading.Thread(target=work)
    thread.start()
    yield requests
    ended.set()
    thread.join()


def evaluate(*words) -> int:
    return command.main([str(word) for word in words])


def videos_of(out, maker: str) -> np.ndarray:
    """Those that a maker ("service", "tokenizer") is named in the request of, NTHWC."""
    (folder,) = [each.parent for each in out.glob("videos/*/request.json") if maker in read_json(each)]
    return np.concatenate([load_file(file)["video_NTHWC"] for file in sorted(folder.glob("*.safetensors"))])


def report_of(out) -> dict:
    return {name: value for name, value in read_json(out / "report.json").items() if name != "seconds"}


def test_a_service_makes_the_videos_of_its_bundle_and_they_are_kept(
    url, asked, new_key, key_file, bundle_dir, pipeline, real, tmp_path, visit, monkeypatch
):
    monkeypatch.setattr(generated, "VIDEOS_PER_CHUNK", PART)
    key, out = new_key()[0], tmp_path / "out"
    words = [url, "--key_file", key_file(key), "--against", bundle_dir, "--real", real, "--out", out, *FIGURES]
    assert evaluate(*words) == 0
    assert sorted(each.seed for each in asked) == list(range(COUNT)) and {each.num_steps for each in asked} == {2}
    assert {each.prompt for each in asked} == {f"a square of the colour {number}" for number in range(COUNT)}
    made = pipeline(["a square of the colour 3"], seeds=3, num_steps=2)[0].video
    found = videos_of(out, "service")
    assert np.array_equal(found[3], decoded(encode_mp4(made, 8), "a video")[0])
    assert np.array_equal(found, videos_of(out, "tokenizer"))  # looked at as a service would send them
    assert {each["model"] for each in report_of(out)["metrics"]} == {url.removeprefix("http://"), "tiny"}
    assert all(each["value"] == 0 for each in report_of(out)["differences"])
    assert all("8 videos sent as mp4, " in each["protocol"] for each in report_of(out)["metrics"])
    assert visit(key).get("/v1/videos").json()["data"] == []  # nothing is left there

    whole = report_of(out)
    for file in out.glob(f"videos/*/{PART:06d}.safetensors"):
        file.unlink()
    assert evaluate(*words) == 0
    assert len(asked) == COUNT + (COUNT - PART) and report_of(out) == whole


def test_a_busy_service_is_asked_again(url, asked, gateway, new_key, key_file, real, tmp_path, monkeypatch):
    """Nothing is made before a gateway has asked for the pause that it wants where a key has too many at once."""
    pauses, sleep, claim = [], time.sleep, gateway.store.claim

    def short(seconds: float) -> None:
        pauses.append(seconds)
        sleep(0.005)

    monkeypatch.setattr(service.time, "sleep", short)
    monkeypatch.setattr(gateway.store, "claim", lambda models: claim(models) if 5.0 in pauses else None)
    words = [url, "--key_file", key_file(new_key(max_active=1)[0]), "--real", real, "--out", tmp_path / "out"]
    assert evaluate(*words, *FIGURES) == 0
    assert len(asked) == COUNT and 5.0 in pauses


def test_mistakes_of_a_service_are_one_line(url, asked, new_key, key_file, bundle_dir, real, tmp_path, capsys, gateway):
    def said(*words) -> str:
        assert evaluate("--metrics", "motion", "--real", real, "--out", tmp_path / "out", *words) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        return line

    key = key_file(new_key()[0])
    assert "needs a key: give --key_file FILE; `megadit serve keys add" in said(url)
    assert "nowhere cannot be read; `megadit serve keys add NAME > nowhere`" in said(url, "--key_file", "nowhere")
    assert "is not the address of a video API" in said("grpc://127.0.0.1:1", "--key_file", key)
    assert "--key_file is for a service" in said(bundle_dir, "--key_file", key)
    assert "loss needs a bundle" in said(url, "--key_file", key, "--metrics", "loss")
    assert "refuses: height=30 is not a multiple" in said(url, "--key_file", key, "--height", 30, "--size", 16, 24)
    (tmp_path / "prompts").write_text("good\n" * 8 + "bad\n")
    assert "failed to generate 'bad': nobody makes this" in said(
        url, "--key_file", key, "--prompts", tmp_path / "prompts"
    )
    gateway.servers.all[0].infos.clear()
    assert "has not seen a server yet" in said(url, "--key_file", key)
    assert "rejects the key of --key_file: give a valid key" in said(url, "--key_file", key_file("mdk_wrong"))
    (tmp_path / "key").write_text("two words")
    assert "holds no key" in said(url, "--key_file", tmp_path / "key")


def test_a_service_that_is_away_is_waited_for(new_key, key_file, real, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(service, "PATIENCE_SECONDS", 0.0)
    words = ["http://127.0.0.1:9", "--key_file", key_file("mdk_any"), "--real", real, "--out", tmp_path / "out"]
    assert evaluate(*words) == 2
    assert "does not answer" in (line := capsys.readouterr().err) and "run the same command again to continue" in line


@pytest.mark.slow
def test_a_real_service_killed_and_asked_again(start_gateway, server, bundle_dir, key_file, tmp_path):
    """A tritonserver behind a gateway; the evaluation is killed once the first part of two is there."""
    real = write_folder(tmp_path / "real", VIDEOS_PER_CHUNK + 4)
    running = start_gateway(f"grpc://{server.grpc_url}")
    out = tmp_path / "out"
    words = [running.url, "--key_file", key_file(running.new_key()), "--against", bundle_dir, "--real", real]
    words = [str(word) for word in (*words, "--out", out, *FIGURES)]
    process = subprocess.Popen([sys.executable, "-m", "megadit.infer.evaluate.command", *words], start_new_session=True)
    while not list(out.glob("videos/*/000000.safetensors")):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (out / "report.json").exists()
    assert evaluate(*words) == 0
    sent = videos_of(out, "tokenizer")
    apart = np.abs(videos_of(out, "service").astype(int) - sent)
    assert apart.mean() < 0.1  # in a batch with others, products are added up in another order
    assert np.abs(np.roll(sent, 1, 0).astype(int) - sent).mean() > 10  # the control: another video
