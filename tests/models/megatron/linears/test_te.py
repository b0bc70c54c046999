"""The calls into TransformerEngine, against its published source where that is at hand, and on a GPU."""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megadit.models.megatron import extensions
from megadit.models.megatron.linears import te as te_linears

OURS = Path(te_linears.__file__)


def te_source() -> Path | None:
    """The folder transformer_engine/ of a checkout (MEGADIT_TE_SOURCE), or of the installed package."""
    if given := os.environ.get("MEGADIT_TE_SOURCE"):
        return Path(given) / "transformer_engine"
    spec = importlib.util.find_spec("transformer_engine")
    return Path(spec.submodule_search_locations[0]) if spec else None


def calls(source: str) -> list[ast.Call]:
    """What `source` calls of `transformer_engine.pytorch`, which it imports as `te`."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    functions = [(call, call.func) for call in found if isinstance(call.func, ast.Attribute)]
    return [call for call, function in functions if getattr(function.value, "id", None) == "te"]


def find_definition(folder: Path, name: str) -> ast.ClassDef | ast.FunctionDef:
    places = [*(folder / "pytorch" / "module").glob("*.py"), *(folder / "pytorch").glob("quantization.py")]
    trees = [ast.parse(path.read_text()) for path in sorted([*places, *folder.glob("common/recipe/__init__.py")])]
    kinds = (ast.ClassDef, ast.FunctionDef)
    found = [node for tree in trees for node in tree.body if isinstance(node, kinds) and node.name == name]
    assert len(found) == 1, f"{folder} has {len(found)} definitions of {name}"
    return found[0]


def arguments_of(definition: ast.ClassDef | ast.FunctionDef) -> ast.arguments:
    """What is given to it, but for the object itself."""
    if isinstance(definition, ast.FunctionDef):
        return definition.args
    functions = [node for node in definition.body if isinstance(node, ast.FunctionDef)]
    arguments = next(node for node in functions if node.name == "__init__").args
    arguments.args = arguments.args[1:]
    return arguments


def problems(call: ast.Call, folder: Path) -> list[str]:
    """The arguments of a call that the class or function at `folder` does not take, or needs and does not get."""
    name = call.func.attr
    arguments = arguments_of(find_definition(folder, name))
    positional = [argument.arg for argument in arguments.args]
    known = [*positional, *(argument.arg for argument in arguments.kwonlyargs)]
    given = [*positional[: len(call.args)], *(keyword.arg for keyword in call.keywords)]
    needed = positional[: len(positional) - len(arguments.defaults)]
    found = [f"{name} does not take {argument}" for argument in given if argument not in known]
    found += [f"{name} needs {argument}" for argument in needed if argument not in given]
    return found + ([f"{name} takes {len(positional)} arguments"] if len(call.args) > len(positional) else [])


def attributes_read(source: str) -> set[str]:
    """What `source` reads of the module that it calls `linear`."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    owners = [(node.attr, getattr(node.value, "id", getattr(node.value, "attr", None))) for node in nodes]
    return {name for name, owner in owners if owner == "linear"} - {"_parameters"}


def test_every_call_fits_the_published_source():
    folder = te_source()
    if folder is None:
        pytest.skip(
            "TransformerEngine's source is not here: install megadit[te], or set MEGADIT_TE_SOURCE to a checkout"
        )
    found = calls(OURS.read_text())
    assert [call.func.attr for call in found] == ["Linear", "autocast"]
    assert [problem for call in found for problem in problems(call, folder)] == []
    linear = ast.unparse(find_definition(folder, "Linear"))
    written = {name for name in attributes_read(OURS.read_text()) if f"self.{name}" not in linear}
    assert written <= {"weight", "bias"}, "registered by name, from parameters_split"
    assert "register_parameter" in linear


def test_every_recipe_and_question_is_in_the_published_source():
    folder = te_source()
    if folder is None:
        pytest.skip("TransformerEngine's source is not here")
    nodes = [node for node in ast.walk(ast.parse(OURS.read_text())) if isinstance(node, ast.Attribute)]
    names = {
        owner: {node.attr for node in nodes if getattr(node.value, "id", None) == owner} for owner in ("te", "recipe")
    }
    exported = (folder / "pytorch" / "__init__.py").read_text()
    for name in names["te"] - {"Linear"}:  # which comes with all of `module`
        assert f"import {name}\n" in exported, name
        if name.startswith("is_"):
            arguments = arguments_of(find_definition(folder, name))
            assert [argument.arg for argument in arguments.args] == ["return_reason"]
    assert len(names["te"]) == 5 and len(names["recipe"]) == 4
    for name in names["recipe"] - {"Format"}:
        fields = [node.target.id for node in find_definition(folder, name).body if isinstance(node, ast.AnnAssign)]
        assert "fp8_format" in fields, name
    formats = ast.unparse(find_definition(folder, "Format"))
    assert "E4M3 = " in formats and "HYBRID = " in formats


def test_a_call_that_does_not_fit_is_found(tmp_path):
    module = tmp_path / "pytorch" / "module"
    module.mkdir(parents=True)
    arguments = "self, in_features, out_features, needed, bias=True, *, parallel_mode=None"
    (module / "linear.py").write_text(f"class Linear:\n    def __init__({arguments}): ...")
    call = calls(OURS.read_text())[0]
    assert problems(call, tmp_path) == [
        *(
            f"Linear does not take {name}"
            for name in (
                "tp_group",
                "tp_size",
                "sequence_parallel",
                "fuse_wgrad_accumulation",
                "params_dtype",
                "device",
            )  # fmt: skip
        ),
        "Linear needs needed",
    ]


PARITY = """
import torch
from megadit.models.configs.config import DiTConfig
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.dit import DiT
from megadit.models.networks.initialize import initialize_
from megadit.models.megatron import groups
from megadit.models.megatron.blocks import LINEARS
from megadit.models.megatron.parallelize import parallelize
from megadit.models.megatron.transformer_config import transformer_config

config = DiTConfig(num_layers=2, hidden_size=64, num_attention_heads=4, in_channels=8, crossattn_emb_size=32)
found = groups.initialize(groups.ParallelSizes(), config)
megatron = transformer_config(config, groups.ParallelSizes(), dtype=torch.float32)
outputs = []
for impl in ("local", "transformer_engine"):
    with torch.device("meta"):
        model = DiT(config)
    parallelize(model, megatron, found, device=torch.device("cuda"), split=LINEARS[impl])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator("cpu").manual_seed(len(name) + sum(name.encode()))
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(2, 8, 2, 4, 4, generator=generator).cuda()
    text = torch.randn(2, 8, 32, generator=generator).cuda()
    conditioning = Conditioning(text, torch.tensor([8, 3]).cuda(), torch.tensor([24.0, 0.0]).cuda())
    out = model(x, torch.tensor([0.1, -0.3]).cuda(), conditioning)
    out.square().sum().backward()
    outputs.append((out.detach(), {name: p.grad for name, p in model.named_parameters()}))
(a, grads), (b, te_grads) = outputs
assert set(grads) == set(te_grads)
# the same products; TransformerEngine may use TF32, of 10 bits, for them
assert ((a - b).norm() / a.norm()) < 5e-3, (a - b).norm() / a.norm()
for name in grads:
    assert (grads[name] - te_grads[name]).norm() / grads[name].norm() < 2e-2, name
"""


@pytest.mark.gpu
@pytest.mark.skipif(not extensions.has_transformer_engine(), reason="needs a GPU and TransformerEngine (megadit[te])")
def test_parity_with_megatrons_linears():
    result = subprocess.run([sys.executable, "-c", PARITY], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
