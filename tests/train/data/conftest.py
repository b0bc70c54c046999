"""A small data set of two sizes of latents, written the way `megadit prepare` writes one."""

import gc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megadit.models.configs.config import DiTConfig
from megadit.train.config.schema import DataConfig, OptimizerConfig, RunConfig, TrainConfig, ValidationConfig
from megadit.train.data.writer import DatasetWriter

NUM_TRAIN, NUM_VAL = 240, 30
CHANNELS, TEXT_WIDTH = 4, 8


@pytest.fixture(scope="module", autouse=True)
def quick_forks() -> None:
    """Reader processes look through and collect all objects that they are forked with; those of earlier tests no longer
    count."""
    gc.freeze()


class TokenizerStub:
    """What the writer needs of a `VideoTokenizer`."""

    latent_channels = CHANNELS
    sigma_data = 1.0

    def fingerprint(self) -> str:
        return "tokenizer-stub"

    def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")


class TextEncoderStub:
    """What the writer needs of a `TextEncoder`."""

    dim = TEXT_WIDTH

    def fingerprint(self) -> str:
        return "text-encoder-stub"

    def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")


def latent_of(index: int) -> torch.Tensor:
    """Clips and images in turn; the value names the sample."""
    frames = 3 if index % 2 else 1
    return torch.full((CHANNELS, frames, 4, 4), float(index))


def text_of(index: int) -> torch.Tensor:
    """0 to 5 tokens."""
    return torch.full((index % 6, TEXT_WIDTH), float(index))


def add_sample(writer: DatasetWriter, split: str, index: int, **changes) -> None:
    fields = dict(
        latent_CTHW=latent_of(index),
        text_LE=text_of(index),
        caption=f"sample {index}",
        num_frames=9 if index % 2 else 1,
        height=32,
        width=32,
        fps=8.0 if index % 2 else 0.0,
    )
    writer.add(split, f"{split}-{index:05d}", **{**fields, **changes})


@pytest.fixture(scope="session")
def toy() -> SimpleNamespace:
    """How the samples of `dataset` are made, for tests to compare with."""
    return SimpleNamespace(
        num_train=NUM_TRAIN,
        num_val=NUM_VAL,
        channels=CHANNELS,
        text_width=TEXT_WIDTH,
        add_sample=add_sample,
        latent_of=latent_of,
        text_of=text_of,
    )


@pytest.fixture
def new_writer(tmp_path):
    def build(root=tmp_path / "dataset", **settings) -> DatasetWriter:
        return DatasetWriter(root, tokenizer=TokenizerStub(), text_encoder=TextEncoderStub(), **settings)

    return build


@pytest.fixture(scope="session")
def module_writer():
    """`new_writer` for fixtures that outlive a test."""

    def build(root: Path, **settings) -> DatasetWriter:
        return DatasetWriter(root, tokenizer=TokenizerStub(), text_encoder=TextEncoderStub(), **settings)

    return build


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data") / "dataset"
    with DatasetWriter(root, tokenizer=TokenizerStub(), text_encoder=TextEncoderStub(), shard_size=50) as writer:
        for index in range(NUM_TRAIN):
            add_sample(writer, "train", index)
        for index in range(NUM_VAL):
            add_sample(writer, "val", index)
    return root


def run_config(**data_settings) -> RunConfig:
    settings = dict(
        seq_length=200,
        text_seq_length=40,
        global_batch_size=4,
        num_workers=0,
        packing_buffer_size=16,
        shuffle_buffer_size=20,
        text_dropout=0.3,
        mock_latent_shapes=((1, 4, 4), (3, 4, 4)),
    )
    model = DiTConfig(
        num_layers=1,
        hidden_size=24,
        num_attention_heads=2,
        in_channels=CHANNELS,
        patch_spatial=1,
        crossattn_emb_size=TEXT_WIDTH,
        sigma_data=1.0,
        conditioning_sigma=0.02 if data_settings.get("conditioning") else None,
    )
    return RunConfig(
        recipe="test",
        model=model,
        data=DataConfig(**{**settings, **data_settings}),
        train=TrainConfig(train_iters=10, seed=7),
        optimizer=OptimizerConfig(lr=1e-3),
        validation=ValidationConfig(num_batches=5),
    )


@pytest.fixture
def make_config(dataset):
    """`RunConfig` for the small data set, with changed `data.*` settings."""

    def make(seed: int = 7, **data_settings) -> RunConfig:
        config = run_config(**{"path": str(dataset), **data_settings})
        return replace(config, train=replace(config.train, seed=seed))

    return make
