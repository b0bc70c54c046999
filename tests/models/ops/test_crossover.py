"""Which of two libraries multiplies is measured once for a machine, kept, and changes no number beyond rounding."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megadit.models.machine import processor
from megadit.models.ops import crossover, linear
from megadit.models.ops.crossover import CROSSOVERS, NEVER, Crossover, describe_crossovers, tune_for_cpu
from megadit.models.ops.reference import batch_attention

SIZES = (10, 20, 40)


@pytest.fixture(autouse=True)
def a_cache_of_its_own(monkeypatch, tmp_path):
    """What is measured here goes into its folder, and the sizes before are in force afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MEGADIT_VARIANTS", raising=False)
    for one in CROSSOVERS.values():
        monkeypatch.setattr(one, "size", one.size)


@pytest.fixture
def ratios(monkeypatch):
    """name -> size -> ratio that a race finds; 0.5 where nothing is said."""
    said, races = {}, []

    def ratio(name, size):
        races.append(name)
        return said.get(name, {}).get(size, 0.5)

    monkeypatch.setattr(crossover, "_ratio", ratio)
    for name, one in CROSSOVERS.items():
        monkeypatch.setattr(one, "_candidates", lambda size, name=name: (name, size))
        monkeypatch.setattr(one, "_sizes", SIZES)
        monkeypatch.setattr(one, "_rule", lambda: SIZES[1])
    said["races"] = races
    return said


def measured(ratios, rule):
    try:
        return Crossover("one", SIZES, lambda size: (size, None), lambda: rule).measure()
    finally:
        del CROSSOVERS["one"]


@given(st.lists(st.floats(0.2, 5), min_size=3, max_size=3), st.sampled_from([10, 40, NEVER]))
def test_no_other_size_loses_less(values, rule):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crossover, "_ratio", lambda size, _: values[SIZES.index(size)])
        found = measured(values, rule)
    cost = {
        one: sum(math.log(value) for size, value in zip(SIZES, values, strict=True) if size >= one)
        for one in (*SIZES, NEVER)
    }
    assert cost[found] <= min(cost.values()) + crossover.MARGIN
    if found != rule:
        assert cost[found] < cost[rule] - crossover.MARGIN, "noise does not leave the rule"


def test_real_races_take_part_in_the_clock_of_processors(monkeypatch):
    ticks = iter(range(1000))
    monkeypatch.setattr(crossover.time, "process_time", lambda: next(ticks))

    def takes(ticks_of_it):
        return lambda: [next(ticks) for _ in range(ticks_of_it)]

    assert crossover._ratio(takes(2), takes(5)) == 3 / 6


def test_one_thread_is_timed_and_the_others_are_there_afterwards(ratios, monkeypatch):
    threads = []
    monkeypatch.setattr(crossover, "_ratio", lambda name, size: threads.append(torch.get_num_threads()) or 1.0)
    torch.set_num_threads(3)
    try:
        tune_for_cpu()
        assert set(threads) == {1} and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)


def test_the_first_one_measures_and_the_others_read(ratios, tmp_path):
    tune_for_cpu()
    assert len(ratios["races"]) == len(SIZES) * len(CROSSOVERS)
    assert {one.size for one in CROSSOVERS.values()} == {SIZES[0]}
    file = tmp_path / "megadit" / "variants.json"
    (machine,) = json.loads(file.read_text())
    for part in (torch.__version__, torch.backends.cpu.get_cpu_capability(), processor()):
        assert part in machine
    for one in CROSSOVERS.values():
        one.use(None)
    tune_for_cpu()
    assert len(ratios["races"]) == len(SIZES) * len(CROSSOVERS) and linear.PRODUCT.size == SIZES[0]


@pytest.mark.parametrize("what", ["instructions", "name", "version"])
def test_another_machine_is_measured_by_itself(ratios, tmp_path, monkeypatch, what):
    tune_for_cpu()
    ratios[linear.PRODUCT.name] = dict.fromkeys(SIZES, 2.0)
    if what == "instructions":
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")  # as none of tests/machines.sh
    elif what == "version":
        monkeypatch.setattr(crossover.metadata, "version", lambda name: f"the next of {name}")
    else:
        monkeypatch.setattr(crossover, "processor", lambda: "another")
    tune_for_cpu()
    assert linear.PRODUCT.size == NEVER and linear.WITH_GELU.size == SIZES[0]
    assert describe_crossovers()[linear.PRODUCT.name] == "never"
    assert len(json.loads((tmp_path / "megadit" / "variants.json").read_text())) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "{MACHINE: 3}", "{MACHINE: {}}", "{MACHINE: OF_TEXT}"])
