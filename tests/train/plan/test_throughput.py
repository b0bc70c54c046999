"""What is said of a run before its first step: how long one takes, and how many samples it sees."""

import io
import tarfile
from collections import Counter
from dataclasses import replace

import pytest
from safetensors.torch import save
from torch import zeros

from megadit.models.machine import small_operations_speed
from megadit.models.shared.resources import GIB
from megadit.train.config.load import resolve_config
from megadit.train.dataset.dataset_info import DatasetInfo
from megadit.train.plan.estimate import HOST_SECONDS_PER_LAYER, LAUNCH_SECONDS_PER_LAYER
from megadit.train.plan.hardware import Gpu, find_gpu, this_device
from megadit.train.plan.layout import Layout
from megadit.train.plan.search import assess
from megadit.train.plan.throughput import samples_of_a_step, step_seconds, time_in_words, with_shapes_of
from megadit.train.recipes import load_recipe

CORE = Gpu(
    name="a core",
    memory=GIB,
    bf16_flops=1e11,
    memory_bandwidth=1e10,
    link_bandwidth=1e9,
    network_bandwidth=1e9,
    is_cpu=True,
)


def test_a_step_takes_as_long_as_its_packs():
    run = load_recipe("digits")
    one = step_seconds(run, 1, CORE)
    twice = replace(run, data=replace(run.data, global_batch_size=2 * run.data.global_batch_size))
    adamw = [replace(some, optimizer=replace(run.optimizer, optimizer="adamw")) for some in (run, twice)]
    assert step_seconds(adamw[1], 1, CORE) == pytest.approx(2 * step_seconds(adamw[0], 1, CORE))
    slower = replace(CORE, bf16_flops=CORE.bf16_flops / 10)
    assert one < step_seconds(run, 1, slower) < 10 * one, "what is no product is as slow as before"
    assert time_in_words(replace(run, train=replace(run.train, train_iters=600)), one).endswith(
        f"for 600 steps of {one:.2g} s"
    )


def test_what_a_core_measures_counts():
    """Products, what is none, and the optimizer's own, which no packs add to."""
    run = load_recipe("digits")
    one = step_seconds(run, 1, CORE)
    assert one < step_seconds(run, 1, replace(CORE, small_speed=0.5)) < 2 * one
    adamw = replace(run, optimizer=replace(run.optimizer, optimizer="adamw"))
    assert 0.8 * one < step_seconds(adamw, 1, CORE) < one
    assert small_operations_speed() > 0


def test_a_gpu_takes_what_the_planner_says():
    run, h200 = load_recipe("performance_7b_8k_baseline"), find_gpu("h200")
    assert step_seconds(run, 8, h200) == assess(run, Layout.of(run, 8), h200).time.total


def test_a_gpu_waits_for_python_unless_blocks_are_replayed():
    h200 = find_gpu("h200")
    run = resolve_config("digits", overrides=["train.precision=bf16"])
    layers = run.model.num_layers * run.data.global_batch_size
    assert step_seconds(run, 1, h200) == pytest.approx(layers * HOST_SECONDS_PER_LAYER, rel=0.01)
    replayed = resolve_config("digits", overrides=["train.precision=bf16", "parallel.cuda_graph_max_segments=128"])
    assert step_seconds(replayed, 1, h200) == pytest.approx(layers * LAUNCH_SECONDS_PER_LAYER, rel=0.01)


def test_a_rank_has_its_share_of_the_cores(monkeypatch):
    from megadit.models import machine
    from megadit.models.shared import resources

    monkeypatch.setattr(machine, "matmul_flops", lambda device, dtype: 8e9)  # of all threads of this process
    monkeypatch.setattr(machine, "small_operations_speed", lambda: 0.7)
    monkeypatch.setattr(resources, "available_cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert [this_device(ranks).bf16_flops for ranks in (1, 2, 4, 8)] == [8e9, 4e9, 2e9, 2e9]
    assert this_device(2).small_speed == 0.7


def test_samples_are_counted_by_the_shapes_that_the_data_set_has(tiny_dataset):
    info = DatasetInfo.read(tiny_dataset)
    assert Counter(info.latent_shapes) == {(1, 4, 4): 16, (2, 4, 4): 16}
    run = resolve_config("digits_tiny", overrides=["model.patch_spatial=1", "data.mock_latent_shapes=[[5,4,4]]"])
    packs, tokens = run.data.global_batch_size, run.data.seq_length
    assert samples_of_a_step(run) == packs * (tokens // 80)
    own = samples_of_a_step(with_shapes_of(info, run))
    assert packs * (tokens // 32) < own < packs * (tokens // 16), "some of either"
    assert with_shapes_of(None, run) is run


def test_shapes_that_cannot_be_are_not_counted(tmp_path, tiny_dataset):
    run = load_recipe("digits_tiny")
    contents = [b"", b"\xff" * 8, b"\2" + bytes(7) + b"[]", save({"text": zeros(2)}), save({"latent": zeros(2)})]
    contents += [
        save({"latent": zeros(3, 0, 4, 4)}),
        save({"latent": zeros(3, 999, 4, 4)}),
        save({"latent": zeros(3, 1, 2, 4)}),
    ]
    with tarfile.open(tmp_path / "train-000000.tar", "w") as shard:
        for number, content in enumerate(contents):
            member = tarfile.TarInfo(f"{number}.safetensors")
            member.size = len(content)
            shard.addfile(member, io.BytesIO(content))
    info = replace(DatasetInfo.read(tiny_dataset), root=tmp_path)
    assert Counter(info.latent_shapes) == {(999, 4, 4): 1, (1, 2, 4): 1}
    assert with_shapes_of(info, run).data.mock_latent_shapes == ((1, 2, 4),)
    assert replace(info, root=tmp_path / "nowhere").latent_shapes == ()
