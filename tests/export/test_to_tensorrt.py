"""Engines, as far as a machine without TensorRT can tell: what is asked of polygraphy, and under which names.

`FakePolygraphy` takes what polygraphy's own signatures take and nothing else; `FakeTensorRT` has the names that this
package uses, which are looked up in the real libraries where those are installed.
"""

import ast
import importlib.util
import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from megadit.export import command, to_tensorrt
from megadit.export.engines import refit_engines, write_engines
from megadit.export.operators import check_operators, operator_table
from megadit.export.to_tensorrt import EngineSettings, Libraries, build_engine, check_refittable, load_libraries
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.runtimes import tensorrt as runtime
from megadit.infer.runtimes.load import open_exported
from megadit.infer.runtimes.network_spec import ExportedNetworks
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json, write_manifest

ROOT = Path(to_tensorrt.__file__).parent.parent
TRT_NAMES = ("MemoryPoolType.WORKSPACE", "HardwareCompatibilityLevel.AMPERE_PLUS", "OnnxParserFlag.NATIVE_INSTANCENORM")


def fake_tensorrt(version="11.4.0.106"):
    trt = SimpleNamespace(__version__=version)
    for name in TRT_NAMES:
        kind, member = name.split(".")
        setattr(trt, kind, SimpleNamespace(**{member: name}))
    return trt


class FakePolygraphy:
    """polygraphy.backend.trt, whose loaders only remember what they were made with."""

    def __init__(self, engine=b"engine"):
        self.calls, self.profiles, self.engine = {}, [], engine

    def __getattr__(self, name):
        from polygraphy.backend import trt as real

        config = real.CreateConfig.__mro__[1] if name == "CreateConfig" else None

        def make(*args, **options):
            allowed = inspect.signature(getattr(real, name))
            if config is not None:  # its own signature passes on anything
                inspect.signature(config).bind(*args, **options)
            bound = allowed.bind(*args, **options)
            self.calls[name] = bound.arguments
            return self.profile() if name == "Profile" else lambda: self.engine

        return make

    def profile(self):
        from polygraphy.backend.trt import Profile

        shapes = {}

        def add(*args, **options):
            bound = inspect.signature(Profile.add).bind(None, *args, **options).arguments
            shapes[bound["name"]] = (bound["min"], bound["opt"], bound["max"])

        self.profiles.append(shapes)
        return SimpleNamespace(add=add)


def build(exported, settings, tmp_path, name="denoiser", version="11.4.0.106"):
    graphs, fake = open_exported(exported, "onnx"), FakePolygraphy()
    plan = tmp_path / f"{name}.plan"
    libraries = Libraries(fake_tensorrt(version), fake)
    build_engine(graphs.directory / f"{name}.onnx", graphs.network(name), settings, plan, libraries)
    assert plan.read_bytes() == b"engine"
    return fake


@pytest.mark.parametrize("version", ["10.16.1.11", "11.4.0.106"])
def test_strongly_typed_with_the_contracts_profiles(exported, specs, tmp_path, version):
    fake = build(exported, EngineSettings(), tmp_path, version=version)
    assert fake.calls["NetworkFromOnnxPath"]["strongly_typed"] is True
    (profile,) = fake.profiles
    assert list(profile) == ["x", "sigma", "text", "text_length", "fps"]
    for tensor in specs["denoiser"].inputs:
        assert profile[tensor.name] == tuple(tensor.shape_at(extreme) for extreme in ("min", "opt", "max"))
    assert not {"fp16", "bf16", "int8", "fp8", "calibrator"} & fake.calls["CreateConfig"].keys()


