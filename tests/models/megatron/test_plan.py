"""The plan marks parameters as commit 82933d8 did, whose marks `marks.json` holds; no change of a row goes unseen."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from megadit.models.configs.named import NAMED_CONFIGS
from megadit.models.megatron.plan import COLUMN, COLUMN_OF_TEXT, PARTIAL, PLAN, ROW, WHOLE, Row, role_of
from megadit.models.networks.registry import build_network

FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def found(tmp_path_factory, run_ranks):
    out = tmp_path_factory.mktemp("plan") / "marks.json"
    run_ranks(1, FOLDER / "jobs" / "marks.py", out)
    return json.loads(out.read_text())


def expected_marks():
    """{network: {parameter: {case: its marks}}}."""
    recorded = json.loads((FOLDER / "marks.json").read_text())
    cases, words = recorded["cases"], recorded["words"]

    def of_parameter(indices):
        pairs = zip(cases, indices.split(), strict=True)
        return {case: words[int(index)] for case, index in pairs if index != "-"}

    return {
        network: {name: of_parameter(indices) for name, indices in parameters.items()}
        for network, parameters in recorded["marks"].items()
    }


def test_marks_are_those_of_the_layer_kits(found):
    expected = expected_marks()
    assert found["marks"].keys() == expected.keys()
    for network, parameters in expected.items():
        assert found["marks"][network] == parameters, network


@pytest.mark.parametrize(
    ("linear", "down", "up"),
    [
        ("self_attention.qkv", "3x48, partial", "24x3, split 0 tensor, dim 0/1"),
        ("cross_attention.q", "3x48, partial", "24x3, split 0 tensor, dim 0/1"),
        ("cross_attention.kv", "3x48", "24x3, split 0 tensor, dim 0/1"),
        ("self_attention.proj", "3x24, split 1 tensor, dim 1/1", "48x3, partial"),
        ("mlp.fc1", "3x48, partial", "96x3, split 0 tensor, dim 0/1"),
        ("mlp.fc2", "3x96, split 1 tensor, dim 1/1", "48x3, partial"),
        ("modulation.linear", "3x48, partial", "432x3, partial"),
    ],
)
def test_no_rank_of_an_adapter_is_split(found, linear, down, up):
    """Under sequence parallelism on two ranks."""
    inside = f"blocks.0.{linear}.adapters."
    of_linear = {name: words for name, words in found["adapter"].items() if name.startswith(inside)}
    assert {words for name, words in of_linear.items() if name.endswith(".down")} == {down}
    assert {words for name, words in of_linear.items() if name.endswith(".up")} == {up}


def test_every_change_of_a_row_is_seen(found):
    """Negative control: each row with each other role, in twelve networks under sequence parallelism."""
    assert found["unseen"] == []


def test_every_pattern_decides_about_a_parameter(found):
    assert found["unused"] == []


@pytest.mark.parametrize("name", NAMED_CONFIGS)
def test_every_published_network_is_in_the_plan(name):
    """Its blocks are alike."""
    config = dataclasses.replace(NAMED_CONFIGS[name], num_layers=1)
    with torch.device("meta"):
        names = [parameter for parameter, _ in build_network(config).named_parameters()]
    assert all(role_of(parameter) for parameter in names)


def test_a_parameter_without_a_row_is_named():
    with pytest.raises(LookupError, match=r"no row for the parameter 'blocks\.3\.mlp\.fc1\.gain'"):
        role_of("blocks.3.mlp.fc1.gain")


def test_the_first_row_decides():
    plan = (Row("text_embedder.*", WHOLE), Row("*_embedder.*", PARTIAL))
    assert role_of("text_embedder.weight", plan) is WHOLE
    assert role_of("sigma_embedder.linear_1.weight", plan) is PARTIAL
    assert [role_of(f"blocks.0.cross_attention.{name}.weight", PLAN) for name in ("q", "kv", "proj")] == [
        COLUMN,
        COLUMN_OF_TEXT,
        ROW,
    ]
