"""Names of published models lead into the hub's cache, as its own library lays it out; nothing is downloaded."""

import shutil

import pytest
import torch

from megadit.models.commands import convert as cli
from megadit.models.shared.errors import UserError
from megadit.models.storage import hub
from megadit.models.text_encoders import T5TextEncoder
from megadit.models.tokenizers import load_tokenizer, published_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Puts a directory into an empty cache of the hub, under a name: blobs, and links to them in a snapshot."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(directory, name):
        place = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        for file in directory.rglob("*"):
            if file.is_file():
                blob = place / "blobs" / f"{abs(hash(file.relative_to(directory)))}"
                link = place / "snapshots" / COMMIT / file.relative_to(directory)
                blob.parent.mkdir(parents=True, exist_ok=True)
                link.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, blob)
                link.symlink_to(blob)
        (place / "refs").mkdir()
        (place / "refs/main").write_text(COMMIT)
        return place / "snapshots" / COMMIT

    return put


def test_a_name_is_its_newest_snapshot(cached, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    place = cached(tmp_path / "model", "somebody/tiny")
    assert hub.local_directory("somebody/tiny", "checkpoint", "config.json") == place
    with pytest.raises(UserError, match="the checkpoint somebody/other is not on this machine: run `hf download"):
        hub.local_directory("somebody/other", "checkpoint", "config.json")


@pytest.mark.parametrize(("offline", "told"), [("1", True), ("0", False)])
def test_offline_machines_are_told_to_download_elsewhere(cached, monkeypatch, offline, told):
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    with pytest.raises(UserError, match="or put config.json into a directory and give that") as error:
        hub.local_directory("nobody/nothing", "checkpoint", "config.json")
    assert ("HF_HUB_OFFLINE is set here" in str(error.value)) == told


def test_a_t5_is_loaded_by_name(cached, tmp_path, write_t5):
    cached(write_t5(tmp_path / "t5"), "google-t5/t5-tiny")
    by_name = T5TextEncoder(model="google-t5/t5-tiny", dtype="float32")
    by_path = T5TextEncoder(model=str(tmp_path / "t5"), dtype="float32")
    assert torch.equal(by_name.encode(["a red seven"]).features_BLE, by_path.encode(["a red seven"]).features_BLE)
    assert by_name.fingerprint() == by_path.fingerprint()


def test_a_tokenizer_is_loaded_and_converted_by_name(cached, tmp_path, make_cosmos_autoencoder, capsys):
    make_cosmos_autoencoder(4).save_pretrained(tmp_path / "pipeline/vae")
    cached(tmp_path / "pipeline/vae", "nvidia/Cosmos-Tokenizer-CV4x8x8")
    cached(tmp_path / "pipeline", "nvidia/Cosmos-Tiny")
    expected = published_tokenizer(tmp_path / "pipeline/vae").fingerprint()
    for name in ("nvidia/Cosmos-Tokenizer-CV4x8x8", "nvidia/Cosmos-Tiny"):
        assert published_tokenizer(name).fingerprint() == expected
    for _ in range(2):  # what it wrote itself it replaces
        assert cli.main(["nvidia/Cosmos-Tokenizer-CV4x8x8", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    assert load_tokenizer(tmp_path / "out").fingerprint() == expected
    weights = tmp_path / "pipeline/vae/diffusion_pytorch_model.safetensors"  # beside a config.json of somebody else
    assert cli.main(["nvidia/Cosmos-Tokenizer-CV4x8x8", str(weights.parent)]) == 2
    assert "holds something else, and would be replaced" in capsys.readouterr().err and weights.is_file()
