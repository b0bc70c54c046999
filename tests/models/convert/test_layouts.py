"""Networks in the layouts that people have: the same tensors are read, or one line names what is wrong.

The plain layout of each network is compared with diffusers' outputs in `test_wan.py`, `test_parity.py` and here (DiT).
"""

import argparse
import json
import random
import shutil
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from safetensors.torch import load_file, save_file

from megadit.models.configs.config import DiTConfig
from megadit.models.convert import class_dit, wan
from megadit.models.convert.converted import to_theirs
from megadit.models.convert.published import open_published
from megadit.models.networks.dit import DiT
from megadit.models.shared.errors import UserError
from megadit.models.storage.tensor_source import from_state_dict, write_safetensors

WAN = DiTConfig(
    family="wan",
    parameterization="flow",
    sigma_data=1.0,
    num_layers=2,
    hidden_size=128,
    num_attention_heads=1,
    ffn_hidden_size=32,
    in_channels=4,
    patch_spatial=2,
    crossattn_emb_size=8,
    layernorm_epsilon=1e-6,
)
FILE = "diffusion_pytorch_model"
Q = "blocks.1.attn1.to_q.weight"


def random_tensors(config):
    torch.manual_seed(0)
    return {name: torch.randn(tensor.shape) for name, tensor in DiT(config).state_dict().items()}


OURS = random_tensors(WAN)
THEIRS = to_theirs(from_state_dict(OURS), wan.diffusers_entries(WAN)).state_dict()
RELEASED = to_theirs(from_state_dict(OURS), wan.released_entries(WAN)).state_dict()


def save(tensors, path):
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


def prefixed(prefix, tensors):
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def folder(path, tensors, *, file=f"{FILE}.safetensors", write=save, **settings):
    path.mkdir(parents=True, exist_ok=True)
    values = {} if settings.get("_class_name") == "WanModel" else wan.config_to_diffusers(WAN)
    (path / "config.json").write_text(json.dumps(values | settings))
    write(tensors, path / file)
    return path


def one(path, tensors, name="model.safetensors"):
    path.mkdir(parents=True, exist_ok=True)
    (save if name.endswith("safetensors") else torch.save)(tensors, path / name)
    return path / name


def sharded(path, *, name, index, write):
    folder(path, {}, file=f"{FILE}.none", write=lambda tensors, file: None)
    names, places = sorted(THEIRS), {}
    for number, part in enumerate((names[::2], names[1::2])):
        write({key: THEIRS[key] for key in part}, path / name.format(number + 1))
        places |= dict.fromkeys(part, name.format(number + 1))
    (path / index).write_text(json.dumps({"weight_map": places}))
    return path


def moved_index(path):
    index = sharded(path, name="{}.safetensors", index=f"{FILE}.safetensors.index.json", write=save) / (
        f"{FILE}.safetensors.index.json"
    )
    index.write_text(index.read_text().replace(': "', ': "/data/of/others/'))
    return path


def wrapped_inside(tensors):
    return {name.replace("blocks.", "blocks.").replace(".attn1.", "._checkpoint_wrapped_module.attn1."): tensor
            for name, tensor in tensors.items()}  # fmt: skip


