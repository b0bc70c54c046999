"""The classifier of the layer kit: beside transformers' ViT, in packs, at other sizes."""

from math import prod

import pytest
import safetensors.torch
import torch
from transformers import ViTConfig, ViTForImageClassification, ViTModel

from megadit.models.bundle import Bundle
from megadit.models.commands import convert as cli
from megadit.models.configs.named import NAMED_CONFIGS
from megadit.models.convert.published import open_published
from megadit.models.networks.embeddings import token_sequence
from megadit.models.networks.registry import build_network
from megadit.models.networks.vit import resized_positions
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json, write_json
from megadit.models.storage.components import network_shapes

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
}
MILLION = 1e6


def theirs(of=ViTForImageClassification, **settings):
    """A network of transformers of which every tensor is random."""
    more = {"add_pooling_layer": False} if of is ViTModel else {}
    network = of(ViTConfig(**SIZES, num_labels=7) if not settings else ViTConfig(**SIZES | settings), **more).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return network


@pytest.fixture(params=[ViTForImageClassification, ViTModel])
def saved(request, tmp_path):
    """(their network, the folder that they save it in)."""
    network = theirs(request.param)
    network.save_pretrained(tmp_path / "theirs")
    return network, tmp_path / "theirs"


def ours(folder):
    published = open_published(folder)
    network = build_network(published.config)
    network.load_state_dict(published.tensors.state_dict())
    return network.eval()


def images(count=3, side=16):
    return 2 * torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(1)) - 1


@pytest.mark.parametrize(
    ("name", "count"),
    [("vit_b_16", 86), ("vit_l_16", 303), ("vit_h_14", 632), ("vit_g_14", 1011), ("vit_G_14", 1843)],
)
def test_sizes_have_the_published_numbers_of_parameters(name, count):
    found = sum(prod(shape) for shape in network_shapes(NAMED_CONFIGS[name]).values())
    assert found / MILLION == pytest.approx(count, rel=0.01)


@torch.no_grad()
def test_numbers_are_those_of_transformers(saved):
    network, folder = saved
    found = network(images())
    expected = found.logits if "logits" in found else found.last_hidden_state[:, 0]
    torch.testing.assert_close(ours(folder)(images()[:, :, None]), expected, rtol=1e-5, atol=1e-5)


def test_there_and_back_every_byte_is_the_same(saved, tmp_path):
    network, folder = saved
    assert cli.main([str(folder), str(tmp_path / "bundle")]) == 0
    assert Bundle.open(tmp_path / "bundle").kind == "classifier"
    assert cli.main([str(tmp_path / "bundle"), str(tmp_path / "back"), "--to", "transformers"]) == 0
    before, after = (safetensors.torch.load_file(each / "model.safetensors") for each in (folder, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(before[name].numpy().tobytes() == after[name].numpy().tobytes() for name in before)
    again = type(network).from_pretrained(tmp_path / "back")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in network.state_dict().items())
    assert again.config.id2label == network.config.id2label or "logits" not in network(images())


def test_a_wrong_place_of_heads_is_noticed(saved, monkeypatch):
    """Negative control: with queries, keys and values not laid out head by head, numbers differ."""
    network, folder = saved
    model = ours(folder)
    with torch.no_grad():
        for block in model.blocks.values():
            weight = block.self_attention.qkv.weight
            weight.copy_(weight.unflatten(0, (4, 3, 8)).transpose(0, 1).flatten(0, 2))
        found = network(images())
        expected = found.logits if "logits" in found else found.last_hidden_state[:, 0]
        assert (model(images()[:, :, None]) - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("file", "values", "says"),
    [
        ("config.json", {"hidden_act": "relu"}, "a ViT with hidden_act='relu' is not supported"),
        ("config.json", {"image_size": [16, 32]}, "images must be square"),
        ("preprocessor_config.json", {"image_mean": [0.485, 0.456, 0.406]}, "has image_mean="),
    ],
)
def test_another_network_is_refused(tmp_path, file, values, says):
    theirs().save_pretrained(tmp_path)
    before = read_json(tmp_path / file) if (tmp_path / file).is_file() else {}
    write_json(tmp_path / file, before | values)
    with pytest.raises(UserError, match=says):
        open_published(tmp_path)


def test_other_networks_have_no_such_form():
    from megadit.models.convert.written import write_transformers

    with pytest.raises(UserError, match="transformers has no network of the family megadit"):
        write_transformers(None, NAMED_CONFIGS["digits"], None, None, None)


@torch.no_grad()
def test_a_pack_gives_what_a_batch_gives(saved):
    model = ours(saved[1])
    x_BCTHW = images()[:, :, None]
    tokens_SBP = token_sequence(x_BCTHW, model.config)
    length = len(tokens_SBP)
    layout = PackLayout.pack([Segment((1, 1, length), 1)] * 3, capacity=3 * length + 5, text_capacity=4)
    tokens_S1P = torch.cat([*tokens_SBP.unbind(1), torch.zeros(5, tokens_SBP.shape[-1])])[:, None]
    found = model.forward_packed(tokens_S1P, layout)
    torch.testing.assert_close(found[:3], model(x_BCTHW), rtol=1e-5, atol=1e-5)


def test_another_size_is_refused():
    with pytest.raises(UserError, match="1x6x6 tokens .* do not match model.learned_positions, 1x4x4"):
        build_network(open_config())(images(side=24)[:, :, None])


def test_a_published_one_goes_on_with_the_recipe_of_its_size():
    from megadit.models.convert.vit import config_from_transformers

    assert (
        config_from_transformers(ViTConfig().to_dict(), {"classifier.weight": (1000, 768)}) == NAMED_CONFIGS["vit_b_16"]
    )


def open_config():
    from megadit.models.convert.vit import config_from_transformers

    return config_from_transformers(ViTConfig(**SIZES).to_dict(), {"classifier.weight": (2, 32)})


@torch.no_grad()
def test_positions_are_resized_as_transformers_does_it():
    embeddings = theirs(ViTModel).embeddings
    expected = embeddings.interpolate_pos_encoding(torch.zeros(1, 37, 32), 24, 24)[0]
    found = resized_positions(embeddings.position_embeddings[0], (1, 4, 4), (1, 6, 6))
    torch.testing.assert_close(found, expected)


def test_frames_keep_their_positions():
    positions_SD = torch.arange(9.0)[:, None]
    found = resized_positions(positions_SD, (2, 2, 2), (4, 2, 2))
    assert found[:, 0].tolist() == [0, 1, 2, 3, 4, 1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8]
