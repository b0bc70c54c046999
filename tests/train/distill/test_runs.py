"""Runs of students: killed and continued in another layout, beside another teacher, beside an adapter, or refused."""

import json
import shutil

import pytest
import torch

from megadit.models.bundle import Bundle
from megadit.models.configs.adapter import AdapterConfig
from megadit.models.convert.adapters.adapter import Adapter
from megadit.models.convert.adapters.files import write_adapter
from megadit.models.lora.adapters import chosen_targets
from megadit.models.megatron.checkpoint import _read, find_checkpoints, read_adapter, read_network
from tests.train.conftest import distance
from tests.train.test_adapter_runs import MODEL, write

STEPS = 6
COMMAND = (
    *("-m", "megadit.train", "--recipe", "digits_tiny", "--mock", "train.precision=fp32", "optimizer.optimizer=adamw"),
    *("model.in_channels=24", "model.crossattn_emb_size=64", "optimizer.lr=0.002", "validation.interval=0"),
    *("logger.tensorboard=false", "ema.sigma_rels=[0.1]", "data.global_batch_size=2", "checkpoint.save_interval=2"),
    *("diffusion.learned_uncertainty=false", f"train.train_iters={STEPS}", "train.distill.sigmas=[20,2]"),
    *("train.distill.objective=distribution_matching", "train.distill.guidance=3", "train.distill.critic_updates=2"),
    "train.distill.adversarial_weight=0.1",
)
ALONE = ("train.distill.adversarial_weight=0", "train.distill.objective=guidance")
"""A student without a critic."""
CONTINUOUS = (
    *(*ALONE, "train.distill.objective=continuous_consistency", f"train.distill.tangent_warmup={STEPS}"),
    "diffusion.learned_uncertainty=true",
)
"""Whose objective changes from step to step."""
SP = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
FSDP = ("parallel.data_parallel=fsdp",)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return write(tmp_path_factory.mktemp("teacher") / "bundle", 0)


@pytest.fixture(scope="module")
def finished(teacher, run_ranks, tmp_path_factory):
    """A run on one rank."""
    out = tmp_path_factory.mktemp("finished")
    run_ranks(1, *COMMAND, f"train.distill.teacher={teacher}", f"train.output_dir={out}")
    return out


def losses(found, name):
    return [line[name] for line in found]


@pytest.mark.slow
def test_a_killed_run_continues_in_another_layout(
    teacher, finished, kill_in_the_middle, run_ranks, tmp_path, read_metrics
):
    command = (*COMMAND, f"train.distill.teacher={teacher}", f"train.output_dir={tmp_path}")
    kill_in_the_middle(STEPS, tmp_path, *command, *SP)
    assert "continuing from" in run_ranks(2, *command, *FSDP)[0]
    found, expected = read_metrics(tmp_path), read_metrics(finished)
    assert losses(found, "step") == list(range(1, STEPS + 1))
    for name, allowed in (("loss", 1e-4), ("critic_loss", 1e-5)):  # of differences of networks that are nearly equal
        assert losses(found, name) == pytest.approx(losses(expected, name), rel=allowed)
    last = [find_checkpoints(out / "checkpoints")[-1] for out in (tmp_path, finished)]
    assert distance(*(_read(checkpoint / "tensors", "ema.") for checkpoint in last)) < 1e-4


@pytest.mark.slow
def test_a_run_that_is_cut_in_two_is_the_same_run(teacher, finished, run_ranks, tmp_path, read_metrics):
    command = (*COMMAND, f"train.distill.teacher={teacher}", f"train.output_dir={tmp_path}")
    run_ranks(1, *command, f"train.train_iters={STEPS // 2}", f"optimizer.lr_decay_iters={STEPS}")
    run_ranks(1, *command)
    found, expected = read_metrics(tmp_path), read_metrics(finished)
    for name in ("loss", "critic_loss", "grad_norm", "sample_checksum"):
        assert losses(found, name) == losses(expected, name)
    ours, theirs = (_read(find_checkpoints(out / "checkpoints")[-1] / "tensors", "") for out in (tmp_path, finished))
    assert ours.keys() == theirs.keys() and all(ours[key].equal(theirs[key]) for key in theirs)
    assert any(key.startswith("critic.optimizer.exp_avg") for key in ours)
    assert any(key.startswith("critic.optimizer.exp_avg") and "adversary" in key for key in ours)


@pytest.mark.slow
def test_a_killed_run_without_a_critic_is_the_same_run(
    teacher, kill_in_the_middle, run_ranks, tmp_path, read_metrics, same
):
    """To the last bit, in one layout: two ranks, each with its readers."""
    whole, cut = (
        (*COMMAND, *CONTINUOUS, f"train.distill.teacher={teacher}", f"train.output_dir={tmp_path / name}")
        for name in ("whole", "cut")
    )
    run_ranks(2, *whole)
    kill_in_the_middle(STEPS, tmp_path / "cut", *cut)
    assert "continuing from" in run_ranks(2, *cut)[0]
    assert same(read_metrics(tmp_path / "cut"), read_metrics(tmp_path / "whole"))
    ours, theirs = (
        _read(find_checkpoints(tmp_path / name / "checkpoints")[-1] / "tensors", "") for name in ("cut", "whole")
    )
    assert ours.keys() == theirs.keys() and all(ours[key].equal(theirs[key]) for key in theirs)
    assert not any(key.startswith("critic.") for key in ours) and any("uncertainty" in key for key in ours)


