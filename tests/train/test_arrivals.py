"""Whatever reads a micro-batch waits for its copy first: steps, critics and validations."""

import json
import math
from pathlib import Path

import pytest

from .test_whole_step import cases_of

JOB = Path(__file__).parent / "jobs" / "arrivals.py"
NAMES = ("plain", "conditioning", "vit", "distilled, matching")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(run_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("arrivals")
    cases = cases_of(1, folder)
    [output] = run_ranks(1, JOB, folder, json.dumps({name: cases[name] for name in NAMES}))
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_that_come_late_train_alike(found, name):
    at_once, late = found[name]
    assert late == at_once and all(math.isfinite(loss) for loss in late if loss is not None)


def test_what_is_read_too_early_is_seen(found):
    at_once, early = found["control"]
    assert math.isfinite(at_once[0]) and not math.isfinite(early[0])
