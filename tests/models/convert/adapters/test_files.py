"""Adapters in files: what we write peft and diffusers load, and we load theirs; what does not fit is refused."""

import json
import re
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import integers, lists, sampled_from, text
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megadit.models.commands.convert import main as convert
from megadit.models.configs.adapter import AdapterConfig
from megadit.models.configs.config import DiTConfig
from megadit.models.convert import cosmos
from megadit.models.convert.adapters.adapter import Adapter
from megadit.models.convert.adapters.files import is_adapter, read_adapter, write_adapter
from megadit.models.convert.adapters.names import split_key
from megadit.models.convert.converted import to_ours
from megadit.models.convert.published import open_published
from megadit.models.convert.written import diffusers_entries, original_entries
from megadit.models.lora.adapters import chosen_targets, load_adapter
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.dit import DiT
from megadit.models.shared.errors import UserError
from megadit.models.storage.tensor_source import from_state_dict

SIZES = {"hidden_size": 32, "num_attention_heads": 2, "in_channels": 4, "patch_spatial": 2}
OURS = DiTConfig(num_layers=2, crossattn_emb_size=8, **SIZES)
COSMOS = DiTConfig(
    family="cosmos",
    num_layers=2,
    ffn_hidden_size=64,
    **SIZES,
    crossattn_emb_size=8,
    adaln_lora_dim=4,
    padding_mask_channel=True,
    qk_layernorm_epsilon=cosmos.QK_EPSILON,
)
CLASSES = DiTConfig(
    family="dit",
    num_layers=1,
    crossattn_emb_size=2,
    **SIZES,
    num_classes=3,
    position_embedding="sincos",
    qk_layernorm=False,
)
TOLERANCE = 1e-5
"""Relative, float32: two orders of the same sums over a few hundred numbers."""


def random_adapter(config, *patterns, rank=3, alpha=6.0, kind="lora", base="0123456789abcdef"):
    adapter = AdapterConfig(rank=rank, alpha=alpha, targets=patterns or ("blocks.*",), kind=kind)
    generator, state = torch.Generator().manual_seed(0), {}
    for name, target in chosen_targets(config, adapter.targets).items():
        state[f"{name}.down"] = 0.2 * torch.randn(rank, target.in_features, generator=generator)
        state[f"{name}.up"] = 0.2 * torch.randn(target.out_features, rank, generator=generator)
        if kind == "dora":
            state[f"{name}.magnitude"] = 0.5 + torch.rand(target.out_features, generator=generator)
    return Adapter.from_state(state, adapter, config, base=base, training={"step": 20})


def assert_equal(found, expected):
    (state, adapter), (wanted, other) = found.to_state(), expected.to_state()
    assert state.keys() == wanted.keys() and adapter.kind == other.kind and adapter.scaling == other.scaling
    assert all(torch.equal(state[key], wanted[key]) for key in wanted)


