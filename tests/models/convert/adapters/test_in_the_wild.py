"""Adapters as others publish them for Wan: what diffusers makes of each file, we make, and say what is not used."""

import dataclasses
import re

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from safetensors.torch import save_file

from megadit.models.convert import wan
from megadit.models.convert.adapters.files import read_adapter, write_adapter
from megadit.models.convert.converted import to_ours
from megadit.models.lora.adapters import load_adapter, merge
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.dit import DiT
from megadit.models.shared.errors import UserError
from megadit.models.storage.tensor_source import from_state_dict
from tests.models.convert.test_layouts import WAN

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("peft", reason="peft is not installed")
RANK, TOLERANCE = 3, 1e-5
"""Relative, float32: two orders of the same sums over a few hundred numbers."""
LINEARS = [
    f"blocks.{block}.{name}"
    for block in range(WAN.num_layers)
    for name in (*(f"{attention}.{x}" for attention in ("self_attn", "cross_attn") for x in "qkvo"), "ffn.0", "ffn.2")
]
AROUND = [
    "time_embedding.0",
    "time_embedding.2",
    "text_embedding.0",
    "text_embedding.2",
    "time_projection.1",
    "head.head",
]
NORMS = [
    "blocks.0.self_attn.norm_q.diff",
    "blocks.0.norm3.diff",
    "blocks.0.norm3.diff_b",
    "blocks.1.cross_attn.norm_k.diff",
]
PREFIXES = ("", "diffusion_model.", "transformer.", "model.diffusion_model.", "lora_unet_")
X, T, TEXT = torch.randn(2, 4, 2, 4, 4), torch.tensor([0.3, 0.7]), torch.randn(2, 5, 8)


@pytest.fixture(scope="module")
def theirs():
    settings = {name: value for name, value in wan.config_to_diffusers(WAN).items() if name[0] != "_"}
    torch.manual_seed(1)
    network = diffusers.WanTransformer3DModel(**settings)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return network.eval().state_dict()


def their_network(state):
    settings = {name: value for name, value in wan.config_to_diffusers(WAN).items() if name[0] != "_"}
    network = diffusers.WanTransformer3DModel(**settings)
    network.load_state_dict(state)
    return network.eval()


def our_network(state, config=WAN):
    dit = DiT(config)
    dit.load_state_dict(to_ours(from_state_dict(state), wan.diffusers_entries(config), config).state_dict())
    return dit.eval()


@torch.no_grad()
def their_output(state, file, scale=1.0):
    class Pipeline(diffusers.DiffusionPipeline, diffusers.loaders.WanLoraLoaderMixin):
        def __init__(self, transformer):
            super().__init__()
            self.register_modules(transformer=transformer)

    pipeline = Pipeline(their_network(state))
    if file is not None:
        pipeline.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name="one", low_cpu_mem_usage=False)
        pipeline.set_adapters(["one"], [scale])
    return pipeline.transformer(X, 1000 * T, TEXT, return_dict=False)[0]


@torch.no_grad()
def our_output(dit):
    return dit(X, T, Conditioning(TEXT, torch.tensor([5, 5]), torch.full((2,), 16.0)))


def distance(a, b):
    return ((a - b).norm() / b.norm()).item()


def sizes(name):
    shapes = {wan.released_name(f"{key}.weight").removesuffix(".weight"): shape for key, shape in _SHAPES.items()}
    return shapes[name]


_SHAPES = {
    key.removesuffix(".weight"): tuple(tensor.shape)
    for key, tensor in diffusers.WanTransformer3DModel(
        **{name: value for name, value in wan.config_to_diffusers(WAN).items() if name[0] != "_"}
    ).state_dict().items()
    if key.endswith(".weight")
}  # fmt: skip


