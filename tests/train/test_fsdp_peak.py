"""Under FSDP no rank ever has the whole network, not even while it is built or a step is under way."""

import ctypes
import json
from pathlib import Path

import pytest

JOB = Path(__file__).parent / "jobs" / "fsdp_peak.py"
RANKS = 2
NETWORK = (
    *("parallel.data_parallel=fsdp", "optimizer.optimizer=adamw", "ema.sigma_rels=[]", "data.global_batch_size=2"),
    *("model.num_layers=32", "model.hidden_size=128", "model.num_attention_heads=2", "model.head_dim=64"),
    *("data.mock_latent_shapes=[[1,4,4]]", "data.seq_length=16", "data.text_seq_length=16"),
)
"""32 blocks, which are all but a hundredth of it; few tokens."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc"),
]


@pytest.fixture(scope="module")
def peaks(run_ranks, tmp_path_factory):
    """peaks[rank][mistake]: memory as multiples of the network's."""
    outputs = run_ranks(RANKS, JOB, *NETWORK, f"train.output_dir={tmp_path_factory.mktemp('peak')}")
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    return [
        {mistake: {when: size / told["whole"] for when, size in told.items()} for mistake, told in rank.items()}
        for rank in found
    ]


def test_a_rank_is_built_with_its_share_and_one_tensor(peaks):
    for rank in peaks:
        assert rank["none"]["building"] < 1 / RANKS + 0.2, rank
        assert rank["made whole"]["building"] > 1, rank


def test_a_step_gathers_a_few_blocks_at_a_time(peaks):
    for rank in peaks:
        assert rank["none"]["held"] < 4 / RANKS + 0.3, "shares of weights, gradients and two moments"
        # gathered weights and whole gradients of two of 32 blocks, buffers of their exchange, and activations: 0.35
        assert rank["none"]["step"] < 0.5, rank
        assert rank["kept gathered"]["step"] > 0.65, rank