def test_a_damaged_cache_is_measured_again(ratios, tmp_path, content):
    file = tmp_path / "megadit" / "variants.json"
    file.parent.mkdir()
    content = content.replace("MACHINE", json.dumps(crossover._machine()))
    file.write_text(content.replace("OF_TEXT", json.dumps(dict.fromkeys(CROSSOVERS, "2"))))
    tune_for_cpu()
    assert ratios["races"] and linear.PRODUCT.size == SIZES[0]
    assert json.loads(file.read_text())[crossover._machine()][linear.PRODUCT.name] == SIZES[0]


def test_a_measurement_draws_none_of_the_callers_random_numbers(monkeypatch):
    monkeypatch.setattr(crossover, "FEWEST_ROUNDS", 1)
    monkeypatch.setattr(crossover, "MOST_ROUNDS", 1)
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    tune_for_cpu()
    assert torch.equal(torch.randn(3), expected)


def test_what_cannot_be_kept_is_not_used(ratios, monkeypatch):
    def full(path, values):
        raise OSError("No space left on device")

    monkeypatch.setattr(crossover, "write_json", full)
    tune_for_cpu()
    assert ratios["races"] and linear.PRODUCT.size == linear.PRODUCT._rule() != SIZES[0]


def test_without_a_cache_a_rule_decides(ratios, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    tune_for_cpu()
    assert not ratios["races"] and linear.PRODUCT.size == linear.PRODUCT._rule()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MEGADIT_VARIANTS", "rule")
    tune_for_cpu()
    assert not ratios["races"] and not (tmp_path / "megadit").exists()


def test_every_choice_computes_the_same():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(600, 512), torch.randn(512, 512), torch.randn(512)
    qkv = torch.randn(3, 1, 2, 600, 64)

    def numbers():
        with torch.no_grad():
            plain = [linear.linear(x, weight, bias, gelu) for gelu in (None, "tanh", "none")]
            attended = batch_attention(*qkv, None)
        leaves = [part.clone().requires_grad_() for part in (x, weight, bias)]
        return [*plain, attended, *torch.autograd.grad(linear.linear(*leaves).square().sum(), leaves)]

    found = []
    for size in (1, NEVER):
        for one in CROSSOVERS.values():
            one.use(size)
        found.append(numbers())
    assert all((a - b).abs().max() <= 1e-5 * b.abs().max() for a, b in zip(*found, strict=True))
    if linear._BY_ONEDNN is not None:
        assert any(not torch.equal(a, b) for a, b in zip(*found, strict=True)), "other kernels were called"


def sampled(path):
    """Writes latents of a small network, whose sampling applies the crossovers of this machine."""
    from megadit.infer.runtimes.torch import TorchDenoiser, use_device
    from megadit.infer.sampling.samplers import euler
    from megadit.models.configs.config import DiTConfig
    from megadit.models.networks.conditioning import Conditioning
    from megadit.models.networks.dit import DiT

    use_device("cpu")
    generator = torch.Generator().manual_seed(0)
    dit = DiT(DiTConfig(num_layers=1, hidden_size=512, num_attention_heads=8, crossattn_emb_size=8))
    for parameter in dit.parameters():
        torch.nn.init.normal_(parameter, std=0.02, generator=generator)
    denoise, sigmas = TorchDenoiser(dit), torch.tensor([80.0, 2.0, 0.0], dtype=torch.float64)
    text = torch.randn(1, 5, 8, generator=generator)
    conditioning = Conditioning(text, torch.tensor([5]), torch.tensor([24.0]))
    noise = 80 * torch.randn(1, dit.config.in_channels, 2, 16, 16, generator=generator)
    torch.save(euler(lambda x, sigma: denoise(x, sigma, conditioning), noise, sigmas), path)


def test_other_instructions_have_choices_of_their_own_and_sample_the_same(tmp_path):
    """Those of a process are read as it starts."""
    avx2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    is_held_to_avx2 = os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2"
    other = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"} if is_held_to_avx2 else avx2
    files, root = [tmp_path / "these.pt", tmp_path / "others.pt"], Path(__file__).parents[3]
    sampled(files[0])
    command = [sys.executable, "-c", f"from tests.models.ops.test_crossover import sampled; sampled({str(files[1])!r})"]
    subprocess.run(command, cwd=root, env=os.environ | other, check=True)
    kept = json.loads((tmp_path / "megadit" / "variants.json").read_text())
    assert len(kept) == 2 and all(sizes.keys() == CROSSOVERS.keys() for sizes in kept.values())
    one, other = map(torch.load, files)
    assert (one - other).abs().max() < 1e-4 * one.abs().max() and one.std() > 0.1
