"""Networks of diffusers at random sizes and weights equal ours after conversion, there and back."""

import dataclasses
import random

import pytest
import torch
from safetensors.torch import save_file

from megadit.models.configs.named import NAMED_CONFIGS
from megadit.models.convert import class_dit, cosmos
from megadit.models.convert.converted import to_ours, to_theirs
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.dit import DiT
from megadit.models.networks.embeddings import class_digits
from megadit.models.storage.tensor_source import from_state_dict
from megadit.models.tokenizers import load_tokenizer, published_tokenizer

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

TOLERANCE = 1e-5
"""Relative, float32: two orders of the same sums over a few hundred numbers."""


def randomised(model, std=0.2):
    """Every tensor random, those that start at zero or one included."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator) * std + ("norm" in name and parameter.ndim == 1)
            )
    return model.eval()


def ours_from(model, config, entries, **options):
    tensors = to_ours(from_state_dict(model.state_dict()), entries, config, **options)
    dit = DiT(config)
    dit.load_state_dict(tensors.state_dict())
    return dit.eval()


def assert_round_trip(state_dict, config, entries):
    """Bit for bit, in the number type that they came in."""
    ours = to_ours(from_state_dict(state_dict), entries, config).state_dict()
    back = to_theirs(from_state_dict(ours), entries).state_dict()
    assert back.keys() == state_dict.keys()
    for name, tensor in state_dict.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor)


def random_type(seed):
    return random.Random(seed).choice([torch.float32, torch.bfloat16, torch.float16])


def in_random_type(model, seed):
    """(the tensors in float32, bfloat16 or float16, the model in float32 with these values)."""
    dtype = random_type(seed)
    published = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: tensor.float() for name, tensor in published.items()})
    return published, model


def distance(a, b):
    return ((a - b).norm() / b.norm()).item()


def random_cosmos(seed):
    draw = random.Random(seed)
    heads, head_dim = draw.choice([2, 3]), draw.choice([12, 16, 24])
    patch = (draw.choice([1, 2]), *[draw.choice([1, 2])] * 2)
    return diffusers.CosmosTransformer3DModel(
        in_channels=(channels := draw.choice([3, 4])),
        out_channels=channels,
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        num_layers=draw.choice([1, 2]),
        mlp_ratio=draw.choice([2.0, 4.0]),
        text_embed_dim=draw.choice([8, 20]),
        adaln_lora_dim=draw.choice([4, 8]),
        max_size=(8, 24, 24),
        patch_size=patch,
        rope_scale=draw.choice([(1.0, 1.0, 1.0), (2.0, 1.0, 1.0), (2.0, 2.0, 2.0)]),
        concat_padding_mask=draw.random() < 0.5,
        extra_pos_embed_type=draw.choice(["learnable", None]),
    )


@pytest.mark.parametrize("seed", range(8))
def test_cosmos_equals_diffusers(seed, without_torchvision):
    published, model = in_random_type(randomised(random_cosmos(seed)), seed)
    config = cosmos.config_from_diffusers(model.config)
    entries = cosmos.diffusers_entries(config)
    dit = ours_from(model, config, entries)
    draw = torch.Generator().manual_seed(seed)
    T, H, W = 2 * config.patch_temporal, 4 * config.patch_spatial, 3 * config.patch_spatial
    x = torch.randn(2, config.in_channels, T, H, W, generator=draw)
    c_noise, fps = torch.randn(2, generator=draw) / 2, [None, 8, 30][seed % 3]
    text = torch.randn(2, 5, config.crossattn_emb_size, generator=draw)
    mask = (torch.rand(1, 1, H, W, generator=draw) < 0.3).float()
    conditioning = Conditioning(text, torch.tensor([5, 5]), torch.full((2,), float(fps or 0)))
    with torch.no_grad():
        theirs = model(x, c_noise, text, fps=fps, padding_mask=mask, return_dict=False)[0]
        ours = dit(x, c_noise, conditioning, mask[:, :, None].expand(2, 1, T, H, W))
        assert distance(ours, theirs) <= TOLERANCE
        if config.padding_mask_channel:
            assert distance(dit(x, c_noise, conditioning), theirs) > 1e-3, "negative control: the mask must matter"
        other_fps = Conditioning(text, torch.tensor([5, 5]), torch.full((2,), 11.0))
        assert distance(dit(x, c_noise, other_fps, mask[:, :, None].expand(2, 1, T, H, W)), theirs) > 1e-4
    assert_round_trip(published, config, entries)
    rebuilt = diffusers.CosmosTransformer3DModel.from_config(cosmos.config_to_diffusers(config))
    assert {n: t.shape for n, t in rebuilt.state_dict().items()} == {n: t.shape for n, t in model.state_dict().items()}


def test_released_cosmos_names():
    """A few of the names in the released model.pt, as published."""
    assert cosmos.released_name("transformer_blocks.3.norm2.linear_1.weight") == (
        "blocks.block3.blocks.1.adaLN_modulation.1.weight"
    )
    assert cosmos.released_name("transformer_blocks.0.attn2.to_q.weight") == (
        "blocks.block0.blocks.1.block.attn.to_q.0.weight"
    )
    assert cosmos.released_name("transformer_blocks.0.attn1.norm_k.weight") == (
        "blocks.block0.blocks.0.block.attn.to_k.1.weight"
    )
    assert cosmos.released_name("transformer_blocks.0.attn1.to_out.0.weight") == (
        "blocks.block0.blocks.0.block.attn.to_out.0.weight"
    )
    assert cosmos.released_name("transformer_blocks.7.ff.net.2.weight") == "blocks.block7.blocks.2.block.layer2.weight"
    assert cosmos.released_name("norm_out.linear_2.weight") == "final_layer.adaLN_modulation.2.weight"


def random_class_dit(seed):
    draw = random.Random(seed)
    heads, channels = draw.choice([2, 3]), draw.choice([2, 4])
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=heads,
        attention_head_dim=draw.choice([8, 12]),
        in_channels=channels,
        out_channels=draw.choice([channels, 2 * channels]),
        num_layers=draw.choice([1, 3]),
        sample_size=8,
        patch_size=draw.choice([2, 4, 8]),
        num_embeds_ada_norm=draw.choice([5, 300]),
        norm_eps=draw.choice([1e-5, 1e-6]),
    )
    randomised(model)
    first = model.transformer_blocks[0].norm1.emb
    for block in model.transformer_blocks[1:]:  # as in the published ones
        block.norm1.emb.load_state_dict(first.state_dict())
    return model


def class_conditioning(labels, num_classes):
    text = torch.tensor([[class_digits(label)] for label in labels])
    length = torch.tensor([int(label < num_classes) for label in labels])
    return Conditioning(text, length, torch.zeros(len(labels)))


@pytest.mark.parametrize("seed", range(6))
def test_class_dit_equals_diffusers(seed):
    published, model = in_random_type(random_class_dit(seed), seed)
    config = class_dit.config_from_diffusers(model.config)
    entries = class_dit.diffusers_entries(config)
    dit = ours_from(model, config, entries)
    labels = [0, config.num_classes - 1, config.num_classes]
    x, t = torch.randn(3, config.in_channels, 8, 8), torch.tensor([0.0, 37.0, 999.0])
    with torch.no_grad():
        theirs = model(x, t, torch.tensor(labels), return_dict=False)[0][:, : config.in_channels]
        ours = dit(x[:, :, None], t, class_conditioning(labels, config.num_classes))[:, :, 0]
        assert distance(ours, theirs) <= TOLERANCE
        assert distance(dit(x[:, :, None], t, class_conditioning([1] * 3, config.num_classes))[:, :, 0], theirs) > 1e-3
    assert_round_trip(published, config, entries)


def test_original_class_dit_round_trips_and_has_its_layout():
    """The original keeps q, k and v of all heads one after another."""
    config = class_dit.config_from_diffusers(random_class_dit(0).config)
    torch.manual_seed(0)
    dit = randomised(DiT(config))
    entries = class_dit.original_entries(config)
    original = to_theirs(from_state_dict(dit.state_dict()), entries).state_dict()
    assert (
        class_dit.config_from_shapes(
            {name: tuple(tensor.shape) for name, tensor in original.items()}, config.dim_per_head
        ).hidden_size
        == config.hidden_size
    )
    again = to_ours(from_state_dict(original), entries, config)
    assert all(torch.equal(again.read(name), tensor) for name, tensor in dit.state_dict().items())
    width, head_dim = config.hidden_size, config.dim_per_head
    qkv, theirs = dit.state_dict()["blocks.0.self_attention.qkv.weight"], original["blocks.0.attn.qkv.weight"]
    assert torch.equal(theirs[width : width + head_dim], qkv[head_dim : 2 * head_dim]), "k of the first head"


@pytest.mark.parametrize(("name", "billions"), [("cosmos_7b", 7.24), ("cosmos_14b", 14.26)])
def test_cosmos_has_as_many_parameters_as_diffusers_network(name, billions):
    config = NAMED_CONFIGS[name]
    values = cosmos.config_to_diffusers(config)
    theirs = of_layers(lambda n: diffusers.CosmosTransformer3DModel.from_config(values | {"num_layers": n}), config)
    assert num_parameters(config) == theirs == pytest.approx(billions * 1e9, rel=1e-3)


def of_layers(build, config):
    """Parameters of a network, all of whose layers are alike; `build` is told how many it has."""
    with torch.device("meta"):
        one, two = (sum(parameter.numel() for parameter in build(count).parameters()) for count in (1, 2))
    return one + (config.num_layers - 1) * (two - one)


def num_parameters(config):
    return of_layers(lambda count: DiT(dataclasses.replace(config, num_layers=count)), config)


@pytest.mark.parametrize(
    ("layers", "width", "heads", "millions"), [(12, 384, 6, 33), (12, 768, 12, 130), (24, 1024, 16, 458)]
)
def test_class_dits_have_the_papers_sizes(layers, width, heads, millions):
    """Table 1 of arXiv 2212.09748, with patches of 2."""
    sizes = dict(num_layers=layers, hidden_size=width, num_attention_heads=heads)
    assert round(num_parameters(dataclasses.replace(NAMED_CONFIGS["dit_xl_2"], **sizes)) / 1e6) == millions


def test_the_published_dit_has_as_many_parameters():
    """Its file counts the sines and cosines of 256 positions, too."""
    assert num_parameters(NAMED_CONFIGS["dit_xl_2"]) + 256 * 1152 == 675_129_632


def test_drawn_networks_differ_in_what_matters():
    networks = [random_cosmos(seed).config for seed in range(8)]
    for setting in ("concat_padding_mask", "extra_pos_embed_type", "num_attention_heads", "patch_size", "rope_scale"):
        assert len({network[setting] for network in networks}) > 1, setting
    assert len({random_type(seed) for seed in range(8)}) == 3


def random_cosmos_autoencoder(seed):
    """Widths, depth, patches and compression as the class can have them."""
    draw = random.Random(seed)
    temporal, spatial, patch = draw.choice([(4, 8, 4), (8, 8, 4), (8, 16, 4), (4, 8, 2), (4, 4, 2)])
    widths = [draw.choice([4, 8, 12]) for _ in range(4)]
    return diffusers.AutoencoderKLCosmos(
        encoder_block_out_channels=tuple(widths),
        decode_block_out_channels=tuple(reversed(widths[1:])),
        latent_channels=draw.choice([3, 5]),
        num_layers=draw.choice([1, 2]),
        temporal_compression_ratio=temporal,
        spatial_compression_ratio=spatial,
        patch_size=patch,
        latents_mean=None,
        latents_std=None,
    )


@pytest.mark.parametrize("seed", range(3))
def test_cosmos_autoencoder_equals_diffusers(seed, tmp_path, randomise_autoencoder):
    torch.manual_seed(seed)
    dtype = random_type(seed)
    model = randomise_autoencoder(random_cosmos_autoencoder(seed))
    state_dict = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "theirs")
    save_file(state_dict, tmp_path / "theirs/diffusion_pytorch_model.safetensors")
    published_tokenizer(tmp_path / "theirs").save(tmp_path / "ours")
    tokenizer = load_tokenizer(tmp_path / "ours")
    assert tokenizer.network.tensors().keys() == state_dict.keys()
    for name, tensor in tokenizer.network.tensors().items():
        assert tensor.dtype == dtype and torch.equal(tensor, state_dict[name])
    frames, side = 1 + 2 * tokenizer.temporal_compression, 3 * tokenizer.spatial_compression
    video = torch.rand(1, 3, frames, side, 2 * side) * 2 - 1
    model.load_state_dict({name: tensor.float() for name, tensor in state_dict.items()})
    with torch.no_grad():
        z = model.encode(video).latent_dist.mode()
        expected = model.decode(z).sample
    latents = tokenizer.encode(video)
    assert distance(latents, 0.5 * z) <= TOLERANCE
    assert distance(tokenizer.decode(latents), expected) <= TOLERANCE
    assert distance(tokenizer.encode(video.flip(2)), 0.5 * z) > 1e-2, "negative control: the frames must matter"
