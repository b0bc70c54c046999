"""What demos take of the machine: ranks, and settings of its GPUs."""

import pytest
import torch

from megadit.train.config.load import resolve_config
from megadit.train.demos import stages
from megadit.train.plan import hardware


@pytest.mark.parametrize(("num_gpus", "num_cores", "expected"), [(0, 1, 1), (0, 16, 2), (1, 16, 1), (8, 4, 2)])
def test_ranks_are_gpus_or_cores(num_gpus, num_cores, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(hardware, "available_cores", lambda: num_cores)
    assert hardware.ranks_that_gain() == expected


@pytest.mark.parametrize("recipe", ["digits", "digits_conditioned", "shapes"])
def test_settings_of_gpus_go_with_the_recipes(recipe, monkeypatch):
    assert stages._settings_of_gpus() == () or torch.cuda.is_available()
    monkeypatch.setattr(stages, "has_cuda_graphs", lambda: True)
    config = resolve_config(recipe, overrides=stages._settings_of_gpus())
    tokens, smallest = config.data.seq_length, 16  # of an image
    assert config.train.precision == "bf16" and config.parallel.cuda_graph_max_segments >= tokens // smallest
