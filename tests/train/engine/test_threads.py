"""A run takes all threads or one, whichever was faster, where nobody says how many."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megadit.models.shared import resources
from megadit.train.engine.threads import Threads
from megadit.train.recipes import load_recipe

CPU = torch.device("cpu")


@pytest.fixture
def threads(monkeypatch):
    """The number of threads that torch was told, of four."""
    now = [4]
    for name in (resources.THREADS, resources.SHARED_OUT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: now.__setitem__(0, number))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: None)
    return now


def run(seconds: dict[int, float], threads, config=None, device=CPU, begin=(0, 0)):
    """(threads of each step, what was chosen)."""
    chooser, chosen, seen = Threads(config or load_recipe("digits_tiny"), device), 0, []
    chooser.go_on(*begin)
    for step in range(begin[0] + 1, begin[0] + 6):
        chooser.begin(step)
        seen.append(threads[0])
        chosen = chooser.end(step, seconds.get(step, 1.0)) or chosen
    return seen, chosen


@pytest.mark.parametrize(("with_one", "chosen"), [(0.5, 1), (1.0, 4), (2.0, 4)])
def test_the_faster_is_kept(threads, with_one, chosen):
    assert run({3: with_one}, threads) == ([4, 4, 1, chosen, chosen], chosen)


def test_a_run_that_goes_on_keeps_its_choice(threads):
    assert run({}, threads, begin=(7, 1)) == ([1] * 5, 0)
    threads[0] = 4
    assert run({}, threads, begin=(2, 0)) == ([4] * 5, 0), "half a comparison is none"
    threads[0] = 2
    assert run({}, threads, begin=(7, 4)) == ([2] * 5, 0), "of fewer cores"


def test_who_says_how_many_is_heeded(threads, monkeypatch):
    config = load_recipe("digits_tiny")
    told = replace(config, train=replace(config.train, num_threads=4))
    assert run({3: 0.1}, threads, told) == ([4] * 5, 0)
    assert run({3: 0.1}, threads, device=torch.device("cuda")) == ([4] * 5, 0)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert run({3: 0.1}, threads) == ([4] * 5, 0)
    monkeypatch.setenv(resources.SHARED_OUT, "4")
    assert run({3: 0.1}, threads) == ([4, 4, 1, 1, 1], 1), "that is the launcher's share"
