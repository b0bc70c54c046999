"""`megadit train train.adapter.rank=N`: beside a bundle, killed and continued in another layout, or refused."""

import shutil
from dataclasses import replace

import pytest
import torch

from megadit.models.bundle import Bundle
from megadit.models.bundle_writer import write_bundle
from megadit.models.configs.adapter import AdapterConfig
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.lora.adapters import adapter_state, attach, check_state, fingerprint
from megadit.models.megatron.checkpoint import _read, base_of, find_checkpoints, read_adapter, read_network
from megadit.models.networks.dit import DiT
from megadit.models.shared.errors import UserError
from megadit.models.text_encoders import HashedWordEncoder
from megadit.models.tokenizers import HaarTokenizer
from megadit.train.config.load import resolve_config
from megadit.train.recipes import load_recipe

from .conftest import distance

MODEL = replace(load_recipe("digits_tiny").model, in_channels=24, crossattn_emb_size=64)
STEPS = 8
COMMAND = (
    *("-m", "megadit.train", "--recipe", "digits_tiny", "--mock", "train.precision=fp32", "optimizer.optimizer=adamw"),
    *("model.in_channels=24", "model.crossattn_emb_size=64", "optimizer.lr=0.002", "train.adapter.rank=3"),
    *(
        "validation.interval=0",
        "logger.tensorboard=false",
        "ema.sigma_rels=[0.1]",
    ),
    *("data.global_batch_size=2", "data.text_dropout=0.1", "checkpoint.save_interval=2", f"train.train_iters={STEPS}"),
)
SP = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
FSDP = ("parallel.data_parallel=fsdp",)
ADAPTER = AdapterConfig(rank=3)


def write(path, seed, **of_network):
    model = replace(MODEL, **of_network)
    generator = torch.Generator().manual_seed(seed)
    state = {name: 0.1 * torch.randn(t.shape, generator=generator) for name, t in DiT(model).state_dict().items()}
    write_bundle(
        path,
        config=model,
        state_dict=state,
        tokenizer=HaarTokenizer(temporal_compression=2, spatial_compression=2, sigma_data=MODEL.sigma_data),
        text_encoder=HashedWordEncoder(dim=64),
        defaults=SamplingSettings(num_steps=4, guidance=3.0, num_frames=3, height=8, width=8, fps=8.0),
    )
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write(tmp_path_factory.mktemp("base") / "bundle", 0)


@pytest.fixture(scope="module")
def finished(base, run_ranks, tmp_path_factory):
    """A run on one rank."""
    out = tmp_path_factory.mktemp("finished")
    run_ranks(1, *COMMAND, f"checkpoint.init_from={base}", f"train.output_dir={out}")
    return out


@pytest.mark.slow
def test_a_killed_run_continues_in_another_layout(
    base, finished, kill_in_the_middle, run_ranks, tmp_path, read_metrics
):
    command = (*COMMAND, f"checkpoint.init_from={base}", f"train.output_dir={tmp_path}")
    kill_in_the_middle(STEPS, tmp_path, *command, *SP)
    assert "continuing from" in run_ranks(2, *command, *FSDP)[0]
    found, expected = read_metrics(tmp_path), read_metrics(finished)
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], rel=1e-6)
    ours, theirs = (find_checkpoints(out / "checkpoints")[-1] for out in (tmp_path, finished))
    for ema in (None, 0.1):
        assert distance(read_adapter(ours, ema=ema), read_adapter(theirs, ema=ema)) < 1e-5


@pytest.mark.slow
def test_a_run_goes_on_beside_its_base_in_eight_bits(base, finished, run_ranks, tmp_path, read_metrics):
    """On two ranks that share the matrices; what it leaves is an adapter of the base in full precision."""
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    command = (*COMMAND, f"checkpoint.init_from={base}", f"train.output_dir={out}", f"train.train_iters={STEPS + 2}")
    assert "continuing from" in run_ranks(2, *command, *SP, "train.base_precision=int8")[0]
    assert [line["step"] for line in read_metrics(out)] == list(range(1, STEPS + 3))
    checkpoint = find_checkpoints(out / "checkpoints")[-1]
    assert base_of(checkpoint) == base_of(find_checkpoints(finished / "checkpoints")[-1])
    check_state(read_adapter(checkpoint), ADAPTER, MODEL)
    kept = _read(checkpoint / "tensors", "")
    assert all(".adapters." in key or ".uncertainty." in key for key in kept)


def test_a_checkpoint_has_the_adapter_alone_and_names_its_base(base, finished):
    checkpoint = find_checkpoints(finished / "checkpoints")[-1]
    weights = Bundle.open(base).load_dit()
    assert base_of(checkpoint) == fingerprint(weights.state_dict(), weights.state_dict().__getitem__)
    attach(weights, ADAPTER)
    state, average = read_adapter(checkpoint), read_adapter(checkpoint, ema=0.1)
    check_state(state, ADAPTER, MODEL)
    assert state.keys() == average.keys() == adapter_state(weights).keys()
    assert all(value.any() for value in state.values())
    kept = [key for key in _read(checkpoint / "tensors", "") if ".uncertainty." not in key]
    assert len(kept) == 4 * len(state), "weights, an average and two moments"
    assert all(".adapters." in key for key in kept)
    with pytest.raises(UserError, match="has only an adapter, without its base network"):
        read_network(checkpoint)


def test_another_base_is_refused(base, finished, run_ranks, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    other = write(tmp_path / "other", 1)
    (told,) = run_ranks(1, *COMMAND, f"checkpoint.init_from={other}", f"train.output_dir={tmp_path / 'run'}", code=2)
    assert f"of checkpoint.init_from={other}; " in told and "give the base it started with" in told
    assert "Traceback" not in told


def run(base, *overrides):
    given = ("data.mock=true", "train.adapter.rank=3", f"checkpoint.init_from={base}", "train.output_dir=out")
    return resolve_config("digits_tiny", overrides=[*given, *overrides])


def test_every_part_of_a_pipeline_may_share_what_is_outside_of_blocks():
    run("base", "parallel.pipeline_model_parallel_size=2", "train.adapter.targets=[text_embedder]")
