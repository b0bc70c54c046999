"""Stable Diffusion's pictures, from a real tritonserver, are those of `generate`."""

import shutil
import subprocess
import sys
from importlib.util import find_spec

import imageio.v3 as iio
import numpy as np
import pytest

from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.serve.client import VideoClient
from megadit.serve.contract import VideoRequest
from megadit.serve.launch.local_server import LocalServer
from megadit.serve.repository.build import build_repository

pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("tritonclient.grpc")


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["torch", "onnx", "openvino"])
def test_the_picture_is_that_of_generate(tritonserver, kept_running, exported_stable_diffusion, tmp_path, runtime):
    source = exported_stable_diffusion
    if runtime == "openvino":
        if find_spec("openvino") is None:
            pytest.skip("openvino is not installed (megadit[openvino])")
        source = shutil.copytree(source, tmp_path / "compared")
        compare = f"from megadit.export.engines import add_report; add_report(Path({str(source)!r}), 'openvino')"
        subprocess.run([sys.executable, "-c", f"from pathlib import Path; {compare}"], check=True)  # test_openvino.py
    repository = build_repository(source, tmp_path / "repository", runtime=runtime)
    settings = {"negative_prompt": "a blue robot", "num_steps": 5, "guidance": 7.5}
    with kept_running(LocalServer(repository, log=tmp_path / "triton.log", stop_seconds=3)) as server:
        client = VideoClient(f"grpc://{server.grpc_url}")
        image, other = (client.generate(VideoRequest(prompt="a red seven", seed=s, **settings))[0] for s in (3, 4))
    here = ["torch"] if runtime == "openvino" else ["torch", runtime]
    pipelines = [TextToVideo.from_pretrained(source, device="cpu", runtime=each) for each in here]
    (expected,), *same = (one(["a red seven"], seeds=3, **settings) for one in pipelines)
    assert image.media_type == "image/png"
    pixels, others = (iio.imread(each.data, extension=".png").astype(int) for each in (image, other))
    assert np.abs(pixels - expected.video[0]).max() <= 1
    assert all(np.array_equal(pixels, each.video[0]) for (each,) in same)
    assert np.abs(others - expected.video[0]).max() > 1, "negative control"