AVERAGED = {name: tensor + 1 for name, tensor in RELEASED.items()}
"""Of which `OURS` is the average."""
READ = {
    "diffusers": lambda path: folder(path, THEIRS),
    "diffusers, pickled": lambda path: folder(path, THEIRS, file=f"{FILE}.bin", write=torch.save),
    "diffusers, variant": lambda path: folder(path, THEIRS, file=f"{FILE}.fp16.safetensors"),
    "diffusers, non_ema alone": lambda path: folder(path, THEIRS, file=f"{FILE}.non_ema.safetensors"),
    "diffusers, pickled variant": lambda path: folder(path, THEIRS, file=f"{FILE}.bf16.bin", write=torch.save),
    "diffusers, shards": lambda path: sharded(
        path, name=FILE + "-0000{}-of-00002.safetensors", index=f"{FILE}.safetensors.index.json", write=save
    ),
    "diffusers, shards of a variant": lambda path: sharded(
        path, name=FILE + ".fp16-0000{}-of-00002.safetensors", index=f"{FILE}.safetensors.index.fp16.json", write=save
    ),
    "diffusers, pickled shards": lambda path: sharded(
        path, name=FILE + "-0000{}-of-00002.bin", index=f"{FILE}.bin.index.json", write=torch.save
    ),
    "diffusers, shards that an index names elsewhere": moved_index,
    "diffusers, with a newer setting that is off": lambda path: folder(path, THEIRS, added_later=None),
    "diffusers, compiled": lambda path: folder(path, prefixed("_orig_mod.", THEIRS)),
    "diffusers, DDP": lambda path: folder(path, prefixed("module.", THEIRS)),
    "diffusers, EMAModel": lambda path: folder(path, THEIRS, decay=0.999, optimization_step=7, power=0.6),
    "released folder": lambda path: folder(path, RELEASED, _class_name="WanModel"),
    "released folder, variant": lambda path: folder(
        path, RELEASED, _class_name="WanModel", file=f"{FILE}.bf16.safetensors"
    ),
    **{
        f"one file, {prefix or 'no prefix'}": lambda path, prefix=prefix: one(path, prefixed(prefix, RELEASED))
        for prefix in ("", "model.diffusion_model.", "diffusion_model.", "_orig_mod.", "module.", "model.", "net.",
                       "dit.", "transformer.", "module._orig_mod.", "_fsdp_wrapped_module.", "model._orig_mod.",
                       "pipe.dit.")
    },
    "activation checkpoints": lambda path: one(path, wrapped_inside(RELEASED) | {
        name: tensor for name, tensor in RELEASED.items() if ".attn1." not in name
    }),
    "a whole checkpoint of ComfyUI": lambda path: one(path, prefixed("model.diffusion_model.", RELEASED) | {
        "first_stage_model.conv1.weight": torch.ones(2), "text_encoders.umt5xxl.logit_scale": torch.ones(())
    }),
    **{
        f"torch.save, {key}": lambda path, key=key: one(path, {key: RELEASED, "step": 3}, "model.pt")
        for key in ("state_dict", "model", "module", "generator", "ema", "generator_ema", "ema_model", "model_ema",
                    "net")
    },
    "torch.save, bare": lambda path: one(path, RELEASED, "model.pth"),
    "DMD": lambda path: one(path, {"generator": AVERAGED, "generator_ema": RELEASED}, "model.pt"),
    "DMD, FSDP": lambda path: one(
        path, {"generator_ema": prefixed("model._fsdp_wrapped_module.", RELEASED)}, "model.pt"
    ),
    "of DiT's training": lambda path: one(path, {"model": AVERAGED, "ema": RELEASED, "opt": {"state": {}}}, "model.pt"),
    "with the options of a command": lambda path: one(
        path, {"ema": RELEASED, "args": argparse.Namespace(lr=1e-4)}, "model.pt"
    ),
    "a network and its average": lambda path: one(
        path, prefixed("net.", AVERAGED) | prefixed("net_ema.", RELEASED), "model.pt"
    ),
    "safetensors by the name of torch.save": lambda path: one(path, RELEASED).rename(path / "model.ckpt"),
    "Lightning": lambda path: one(path, {"state_dict": prefixed("model.", RELEASED), "epoch": 1}, "model.ckpt"),
}  # fmt: skip


@pytest.mark.parametrize("layout", READ)
def test_layouts_with_the_same_tensors_are_read(layout, tmp_path):
    published = open_published(READ[layout](tmp_path / "theirs"))
    assert published.config == WAN
    assert all(torch.equal(published.tensors.read(name), tensor) for name, tensor in OURS.items())


def pickled(name, change):
    return lambda path: folder(path, THEIRS | {name: change(THEIRS[name])}, file=f"{FILE}.bin", write=torch.save)


