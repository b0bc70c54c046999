"""Mistakes in a run's configuration are told with the value and a remedy."""

import pytest

from megadit.models.configs.adapter import AdapterConfig
from megadit.models.configs.config import DiTConfig
from megadit.models.shared.errors import UserError
from megadit.train.config.schema import (
    CheckpointConfig,
    DataConfig,
    DiffusionConfig,
    EmaConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
    ValidationConfig,
)
from megadit.train.config.upkeep import HealthConfig, SamplingConfig

DATA = {"seq_length": 256, "text_seq_length": 64, "global_batch_size": 8, "mock_latent_shapes": ((1, 8, 8),)}


def make_run(
    *, data=None, parallel=None, model=None, train=None, optimizer=None, diffusion=None, validation=None, health=None
) -> RunConfig:
    validation = dict(validation or {})
    return RunConfig(
        recipe="test",
        model=DiTConfig(**(model or {})),
        data=DataConfig(**{**DATA, **(data or {})}),
        train=TrainConfig(**{"train_iters": 10, **(train or {})}),
        optimizer=OptimizerConfig(**{"lr": 1e-3, **(optimizer or {})}),
        parallel=ParallelConfig(**(parallel or {})),
        diffusion=DiffusionConfig(**(diffusion or {})),
        health=HealthConfig(**(health or {})),
        validation=ValidationConfig(**{**validation, "sampling": SamplingConfig(**validation.pop("sampling", {}))}),
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TrainConfig(train_iters=0), r"train\.train_iters=0 must be greater than 0"),
        (lambda: TrainConfig(train_iters=-5), r"train\.train_iters=-5"),
        (lambda: TrainConfig(train_iters=1, num_threads=0), r"train\.num_threads=0"),
        (lambda: TrainConfig(train_iters=1, precision="bf61"), r"train\.precision='bf61'.*did you mean 'bf16'"),
        (lambda: OptimizerConfig(lr=0.0), r"optimizer\.lr=0 must be greater than 0"),
        (lambda: OptimizerConfig(lr=float("nan")), r"optimizer\.lr=nan"),
        (lambda: OptimizerConfig(lr=1e-3, adam_beta2=1.0), r"optimizer\.adam_beta2=1 must be at least 0 and below 1"),
        (lambda: OptimizerConfig(lr=1e-3, optimizer="sgd"), r"choose one of adamw, muon"),
        (lambda: DataConfig(**{**DATA, "text_dropout": 1.5}), r"data\.text_dropout=1\.5"),
        (lambda: DataConfig(**{**DATA, "seq_length": 0}), r"data\.seq_length=0"),
        (lambda: DataConfig(**{**DATA, "num_workers": -1}), r"data\.num_workers=-1"),
        (lambda: EmaConfig(sigma_rels=(0.3,)), r"ema\.sigma_rels=0\.3 must be greater than 0 and below 0\.2886"),
        (lambda: ParallelConfig(data_parallel="fsdp2"), "did you mean 'fsdp'"),
        (lambda: ParallelConfig(cuda_graph_max_segments=0), "cuda_graph_max_segments=0 must be greater than 0"),
        (lambda: TrainConfig(train_iters=1, fp8="e5m2"), "'e5m2' is unknown; .*choose one of none, e4m3, hybrid"),
        (lambda: TrainConfig(train_iters=1, fp8_recipe="delayed"), "choose one of tensorwise, blockwise, mxfp8"),
        (lambda: AdapterConfig(rank=0), r"train\.adapter\.rank=0 must be greater than 0"),
        (lambda: CheckpointConfig(save_interval=0), r"checkpoint\.save_interval=0"),
        (lambda: ValidationConfig(sigmas=(1.0, 0.0)), r"validation\.sigmas=0 must be greater"),
        (lambda: ValidationConfig(sampling=SamplingConfig(num_steps=0)), r"validation\.sampling\.num_steps=0 must be"),
        (lambda: ValidationConfig(sampling=SamplingConfig(eta=2.0)), r"validation\.sampling\.eta=2 must lie between"),
    ],
)
def test_a_bad_value_is_named(build, message):
    with pytest.raises(UserError, match=message):
        build()


def test_a_run_cut_short_stays_in_its_warmup():
    run = make_run(train={"train_iters": 1}, optimizer={"lr_warmup_iters": 50})
    assert run.lr_decay_iters == 51
