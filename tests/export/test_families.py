"""Every family of networks passes the gate."""

import dataclasses

import pytest

from megadit.export import contract
from megadit.export.build import ExportSettings, export_network
from megadit.export.operators import check_operators
from megadit.models.config import DiTConfig
from megadit.models.expert_config import ExpertConfig
from megadit.models.text_encoders import ClassLabels, HashedWordEncoder
from megadit.models.tokenizers import HaarTokenizer

from .conftest import DEFAULTS, write_tiny_bundle

pytestmark = pytest.mark.slow

SMALL = dict(num_layers=2, num_attention_heads=2, in_channels=12, crossattn_emb_size=16)
NEMO = DiTConfig(**SMALL, hidden_size=260, family="nemo", position_embedding="sincos")
FAMILIES = {
    "cosmos": DiTConfig(
        **SMALL,
        hidden_size=48,
        family="cosmos",
        adaln_lora_dim=6,
        rope_scale=(2.0, 1.0, 1.5),
        learned_positions=(12, 20, 20),
        padding_mask_channel=True,
    ),
    "nemo": NEMO,
    "dfm": dataclasses.replace(NEMO, family="dfm", adaln_lora_dim=6),
    "dit": DiTConfig(
        **SMALL | {"crossattn_emb_size": 2},
        hidden_size=48,
        family="dit",
        position_embedding="sincos",
        qk_layernorm=False,
        num_classes=600,
        preconditioner="vp",
        learned_variance=True,
    ),
    "moviegen": DiTConfig(
        **SMALL | {"num_attention_heads": 4},
        hidden_size=48,
        family="moviegen",
        num_query_groups=2,
        position_embedding="learned",
        learned_positions=(12, 20, 20),
        qk_layernorm=False,
    ),
    "tokens": DiTConfig(**SMALL, hidden_size=48, experts=ExpertConfig(num_experts=4, shared_ffn_hidden_size=16)),
    "experts": DiTConfig(**SMALL, hidden_size=48, experts=ExpertConfig(num_experts=4, routing="expert_choice")),
    "patches in time": DiTConfig(**SMALL, hidden_size=48, patch_temporal=2, position_embedding="sincos"),
}


def gate(bundle, names, tmp_path, precision="fp32"):
    """Exports and compares; a UserError is a failure."""
    tokenizer, encoder = bundle.load_tokenizer(), bundle.load_text_encoder()
    defaults = contract.default_profiles(bundle, tokenizer, encoder)
    one = "text=1,1,1" if bundle.config.num_classes else "text=1,4,9"
    specs = contract.specs(contract.parse_profiles([one, "batch=1,1,2"], defaults), bundle.config, tokenizer)
    settings = ExportSettings(precision=precision)
    for name in names:
        path = tmp_path / f"{name}.onnx"
        report = export_network(name, bundle, tokenizer, specs[name], path, settings)
        print(f"{name}: {report['worst']:.1e}")
        yield path


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, tmp_path):
    config = FAMILIES[family]
    tokenizer = HaarTokenizer(temporal_compression=1, spatial_compression=2, sigma_data=config.sigma_data)
    encoder = ClassLabels(names=tuple(map(str, range(600)))) if config.num_classes else None
    defaults = dataclasses.replace(DEFAULTS, num_frames=4)
    bundle = write_tiny_bundle(tmp_path / "b", config, tokenizer, encoder or HashedWordEncoder(dim=16), defaults)
    (path,) = gate(bundle, ["denoiser"], tmp_path)
    if config.preconditioner == "edm":
        check_operators(path)