def test_every_setting_reaches_polygraphy(exported, tmp_path):
    """Each field flipped on its own changes what polygraphy is told."""
    plain = build(exported, EngineSettings(), tmp_path).calls
    for name, value in {
        "workspace_gb": 2.0, "optimization_level": 5, "timing_cache": "t.cache", "refittable": True,
        "version_compatible": True, "hardware_compatible": True, "weight_streaming": True,
    }.items():  # fmt: skip
        changed = build(exported, EngineSettings(**{name: value}), tmp_path).calls
        told = {call: {k: v for k, v in arguments.items() if not callable(v)} for call, arguments in changed.items()}
        before = {call: {k: v for k, v in arguments.items() if not callable(v)} for call, arguments in plain.items()}
        assert _without_profiles(told) != _without_profiles(before), name


def _without_profiles(calls):
    options = dict(calls["CreateConfig"].get("kwargs", {}))
    options.pop("profiles")
    return {**calls, "CreateConfig": options, "Profile": None}


def test_the_fake_refuses_unknown_arguments():
    with pytest.raises(TypeError, match="strongly_tiped"):
        FakePolygraphy().NetworkFromOnnxPath("a.onnx", strongly_tiped=True)
    with pytest.raises(TypeError, match="workspace"):
        FakePolygraphy().CreateConfig(workspace=1)
    with pytest.raises(TypeError, match="'max'"):
        FakePolygraphy().profile().add("x", min=1, opt=1, maximum=1)


def test_polygraphys_own_command_would_configure_the_same(exported, specs, tmp_path):
    """`polygraphy run --trt --gen-script` writes the script that it would run."""
    settings = EngineSettings(
        workspace_gb=2.0, optimization_level=4, timing_cache="t.cache", refittable=True, version_compatible=True,
        hardware_compatible=True, weight_streaming=True,
    )  # fmt: skip
    script, tensors = tmp_path / "script.py", specs["denoiser"].inputs
    shapes = [
        argument
        for extreme in ("min", "opt", "max")
        for argument in (
            f"--trt-{extreme}-shapes",
            *(f"{t.name}:[{','.join(map(str, t.shape_at(extreme)))}]" for t in tensors),
        )
    ]
    options = [
        "--memory-pool-limit", "workspace:2G", "--builder-optimization-level", "4", "--load-timing-cache", "t.cache",
        "--save-timing-cache", "t.cache", "--refittable", "--version-compatible", "--hardware-compatibility-level",
        "ampere_plus", "--weight-streaming",
    ]  # fmt: skip
    graph = str(exported.path / "onnx/denoiser.onnx")
    polygraphy = str(Path(sys.executable).parent / "polygraphy")
    tool = [polygraphy, "run", graph, "--trt", "--strongly-typed", *shapes, *options]
    subprocess.run([*tool, "--gen-script", str(script)], check=True, capture_output=True)
    theirs = _calls(script.read_text())
    ours = build(exported, settings, tmp_path).calls
    config = dict(ours["CreateConfig"]["kwargs"])
    config["memory_pool_limits"] = {"WORKSPACE": 2 * 2**30}
    config["hardware_compatibility_level"] = "AMPERE_PLUS"
    assert {**theirs["CreateTrtConfig"], "profiles": None} == {**config, "profiles": None}
    network = ours["NetworkFromOnnxPath"]
    assert theirs["NetworkFromOnnxPath"]["strongly_typed"] == network["strongly_typed"]
    assert theirs["NetworkFromOnnxPath"]["flags"] == ["NATIVE_INSTANCENORM"]
    assert network["flags"] == ["OnnxParserFlag.NATIVE_INSTANCENORM"]
    assert theirs["EngineBytesFromNetwork"]["save_timing_cache"] == ours["EngineBytesFromNetwork"]["save_timing_cache"]


def _calls(script):
    """Loader -> keyword arguments, as the script writes them; names of TensorRT's enumerations by their last part."""

    def value(node):
        if isinstance(node, ast.Attribute):
            return node.attr
        if isinstance(node, ast.Dict):
            return {value(k): value(v) for k, v in zip(node.keys, node.values, strict=True)}
        if isinstance(node, ast.List):
            return [value(item) for item in node.elts]
        return None if isinstance(node, ast.Name) else ast.literal_eval(node)

    loaders = ("CreateTrtConfig", "NetworkFromOnnxPath", "EngineBytesFromNetwork")
    calls = [node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Call)]
    return {
        call.func.id: {k.arg: value(k.value) for k in call.keywords}
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in loaders
    }