def factors(*names, down="lora_down", up="lora_up", alpha=None, bias=False):
    """Random ones of these linears, under names of the publication."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name in names:
        out_features, in_features = sizes(name)
        tensors[f"{name}.{down}.weight"] = 0.2 * torch.randn(RANK, in_features, generator=generator)
        tensors[f"{name}.{up}.weight"] = 0.2 * torch.randn(out_features, RANK, generator=generator)
        if alpha is not None:
            tensors[f"{name}.alpha"] = alpha.clone()
        if bias:
            tensors[f"{name}.diff_b"] = 0.3 * torch.randn(out_features, generator=generator)
    return tensors


def of_norms():
    return {name: torch.randn(WAN.hidden_size) for name in NORMS}


def named(tensors, prefix="diffusion_model."):
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def kohya(tensors):
    """As musubi-tuner names them."""
    found = {}
    for key, tensor in tensors.items():
        linear, dot, ending = key.partition(".lora_") if ".lora_" in key else key.rpartition(".")
        found[f"lora_unet_{linear.replace('.', '_')}{dot}{ending}"] = tensor
    return found


def images(tensors):
    """With what an image-to-video network has beside: linears that read the image."""
    more = {}
    for block in range(WAN.num_layers):
        for x in ("k_img", "v_img"):
            more[f"blocks.{block}.cross_attn.{x}.lora_down.weight"] = torch.randn(RANK, WAN.hidden_size)
            more[f"blocks.{block}.cross_attn.{x}.lora_up.weight"] = torch.randn(WAN.hidden_size, RANK)
    return tensors | more


FILES = {
    # tensors, how many of them are not used
    "LightX2V": (named(factors(*LINEARS, *AROUND, bias=True) | of_norms()), len(NORMS)),
    "LightX2V, lora_A": (named(factors(*LINEARS, down="lora_A", up="lora_B", bias=True) | of_norms()), len(NORMS)),
    "CausVid": (named(factors(*LINEARS, *AROUND)), 0),
    "biases of some": (named(factors(*LINEARS[:4], bias=True) | factors(*LINEARS[4:])), 0),
    "biases and alphas": (named(factors(*LINEARS, bias=True, alpha=torch.tensor(1.5))), 0),
    "AccVideo's biases alone": (
        named(factors(*LINEARS) | {"time_projection.1.diff_b": torch.randn(6 * WAN.hidden_size)}), 1,
    ),
    "whole numbers": (named(factors(*LINEARS, alpha=torch.tensor(6))), 0),
    "alpha 0": (named(factors(*LINEARS[:8], alpha=torch.tensor(0)) | factors(*LINEARS[8:])), 0),
    "kohya": (kohya(factors(*LINEARS, alpha=torch.tensor(2.0))), 0),
    "kohya, whole numbers": (kohya(factors(*LINEARS, alpha=torch.tensor(2))), 0),
    "kohya, alpha 0": (kohya(factors(*LINEARS, alpha=torch.tensor(0.0))), 0),
    "a head's whole matrix": (
        named(factors(*LINEARS) | {
            "head.head.diff": 0.1 * torch.randn(sizes("head.head")),
            "head.head.diff_b": torch.ones(sizes("head.head")[0]),
        }), 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_does_what_it_does_in_diffusers(name, theirs, tmp_path):
    tensors, num_unused = FILES[name]
    file = tmp_path / "lora.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file)
    expected = their_output(theirs, file)
    adapter = read_adapter(file, WAN)
    assert adapter.reading.startswith(f"{len(tensors) - num_unused} of {len(tensors)} tensors are used")
    assert ("not used" in adapter.reading) == bool(num_unused)
    beside, merged = our_network(theirs), our_network(theirs)
    load_adapter(beside, *adapter.to_state())
    assert distance(our_output(beside), expected) <= TOLERANCE
    load_adapter(merged, *adapter.to_state())
    merge(merged)
    assert distance(our_output(merged), expected) <= TOLERANCE
    base = their_output(theirs, None)
    assert (distance(expected, base) > 1e-3) == (name != "kohya, alpha 0"), "negative control: it matters"


def test_of_images_on_a_network_of_text_and_the_reverse(theirs, tmp_path):
    """diffusers leaves the image's linears out; one of text changes the others of a network of images."""
    file, plain = tmp_path / "images.safetensors", tmp_path / "plain.safetensors"
    save_file(named(images(factors(*LINEARS))), file)
    save_file(named(factors(*LINEARS)), plain)
    adapter = read_adapter(file, WAN)
    assert "; not used: diffusion_model.blocks.0.cross_attn.k_img.lora_down.weight" in adapter.reading
    dit = our_network(theirs)
    load_adapter(dit, *adapter.to_state())
    assert distance(our_output(dit), their_output(theirs, plain)) <= TOLERANCE
    of_images = dataclasses.replace(WAN, image_size=16, conditioning_mode="channels", conditioning_sigma=0.0)
    assert read_adapter(plain, of_images).reading.startswith("40 of 40 tensors are used")
    assert read_adapter(file, of_images).reading.startswith("48 of 48 tensors are used")


BESIDE = [
    *NORMS, "blocks.1.diff_m", "head.diff_m", "blocks.0.ffn.2.diff_b", "patch_embedding.diff", "img_emb.proj.1.diff",
    "blocks.1.cross_attn.norm_k_img.diff", "blocks.0.cross_attn.v_img.diff_b",
    "blocks.1.cross_attn.k_img.lora_up.weight",
]  # fmt: skip


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(
    name=st.sampled_from(BESIDE),
    other=st.sampled_from(["", "2", "17", "x", "blocks.0"]),
    prefix=st.sampled_from(PREFIXES),
)
def test_changes_beside_those_of_linears_are_not_used_or_are_of_another_network(name, other, prefix, tmp_path_factory):
    """In layers of the network, diffusers too leaves them out; of layers that it lacks, the file is for another one."""
    changed = re.sub(r"\d", other, name, count=1) if other and name[0] == "b" else f"{other}{name}"
    one = {changed: torch.ones(2)}
    key = next(iter(kohya(one) if prefix == "lora_unet_" else named(one, prefix)))
    file = tmp_path_factory.mktemp("beside") / "lora.safetensors"
    save_file({**named(factors(*LINEARS[4:8])), key: torch.ones(2)}, file)
    if not other:
        assert f"; not used: {key}" in read_adapter(file, WAN).reading
        return
    with pytest.raises(UserError, match=re.escape(f"unexpected: {key} [2]")):
        read_adapter(file, WAN)


