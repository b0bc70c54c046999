"""Adapters beside a network: nothing changes at first, what is trained can be merged, scaled, removed, told apart."""

import copy
import gc
import subprocess
import sys

import pytest
import torch

from megadit.models.configs.adapter import AdapterConfig
from megadit.models.configs.block import ExpertConfig
from megadit.models.configs.config import DiTConfig
from megadit.models.lora import layers as low_rank
from megadit.models.lora.adapters import (
    adapter_key,
    adapter_names,
    adapter_state,
    attach,
    chosen_targets,
    draw_dropout,
    fingerprint,
    initial_adapter_value,
    load_adapter,
    merge,
    remove,
    set_scale,
    targets_of,
    train_adapter_only,
)
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.dit import DiT
from megadit.models.shared.errors import UserError

SIZES = {"num_layers": 1, "hidden_size": 48, "num_attention_heads": 4, "crossattn_emb_size": 16, "in_channels": 2}
LEARNED = {"position_embedding": "learned", "learned_positions": (4, 5, 5)}
CLASSES = {"num_classes": 5, "crossattn_emb_size": 2, "learned_variance": True}
NETWORKS = {
    "megadit": {},
    "dit": {"family": "dit", "position_embedding": "sincos", "qk_layernorm": False, **CLASSES},
    "cosmos": {"family": "cosmos", "adaln_lora_dim": 4, "learned_positions": (4, 5, 5), "padding_mask_channel": True},
    "moviegen": {"family": "moviegen", "num_query_groups": 2, "qk_layernorm": False, **LEARNED},
    "experts": {"experts": ExpertConfig(num_experts=4, ffn_hidden_size=24, shared_ffn_hidden_size=20)},
}
KINDS = ("lora", "dora")


def network(name="megadit", seed=0):
    """All of its weights random: what starts at zero would hide mistakes."""
    dit, generator = DiT(DiTConfig(**SIZES | NETWORKS[name])), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in dit.parameters():
            parameter.normal_(std=0.1, generator=generator)
    return dit.eval()


def compute(dit):
    generator = torch.Generator().manual_seed(1)
    text_BLE = torch.rand(2, 3, dit.config.crossattn_emb_size, generator=generator).to(dit.dtype)
    conditioning = Conditioning(text_BLE, torch.tensor([3, 0]), torch.tensor([8.0, 8.0]))
    x_BCTHW = torch.randn(2, 2, 2, 8, 8, generator=generator).to(dit.dtype)
    return dit(x_BCTHW, torch.tensor([0.1, 0.2]), conditioning)


@torch.no_grad()
def output(dit):
    return compute(dit)


def begin(dit, adapter, name="adapter"):
    attach(dit, adapter, name)
    base = dict(dit.named_parameters()).__getitem__
    with torch.no_grad():
        for key, parameter in adapter_state(dit, name).items():
            parameter.copy_(
                initial_adapter_value(key, dit.config, adapter.rank, seed=0, base=base, dtype=parameter.dtype)
            )


def train_a_little(dit, name="adapter", seed=2):
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapter_state(dit, name).values():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter))


def everywhere(kind, **settings):
    return AdapterConfig(rank=3, alpha=6.0, targets=("*",), kind=kind, **settings)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "dtype"), [("megadit", torch.bfloat16), *((name, torch.float32) for name in NETWORKS)]
)
def test_at_first_every_bit_is_the_base_s(name, dtype, kind):
    dit = network(name).to(dtype)
    base = output(dit)
    begin(dit, everywhere(kind))
    as_integers = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(output(dit).view(as_integers), base.view(as_integers))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NETWORKS)
