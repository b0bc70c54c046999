"""T5 features have their true lengths, do not depend on their company, and say what is missing."""

import functools
import json
import shutil
import warnings
import zipfile

import pytest
import torch
from safetensors.torch import load_file

from megadit.models.shared.errors import UserError
from megadit.models.text_encoders import T5TextEncoder, load_text_encoder, published
from megadit.models.text_encoders.base import on_device

from ...half_products import counted_half_products, without_half_products


@pytest.fixture(scope="module")
def directory(tmp_path_factory, write_t5):
    return write_t5(tmp_path_factory.mktemp("t5") / "t5-tiny")


@pytest.fixture
def encoder(directory):
    return T5TextEncoder(model=str(directory), dtype="float32")


def test_lengths_are_true_and_company_changes_nothing(encoder):
    together = encoder.encode(["a red seven", "", "a blue three moving left"])
    assert together.length_B.tolist() == [4, 0, 6]  # words and the end of the text
    assert together.features_BLE.shape == (3, 6, 16) and encoder.dim == 16
    assert together.features_BLE[0, 4:].abs().max() == 0 and together.features_BLE[1].abs().max() == 0
    alone = encoder.encode(["a red seven"])
    # sums over a row that is longer by masked places
    torch.testing.assert_close(alone.features_BLE[0], together.features_BLE[0, :4], rtol=1e-5, atol=1e-6)
    assert encoder.encode([""]).features_BLE.shape == (1, 1, 16)


def test_features_are_those_of_transformers(encoder, directory):
    from transformers import AutoTokenizer, T5EncoderModel

    tokens = AutoTokenizer.from_pretrained(directory)(["the robot waves"], return_tensors="pt")
    with torch.no_grad():
        expected = T5EncoderModel.from_pretrained(directory)(**tokens).last_hidden_state
    torch.testing.assert_close(encoder.encode(["the robot waves"]).features_BLE, expected)


def test_padding_with_zeros_counts(directory):
    encoder = T5TextEncoder(model=str(directory), dtype="float32", text_padding="zeros", max_length=9)
    features = encoder.encode(["a red seven", ""])
    assert features.length_B.tolist() == [9, 0] and features.features_BLE.shape == (2, 9, 16)
    assert features.features_BLE[0, 4:].abs().max() == 0


