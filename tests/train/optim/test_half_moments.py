"""AdamW with bfloat16 moments in Megatron's wrappers: it trains, and a continued run goes on to the last bit."""

import json
from pathlib import Path

import pytest

JOB = Path(__file__).parents[1] / "jobs" / "chain.py"
LAYOUTS = {
    "ddp": {"parallel": {"data_parallel": "ddp"}},
    "ddp, bf16": {"parallel": {"data_parallel": "ddp"}, "precision": "bf16"},
    "distributed optimizer, bf16": {"parallel": {"data_parallel": "distributed_optimizer"}, "precision": "bf16"},
    "fsdp": {"parallel": {"data_parallel": "fsdp"}},
}

pytestmark = pytest.mark.slow


def case(name, moments="bf16"):
    return LAYOUTS[name] | {"optimizer": {"moments": moments, "adam_beta2": 0.999}}


@pytest.fixture(scope="module")
def out(run_ranks, tmp_path_factory):
    out = tmp_path_factory.mktemp("moments")
    runs = [{"folder": "fp32", "iters": 6, "case": case("ddp", "fp32")}]
    for name in LAYOUTS:
        runs.append({"folder": f"whole {name}", "iters": 6, "case": case(name)})
        runs += [{"folder": f"parts {name}", "iters": iters, "case": case(name)} for iters in (3, 6)]
    (out / "runs.json").write_text(json.dumps(runs))
    run_ranks(1, JOB, out, timeout=560)
    return out


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_in_two_parts_is_the_run_in_one(name, out):
    assert losses(out / f"parts {name}") == losses(out / f"whole {name}")


def test_it_trains_as_float32_moments_do(out):
    theirs, ours = losses(out / "fp32"), losses(out / "whole ddp")
    assert ours[0] == theirs[0] and ours[1:] != theirs[1:]
    # one rounding of a moment moves an update by up to 2^-8 of itself; five updates move the loss by some per cent
    assert ours == pytest.approx(theirs, rel=2e-3)
