"""A network that is told the scale of guidance, in a real tritonserver: the setting of a request is its input."""

from dataclasses import replace

import imageio.v3 as iio
import numpy as np
import pytest

from megadit.export.build import ExportSettings, export_bundle
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.serve.client import VideoClient
from megadit.serve.contract import VideoRequest
from megadit.serve.events import InvalidRequestError
from megadit.serve.launch.local_server import LocalServer
from megadit.serve.repository.build import build_repository
from tests.bundles import CONFIG, write_tiny_bundle

pytest.importorskip("tritonclient.grpc")
PROMPT, SEED = "a red seven", 3


@pytest.mark.slow
def test_requests_say_the_scale(tritonserver, tmp_path):
    bundle = write_tiny_bundle(tmp_path / "bundle", replace(CONFIG, num_layers=1, guidance_embedding_range=(1.0, 6.0)))
    export_bundle(bundle.path, tmp_path / "exported", ExportSettings(profiles=("text=1,4,9",), video_steps=1))
    repository = build_repository(tmp_path / "exported", tmp_path / "models", runtime="onnx")
    expected = TextToVideo.from_pretrained(bundle, device="cpu")
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