def test_long_texts_are_cut_with_a_warning(directory):
    encoder = T5TextEncoder(model=str(directory), dtype="float32", max_length=3)
    with pytest.warns(UserWarning, match="a text of 7 tokens is cut to its first 3"):
        assert encoder.encode(["a red seven moving left on"]).length_B.tolist() == [3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder.encode(["a red"])


def test_features_are_kept_on_disk(directory, tmp_path):
    first = T5TextEncoder(model=str(directory), dtype="float32", feature_cache=str(tmp_path))
    expected = first.encode(["a red seven", "a blue three"])
    again = T5TextEncoder(model=str(directory), dtype="float32", feature_cache=str(tmp_path))
    found = again.encode(["a blue three", "a red seven"])
    assert "network" not in again._loaded, "nothing was computed"
    assert torch.equal(found.features_BLE[[1, 0]], expected.features_BLE)
    for file in tmp_path.rglob("*.safetensors"):
        file.write_bytes(b"cut")
    assert torch.equal(again.encode(["a red seven"]).features_BLE, expected.features_BLE[:1, :4])
    longer = T5TextEncoder(model=str(directory), dtype="float32", feature_cache=str(tmp_path), max_length=2)
    with pytest.warns(UserWarning):
        assert longer.encode(["a red seven"]).length_B.tolist() == [2], "another encoder's features are not taken"


def test_saved_settings_name_the_model_and_need_none_of_its_files(encoder, tmp_path, directory):
    encoder.save(tmp_path / "part")
    assert sorted(file.name for file in (tmp_path / "part").iterdir()) == ["config.json"]
    loaded = load_text_encoder(tmp_path / "part")
    assert loaded.fingerprint() == encoder.fingerprint()
    assert torch.equal(loaded.encode(["a robot"]).features_BLE, encoder.encode(["a robot"]).features_BLE)
    values = json.loads((tmp_path / "part/config.json").read_text())
    (tmp_path / "part/config.json").write_text(json.dumps({**values, "model": "google-t5/t5-11b"}))
    far = load_text_encoder(tmp_path / "part")
    assert far.fingerprint() == encoder.fingerprint()
    with pytest.raises(UserError, match=r"google-t5/t5-11b is not on this machine: run `hf download google-t5/t5-11b`"):
        far.encode(["a robot"])


def test_a_published_directory_is_taken_as_it_is(directory):
    encoder = load_text_encoder(directory)
    assert isinstance(encoder, T5TextEncoder) and encoder.dim == 16


def test_fingerprints_tell_encoders_apart(encoder, directory, tmp_path, write_t5):
    padded = T5TextEncoder(model=str(directory), text_padding="zeros")
    other = T5TextEncoder(model=str(write_t5(tmp_path, words=["other"])))
    assert len({encoder.fingerprint(), padded.fingerprint(), other.fingerprint()}) == 3
    assert T5TextEncoder(model=str(directory), placement="cpu").fingerprint() == encoder.fingerprint()


def test_mistakes_are_told_in_one_line(directory, tmp_path):
    with pytest.raises(UserError, match=r"choose one of none, zeros"):
        T5TextEncoder(text_padding="zeroes")
    with pytest.raises(UserError, match="does not exist: expected a directory with config.json"):
        T5TextEncoder(model=str(tmp_path / "nothing")).encode(["a"])
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UserError, match="is a model of type 'bert', not one of t5, mt5, umt5"):
        T5TextEncoder(model=str(tmp_path)).encode(["a"])
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    with pytest.raises(UserError, match="has neither tokenizer.json nor spiece.model"):
        T5TextEncoder(model=str(tmp_path)).encode(["a"])
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="placement=8bit needs"):
            T5TextEncoder(model=str(directory), placement="8bit").encode(["a"])


