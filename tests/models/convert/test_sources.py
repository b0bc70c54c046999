"""Checkpoints that are not what they should be are refused in one line; large ones are converted in little memory."""

import ctypes
import dataclasses
import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from megadit.models.commands.convert import main
from megadit.models.configs.config import DiTConfig
from megadit.models.convert import class_dit, cosmos, nemo
from megadit.models.convert.converted import to_theirs
from megadit.models.convert.published import open_published
from megadit.models.convert.written import write_diffusers as write_diffusers_form
from megadit.models.convert.written import write_original
from megadit.models.networks.dit import DiT
from megadit.models.shared.errors import UserError
from megadit.models.storage import components as parts
from megadit.models.storage.tensor_source import from_state_dict, open_safetensors, write_safetensors
from megadit.models.text_encoders import HashedWordEncoder, T5TextEncoder
from megadit.models.tokenizers import HaarTokenizer, load_tokenizer
from tests.memory import within_memory
from tests.stable_diffusion import random_vae

COSMOS = DiTConfig(
    family="cosmos",
    num_layers=1,
    hidden_size=32,
    num_attention_heads=2,
    in_channels=4,
    crossattn_emb_size=16,
    adaln_lora_dim=4,
    learned_positions=(4, 8, 8),
    qk_layernorm_epsilon=cosmos.QK_EPSILON,
)


def random_tensors(config):
    torch.manual_seed(0)
    return {name: torch.randn(tensor.shape) for name, tensor in DiT(config).state_dict().items()}


def write_diffusers(path, config=COSMOS, **changes):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(cosmos.config_to_diffusers(config) | changes))
    theirs = to_theirs(from_state_dict(random_tensors(config)), cosmos.diffusers_entries(config))
    write_safetensors(path / "diffusion_pytorch_model.safetensors", theirs)
    return path


def test_streamed_files_are_safetensors(tmp_path):
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.arange(4),
        "c": torch.randn(2, 2).bfloat16(),
        "d": torch.tensor(1.5),
        "e": torch.zeros(0, 3),
    }
    write_safetensors(tmp_path / "x.safetensors", from_state_dict(tensors))
    again = open_safetensors(tmp_path / "x.safetensors").state_dict()
    assert all(torch.equal(again[n], t) and again[n].dtype == t.dtype for n, t in tensors.items())
    write_safetensors(tmp_path / "y.safetensors", from_state_dict(tensors), torch.float16)
    assert open_safetensors(tmp_path / "y.safetensors").read("a").dtype == torch.float16
    assert open_safetensors(tmp_path / "y.safetensors").read("b").dtype == torch.int64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"_class_name": "FluxTransformer2DModel"},
            "holds a FluxTransformer2DModel; known are Cosmos",
        ),
        ({"controlnet_block_every_n": 7}, "only Cosmos 1.0, Predict2 and 2.5 are"),
        ({"in_channels": 6}, "in_channels=6 does not fit out_channels=4: it must be the same, or one more"),
        ({"use_time_travel": True}, "has the setting 'use_time_travel', which no Cosmos.* known to this version has"),
        ({"num_layers": 2}, r"missing: transformer_blocks.1.attn1"),
        ({"attention_head_dim": 12}, r"misshapen: .*patch_embed.proj.weight|misshapen: "),
    ],
)
def test_another_network_is_named(tmp_path, change, message):
    path = write_diffusers(tmp_path / "net", **change)
    with pytest.raises(UserError, match=message):
        open_published(path)


def test_surplus_and_missing_tensors_are_listed(tmp_path):
    path = write_diffusers(tmp_path / "net")
    tensors = open_safetensors(path / "diffusion_pytorch_model.safetensors").state_dict()
    tensors["surplus"] = tensors.pop("proj_out.weight").clone()
    save_file(tensors, path / "diffusion_pytorch_model.safetensors")
    with pytest.raises(UserError, match="missing: proj_out.weight; unexpected: surplus"):
        open_published(path)


