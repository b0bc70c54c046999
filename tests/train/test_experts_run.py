"""A run with experts: on other ranks it goes on as it would have, and what it leaves behind is whole."""

import pytest
import torch

from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.models.bundle import Bundle
from megadit.models.megatron.checkpoint import _read, read_network
from megadit.models.shared.files import read_json
from megadit.train.checkpoints.to_bundle import main as make_bundle

from .conftest import distance

pytestmark = pytest.mark.slow

EXPERTS = (
    *("optimizer.optimizer=adamw", "optimizer.lr_decay_style=constant"),
    *("model.experts.num_experts=4", "model.experts.ffn_hidden_size=32", "model.experts.balance_coefficient=0.5"),
)
SPREAD = "parallel.expert_model_parallel_size=2"


@pytest.fixture(scope="module")
def runs(run_ranks, tiny_arguments, tmp_path_factory):
    """Folders of a run with two of four experts on each rank, and of one that goes on with all of them on each."""
    out = tmp_path_factory.mktemp("runs")
    command = (*tiny_arguments, *EXPERTS)
    run_ranks(2, *command, SPREAD, f"train.output_dir={out / 'through'}")
    run_ranks(2, *command, SPREAD, f"train.output_dir={out / 'changed'}", "train.train_iters=2")
    run_ranks(2, *command, "parallel.data_parallel=distributed_optimizer", f"train.output_dir={out / 'changed'}")
    return out


def test_their_averages_go_on_too(runs):
    through, changed = (runs / name / "checkpoints/iter_0000004/tensors" for name in ("through", "changed"))
    average, weights = _read(through, "ema.0.05."), _read(through, "model.")
    assert distance(_read(changed, "ema."), _read(through, "ema.")) < 1e-5
    fc1 = "dit.blocks.1.mlp.experts.fc1"
    assert not average[f"ema.0.05.{fc1}"].equal(weights[f"model.{fc1}"])


def state(folder, step):
    return read_json(folder / f"checkpoints/iter_{step:07d}/state.json")["run"]


def test_a_run_goes_on_with_its_experts_divided_otherwise(runs, read_metrics):
    through, changed = (read_metrics(runs / name) for name in ("through", "changed"))
    for ours, theirs in zip(changed, through, strict=True):
        assert ours["sample_checksum"] == theirs["sample_checksum"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    # what the first step after the change balanced was counted before it
    assert state(runs / "changed", 2)["expert_counts"] == state(runs / "through", 2)["expert_counts"]
    assert [len(layer) for layer in state(runs / "through", 4)["expert_counts"]] == [4, 4]
    assert all(1 <= line["expert_load"] <= 4 for line in through)


def test_validation_measures_and_samples(runs, read_metrics):
    assert read_metrics(runs / "through")[1]["validation"]["none"]["mean"] > 0
    assert len(list((runs / "through/samples/step_0000002").iterdir())) == 4


def test_a_checkpoint_of_two_ranks_becomes_a_bundle_with_all_experts(runs, tmp_path):
    network = read_network(runs / "through/checkpoints/iter_0000004")
    assert network["blocks.1.mlp.experts.fc1"].shape == (4, 32, 48)
    assert make_bundle([str(runs / "through"), str(tmp_path / "bundle"), "--ema", "none"]) == 0
    bundle = Bundle.open(tmp_path / "bundle")
    assert bundle.config.experts.num_experts == 4
    assert torch.equal(bundle.load_dit().blocks["1"].mlp.experts.fc1, network["blocks.1.mlp.experts.fc1"])
    [video] = TextToVideo.from_pretrained(tmp_path / "bundle", device="cpu")(["sample number 3"], num_steps=2)
    assert video.video.shape[1:3] == (8, 8)
