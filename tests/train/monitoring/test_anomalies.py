"""Steps that go wrong are left out, gone back over, or end the run, as the configuration says; each is recorded."""

import json
from dataclasses import replace

import pytest
import torch

from megadit.train.config.schema import HealthConfig
from megadit.train.monitoring.anomalies import READING_WINDOW, WARM_UP_STEPS, AnomalyDetector, ReadingTime

LOUD = "sample-loud"


def test_a_spike_is_measured_against_the_usual_loss():
    recent = []
    judge = AnomalyDetector(HealthConfig(on_spike="skip", spike_factor=2, spike_window=10), recent)
    assert judge.loss(1, 100.0) is None, "nothing is usual yet"
    for step in range(2, 12):
        assert judge.loss(step, 1.0 + step / 100) is None
    assert len(recent) == 10
    anomaly = judge.loss(12, 3.0)
    assert anomaly.remedy == "skip" and "the loss of step 12 is 3, 2.8 times the usual" in anomaly.what
    assert 3.0 not in recent, "a spike is not usual"
    assert judge.loss(13, 1.9) is None
    again = AnomalyDetector(HealthConfig(on_spike="skip", spike_factor=2, spike_window=10), list(recent))
    assert again.loss(14, 3.0) is not None, "after a resume too"


def test_only_what_is_asked_for_is_looked_at():
    judge = AnomalyDetector(HealthConfig(), [])
    assert all(judge.loss(step, loss) is None for step, loss in enumerate([1.0] * 200 + [1e6]))
    assert (
        not judge.checks_before_update and AnomalyDetector(HealthConfig(on_not_finite="skip"), []).checks_before_update
    )
    for bad in (float("nan"), float("inf")):
        assert judge.loss(3, bad).remedy == "stop" and judge.gradient(3, bad).remedy == "stop"
    assert judge.gradient(3, 1e6) is None


def test_starving_is_told_rarer_and_rarer():
    reading = ReadingTime(HealthConfig(starving_share=0.4))
    told = [reading.warning(reading=0.5, whole=1.0) for _ in range(WARM_UP_STEPS + 12 * READING_WINDOW)]
    steps = [index + 1 - WARM_UP_STEPS for index, message in enumerate(told) if message]
    assert steps == [READING_WINDOW, 10 * READING_WINDOW]
    assert "50% of the last 20 steps was spent waiting for data" in told[steps[0] - 1 + WARM_UP_STEPS]
    fed = ReadingTime(HealthConfig(starving_share=0.6))
    assert not any(fed.warning(reading=0.5, whole=1.0) for _ in range(100))


# ------------------------------------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def loud_dataset(tiny_dataset, tmp_path_factory):
    """loud_dataset(size): the tiny data set, one of whose samples is so much larger."""
    from megadit.models.text_encoders import load_text_encoder
    from megadit.models.tokenizers import load_tokenizer
    from megadit.train.data.writer import DatasetWriter

    def build(size):
        root = tmp_path_factory.mktemp("data") / "loud"
        tokenizer = load_tokenizer(tiny_dataset / "tokenizer")
        generator = torch.Generator().manual_seed(0)
        with DatasetWriter(
            root, tokenizer=tokenizer, text_encoder=load_text_encoder(tiny_dataset / "text_encoder")
        ) as writer:
            for index in range(24):
                video = 2 * torch.rand(1, 3, 3, 8, 8, generator=generator) - 1
                writer.add(
                    "train", LOUD if index == 12 else f"sample-{index:02d}",
                    latent_CTHW=tokenizer.encode(video)[0] * (size if index == 12 else 1),
                    text_LE=torch.zeros(0, 16), caption="", num_frames=3, height=8, width=8, fps=8,
                )  # fmt: skip
        return root

    return build


def health_run(run_ranks, tiny_arguments, dataset, out, *more, code=0):
    settings = (
        *(f"data.path={dataset}", "validation.interval=0", "train.train_iters=24", "checkpoint.save_interval=4"),
        *("data.shuffle_buffer_size=1", "data.packing_buffer_size=2", "data.seq_length=32", "data.text_seq_length=4"),
        *(
            "data.max_latent=1e30",
            "health.spike_window=6",
            "train.precision=fp32",
            "logger.tensorboard=false",
            "health.statistics_interval=8",
        ),
    )
    (output,) = run_ranks(1, *tiny_arguments, *settings, f"train.output_dir={out}", *more, code=code)
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return output, events


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "setting", "what"),
    [(1e19, "health.on_not_finite=skip", "not a finite number"), (300.0, "health.on_spike=skip", "times the usual")],
)
def test_a_bad_step_is_left_out(run_ranks, tiny_arguments, loud_dataset, tmp_path, read_metrics, size, setting, what):
    dataset = loud_dataset(size)
    output, events = health_run(run_ranks, tiny_arguments, dataset, tmp_path, setting)
    assert events and all(what in event["what"] and LOUD in event["samples"] for event in events)
    assert "update skipped" in output
    metrics = read_metrics(tmp_path)
    assert [line["step"] for line in metrics] == list(range(1, 25))
    for line in metrics:
        if line["step"] in {event["step"] for event in events}:
            assert line["grad_norm"] is None and (line["loss"] is None or line["loss"] > 50)
        else:
            assert line["loss"] < 50 and line["grad_norm"] > 0, "the weights are sound"
    sizes = metrics[7]["statistics"]
    assert set(sizes["activation"]) == {"blocks.0", "blocks.1"}
    assert "dit.blocks.0.mlp.fc1.weight" in sizes["gradient"] or len(sizes["gradient"]) > 10
    assert all(0 <= value["rms"] <= value["max"] for part in sizes.values() for value in part.values())
    assert "statistics" not in metrics[6]


@pytest.mark.slow
def test_a_run_goes_back_and_on_with_other_data(run_ranks, tiny_arguments, loud_dataset, tmp_path, read_metrics):
    output, events = health_run(
        run_ranks, tiny_arguments, loud_dataset(1e19), tmp_path, "health.on_not_finite=rollback"
    )
    assert events and events[0]["remedy"] == "rollback" and "rolled back to" in output
    metrics = read_metrics(tmp_path)
    assert [line["step"] for line in metrics] == list(range(1, 25)), "none twice, none missing"
    assert all(line["loss"] < 50 for line in metrics)
    assert metrics[-1]["consumed_samples"] > sum(line["samples"] for line in metrics), "what was gone back over counts"


@pytest.mark.slow
def test_troubles_without_end_end_the_run(run_ranks, tiny_arguments, loud_dataset, tmp_path):
    broken = ("optimizer.optimizer=adamw", "optimizer.lr=1e30", "optimizer.lr_warmup_iters=0")
    settings = ("health.on_not_finite=skip", "health.max_anomalies=2", "checkpoint.save_interval=9")
    output, events = health_run(run_ranks, tiny_arguments, loud_dataset(1.0), tmp_path, *broken, *settings, code=2)
    assert len(events) == 3 and "error: no. 3 since the last checkpoint" in output


def test_health_is_part_of_every_recipe():
    from megadit.train.recipes import load_recipe

    run = load_recipe("digits_tiny")
    assert replace(run, health=HealthConfig()) == run
