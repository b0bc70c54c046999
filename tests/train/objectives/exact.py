"""Packs, exact denoisers of normal data, and the networks of an objective that computes with them."""

from types import SimpleNamespace

import torch

from megadit.models.configs.config import DiTConfig
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment
from megadit.train.config.distill import DistillConfig
from megadit.train.config.schema import DiffusionConfig
from megadit.train.data.packs.packed_batch import PackedBatch
from megadit.train.objectives.networks import Networks

MEAN, DEVIATION = 0.7, 0.5
MODEL = DiTConfig(num_layers=1, hidden_size=16, num_attention_heads=2, sigma_data=0.5, patch_spatial=1)


WHOLE = SimpleNamespace(part=SimpleNamespace(is_last=True))
"""In place of a network that is one model chunk."""


def pack(given=()):
    """Two samples and padding; every sample has its own noise."""
    layout = PackLayout.pack([Segment((1, 2, 2), 3, clean=given), Segment((2, 2, 2), 2)], capacity=16, text_capacity=8)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(16, 1, 5, generator=generator) * layout.on("cpu").is_sample_S[:, None, None]
    return PackedBatch(
        tokens_S1P=tokens,
        text_L1E=torch.randn(8, 1, 4, generator=generator),
        layout=layout,
        fps_G=torch.tensor([0.0, 8.0, 0.0]),
        noise_key_G=torch.tensor([11, 22, 0]),
        loss_weight_G=torch.ones(3),
        extra_G={
            "seed_key": torch.tensor([33, 44, 0]),
            "reward": torch.tensor([0.9, 0.2, 0.0]),
            "preference": torch.tensor([1.0, -1.0, 0.0]),
            "noise_index": torch.tensor([1, 5, 0]),
            "sigma": torch.tensor([2.0, 0.5, 0.0]),
            "sigma_down": torch.tensor([0.8, 0.1, 0.0]),
            "sigma_up": torch.tensor([0.9, 0.3, 0.0]),
        },
        sample_ids=("a", "b", ""),
    )


def sigma_of(batch, sigma_G):
    return sigma_G[batch.layout.on("cpu").segment_of_token_S][:, None, None]


def of_normal(mean, deviation):
    """The exact denoiser of data that is normal in every number."""

    def denoise(batch, x_S1P, sigma_G):
        variance = sigma_of(batch, sigma_G) ** 2
        return (deviation**2 * x_S1P + variance * mean) / (deviation**2 + variance)

    return denoise


def networks(
    objective,
    student=None,
    teacher=None,
    critic=None,
    *,
    model=MODEL,
    discriminator=None,
    diffusion=None,
    uncertainty=None,
    step=1,
    **settings,
):
    distill = DistillConfig(teacher="", objective=objective, **settings)
    train = SimpleNamespace(seed=1, distill=distill)
    return Networks(
        model=SimpleNamespace(denoise=student, uncertainty=uncertainty, before=None, dit=WHOLE),
        config=SimpleNamespace(model=model, diffusion=diffusion or DiffusionConfig(), train=train),
        teacher=teacher,
        critic=critic,
        discriminator=discriminator,
        step=step,
    )