def test_pickled_weights_are_read_and_no_more_than_they_seem(directory, tmp_path, encoder):
    shutil.copytree(directory, tmp_path / "pickled")
    weights = tmp_path / "pickled" / "pytorch_model.bin"
    torch.save(load_file(tmp_path / "pickled" / "model.safetensors"), weights)
    (tmp_path / "pickled" / "model.safetensors").unlink()
    new = functools.partial(T5TextEncoder, model=str(weights.parent), dtype="float32")
    assert torch.equal(new().encode(["a red"]).features_BLE, encoder.encode(["a red"]).features_BLE)
    assert new().fingerprint() == encoder.fingerprint()
    with zipfile.ZipFile(weights, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{archive.namelist()[0].partition('/')[0]}/data/999", bytes(1 << 26))
    for ask in (T5TextEncoder.fingerprint, T5TextEncoder.load_network):
        with pytest.raises(UserError, match="pytorch_model.bin is hostile: unpacked, it is larger than"):
            ask(new())
    index = {"weight_map": {"shared.weight": "../pytorch_model.bin"}}
    (weights.parent / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="leads elsewhere"):
        new().load_network()


@pytest.fixture
def asked(monkeypatch):
    """What `transformers` is asked to load with; it loads into memory whatever that is."""
    import transformers

    load, asked = transformers.T5EncoderModel.from_pretrained, {}

    def recorded(path, **options):
        asked.update(options)
        options.pop("quantization_config", None)
        return load(path, **options | {"device_map": "auto" if "device_map" in options else None})

    monkeypatch.setattr(transformers.T5EncoderModel, "from_pretrained", recorded)
    return asked


def test_offloading_gives_the_same_features(directory, encoder, asked):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    texts = ["a red seven", "the robot"]
    expected = encoder.encode(texts).features_BLE
    assert "device_map" not in asked
    found = T5TextEncoder(model=str(directory), dtype="float32", placement="offload").encode(texts).features_BLE
    assert asked["device_map"] == "auto"
    torch.testing.assert_close(found, expected)


def test_eight_bits_are_asked_of_transformers(directory, asked, monkeypatch):
    """In settings of its own; weights are quantised on a GPU alone."""
    from transformers import BitsAndBytesConfig

    from megadit.models.storage import pretrained

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(pretrained, "find_spec", lambda library: library)
    T5TextEncoder(model=str(directory), placement="8bit").encode(["a"])
    assert isinstance(asked["quantization_config"], BitsAndBytesConfig) and asked["quantization_config"].load_in_8bit
    assert asked["device_map"] == {"": torch.device("cuda")}


def test_placements_name_the_library_that_is_missing(directory, monkeypatch):
    from megadit.models.storage import pretrained

    monkeypatch.setattr(
        pretrained, "find_spec", lambda library: None if library in ("bitsandbytes", "accelerate") else library
    )
    for placement, library in (("8bit", "bitsandbytes"), ("offload", "accelerate")):
        with pytest.raises(UserError, match=rf"placement={placement} needs the library {library}: pip install"):
            T5TextEncoder(model=str(directory), placement=placement).encode(["a"])


@pytest.mark.gpu
def test_eight_bits_come_close(directory, encoder):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    found = T5TextEncoder(model=str(directory), placement="8bit").encode(["a red seven"]).features_BLE
    expected = encoder.encode(["a red seven"]).features_BLE
    assert 0 < (found - expected).norm() <= 0.05 * expected.norm()  # steps of 1/127 of each row's largest weight


def test_a_processor_without_bfloat16_computes_in_float32(directory, monkeypatch):
    """Where memory has room for that; else it is said what bfloat16 costs."""
    encoder = functools.partial(T5TextEncoder, model=str(directory), dtype="bfloat16")
    with without_half_products(), counted_half_products() as counted:
        found = encoder().encode(["a red seven"]).features_BLE
        assert not counted
        assert torch.equal(
            found, T5TextEncoder(model=str(directory), dtype="float32").encode(["a red seven"]).features_BLE
        )
        monkeypatch.setattr(published, "free_memory", lambda device: 0)
        with pytest.warns(UserWarning, match=r"does not multiply bfloat16: .* leaves no memory"):
            encoder().encode(["a red seven"])
        assert counted


def test_the_network_computes_where_the_encoder_was_sent(directory):
    """The meta device stands for a second GPU; without `to` it is the current one's, here the CPU."""
    assert T5TextEncoder(model=str(directory)).load_network().device.type == "cpu"
    sent = on_device(T5TextEncoder(model=str(directory)), torch.device("meta"))
    assert sent.load_network().device.type == "meta"
    kept = on_device(T5TextEncoder(model=str(directory), placement="cpu"), torch.device("meta"))
    assert kept.load_network().device.type == "cpu"


def test_weights_are_placed_on_the_encoders_gpu_alone(directory, asked, monkeypatch):
    """A second GPU, in name only: its memory is asked for, and no other one's."""
    from megadit.models.storage import pretrained
    from megadit.models.text_encoders import t5

    memory, seen = {"cpu": 64, "cuda": 80}, []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(pretrained, "find_spec", lambda library: library)
    monkeypatch.setattr(published, "computing_dtype", lambda device, dtype: seen.append(device) or dtype)
    monkeypatch.setattr(t5, "free_memory", lambda device: memory[device.type])
    third = torch.device("cuda:3")
    for placement, name, placed in (("offload", "max_memory", {"cpu": 64, 3: 80}), ("8bit", "device_map", {"": third})):
        on_device(T5TextEncoder(model=str(directory), placement=placement), third).load_network()
        assert asked[name] == placed
    assert seen == [third, third]
