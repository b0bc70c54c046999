"""How much of an adapter is added: every place where a file, its header or its folder says it, or that nothing does."""

import json
from itertools import cycle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import lists, sampled_from
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megadit.models.convert.adapters.files import read_adapter, write_adapter
from megadit.models.convert.adapters.settings import LoraSettings
from megadit.models.lora.adapters import load_adapter
from megadit.models.shared.errors import UserError
from tests.models.convert.adapters.test_files import (
    COSMOS,
    distance,
    our_network,
    our_output,
    random_adapter,
    their_network,
    their_output,
)

RANK, UNSAID = 3, "no alpha is set, so it is the rank"
Q = "transformer_blocks.0.attn1.to_q"


def stripped(tmp_path):
    """Tensors of a random adapter as PEFT names them, without anything that says their scale."""
    write_adapter(tmp_path / "ours", random_adapter(COSMOS, rank=RANK))
    return load_file(tmp_path / "ours" / "adapter_model.safetensors")


def scale_of(adapter, like):
    """By how much its product of factors is that of `like`, which is read at scale 1; of all targets alike."""
    found = set()
    for name, change in adapter.changes.items():
        product, one = change.alpha / change.rank * change.up_OR @ change.down_RI, like.changes[name]
        one = one.alpha / one.rank * one.up_OR @ one.down_RI
        found.add(round(((product * one).sum() / (one * one).sum()).item(), 4))
    assert len(found) == 1
    return found.pop()


def each(name, value):
    """A tensor of this name for each linear."""
    return lambda tensors: {
        key.replace("lora_A.weight", name): value.clone() for key in tensors if key.endswith("lora_A.weight")
    }


def beside(**settings):
    return {"adapter_config.json": json.dumps({"peft_type": "LORA", **settings})}


PLACES = {
    # where it stands: (files beside, header, more tensors, name of the file, scale, what is said)
    "nowhere": ({}, {}, None, "lora", 1, UNSAID),
    "a header without one": ({}, {"format": "pt", "network_alpha": "None"}, None, "lora", 1, UNSAID),
    "converted by musubi": ({}, {"ss_network_alpha": "1", "ss_network_dim": "3"}, None, "lora", 1, UNSAID),
    "peft's folder, by its file": (beside(lora_alpha=6), {}, None, "adapter_model", 2, "adapter_config.json"),
    "beside a file of another name": (beside(lora_alpha=6), {}, None, "lora", 2, "adapter_config.json"),
    "a pattern": (beside(lora_alpha=1, alpha_pattern={"q|k": 1}), {}, None, "adapter_model", None, "expressions"),
    "rank-stabilised": (
        beside(lora_alpha=6, use_rslora=True), {}, None, "adapter_model", 3.4641, "adapter_config.json",
    ),
    "alpha 0 beside": (beside(lora_alpha=0), {}, None, "adapter_model", 0, "adapter_config.json"),
    "diffusers' header": (
        {}, {"lora_adapter_metadata": '{"transformer.lora_alpha": 6, "transformer.r": 3}'}, None, "lora", 2, "header",
    ),
    "of a header and a folder, peft's": (
        beside(lora_alpha=6), {"lora_adapter_metadata": '{"lora_alpha": 9}'}, None, "adapter_model", 2, "adapter",
    ),
    "of a header and a folder, diffusers'": (
        beside(lora_alpha=6), {"lora_adapter_metadata": '{"lora_alpha": 9}'}, None, "pytorch_lora_weights", 3, "header",
    ),
    **{
        f"{name} {text} of the header": ({}, {name: text}, None, "lora", scale, f"{name} of its header")
        for name, text, scale in (
            ("alpha", "6", 2), ("lora_alpha", "6.0", 2), ("network_alpha", "1.5", 0.5), ("alpha", "0", 0),
        )
    },
    "float tensors": ({}, {}, each("alpha", torch.tensor(6.0)), "lora", 2, "alpha of each linear"),
    "half tensors": ({}, {}, each("alpha", torch.tensor([6.0]).bfloat16()), "lora", 2, "alpha of each linear"),
    "whole numbers": ({}, {}, each("alpha", torch.tensor(6)), "lora", 2, "alpha of each linear"),
    "alpha 0": ({}, {}, each("alpha", torch.tensor(0)), "lora", 0, "alpha of each linear"),
    "a tensor and the header": ({}, {"alpha": "9"}, each("alpha", torch.tensor(6.0)), "lora", 2, "alpha of each"),
    "the scale itself": ({}, {}, each("alpha_scale", torch.tensor(0.5)), "lora", 0.5, "scale of each linear"),
    "less than nothing": ({}, {}, each("alpha", torch.tensor(-6.0)), "lora", None, "the alpha -6 for"),
    "no number": ({}, {"alpha": "high"}, None, "lora", None, "has alpha='high' in its header"),
    "infinity": ({}, {"network_alpha": "inf"}, None, "lora", None, "has network_alpha='inf' in its header"),
    "less than nothing beside": (beside(lora_alpha=-1), {}, None, "adapter_model", None, "a number of at least 0"),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_every_place_of_a_scale(place, tmp_path):
    files, header, more, name, scale, said = PLACES[place]
    tensors = stripped(tmp_path)
    folder = tmp_path / "theirs"
    folder.mkdir()
    save_file(tensors | (more(tensors) if more else {}), folder / f"{name}.safetensors", header)
    for file, text in files.items():
        (folder / file).write_text(text)
    if scale is None:
        with pytest.raises(UserError, match=said):
            read_adapter(folder / f"{name}.safetensors", COSMOS)
        return
    save_file(tensors, tmp_path / "one.safetensors")
    adapter = read_adapter(folder / f"{name}.safetensors", COSMOS)
    assert scale_of(adapter, read_adapter(tmp_path / "one.safetensors", COSMOS)) == pytest.approx(scale, abs=2e-4)
    assert said in adapter.reading and f"times {scale:.4g}" in adapter.reading
    total = len(tensors) + len(more(tensors) if more else {})
    assert adapter.reading.startswith(f"{total} of {total} tensors are used, ")


def test_another_files_settings_are_not_taken(tmp_path):
    tensors = stripped(tmp_path)
    save_file(tensors, tmp_path / "ours" / "another.safetensors")
    assert UNSAID in read_adapter(tmp_path / "ours" / "another.safetensors", COSMOS).reading


def test_scales_of_several_linears_are_said(tmp_path):
    tensors = stripped(tmp_path)
    tensors[f"base_model.model.{Q}.alpha"] = torch.tensor(6)
    save_file(tensors, tmp_path / "one.safetensors")
    reading = read_adapter(tmp_path / "one.safetensors", COSMOS).reading
    assert "1 linears times 2 (alpha of each linear)" in reading and f"times 1 ({UNSAID})" in reading


@pytest.mark.parametrize("settings", [
    {}, {"use_rslora": True}, {"use_dora": True}, {"alpha_pattern": {"to_k": 7}, "rank_pattern": {"to_q": 2}},
    {"target_modules": "all-linear", "exclude_modules": ["patch_embed.proj"]},
])  # fmt: skip
def test_peft_computes_the_same_from_its_folder_and_from_its_file(settings, tmp_path, without_torchvision):
    diffusers, peft = pytest.importorskip("diffusers"), pytest.importorskip("peft")
    asked = {"r": 4, "lora_alpha": 16, "target_modules": ["to_q", "to_k", "ff.net.2"], "init_lora_weights": False}
    network = peft.get_peft_model(their_network(diffusers), peft.LoraConfig(**asked | settings))
    network.save_pretrained(str(tmp_path / "theirs"))
    outputs = []
    for path in (tmp_path / "theirs", tmp_path / "theirs" / "adapter_model.safetensors"):
        dit = our_network(their_network(diffusers))
        load_adapter(dit, *read_adapter(path, COSMOS).to_state())
        outputs.append(our_output(dit))
    assert torch.equal(*outputs)
    assert distance(outputs[0], their_output(network)) <= 1e-5


def test_settings_of_a_dora_need_its_magnitudes(tmp_path):
    save_file(stripped(tmp_path), tmp_path / "adapter_model.safetensors")
    for name, text in beside(r=RANK, lora_alpha=6, use_dora=True).items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match="missing: magnitude of "):
        read_adapter(tmp_path, COSMOS)


