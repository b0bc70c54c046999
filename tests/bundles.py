"""Bundles that tests make, at random or of others."""

from dataclasses import replace
from os import PathLike

import torch
from torch import Tensor

from megadit.models.bundle import Bundle
from megadit.models.bundle_writer import write_bundle
from megadit.models.configs.config import DiTConfig
from megadit.models.configs.named import NAMED_CONFIGS
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.networks.dit import DiT
from megadit.models.networks.registry import build_network
from megadit.models.storage.tensor_source import from_state_dict
from megadit.models.text_encoders import ClassLabels, HashedWordEncoder, TextEncoder
from megadit.models.text_encoders.token_ids import learned_words
from megadit.models.tokenizers import HaarTokenizer
from megadit.train.data.packs.conditioning import KINDS

CONFIG = DiTConfig(
    num_layers=2, hidden_size=32, num_attention_heads=2, in_channels=48, patch_spatial=2, crossattn_emb_size=16
)
DEFAULTS = SamplingSettings(
    sampler="euler", num_steps=3, guidance=2.0, num_frames=5, height=16, width=24, fps=8, sigma_max=20.0
)


def write_tiny_bundle(
    path: PathLike | str, config=CONFIG, tokenizer=None, text_encoder=None, defaults=DEFAULTS, seed: int = 0, **more
) -> Bundle:
    """A random network; where no other tokenizer is given, latents of 4x4x4 pixels, tokens of 2x2 latents."""
    write_bundle(
        path,
        config=config,
        state_dict=random_state(config, seed),
        tokenizer=tokenizer
        or HaarTokenizer(temporal_compression=4, spatial_compression=2, sigma_data=config.sigma_data),
        text_encoder=text_encoder or HashedWordEncoder(dim=config.crossattn_emb_size),
        defaults=defaults,
        **more,
    )
    return Bundle.open(path)


def write_clip_bundle(path: PathLike | str, seed: int = 0) -> Bundle:
    """Two random towers, for pictures of 32 x 32; with seed 4 some scores are above 0."""
    config = replace(NAMED_CONFIGS["clip_digits"], num_layers=2, hidden_size=32, num_attention_heads=2)
    texts = ["a red seven", "a green three on a table", "the number nine"]
    return _write_judge(path, config, learned_words(texts, num_words=300, max_length=24), seed)


def write_classifier_bundle(path: PathLike | str, names: tuple[str, ...] = ("a cat, kitty", "dog", "bird")) -> Bundle:
    """A random classifier, for pictures of 16 x 16."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "learned_positions": (1, 4, 4)}
    config = replace(NAMED_CONFIGS["vit_digits"], num_classes=len(names), **sizes)
    return _write_judge(path, config, ClassLabels(names=names))


def write_clip_classifier_bundle(path: PathLike | str) -> Bundle:
    """A random classifier, for clips of 9 frames of 16 x 16 at 8 a second."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "learned_positions": (3, 2, 2)}
    names = ("left", "right", "up")
    return _write_judge(
        path, replace(NAMED_CONFIGS["vit_digits_clips"], num_classes=3, **sizes), ClassLabels(names=names)
    )


def _write_judge(path: PathLike | str, config: DiTConfig, text_encoder: TextEncoder, seed: int = 0) -> Bundle:
    _, *side = (config.patch_spatial * size for size in config.learned_positions)
    frames = config.patch_temporal * config.learned_positions[0]
    fps = 8.0 if frames > 1 else 0.0
    state = random_state(config, seed, spread=0.4)
    if "log_scale" in state:
        state["log_scale"] += 2
    write_bundle(
        path,
        config=config,
        state_dict=state,
        tokenizer=HaarTokenizer(temporal_compression=1, spatial_compression=1),
        text_encoder=text_encoder,
        defaults=SamplingSettings(num_steps=1, guidance=1.0, num_frames=frames, height=side[0], width=side[1], fps=fps),
    )
    return Bundle.open(path)


def write_able_bundle(source: PathLike | str, out: PathLike | str) -> None:
    """A bundle as if its network had been trained to be given parts of every kind."""
    bundle = Bundle.open(source)
    write_bundle(
        out,
        config=replace(bundle.config, conditioning_sigma=0.02),
        state_dict=bundle.load_dit().state_dict(),
        tokenizer=bundle.load_tokenizer(),
        text_encoder=bundle.load_text_encoder(),
        defaults=bundle.defaults,
        training={"conditioning": dict.fromkeys(KINDS, 0.1)},
    )


def write_pair_bundle(source: PathLike | str, out: PathLike | str) -> None:
    """A bundle of two random networks in Wan's form, for noise levels above and below 4, with the parts of another."""
    bundle = Bundle.open(source)
    config = replace(bundle.config, family="wan", parameterization="flow")
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


def random_network(config: DiTConfig, *, std: float = 0.1, seed: int = 0, dtype: torch.dtype = torch.float32) -> DiT:
    """Drawn as torch does, in this precision; no tensor is zero, so that every path shows in the output."""
    torch.manual_seed(seed)
    network = DiT(config).to(dtype)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return network


def random_dit(config: DiTConfig) -> DiT:
    """As `random_state`."""
    model = DiT(config)
    model.load_state_dict(random_state(config))
    return model


def random_state(config: DiTConfig, seed: int = 0, spread: float = 0.15) -> dict[str, Tensor]:
    """Every tensor random: with adaLN-Zero at its initialisation, a wrong network would change nothing."""
    generator = torch.Generator().manual_seed(seed)
    state = build_network(config).state_dict()
    return {name: spread * torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}
