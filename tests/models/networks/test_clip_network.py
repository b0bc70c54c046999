"""CLIP of the layer kit: beside transformers' CLIPModel, in packs, its words."""

from dataclasses import replace
from math import prod

import pytest
import safetensors.torch
import torch
from transformers import CLIPConfig, CLIPModel

from megadit.models.bundle import Bundle
from megadit.models.commands import convert as cli
from megadit.models.configs.named import NAMED_CONFIGS
from megadit.models.convert.published import open_published
from megadit.models.networks.clip import HIGHEST_SCALE, bounded
from megadit.models.networks.embeddings import class_digits, token_sequence
from megadit.models.networks.registry import build_network
from megadit.models.ops.reference import attention
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json, write_json
from megadit.models.storage.components import network_shapes
from megadit.models.text_encoders import TokenIds, load_text_encoder
from megadit.models.text_encoders.token_ids import learned_words

TEXTS = ["a red seven", "a green three on a table", "the number nine", ""]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MILLION = 1e6


def words():
    return learned_words(TEXTS * 3, num_words=300, max_length=16)


def theirs(**settings):
    """A network of transformers of which every tensor is random."""
    text = {**SIZES, "intermediate_size": 48, "vocab_size": 300, "max_position_embeddings": 16, **settings}
    text |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    image = {**SIZES, "hidden_size": 48, "intermediate_size": 64, "image_size": 16, "patch_size": 4, **settings}
    text["projection_dim"] = image["projection_dim"] = 24
    network = CLIPModel(CLIPConfig(text_config=text, vision_config=image, projection_dim=24)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name != "logit_scale":
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + ("norm" in name))
    return network


@pytest.fixture(params=["quick_gelu", "gelu"])
def saved(request, tmp_path):
    """(their network, the folder that they save it in, with its words)."""
    network, folder = theirs(hidden_act=request.param), tmp_path / "theirs"
    network.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(words().words)
    return network, folder


def ours(folder):
    published = open_published(folder)
    network = build_network(published.config)
    network.load_state_dict(published.tensors.state_dict())
    return network.eval()


def images(count=3, side=16):
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("name", "count"), [("clip_b_32", 151.3), ("clip_l_14", 427.6), ("clip_h_14", 986.1)])
def test_sizes_have_the_published_numbers_of_parameters(name, count):
    found = sum(prod(shape) for shape in network_shapes(NAMED_CONFIGS[name]).values())
    assert found / MILLION == pytest.approx(count, rel=0.001)


@torch.no_grad()
def test_numbers_are_those_of_transformers(saved):
    network, folder = saved
    token_BL, length_B = words().tokens(TEXTS)
    filled_BL = token_BL.masked_fill(torch.arange(token_BL.shape[1]) >= length_B[:, None], 1)
    found = network(input_ids=filled_BL, pixel_values=images())
    model = ours(folder)
    torch.testing.assert_close(model.embed_images(images()[:, :, None]), found.image_embeds, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.embed_texts(token_BL, length_B), found.text_embeds, rtol=1e-5, atol=1e-5)
    scores = model(images()[:, :, None], token_BL, length_B)
    torch.testing.assert_close(scores, found.logits_per_image, rtol=1e-4, atol=1e-4)  # times 14


@torch.no_grad()
def test_a_tower_that_sees_what_follows_is_noticed(saved, monkeypatch):
    """Negative control: without the mask of what comes after, texts differ."""
    network, folder = saved
    token_BL, length_B = words().tokens(TEXTS[:1])
    expected = network(input_ids=token_BL, pixel_values=images()).text_embeds
    monkeypatch.setattr("megadit.models.packing.dense_layout.DenseLayout.is_causal", False)
    assert (ours(folder).embed_texts(token_BL, length_B) - expected).abs().max() > 1e-3