def in_two_shards(path, ending="safetensors", write=save, read=load_file):
    sharded(path, name=f"{FILE}-0000{{}}-of-00002.{ending}", index=f"{FILE}.{ending}.index.json", write=write)
    for number in (1, 2):
        file = path / f"{FILE}-0000{number}-of-00002.{ending}"
        write(read(file) | {Q: THEIRS[Q] + number}, file)
    return path


def write_bytes(content, path):
    path.write_bytes(content)


def without(name, tensors):
    return {key: tensor for key, tensor in tensors.items() if key != name}


REFUSED = {
    "a missing tensor": (lambda path: folder(path, without(Q, THEIRS)), rf"missing: {Q}"),
    "a missing tensor behind a prefix": (
        lambda path: one(path, prefixed("module.", without("blocks.1.ffn.2.bias", RELEASED))),
        "missing: blocks.1.ffn.2.bias",
    ),
    "one too many": (lambda path: folder(path, THEIRS | {"more": torch.ones(2)}), "unexpected: more"),
    "another shape": (lambda path: folder(path, THEIRS | {Q: torch.ones(3)}), rf"misshapen: {Q} \[3\], not \[128, 1"),
    "two variants": (
        lambda path: folder(
            folder(path, THEIRS, file=f"{FILE}.fp16.safetensors"), THEIRS, file=f"{FILE}.ema.safetensors"
        ),
        "has several variants of its weights",
    ),
    "another name": (lambda path: folder(path, THEIRS, file="wan.safetensors"), "give a file of another name by"),
    "quantised": (
        lambda path: folder(path, THEIRS, quantization_config={"quant_method": "bitsandbytes"}), "is quantised",
    ),
    "of blocks of eight bits": (
        lambda path: folder(path, THEIRS | {Q.replace("weight", "weight_scale"): torch.ones(2, 2)}),
        "in blocks, which is not supported",
    ),
    "of another type": (lambda path: folder(path, THEIRS, num_layers=2.0), r"num_layers=2\.0 has another type"),
    "a text for a number": (lambda path: folder(path, THEIRS, eps="1e-6"), "eps='1e-6' is not a valid setting"),
    "a text for numbers": (lambda path: folder(path, THEIRS, patch_size="122"), "patch_size='122' is not a valid"),
    "whole numbers": (lambda path: folder(path, THEIRS | {Q: THEIRS[Q].to(torch.int8)}), f"{Q} holds torch.int8"),
    "yes and no": (lambda path: folder(path, THEIRS | {Q: THEIRS[Q] > 0}), f"{Q} holds torch.bool"),
    "complex numbers": (pickled(Q, lambda tensor: tensor.to(torch.complex64)), f"{Q} holds torch.complex64"),
    "sparse": (pickled(Q, torch.Tensor.to_sparse), f"{Q} is a sparse or quantised tensor, or without values"),
    "without values": (pickled(Q, lambda tensor: tensor.to("meta")), f"{Q} is a sparse .* without values"),
    "in two shards": (in_two_shards, f"both .*00001-of.* and .*00002-of.* hold the tensor {Q}"),
    "in two pickled shards": (
        lambda path: in_two_shards(path, "bin", torch.save, torch.load), f"00002-of.* holds the tensor {Q}, as does",
    ),
    "numbers for names": (lambda path: one(path, dict(enumerate(RELEASED.values())), "a.pt"), "no named tensors.*: 0"),
    "a newer setting": (lambda path: folder(path, THEIRS, added_later=1), "has the setting 'added_later'"),
    "a list of classes": (lambda path: folder(path, THEIRS, _class_name=["A"]), "holds a .'A'.; known are"),
    "names of diffusers alone": (lambda path: one(path, THEIRS), "by their folder, with its config.json"),
    "pointer of Git LFS": (
        lambda path: folder(path, b"version https://git-lfs.github.com/spec/v1\n", write=write_bytes), "git lfs pull",
    ),
    "web page": (
        lambda path: folder(path, b"<!DOCTYPE html>", file=f"{FILE}.bin", write=write_bytes), "is a web page",
    ),
    "several networks": (
        lambda path: one(path, prefixed("student.", RELEASED) | prefixed("teacher.", AVERAGED)),
        r"holds several networks, student\., teacher\.",
    ),
    "no names": (lambda path: one(path, {"shadow_params": list(RELEASED.values())}, "ema.pt"), "without names"),
    "no names that fit": (
        lambda path: one(path, {"model": RELEASED, "ema": {"shadow_params": [*RELEASED.values()][1:]}}, "ema.pt"),
        "holds EMA weights without names, .* that do not fit its",
    ),
    "flattened by FSDP": (
        lambda path: one(path, {"model": {"_fsdp_wrapped_module._flat_param": torch.ones(9)}}, "model.pt"),
        "holds flattened parameters of FSDP",
    ),
    "of ZeRO-3": (
        lambda path: one(path, {"module": dict.fromkeys(RELEASED, torch.ones(0))}, "model.pt"), "as of ZeRO-3",
    ),
    "GGUF": (lambda path: folder(path, b"GGUF\3\0\0\0", write=write_bytes), "is a quantised GGUF file"),
    "shards elsewhere": (
        lambda path: sharded(path, name="../shard-{}.safetensors", index=f"{FILE}.safetensors.index.json", write=save),
        "leads elsewhere",
    ),
    "nothing": (lambda path: one(path, {"step": 3}, "ema.pt"), "holds no named tensors, only: step"),
}  # fmt: skip