def test_the_file_in_a_folder_of_ours_belongs_to_its_weights(tmp_path):
    write_adapter(tmp_path / "ours", random_adapter(COSMOS))
    file = tmp_path / "ours" / "adapter_model.safetensors"
    assert read_adapter(file).base == "0123456789abcdef"
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}, "negative control: the file itself says nothing"


PREFIXES = (
    "", "transformer.", "diffusion_model.", "model.diffusion_model.", "pipe.dit.", "transformer._orig_mod.",
    "base_model.model._orig_mod.", "module.", "base_model.model.module.", "transformer._fsdp_wrapped_module.", "model.",
    "dit.", "base_model.model.net.",
)  # fmt: skip


def test_prefixes_and_names_of_adapters(tmp_path):
    """Each prefix with one of the names, in turn."""
    tensors = stripped(tmp_path)
    expected = read_adapter(tmp_path / "ours", COSMOS).changes
    for prefix, name in zip(PREFIXES, cycle(("", ".default", ".style", "")), strict=False):
        renamed = {
            key.replace("base_model.model.", prefix).replace(".weight", f"{name}.weight"): value
            for key, value in tensors.items()
        }
        save_file(renamed, tmp_path / "renamed.safetensors")
        found = read_adapter(tmp_path / "renamed.safetensors", COSMOS).changes
        assert found.keys() == expected.keys(), (prefix, name)
        for linear, change in found.items():
            assert torch.equal(change.up_OR, expected[linear].up_OR), (prefix, name, linear)
            assert torch.equal(change.down_RI, expected[linear].down_RI), (prefix, name, linear)


PIECES = ("blocks", "0", "attn1", "to_q", "to.q", "a")


@given(
    linear=lists(sampled_from(PIECES[:4]), min_size=1, max_size=4),
    key=lists(sampled_from(PIECES), min_size=1, max_size=3),
    dot=sampled_from([".", "\\."]),
    around=sampled_from(["{}", "^{}", "{}$", "^{}$"]),
)
def test_patterns_are_peft_s(linear, key, dot, around):
    """A dot of them stands for any character, but if it is escaped; the last of a name is enough, without ^."""
    pattern, name = around.format(dot.join(key)), ".".join(linear)
    settings = LoraSettings.from_dict({"r": 1, "rank_pattern": {pattern: 3}}, Path("a"), "")
    found = pytest.importorskip("peft.utils.other").get_pattern_key([pattern], name) == pattern
    assert settings.rank_of(name) == (3 if found else 1)
