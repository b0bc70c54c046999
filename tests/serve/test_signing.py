"""Signed videos of the service; what they are signed with stays in its files."""

import pytest

from megadit.infer.media.signing import Marker, SigningOptions
from megadit.models.bundle import Bundle
from megadit.models.shared.cli import verbs
from megadit.models.shared.errors import UserError
from megadit.serve.backend.engine import Engine
from megadit.serve.client import VideoClient
from megadit.serve.contract import VideoRequest
from megadit.serve.launch.local_server import LocalServer, Ports
from megadit.serve.launch.run import docker_command
from megadit.serve.repository.build import build_repository, service_info
from megadit.serve.repository.model_config import PATHS, Scheduling, parameter_in
from tests.signing import state_of, write_chain

from .backend.test_engine import Asker, run

REQUEST = VideoRequest(prompt="a red three", seed=1)


@pytest.fixture
def chain(tmp_path):
    return write_chain(tmp_path)


def test_videos_and_images_are_signed(pipeline, bundle_dir, chain):
    bundle = Bundle.open(bundle_dir)
    engine = Engine(pipeline, service_info(bundle, bundle.defaults, None), mark=Marker(*chain))
    video, image = Asker(REQUEST), Asker(VideoRequest(prompt="a", num_frames=1))
    run(engine, video, image)
    assert state_of(video.videos[0].data, ".mp4") == state_of(image.videos[0].data, ".png") == "Valid"


def test_the_repository_holds_paths_alone(bundle_dir, chain, tmp_path):
    certificate, key = chain
    out = tmp_path / "models"
    flags = ["--c2pa_certificate", str(certificate), "--c2pa_key", str(key)]
    assert verbs.main(["serve", "build-repository", str(bundle_dir), str(out), *flags]) == 0
    config = (out / "text_to_video" / "config.pbtxt").read_text()
    assert [parameter_in(config, name) for name in PATHS[-2:]] == [str(certificate), str(key)]
    secret, public = key.read_bytes().splitlines()[1], certificate.read_bytes().splitlines()[1]
    files = [path.read_bytes() for path in out.glob("**/*") if path.is_file()]
    assert files and not any(secret in data or public in data for data in files)
    assert f"{key}:{key}:ro" in docker_command(out, Ports())
    with pytest.raises(UserError, match="go together"):
        build_repository(bundle_dir, tmp_path / "other", signing=SigningOptions(c2pa_key=str(key)))
    assert not (tmp_path / "other").exists()


def test_paths_of_the_environment_reach_a_container(bundle_dir, chain, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGADIT_C2PA_CERTIFICATE", str(chain[0]))
    monkeypatch.setenv("MEGADIT_C2PA_KEY", str(chain[1]))
    command = docker_command(build_repository(bundle_dir, tmp_path / "models"), Ports())
    assert {f"{path}:{path}:ro" for path in chain} <= {*command}


@pytest.mark.slow
def test_through_triton(tritonserver, bundle_dir, chain, tmp_path):
    signing = SigningOptions(c2pa_certificate=str(chain[0]), c2pa_key=str(chain[1]))
    repository = build_repository(bundle_dir, tmp_path / "models", scheduling=Scheduling(device="cpu"), signing=signing)
    with LocalServer(repository, log=tmp_path / "triton.log", stop_seconds=3) as server:
        for url in (f"grpc://{server.grpc_url}", f"http://{server.http_url}"):
            (made,) = VideoClient(url).generate(REQUEST)
            assert state_of(made.data, ".mp4") == "Valid"
    chain[1].unlink()
    with pytest.raises(UserError):
        with LocalServer(repository, log=tmp_path / "other.log", stop_seconds=3):
            pass
    assert "cannot be read" in (tmp_path / "other.log").read_text(), "a service that cannot sign does not start"
