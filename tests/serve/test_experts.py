"""Two networks split by noise level (Wan 2.2), through a real tritonserver: torch's, and their graphs."""

import io

import numpy as np
import pytest
from PIL import Image

from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.serve.client import VideoClient
from megadit.serve.contract import VideoRequest
from megadit.serve.launch.local_server import LocalServer
from megadit.serve.repository.build import build_repository
from megadit.serve.repository.model_config import Scheduling
from tests.infer.conftest import make_adapter

PROMPT, SEED = "a red seven", 5
PATTERNS = ("blocks.*attention.*",)


@pytest.mark.slow
def test_a_pair_is_served(tritonserver, exported_pair, tmp_path):
    pair = exported_pair.path
    names = {
        seed: make_adapter(tmp_path / "adapters" / seed, pair, int(seed), base=False, patterns=PATTERNS)
        for seed in "12"
    }
    scales = {f"high={names['1']}": 0.5, f"low={names['2']}": 1.0}
    pipeline = TextToVideo.from_pretrained(pair, device="cpu")
    expected, other = (image_of_pipeline(pipeline, **change) for change in ({}, {"low_guidance": 1.0}))
    assert np.abs(expected - other).max() > 10, "negative control: the second network must matter"
    adapted = image_of_pipeline(pipeline, adapters=scales)
    assert np.abs(expected - adapted).max() > 10, "negative control: so must adapters"
    for runtime in ("torch", "onnx"):
        repository = build_repository(
            pair,
            tmp_path / f"models_{runtime}",
            scheduling=Scheduling(device="cpu"),
            runtime=runtime,
            adapters=tmp_path / "adapters",
        )
        with LocalServer(repository, log=tmp_path / f"{runtime}.log", stop_seconds=3) as server:
            client = VideoClient(f"grpc://{server.grpc_url}")
            for asked, image in (((), expected), (("high=1:0.5", "low=2"), adapted)):
                request = VideoRequest(prompt=PROMPT, seed=SEED, num_frames=1, adapters=asked)
                (video,) = client.generate(request, timeout=300)
                assert np.abs(np.asarray(Image.open(io.BytesIO(video.data))) - image).max() <= 1, (runtime, asked)


def image_of_pipeline(pipeline, **settings):
    return pipeline([PROMPT], seeds=SEED, num_frames=1, **settings)[0].video[0].astype(int)
