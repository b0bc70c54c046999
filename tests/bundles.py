"""Bundles that tests make of others."""

from dataclasses import replace
from os import PathLike

import torch
from torch import Tensor

from megadit.models.bundle.bundle import Bundle, write_bundle
from megadit.models.bundle.tensor_source import from_state_dict
from megadit.models.config import DiTConfig
from megadit.models.dit import DiT
from megadit.train.data.given import USES


def write_able_bundle(source: PathLike | str, out: PathLike | str) -> None:
    """A bundle as if its network had been trained to be given parts of every kind."""
    bundle = Bundle.open(source)
    write_bundle(
        out,
        config=replace(bundle.config, given_sigma=0.02),
        state_dict=bundle.load_dit().state_dict(),
        tokenizer=bundle.load_tokenizer(),
        text_encoder=bundle.load_text_encoder(),
        defaults=bundle.defaults,
        training={"given": dict.fromkeys(USES, 0.1)},
    )


def write_pair_bundle(source: PathLike | str, out: PathLike | str) -> None:
    """A bundle of two random networks in Wan's form, for noise levels above and below 4, with the parts of another."""
    bundle = Bundle.open(source)
    config = replace(bundle.config, family="wan", preconditioner="flow")
    high, low = (random_state(config, seed) for seed in (1, 2))
    write_bundle(
        out,
        config=config,
        state_dict=high,
        tokenizer=bundle.load_tokenizer(),
        text_encoder=bundle.load_text_encoder(),
        defaults=replace(bundle.defaults, low_guidance=3.0),
        low_noise=from_state_dict(low),
        boundary=0.8,
    )


def random_state(config: DiTConfig, seed: int) -> dict[str, Tensor]:
    """Every tensor random: with adaLN-Zero at its initialisation, a wrong network would change nothing."""
    generator = torch.Generator().manual_seed(seed)
    state = DiT(config).state_dict()
    return {name: 0.15 * torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}