def test_plan_folder_says_all_that_a_server_needs(exported, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    plan = tmp_path / "copied/plan"
    plan.mkdir(parents=True)
    graphs = open_exported(exported, "onnx")
    write_engines(graphs, plan, EngineSettings(), Libraries(fake_tensorrt(), FakePolygraphy()))
    engines = ExportedNetworks.open(plan, graphs.settings["source"], "")
    assert engines.network("denoiser") == graphs.network("denoiser")
    assert engines.settings["engine"]["tensorrt"] == "11.4.0.106" and engines.settings["defaults"]
    assert {file.name for file in plan.iterdir()} >= {"denoiser.plan", "video_decoder.plan", "video_encoder.plan"}

    runtime.check_engine(engines, "11.4.0.106", "H200", (9, 0))
    for version, gpu, capability, message in (
        ("10.16.1.11", "H200", (9, 0), "need TensorRT 11.4.0.106, not 10.16.1.11"),
        ("11.4.0.106", "A100", (8, 0), "built on H200, not for A100"),
    ):
        with pytest.raises(ValueError, match=f"{message}.*megadit export .* --format tensorrt"):
            runtime.check_engine(engines, version, gpu, capability)


class FakeRefit:
    """The part of tensorrt that exchanges weights: an engine is its old bytes and the graph that it took."""

    __version__ = "11.4.0.106"

    def __init__(self, fits=True):
        self.fits, self.host_code = fits, []
        self.Logger = type("Logger", (), {"WARNING": "warning", "__init__": lambda logger, level: None})

    def Runtime(self, logger):
        def load(content):
            self.host_code.append(runtime.engine_host_code_allowed)
            return SimpleNamespace(content=content, serialize=lambda: engine_of(content))

        def engine_of(content):
            return content + b" with " + self.taken

        runtime = SimpleNamespace(deserialize_cuda_engine=load)
        return runtime

    def Refitter(self, engine, logger):
        return SimpleNamespace(refit_cuda_engine=lambda: True)

    def OnnxParserRefitter(self, refitter, logger):
        def take(path):
            self.taken = Path(path).name.encode()
            return self.fits

        return SimpleNamespace(refit_from_file=take)


@pytest.fixture
def refittable(exported, tmp_path, monkeypatch):
    """A copy of an exported bundle with engines that take other weights."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    copy = tmp_path / "refittable"
    shutil.copytree(exported.path, copy)
    (copy / "plan").mkdir()
    settings = EngineSettings(refittable=True, version_compatible=True)
    libraries = Libraries(fake_tensorrt(), FakePolygraphy())
    write_engines(open_exported(exported, "onnx"), copy / "plan", settings, libraries)
    write_manifest(copy, exported.manifest | {"export": {**exported.manifest["export"], "tensorrt": {}}})
    return copy


def test_engines_of_an_earlier_export_take_new_weights(exported, refittable, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(command, "export_bundle", lambda *arguments: None)
    monkeypatch.setattr(command, "add_engines", lambda path, settings, before: asked.append(before))
    assert command.main([str(exported.path), "out", "--format", "tensorrt", "--refit", str(refittable)]) == 0
    (before,) = asked
    graphs, fake, plan = open_exported(exported, "onnx"), FakeRefit(), tmp_path / "plan"
    plan.mkdir()
    refit_engines(graphs, plan, before, Libraries(fake, None))
    assert (plan / "video_decoder.plan").read_bytes() == b"engine with video_decoder.onnx"
    assert fake.host_code == [True] * len(graphs.settings["networks"])
    made = ExportedNetworks.open(plan, graphs.settings["source"], "")
    assert made.settings["engine"] == before.settings["engine"]
    with pytest.raises(ValueError, match="denoiser.plan cannot take the weights of denoiser.onnx: leave out --refit"):
        refit_engines(graphs, plan, before, Libraries(FakeRefit(fits=False), None))
    other = ExportedNetworks(graphs.directory, {**graphs.settings, "precision": "bf16"})
    with pytest.raises(ValueError, match="are of other precision: export with their options"):
        refit_engines(other, plan, before, Libraries(fake, None))
    fake.__version__ = "12.0"
    with_its_version = {**before.settings, "engine": {**before.settings["engine"], "version_compatible": False}}
    with pytest.raises(ValueError, match="need TensorRT 11.4.0.106, not 12.0"):
        refit_engines(graphs, plan, ExportedNetworks(before.directory, with_its_version), Libraries(fake, None))


def test_weights_are_not_exchanged_where_tensorrt_loses_some():
    for version in ("10.16.1.11", "11.2.0.1", "11.4.0.106"):
        check_refittable(EngineSettings(refittable=True), version)
    check_refittable(EngineSettings(), "11.3.0.12")
    with pytest.raises(UserError, match="TensorRT 11.3.0.12 may drop biases of such engines; use 11.4"):
        check_refittable(EngineSettings(refittable=True), "11.3.0.12")


def test_what_cannot_be_refitted_is_refused_before_anything_is_exported(exported, refittable, capsys):
    def error(*options):
        assert command.main([str(exported.path), "out", *options]) == 2
        return capsys.readouterr().err

    takes = ["--format", "tensorrt", "--refit"]
    assert "give --format tensorrt and no other engine options" in error("--refit", str(refittable))
    assert "no other engine options" in error(*takes, str(refittable), "--optimization_level", "5")
    assert "has no plan/" in error(*takes, str(exported.path))
    settings = read_json(refittable / "plan/settings.json")
    settings["engine"]["refittable"] = False
    (refittable / "plan/settings.json").write_text(json.dumps(settings))
    shutil.copy(exported.path / "megadit.json", refittable)  # as if their export had been killed
    assert "was never compared with torch under tensorrt: run `megadit export" in error(*takes, str(refittable))
    with pytest.raises(ValueError, match="never compared"):
        TextToVideo.from_pretrained(refittable, device="cpu", runtime="tensorrt")
    write_manifest(refittable, read_json(refittable / "megadit.json") | {"export": {"tensorrt": {}}})
    assert "were built without --refittable" in error(*takes, str(refittable))


def test_without_tensorrt_the_graphs_are_there_and_the_message_says_what_to_install(
    exported, tmp_path, monkeypatch, capsys
):
    if importlib.util.find_spec("tensorrt") is not None:
        pytest.skip("TensorRT is installed")
    monkeypatch.setattr(command, "export_bundle", lambda source, out, settings: shutil.copytree(source, out))
    assert command.main([str(exported.path), str(tmp_path / "out"), "--format", "tensorrt"]) == 2
    error = capsys.readouterr().err
    assert "has its ONNX graphs, but no engines" in error and "pip install 'megadit[trt]'" in error
    assert error.count("\n") == 1 and (tmp_path / "out/onnx/denoiser.onnx").is_file()
    with pytest.raises(ValueError, match="pip install"):
        load_libraries()
    with pytest.raises(ValueError, match="has no plan/: make a bundle that has it with `megadit export .* tensorrt"):
        TextToVideo.from_pretrained(exported, device="cpu", runtime="tensorrt")


def test_bad_settings():
    with pytest.raises(ValueError, match="optimization_level=6 must lie between 0 and 5"):
        EngineSettings(optimization_level=6)
    with pytest.raises(ValueError, match="workspace_gb=0 must be greater than 0"):
        EngineSettings(workspace_gb=0)


# ------------------------------------------------------------------------------------------------ operators


def graph_of(tmp_path, node, kind=TensorProto.FLOAT, shape=(1, 2)):
    value = helper.make_tensor_value_info("x", kind, shape)
    graph = helper.make_graph([node], "g", [value], [helper.make_tensor_value_info("y", kind, None)])
    onnx.save(helper.make_model(graph), tmp_path / "g.onnx")
    return tmp_path / "g.onnx"


def test_exported_graphs_are_read_by_every_tensorrt_from_10(exported):
    assert "onnx-tensorrt" in operator_table()["source"]
    for name in ("denoiser", "video_decoder", "video_encoder"):
        check_operators(exported.path / f"onnx/{name}.onnx", "10.1")


def test_what_tensorrt_does_not_read_is_told_with_its_layer(tmp_path):
    unknown = helper.make_node("SplitToSequence", ["x"], ["y"], name="blocks.0.attention/SplitToSequence_3")
    with pytest.raises(ValueError, match="does not support SplitToSequence, in blocks.0.attention"):
        check_operators(graph_of(tmp_path, unknown))
    new = helper.make_node("RMSNormalization", ["x", "x"], ["y"], name="norm/R_0")
    check_operators(graph_of(tmp_path, new), "10.15.1")
    with pytest.raises(ValueError, match="RMSNormalization, in norm, needs TensorRT 10.15 or newer .* --opset 18"):
        check_operators(graph_of(tmp_path, new), "10.9.0")
    plain = helper.make_node("Neg", ["x"], ["y"], name="a/Neg_0")
    with pytest.raises(ValueError, match="no type DOUBLE"):
        check_operators(graph_of(tmp_path, plain, TensorProto.DOUBLE))
    with pytest.raises(ValueError, match="at most 8 dimensions"):
        check_operators(graph_of(tmp_path, plain, shape=[1] * 9))
    with pytest.raises(ValueError, match="too old"):
        check_operators(graph_of(tmp_path, plain), "8.6.1")


# ------------------------------------------------------------------------------------- names of the real library


RECEIVERS = {
    "trt", "_trt", "runtime", "_runtime", "_context", "engine", "refitter", "parser", "Logger", "OnnxParserFlag",
    "MemoryPoolType", "HardwareCompatibilityLevel", "ExecutionContextAllocationStrategy",
}  # fmt: skip
"""What our code calls TensorRT's modules, classes and objects."""


def names_used() -> set[str]:
    """Attributes that our code asks of TensorRT's objects."""
    names = set()
    for file in ("infer/runtimes/tensorrt.py", "export/to_tensorrt.py"):
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.Attribute):
                of = getattr(node.value, "id", getattr(node.value, "attr", None))
                names |= {node.attr} if of in RECEIVERS else set()
    return names - {"forget", "__version__"}