@pytest.mark.parametrize("layout", REFUSED)
def test_what_is_wrong_with_a_layout_is_said(layout, tmp_path):
    write, message = REFUSED[layout]
    with pytest.raises(UserError, match=message) as error:
        open_published(write(tmp_path / "theirs"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("latest", ["global_step9", "global_step10", "../elsewhere", "", None])
def test_a_folder_of_deepspeed_names_the_file_of_its_last_step(latest, tmp_path):
    for step in ("global_step10", "global_step9"):
        one(tmp_path / step, {"module": RELEASED}, "mp_rank_00_model_states.pt")
    if latest is not None:
        (tmp_path / "latest").write_text(latest)
    expected = tmp_path / (latest if latest in ("global_step9", "global_step10") else "global_step9")
    with pytest.raises(UserError, match="is no published checkpoint.*; did you mean ") as error:
        open_published(tmp_path)
    file = str(error.value).partition("did you mean ")[2].removesuffix("?")
    assert file == str(expected / "mp_rank_00_model_states.pt") and open_published(Path(file)).config == WAN
    with pytest.raises(UserError, match="did you mean .*mp_rank_00_model_states.pt"):
        open_published(expected)


@pytest.mark.parametrize("low", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_parts_of_several_dtypes_keep_their_numbers(part, low, tmp_path):
    """Three of their matrices are one of ours."""
    name = f"blocks.0.self_attn.{part}.weight"
    tensors = RELEASED | {name: RELEASED[name].to(low)}
    found = open_published(one(tmp_path / "theirs", tensors)).tensors
    meant = open_published(one(tmp_path / "meant", tensors | {name: tensors[name].float()})).tensors
    write_safetensors(tmp_path / "ours.safetensors", found)
    written = load_file(tmp_path / "ours.safetensors")
    assert all(torch.equal(written[ours], meant.read(ours)) for ours in OURS)


@pytest.mark.parametrize(("value", "dtype"), [
    (float("nan"), None), (float("inf"), None), (1e5, torch.float16), (-1e39, torch.float32),
])  # fmt: skip
def test_numbers_that_do_not_fit_are_not_written(value, dtype, tmp_path):
    tensors = {"weight": torch.tensor([0.0, value], dtype=torch.float64)}
    with pytest.raises(UserError, match="weight has numbers that .* cannot hold, or is damaged"):
        write_safetensors(tmp_path / "ours.safetensors", from_state_dict(tensors), dtype)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ending", ["scale_weight", "weight_scale"])
@pytest.mark.parametrize("shape", [(), (1,), "rows", "column"])
def test_eight_bits_with_scales_are_the_numbers_they_stand_for(ending, shape, tmp_path):
    stored, meant = {"scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)}, {}
    for name, tensor in RELEASED.items():
        is_matrix = tensor.ndim == 2 and name.startswith("blocks.")
        scale = 0.01 + torch.rand({"rows": (len(tensor),), "column": (len(tensor), 1)}.get(shape, shape))
        by_rows = scale.reshape(-1, 1) if scale.numel() > 1 else scale
        low = (tensor / by_rows).to(torch.float8_e4m3fn) if is_matrix else tensor
        stored[name], meant[name] = low, low.float() * by_rows if is_matrix else tensor
        if is_matrix:
            stored[name.replace("weight", ending)] = scale
            stored[name.replace("weight", "scale_input")] = torch.ones(())
    save(meant, tmp_path / "meant.safetensors")
    save(prefixed("model.diffusion_model.", stored), tmp_path / "theirs.safetensors")
    found, expected = (open_published(tmp_path / f"{name}.safetensors").tensors for name in ("theirs", "meant"))
    assert all(torch.equal(found.read(name), expected.read(name)) for name in OURS)


@hypothesis.settings(max_examples=40, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(
    seed=st.integers(0, 10**6),
    how=st.sampled_from(["drop", "rename", "shape", "half", "prefix", "all"]),
    form=st.sampled_from(["diffusers", "released", "file"]),
)
def test_random_damage_is_named_or_changes_nothing(seed, how, form, tmp_path_factory):
    tensors = THEIRS if form == "diffusers" else RELEASED
    name = random.Random(seed).choice(sorted(tensors))
    changed = {
        "drop": without(name, tensors), "half": tensors | {name: tensors[name].half()},
        "shape": tensors | {name: tensors[name].flatten()[None, None, None]}, "all": prefixed(f"p{seed}.", tensors),
        "rename": {key + "x" * (key == name): value for key, value in tensors.items()},
        "prefix": {f"p{seed}." * (key == name) + key: value for key, value in tensors.items()},
    }[how]  # fmt: skip
    path = tmp_path_factory.mktemp("damage") / "theirs"
    settings = {"released": {"_class_name": "WanModel"}}.get(form, {})
    place = one(path, changed) if form == "file" else folder(path, changed, **settings)
    try:
        found = open_published(place)
    except UserError as error:
        assert (name in str(error) or name.split(".")[-2] in str(error)) and "\n" not in str(error)
    else:
        assert found.config == WAN
        for ours, tensor in OURS.items():
            torch.testing.assert_close(found.tensors.read(ours).float(), tensor, rtol=1e-3, atol=1e-3)


LEGACY = {
    "_class_name": "Transformer2DModel", "_diffusers_version": "0.12.0.dev0", "activation_fn": "gelu-approximate",
    "attention_bias": True, "attention_head_dim": 16, "cross_attention_dim": None, "double_self_attention": False,
    "dropout": 0.0, "in_channels": 4, "norm_elementwise_affine": False, "norm_num_groups": 32,
    "norm_type": "ada_norm_zero", "num_attention_heads": 2, "num_embeds_ada_norm": 10, "num_layers": 2,
    "num_vector_embeds": None, "only_cross_attention": False, "out_channels": 8, "patch_size": 2, "sample_size": 8,
    "upcast_attention": False, "use_linear_projection": False,
}  # fmt: skip
"""As facebook/DiT-XL-2-256 says it, in other sizes."""


@pytest.fixture(scope="module")
def legacy(tmp_path_factory):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    path = tmp_path_factory.mktemp("DiT") / "transformer"
    torch.manual_seed(0)
    network = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
        num_embeds_ada_norm=10,
    )  # fmt: skip
    for name, parameter in network.named_parameters():
        torch.nn.init.normal_(parameter, std=0.1)
        if ".norm1.emb." in name and not name.startswith("transformer_blocks.0."):  # published with equal copies
            parameter.data = dict(network.named_parameters())[f"transformer_blocks.0.{name.split('.', 2)[2]}"].data
    network.save_pretrained(path, safe_serialization=False)
    (path / "config.json").write_text(json.dumps(LEGACY))
    return path


def test_the_dit_as_facebook_published_it(legacy, without_torchvision):
    """A class of another name, settings of old, pickled weights: diffusers reads the same network."""
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    theirs = diffusers.DiTTransformer2DModel.from_pretrained(legacy, use_safetensors=False)
    assert theirs.config.norm_eps == 1e-5, "what the file leaves out"
    published = open_published(legacy)
    expected = to_theirs(published.tensors, class_dit.diffusers_entries(published.config)).state_dict()
    state = theirs.state_dict()
    assert published.config.mlp_layernorm_epsilon == 1e-5 and published.sample_size == 8
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_type": "ada_norm_single"}, "norm_type='ada_norm_single'; of that class only DiT is read"),
        ({"cross_attention_dim": 8}, "cross_attention_dim=8"),
        ({"num_vector_embeds": 3}, "num_vector_embeds=3"),
        ({"use_linear_projection": True}, "use_linear_projection=True"),
        ({"news": 1}, "has the setting 'news'"),
    ],
)
def test_other_networks_of_that_class_are_named(change, message, legacy, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LEGACY | change))
    (tmp_path / f"{FILE}.bin").write_bytes((legacy / f"{FILE}.bin").read_bytes())
    with pytest.raises(UserError, match=message):
        open_published(tmp_path)


@pytest.mark.parametrize("content", [b"", b"hello", b"\0\0\0\x18ftypisom"])
def test_a_file_that_holds_no_weights_says_so(content, tmp_path):
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(UserError, match=r"model.pt is no file of weights, of safetensors or torch.save"):
        open_published(tmp_path / "model.pt")


@pytest.mark.parametrize("form", ["tar", "gztar", "zip"])
def test_an_archive_of_weights_is_to_be_unpacked(form, tmp_path):
    """As NeMo's first .nemo files are; their names may lead anywhere."""
    one(tmp_path / "in", RELEASED)
    made = Path(shutil.make_archive(tmp_path / "made", form, tmp_path / "in"))
    with pytest.raises(UserError, match="model.nemo is an archive, no file of torch.save: unpack it"):
        open_published(made.rename(tmp_path / "model.nemo"))


@pytest.mark.parametrize("name", ["a" * 300, "b/" * 3000, "../x", "/etc/passwd", "", "\0"])
def test_an_index_of_impossible_names_is_refused(name, tmp_path):
    path = folder(tmp_path / "theirs", {}, file="nothing", write=lambda tensors, file: None)
    (path / f"{FILE}.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match="is not the name of a file in .*: it leads elsewhere"):
        open_published(path)


ZEROS = {name: torch.zeros_like(tensor) for name, tensor in RELEASED.items()}
TRAINERS = {
    "one of any name": {"dit": RELEASED, "optimizer_state_dict": {"state": {0: {"exp_avg": torch.ones(2)}}}, "step": 3},
    "averages": {"params": ZEROS, "params_ema": RELEASED},
    "averages of a model": {
        "model_state_dict": ZEROS,
        "model_ema_state_dict": RELEASED,
        "config": {"net": {"width": 8}},
    },
    **{
        f"averages, {key} beside {other}": {other: ZEROS, key: RELEASED}
        for other, key in (("state_dict", "state_dict_ema"), ("model", "ema_params"), ("net", "net_ema"))
    },
    "AveragedModel of torch": {"n_averaged": torch.tensor(3), **prefixed("module.", RELEASED)},
    "ema-pytorch": {
        "initted": torch.tensor(True),
        "step": torch.tensor(9),
        **prefixed("online_model.", ZEROS),
        **prefixed("ema_model.", RELEASED),
    },
    **{
        f"averages {prefix} beside names without a prefix": prefixed(prefix, RELEASED) | ZEROS
        for prefix in ("ema.", "model_ema.", "ema_module.module.")
    },
    **{f"averages, {key}": {"model": ZEROS, key: RELEASED} for key in ("swa_model", "polyak", "avg_model")},
    "averages that are Adam's": {"model": RELEASED, "exp_avg": ZEROS},
    "deeper": {"app": {"network": RELEASED, "rng": {"cpu": torch.ones(2)}}},
    "torch-ema": {"model": ZEROS, "ema": {"decay": 0.9, "num_updates": 3, "shadow_params": [*RELEASED.values()]}},
    "EMAModel beside the network": {"net": prefixed("module.", ZEROS), "shadow_params": [*RELEASED.values()]},
    "a shadow": {"model": ZEROS, "shadow": RELEASED},
    "a callback of Lightning": {
        "state_dict": prefixed("model.", ZEROS),
        "callbacks": {"EMACallback{'decay': 0.99}": {"ema_weights": RELEASED}, "ModelCheckpoint": {"best": 1.0}},
    },
    "Lightning's own": {"state_dict": RELEASED, "current_model_state": ZEROS},
    "LitEma": prefixed("model.diffusion_model.", ZEROS)
    | {f"model_ema.diffusion_model{name.replace('.', '')}": tensor for name, tensor in RELEASED.items()},
    "merged by PEFT": {"model": {name.replace("attn.q.", "attn.q.base_layer."): RELEASED[name] for name in RELEASED}},
}


@pytest.mark.parametrize("values", TRAINERS.values(), ids=TRAINERS)
def test_files_of_other_trainers(values, tmp_path):
    found = open_published(one(tmp_path, values, "model.pt")).tensors
    assert all(torch.equal(found.read(name), tensor) for name, tensor in OURS.items())


@pytest.mark.parametrize("names", [("student", "teacher"), ("model", "ema_0.999", "ema_0.9999")])
def test_of_two_networks_none_is_chosen(names, tmp_path):
    with pytest.raises(UserError, match=f"holds no named tensors, only: {', '.join(names)}"):
        open_published(one(tmp_path, dict.fromkeys(names, RELEASED), "model.pt"))


def test_a_tensor_under_two_names_is_told(tmp_path):
    with pytest.raises(UserError, match=r"holds (module\.)?(\S+) and module.\2, of which one must be removed"):
        open_published(one(tmp_path, RELEASED | prefixed("module.", ZEROS), "model.pt"))


@pytest.mark.parametrize("ending", ["SCB", "weight.absmax", "weight.quant_state.bitsandbytes__nf4", "weight._data"])
def test_quantised_weights_are_called_so(ending, tmp_path):
    name = f"blocks.0.self_attn.q.{ending}"
    with pytest.raises(UserError, match=rf"is quantised \({name}\): give the weights before"):
        open_published(one(tmp_path, {**RELEASED, name: torch.ones(2)}))


@pytest.mark.parametrize("with_tensors", [False, True])
def test_a_dictionary_that_holds_itself_ends(with_tensors, tmp_path):
    values = {"model": {"weight": torch.ones(2)} if with_tensors else {}}
    values["model"]["model"] = values
    with pytest.raises(UserError, match=r"holds (no named tensors|tensors of another network)"):
        open_published(one(tmp_path, values, "model.pt"))


def test_dictionaries_that_hold_each_other_many_times_are_looked_through_once(tmp_path):
    """By ways through it there would be 40 ** 8."""
    values = {}
    values |= {str(key): values for key in range(40)}
    with pytest.raises(UserError, match="holds no named tensors"):
        open_published(one(tmp_path, values, "model.pt"))