def contents(path):
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {file.name: file.read_bytes() for file in files}


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("config", [OURS, COSMOS, CLASSES], ids=lambda config: config.family)
def test_round_trips_are_byte_equal(config, kind, tmp_path):
    adapter = random_adapter(config, kind=kind)
    write_adapter(tmp_path / "folder", adapter)
    write_adapter(tmp_path / "one.safetensors", adapter)
    for number, path in enumerate([tmp_path / "folder", tmp_path / "one.safetensors"]):
        again = read_adapter(path)  # which network it belongs to it says itself
        assert_equal(again, adapter)
        assert again.config == config and again.base == adapter.base and again.training == {"step": 20}
        write_adapter(tmp_path / f"folder{number}", again)
        write_adapter(tmp_path / f"one{number}.safetensors", again)
        assert contents(tmp_path / f"folder{number}") == contents(tmp_path / "folder")
        assert (tmp_path / f"one{number}.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()


def test_every_target_that_diffusers_has_comes_back(tmp_path):
    """Fused linears of ours are several of theirs; the first linear, whose inputs have another order, has no place."""
    everything = random_adapter(COSMOS, "blocks.*", "final_layer.*", "shared_embedder.*")
    write_adapter(tmp_path / "one.safetensors", everything)
    assert_equal(read_adapter(tmp_path / "one.safetensors"), everything)
    with pytest.raises(UserError, match="no counterpart of x_embedder"):
        write_adapter(tmp_path / "other", random_adapter(COSMOS, "x_embedder"))
    assert not (tmp_path / "other").exists()


WAN = DiTConfig(family="wan", num_layers=1, parameterization="flow", crossattn_emb_size=8, **SIZES)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("config", [COSMOS, WAN], ids=lambda config: config.family)
def test_comfyui_s_file_comes_back(config, kind, tmp_path):
    """By the publication's names, with alpha beside each linear, and without the settings of PEFT."""
    adapter = random_adapter(config, kind=kind)
    write_adapter(tmp_path / "comfy.safetensors", adapter, is_original=True)
    tensors = load_file(tmp_path / "comfy.safetensors")
    ends = {"lora_A.weight", "lora_B.weight", "alpha", *({"dora_scale"} if kind == "dora" else ())}
    names = {entry for each in original_entries(config) for entry in each.theirs}
    for key, tensor in tensors.items():
        name, end = re.fullmatch(r"diffusion_model\.(.+?)\.(lora_[AB]\.weight|alpha|dora_scale)", key).groups()
        assert f"{name}.weight" in names and end in ends
        assert end != "alpha" or tensor == 6.0
        assert end != "dora_scale" or tensor.shape[1:] == (1,)
    assert_equal(read_adapter(tmp_path / "comfy.safetensors"), adapter)
    write_adapter(tmp_path / "peft", adapter)
    assert convert([str(tmp_path / "peft"), str(tmp_path / "again.safetensors"), "--to", "original"]) == 0
    assert (
        contents(tmp_path / "again.safetensors").popitem()[1] == contents(tmp_path / "comfy.safetensors").popitem()[1]
    )
    with pytest.raises(UserError, match="give .*folder the ending .safetensors"):
        write_adapter(tmp_path / "folder", adapter, is_original=True)


def test_a_family_without_a_publication_has_no_file_for_comfyui(tmp_path):
    with pytest.raises(UserError, match="family .* has no published names, for --to original"):
        write_adapter(tmp_path / "comfy.safetensors", random_adapter(OURS), is_original=True)


# ------------------------------------------------------------------------------------------- beside peft and diffusers


@pytest.fixture(scope="module")
def diffusers():
    return pytest.importorskip("diffusers", reason="diffusers is not installed")


@pytest.fixture(scope="module")
def peft():
    return pytest.importorskip("peft", reason="peft is not installed")


def their_network(diffusers):
    settings = {name: value for name, value in cosmos.config_to_diffusers(COSMOS).items() if name[0] != "_"}
    network = diffusers.CosmosTransformer3DModel(**settings)
    torch.manual_seed(1)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return network.eval()


def our_network(network):
    dit = DiT(COSMOS)
    dit.load_state_dict(
        to_ours(from_state_dict(network.state_dict()), cosmos.diffusers_entries(COSMOS), COSMOS).state_dict()
    )
    return dit.eval()


X, TEXT, C_NOISE = torch.randn(2, 4, 2, 8, 8), torch.randn(2, 5, 8), torch.tensor([0.3, -0.2])


@torch.no_grad()
def their_output(network):
    mask = torch.zeros(1, 1, 8, 8)
    return network(X, C_NOISE, TEXT, fps=8, padding_mask=mask, return_dict=False)[0]


@torch.no_grad()
def our_output(dit):
    return dit(X, C_NOISE, Conditioning(TEXT, torch.tensor([5, 5]), torch.full((2,), 8.0)))


def distance(a, b):
    return ((a - b).norm() / b.norm()).item()


def pipeline_of(diffusers, transformer):
    from diffusers.loaders import CosmosLoraLoaderMixin

    class Pipeline(diffusers.DiffusionPipeline, CosmosLoraLoaderMixin):
        def __init__(self, transformer):
            super().__init__()
            self.register_modules(transformer=transformer)

    return Pipeline(transformer)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_diffusers_and_peft_load_ours_and_we_load_theirs(kind, diffusers, peft, tmp_path, without_torchvision):
    adapter = random_adapter(COSMOS, "blocks.*", "final_layer.*", kind=kind)
    write_adapter(tmp_path / "folder", adapter)
    write_adapter(tmp_path / "one.safetensors", adapter)
    dit = our_network(their_network(diffusers))
    base = our_output(dit)
    load_adapter(dit, *adapter.to_state())
    expected = our_output(dit)
    assert distance(expected, base) > 0.05, "negative control: the adapter matters"

    pipeline = pipeline_of(diffusers, their_network(diffusers))
    pipeline.load_lora_weights(str(tmp_path), weight_name="one.safetensors")
    assert distance(their_output(pipeline.transformer), expected) <= TOLERANCE
    wrapped = peft.PeftModel.from_pretrained(their_network(diffusers), str(tmp_path / "folder"))
    assert distance(their_output(wrapped), expected) <= TOLERANCE

    wrapped.save_pretrained(str(tmp_path / "of_peft"))
    pipeline.transformer.save_lora_adapter(str(tmp_path / "of_diffusers"), adapter_name="default_0")
    for name in ("of_peft", "of_diffusers"):
        assert is_adapter(tmp_path / name)
        assert_equal(read_adapter(tmp_path / name, COSMOS), adapter)


def test_ranks_and_alphas_of_their_own(diffusers, peft, tmp_path, without_torchvision):
    """q, k and v may differ; rank-stabilised scaling too is read."""
    settings = peft.LoraConfig(
        r=4,
        lora_alpha=2,
        target_modules=["to_q", "to_k", "norm2.linear_1", "ff.net.0.proj"],
        rank_pattern={"attn1.to_q": 2, "^transformer_blocks.1.attn2.to_k": 3},
        alpha_pattern={"to_k": 7},
        use_rslora=True,
        init_lora_weights=False,
    )
    network = peft.get_peft_model(their_network(diffusers), settings)
    network.save_pretrained(str(tmp_path / "theirs"))
    adapter = read_adapter(tmp_path / "theirs", COSMOS)
    assert {change.rank for change in adapter.changes.values()} == {2, 3, 4}
    dit = our_network(their_network(diffusers))
    load_adapter(dit, *adapter.to_state())
    assert distance(our_output(dit), their_output(network)) <= TOLERANCE
    write_adapter(tmp_path / "ours", adapter)
    again = peft.PeftModel.from_pretrained(their_network(diffusers), str(tmp_path / "ours"))
    assert distance(their_output(again), their_output(network)) <= TOLERANCE


# ----------------------------------------------------------------------------------------------- keys of other programs


def renamed(path, out, prefix, name, ending, alphas):
    """The tensors of our file at `path` as another program writes them."""
    tensors = {}
    for key, value in load_file(path).items():
        linear, _, which = key.removeprefix("transformer.").rpartition(".lora_")
        tensors[f"{prefix}{name(linear)}.{ending[which]}"] = value
        if alphas:
            tensors[f"{prefix}{name(linear)}.alpha"] = torch.tensor(6.0)
    save_file(tensors, out)


PEFT_ENDING = {"A.weight": "lora_A.weight", "B.weight": "lora_B.weight"}
KOHYA_ENDING = {"A.weight": "lora_down.weight", "B.weight": "lora_up.weight"}


def released(linear):
    return cosmos.released_name(f"{linear}.weight").removesuffix(".weight")


@pytest.mark.parametrize(
    ("prefix", "name", "ending"),
    [
        ("diffusion_model.", released, PEFT_ENDING),  # ComfyUI
        ("diffusion_model.", released, KOHYA_ENDING),
        ("lora_unet_", lambda linear: linear.replace(".", "_"), KOHYA_ENDING),  # kohya's scripts
        ("lora_unet_", lambda linear: released(linear).replace(".", "_"), KOHYA_ENDING),
        ("", lambda linear: linear, PEFT_ENDING),
    ],
)
def test_keys_of_other_programs(prefix, name, ending, tmp_path):
    adapter = random_adapter(COSMOS)
    write_adapter(tmp_path / "one.safetensors", adapter)
    renamed(tmp_path / "one.safetensors", tmp_path / "other.safetensors", prefix, name, ending, alphas=True)
    assert_equal(read_adapter(tmp_path / "other.safetensors", COSMOS), adapter)
    with pytest.raises(UserError, match="name a bundle of it with --base"):
        read_adapter(tmp_path / "other.safetensors")


def test_without_an_alpha_it_is_the_rank(tmp_path):
    write_adapter(tmp_path / "one.safetensors", random_adapter(COSMOS))
    renamed(
        tmp_path / "one.safetensors", tmp_path / "other.safetensors", "transformer.", str, PEFT_ENDING, alphas=False
    )
    assert read_adapter(tmp_path / "other.safetensors", COSMOS).to_state()[1].scaling == 1


def test_each_linear_of_theirs_has_rows_of_ours():
    """No two names mean other rows, and together they have them all."""
    from megadit.models.convert.adapters.names import _linears

    for config, entries_of in [(COSMOS, diffusers_entries), (COSMOS, original_entries), (CLASSES, original_entries)]:
        rows: dict[str, list[int]] = {}
        for linear in _linears(entries_of(config), config):
            rows.setdefault(linear.linear, []).extend(linear.rows_O.tolist())
        assert all(sorted(found) == list(range(len(found))) for found in rows.values())
        assert {"blocks.0.self_attention.qkv", "blocks.0.self_attention.proj"} <= rows.keys()


# ------------------------------------------------------------------------------------------------------------ refusals


def write_changed(tmp_path, change, *, metadata=None):
    """Our file of Cosmos after `change` was done to its tensors."""
    write_adapter(tmp_path / "good.safetensors", random_adapter(COSMOS))
    tensors = load_file(tmp_path / "good.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "bad.safetensors", metadata=metadata)
    return tmp_path / "bad.safetensors"


Q = "transformer.transformer_blocks.0.attn1.to_q"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"text_model.x.lora_A.weight": torch.ones(3, 5)}), r"unexpected: text_model.*\[3, 5\]"),
        (lambda t: t.pop(f"{Q}.lora_B.weight"), r"missing: up of transformer_blocks.0.attn1.to_q"),
        (lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(3, 31)}), r"to_q.lora_A.weight \[3, 31\], not \[3, 32\]"),
        (lambda t: t.update({f"{Q}.lora_B.weight": torch.ones(32, 4)}), r"to_q.lora_B.weight \[32, 4\], not \[32, 3\]"),
        (
            lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(0, 32), f"{Q}.lora_B.weight": torch.ones(32, 0)}),
            r"to_q.lora_A.weight \[0, 32\] has rank 0",
        ),
        (
            lambda t: t[f"{Q}.lora_A.weight"].view(-1)[7].fill_(float("nan")),
            "lora_A.weight has numbers that are not",
        ),
        (
            lambda t: t[f"{Q}.lora_B.weight"].view(-1)[7].fill_(float("inf")),
            "lora_B.weight has numbers that are not",
        ),
        (lambda t: t.update({f"{Q}.alpha": torch.tensor(-1.0)}), "alpha -1 for"),
        (lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(3, 32).int()}), "lora_A.weight holds no floating-point"),
        (lambda t: t.update({f"{Q.replace('.', '_')}.lora_A.weight": torch.ones(3, 32)}), "unexpected"),
    ],
)
def test_what_does_not_fit_is_listed(change, message, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        read_adapter(write_changed(tmp_path, change), COSMOS)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"modules_to_save": ["norm_out"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"init_lora_weights": "pissa_niter_4"}, "changed its base"),
        ({"r": 0}, "r=0"),
        ({"r": 4}, "has rank 3, not 4"),
        ({"lora_alpha": float("nan")}, "number"),
        ({"lora_alpha": True}, "lora_alpha=True"),
        ({"lora_alpha": "8"}, "lora_alpha='8'"),
        ({"alpha_pattern": {"(a+)+b": 3}}, "no regular expressions"),
        ({"rank_pattern": [1]}, "rank_pattern"),
    ],
)
def test_settings_that_would_change_the_result_are_refused(settings, message, tmp_path):
    write_adapter(tmp_path / "folder", random_adapter(COSMOS))
    (tmp_path / "folder" / "megadit.json").unlink()
    path = tmp_path / "folder" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(UserError, match=message):
        read_adapter(tmp_path / "folder", COSMOS)