def test_there_and_back_every_byte_is_the_same(saved, tmp_path):
    network, folder = saved
    assert cli.main([str(folder), str(tmp_path / "bundle")]) == 0
    bundle = Bundle.open(tmp_path / "bundle")
    assert bundle.kind == "clip" and bundle.load_text_encoder().fingerprint() == words().fingerprint()
    assert cli.main([str(tmp_path / "bundle"), str(tmp_path / "back"), "--to", "transformers"]) == 0
    before, after = (safetensors.torch.load_file(each / "model.safetensors") for each in (folder, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(before[name].shape == after[name].shape for name in before)
    assert all(before[name].numpy().tobytes() == after[name].numpy().tobytes() for name in before)
    again = CLIPModel.from_pretrained(tmp_path / "back")
    for part in ("text_config", "vision_config"):
        mine, original = (getattr(each.config, part).to_dict() for each in (again, network))
        assert {name for name in original if mine[name] != original[name]} <= {"_name_or_path", "dtype"}
    preprocessor = read_json(tmp_path / "back" / "preprocessor_config.json")
    assert preprocessor["image_mean"] == pytest.approx([0.48145466, 0.4578275, 0.40821073], abs=1e-6)
    assert preprocessor["image_std"] == pytest.approx([0.26862954, 0.26130258, 0.27577711], abs=1e-6)


def test_pixels_are_those_of_its_processor(saved, tmp_path):
    _, folder = saved
    assert cli.main([str(folder), str(tmp_path / "bundle")]) == 0
    video = 2 * torch.rand(2, 3, 1, 16, 16) - 1
    mean, deviation = (
        torch.tensor(values)[:, None, None, None]
        for values in ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
    )
    expected = ((video + 1) / 2 - mean) / deviation
    torch.testing.assert_close(Bundle.open(tmp_path / "bundle").load_tokenizer().encode(video), expected)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"hidden_act": "relu"}, "towers differ in hidden_act"),
        ({"layer_norm_eps": 1e-6}, "towers differ in layer_norm_eps"),
    ],
)
def test_another_network_is_refused(tmp_path, values, says):
    theirs().save_pretrained(tmp_path)
    config = read_json(tmp_path / "config.json")
    config["vision_config"] |= values
    write_json(tmp_path / "config.json", config)
    with pytest.raises(UserError, match=says):
        open_published(tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("variant", [None, "reference"])
def test_a_pack_gives_what_each_text_and_image_gives(saved, variant, monkeypatch):
    """Texts of several lengths, one missing, and padding."""
    model = ours(saved[1])
    token_BL, length_B = words().tokens(TEXTS)
    lengths = [*length_B[:3].tolist(), 0]
    rows = [[class_digits(int(token)) for token in row[:length]] for row, length in zip(token_BL, lengths, strict=True)]
    slots = torch.tensor([pair for row in rows for pair in row or [(0.0, 0.0)]])
    capacity = len(slots) + 5
    text_L1E = torch.zeros(capacity, 1, 2)
    text_L1E[: len(slots), 0] = slots
    segments = [Segment(model.config.sample_grid(1, 16, 16), length) for length in lengths]
    layout = PackLayout.pack(segments, capacity=4 * 17 + 3, text_capacity=capacity)
    x_BCTHW = images(4)[:, :, None]
    tokens = token_sequence(x_BCTHW, model.config).transpose(0, 1).flatten(0, 1)
    tokens_S1P = torch.cat([tokens, torch.zeros(3, tokens.shape[-1])])[:, None]
    if variant == "reference":
        monkeypatch.setattr(attention, "__call__", attention.reference, raising=False)
    found = model.image_tower.forward_packed(tokens_S1P, layout)[:4]
    torch.testing.assert_close(found, model.image_tower(x_BCTHW), rtol=1e-5, atol=1e-5)
    found = model.text_tower.forward_packed(text_L1E, layout)[:3]
    torch.testing.assert_close(found, model.text_tower(token_BL[:3], length_B[:3]), rtol=1e-5, atol=1e-5)


def test_a_bound_is_left_by_a_gradient_that_leads_back():
    x = torch.tensor([4.0, 5.0, 5.0], requires_grad=True)
    y = bounded(x, 4.5)
    (y * torch.tensor([1.0, 1.0, -1.0])).sum().backward()
    assert y.tolist() == [4.0, 4.5, 4.5] and x.grad.tolist() == [1.0, 1.0, 0.0]
    network = build_network(NAMED_CONFIGS["clip_digits"])
    network.log_scale.data.fill_(9.0)
    assert network.scale.item() == pytest.approx(HIGHEST_SCALE)


def test_words_are_kept_cut_and_checked(tmp_path):
    found = words()
    token_BL, length_B = found.tokens(TEXTS)
    assert (
        token_BL[:, 0].tolist() == [0] * 4
        and [row[n - 1].item() for row, n in zip(token_BL, length_B, strict=True)] == [1] * 4
    )
    assert found.encode(["A RED  seven "]).features_BLE.tolist() == found.encode(["a red  seven"]).features_BLE.tolist()
    assert found.tokens(["☃ ünseen"])[0].max() < found.num_words
    with pytest.warns(UserWarning, match=r"a text of \d+ tokens is cut to its first 16"):
        assert found.tokens(["a red seven " * 9])[0][0, -1] == 1
    found.save(tmp_path)
    assert load_text_encoder(tmp_path).fingerprint() == found.fingerprint()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        load_text_encoder(tmp_path)
    with pytest.raises(UserError, match="max_length=2 must be at least 3"):
        TokenIds(words=found.words, max_length=2)


def test_what_does_not_go_together_is_refused():
    model = NAMED_CONFIGS["clip_digits"]
    with pytest.raises(UserError, match="has a text tower, and no other"):
        replace(model, family="vit")
    with pytest.raises(UserError, match="a token is read as two digits"):
        replace(model, crossattn_emb_size=8)
