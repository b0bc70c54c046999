"""Where the tolerances come from: F of one network, computed twice with the same roundings but other arithmetic.

Halves against the same weights in float32 is what two runtimes differ by at the very most, as both round results. Of
8 bits both round what products read, so that what is left are halves, and numbers rounded to the other neighbour.
"""

import copy
import dataclasses

import pytest
import torch

from megadit.export import signatures as contract
from megadit.export import verify
from megadit.export.layers import relative_error
from megadit.export.networks import build_network
from megadit.export.quantize import FORMATS, quantised_linears, round_linears
from megadit.export.references import inputs_at, reference
from tests.bundles import CONFIG, write_tiny_bundle

SIGMAS = (0.002, 0.2, 5.0, 80.0)


@pytest.fixture(scope="module", params=[2, 12], ids="{} layers".format)
def bundle(request, tmp_path_factory):
    config = dataclasses.replace(CONFIG, num_layers=request.param)
    return write_tiny_bundle(tmp_path_factory.mktemp("deep") / "bundle", config)


def random_network(bundle):
    """Every tensor random; without a layer that starts as nothing."""
    network = build_network("denoiser", bundle, bundle.load_tokenizer(), torch.float32)
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    return network


def random_and_real_inputs(bundle, spec):
    sizes = {name: axis.opt for name, axis in spec.axes.items()}
    return [contract.sample_inputs(spec, sizes, seed=0), *(inputs_at(spec, sigma, bundle) for sigma in SIGMAS)]


def raw(network, inputs):
    return reference(network, "", inputs).F


def distance(one, two, inputs):
    """Of the sample that differs most."""
    return max(max(map(relative_error, raw(one, values), raw(two, values))) for values in inputs)


def in_type(network, dtype):
    network = copy.deepcopy(network)
    network.denoiser.dit.to(dtype)
    return network


def largest_inputs(network, inputs):
    linears = quantised_linears(network.denoiser.dit)
    largest = dict.fromkeys(linears, 0.0)

    def record(name):
        def hook(module, args):
            largest[name] = max(largest[name], args[0].abs().max().item())

        return hook

    handles = [linear.register_forward_pre_hook(record(name)) for name, linear in linears.items()]
    for values in inputs:
        raw(network, values)
    for handle in handles:
        handle.remove()
    return largest


def test_halves_keep_their_distance(bundle, specs):
    network, inputs = random_network(bundle), random_and_real_inputs(bundle, specs["denoiser"])
    for precision, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        low = in_type(network, dtype)
        found, tolerance = distance(low, in_type(low, torch.float32), inputs), verify.TOLERANCES[precision]
        print(f"{precision}: {found:.1e} of {tolerance:.1e}")
        assert tolerance / 20 < found < tolerance / 2


@pytest.mark.parametrize("precision", FORMATS)
def test_eight_bits_keep_their_distance(bundle, specs, precision):
    inputs = random_and_real_inputs(bundle, specs["denoiser"])
    half = in_type(random_network(bundle), torch.float16)
    ranges = largest_inputs(half, inputs[1:])
    low = copy.deepcopy(half)
    round_linears(low.denoiser.dit, ranges, precision)
    found, tolerance = distance(low, in_type(low, torch.float32), inputs), verify.TOLERANCES[precision]
    cost, most = distance(low, half, inputs[1:]), verify.ROUNDING_COSTS[precision]
    print(f"{precision}: {found:.1e} of {tolerance:.1e}; costs {cost:.1e} of {most:.1e}")
    assert tolerance / 20 < found < tolerance / 1.3 and most / 20 < cost < most / 1.5
