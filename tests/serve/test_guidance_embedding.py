"""A network that is told the scale of guidance, in a real tritonserver: the setting of a request is its input."""

from dataclasses import replace

import imageio.v3 as iio
import numpy as np
import pytest

from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.serve.client import VideoClient
from megadit.serve.contract import VideoRequest
from megadit.serve.events import InvalidRequestError
from megadit.serve.launch.local_server import LocalServer
from megadit.serve.repository.build import build_repository

pytest.importorskip("tritonclient.grpc")
PROMPT, SEED = "a red seven", 3


@pytest.mark.slow
def test_requests_say_the_scale(tritonserver, exported_told, tmp_path):
    repository = build_repository(exported_told.path, tmp_path / "models", runtime="onnx")
    expected = TextToVideo.from_pretrained(exported_told, device="cpu")
    with LocalServer(repository, log=tmp_path / "triton.log", stop_seconds=3) as server:
        client, made = VideoClient(f"grpc://{server.grpc_url}"), {}
        for scale in (1.0, 5.0):
            asked = VideoRequest(prompt=PROMPT, seed=SEED, num_frames=1, guidance=scale)
            (image,) = client.generate(asked, timeout=300)
            made[scale] = iio.imread(image.data, extension=".png").astype(int)
            (same,) = expected([PROMPT], seeds=SEED, num_frames=1, guidance=scale)
            assert np.abs(made[scale] - same.video[0]).max() <= 1, scale
        assert np.abs(made[1.0] - made[5.0]).max() > 1, "negative control"
        with pytest.raises(InvalidRequestError, match="guidance=9 is outside"):
            client.generate(replace(asked, guidance=9.0), timeout=300)
