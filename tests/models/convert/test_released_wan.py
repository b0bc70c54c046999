"""The released folder of Wan 2.1 whole: network, VAE `.pth`, umT5 `.pth`; and ComfyUI's file of the VAE."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megadit.models.bundle.bundle import Bundle
from megadit.models.bundle.tensor_source import from_state_dict
from megadit.models.convert import wan
from megadit.models.convert.cli import main
from megadit.models.convert.converted import to_theirs
from megadit.models.dit import DiT
from megadit.models.shared.errors import UserError
from megadit.models.tokenizers import load_tokenizer, published_tokenizer
from tests.models.convert.test_layouts import WAN, prefixed
from tests.models.test_text_weights import released

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def old_names():
    """Every name that the first publication's files may have."""
    kinds = ("weight", "bias", "gamma")
    for side, many in (("encoder", "downsamples"), ("decoder", "upsamples")):
        yield from (f"{side}.conv1.{kind}" for kind in kinds)
        yield from (f"{side}.head.{place}.{kind}" for place in range(3) for kind in kinds)
        inner = [f"residual.{place}" for place in range(8)] + ["shortcut", "resample.1", "time_conv"]
        for place in range(20):
            yield from (f"{side}.{many}.{place}.{layer}.{kind}" for layer in inner for kind in kinds)
        for place in range(3):
            layers = [*inner, "norm", "to_qkv", "proj"]
            yield from (f"{side}.middle.{place}.{layer}.{kind}" for layer in layers for kind in kinds)
    yield from (f"conv{number}.{kind}" for number in (1, 2) for kind in kinds)


@pytest.fixture(scope="module")
def vae():
    """(diffusers' network, its tensors as first published)."""
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

    torch.manual_seed(0)
    network = diffusers.AutoencoderKLWan(base_dim=4, z_dim=16).eval()
    theirs = {new: old for new, old in convert_wan_vae_to_diffusers({name: name for name in old_names()}).items()}
    state = network.state_dict()
    assert state.keys() <= theirs.keys()
    return network, {theirs[name]: tensor for name, tensor in state.items()}


@pytest.mark.parametrize("name", ["Wan2.1_VAE.pth", "wan_2.1_vae.safetensors"])
@pytest.mark.parametrize("prefix", ["", "first_stage_model."])
def test_the_autoencoder_is_that_of_diffusers(name, prefix, vae, tmp_path):
    network, tensors = vae
    (save_file if name.endswith("safetensors") else torch.save)(prefixed(prefix, tensors), tmp_path / name)
    state = network.state_dict()
    for read in (published_tokenizer, load_tokenizer):
        found = read(tmp_path / name).network.tensors()
        assert found.keys() == state.keys() and all(torch.equal(found[key], state[key]) for key in state)


def test_another_autoencoder_is_named(vae, tmp_path):
    torch.save({"encoder.conv1.weight": torch.ones(2)}, tmp_path / "Wan2.2_VAE.pth")
    with pytest.raises(UserError, match=r"is no autoencoder of Wan 2.1: it has no tensor .*; for others \(2.2\)"):
        published_tokenizer(tmp_path / "Wan2.2_VAE.pth")
    tensors = {name: tensor for name, tensor in vae[1].items() if name != "decoder.conv1.bias"}
    torch.save(tensors, tmp_path / "Wan2.1_VAE.pth")
    with pytest.raises(UserError, match="missing: decoder.conv_in.bias"):
        published_tokenizer(tmp_path / "Wan2.1_VAE.pth")


def test_the_released_folder_becomes_a_bundle(vae, write_t5, tmp_path, capsys):
    folder = tmp_path / "Wan2.1-T2V"
    words = write_t5(folder / "google" / "umt5-xxl")
    vocabulary = json.loads((words / "config.json").read_text())["vocab_size"]
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2, "vocab_size": vocabulary}
    encoder = transformers.UMT5EncoderModel(transformers.UMT5Config(**sizes)).eval()
    encoder.save_pretrained(tmp_path / "umt5")
    for name in ("model.safetensors", "config.json"):
        (words / name).unlink()
    torch.save(released(load_file(tmp_path / "umt5" / "model.safetensors")), folder / "models_t5_umt5-xxl-enc-bf16.pth")
    torch.save(vae[1], folder / "Wan2.1_VAE.pth")
    torch.manual_seed(0)

    config = dataclasses.replace(WAN, in_channels=16)
    state = {name: torch.randn(tensor.shape) for name, tensor in DiT(config).state_dict().items()}
    theirs = to_theirs(from_state_dict(state), wan.released_entries(config)).state_dict()
    save_file(
        {name: tensor.contiguous() for name, tensor in theirs.items()}, folder / "diffusion_pytorch_model.safetensors"
    )
    (folder / "config.json").write_text(
        json.dumps({"_class_name": "WanModel", "num_heads": 1, "eps": 1e-6, "dim": 128})
    )
    assert main([str(folder), str(tmp_path / "bundle")]) == 0, capsys.readouterr().err
    bundle = Bundle.open(tmp_path / "bundle")
    assert bundle.config == config and bundle.load_tokenizer().latent_channels == 16
    text = bundle.load_text_encoder()
    assert text.model == str(folder) and text.encode(["a red seven"]).features_BLE.shape == (1, 512, 8)