def test_merged_is_unmerged(name, kind):
    dit = network(name)
    base = output(dit)
    begin(dit, everywhere(kind))
    train_a_little(dit)
    set_scale(dit, 0.7)
    expected = output(dit)
    assert (expected - base).norm() > 0.1 * base.norm()
    merge(dit)
    assert not adapter_names(dit)
    assert set(dit.state_dict()) == set(DiT(dit.config).state_dict())
    # float32: each product is rounded otherwise
    assert (output(dit) - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_every_target_changes_the_output_and_learns(kind):
    dit = network("moviegen")
    base = output(dit)
    for target in targets_of(dit.config):
        begin(dit, AdapterConfig(rank=2, targets=(target,), kind=kind))
        train_a_little(dit)
        assert not torch.equal(output(dit), base), target
        remove(dit)
    assert torch.equal(output(dit), base)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_target_changes_are_its_rows(kind):
    """Of a fused projection with grouped queries: heads of queries, keys and values in turn."""
    dit = network("moviegen")
    qkv = dit.blocks["0"].self_attention.qkv
    grouped = torch.arange(len(qkv.weight)).view(2, 4, 12)  # 2 groups of [q q k v], heads 12 wide
    rows = {"q": grouped[:, :2], "k": grouped[:, 2:3], "v": grouped[:, 3:]}
    for part, expected in rows.items():
        before = qkv.weight.detach().clone()
        begin(dit, AdapterConfig(rank=2, targets=(f"blocks.0.self_attention.{part}",), kind=kind))
        train_a_little(dit)
        merge(dit)
        changed = (qkv.weight != before).any(1).nonzero().flatten()
        assert changed.tolist() == expected.flatten().tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_zero_removed_saved_and_loaded(kind):
    dit, adapter = network(), everywhere(kind)
    base = output(dit)
    begin(dit, adapter)
    train_a_little(dit)
    adapted = output(dit)
    state = {key: value.clone() for key, value in adapter_state(dit).items()}
    set_scale(dit, 0.0)
    assert torch.equal(output(dit), base)
    remove(dit)
    assert torch.equal(output(dit), base)
    load_adapter(dit, state, adapter, "again")
    assert torch.equal(output(dit), adapted)
    assert torch.equal(output(copy.deepcopy(dit)), adapted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_adapters_and_scales(kind):
    """Two adapters, other scales in each sample: each sample is as with its own scales alone."""
    dit = network()
    for seed, name in enumerate(("one", "two")):
        begin(dit, everywhere(kind), name)
        train_a_little(dit, name, seed)
    scales = {"one": torch.tensor([1.0, 0.25]), "two": torch.tensor([0.0, 0.5])}
    for name, scale_B in scales.items():
        set_scale(dit, scale_B, name)
    both = output(dit)
    for index in range(2):
        for name, scale_B in scales.items():
            set_scale(dit, scale_B[index].item(), name)
        torch.testing.assert_close(both[index], output(dit)[index], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(both[0], both[1])


def test_adapters_come_and_go():
    """Ten loaded and dropped: no tensor is left."""
    dit, adapter = network(), AdapterConfig(rank=2)
    begin(dit, adapter)
    state = {key: value.clone() for key, value in adapter_state(dit).items()}
    remove(dit)

    def tensors():
        gc.collect()
        return sum(type(each) in (torch.Tensor, torch.nn.Parameter) for each in gc.get_objects())

    before = tensors()
    for _ in range(10):
        load_adapter(dit, state, adapter)
        remove(dit)
    assert tensors() == before
    assert not any(module._forward_hooks for module in dit.modules())


RESIDENT = """
import gc
from pathlib import Path
import torch
from megadit.models.configs.adapter import AdapterConfig
from megadit.models.lora.adapters import adapter_state, attach, load_adapter, remove
from megadit.models.configs.config import DiTConfig
from megadit.models.networks.dit import DiT

def resident():
    gc.collect()
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024

torch.set_num_threads(1)
dit = DiT(DiTConfig(num_layers=2, hidden_size=256, num_attention_heads=4, crossattn_emb_size=16))
adapter = AdapterConfig(rank=64)
attach(dit, adapter)
state = {key: torch.ones(value.shape) for key, value in adapter_state(dit).items()}
remove(dit)
kept = []

def grown(times, keep=False):
    before = resident()
    for number in range(times):
        load_adapter(dit, state, adapter, f"number{number}")
        if keep:
            kept.append(adapter_state(dit, f"number{number}"))
        remove(dit, f"number{number}")
    return resident() - before

grown(5)
print(grown(100), grown(20, keep=True), sum(value.nbytes for value in state.values()) / 2**20)
"""


def test_a_process_stays_as_large_when_adapters_come_and_go():
    """Of a hundred of 3 MB resident memory grows by less than three; of twenty that somebody keeps by nearly all."""
    done = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    dropped, kept, of_one = map(float, done.stdout.split())
    assert of_one > 2 and dropped < 3 * of_one and kept > 16 * of_one, (dropped, kept, of_one)


def test_the_base_gets_no_gradient_and_every_tensor_of_the_adapter_one():
    dit = network("megadit")
    begin(dit, everywhere("dora"))
    train_a_little(dit)
    train_adapter_only(dit, torch.float32)
    compute(dit).square().sum().backward()
    for name, parameter in dit.named_parameters():
        assert (parameter.grad is not None and parameter.grad.norm() > 0) == (adapter_key(name) is not None), name


def test_dropout_is_drawn_for_a_step_and_is_for_training_alone():
    dit = network()
    begin(dit, AdapterConfig(rank=2, targets=("blocks.*",)))
    train_a_little(dit)
    plain = output(dit)

    def masks(step):
        draw_dropout(dit, 0.25, seed=3, step=step)
        found = [module.is_active_I for module in dit.modules() if isinstance(module, low_rank.LowRank)]
        assert {value.item() for mask in found for value in mask} == {0.0, torch.tensor(4 / 3).item()}
        return torch.cat(found)

    first, second = masks(1), masks(2)
    assert torch.equal(masks(1), first) and not torch.equal(first, second)
    assert ((first == 0).float().mean() - 0.25).abs() < 0.05
    assert torch.equal(output(dit), plain), "without a backward nothing is dropped"
    assert not torch.equal(compute(dit), plain)


def test_targets_have_names_of_their_own():
    targets = targets_of(network("experts").config)
    assert {"x_embedder", "text_embedder", "blocks.0.self_attention.k", "blocks.0.cross_attention.v"} <= set(targets)
    assert {name for name in targets if ".mlp." in name} == {
        "blocks.0.mlp.shared.fc1",
        "blocks.0.mlp.shared.fc2",
    }
    chosen = chosen_targets(network().config, AdapterConfig(rank=1).targets)
    assert {name.split(".")[2] for name in chosen} == {"self_attention", "cross_attention", "mlp"}
    assert len(chosen) == 4 + 4 + 2


def test_a_pattern_that_names_nothing():
    with pytest.raises(UserError, match=r"named 'blocks\.\*\.self_atention\.q'; did you mean 'blocks\.0\.self_attent"):
        attach(network(), AdapterConfig(rank=1, targets=("blocks.*.self_atention.q",)))


def test_an_adapter_of_another_network_is_refused_and_nothing_changes():
    dit, adapter = network(), AdapterConfig(rank=2)
    begin(dit, adapter)
    state = {key: value.clone() for key, value in adapter_state(dit).items()}
    remove(dit)
    wrong = {
        r"'blocks\.0\.self_attention\.query' is not a linear of it; did you mean 'blocks\.0\.self_attention\.q'": {
            "blocks.0.self_attention.query.down": torch.zeros(2, 48)
        },
        r"blocks\.0\.mlp\.fc1\.up is \[3, 4\], not \[192, 2\]": {"blocks.0.mlp.fc1.up": torch.zeros(3, 4)},
        r"blocks\.0\.mlp\.fc2\.down has values that are not finite": {
            "blocks.0.mlp.fc2.down": torch.full((2, 192), torch.nan)
        },
        r"blocks\.0\.mlp\.fc2\.magnitude does not belong to a lora": {"blocks.0.mlp.fc2.magnitude": torch.ones(48)},
    }
    for message, changed in wrong.items():
        with pytest.raises(UserError, match=message):
            load_adapter(dit, state | changed, adapter)
    with pytest.raises(UserError, match="it has no tensors"):
        load_adapter(dit, {}, adapter)
    with pytest.raises(UserError, match=r"q\.magnitude is missing"):
        load_adapter(dit, state, AdapterConfig(rank=2, kind="dora"))
    assert not adapter_names(dit)


def test_one_name_is_given_once():
    dit = network()
    attach(dit, AdapterConfig(rank=1))
    with pytest.raises(UserError, match="an adapter named 'adapter' already"):
        attach(dit, AdapterConfig(rank=1))


def test_a_fingerprint_tells_weights_apart_in_any_precision():
    def of(dit):
        state = dit.state_dict()
        return fingerprint(state, state.__getitem__)

    dit = network()
    assert of(dit) == of(copy.deepcopy(dit).bfloat16())
    assert of(dit) != of(network(seed=1))
    begin(dit, AdapterConfig(rank=2))
    train_a_little(dit)
    before = of(network())
    merge(dit)
    assert of(dit) != before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, r"train\.adapter\.rank=0 must be greater than 0"),
        ({"rank": 2, "alpha": 0.0}, r"train\.adapter\.alpha=0 must be greater than 0"),
        ({"rank": 2, "dropout": 1.0}, r"train\.adapter\.dropout=1 must be"),
    ],
)
def test_what_no_adapter_can_be(settings, message):
    with pytest.raises(UserError, match=message):
        AdapterConfig(**settings)
