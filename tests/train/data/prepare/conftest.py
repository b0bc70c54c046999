"""A tiny bundle of random weights, whose samples become data sets."""

import pytest

from megadit.models.bundle_writer import write_bundle
from megadit.models.configs.config import DiTConfig
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.networks.dit import DiT
from megadit.models.networks.initialize import initialize_
from megadit.models.text_encoders import HashedWordEncoder
from megadit.models.tokenizers import HaarTokenizer

MODEL = DiTConfig(
    num_layers=1, hidden_size=32, num_attention_heads=2, in_channels=48, patch_spatial=2, crossattn_emb_size=16
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("bundle") / "tiny"
    write_bundle(
        path,
        config=MODEL,
        state_dict=initialize_(DiT(MODEL), seed=0).state_dict(),
        tokenizer=HaarTokenizer(temporal_compression=4, spatial_compression=2, sigma_data=MODEL.sigma_data),
        text_encoder=HashedWordEncoder(dim=MODEL.crossattn_emb_size),
        defaults=SamplingSettings(num_steps=2, guidance=2.0, num_frames=5, height=16, width=16, fps=8),
    )
    return path
