"""`megadit tune-sampler`: what it tries, what it takes, and what it leaves alone."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megadit.infer.commands.tune_sampler import (
    Tuner,
    Variant,
    candidates_of,
    is_good_enough,
    main,
)
from megadit.infer.evaluate.evaluation import MetricValue
from megadit.infer.evaluate.metrics.intervals import Estimate
from megadit.infer.sampling.resolve import num_function_evaluations
from megadit.models.bundle import Bundle
from megadit.models.diffusion.settings import SamplingSettings

from ..evaluate.conftest import write_folder

OWN = SamplingSettings(num_steps=10, guidance=4.0, num_frames=9, height=32, width=32, fps=8, sampler="euler", eta=1.0)
BUNDLE = SimpleNamespace(defaults=OWN, config=SimpleNamespace(sigma_data=1.0, guidance_embedding_range=None))


def test_ways_cost_what_is_asked_for():
    variants = list(candidates_of(BUNDLE, (4, 8)))
    assert {variant.function_evaluations for variant in variants} == {4, 8}
    assert {variant.settings.sampler for variant in variants} == {"consistency", "dpmpp_2m", "euler"}
    assert len({variant.settings for variant in variants}) == len(variants), "none is tried twice"
    for variant in variants:
        assert num_function_evaluations(variant.settings, BUNDLE.config) == variant.function_evaluations
        assert variant.settings.sigmas[0] == OWN.sigma_max and variant.settings.num_frames == OWN.num_frames
    assert any(variant.settings.guidance == 1 and len(variant.settings.sigmas) == 8 for variant in variants)
    assert {variant.settings.guidance for variant in candidates_of(BUNDLE, (4, 8), (3.0,))} == {3.0}


def test_scales_of_noise_are_tried_where_it_stays():
    own, tried = (
        {variant.settings for variant in candidates_of(BUNDLE, (2, 8), (), scales)} for scales in ((), (1, 0.8, 1))
    )
    assert own < tried and {replace(each, noise_scale=1.0) for each in tried} == own
    few, many = ({each.sampler for each in tried - own if each.num_steps == steps} for steps in (2, 8))
    assert few == {"consistency", "dpmpp_2m", "euler"} and many == {"dpmpp_2m"}, "new noise soon replaces the first"


def measured(function_evaluations, **values):
    """A way whose figures have these values, each with a standard error of .01."""
    spread = 0.01 * torch.linspace(-1, 1, 200, dtype=torch.float64) / 0.5788
    metric_values = [
        MetricValue(
            candidate=None,
            metric=name,
            title=name,
            of="a judge",
            better="higher",
            estimate=Estimate(
                value=value, resampled_R=value + (spread if function_evaluations % 2 else spread.flip(0)), count=9
            ),
            baseline=None,
            protocol="",
        )
        for name, value in values.items()
    ]
    return Variant(
        settings=replace(OWN, num_steps=function_evaluations // 2),
        function_evaluations=function_evaluations,
        metric_values=tuple(metric_values),
    )


class EncodedConditioning(Tuner):
    """A tuner that knows the figures of each way: `found` is given its number of evaluations."""

    def measured(self, variants, prompts, *, shows_progress=True):
        return [
            replace(variant, metric_values=measured(variant.function_evaluations, **self.folder(variant)).metric_values)
            for variant in variants
        ]


def tuned(found):
    tuner = EncodedConditioning(
        folder=found,
        maker=SimpleNamespace(bundle=BUNDLE, defaults=OWN),
        evaluation=SimpleNamespace(extractors=()),
        prompts=["a"] * 64,
    )
    return tuner.tune((4, 6, 8), 0.02)


def test_the_cheapest_that_is_as_good_is_taken():
    """Restarts are good with 6 evaluations, nothing is with 4, and with 8 all are."""

    def found(variant):
        is_good = variant.function_evaluations >= 8 or (
            variant.function_evaluations == 6 and variant.settings.sampler == "consistency"
        )
        return {"all": 0.95 if is_good else 0.6, "every_frame": 0.8}

    final, chosen = tuned(found)
    assert chosen.function_evaluations == 6 and chosen.settings.sampler == "consistency"
    assert final[0].settings == OWN, "the model's own way is compared too"


def test_one_figure_that_falls_is_enough_to_refuse():
    """A control for the test above: it must hold for each figure, not for their mean."""
    final, chosen = tuned(
        lambda variant: {"all": 0.95, "every_frame": 0.8 if variant.function_evaluations > 8 else 0.5}
    )
    assert chosen is final[0] and chosen.settings == OWN


def test_what_no_interval_shows_is_good_enough():
    best = measured(20, all=0.95).metric_values[0]
    name = ("all", "a judge")
    assert is_good_enough(measured(8, all=0.94), best, name, 0.02)
    assert is_good_enough(measured(7, all=0.945), best, name, 0.0), "within the error of the difference"
    assert not is_good_enough(measured(8, all=0.9), best, name, 0.02)


@pytest.mark.slow
def test_the_command_changes_the_bundle(tmp_path, bundle_dir, reader_file, capsys):
    """On random weights, of which nothing is better than another: the cheapest is taken and kept."""
    shutil.copytree(bundle_dir, tmp_path / "bundle")
    own = Bundle.open(tmp_path / "bundle").defaults
    size = (own.num_frames, own.height, own.width)
    real = write_folder(tmp_path / "real", 40, size=size)
    command = [str(tmp_path / "bundle"), "--real", str(real), "--extractors", str(reader_file)]
    (tmp_path / "prompts.txt").write_text("\n".join(f"square {number}" for number in range(32)))
    command += [
        "--out",
        str(tmp_path / "out"),
        "--function_evaluations",
        "1",
        "2",
        "--budget",
        "1e9",
        "--metrics",
        "kid",
    ]
    command += ["--prompts", str(tmp_path / "prompts.txt"), "--count", "32", "--device", "cpu", "--dtype", "float32"]
    assert main([*command, "--dry_run"]) == 0
    assert Bundle.open(tmp_path / "bundle").defaults == own
    assert own.guidance > 1 and main([*command, "--guidance", "1", "--noise_scale", "0.7"]) == 0
    told = capsys.readouterr().out
    assert "now has NFE 1" in told and f"note: guidance 1 instead of {own.guidance:g}" in told
    assert "note: initial noise scale 0.7" in told
    bundle = Bundle.open(tmp_path / "bundle")
    changed = bundle.defaults
    found = json.loads((tmp_path / "out" / "tuned.json").read_text())
    assert (
        changed == SamplingSettings.from_dict(found["chosen"]) and num_function_evaluations(changed, bundle.config) == 1
    )
    assert changed.noise_scale == 0.7
    assert sum(variant["is_chosen"] for variant in found["candidates"]) == 1
