"""Every layout trains the same network: TorchLayers = Megatron on one rank = data parallel = TP = TP with SP.

All tensors are random and every gradient must differ from zero, so that nothing wrong can hide behind adaLN-Zero.
"""

import json
from pathlib import Path

import pytest
import safetensors.torch

JOB = Path(__file__).parent / "jobs" / "layouts.py"
ONE_RANK = ("torch", "ddp", "distributed_optimizer", "ddp-muon")
TWO_RANKS = (
    *("ddp", "distributed_optimizer", "tp", "sp"),
    *("ddp-muon", "tp-muon", "distributed_optimizer-muon", "sp-unmarked", "tp-unsummed"),
)


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(run_ranks, tmp_path_factory):
    """{(ranks, layout): (tensors, losses and gradient norms)} of two jobs."""
    found = {}
    for count, names in ((1, ONE_RANK), (2, TWO_RANKS)):
        out = tmp_path_factory.mktemp(f"ranks{count}")
        run_ranks(count, JOB, out, *names)
        for name in names:
            tensors = safetensors.torch.load_file(out / f"{name}.safetensors")
            found[count, name] = tensors, json.loads((out / f"{name}.json").read_text())
    return found


def difference(a, b, prefix):
    """The largest relative distance of two layouts' tensors, over the tensors."""
    keys = [key for key in a if key.startswith(prefix)]
    assert keys and keys == [key for key in b if key.startswith(prefix)]
    return max(((a[key] - b[key]).norm() / a[key].norm()).item() for key in keys)


def relative(a, b):
    return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))


def test_every_parameter_has_a_gradient(results):
    gradients = results[1, "torch"][0]
    assert all(gradient.norm() > 1e-6 for gradient in gradients.values())
    assert "grad.dit.null_text" in gradients and "grad.uncertainty.linear.weight" in gradients


def test_megatron_on_one_rank_is_torch(results):
    (torch_tensors, torch_numbers), (tensors, numbers) = results[1, "torch"], results[1, "ddp"]
    # the same operations; Megatron adds gradients of micro-batches into a buffer and divides afterwards
    assert difference(torch_tensors, tensors, "grad.") < 1e-6
    assert relative(torch_numbers["loss"], numbers["loss"][:1]) < 1e-6


# Sums over tokens or features are taken in parts: float32 rounds them otherwise, by about 1e-7 of their size, and
# small gradients are differences of large ones.
@pytest.mark.parametrize(("layout", "tolerance"), [("ddp", 1e-5), ("tp", 1e-5), ("sp", 1e-5)])
def test_two_ranks_have_the_gradients_of_one(results, layout, tolerance):
    assert difference(results[1, "ddp"][0], results[2, layout][0], "grad.") < tolerance


@pytest.mark.parametrize("layout", ["ddp", "distributed_optimizer"])
def test_data_parallel_steps_are_those_of_one_rank(results, layout):
    one, two = results[1, layout][1], results[2, layout][1]
    assert relative(one["loss"], two["loss"]) < 1e-6
    assert relative(one["grad_norm"], two["grad_norm"]) < 1e-6


@pytest.mark.parametrize("layout", ["tp", "sp"])
def test_tensor_parallel_steps_are_those_of_one_rank(results, layout):
    one, two = results[1, "ddp"][1], results[2, layout][1]
    assert relative(one["loss"], two["loss"]) < 1e-5
    assert relative(one["grad_norm"], two["grad_norm"]) < 1e-5


@pytest.mark.parametrize("layout", ["tp", "sp"])
def test_replicas_stay_equal(results, layout):
    assert results[2, layout][1]["spread"] == 0
    assert results[2, "tp-unsummed"][1]["spread"] > 1e-5


def test_the_distributed_optimizer_changes_nothing(results):
    assert relative(results[1, "ddp"][1]["loss"], results[2, "distributed_optimizer"][1]["loss"]) < 1e-6


@pytest.mark.parametrize("layout", ["ddp", "distributed_optimizer", "tp"])
def test_muon_on_two_ranks_is_muon_on_one(results, layout):
    (one_tensors, one), (two_tensors, two) = results[1, "ddp-muon"], results[2, f"{layout}-muon"]
    # orthogonalised in bfloat16, where a last bit of the gradient can turn into 1e-2 of an update; updates are 1e-3
    # of the learning rate's scale, weights 0.1
    assert difference(one_tensors, two_tensors, "weight.") < 1e-3
    assert relative(one["loss"], two["loss"]) < 1e-4
    assert relative(one["grad_norm"], two["grad_norm"]) < 1e-3


def test_a_forgotten_mark_or_sum_is_seen(results):
    expected = results[1, "ddp"][0]
    assert difference(expected, results[2, "sp-unmarked"][0], "grad.") > 0.1
    assert difference(expected, results[2, "tp-unsummed"][0], "grad.") > 0.1
