"""A content filter behind the video API: what it holds back has failed, at the first attempt."""

from dataclasses import replace

import pytest

from megadit.serve.client import VideoClient
from megadit.serve.events import HeldBackError
from megadit.serve.launch.local_server import LocalServer
from megadit.serve.repository.build import build_repository
from megadit.serve.repository.model_config import Scheduling

from ..test_guardrail import PROGRAM, REQUEST
from ..test_triton import frames_of


@pytest.mark.slow
def test_through_triton_and_the_gateway(tritonserver, bundle_dir, pipeline, tmp_path, start_gateway, eventually):
    """gRPC, HTTP and /v1/videos: `failed`, code `guardrail`, at the first attempt; neighbours are made."""
    (tmp_path / "guard").mkdir()
    corner = int(pipeline(["a red three"], seeds=2)[0].video[0, 0, 0, 0])
    (tmp_path / "guard" / "guardrail.py").write_text(f"WHAT = {{{corner}: 'throw'}}\n{PROGRAM}")
    scheduling = Scheduling(device="cpu")
    repository = build_repository(
        bundle_dir, tmp_path / "models", scheduling=scheduling, guardrail_dir=tmp_path / "guard"
    )
    with LocalServer(repository, log=tmp_path / "triton.log", stop_seconds=3) as server:
        for url in (f"grpc://{server.grpc_url}", f"http://{server.http_url}"):
            client = VideoClient(url)
            for fault in (replace(REQUEST, seed=2), replace(REQUEST, prompt="a red seven")):
                with pytest.raises(HeldBackError):
                    client.generate(fault)
            (made,) = client.generate(REQUEST)
            assert frames_of(made.data).any()
        gateway = start_gateway(f"grpc://{server.grpc_url}")
        client = gateway.client()

        def video(video_id: str) -> dict:
            return client.get(f"/v1/videos/{video_id}").json()

        bodies = [{"prompt": "a red three", "seed": seed} for seed in (1, 2, 3)]
        videos = [client.post("/v1/videos", json=body).json()["id"] for body in bodies]
        eventually(lambda: all(video(each)["status"] in ("completed", "failed") for each in videos))
        assert [video(each)["status"] for each in videos] == ["completed", "failed", "completed"]
        assert video(videos[1])["error"]["code"] == "guardrail"
        log = gateway.log.read_text()
        assert log.count("job started") == 3 and "interrupted" not in log, "nothing is tried twice"
