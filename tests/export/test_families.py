"""Every family of networks, every tokenizer and text encoder passes the gate, whole videos included.

Wan's networks do so in test_experts.py and test_conditioning.py, Cosmos' of flows in the latter, a bundle of Cosmos in
test_deploy.py. DFM's has the operations of NeMo's and ST-DiT's, NeMo's MovieGen those of both.
"""

import dataclasses

import numpy as np
import pytest
import torch

from megadit.export import signatures as contract
from megadit.export.build import ExportSettings, export_network
from megadit.export.operators import check_operators
from megadit.export.references import usual_prompt
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.runtimes.exported import denoiser_inputs, with_exported_network
from megadit.infer.runtimes.onnx import OnnxNetwork, open_session
from megadit.models.configs.block import ExpertConfig
from megadit.models.configs.config import DiTConfig
from megadit.models.text_encoders import ClassLabels, CLIPTextEncoder, HashedWordEncoder
from megadit.models.tokenizers import Autoencoder, HaarTokenizer
from megadit.models.tokenizers.cosmos_image import CosmosImageNetwork
from megadit.models.tokenizers.kinds import KINDS
from megadit.models.tokenizers.network import Network, complete_config
from tests.bundles import DEFAULTS, write_tiny_bundle

pytestmark = pytest.mark.slow

SMALL = dict(num_layers=1, num_attention_heads=2, in_channels=12, crossattn_emb_size=16)
FAMILIES = {
    "predict2.5": DiTConfig(
        **SMALL,
        hidden_size=48,
        family="cosmos",
        compat="predict2_5",
        parameterization="flow",
        sigma_data=1.0,
        adaln_lora_dim=6,
        rope_scale=(1.0, 3.0, 3.0),
        padding_mask_channel=True,
    ),
    "nemo": DiTConfig(**SMALL, hidden_size=260, family="nemo", position_embedding="sincos"),
    "dit": DiTConfig(
        **SMALL | {"crossattn_emb_size": 2},
        hidden_size=48,
        family="dit",
        position_embedding="sincos",
        qk_layernorm=False,
        num_classes=600,
        parameterization="vp",
        learned_variance=True,
    ),
    "moviegen": DiTConfig(
        **SMALL | {"num_attention_heads": 4},
        hidden_size=48,
        family="moviegen",
        num_query_groups=2,
        position_embedding="learned",
        learned_positions=(4, 4, 6),  # no more than the defaults need: nothing larger can be traced or compared
        qk_layernorm=False,
    ),
    "st_dit": DiTConfig(**SMALL, hidden_size=48, family="st_dit", adaln_lora_dim=6),
    "tokens, patches in time": DiTConfig(
        **SMALL,
        hidden_size=48,
        patch_temporal=2,
        position_embedding="sincos",
        experts=ExpertConfig(num_experts=4, shared_ffn_hidden_size=16),
    ),
    "experts": DiTConfig(**SMALL, hidden_size=48, experts=ExpertConfig(num_experts=4, routing="expert_choice")),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, tmp_path):
    config = FAMILIES[family]
    tokenizer = HaarTokenizer(temporal_compression=1, spatial_compression=2, sigma_data=config.sigma_data)
    encoder = ClassLabels(names=tuple(map(str, range(600)))) if config.num_classes else HashedWordEncoder(dim=16)
    defaults = dataclasses.replace(DEFAULTS, num_frames=4)
    bundle = write_tiny_bundle(tmp_path / "b", config, tokenizer, encoder, defaults)
    text = "text=1,1,1" if config.num_classes else "text=1,4,9"
    profiles = contract.parse_profiles([text, "batch=1,1,2"], contract.default_profiles(bundle, tokenizer, encoder))
    spec, path = contract.specs(profiles, config, tokenizer)["denoiser"], tmp_path / "denoiser.onnx"
    check_report(export_network("denoiser", bundle, tokenizer, spec, path, ExportSettings()), spec)
    if config.parameterization != "vp":
        check_operators(path)
    assert least_psnr(bundle, OnnxNetwork(path, spec, device=torch.device("cpu"))) >= 50


def check_report(report, spec):
    """Near enough at every noise level, and at sizes that were not traced."""
    assert len([name for name in report["cases"] if name.startswith("sigma")]) == 7
    assert all(error["F"] <= 1e-4 for error in report["cases"].values())
    traced = contract.trace_sizes(spec)
    for axis in spec.axes.values():
        assert {axis.min, axis.max} != {traced[axis.name]}, f"{axis.name} is compared at one size alone"


