"""torch.compile takes the whole network as one graph, which serves all batch and video sizes."""

import shutil
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.runtimes.torch import TorchDenoiser
from megadit.models.configs.config import DiTConfig
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.dit import DiT
from megadit.models.text_encoders import HashedWordEncoder

COMMON = {"num_layers": 1, "hidden_size": 48, "num_attention_heads": 4, "in_channels": 4, "crossattn_emb_size": 2}
NETWORKS = {"megadit": DiTConfig(**COMMON)}
SIZES = ((5, 3, 8, 12), (4, 2, 8, 4), (3, 5, 6, 6))
"""Batch, latent frames, height, width; the first all different, as the compiler takes equal ones for one size."""


def random_network(config: DiTConfig) -> DiT:
    torch.manual_seed(0)
    dit = DiT(config)
    for parameter in dit.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return dit


def inputs(batch: int, *size: int) -> tuple[torch.Tensor, torch.Tensor, Conditioning]:
    torch.manual_seed(1)
    text_BLE = torch.randint(0, 3, (batch, batch + 2, 2)).float()
    conditioning = Conditioning(text_BLE, torch.arange(batch), torch.linspace(8, 30, batch))
    return torch.randn(batch, 4, *size), torch.linspace(0.1, 9, batch), conditioning


@pytest.mark.parametrize("name", NETWORKS)
def test_one_graph_without_breaks_serves_all_sizes(name):
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    eager = TorchDenoiser(random_network(NETWORKS[name]))
    compiled = TorchDenoiser(random_network(NETWORKS[name]), compile=True)
    torch._dynamo.reset()
    compiled._denoiser.compile(dynamic=True, fullgraph=True, backend=backend)
    for size in SIZES:
        torch.testing.assert_close(compiled(*inputs(*size)), eager(*inputs(*size)), rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1


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
