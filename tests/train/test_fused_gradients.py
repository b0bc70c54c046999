"""`parallel.gradient_accumulation_fusion`: the same gradients, added to their sums by the products that make them."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.core.tensor_parallel import layers
from torch._subclasses.fake_tensor import FakeTensorMode

from megadit.models.megatron import extensions
from megadit.models.megatron.linears import gradient_sums
from megadit.models.shared.errors import UserError
from megadit.train.config.rules import check_inputs
from megadit.train.config.schema import ParallelConfig
from megadit.train.recipes import load_recipe

JOB = Path(__file__).parent / "jobs" / "fused_gradients.py"
LINEARS = ("qkv", "proj", "q", "kv", "fc1", "fc2")
CASES = {
    "two copies": {"parallel": {}},
    "two copies, reduced at the end": {"parallel": {"overlap_grad_reduce": False}},
    "distributed optimizer, bf16": {"precision": "bf16", "parallel": {"data_parallel": "distributed_optimizer"}},
    "two halves of each matrix": {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
    "blocks computed again": {"parallel": {"recompute_granularity": "full"}},
}


@pytest.fixture(scope="module")
def found(run_ranks, tmp_path_factory):
    """On two ranks; sums hold NaN before the step, which only what is zeroed, or overwritten, loses."""
    output, _ = run_ranks(2, JOB, tmp_path_factory.mktemp("fused"), json.dumps(CASES))
    return json.loads(output.splitlines()[-1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in for the product is for CPUs")
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_same(found, name):
    # float32: the same products, added up in another order; bfloat16: the plain ones are rounded before they are added
    assert found[name]["apart"] < (1e-2 if "bf16" in name else 1e-5), found[name]["which"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in for the product is for CPUs")
def test_every_linear_of_a_block_is_fused_and_nothing_else(found):
    for name in CASES:
        assert found[name]["otherwise"] == []
        assert len(found[name]["fused"]) == 2 * 7  # layers, linears of a block
        assert {key.split(".")[-2] for key in found[name]["fused"]} == set(LINEARS)
    assert found["calls"] > len(CASES) * 2 * 7


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in for the product is for CPUs")
def test_what_products_overwrite_is_not_zeroed(found):
    """But where a step gives it nothing."""
    assert all(told["unzeroed"] == told["fused"] for told in (found[name] for name in CASES))
    assert found["two copies, reduced at the end"]["of nothing"] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in for the product is for CPUs")
def test_a_wrong_product_is_seen(run_ranks, tmp_path):
    [output] = run_ranks(1, JOB, tmp_path, json.dumps({"one": {}}), "0.5")
    assert json.loads(output.splitlines()[-1])["one"]["apart"] > 0.1


def with_fusion(**parallel):
    run = load_recipe("digits_tiny")
    return replace(run, parallel=ParallelConfig(gradient_accumulation_fusion=True, **parallel))


def test_refused_where_the_extension_is_not_installed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(extensions, "find_spec", lambda name: None)
    monkeypatch.setattr(extensions, "has_torch_product", lambda: False)
    with pytest.raises(UserError, match=r"gradient_accumulation_fusion=true needs .*fused_weight_gradient_mlp_cuda"):
        check_inputs(with_fusion())
    monkeypatch.setattr(extensions, "find_spec", lambda name: name)
    assert extensions.has_gradient_accumulation_fusion()
    monkeypatch.setattr(extensions, "find_spec", lambda name: None)
    monkeypatch.setattr(extensions, "has_torch_product", lambda: True)
    assert extensions.has_gradient_accumulation_fusion()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="needs a GPU"):
        check_inputs(with_fusion())


def test_torch_takes_the_product_s_place_where_apex_is_missing(monkeypatch):
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", None, raising=False)
    gradient_sums.give_megatron_a_product()
    assert layers._grad_accum_fusion_available
    x, grad, total = torch.randn(7, 5), torch.randn(7, 3), torch.ones(3, 5)
    layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(x, grad, total)
    torch.testing.assert_close(total, 1 + grad.t() @ x)
    total.fill_(torch.nan).is_of_before = True
    for times in (1, 2):
        gradient_sums.add_weight_gradient(x, grad, total)
        torch.testing.assert_close(total, times * grad.t() @ x)


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a torch that was built for CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torch_has_such_a_product_for_gpus(dtype):
    """Of tensors that a GPU would hold: types and shapes are checked, nothing is computed."""
    with FakeTensorMode():
        x, grad = (torch.empty(16, width, dtype=dtype, device="cuda") for width in (32, 48))
        total = torch.empty(48, 32, device="cuda")
        gradient_sums.add_weight_gradient(x, grad, total)
    assert total.shape == (48, 32) and total.dtype == torch.float32 and extensions.has_torch_product()


def test_refused_with_fsdp():
    with pytest.raises(
        UserError, match="gradient_accumulation_fusion=true .*data_parallel=fsdp.*distributed_optimizer"
    ):
        with_fusion(data_parallel="fsdp")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kit", ["local", "transformer_engine"])
def test_gradients_are_the_same_on_a_gpu(tmp_path, kit):
    if kit == "local" and not extensions.has_gradient_accumulation_fusion():
        pytest.skip("needs torch 2.8, or fused_weight_gradient_mlp_cuda of NVIDIA's apex")
    if kit == "transformer_engine" and not extensions.has_transformer_engine():
        pytest.skip("needs TransformerEngine (megadit[te])")
    case = {"precision": "bf16", "parallel": {"transformer_impl": kit}}
    command = [sys.executable, JOB, tmp_path, json.dumps({kit: case})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])[kit]
    assert found["apart"] < 1e-2, found["which"]
    assert len(found["fused"]) == 2 * 7
