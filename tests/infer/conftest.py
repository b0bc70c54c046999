import pytest
import torch

from megadit.infer.pipeline import TextToVideo
from megadit.models.bundle.bundle import write_bundle
from megadit.models.config import DiTConfig
from megadit.models.dit import DiT
from megadit.models.settings import SamplingSettings
from megadit.models.text_encoders import HashedWordEncoder
from megadit.models.tokenizers import HaarTokenizer

CONFIG = DiTConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=2,
    in_channels=48,
    patch_spatial=2,
    crossattn_emb_size=16,
)
DEFAULTS = SamplingSettings(
    sampler="euler", num_steps=3, guidance=2.0, num_frames=5, height=16, width=24, fps=8, sigma_max=20.0
)


def random_dit(config: DiTConfig) -> DiT:
    """Every tensor random: with adaLN-Zero at its initialisation, no condition would change anything."""
    model = DiT(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="session")
def bundle_dir(tmp_path_factory):
    """A tiny random bundle: latents of 4x4x4 pixels, tokens of 2x2 latents."""
    path = tmp_path_factory.mktemp("bundle") / "tiny"
    write_bundle(
        path,
        config=CONFIG,
        state_dict=random_dit(CONFIG).state_dict(),
        tokenizer=HaarTokenizer(temporal_compression=4, spatial_compression=2, sigma_data=CONFIG.sigma_data),
        text_encoder=HashedWordEncoder(dim=CONFIG.crossattn_emb_size),
        defaults=DEFAULTS,
        training={"step": 7},
    )
    return path


@pytest.fixture(scope="session")
def pipeline(bundle_dir) -> TextToVideo:
    return TextToVideo.load(bundle_dir, device="cpu")