def test_half_of_a_change_of_biases(theirs, tmp_path):
    """Scales of each sample of a batch, and a file of ours that diffusers reads."""
    file = tmp_path / "lora.safetensors"
    save_file(FILES["biases and alphas"][0], file)
    adapter = read_adapter(file, WAN)
    dit = our_network(theirs)
    load_adapter(dit, *adapter.to_state(), "one")
    from megadit.models.lora.adapters import set_scale

    set_scale(dit, torch.tensor([0.5, 1.0]), "one")
    found = our_output(dit)
    for row, scale in enumerate((0.5, 1.0)):
        assert distance(found[row], their_output(theirs, file, scale)[row]) <= TOLERANCE
    for out in ("ours.safetensors", "ours"):
        write_adapter(tmp_path / out, adapter)
        again = our_network(theirs)
        load_adapter(again, *read_adapter(tmp_path / out).to_state())
        assert distance(our_output(again), their_output(theirs, file)) <= TOLERANCE
    assert distance(their_output(theirs, tmp_path / "ours.safetensors"), their_output(theirs, file)) <= TOLERANCE


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"blocks.0.ffn.0.hada_w1_a": torch.ones(3, 3)},
            "it is a LoHa: only LoRA and DoRA are read; merge",
        ),
        ({"blocks.0.ffn.0.lokr_w1": torch.ones(3, 3)}, "it is a LoKr"),
        (
            {"blocks.9.ffn.0.lora_down.weight": torch.ones(3, 3)},
            r"unexpected: diffusion_model.blocks.9.ffn.0.lora",
        ),
        ({"blocks.0.ffn.0.diff_b": torch.ones(5)}, r"ffn.0.diff_b \[5\], not \[32\]"),
        ({"blocks.0.ffn.0.diff": torch.ones(32, 128)}, "without low-rank factors"),
        (
            {
                "blocks.0.ffn.net.0.proj.lora_down.weight": torch.ones(3, WAN.hidden_size),
                "blocks.0.ffn.net.0.proj.lora_up.weight": torch.ones(WAN.ffn_hidden_size, 3),
            },
            "the linear blocks.0.mlp.*is changed twice, by its names in two programs",
        ),
    ],
)
def test_what_is_no_such_adapter_is_named(more, message, tmp_path):
    file = tmp_path / "lora.safetensors"
    save_file(named(factors(*LINEARS) | more), file)
    with pytest.raises(UserError, match=message) as error:
        read_adapter(file, WAN)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("adapter", ["default", "my-style", "v1.0", "weight"])
@pytest.mark.parametrize(
    "prefix", ["transformer.base_model.model.", "base_model.model.transformer._orig_mod.", "pipe.dit.module.model."]
)
def test_any_name_of_an_adapter_under_any_wrapper(adapter, prefix, tmp_path):
    plain = factors(*LINEARS)
    save_file(named(plain), tmp_path / "plain.safetensors")
    ours = {"lora_down": f"lora_A.{adapter}", "lora_up": f"lora_B.{adapter}"}
    renamed = {key.replace(of, ours[of]): tensor for key, tensor in plain.items() for of in ours if of in key}
    save_file(named(renamed, prefix), tmp_path / "theirs.safetensors")
    expected, found = (read_adapter(tmp_path / f"{n}.safetensors", WAN).to_state()[0] for n in ("plain", "theirs"))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_names_of_videox_fun(tmp_path):
    """Its prefix ends in the name of the network, which is empty."""
    plain = kohya(factors(*LINEARS, alpha=torch.tensor(1.5)))
    save_file(plain, tmp_path / "plain.safetensors")
    save_file({f"lora_unet_{key.removeprefix('lora_unet')}": plain[key] for key in plain}, tmp_path / "a.safetensors")
    expected, found = (read_adapter(tmp_path / f"{name}.safetensors", WAN).to_state() for name in ("plain", "a"))
    assert found[0].keys() == expected[0].keys() and all(
        torch.equal(found[0][key], expected[0][key]) for key in found[0]
    )


KINDS = {"oft_R.default": "an OFT", "oft_diag": "an OFT", "ia3_l": "an IA3", "vera_lambda_b": "a VeRA"}


@pytest.mark.parametrize(("factor", "kind"), KINDS.items())
def test_adapters_of_other_methods_are_called_so(factor, kind, tmp_path):
    save_file({f"base_model.model.blocks.0.ffn.0.{factor}": torch.ones(3)}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=f"it is {kind}: only LoRA and DoRA are read; merge it elsewhere"):
        read_adapter(tmp_path / "a.safetensors", WAN)
