"""What a whole call of the pipeline asks of a GPU and sends to it, counted; the meta device stands for the GPU."""

from dataclasses import replace

import numpy
import pytest
import torch

from megadit.infer.conditioning.items import ConditioningItem
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.pipeline.step_cache import CachePlan, plan_key
from megadit.infer.runtimes.load import ExpertDenoiser
from megadit.infer.runtimes.torch import TorchDenoiser
from megadit.infer.sampling import samplers
from megadit.infer.sampling.resolve import resolve_settings
from megadit.models.networks.dit import DiT
from megadit.models.text_encoders import HashedWordEncoder
from megadit.models.tokenizers import HaarTokenizer
from tests.bundles import CONFIG, DEFAULTS
from tests.traffic import Traffic

META = torch.device("meta")
PROMPTS, BATCHES = ["a red seven moving left", "a blue two", ""], 2
CALLS = {
    "plain": {"guidance": 1.0},
    "interval": {"guidance": 3.0, "guidance_interval": (0.5, 5.0)},
    "two networks": {"guidance": 3.0, "low_guidance": 2.0},
    "cache": {"guidance": 3.0, "cache_budget": 0.1},
    "churn": {"guidance": 3.0, "churn": 3.0, "sampler": "heun"},
    "conditioning": {
        "guidance": 3.0,
        "conditioning": ConditioningItem(frames=numpy.zeros((1, 16, 24, 3), numpy.uint8), kind="first_frame"),
    },
}


def pipeline(**settings):
    """One that has made these videos once, and so has sent what is kept."""
    config = replace(CONFIG, num_layers=1, conditioning_sigma=0.02)
    denoisers = [TorchDenoiser(DiT(config), device=META) for _ in range(2)]
    plans = []
    if settings.get("cache_budget"):
        key = plan_key(resolve_settings(DEFAULTS, **settings))
        plans = [CachePlan(budget=0.1, skipped=(1,), num_calls=3, largest_error=0.1, num_videos=1, settings=key)]
    made = TextToVideo(
        denoiser=ExpertDenoiser(*denoisers, boundary=2.0) if "low_guidance" in settings else denoisers[0],
        tokenizer=HaarTokenizer(temporal_compression=4, spatial_compression=2, sigma_data=config.sigma_data),
        text_encoder=HashedWordEncoder(dim=config.crossattn_emb_size),
        config=config,
        defaults=DEFAULTS,
        device=META,
        conditionings=("first_frame",),
        cache_plans=lambda: plans,
    )
    traffic_of(made, **settings)
    return made


def traffic_of(make, on_step=None, **settings):
    with Traffic() as traffic:
        videos = list(make(PROMPTS, batch_size=2, on_step=on_step, **settings))
    assert len(videos) == len(PROMPTS)
    return traffic


@pytest.mark.parametrize("name", CALLS)
def test_a_batch_is_waited_for_once_and_a_video_as_it_comes(name):
    """Whether latents are finite is asked for a batch; pixels and latents come back for a video. Nothing is asked
    between two calls of the denoiser, whoever chooses by the noise level, and whoever is told it. What is sent are the
    keys of the noise, and each condition, which guidances of two networks make for each."""
    levels = []
    traffic = traffic_of(pipeline(**CALLS[name]), lambda step: levels.append(step.sigma), **CALLS[name])
    of_clean = 2 if name == "conditioning" else 0  # which places are given, to the network and to stay
    assert traffic.asked.total() == BATCHES + 2 * len(PROMPTS) + of_clean, traffic.asked
    assert sum(n for line, n in traffic.asked.items() if "isfinite" in line) == BATCHES
    conditions = 4 if name == "two networks" else 2
    assert traffic.sent.total() <= BATCHES * (1 + conditions) + (name == "conditioning"), traffic.sent
    assert len(set(levels)) > 1


def test_a_level_that_is_asked_of_the_device_is_seen(monkeypatch):
    """The control: levels where x is, as samplers had them."""

    def evaluate(denoise, x, sigma):
        return denoise(x.float(), torch.full((len(x),), sigma, device=META)).double()

    monkeypatch.setattr(samplers, "_evaluate", evaluate)
    traffic = traffic_of(pipeline(**CALLS["interval"]), **CALLS["interval"])
    assert sum(n for line, n in traffic.asked.items() if "guidance.py" in line) == 3 * BATCHES
