"""Stable Diffusion's pictures, from a real tritonserver, are those of `generate`."""

import imageio.v3 as iio
import numpy as np
import pytest

from megadit.infer.pipeline import TextToVideo
from megadit.models.convert.cli import main
from megadit.serve.build_repository import build_repository
from megadit.serve.client import VideoClient
from megadit.serve.contract import VideoRequest
from megadit.serve.local_server import LocalServer
from tests.stable_diffusion import make_pipeline

pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("tritonclient.grpc")


@pytest.mark.slow
def test_the_picture_is_that_of_generate(tritonserver, kept_running, write_clip, tmp_path):
    make_pipeline(tmp_path / "pipeline", "xl", write_clip)
    assert main([str(tmp_path / "pipeline"), str(tmp_path / "bundle")]) == 0
    repository = build_repository(tmp_path / "bundle", tmp_path / "repository")
    settings = {"negative_prompt": "a blue robot", "num_steps": 5, "guidance": 7.5}
    with kept_running(LocalServer(repository, log=tmp_path / "triton.log", stop_seconds=3)) as server:
        client = VideoClient(f"grpc://{server.grpc_url}")
        image, other = (client.generate(VideoRequest(prompt="a red seven", seed=s, **settings))[0] for s in (3, 4))
    (expected,) = TextToVideo.from_pretrained(tmp_path / "bundle", device="cpu")(["a red seven"], seeds=3, **settings)
    assert image.media_type == "image/png"
    assert np.array_equal(iio.imread(image.data, extension=".png"), expected.video[0])
    assert not np.array_equal(iio.imread(other.data, extension=".png"), expected.video[0]), "negative control"