@pytest.mark.parametrize("version", ["10", "11"])
def test_every_name_is_one_of_the_real_library(version):
    """MEGADIT_TRT_BINDINGS_10 and _11 are folders of the unpacked wheels tensorrt-cu13-bindings 10.x and 11.x."""
    folder = os.environ.get(f"MEGADIT_TRT_BINDINGS_{version}")
    if not folder:
        pytest.skip(f"the bindings of TensorRT {version} are not here (MEGADIT_TRT_BINDINGS_{version})")
    (library,) = Path(folder).rglob("tensorrt_bindings/tensorrt.so")
    content = library.read_bytes()
    used = names_used()
    assert {"execute_async_v3", "set_device_memory", "AMPERE_PLUS", "refit_from_file"} <= used
    assert not [name for name in used if name.encode() + b"\0" not in content]
    removed = b"create_execution_context_without_device_memory\0" in content
    assert removed == (version == "10")  # 11 has it no more: the search tells versions apart


@pytest.mark.trt
@pytest.mark.gpu
def test_real_engines_pass_the_gate(tiny_bundle, tmp_path):
    out = tmp_path / "out"
    assert command.main([str(tiny_bundle.path), str(out), "--format", "tensorrt", "--profile", "text=1,4,9"]) == 0
    (video,) = TextToVideo.from_pretrained(out, device="cuda", runtime="tensorrt")(["a cat"])
    assert video.video.shape == (5, 16, 24, 3)
