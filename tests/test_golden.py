"""The golden record sees a changed last bit, and this checkout's small networks are those of the stored record.

`golden_record.json` is made by `python tests/golden.py record FILE --only networks --fold`; make it anew when networks
are meant to compute something else.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden.py"
RECORD = Path(__file__).parent / "golden_record.json"
MACHINE = {"cpu": "a", "torch": "b"}


@pytest.fixture
def parts(monkeypatch):
    """The record's modules are importable."""
    monkeypatch.syspath_prepend(Path(__file__).parent)


@pytest.fixture
def compare(tmp_path):
    """compare(entries, entries, ...): the exit code and what is printed."""

    def run(before, after, *options):
        files = tmp_path / "before.json", tmp_path / "after.json"
        for file, entries in zip(files, (before, after), strict=True):
            file.write_text(json.dumps({"machine": MACHINE, "entries": entries}))
        done = subprocess.run([sys.executable, GOLDEN, "compare", *files, *options], capture_output=True, text=True)
        return done.returncode, done.stdout

    return run


def test_a_comparison_names_what_differs(compare):
    before = {"runs/loss": "0x1.8p+0", "runs/norm": "0x1.0p+0", "texts/help": ["usage", "--eta", "end"]}
    assert compare(before, before) == (0, "3 entries compared, 0 differences\n")
    code, told = compare(before, before | {"runs/loss": "0x1.8000000000001p+0"})
    assert code == 1 and "DIFFERS runs/loss: 0x1.8p+0 -> 0x1.8000000000001p+0" in told and "runs/norm" not in told
    code, told = compare(before, before | {"texts/help": ["usage", "--eta X", "end"]})
    assert code == 1 and "-    --eta\n".replace("    ", "") in told.replace("    ", "") and "+--eta X" in told


def test_an_entry_that_is_missing_or_new_is_a_difference(compare):
    assert "DIFFERS a: is missing" in compare({"a": 1, "b": 2}, {"b": 2})[1]
    assert compare({"b": 2}, {"a": 1, "b": 2})[0] == 1


def test_differences_can_be_allowed_by_name(compare):
    both = {"texts/help/ask": ["a"], "runs/x": "1"}, {"texts/help/ask": ["b"], "runs/x": "1"}
    code, told = compare(*both, "--allow", "texts/help/*")
    assert code == 0 and "allowed texts/help/ask" in told
    assert compare(*both, "--allow", "runs/*")[0] == 1
    assert compare(*both, "--only", "runs")[0] == 0 and compare(*both, "--only", "texts")[0] == 1


def test_a_peak_may_grow_a_little_and_kept_bytes_not_at_all(compare):
    assert compare({"kept/x/peak": 1000}, {"kept/x/peak": 1030})[0] == 0
    assert compare({"kept/x/peak": 1000}, {"kept/x/peak": 1031})[0] == 1
    assert compare({"kept/x/block": 1000}, {"kept/x/block": 1001})[0] == 1


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_changed_last_bit_changes_a_digest(parts, dtype):
    import torch
    from golden_parts.digests import digest_tensor

    tensor = torch.linspace(-1, 1, 1001).to(getattr(torch, dtype))
    changed = tensor.clone()
    changed.view(torch.uint8)[-tensor.itemsize] ^= 1  # the lowest bit of the last number
    assert digest_tensor(tensor) == digest_tensor(tensor.clone()) != digest_tensor(changed)
    assert digest_tensor(tensor) != digest_tensor(tensor.reshape(7, 143))


def test_changed_last_bits_of_one_weight_are_seen_in_a_network(parts):
    """In the output and in the gradients, of the dense way and of the packed one.

    Of one number alone they would be lost in the rounding of sums.
    """
    import torch
    from golden_parts import networks
    from golden_parts.names import make_config

    config = make_config(**networks.COMMON)

    def described(change):
        dit = networks.random_network(config)
        change(dit.get_parameter("blocks.1.mlp.fc1.weight").data)
        return {
            variant: dict(networks.described(variant, dit, *run(dit)))
            for variant, run in (("dense", networks.run_dense), ("packed", networks.run_packed))
        }

    def flip(weight):
        weight.view(torch.int32)[:] ^= 1

    before, again, after = described(lambda weight: None), described(lambda weight: None), described(flip)
    assert before == again
    for variant in before:
        differing = {name for name in before[variant] if before[variant][name] != after[variant][name]}
        assert f"{variant}/output" in differing and f"{variant}/gradients/blocks.0.mlp.fc1.weight" in differing


def test_kept_bytes_are_those_of_the_saved_tensors(parts):
    """x^2 saves x, which was there; sin saves its input, a result of 4 bytes a number; hooks that drop it are seen."""
    import torch
    from golden_parts.kept import changes, memory

    def kept(function):
        x = torch.ones(1000, requires_grad=True)
        with memory() as profiled:
            out = function(x)
        assert out.requires_grad
        return sum(changes(profiled, {}))

    def dropped(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: None, lambda nothing: x**2):
            return (x**2).sin()

    assert kept(torch.square) == 4000
    assert kept(lambda x: (x**2).sin()) == 8000
    assert kept(dropped) == 4000


@pytest.mark.slow
def test_small_networks_are_those_of_the_record(parts, tmp_path):
    from golden_parts.machine import machine

    stored = json.loads(RECORD.read_text())
    if machine() != stored["machine"]:
        pytest.skip(f"the record is of another machine: {stored['machine']}")
    file = tmp_path / "now.json"
    subprocess.run([sys.executable, GOLDEN, "record", file, "--only", "networks", "--fold"], check=True)
    assert json.loads(file.read_text())["entries"] == stored["entries"]
