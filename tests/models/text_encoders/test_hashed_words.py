import dataclasses

import pytest
import torch

from megadit.models.shared.errors import UserError
from megadit.models.shared.files import write_json
from megadit.models.shared.words import split_words
from megadit.models.text_encoders import HashedWordEncoder, load_text_encoder


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A red seven, moving LEFT", ["a", "red", "seven", "moving", "left"]),
        ("  tab\tline\nsnake_case-dash  ", ["tab", "line", "snake", "case", "dash"]),
        ("don't stop!", ["don't", "stop"]),
        ("Zürich 2024 ２０", ["zürich", "2024", "20"]),
        ("", []),
        (" ...!? ", []),
    ],
)
def test_split_words(text, words):
    assert split_words(text) == words


def test_features_are_zero_padded_and_lengths_true():
    text = HashedWordEncoder(dim=16).encode(["a red seven", "", "blue"])
    assert text.features_BLE.shape == (3, 3, 16) and text.features_BLE.dtype == torch.float32
    assert text.length_B.tolist() == [3, 0, 1] and text.length_B.dtype == torch.int64
    assert text.features_BLE[1].abs().max() == 0 and text.features_BLE[2, 1:].abs().max() == 0
    assert (text.features_BLE[0].abs().sum(dim=-1) > 0).all() and text.features_BLE[2, 0].abs().sum() > 0


@pytest.mark.parametrize("texts", [[""], ["", "?"]])
def test_empty_texts_have_length_zero(texts):
    text = HashedWordEncoder(dim=16).encode(texts)
    assert text.length_B.tolist() == [0] * len(texts)
    assert text.features_BLE.shape == (len(texts), 1, 16)


def test_a_text_does_not_depend_on_its_batch():
    encoder = HashedWordEncoder()
    alone = encoder.encode(["green two moving up"]).features_BLE[0]
    together = encoder.encode(["x", "GREEN two... moving up", "a b c d e f g h"]).features_BLE[1]
    assert torch.equal(alone, together[:4])


def test_features_have_unit_mean_square():
    text = HashedWordEncoder(dim=256).encode([" ".join(f"word{index}" for index in range(400))])
    # 400 words of 256 numbers: the mean square scatters by less than 1 %.
    assert text.features_BLE.square().mean().item() == pytest.approx(1.0, abs=0.03)


def test_words_do_not_collide_or_correlate():
    """A table indexed by a short hash confused up with down and zero with seven; here any two words differ."""
    words = [*"zero one two three four five six seven eight nine up down left right".split(), *map(str, range(2000))]
    encoder = HashedWordEncoder(dim=64, order_scale=0.0)
    vectors = encoder.encode([" ".join(words)]).features_BLE[0]
    cosine = torch.nn.functional.normalize(vectors) @ torch.nn.functional.normalize(vectors).T
    # Of 2e6 pairs of random directions in 64 dimensions none comes near 0.8 (6.4 standard deviations).
    assert (cosine - torch.eye(len(words))).abs().max() < 0.8


def test_order_matters_as_much_as_asked():
    texts = ["red seven", "seven red"]
    ordered = HashedWordEncoder(order_scale=0.5).encode(texts).features_BLE
    unordered = HashedWordEncoder(order_scale=0.0).encode(texts).features_BLE
    assert torch.equal(unordered[0], unordered[1].flip(0))
    assert (ordered[0] - ordered[1].flip(0)).abs().max() > 0.1


def test_long_texts_are_cut_and_the_length_says_so():
    text = " ".join(f"w{index}" for index in range(10))
    with pytest.warns(UserWarning, match="a text of 10 words is cut to its first 4"):
        cut = HashedWordEncoder(max_length=4).encode([text])
    whole = HashedWordEncoder().encode([text])
    assert cut.length_B.tolist() == [4] and whole.length_B.tolist() == [10]
    assert torch.equal(cut.features_BLE, whole.features_BLE[:, :4])


def test_saving_and_loading(tmp_path):
    encoder = HashedWordEncoder(dim=32, max_length=7, order_scale=0.25)
    encoder.save(tmp_path)
    loaded = load_text_encoder(tmp_path)
    assert loaded == encoder and loaded.fingerprint() == encoder.fingerprint()


def test_every_setting_changes_the_fingerprint():
    encoder = HashedWordEncoder()
    changes = {"dim": 32, "max_length": 5, "order_scale": 1.0}
    assert changes.keys() == {field.name for field in dataclasses.fields(encoder)}
    others = [dataclasses.replace(encoder, **{name: value}) for name, value in changes.items()]
    assert len({each.fingerprint() for each in (encoder, *others)}) == 4


def test_mistakes_are_told(tmp_path):
    with pytest.raises(UserError, match="dim=7 must be even"):
        HashedWordEncoder(dim=7)
    with pytest.raises(UserError, match="max_length=0"):
        HashedWordEncoder(max_length=0)
    write_json(tmp_path / "config.json", {"type": "t6"})
    with pytest.raises(UserError, match="unknown text encoder type 't6'; this version knows class_labels, clip"):
        load_text_encoder(tmp_path)


def test_features_are_pinned():
    """The first numbers of a word, so that a change of the hash cannot silently spoil trained models."""
    text = HashedWordEncoder(dim=4).encode(["seven"])
    torch.testing.assert_close(
        text.features_BLE[0, 0], torch.tensor([0.9089744, 0.2337853, -0.7809685, 0.3276605]), rtol=0, atol=1e-6
    )
