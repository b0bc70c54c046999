"""A judge's scores through Triton, `serve ask` and the video API."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megadit.infer.evaluate.extractors.files import KIND
from megadit.models.shared.cli import verbs
from megadit.models.shared.files import read_json
from megadit.serve.client import VideoClient
from megadit.serve.gateway.client import GatewayClient
from megadit.serve.launch.local_server import LocalServer
from megadit.serve.repository.build import build_repository
from megadit.serve.repository.model_config import Scheduling
from megadit.train.demos.digits.classifier import DigitReader
from megadit.train.demos.digits.score import scorer_of_prompts, write_scorer

from ..test_scorer import ASKED


@pytest.fixture
def digits_judge(tmp_path) -> Path:
    """As the demo leaves it, with a network that was trained on nothing."""
    torch.manual_seed(0)
    save_file(DigitReader().state_dict(), tmp_path / "reader.safetensors", metadata={KIND: "digits"})
    write_scorer(tmp_path / "digits", tmp_path / "reader.safetensors")
    return tmp_path / "digits"


@pytest.mark.slow
def test_through_triton_ask_and_the_gateway(
    tritonserver, bundle_dir, pipeline, digits_judge, tmp_path, start_gateway, eventually, capsys
):
    """The same scores over gRPC, HTTP, `serve ask` and /v1/videos: those of the demo's judge of the same frames."""
    made = pipeline([ASKED.prompt], seeds=1)[0].video
    expected = pytest.approx(scorer_of_prompts(digits_judge / "classifier.safetensors")(made, ASKED.prompt))
    assert set(expected.expected) == {"digit", "colour", "direction", "all", "every_frame"}
    repository = build_repository(
        bundle_dir, tmp_path / "models", scheduling=Scheduling(device="cpu"), scorer_dir=digits_judge
    )
    with LocalServer(repository, log=tmp_path / "triton.log", stop_seconds=3) as server:
        for url in (f"grpc://{server.grpc_url}", f"http://{server.http_url}"):
            assert VideoClient(url).generate(ASKED)[0].scores == expected
        assert VideoClient(url).generate(replace(ASKED, evaluate=False))[0].scores is None
        asked = ["serve", "ask", ASKED.prompt, "--seed", "1", "--url", url, "-o", str(tmp_path / "out.mp4")]
        assert verbs.main([*asked, "--evaluate"]) == 0
        assert "direction=" in capsys.readouterr().out
        assert read_json(tmp_path / "out.mp4.json")["scores"] == expected
        gateway = start_gateway(f"grpc://{server.grpc_url}")
        client = gateway.client()
        body = {"prompt": ASKED.prompt, "seed": 1}
        videos = [client.post("/v1/videos", json=body | more).json()["id"] for more in ({"evaluate": True}, {})]
        for video in videos:
            eventually(lambda video=video: client.get(f"/v1/videos/{video}").json()["status"] == "completed")
        assert [client.get(f"/v1/videos/{video}").json()["scores"] for video in videos] == [expected, None]
        key = gateway.new_key()
        assert GatewayClient(gateway.url, key).generate(ASKED)[0].scores == expected
