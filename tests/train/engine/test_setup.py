"""What is found before the first step."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megadit.models.shared.errors import UserError
from megadit.train.engine import setup
from megadit.train.recipes import load_recipe


@pytest.fixture
def second(monkeypatch, tmp_path):
    """begin_folder on the second of two ranks, whose folder is empty."""
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", lambda hosts, mine: hosts.__setitem__(1, mine))
    monkeypatch.setattr(setup.socket, "gethostname", lambda: "node-2")
    config = load_recipe("digits_tiny")
    config = replace(config, train=replace(config.train, output_dir=str(tmp_path)))
    return lambda: setup.begin_folder(config, SimpleNamespace(is_first=False))


def test_a_folder_of_one_node_alone_is_refused_before_the_first_step(second, monkeypatch):
    monkeypatch.setattr(setup, "SECONDS_TO_APPEAR", 0.2)
    with pytest.raises(UserError, match=r"node-2 cannot see .*/config.yaml, .* set train.output_dir to a folder that"):
        second()


def test_a_shared_folder_may_be_late(second, tmp_path):
    timer = threading.Timer(0.3, (tmp_path / "config.yaml").touch)
    timer.start()
    second()
    timer.join()
