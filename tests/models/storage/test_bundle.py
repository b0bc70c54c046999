import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from megadit.models.bundle import FORMAT_VERSION, Bundle
from megadit.models.bundle_writer import write_bundle
from megadit.models.configs.config import DiTConfig
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.dit import DiT
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json, write_json
from megadit.models.storage.components import load_network, network_shapes, save_network
from megadit.models.text_encoders import HashedWordEncoder
from megadit.models.tokenizers import HaarTokenizer

TOKENIZER = HaarTokenizer(temporal_compression=2, spatial_compression=2)
TEXT_ENCODER = HashedWordEncoder(dim=16)
CONFIG = DiTConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=2,
    in_channels=24,
    patch_spatial=2,
    crossattn_emb_size=16,
    sigma_data=0.5,
)
DEFAULTS = SamplingSettings(num_steps=4, guidance=3.0, num_frames=3, height=8, width=8, fps=8.0)
TRAINING = {"recipe": "digits", "step": 300, "ema": 0.05, "consumed_samples": 9600}


@pytest.fixture(scope="module")
def state_dict():
    """Every tensor random, those that start at zero included."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in network_shapes(CONFIG).items()}


@pytest.fixture
def bundle_path(tmp_path, state_dict):
    write(tmp_path / "bundle", state_dict)
    return tmp_path / "bundle"


def write(out, state_dict, **changes):
    parts = {"config": CONFIG, "tokenizer": TOKENIZER, "text_encoder": TEXT_ENCODER, "defaults": DEFAULTS}
    write_bundle(out, state_dict=state_dict, **(parts | {"training": TRAINING} | changes))


def predict(dit):
    text = TEXT_ENCODER.encode(["a red seven", ""])
    conditioning = Conditioning(text.features_BLE, text.length_B, torch.tensor([8.0, 0.0]))
    x = torch.randn(2, 24, 2, 4, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return dit(x.to(dit.dtype), torch.tensor([0.1, -0.3]), conditioning)


def test_saving_and_loading_gives_the_same_network(tmp_path, state_dict):
    save_network(tmp_path, CONFIG, state_dict)
    loaded = load_network(tmp_path)
    assert loaded.config == CONFIG and not loaded.training
    assert all(torch.equal(tensor, state_dict[name]) for name, tensor in loaded.state_dict().items())
    built = DiT(CONFIG)
    built.load_state_dict(state_dict)
    assert torch.equal(predict(loaded), predict(built))


def test_precision_is_chosen_when_saving_or_loading(tmp_path, state_dict):
    save_network(tmp_path, CONFIG, state_dict, dtype=torch.bfloat16)
    assert load_network(tmp_path).dtype == torch.bfloat16
    assert {tensor.dtype for tensor in load_network(tmp_path, dtype=torch.float32).state_dict().values()} == {
        torch.float32
    }


def test_views_of_one_buffer_can_be_saved(tmp_path, state_dict):
    """As Megatron keeps parameters: slices of one flat tensor."""
    flat = torch.cat([tensor.flatten() for tensor in state_dict.values()])
    slices = flat.split([tensor.numel() for tensor in state_dict.values()])
    save_network(tmp_path, CONFIG, {n: part.view_as(state_dict[n]) for n, part in zip(state_dict, slices, strict=True)})
    assert all(torch.equal(tensor, state_dict[name]) for name, tensor in load_network(tmp_path).state_dict().items())


def test_tensors_that_do_not_fit_are_listed(tmp_path, state_dict):
    save_network(tmp_path, CONFIG, state_dict)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["null_text"]
    tensors["surplus"] = torch.zeros(1)
    name = "x_embedder.weight"
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError) as error:
        load_network(tmp_path)
    told = str(error.value)
    assert "missing: null_text" in told and "unexpected: surplus" in told and "misshapen: x_embedder.weight [" in told


def test_wrong_tensors_are_refused_before_anything_is_written(tmp_path, state_dict):
    config = dataclasses.replace(CONFIG, num_layers=3)
    with pytest.raises(UserError, match=r"missing: blocks.*and \d+ more"):
        save_network(tmp_path / "out", config, state_dict)
    assert not (tmp_path / "out").exists()


def test_loading_tells_what_is_missing(tmp_path, state_dict):
    with pytest.raises(UserError, match="config.json does not exist"):
        load_network(tmp_path)
    save_network(tmp_path, CONFIG, state_dict)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="model.safetensors does not exist"):
        load_network(tmp_path)


def test_bundle_gives_back_its_parts(bundle_path, state_dict):
    bundle = Bundle.open(bundle_path, verify=True)
    assert bundle.defaults == DEFAULTS and bundle.config == CONFIG
    assert bundle.manifest["training"] == TRAINING
    assert bundle.manifest["components"] == {"transformer": "dit", "tokenizer": "haar", "text_encoder": "hashed_words"}
    assert bundle.load_tokenizer().fingerprint() == TOKENIZER.fingerprint()
    assert bundle.load_text_encoder() == TEXT_ENCODER
    assert all(torch.equal(t, state_dict[name]) for name, t in bundle.load_dit().state_dict().items())


def test_bundle_lists_every_file(bundle_path):
    on_disk = {path.relative_to(bundle_path).as_posix() for path in bundle_path.rglob("*") if path.is_file()}
    assert on_disk == {"megadit.json", *read_json(bundle_path / "megadit.json")["files"]}
    assert list(bundle_path.parent.iterdir()) == [bundle_path]


def test_a_changed_file_is_named(bundle_path):
    """A flipped bit keeps the size, and only the checksum can tell."""
    file = bundle_path / "transformer" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    Bundle.open(bundle_path)
    with pytest.raises(UserError, match="transformer/model.safetensors differs from its checksum"):
        Bundle.open(bundle_path, verify=True)


def test_a_cut_or_missing_file_is_named_without_being_asked(bundle_path):
    file = bundle_path / "transformer" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(UserError, match="model.safetensors has .* bytes instead of"):
        Bundle.open(bundle_path)
    file.unlink()
    with pytest.raises(UserError, match="model.safetensors is missing"):
        Bundle.open(bundle_path)


def test_what_is_no_bundle_is_refused(tmp_path, bundle_path):
    with pytest.raises(UserError, match="is not a bundle: expected a directory with megadit.json, transformer/"):
        Bundle.open(tmp_path / "nowhere")
    dataset = tmp_path / "dataset"
    dataset.mkdir()
    (dataset / "megadit.json").write_text("{}")
    with pytest.raises(UserError, match="is not a bundle"):
        Bundle.open(dataset)
    manifest = read_json(bundle_path / "megadit.json")
    write_json(bundle_path / "megadit.json", manifest | {"format_version": FORMAT_VERSION + 1})
    with pytest.raises(UserError, match=f"format version {FORMAT_VERSION + 1}.*upgrade megadit"):
        Bundle.open(bundle_path)


def test_writing_replaces_a_bundle_but_nothing_else(bundle_path, tmp_path, state_dict):
    write(bundle_path, state_dict, training={"step": 2})
    assert Bundle.open(bundle_path, verify=True).manifest["training"] == {"step": 2}
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").touch()
    with pytest.raises(UserError, match="thesis holds files that are not a bundle"):
        write(tmp_path / "thesis", state_dict)
    assert (tmp_path / "thesis" / "chapter1.tex").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": dataclasses.replace(CONFIG, in_channels=16)}, "in_channels=16 does not fit .* 24"),
        ({"config": dataclasses.replace(CONFIG, sigma_data=1.0)}, "sigma_data=1.0 does not fit .* 0.5"),
        ({"text_encoder": HashedWordEncoder(dim=18)}, "crossattn_emb_size=16 does not fit .* 18"),
        ({"defaults": dataclasses.replace(DEFAULTS, height=9)}, "height 9 .* 8 or 10"),
        ({"defaults": dataclasses.replace(DEFAULTS, width=6)}, "width 3 is not a multiple of the patch size 2"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path, state_dict, changes, message):
    with pytest.raises(UserError, match=message):
        write(tmp_path / "bundle", state_dict, **changes)
    assert list(tmp_path.iterdir()) == []


def test_defaults_are_read_strictly():
    values = DEFAULTS.to_dict()
    assert SamplingSettings.from_dict(json.loads(json.dumps(values))) == DEFAULTS
    with pytest.raises(UserError, match="'guidence' is unknown; did you mean 'guidance'"):
        SamplingSettings.from_dict(values | {"guidence": 1.0})
    with pytest.raises(UserError, match="lack num_steps"):
        SamplingSettings.from_dict({name: value for name, value in values.items() if name != "num_steps"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_steps": 0}, "num_steps=0 must be greater than 0"),
        ({"guidance": -1.0}, "guidance=-1 must not be negative"),
        ({"guidance": math.inf}, "guidance=inf must be a finite number"),
        ({"sigma_min": 90.0}, "sigma_min=90.0 must be smaller than sigma_max=80.0"),
        ({"rho": float("nan")}, "rho=nan must be a finite number"),
    ],
)
def test_defaults_out_of_range_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(DEFAULTS, **change)
