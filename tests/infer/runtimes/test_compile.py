"""torch.compile takes the whole network as one graph, which serves all batch and video sizes."""

import shutil
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.runtimes.torch import TorchDenoiser
from megadit.models.text_encoders import HashedWordEncoder
from tests.bundles import random_network


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler, and g++ is not installed")
def test_a_compiled_network_makes_the_same_videos(pipeline, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    config = replace(pipeline.config, num_layers=1)  # the compiler takes long enough for one
    parts = {name: getattr(pipeline, name) for name in ("tokenizer", "defaults")}
    parts |= {"config": config, "text_encoder": HashedWordEncoder(dim=config.crossattn_emb_size)}
    eager, compiled = (
        TextToVideo(denoiser=TorchDenoiser(random_network(config), compile=is_compiled), **parts)
        for is_compiled in (False, True)
    )
    torch._dynamo.reset()
    counters.clear()
    for settings in ({"sampler": "heun"}, {"num_frames": 9, "height": 24, "width": 40}):
        results = [one(["a red seven", "a two"], seeds=[1, 2], **settings) for one in (compiled, eager)]
        for found, expected in zip(*results, strict=True):
            # float32 sums in another order may cross the boundary between two of the 256 values
            assert abs(found.video.astype(int) - expected.video).max() <= 1
    assert counters["stats"]["unique_graphs"] == 1  # the network was compiled, whole, and once for both sizes
