"""A run may change its layout whenever it is continued: its losses stay those of one rank."""

import json
from functools import cache
from pathlib import Path

import pytest

JOB = Path(__file__).parent / "jobs" / "chain.py"

pytestmark = pytest.mark.slow

TP = {"tensor_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2}
SP = {**TP, "sequence_parallel": True}
RING = {**CP, "context_parallel_comm": "ring"}
VPP = {**PP, "virtual_pipeline_model_parallel_size": 2}
DISTRIBUTED = {"data_parallel": "distributed_optimizer"}
FSDP = {"data_parallel": "fsdp"}
DEEP = {"model": {"num_layers": 4}}
"""Enough for four stages."""
LAYOUTS = {
    "distributed optimizer": DISTRIBUTED,
    "tp, sp, cp": {**SP, **CP},
    "vpp, distributed optimizer": {**VPP, **DISTRIBUTED},
    "fsdp, ring": {**RING, **FSDP},
    "pp4": {"pipeline_model_parallel_size": 4},
    "tp, sp, fsdp": {**SP, **FSDP},
}
"""On four ranks, in turn."""


def pairs_of(ranks):
    """Each with the next in a circle."""
    names = list(PAIRED[ranks])
    return list(zip(names, [*names[1:], names[0]], strict=True))


PAIRED = {
    2: {
        "distributed optimizer": DISTRIBUTED,
        "tp, sp": SP,
        "ring": RING,
        "vpp": VPP,
        "fsdp": FSDP,
    },
    4: {
        "tp, cp": {**TP, **CP},
        "pp, tp, sp": {**PP, **SP},
        "fsdp, tp, sp": {**SP, **FSDP},
        "vpp, distributed optimizer": {**VPP, **DISTRIBUTED},
        "ring, distributed optimizer": {**RING, **DISTRIBUTED},
    },
}
"""On so many ranks, each before and after others: who reads a checkpoint does not know who wrote it."""
PAIRS = [(ranks, *pair) for ranks in PAIRED for pair in pairs_of(ranks)]
ACROSS = list(zip(PAIRED[2], PAIRED[4], strict=True))
"""On four ranks, after those on two."""
STEPS = 2
FEW = 2


def run_all(run_ranks, count, out, runs):
    (out / "runs.json").write_text(json.dumps(runs))
    run_ranks(count, JOB, out, timeout=560)


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def expected(run_ranks, tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    run_all(run_ranks, 1, out, [{"folder": "run", "iters": STEPS * len(LAYOUTS), "case": DEEP}])
    return losses(out / "run")


@pytest.fixture(scope="module")
def chain(run_ranks, tmp_path_factory):
    """A run through all layouts, in turn."""
    out = tmp_path_factory.mktemp("four")
    cases = [{**DEEP, "parallel": parallel} for parallel in LAYOUTS.values()]
    runs = [{"folder": "chain", "iters": STEPS * (place + 1), "case": case} for place, case in enumerate(cases)]
    run_all(run_ranks, 4, out, runs)
    return losses(out / "chain")


@pytest.fixture(scope="module")
def pairs(run_ranks, tmp_path_factory):
    """pairs(ranks): the folder of runs with each layout for a few steps, and after it each other."""

    @cache
    def get(ranks):
        out = tmp_path_factory.mktemp("pairs")
        cases = {name: {**DEEP, "parallel": parallel} for name, parallel in PAIRED[ranks].items()}
        runs = [{"folder": name, "iters": FEW, "case": case} for name, case in cases.items()]
        changes = [(before, before, after) for before, after in pairs_of(ranks)]
        if ranks == 4:
            changes += [(before, str(get(2) / before), after) for before, after in ACROSS]
        for before, copy_of, after in changes:
            folder = f"{before} to {after}"
            runs.append({"folder": folder, "iters": 2 * FEW, "case": cases[after], "copy_of": copy_of})
        run_all(run_ranks, ranks, out, runs)
        return out

    return get


def test_a_chain_of_layouts(chain, expected):
    assert chain == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("ranks", "before", "after"), [*PAIRS, *((4, *pair) for pair in ACROSS)])
def test_every_layout_after_every_other(pairs, expected, ranks, before, after):
    found = losses(pairs(ranks) / f"{before} to {after}")
    assert len(found) == 2 * FEW, "more than one step: the first hides a wrong state of Adam"
    assert found == pytest.approx(expected[: 2 * FEW], rel=1e-5)