def test_damaged_and_hostile_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_diffusers(tmp_path / "net")
    weights = path / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="is not a readable safetensors file"):
        open_published(path)
    (path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not valid JSON"):
        open_published(path)

    class Attack:
        def __reduce__(self):
            return Path("pwned").touch, ()

    (tmp_path / "hostile.pt").write_bytes(pickle.dumps({"x": Attack()}))
    with pytest.raises(UserError, match="hostile.pt cannot be read"):
        open_published(tmp_path / "hostile.pt")
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/__0_0.distcp").touch()
    (tmp_path / "dist/.metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(UserError, match=r"damaged or hostile: it names .*, which no description of tensors needs"):
        open_published(tmp_path / "dist")
    assert not (tmp_path / "pwned").exists()
    torch.save({"weight": torch.ones(2)}, tmp_path / "other.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "other.pt").read_bytes()[:-200])
    with pytest.raises(UserError, match="cut.pt cannot be read"):
        open_published(tmp_path / "cut.pt")
    with pytest.raises(UserError, match="holds tensors of another network .weight ...."):
        open_published(tmp_path / "other.pt")
    with pytest.raises(UserError, match="is no published checkpoint: expected"):
        open_published(tmp_path)


@pytest.mark.parametrize("value", ["null", "[]", "3"])
def test_settings_that_are_no_object_are_named(tmp_path, value):
    readers = {
        "model_index.json": open_published,
        "config.json": lambda folder: T5TextEncoder(model=str(folder)).dim,
    }
    for name, read in readers.items():
        (tmp_path / name).write_text(value)
        with pytest.raises(UserError, match=rf"{name} holds \w+, not a JSON object"):
            read(tmp_path)


def test_parts_that_do_not_fit_name_both_sides(tmp_path, capsys):
    path = write_diffusers(tmp_path / "net")
    HaarTokenizer(temporal_compression=1, spatial_compression=2).save(tmp_path / "haar")
    HashedWordEncoder(dim=16).save(tmp_path / "words")
    arguments = [str(path), str(tmp_path / "out"), "--tokenizer", str(tmp_path / "haar"), "--text_encoder"]
    assert main([*arguments, str(tmp_path / "words")]) == 2
    assert "model.in_channels=4 does not fit the tokenizer's latents: 12" in capsys.readouterr().err
    fitting = write_diffusers(tmp_path / "fitting", dataclasses.replace(COSMOS, in_channels=12))
    HashedWordEncoder(dim=32).save(tmp_path / "wide_words")
    arguments = [str(fitting), str(tmp_path / "out"), "--tokenizer", str(tmp_path / "haar"), "--text_encoder"]
    assert main([*arguments, str(tmp_path / "wide_words")]) == 2
    told = capsys.readouterr().err
    assert "model.crossattn_emb_size=16 does not fit the text encoder's features: 32" in told and told.count("\n") == 1
    assert main([str(path), str(tmp_path / "out")]) == 2
    assert "is a network without its tokenizer: give --tokenizer" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing"), str(tmp_path / "out")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["nvidia/Cosmos-1.0-Diffusion-7B-Text2World", str(tmp_path / "out")]) == 2
    assert "run `hf download nvidia/Cosmos-1.0-Diffusion-7B-Text2World`" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_original_class_network_comes_in(tmp_path, capsys):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    config = DiTConfig(
        family="dit",
        num_layers=2,
        hidden_size=128,
        num_attention_heads=2,
        in_channels=4,
        crossattn_emb_size=2,
        position_embedding="sincos",
        qk_layernorm=False,
        sigma_data=1.0,
        parameterization="vp",
        num_classes=10,
        learned_variance=True,
    )
    ours = random_tensors(config)
    theirs = to_theirs(from_state_dict(ours), class_dit.original_entries(config)).state_dict()
    torch.save(theirs | {"pos_embed": torch.zeros(1, 16, 128)}, tmp_path / "DiT-tiny.pt")
    diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4).save_pretrained(tmp_path / "vae")
    arguments = [str(tmp_path / "DiT-tiny.pt"), str(tmp_path / "out"), "--tokenizer", str(tmp_path / "vae")]
    assert main(arguments) == 0, capsys.readouterr().err
    found = open_published(tmp_path / "DiT-tiny.pt")
    assert found.config == config
    assert all(torch.equal(found.tensors.read(name), tensor) for name, tensor in ours.items())


@pytest.mark.parametrize("width", [32, 96, 160, 1000])
def test_a_class_network_whose_heads_nobody_knows_is_refused(width):
    shapes = {
        "x_embedder.proj.weight": (width, 4, 2, 2), "blocks.0.attn.qkv.weight": (3 * width, width),
        "final_layer.linear.weight": (32, width), "y_embedder.embedding_table.weight": (11, width),
    }  # fmt: skip
    with pytest.raises(UserError, match=f"proj.weight is {width} wide, which does not determine the number of heads"):
        class_dit.config_from_shapes(shapes)


def test_positions_that_others_would_read_as_theirs_are_not_written(tmp_path):
    tensors = from_state_dict(random_tensors(COSMOS))
    dense = dataclasses.replace(COSMOS, rope_interpolation=(1.0, 2.0, 2.0))
    for write, rest in ((write_diffusers_form, (8, {})), (write_original, ({},))):
        out = tmp_path / write.__name__
        out.mkdir()
        with pytest.raises(
            UserError, match=r"model\.rope_interpolation=\[1\.0, 2\.0, 2\.0\] is not supported by other forms"
        ):
            write(out, dense, tensors, *rest)
        assert not list(out.iterdir())
        write(out, COSMOS, tensors, *rest)


def test_a_published_autoencoder_is_a_tokenizer_where_it_lies(tmp_path):
    """By itself, or in a pipeline, whose own `tokenizer/` is of texts."""
    random_vae().save_pretrained(tmp_path / "pipeline" / "vae")
    (tmp_path / "pipeline" / "tokenizer").mkdir()
    (tmp_path / "pipeline" / "tokenizer" / "config.json").write_text("{}")
    found = [load_tokenizer(path) for path in (tmp_path / "pipeline" / "vae", tmp_path / "pipeline")]
    assert len({tokenizer.fingerprint() for tokenizer in found}) == 1
    found[0].save(tmp_path / "ours")
    assert load_tokenizer(tmp_path / "ours").fingerprint() == found[0].fingerprint()


def nemo_config(family):
    return DiTConfig(
        family=family,
        num_layers=2,
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        ffn_hidden_size=1024,
        crossattn_emb_size=32,
        position_embedding="sincos",
        adaln_lora_dim=8 if family == "dfm" else None,
        layernorm_epsilon=nemo.EPSILON,
    )


@pytest.mark.parametrize("family", ["nemo", "dfm"])
@pytest.mark.parametrize("stacked", [True, False])
def test_distributed_checkpoints_come_in(tmp_path, family, stacked):
    """As Megatron writes them: prefix, stacked layers, optimizer state beside the weights."""
    config = nemo_config(family)
    ours = random_tensors(config)
    theirs = to_theirs(from_state_dict(ours), nemo.entries(config)).state_dict()
    if family == "dfm":
        theirs["affline_norm.weight"] = torch.ones(256)
    saved = {}
    for name, tensor in theirs.items():
        if stacked and name.startswith("decoder.layers.0."):
            other = theirs[name.replace("layers.0.", "layers.1.")]
            saved["module." + name.replace("layers.0.", "layers.")] = torch.stack([tensor, other])
        elif not (stacked and name.startswith("decoder.layers.")):
            saved[f"module.{name}"] = tensor
    saved |= {f"{name}.state.exp_avg": torch.ones(7) for name in ("optimizer", "optim", "app.optimizers")}
    saved |= {"module.pos_embedder.pos_embedding.weight": torch.ones(4, 4)}
    dcp.save(saved, checkpoint_id=tmp_path / "iter_0000100", no_dist=True)
    with pytest.raises(UserError, match="did you mean .*iter_0000100"):
        open_published(tmp_path)
    found = open_published(tmp_path / "iter_0000100")
    assert found.config == config
    assert all(torch.equal(found.tensors.read(name), tensor) for name, tensor in ours.items())
    (file,) = (tmp_path / "iter_0000100").glob("*.distcp")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError, match="iter_0000100 is damaged: .* cannot be read"):
        found.tensors.state_dict()


@pytest.mark.parametrize("megabytes", [120, pytest.param(2000, marks=pytest.mark.slow)])
def test_memory_of_a_conversion(tmp_path, megabytes):
    """At most two shards of ten, and what the libraries need for themselves."""
    width = 512
    config = DiTConfig(
        family="cosmos",
        num_layers=max(1, round(megabytes * 2**20 / 4 / (16.4 * width**2))),
        hidden_size=width,
        num_attention_heads=8,
        in_channels=4,
        crossattn_emb_size=16,
        adaln_lora_dim=4,
        qk_layernorm_epsilon=cosmos.QK_EPSILON,
    )
    path = tmp_path / "net"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(cosmos.config_to_diffusers(config)))
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in DiT(config).state_dict().items()}
    ours = from_state_dict({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    expected = to_theirs(ours, cosmos.diffusers_entries(config)).shapes
    names, index = sorted(expected), {}
    for shard in range(10):
        file = f"diffusion_pytorch_model-{shard + 1:05d}-of-00010.safetensors"
        part = names[shard * len(names) // 10 : (shard + 1) * len(names) // 10]
        save_file({name: torch.rand(expected[name]) for name in part}, path / file)
        index |= dict.fromkeys(part, file)
    (path / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    size = sum(file.stat().st_size for file in path.glob("*.safetensors")) / 2**20
    assert 0.8 * megabytes < size < 1.3 * megabytes
    most = (2 * size / 10 + 48) * 2**20
    ctypes.CDLL(None).malloc_trim(0)  # what is free is held no longer
    with within_memory(limit=most):
        published = open_published(path)
        parts.save_network(tmp_path / "out", published.config, published.tensors)
    with pytest.raises(AssertionError), within_memory(limit=most):  # negative control
        [tensor.clone() for tensor in published.tensors.state_dict().values()]


def test_the_precision_is_chosen(tmp_path):
    path = write_diffusers(tmp_path / "net", dataclasses.replace(COSMOS, in_channels=12))
    HaarTokenizer(temporal_compression=1, spatial_compression=2).save(tmp_path / "haar")
    HashedWordEncoder(dim=16).save(tmp_path / "words")
    parts = ["--tokenizer", str(tmp_path / "haar"), "--text_encoder", str(tmp_path / "words")]
    for name, more, dtype in (("kept", [], torch.float32), ("halved", ["--dtype", "bfloat16"], torch.bfloat16)):
        assert main([str(path), str(tmp_path / name), *parts, *more]) == 0
        tensors = load_file(tmp_path / name / "transformer/model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {dtype}
