"""The worked examples of docs/extend.md run as they stand there."""

import re
from pathlib import Path

import pytest

from megadit.infer.evaluate.metrics.table import METRICS
from megadit.infer.sampling.samplers import SAMPLERS
from megadit.models.configs.families import CONDITIONING_MODES, FAMILIES
from megadit.models.diffusion import settings
from megadit.models.ops.registry import OPS
from megadit.train.objectives.registry import OBJECTIVES
from megadit.train.recipes import RECIPES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "extend.md"
EXAMPLES = dict(re.findall(r"^```python (\w+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))


@pytest.fixture(autouse=True)
def tables_stay_as_they_are():
    tables = [SAMPLERS, settings.SAMPLERS, OBJECTIVES, CONDITIONING_MODES, FAMILIES, RECIPES, METRICS]
    tables += [op.variants for op in OPS.values()]
    before = [dict(table) for table in tables]
    yield
    for table, rows in zip(tables, before, strict=True):
        table.clear()
        table.update(rows)


@pytest.mark.parametrize("name", ["sampler", "objective", "conditioning_mode", "family", "variant", "recipe", "metric"])
def test_the_example_runs(name):
    exec(compile(EXAMPLES[name], f"{PAGE.name}, {name}", "exec"), {"__name__": f"example_{name}"})


def test_every_chapter_has_an_example_that_runs():
    """A setting's runs in tests/models/diffusion/test_settings.py, a runtime's in tests/export/test_export.py."""
    in_process = {"sampler", "objective", "conditioning_mode", "family", "variant", "recipe", "metric"}
    assert set(EXAMPLES) == {"setting", "runtime", *in_process}
    assert len(EXAMPLES) == PAGE.read_text(encoding="utf-8").count("\n## ")


def test_an_example_that_is_wrong_is_seen():
    with pytest.raises(AssertionError):
        exec(EXAMPLES["sampler"].replace("(sigma + sigma_next) / 2", "sigma_next"), {"__name__": "wrong"})