def test_hostile_files(tmp_path):
    (tmp_path / "huge.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    (tmp_path / "cut.safetensors").write_bytes(b"\x00\x01")
    (tmp_path / "pickle.bin").write_bytes(b"\x80\x04.")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "adapter_model.bin").write_bytes(b"\x80\x04.")
    wordy = {"megadit": '{"training": [' + "[]," * 200_000 + "1]}"}  # a service parses it for every request
    write_changed(tmp_path, lambda tensors: None, metadata=wordy).rename(tmp_path / "wordy.safetensors")
    deep = {"lora_adapter_metadata": "[" * 100_000}
    write_changed(tmp_path, lambda tensors: None, metadata=deep)
    for name, message in [
        ("huge.safetensors", "the header of .* is longer than"),
        ("cut.safetensors", "not a readable safetensors"),
        ("pickle.bin", "ends in .safetensors"),
        ("empty", "other files than safetensors are not read"),
        ("nowhere", "does not exist"),
        ("bad.safetensors", "lists and objects within one another"),
        ("wordy.safetensors", "megadit in the header of .* is longer than"),
    ]:
        with pytest.raises(UserError, match=message):
            read_adapter(tmp_path / name, COSMOS)


PIECES = [".lora_A", ".lora_B", ".lora_magnitude_vector", ".lora.down", ".diff", ".alpha", "net.", "module.", ".b"]


