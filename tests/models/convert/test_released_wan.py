"""The released folders of Wan whole: network, VAE `.pth`, umT5 `.pth`, CLIP `.pth`; and ComfyUI's files of them."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megadit.models.bundle import Bundle
from megadit.models.commands.convert import main
from megadit.models.convert import wan
from megadit.models.convert.converted import to_theirs
from megadit.models.networks.dit import DiT
from megadit.models.shared.errors import UserError
from megadit.models.storage.tensor_source import from_state_dict
from megadit.models.text_encoders.image_encoder import ImageEncoder
from megadit.models.tokenizers import load_tokenizer, published_tokenizer
from tests.models.convert.test_layouts import WAN, prefixed
from tests.models.text_encoders.test_text_weights import released

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
    with pytest.raises(UserError, match="is no autoencoder of Wan 2.1 or 2.2: it has no tensor decoder.middle"):
        published_tokenizer(tmp_path / "Wan2.2_VAE.pth")
    tensors = {name: tensor for name, tensor in vae[1].items() if name != "decoder.conv1.bias"}
    torch.save(tensors, tmp_path / "Wan2.1_VAE.pth")
    with pytest.raises(UserError, match="missing: decoder.conv_in.bias"):
        published_tokenizer(tmp_path / "Wan2.1_VAE.pth")


OLD_NAMES = {
    ".norm1.": ".residual.0.", ".conv1.": ".residual.2.", ".norm2.": ".residual.3.", ".conv2.": ".residual.6.",
    ".conv_shortcut.": ".shortcut.", "post_quant_conv.": "conv2.", "quant_conv.": "conv1.", ".conv_in.": ".conv1.",
    ".norm_out.": ".head.0.", ".conv_out.": ".head.2.", ".mid_block.resnets.0.": ".middle.0.",
    ".mid_block.attentions.0.": ".middle.1.", ".mid_block.resnets.1.": ".middle.2.",
}  # fmt: skip


def old_name_of_2_2(name):
    for ours, old in OLD_NAMES.items():
        name = name.replace(ours, old)
    for variant, count in (("down", 2), ("up", 3)):
        for block in range(4):
            name = name.replace(f".{variant}_blocks.{block}.resnets.", f".{variant}samples.{block}.{variant}samples.")
            name = name.replace(
                f".{variant}_blocks.{block}.{variant}sampler.", f".{variant}samples.{block}.{variant}samples.{count}."
            )
    return name


@pytest.mark.parametrize("name", ["Wan2.2_VAE.pth", "wan2.2_vae.safetensors"])
def test_the_autoencoder_of_2_2_is_that_of_diffusers(name, tmp_path):
    sizes = {"base_dim": 4, "decoder_base_dim": 8, "z_dim": 48, "is_residual": True, "patch_size": 2, "in_channels": 12,
             "out_channels": 12, "scale_factor_spatial": 16, "temperal_downsample": [False, True, True]}  # fmt: skip
    state = diffusers.AutoencoderKLWan(**sizes).state_dict()
    tensors = {old_name_of_2_2(key): tensor.contiguous() for key, tensor in state.items()}
    assert "decoder.upsamples.1.upsamples.3.time_conv.weight" in tensors, "as published"
    (save_file if name.endswith("safetensors") else torch.save)(tensors, tmp_path / name)
    found = published_tokenizer(tmp_path / name)
    assert found.network.tensors().keys() == state.keys()
    assert all(torch.equal(tensor, state[key]) for key, tensor in found.network.tensors().items())
    assert {key: found.network.config[key] for key in sizes} == sizes
    assert found.network.config["latents_mean"][::47] == [-0.2289, -0.0667] and found.spatial_compression == 16


def released_clip(state):
    """The tensors of transformers' CLIP as Wan publishes them, with those of the text beside."""
    found, names = {"log_scale": torch.ones(()), "textual.norm.weight": torch.ones(3), "visual.head": torch.ones(5)}, {
        "embeddings.class_embedding": "cls_embedding", "embeddings.position_embedding.weight": "pos_embedding",
        "embeddings.patch_embedding.": "patch_embedding.", "pre_layrnorm": "pre_norm", "post_layernorm": "post_norm",
        "encoder.layers.": "transformer.", "layer_norm": "norm", "self_attn.out_proj": "attn.proj", "mlp.fc1": "mlp.0",
        "mlp.fc2": "mlp.2",
    }  # fmt: skip
    for key, tensor in state.items():
        if ".k_proj." in key or ".v_proj." in key:
            continue
        if ".q_proj." in key:
            tensor = torch.cat([state[key.replace(".q_proj.", f".{x}_proj.")] for x in "qkv"])
            key = key.replace("self_attn.q_proj", "attn.to_qkv")
        for theirs, old in names.items():
            key = key.replace(theirs, old)
        found[f"visual.{key.removeprefix('vision_model.')}"] = tensor
    found["visual.cls_embedding"] = found["visual.cls_embedding"][None, None]
    found["visual.pos_embedding"] = found["visual.pos_embedding"][None]
    return found


def test_the_clip_of_images_is_that_of_transformers(tmp_path):
    """In the released folder, by its file alone, and ComfyUI's."""
    sizes = {"hidden_size": 160, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
             "image_size": 28, "patch_size": 14, "hidden_act": "gelu"}  # fmt: skip
    torch.manual_seed(0)
    network = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**sizes)).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    network.save_pretrained(tmp_path / "theirs")
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    processor.save_pretrained(tmp_path / "theirs")
    state = load_file(tmp_path / "theirs" / "model.safetensors")
    (tmp_path / "released").mkdir()
    name = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
    torch.save(tensors := released_clip(state), tmp_path / "released" / name)
    save_file(state | {"visual_projection.weight": torch.ones(3, 160)}, tmp_path / "clip_vision_h.safetensors")
    image = (255 * torch.rand(40, 56, 3, generator=torch.Generator().manual_seed(1))).byte().numpy()
    expected = ImageEncoder(model=str(tmp_path / "theirs")).encode(image)
    for place in ("released", f"released/{name}", "clip_vision_h.safetensors"):
        encoder = ImageEncoder(model=str(tmp_path / place))
        encoder.check()
        assert (encoder.dim, encoder.num_tokens) == (160, 5)
        torch.testing.assert_close(encoder.encode(image), expected, rtol=1e-6, atol=1e-6)
    lost = "visual.transformer.1.mlp.0.bias"
    torch.save({key: tensor for key, tensor in tensors.items() if key != lost}, tmp_path / "released" / name)
    with pytest.raises(UserError, match=r"missing: .*encoder.layers.1.mlp.fc1.bias"):
        ImageEncoder(model=str(tmp_path / "released")).encode(image)


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
