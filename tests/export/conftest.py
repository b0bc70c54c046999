import pytest
import torch

from megadit.export import signatures as contract
from megadit.export.build import ExportSettings, export_bundle
from megadit.models.bundle.bundle import Bundle, write_bundle
from megadit.models.config import DiTConfig
from megadit.models.dit import DiT
from megadit.models.settings import SamplingSettings
from megadit.models.text_encoders import HashedWordEncoder
from megadit.models.tokenizers import HaarTokenizer

CONFIG = DiTConfig(
    num_layers=2, hidden_size=32, num_attention_heads=2, in_channels=48, patch_spatial=2, crossattn_emb_size=16
)
DEFAULTS = SamplingSettings(
    sampler="euler", num_steps=3, guidance=2.0, num_frames=5, height=16, width=24, fps=8, sigma_max=20.0
)


def random_dit(config: DiTConfig) -> DiT:
    """Every tensor random: with adaLN-Zero at its initialisation, a wrong layer would change nothing."""
    model = DiT(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    return model


def write_tiny_bundle(
    path, config=CONFIG, tokenizer=None, text_encoder=None, defaults=DEFAULTS, training=None, image_encoder=None
) -> Bundle:
    write_bundle(
        path,
        config=config,
        state_dict=random_dit(config).state_dict(),
        tokenizer=tokenizer
        or HaarTokenizer(temporal_compression=4, spatial_compression=2, sigma_data=config.sigma_data),
        text_encoder=text_encoder or HashedWordEncoder(dim=config.crossattn_emb_size),
        defaults=defaults,
        training=training,
        image_encoder=image_encoder,
    )
    return Bundle.open(path)


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory) -> Bundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny")


@pytest.fixture(scope="session")
def exported(tiny_bundle, tmp_path_factory) -> Bundle:
    """The tiny bundle after `megadit export`."""
    out = tmp_path_factory.mktemp("exported") / "tiny"
    export_bundle(tiny_bundle.path, out, ExportSettings(profiles=("text=1,4,9",)))
    return Bundle.open(out, verify=True)


@pytest.fixture(scope="session")
def specs(tiny_bundle):
    tokenizer, encoder = tiny_bundle.load_tokenizer(), tiny_bundle.load_text_encoder()
    profiles = contract.parse_profiles(["text=1,4,9"], contract.default_profiles(tiny_bundle, tokenizer, encoder))
    return contract.specs(profiles, tiny_bundle.config, tokenizer)
