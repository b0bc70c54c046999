"""Slots of exported networks: adapters as inputs change what adapters beside the linears change."""

from dataclasses import replace

import pytest
import torch

from megadit.models.diffusion.parameterization import EDMDenoiser
from megadit.models.lora.adapters import adapter_state, load_adapter, remove, set_scale
from megadit.models.lora.inputs import AdapterInputLinears, AdapterInputs
from megadit.models.networks.conditioning import CleanLatents, Conditioning
from megadit.models.networks.dit import DiT
from megadit.models.shared.errors import UserError

from .test_adapters import NETWORKS, begin, everywhere, network, output, train_a_little

SCALES = {"one": torch.tensor([1.0, 0.25]), "two": torch.tensor([0.0, -0.5])}


def adapters_of(dit):
    """Two adapters of every linear, and the room for both."""
    states = {}
    for seed, name in enumerate(SCALES):
        begin(dit, everywhere("lora"), name)
        train_a_little(dit, name, seed)
        states[name] = {key: value.clone() for key, value in adapter_state(dit, name).items()}
        remove(dit, name)
    return states, AdapterInputs(config=dit.config, rank=6, targets=("*",))


def filled(slots, states):
    packed = [(slots.packed(states[name], everywhere("lora")), scale_B) for name, scale_B in SCALES.items()]
    return slots.filled(2, packed)


@pytest.mark.parametrize(
    ("name", "dtype"), [("megadit", torch.bfloat16), *((name, torch.float32) for name in NETWORKS)]
)
@torch.no_grad()
def test_slots_are_adapters(name, dtype):
    """Of every linear of every family, others in each sample; empty ones are the base bit for bit."""
    dit = network(name).to(dtype)
    base = output(dit)
    states, slots = adapters_of(dit)
    slotted = AdapterInputLinears(dit, slots)
    inputs = filled(slots, states)
    with slotted.filled(tuple(inputs.values())):
        found = output(dit)
    with slotted.filled(tuple(torch.zeros_like(value) for value in inputs.values())):
        assert torch.equal(output(dit), base)
    assert torch.equal(output(dit), base), "nothing stays"
    for name, state in states.items():
        load_adapter(dit, state, everywhere("lora"), name)
        set_scale(dit, SCALES[name].clone(), name)
    expected, tolerance = output(dit), {torch.bfloat16: 3e-2, torch.float32: 1e-5}[dtype]
    assert found.dtype == expected.dtype == dtype, "scales of samples change no precision"
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert (expected - base).norm() > 0.05 * base.norm(), "negative control"


@torch.no_grad()
def test_conditions_that_come_twice_get_the_adapters_of_their_samples():
    """A noise level of its own for what is given: twice as many rows as samples."""
    plain = network()
    dit = DiT(replace(plain.config, conditioning_sigma=0.02))
    dit.load_state_dict(plain.state_dict())
    denoiser, generator = EDMDenoiser(dit.eval()), torch.Generator().manual_seed(3)
    x_BCTHW = torch.randn(2, 2, 2, 8, 8, generator=generator)
    is_clean_THW = torch.zeros(2, 8, 8, dtype=torch.bool)
    is_clean_THW[0] = True
    given = CleanLatents(torch.randn(2, 2, 2, 8, 8, generator=generator), is_clean_THW)
    text_BLE = torch.rand(2, 3, dit.config.crossattn_emb_size, generator=generator)
    conditioning = Conditioning(text_BLE, torch.tensor([3, 0]), torch.tensor([8.0, 8.0]), clean=given)
    states, slots = adapters_of(dit)
    with AdapterInputLinears(dit, slots).filled(tuple(filled(slots, states).values())):
        found = denoiser(x_BCTHW, torch.tensor([1.0, 2.0]), conditioning)
    base = denoiser(x_BCTHW, torch.tensor([1.0, 2.0]), conditioning)
    for name, state in states.items():
        load_adapter(dit, state, everywhere("lora"), name)
        set_scale(dit, SCALES[name], name)
    expected = denoiser(x_BCTHW, torch.tensor([1.0, 2.0]), conditioning)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (expected - base).abs().max() > 1e-2


def test_what_has_no_room_is_told():
    dit = network()
    states, slots = adapters_of(dit)
    begin(dit, everywhere("dora"), "dora")
    with pytest.raises(UserError, match="a DoRA scales the output of its base"):
        slots.packed(adapter_state(dit, "dora"), everywhere("dora"))
    with pytest.raises(UserError, match="rank 3 together, the exported networks at most 2"):
        replace(slots, rank=2).packed(states["one"], everywhere("lora"))
    with pytest.raises(UserError, match="was exported without inputs for adapters"):
        replace(slots, targets=("blocks.*",)).packed(states["one"], everywhere("lora"))
    with pytest.raises(UserError, match="rank 6 together, the exported networks at most 5"):
        filled(replace(slots, rank=5), states)
    with pytest.raises(UserError, match="no linear of the network is named 'blcks"):
        replace(slots, targets=("blcks.*",)).inputs  # noqa: B018