def test_a_student_is_a_network_like_any_other(teacher, finished):
    state = read_network(find_checkpoints(finished / "checkpoints")[-1])
    assert state.keys() == Bundle.open(teacher).load_dit().state_dict().keys()
    kept = json.loads((find_checkpoints(finished / "checkpoints")[-1] / "state.json").read_text())
    assert kept["settings"]["train.distill"]["objective"] == "distribution_matching" and kept["teacher"]


def test_another_teacher_is_refused(teacher, finished, run_ranks, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    shutil.copytree(teacher, tmp_path / "kept")
    try:
        shutil.rmtree(teacher)
        write(teacher, 1)
        (told,) = run_ranks(
            1, *COMMAND, f"train.distill.teacher={teacher}", f"train.output_dir={tmp_path / 'run'}", code=2
        )
    finally:
        shutil.rmtree(teacher)
        shutil.copytree(tmp_path / "kept", teacher)
    assert "has a student of a teacher with the fingerprint " in told and "give the teacher it started with" in told
    assert "Traceback" not in told


@pytest.mark.slow
def test_a_student_may_be_an_adapter_and_its_run_is_cut_in_two(teacher, run_ranks, tmp_path, read_metrics):
    """Three networks beside the weights of the teacher, of which an adapter each is kept."""
    command = (*COMMAND, "train.adapter.rank=2", "train.train_iters=4", f"train.distill.teacher={teacher}")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_ranks(1, *command, f"train.output_dir={whole}")
    run_ranks(1, *command, f"train.output_dir={cut}", "train.train_iters=2", "optimizer.lr_decay_iters=4")
    run_ranks(1, *command, f"train.output_dir={cut}")
    ours, theirs = (_read(find_checkpoints(out / "checkpoints")[-1] / "tensors", "") for out in (cut, whole))
    assert ours.keys() == theirs.keys() and all(ours[key].equal(theirs[key]) for key in theirs)
    of_networks = [key for key in ours if "adversary" not in key]
    assert all(".adapters." in key for key in of_networks) and any(key.startswith("critic.optimizer.") for key in ours)
    assert any(key.startswith("critic.model.adversary.") for key in ours)
    assert losses(read_metrics(cut), "critic_loss") == losses(read_metrics(whole), "critic_loss")


@pytest.mark.slow
def test_a_student_goes_on_from_the_adapter_of_its_teacher(teacher, run_ranks, tmp_path):
    """What it begins with is the adapter, whatever layout shares it; another kind of adapter is refused."""
    state = {
        key: torch.full(shape, 0.01)
        for name, target in chosen_targets(MODEL, AdapterConfig(rank=2).targets).items()
        for key, shape in ((f"{name}.down", (2, target.in_features)), (f"{name}.up", (target.out_features, 2)))
    }
    write_adapter(tmp_path / "adapter", Adapter.from_state(state, AdapterConfig(rank=2), MODEL))
    still = (
        "train.train_iters=1",
        "optimizer.lr=1e-12",
        "optimizer.lr_warmup_iters=0",
        f"train.output_dir={tmp_path / 'run'}",
    )
    command = (
        *COMMAND,
        *still,
        f"train.distill.teacher={teacher}",
        f"train.distill.teacher_adapter={tmp_path / 'adapter'}",
    )
    run_ranks(2, *command, "train.adapter.rank=2", *SP)
    found = read_adapter(find_checkpoints(tmp_path / "run" / "checkpoints")[-1])
    assert found.keys() == state.keys() and all(torch.allclose(found[key], state[key]) for key in state)
    (told,) = run_ranks(1, *command, "train.adapter.rank=3", f"train.output_dir={tmp_path / 'other'}", code=2)
    assert "is a lora of rank 2 and scaling 1 of" in told and "give train.adapter the same" in told


@pytest.mark.slow
@pytest.mark.parametrize("parameterization", ["flow", "vp"])
def test_a_teacher_of_another_objective(parameterization, run_ranks, tmp_path, read_metrics):
    """A student of the teacher's own kind, and an EDM student of it: denoisers are all that they see of one another."""
    of_teacher = write(tmp_path / "teacher", 0, parameterization=parameterization)
    for ours in ("edm", parameterization):
        out = tmp_path / ours
        command = (*COMMAND, *ALONE, "train.train_iters=2", f"train.output_dir={out}")
        run_ranks(1, *command, f"model.parameterization={ours}", f"train.distill.teacher={of_teacher}")
        assert len(read_metrics(out)) == 2 and MODEL.parameterization == "edm"
