"""What validation samples with, beside the network in training."""

import json
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.shared.cli.setting import settings_of
from megadit.train.checkpoints.sampling_defaults import sampling_defaults
from megadit.train.config.load import resolve_config
from megadit.train.dataset.dataset_info import DatasetInfo
from megadit.train.engine import validation

PROMPTS = ["a red seven", "a blue two"]


@pytest.fixture
def config(tiny_arguments):
    def make(*more: str):
        return resolve_config("digits_tiny", overrides=[*tiny_arguments[4:], "validation.sampling.num_steps=2", *more])

    return make


def test_tokenizer_and_texts_are_read_once_for_all_validations(config, tiny_dataset, monkeypatch):
    loaded, forgotten = [], []
    for name in ("load_tokenizer", "load_text_encoder"):
        load = getattr(validation, name)
        monkeypatch.setattr(validation, name, lambda folder, load=load: loaded.append(folder) or load(folder))
    monkeypatch.setattr(validation, "ShardedDenoiser", lambda training: lambda x, sigma, condition: torch.zeros_like(x))
    training = SimpleNamespace(config=config(), groups=SimpleNamespace(device=torch.device("cpu")))
    try:
        for _ in range(3):
            videos = validation._pipeline(training, PROMPTS)(PROMPTS, seeds=[0, 1])
            assert [video.prompt for video in videos] == PROMPTS
            forgotten.append(validation._texts(DatasetInfo.read(tiny_dataset).text_encoder_folder)._encoder)
    finally:
        validation._texts.cache_clear()
        validation._tokenizer.cache_clear()
    assert sorted(folder.name for folder in loaded) == ["text_encoder", "tokenizer"]
    assert forgotten == [None] * 3, "the encoder leaves the memory to training"


def test_videos_are_as_long_as_what_was_trained_on(config, tiny_dataset):
    info = DatasetInfo.read(tiny_dataset)
    frames = [sampling_defaults(config(*more), info).num_frames for more in ((), ("data.max_frames=9",))]
    assert frames == [3, 3]
    assert sampling_defaults(config("data.max_frames=1"), info).num_frames == 1


def test_every_sampling_setting_can_be_given(config, tiny_dataset):
    """A run's videos, and the defaults of its bundles, are what `validation.sampling` says."""
    info = DatasetInfo.read(tiny_dataset)
    usual = sampling_defaults(config(), info)
    given = {name: another(getattr(usual, name)) for name in settings_of(SamplingSettings)} | {"sampler": "heun"}
    given |= {"num_steps": 4, "num_frames": 5, "height": 16, "width": 24}
    given |= {"schedule": "linear", "sigmas": [5.0, 1.0], "churn_interval": [0.5, 2.0], "guidance_interval": [0.5, 2.0]}
    given |= {"autoguidance": "", "cache_budget": 0.0, "adapter_interval": [], "image_guidance": 1.0}
    given |= {"low_guidance": 0.0}  # these six are refused
    overrides = [f"validation.sampling.{name}={json.dumps(value)}" for name, value in given.items()]
    assert asdict(sampling_defaults(config(*overrides), info)) == {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
    }


def another(value):
    return f"not {value}" if isinstance(value, str) else value / 2 if value and not isinstance(value, tuple) else 0.5


def test_a_shift_suits_the_size_that_is_asked_for(config, tiny_dataset):
    info = DatasetInfo.read(tiny_dataset)
    height = 4 * sampling_defaults(config(), info).height
    wider = config("validation.sampling.shift=auto", f"validation.sampling.height={height}")
    assert sampling_defaults(wider, info).shift == pytest.approx(2.0)
    assert sampling_defaults(config("validation.sampling.shift=auto"), info).shift == 1.0


@pytest.mark.parametrize(("together", "ranks"), [(False, 1), (False, 2), (True, 1)])
def test_a_rank_that_samples_alone_goes_on_without_memory_for_it(together, ranks, monkeypatch, capsys):
    def no_memory(training, texts):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.5 GiB")

    monkeypatch.setattr(validation, "_pipeline", no_memory)
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    training = SimpleNamespace(
        groups=SimpleNamespace(readers=group, copy=SimpleNamespace(rank=lambda: 0, size=lambda: ranks)),
        config=SimpleNamespace(parallel=SimpleNamespace(sizes=SimpleNamespace(copies_work_together=together))),
        ema_weights=SimpleNamespace(swapped_in=lambda *_: nullcontext()),
        parameters=list,
    )
    if together or ranks > 1:  # others wait for this one
        with pytest.raises(torch.OutOfMemoryError):
            validation._generate(training, ["a"], None, "no videos of step 4")
        return
    assert validation._generate(training, ["a"], None, "no videos of step 4") == {}
    assert "no videos of step 4, for want of memory: CUDA out of memory." in capsys.readouterr().out


def test_metrics_gather_the_weights_before_their_averages_take_their_places(monkeypatch):
    """With the distributed optimizer they may be on their way; those of other ranks would stay what they were."""
    places = []

    @contextmanager
    def evaluation(training):
        places.append("gathered")
        yield
        places.append("on")

    monkeypatch.setattr(validation, "evaluation", evaluation)
    monkeypatch.setattr(validation, "_real_videos", lambda *_: SimpleNamespace(prompts=["a"]))
    monkeypatch.setattr(validation, "_generate", lambda *_: places.append("sampled") or {})
    monkeypatch.setattr(validation.dist, "gather_object", lambda own, everyones: None)
    settings = SimpleNamespace(evaluate_count=1)
    config = SimpleNamespace(validation=settings, data=SimpleNamespace(path="", use_train_split_for_val=False))
    training = SimpleNamespace(config=config, groups=SimpleNamespace(is_first=False))
    assert validation.evaluate_videos(training, "0.05") == {}
    assert places == ["gathered", "sampled", "on"]
