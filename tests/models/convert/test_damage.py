"""Random damage of any component beside the network: an error that names it, or what it says is what is computed."""

import json
import random
import re
import shutil

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megadit.models.bundle import Bundle
from megadit.models.convert import schedulers
from megadit.models.convert.adapters.files import read_adapter
from megadit.models.convert.published import open_published
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.networks.registry import build_network
from megadit.models.shared.errors import UserError
from megadit.models.text_encoders.image_encoder import ImageEncoder
from megadit.models.tokenizers import published_tokenizer
from tests.bundles import write_tiny_bundle
from tests.infer.conftest import make_adapter
from tests.models.convert.test_schedulers import ANYTHING, DEFAULTS

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16,
         "patch_size": 8}  # fmt: skip
IMAGE = np.random.default_rng(0).integers(0, 255, (20, 24, 3), np.uint8)


def of_autoencoder(folder):
    tokenizer = published_tokenizer(folder)
    return tokenizer.decode(torch.ones(1, tokenizer.latent_channels, 1, 2, 2))


def of_images(folder):
    encoder = ImageEncoder(model=str(folder))
    return encoder.encode(IMAGE)


def of_network(folder):
    published = open_published(folder)
    network = build_network(published.config)
    network.load_state_dict(published.tensors.state_dict())
    return torch.cat([tensor.flatten() for tensor in network.state_dict().values()])


@pytest.fixture(scope="module")
def components(tmp_path_factory):
    """Name -> (folder, its file of tensors, its files of settings, what is computed of it)."""
    root = tmp_path_factory.mktemp("components")
    torch.manual_seed(0)
    plain = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    diffusers.AutoencoderKLWan(base_dim=4, z_dim=4, latents_mean=[0.1] * 4, latents_std=[2.0] * 4).save_pretrained(
        root / "vae"
    )
    diffusers.AutoencoderKL(block_out_channels=(4,), norm_num_groups=2, layers_per_block=1).save_pretrained(root / "kl")
    transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**SIZES)).save_pretrained(root / "images")
    transformers.CLIPImageProcessor(**plain).save_pretrained(root / "images")
    transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES)).save_pretrained(root / "vit")
    text = {name: SIZES[name] for name in list(SIZES)[:4]} | {"vocab_size": 20, "max_position_embeddings": 8}
    clip = transformers.CLIPConfig(text_config=text, vision_config=SIZES, projection_dim=8)
    transformers.CLIPModel(clip).save_pretrained(root / "clip")
    bundle = write_tiny_bundle(root / "bundle")
    make_adapter(root / "adapter", bundle.path, 1)
    (root / "adapter" / "megadit.json").unlink()

    def of_adapter(folder):
        state, about = read_adapter(folder, Bundle.open(bundle.path).config).to_state()
        return torch.cat([tensor.flatten() for tensor in state.values()] + [torch.tensor([about.scaling])])

    weights, config = "model.safetensors", ["config.json"]
    return {
        "vae": (root / "vae", "diffusion_pytorch_model.safetensors", config, of_autoencoder),
        "kl": (root / "kl", "diffusion_pytorch_model.safetensors", config, of_autoencoder),
        "images": (root / "images", weights, [*config, "preprocessor_config.json"], of_images),
        "vit": (root / "vit", weights, config, of_network),
        "clip": (root / "clip", weights, config, of_network),
        "adapter": (root / "adapter", "adapter_model.safetensors", ["adapter_config.json"], of_adapter),
    }


NAMES = ("vae", "kl", "images", "vit", "clip", "adapter")


def damaged(tensors, name, how):
    return {
        "drop": {key: tensor for key, tensor in tensors.items() if key != name},
        "rename": {key + "x" * (key == name): tensor for key, tensor in tensors.items()},
        "shape": tensors | {name: tensors[name].flatten()[None, None]},
        "half": tensors | {name: tensors[name].half()},
        "prefix": {f"p.{key}": tensor for key, tensor in tensors.items()},
    }[how]


@pytest.mark.parametrize("component", NAMES)
@hypothesis.settings(max_examples=8, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(seed=st.integers(0, 10**6), how=st.sampled_from(["drop", "rename", "shape", "half", "prefix"]))
def test_damaged_tensors_are_named_or_change_nothing(component, seed, how, components, tmp_path_factory):
    folder, file, _, computed = components[component]
    place = tmp_path_factory.mktemp("damaged") / "it"
    shutil.copytree(folder, place)
    tensors = load_file(folder / file)
    name = random.Random(seed).choice(sorted(tensors))
    save_file(
        {key: value.contiguous() for key, value in damaged(tensors, name, how).items()}, place / file, {"format": "pt"}
    )
    try:
        found = computed(place)
    except UserError as error:
        stems = name.split(".")[-3:-1] or [name]  # an adapter's error names the linear
        assert (how == "prefix" or any(stem in str(error) for stem in stems)) and "\n" not in str(error)
    else:
        torch.testing.assert_close(found, computed(folder), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("component", NAMES)
def test_any_setting_is_used_or_named(component, components, tmp_path, request):
    """Whatever a field of a configuration becomes, no error of a library is shown: one names the field or its file."""
    folder, _, files, computed = components[component]
    shutil.copytree(folder, tmp_path / "it")
    draw, unnamed = random.Random(component), []
    num_values = request.config.getoption("--cases") or 3
    for file in files:
        values = json.loads((folder / file).read_text())
        for name in values:
            for value in draw.sample(ANYTHING, min(num_values, len(ANYTHING))):
                (tmp_path / "it" / file).write_text(json.dumps(values | {name: value}))
                try:
                    computed(tmp_path / "it")
                except UserError as error:
                    assert "\n" not in str(error), (name, value)
                    unnamed += [] if re.search(f"{name}|{tmp_path}|Autoencoder", str(error)) else [(name, value, error)]
        (tmp_path / "it" / file).write_text(json.dumps(values))
    assert not unnamed


@pytest.mark.parametrize("kind", schedulers._SCHEDULERS)
def test_any_setting_of_a_scheduler_is_used_or_named(kind):
    for name, scheduler in schedulers._SCHEDULERS[kind].items():
        values = {"_class_name": name, **scheduler.defaults, **scheduler.only}
        for field in values:
            for value in ANYTHING:
                try:
                    found = schedulers.scheduler_settings(kind, values | {field: value})
                    SamplingSettings(**DEFAULTS | found)
                except UserError as error:
                    assert field in str(error) or field == "_class_name", (field, value, error)
