"""Mistakes in a run's configuration are told with the value and a remedy."""

import pytest

from megadit.models.config import DiTConfig
from megadit.models.shared.errors import UserError
from megadit.train.config.rules import check_inputs, check_layout
from megadit.train.config.schema import (
    CheckpointConfig,
    DataConfig,
    EmaConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
    ValidationConfig,
)

DATA = {"seq_length": 256, "text_seq_length": 64, "global_batch_size": 8, "mock_latent_shapes": ((1, 8, 8),)}


def make_run(*, data=None, parallel=None, model=None, train=None, optimizer=None, validation=None) -> RunConfig:
    return RunConfig(
        recipe="test",
        model=DiTConfig(**(model or {})),
        data=DataConfig(**{**DATA, **(data or {})}),
        train=TrainConfig(**{"train_iters": 10, **(train or {})}),
        optimizer=OptimizerConfig(**{"lr": 1e-3, **(optimizer or {})}),
        parallel=ParallelConfig(**(parallel or {})),
        validation=ValidationConfig(**(validation or {})),
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
        (
            lambda: make_run(parallel={"data_parallel": "fsdp"}, optimizer={"optimizer": "muon"}),
            "distributed_optimizer",
        ),
        (lambda: CheckpointConfig(save_interval=0), r"checkpoint\.save_interval=0"),
        (lambda: ValidationConfig(sigmas=(1.0, 0.0)), r"validation\.sigmas=0 must be greater"),
        (lambda: ValidationConfig(num_steps=0), r"validation\.num_steps=0"),
    ],
)
def test_a_bad_value_is_named(build, message):
    with pytest.raises(UserError, match=message):
        build()


def test_the_layout_must_be_legal():
    with pytest.raises(UserError, match=r"num_attention_heads=6.*nearest layout .*parallel_size=2"):
        make_run(parallel={"tensor_model_parallel_size": 4})
    make_run(parallel={"tensor_model_parallel_size": 3})


def test_sequence_parallel_must_divide_the_pack():
    with pytest.raises(UserError, match=r"data\.seq_length=255 .* use 254 or 256"):
        make_run(parallel={"tensor_model_parallel_size": 2, "sequence_parallel": True}, data={"seq_length": 255})
    with pytest.raises(UserError, match=r"cut over 4 ranks .* use 252 or 256"):
        make_run(
            parallel={"tensor_model_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True},
            model={"num_attention_heads": 12},
            data={"seq_length": 254},
        )


def test_mock_samples_must_fit_into_a_pack():
    shapes = ((1, 64, 64),)
    make_run(data={"mock_latent_shapes": shapes})
    with pytest.raises(UserError, match=r"\[1, 64, 64\] has 1024 tokens, more than data\.seq_length=256"):
        make_run(data={"mock_latent_shapes": shapes, "mock": True})


def test_mock_samples_must_divide_into_patches():
    with pytest.raises(UserError, match="latent height 7 is not a multiple of the patch size 2"):
        make_run(data={"mock_latent_shapes": ((1, 7, 8),), "mock": True})


@pytest.mark.parametrize(("world_size", "tensor_parallel", "data_parallel"), [(1, 1, 1), (8, 1, 8), (4, 2, 2)])
def test_layout_gives_the_data_parallel_size(world_size, tensor_parallel, data_parallel):
    run = make_run(parallel={"tensor_model_parallel_size": tensor_parallel})
    assert check_layout(run, world_size) == data_parallel


def test_layout_needs_whole_copies_of_the_model():
    with pytest.raises(UserError, match="3 ranks .*: start 2 or 4 ranks"):
        check_layout(make_run(parallel={"tensor_model_parallel_size": 2}), world_size=3)


def test_layout_needs_a_batch_for_every_copy():
    with pytest.raises(UserError, match=r"global_batch_size=8 is not a multiple of 6 .*; use 6 or 12"):
        check_layout(make_run(data={"micro_batch_size": 2}), world_size=3)


def test_parts_taken_in_turn_need_micro_batches_for_every_stage():
    parallel = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    assert check_layout(make_run(parallel=parallel), world_size=8) == 4
    with pytest.raises(UserError, match=r"global_batch_size=8 is not a multiple of 16 .*2 stages"):
        check_layout(make_run(parallel=parallel), world_size=16)


def test_a_run_cut_short_stays_in_its_warmup():
    run = make_run(train={"train_iters": 1}, optimizer={"lr_warmup_iters": 50})
    assert run.lr_decay_iters == 51


def test_inputs_need_data_or_mock():
    with pytest.raises(UserError, match=r"train\.output_dir is not set"):
        check_inputs(make_run())
    with pytest.raises(UserError, match=r"data\.path is not set.*--mock"):
        check_inputs(make_run(train={"output_dir": "runs/x"}))
    check_inputs(make_run(train={"output_dir": "runs/x"}, data={"mock": True}))


@pytest.mark.parametrize(
    ("validation", "message"),
    [
        ({"sampler": "eular"}, r"eular.*euler"),
        ({"sampler": "dpmpp_2m", "eta": 1.0}, r"dpmpp_2m cannot add noise.*euler"),
        ({"sampler": "euler", "eta": 2.0}, r"eta=2 must lie between 0 and 1"),
    ],
)
def test_sampling_that_cannot_be_is_refused_before_training(validation, message):
    with pytest.raises(UserError, match=message):
        check_inputs(make_run(train={"output_dir": "runs/x"}, data={"mock": True}, validation=validation))


def test_inputs_need_a_prepared_dataset(tmp_path):
    with pytest.raises(UserError, match="megadit prepare"):
        check_inputs(make_run(train={"output_dir": "runs/x"}, data={"path": str(tmp_path)}))
