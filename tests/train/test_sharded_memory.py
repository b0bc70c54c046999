"""What a rank of a fully sharded run holds, measured on its process: the N-th part of everything, and some blocks."""

import json
from pathlib import Path

import pytest

JOB = Path(__file__).parent / "jobs" / "peak_memory.py"
MODEL = (
    *("optimizer.optimizer=adamw", "train.precision=fp32", "ema.sigma_rels=[0.1]", "model.num_layers=12"),
    *("model.hidden_size=512", "model.num_attention_heads=8", "data.mock_latent_shapes=[[1,8,8]]"),
    *("data.seq_length=64", "data.text_seq_length=64"),
)
KEPT = 5
"""Tensors of the network's size between steps: weights, gradients, two moments, an average."""
RANKS = 4

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def measured(run_ranks, tmp_path_factory):
    """measured(ranks, data_parallel): the largest figures of any rank, which has one pack of 64 tokens in each step."""

    def get(ranks, data_parallel):
        out = tmp_path_factory.mktemp(data_parallel)
        settings = (f"parallel.data_parallel={data_parallel}", f"data.global_batch_size={ranks}")
        told = run_ranks(ranks, JOB, *MODEL, *settings, f"train.output_dir={out}")
        found = [json.loads(output.splitlines()[-1]) for output in told]
        return {name: max(one[name] for one in found) for name in found[0]}

    return get


def test_a_rank_holds_its_share(measured, monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "0")  # freed memory goes back: a process is as large as its tensors
    alone, sharded = measured(1, "ddp"), measured(RANKS, "fsdp")
    whole, block = alone["whole"], alone["block"]
    assert alone["resting"] > 0.95 * KEPT * whole, "the measure sees what it is to see"
    activations = alone["peak"] - alone["resting"]
    share = 1.1 / RANKS * KEPT * whole
    # gathered at once: a block and the next, in their backward with whole gradients
    assert sharded["resting"] < share
    assert sharded["peak"] < share + 4 * block + activations
    assert sharded["building"] < 1.1 / RANKS * 2 * whole + block, "no rank ever has the whole network"
