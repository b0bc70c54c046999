"""As many blocks are recomputed as memory demands: what is chosen, and that it changes nothing but memory."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megadit.models import machine
from megadit.models.shared import resources
from megadit.models.shared.resources import GIB
from megadit.train.__main__ import main
from megadit.train.config.load import resolve_config
from megadit.train.plan.memory import MARGIN, choice_in_words, needed_memory, with_recompute
from megadit.train.recipes import load_recipe

JOB = Path(__file__).parents[1] / "jobs" / "recompute.py"
AUTO = "parallel.recompute_granularity=auto"


def auto(name: str, **parallel):
    run = load_recipe(name)
    return replace(run, parallel=replace(run.parallel, recompute_granularity="auto", **parallel))


def count(config) -> int:
    return config.parallel.recompute_num_layers or 0


def test_the_fewest_blocks_that_fit_are_recomputed():
    run = auto("performance_7b_8k")
    counts = []
    for gib in range(20, 100, 2):
        decided = with_recompute(run, 256, gib * GIB)
        counts.append(count(decided))
        room = gib * GIB * (1 - MARGIN)
        if count(decided) < run.model.num_layers:
            assert needed_memory(decided, 256) <= room
        if count(decided):
            fewer = {"recompute_num_layers": count(decided) - 1} if count(decided) > 1 else {}
            granularity = "full" if fewer else "none"
            fewer = {"recompute_num_layers": None, "recompute_granularity": granularity} | fewer
            assert needed_memory(replace(run, parallel=replace(run.parallel, **fewer)), 256) > room
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == run.model.num_layers and counts[-1] == 0 and len(set(counts)) > 5


def test_blocks_are_counted_in_each_part_of_the_network():
    run = auto("performance_28b_8k")  # four stages
    of_part = run.model.num_layers // 4
    assert choice_in_words(with_recompute(run, 256, 1 * GIB)) == f"{of_part} of {of_part} blocks"
    assert choice_in_words(with_recompute(run, 256, 1000 * GIB)) == f"0 of {of_part} blocks"


def test_other_choices_stand():
    for run in (load_recipe("performance_28b_64k"), load_recipe("digits")):
        assert with_recompute(run, 256, 1.0) is run


def test_a_dry_run_says_what_would_be_chosen_on_a_gpu(capsys):
    command = ["--recipe", "performance_7b_8k", AUTO, "--dry-run", "--gpus", "256", "--gpu"]
    told = []
    for gpu in ("a100-40gb", "h100-80gb"):
        assert main([*command, gpu]) == 0
        told.append(int(re.search(r"recomputed: (\d+) of 32 blocks of each model chunk", capsys.readouterr().out)[1]))
    assert told[0] > 0 == told[1]


def test_free_memory_is_shared_by_the_ranks_of_a_machine(monkeypatch):
    monkeypatch.setattr(resources, "_own_groups", lambda controller: [])
    monkeypatch.setattr(resources, "_available_memory", lambda: 1000)
    assert machine.free_memory(torch.device("cpu")) == 1000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert machine.free_memory(torch.device("cpu")) == 250


LAYOUTS = {
    "tensor parallel": ("parallel.tensor_model_parallel_size=2", "data.global_batch_size=1"),
    "fsdp": ("parallel.data_parallel=fsdp", "optimizer.optimizer=adamw"),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_ranks_agree_and_train_alike(run_ranks, tmp_path, layout):
    """The first rank has the least memory: without agreement tensor-parallel ranks would wait for each other."""
    overrides = ("model.num_layers=4", *layout, "data.mock=true", f"train.output_dir={tmp_path}")
    run = resolve_config("digits_tiny", overrides=[*overrides, AUTO])
    two = replace(run, parallel=replace(run.parallel, recompute_granularity="full", recompute_num_layers=2))
    enough_for_two = needed_memory(two, 2) / (1 - MARGIN) + 1
    outputs = run_ranks(2, JOB, str(enough_for_two), *overrides)
    for output in outputs:
        found = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
        recomputed = {name: each["recomputed"] for name, each in found.items()}
        assert recomputed == {"plenty": 0, "for two": 2, "nothing": 4, "offloaded": 0, "two of each": 2}
        offloaded = {name: each["offloaded"] for name, each in found.items()}
        assert offloaded["two of each"] * 2 == offloaded["offloaded"] > 2 * 4 * 5, "in each block of each step"
        assert sum(offloaded.values()) == offloaded["offloaded"] * 3 / 2, "and in no other case"
        # the same operations on the same numbers, some of them twice
        assert len({str(each["losses"]) for each in found.values()}) == 1
    assert "recomputing 2 of 4 blocks: about" in outputs[0] and "recomputing" not in outputs[1]
