"""A run may change its layout whenever it is continued: its losses stay those of one rank."""

import json
from itertools import permutations
from pathlib import Path

import pytest

JOB = Path(__file__).parent / "jobs" / "chain.py"

pytestmark = pytest.mark.slow

TP = {"tensor_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2}
DISTRIBUTED = {"data_parallel": "distributed_optimizer"}
LAYOUTS = {
    "distributed optimizer": DISTRIBUTED,
    "tp, sp, cp": {**TP, **CP, "sequence_parallel": True},
    "vpp, distributed optimizer": {**PP, "virtual_pipeline_model_parallel_size": 2, **DISTRIBUTED},
    "fsdp, ring": {**CP, "context_parallel_comm": "ring", "data_parallel": "fsdp"},
    "pp4": {"pipeline_model_parallel_size": 4},
    "tp, sp, fsdp": {**TP, "sequence_parallel": True, "data_parallel": "fsdp"},
}
"""On four ranks, in turn."""
PAIRED = {
    "distributed optimizer": DISTRIBUTED,
    "tp, sp": {**TP, "sequence_parallel": True},
    "ring": {**CP, "context_parallel_comm": "ring"},
    "vpp": {**PP, "virtual_pipeline_model_parallel_size": 2},
    "fsdp": {"data_parallel": "fsdp"},
}
"""On two ranks, each after each other."""
STEPS = 10
FEW = 3


def run_all(run_ranks, count, out, runs):
    (out / "runs.json").write_text(json.dumps(runs))
    run_ranks(count, JOB, out, timeout=560)


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def expected(run_ranks, tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    run_all(run_ranks, 1, out, [{"folder": "run", "iters": STEPS * len(LAYOUTS), "case": {}}])
    return losses(out / "run")


@pytest.fixture(scope="module")
def chain(run_ranks, tmp_path_factory):
    """A run through all layouts, in turn."""
    out = tmp_path_factory.mktemp("four")
    cases = [{"parallel": parallel} for parallel in LAYOUTS.values()]
    runs = [{"folder": "chain", "iters": STEPS * (place + 1), "case": case} for place, case in enumerate(cases)]
    run_all(run_ranks, 4, out, runs)
    return losses(out / "chain")


@pytest.fixture(scope="module")
def pairs(run_ranks, tmp_path_factory):
    """Each layout for a few steps, and after it each other."""
    out = tmp_path_factory.mktemp("pairs")
    cases = {name: {"parallel": parallel} for name, parallel in PAIRED.items()}
    runs = []
    for before, case in cases.items():
        runs.append({"folder": before, "iters": FEW, "case": case})
        for after, other in cases.items():
            if after != before:
                folder = f"{before} to {after}"
                runs.append({"folder": folder, "iters": 2 * FEW, "case": other, "copy_of": before})
    run_all(run_ranks, 2, out, runs)
    return out


def test_a_chain_of_layouts(chain, expected):
    assert chain == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("before", "after"), permutations(PAIRED, 2))
def test_every_layout_after_every_other(pairs, expected, before, after):
    found = losses(pairs / f"{before} to {after}")
    assert len(found) == 2 * FEW, "more than one step: the first hides a wrong state of Adam"
    assert found == pytest.approx(expected[: 2 * FEW], rel=1e-5)
