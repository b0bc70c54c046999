"""CLIP's features are those of transformers, at all places, of one encoder and of two; and say what is missing."""

import json

import pytest
import torch

from megadit.models.shared.errors import UserError
from megadit.models.text_encoders import CLIPTextEncoder, load_text_encoder
from megadit.models.text_encoders.base import TextFeaturesCache
from megadit.models.text_encoders.clip import SideBySide

PLACES = 77
TEXTS = ["a red seven", "the robot waves, on the beach"]
LONG = "seven " * 20


@pytest.fixture(scope="module")
def one(tmp_path_factory, write_clip):
    return write_clip(tmp_path_factory.mktemp("clip") / "clip-tiny")


@pytest.fixture(scope="module")
def two(tmp_path_factory, write_clip):
    """As in SDXL: the second one has a projection, and pads with another token."""
    root = tmp_path_factory.mktemp("clips") / "pipeline"
    for place, settings in enumerate(({}, {"dim": 24, "projection": 20, "pad": "!"})):
        end = f"_{place + 1}" if place else ""
        write_clip(root / f"text_encoder{end}", **settings)
        (root / f"tokenizer{end}").mkdir()
        for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
            (root / f"text_encoder{end}" / name).rename(root / f"tokenizer{end}" / name)
    return root


def encoder_of(directory, **settings):
    return CLIPTextEncoder(model=str(directory), **settings)


def by_transformers(network, words, class_name, texts):
    """As diffusers' pipelines call it: filled to 77 places, without a mask."""
    import transformers

    tokens = transformers.CLIPTokenizer.from_pretrained(words)(
        texts, padding="max_length", max_length=PLACES, truncation=True, return_tensors="pt"
    )
    with torch.no_grad():
        model = getattr(transformers, class_name).from_pretrained(network).eval()
        return model(tokens.input_ids, output_hidden_states=True)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # one library computes both, in batches of one size


def test_one_encoder_is_that_of_transformers(one):
    found = encoder_of(one, text_padding="tokens", empty_text="encoded").encode([*TEXTS, ""])
    expected = by_transformers(one, one, "CLIPTextModel", [*TEXTS, ""])
    assert found.length_B.tolist() == [PLACES] * 3, "padding counts"
    close(found.features_BLE, expected.last_hidden_state)
    close(found.pooled_BP, expected.pooler_output)
    before = encoder_of(one, text_padding="tokens", layer="penultimate").encode(TEXTS).features_BLE
    close(before, expected.hidden_states[-2][:2])
    assert (before - found.features_BLE[:2]).abs().max() > 0.1, "negative control: the layer must matter"


def test_two_encoders_stand_side_by_side(two):
    encoder = encoder_of(two, layer="penultimate", text_padding="tokens", empty_text="zeros")
    found = encoder.encode([*TEXTS, ""])
    first = by_transformers(two / "text_encoder", two / "tokenizer", "CLIPTextModel", TEXTS)
    second = by_transformers(two / "text_encoder_2", two / "tokenizer_2", "CLIPTextModelWithProjection", TEXTS)
    assert encoder.dim == 16 + 24 and encoder.pooled_dim == 20
    close(found.features_BLE[:2], torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1))
    close(found.pooled_BP[:2], second.text_embeds)
    assert found.length_B.tolist() == [PLACES] * 3
    assert not found.features_BLE[2].any() and not found.pooled_BP[2].any(), "an empty text is zeros"


def test_lengths_are_true_where_padding_does_not_count(one):
    """For networks of ours: their learned token stands for no text."""
    encoder = encoder_of(one)
    found = encoder.encode(["a red", ""])
    assert found.length_B.tolist() == [6, 0]  # letters, the beginning and the end
    filled = encoder_of(one, text_padding="tokens").encode(["a red"])
    close(found.features_BLE[0], filled.features_BLE[0, :6])  # causal: padding is behind
    assert not found.features_BLE[1].any()


def test_long_texts_are_cut_with_a_warning(one):
    with pytest.warns(UserWarning, match="a text of 102 tokens is cut to its first 77"):
        found = encoder_of(one).encode([LONG])
    assert found.length_B.tolist() == [PLACES]