@given(pieces=lists(sampled_from(PIECES), min_size=1, max_size=3), ending=sampled_from(["", ".x", ".weight", ".bias "]))
@settings(max_examples=20, deadline=None)
def test_a_name_takes_time_in_proportion_to_its_length(pieces, ending):
    """Of the header's 16 MB it may take all: a quadratic search would take days."""
    name, begun = "".join(pieces) * 50_000 + ending, time.process_time()
    split_key(name)
    assert time.process_time() - begun < 5


@given(part=text(max_size=3), at=integers(0, 30), times=sampled_from([1, 1000]))
@settings(max_examples=50, deadline=None)
def test_names_that_no_network_has_are_refused_in_short(part, at, times, tmp_path_factory):
    folder, name = tmp_path_factory.mktemp("names"), f"{Q}.lora_C"[:at] + part * times + f"{Q}.lora_C"[at:]
    for file, save in (("a.safetensors", save_file), ("a.pt", torch.save)):
        save({name: torch.ones(2)}, folder / file)
        with pytest.raises(UserError) as error:
            read_adapter(folder / file, COSMOS) if file == "a.safetensors" else open_published(folder / file)
        assert str(error.value).isprintable() and len(str(error.value)) < 3000


OTHER_FILES = {
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "Git LFS.*git lfs pull"),
    "zip": (b"PK\3\4" + bytes(range(99)), "is a zip file, as torch.save writes"),
    "pickle": (b"\x80\2}q\0(X\1\0\0\0aq\1", "is a pickle"),
    "gguf": (b"GGUF\3\0\0\0\1" + bytes(99), "GGUF"),
    "page": (b"<!DOCTYPE html><html>404", "web page.*download"),
}


