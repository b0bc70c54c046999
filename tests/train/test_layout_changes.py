"""A run may change its layout and its number of ranks whenever it is continued: its losses stay those of one rank."""

import json
from itertools import groupby
from operator import itemgetter
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
LAYOUTS = [
    (2, "distributed optimizer", DISTRIBUTED),
    (2, "tp, sp", SP),
    (2, "ring", RING),
    (2, "vpp", VPP),
    (2, "fsdp", FSDP),
    (4, "tp, cp", {**TP, **CP}),
    (4, "pp, tp, sp", {**PP, **SP}),
    (4, "fsdp, tp, sp", {**SP, **FSDP}),
    (4, "vpp, distributed optimizer", {**VPP, **DISTRIBUTED}),
    (4, "fsdp, ring", {**RING, **FSDP}),
    (4, "ring, distributed optimizer", {**RING, **DISTRIBUTED}),
    (4, "pp4", {"pipeline_model_parallel_size": 4}),
    (2, "sp after four stages", SP),
    (1, "one rank", {}),
    (4, "four copies after one", {}),
]
"""(ranks, name, layout), in turn: who reads a checkpoint does not know who wrote it."""
STEPS = 2
"""Under each: more than one, as the first hides a wrong state of Adam."""


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
def found(run_ranks, tmp_path_factory):
    """Losses of a run through all layouts."""
    out = tmp_path_factory.mktemp("changes")
    runs = [
        (ranks, {"folder": "run", "iters": STEPS * place, "case": {**DEEP, "parallel": layout}})
        for place, (ranks, _, layout) in enumerate(LAYOUTS, start=1)
    ]
    for ranks, together in groupby(runs, key=itemgetter(0)):
        run_all(run_ranks, ranks, out, [run for _, run in together])
    return losses(out / "run")


@pytest.mark.parametrize("name", [name for _, name, _ in LAYOUTS])
def test_every_layout_continues_what_another_began(found, expected, name):
    assert len(found) == len(expected)
    first = STEPS * [each for _, each, _ in LAYOUTS].index(name)
    assert found[first : first + STEPS] == pytest.approx(expected[first : first + STEPS], rel=1e-5)