def test_features_are_kept_on_disk_and_in_memory(two, tmp_path):
    settings = {"text_padding": "tokens", "feature_cache": str(tmp_path)}
    expected = encoder_of(two, **settings).encode(TEXTS)
    again = encoder_of(two, **settings)
    found = again.encode(TEXTS)
    assert "network" not in again._loaded, "nothing was computed"
    assert torch.equal(found.features_BLE, expected.features_BLE) and torch.equal(found.pooled_BP, expected.pooled_BP)
    cached = TextFeaturesCache(again).encode([TEXTS[1], TEXTS[0], TEXTS[1]])
    assert torch.equal(cached.features_BLE, expected.features_BLE[[1, 0, 1]])
    assert torch.equal(cached.pooled_BP, expected.pooled_BP[[1, 0, 1]])


def test_saved_settings_name_the_model(two, tmp_path):
    encoder = encoder_of(two, layer="penultimate")
    encoder.save(tmp_path / "part")
    assert sorted(file.name for file in (tmp_path / "part").iterdir()) == ["config.json"]
    loaded = load_text_encoder(tmp_path / "part")
    assert loaded.fingerprint() == encoder.fingerprint() and loaded.layer == "penultimate"
    assert torch.equal(loaded.encode(TEXTS).features_BLE, encoder.encode(TEXTS).features_BLE)
    values = json.loads((tmp_path / "part/config.json").read_text())
    (tmp_path / "part/config.json").write_text(json.dumps({**values, "model": "openai/clip"}))
    with pytest.raises(UserError, match="openai/clip is not on this machine: run `hf download openai/clip`"):
        load_text_encoder(tmp_path / "part").encode(TEXTS)


def test_fingerprints_tell_encoders_apart(one, two, tmp_path, write_clip):
    others = [
        encoder_of(two),
        encoder_of(write_clip(tmp_path, dim=24)),
        *(
            encoder_of(one, **s)
            for s in ({"layer": "penultimate"}, {"text_padding": "tokens"}, {"empty_text": "zeros"})
        ),
    ]
    assert len({encoder.fingerprint() for encoder in [encoder_of(one), *others]}) == 6
    assert encoder_of(one, placement="cpu").fingerprint() == encoder_of(one).fingerprint()


def test_a_published_directory_is_taken_as_it_is(one, tmp_path):
    """Of a whole CLIP, which judges pictures too, the pooled feature is the projected one."""
    import transformers

    assert isinstance(load_text_encoder(one), CLIPTextEncoder)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    text = transformers.CLIPTextConfig.from_pretrained(one).to_dict()
    config = transformers.CLIPConfig(
        text_config=text, vision_config=sizes | {"image_size": 8, "patch_size": 4}, projection_dim=12
    )
    transformers.CLIPModel(config).save_pretrained(tmp_path)
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((one / name).read_bytes())
    whole = load_text_encoder(tmp_path)
    expected = by_transformers(tmp_path, tmp_path, "CLIPTextModelWithProjection", TEXTS)
    assert whole.pooled_dim == 12
    close(whole.encode(TEXTS).pooled_BP, expected.text_embeds)


def test_a_graph_gives_the_same_features(two):
    encoder = encoder_of(two, text_padding="tokens")
    graph, shapes = encoder.graph(), []

    def run(inputs, shape):
        shapes.append(shape)
        return graph(*inputs)

    assert isinstance(graph, SideBySide)
    by_graph, expected = encoder.with_graph(run, torch.device("cpu")).encode(TEXTS), encoder.encode(TEXTS)
    assert shapes == [(2, PLACES + 1, 40)]
    assert torch.equal(by_graph.features_BLE, expected.features_BLE)
    assert torch.equal(by_graph.pooled_BP, expected.pooled_BP)


def test_mistakes_are_told_in_one_line(one, tmp_path):
    with pytest.raises(UserError, match="choose one of last, penultimate"):
        encoder_of(one, layer="first")
    with pytest.raises(UserError, match="does not exist: expected a directory with config.json"):
        encoder_of(tmp_path / "nothing").encode(["a"])
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UserError, match="is a model of type 'bert', not one of clip_text_model, clip"):
        encoder_of(tmp_path).encode(["a"])
    (tmp_path / "config.json").write_bytes((one / "config.json").read_bytes())
    with pytest.raises(UserError, match="has no weight file with a known name"):
        encoder_of(tmp_path).encode(["a"])
    (tmp_path / "model.safetensors").write_bytes((one / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match="has neither tokenizer.json nor vocab.json"):
        encoder_of(tmp_path).encode(["a"])


def test_the_networks_compute_where_the_encoder_was_sent(two):
    network = encoder_of(two).to(torch.device("meta")).load_network()
    assert {parameter.device.type for parameter in network.parameters()} == {"meta"}
