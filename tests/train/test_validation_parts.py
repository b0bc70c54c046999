"""What validation samples with, beside the network in training."""

from types import SimpleNamespace

import pytest
import torch

from megadit.train import validation
from megadit.train.config.load import resolve_config
from megadit.train.data.dataset_info import DatasetInfo
from megadit.train.sampling_defaults import sampling_defaults


@pytest.fixture
def config(tiny_arguments):
    def make(*more: str):
        return resolve_config("digits_tiny", overrides=[*tiny_arguments[4:], "validation.num_steps=2", *more])

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
            videos = validation._generate(training, [(0, "a red seven"), (1, "a blue two")])
            assert [video.prompt for video in videos] == ["a red seven", "a blue two"]
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