def least_psnr(bundle, network):
    """In decibels, of the frames of a video whose denoiser is the graph, against torch's."""
    by_torch = TextToVideo.from_pretrained(bundle, device="cpu")
    by_onnx = TextToVideo(
        denoiser=lambda x, sigma, given: network(denoiser_inputs(x, sigma, given), tuple(x.shape)),
        tokenizer=by_torch.tokenizer,
        text_encoder=bundle.load_text_encoder(),
        config=bundle.config,
        defaults=bundle.defaults,
    )
    (ours,), (theirs,) = (one([usual_prompt(bundle)], seeds=1) for one in (by_onnx, by_torch))
    assert theirs.video.std() > 0
    error_T = ((ours.video.astype(float) - theirs.video) ** 2).mean(axis=(1, 2, 3))
    return 10 * np.log10(255**2 / max(error_T.max(), 1e-3))


# ---------------------------------------------------------------------------------- tokenizers and text encoders


def random_images():
    torch.manual_seed(0)
    widths = dict(widths=[64, 32, 32], first_width=32, num_layers=1, num_halvings=1, patch_size=4)
    config = dict(**widths, z_channels=5, latent_channels=4)
    return CosmosImageNetwork(**config), config


def random_kl():
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    torch.manual_seed(0)
    levels = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    sizes = {"block_out_channels": (8, 16), "norm_num_groups": 4, "latent_channels": 4}
    network = diffusers.AutoencoderKL(**levels, **sizes, scaling_factor=0.2, shift_factor=0.1)
    return network, dict(network.config)


LATENTS = DiTConfig(**SMALL | {"in_channels": 4}, hidden_size=48)
SIZES = dataclasses.replace(DEFAULTS, num_frames=9, height=32, width=48)


@pytest.mark.parametrize("name, make", [("cosmos_image", random_images), ("autoencoder_kl", random_kl)])
def test_tokenizers(name, make, tmp_path):
    (module, config), kind = make(), KINDS[name]
    network = Network.build(kind.class_name, complete_config(kind.class_name, config), module.state_dict(), "the test")
    autoencoder = Autoencoder(kind=kind, network=network, sigma_data=0.5)
    bundle = write_tiny_bundle(tmp_path / "b", LATENTS, autoencoder, None, SIZES)
    tokenizer, encoder = bundle.load_tokenizer(), bundle.load_text_encoder()
    defaults = contract.default_profiles(bundle, tokenizer, encoder)
    specs = contract.specs(contract.parse_profiles(["batch=1,1,2"], defaults), bundle.config, tokenizer)
    for network in ("video_decoder", "video_encoder"):
        path = tmp_path / f"{network}.onnx"
        report = export_network(network, bundle, tokenizer, specs[network], path, ExportSettings())
        assert report["worst"] <= 1e-4
        check_operators(path)


def test_a_clip(write_clip, tmp_path):
    """Its graph, run by ONNX Runtime in the encoder's place, gives features of all places and the pooled one."""
    encoder = CLIPTextEncoder(model=str(write_clip(tmp_path / "clip", projection=20)))
    config = DiTConfig(**SMALL | {"in_channels": 48}, hidden_size=48)
    bundle = write_tiny_bundle(tmp_path / "b", config, None, encoder)
    tokenizer = bundle.load_tokenizer()
    profiles = contract.default_profiles(bundle, tokenizer, encoder)
    spec = contract.specs(profiles, config, tokenizer, encoder)["text_encoder"]
    path = tmp_path / "text_encoder.onnx"
    assert export_network("text_encoder", bundle, tokenizer, spec, path, ExportSettings())["worst"] <= 1e-4
    check_operators(path)
    session, asked = open_session(path, torch.device("cpu")), []

    def run(inputs, shape):
        asked.append(shape)
        (output,) = session.run(None, {"tokens": inputs["tokens"].numpy()})
        return torch.from_numpy(output)

    texts = ["a red seven", "", "the robot waves"]
    found = with_exported_network(encoder, lambda: {"text_encoder": run}, torch.device("cpu")).encode(texts)
    expected = encoder.encode(texts)
    assert asked == [(2, 78, 20)] and found.length_B.tolist() == expected.length_B.tolist()
    torch.testing.assert_close(found.features_BLE, expected.features_BLE, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.pooled_BP, expected.pooled_BP, rtol=1e-4, atol=1e-4)
