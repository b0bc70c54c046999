"""The same seed gives the same video, whichever way the ranks share the network."""

import json
from pathlib import Path

import numpy as np
import pytest

JOB = Path(__file__).parent / "jobs" / "videos.py"
LAYOUTS = {
    "one rank": {},
    "tp": {"tensor_model_parallel_size": 2},
    "cp": {"context_parallel_size": 2},
    "ring": {"context_parallel_size": 2, "context_parallel_comm": "ring"},
    "tp x cp": {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "context_parallel_comm": "both"},
    "sp x pp": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2},
    "fsdp": {"data_parallel": "fsdp"},
}
"""On four ranks; what a layout does not use, copies of it do."""

BATCH = ("data.global_batch_size=4", "optimizer.optimizer=adamw")
"""Muon needs whole matrices, which FSDP cuts."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def videos(run_ranks, tiny_arguments, tmp_path_factory):
    out = tmp_path_factory.mktemp("videos")
    (out / "layouts.json").write_text(json.dumps(LAYOUTS))
    overrides = [word for word in tiny_arguments if "=" in word]
    # random weights amplify rounding over many steps more than trained ones
    run_ranks(4, JOB, out, *overrides, "validation.sampling.num_steps=8", "train.precision=fp32", *BATCH)
    return {name: np.load(out / f"{name}.npy").astype(int) for name in ("torch", *LAYOUTS)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_video(videos, name):
    assert np.abs(videos[name] - videos["torch"]).max() <= 1


def test_the_videos_show_something(videos):
    one, two, three = videos["torch"]
    assert min(np.abs(one - two).mean(), np.abs(two - three).mean(), one.std()) > 5