@pytest.mark.parametrize("kind", OTHER_FILES)
def test_another_file_of_that_name_is_called_what_it_is(kind, tmp_path):
    content, message = OTHER_FILES[kind]
    (tmp_path / "adapter.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_adapter(tmp_path / "adapter.safetensors", COSMOS)


def test_another_network(tmp_path):
    write_adapter(tmp_path / "folder", random_adapter(COSMOS))
    with pytest.raises(UserError, match="of family cosmos, not megadit"):
        read_adapter(tmp_path / "folder", OURS)


def test_nothing_else_is_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="holds something else"):
        write_adapter(tmp_path / "folder", random_adapter(OURS))
    assert contents(tmp_path / "folder") == {"letter.txt": b"dear"}
    save_file({"weight": torch.ones(3)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="holds something else"):
        write_adapter(tmp_path / "other.safetensors", random_adapter(OURS))
    write_adapter(tmp_path / "mine", random_adapter(OURS))
    write_adapter(tmp_path / "mine", random_adapter(OURS, rank=2))
    assert read_adapter(tmp_path / "mine").to_state()[1].rank == 2


def test_half_precision(tmp_path):
    adapter = random_adapter(OURS)
    write_adapter(tmp_path / "half.safetensors", adapter, torch.bfloat16)
    with safe_open(tmp_path / "half.safetensors", framework="pt") as file:
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"BF16"}
    state, wanted = read_adapter(tmp_path / "half.safetensors").to_state()[0], adapter.to_state()[0]
    assert all(torch.equal(state[key], wanted[key].bfloat16().float()) for key in wanted)
