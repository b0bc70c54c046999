"""A bundle through `megadit export`: the same videos by ONNX Runtime, at sizes that were not exported with."""

import json
import multiprocessing
import resource
import shutil
import signal
from importlib import metadata
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from megadit.export import build, command
from megadit.export.networks import build_network
from megadit.export.signatures import sample_inputs, trace_sizes
from megadit.export.to_onnx import ATTENTION_OPSET, export_onnx
from megadit.infer.benchmarks import generate as benchmark_generate
from megadit.infer.generate import command as generate
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.runtimes import load
from megadit.infer.runtimes.load import load_denoiser, open_exported, with_exported_networks
from megadit.infer.runtimes.network_spec import Axis, NetworkSpec, TensorSpec
from megadit.infer.runtimes.onnx import OnnxNetwork, open_session, tensorrt_options
from megadit.infer.runtimes.options import RuntimeOptions
from megadit.infer.runtimes.widen import widened
from megadit.infer.sampling.resolve import with_changed_defaults
from megadit.models.bundle import Bundle
from megadit.models.networks.conditioning import Conditioning
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_directory
from tests.exports import export_denoiser

NETWORKS = ("denoiser", "video_decoder", "video_encoder")
CPU = torch.device("cpu")


def conditioning(config, lengths, fps=8.0) -> Conditioning:
    text_BLE = torch.randn(len(lengths), max(1, *lengths), config.crossattn_emb_size)
    return Conditioning(text_BLE, torch.tensor(lengths), torch.full((len(lengths),), fps))


def test_result_is_a_bundle_that_reports_how_near_it_is(exported):
    report = exported.manifest["export"]["onnx"]["report"]
    assert {*NETWORKS, "video"} == report.keys()
    assert {f"onnx/{name}.onnx" for name in NETWORKS} <= exported.manifest["files"].keys()
    for name in NETWORKS:
        assert report[name]["worst"] <= 1e-4
    assert report["video"]["psnr"] >= 50
    sigmas = [case for case in report["denoiser"]["cases"] if case.startswith("sigma")]
    assert len(sigmas) == 7 and all("F" in report["denoiser"]["cases"][case] for case in sigmas)


@pytest.mark.parametrize(
    ("size", "lengths"), [((1, 2, 2), [3]), ((2, 8, 12), [0, 9, 2]), ((3, 4, 6), [5, 0]), ((1, 6, 16), [0])]
)
def test_denoiser_is_torchs_at_other_sizes(exported, size, lengths):
    torch.manual_seed(0)
    options = {"device": CPU, "dtype": torch.float32}
    onnx, reference = (
        load_denoiser(exported, RuntimeOptions(runtime=runtime), **options) for runtime in ("onnx", "torch")
    )
    x, sigma = torch.randn(len(lengths), exported.config.in_channels, *size), torch.rand(len(lengths)) + 0.1
    given = conditioning(exported.config, lengths)
    torch.testing.assert_close(onnx(x, sigma, given), reference(x, sigma, given), atol=2e-5, rtol=1e-4)


def test_a_student_is_called_as_its_bundle_says(exported):
    student = with_changed_defaults(exported, ["sampler=consistency", "sigmas=20,2,0.4", "guidance=1"])
    videos = {}
    for runtime in ("torch", "onnx"):
        called = []
        pipeline = TextToVideo.from_pretrained(student, device="cpu", runtime=runtime)
        (video,) = pipeline(["a red seven"], seeds=5, on_step=called.append)
        assert [round(step.sigma, 6) for step in called] == [20, 2, 0.4]
        videos[runtime] = video.video.astype(int)
    assert abs(videos["torch"] - videos["onnx"]).max() <= 1


def test_tokenizer_is_torchs(exported):
    tokenizer = exported.load_tokenizer()
    by_onnx = with_exported_networks(tokenizer, exported, "onnx", CPU)
    video = torch.rand(2, 3, 9, 12, 20) * 2 - 1
    latents = tokenizer.encode(video)
    torch.testing.assert_close(by_onnx.encode(video), latents, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(by_onnx.decode(latents), video, atol=1e-5, rtol=1e-5)
    assert by_onnx.latent_shape(9, 12, 20) == tokenizer.latent_shape(9, 12, 20)


def test_the_documented_runtime_runs(exported, monkeypatch):
    """The worked example of docs/extend.md."""
    monkeypatch.setattr(load, "EXPORTED", dict(load.EXPORTED))
    page = Path(load.__file__).parents[2] / "docs" / "extend.md"
    example = page.read_text(encoding="utf-8").split("```python runtime\n")[1].split("```")[0]
    exec(compile(example, page.name, "exec"), {"__name__": "example", "exported": exported})


def test_generate_gives_torchs_video(exported, tmp_path):
    latents = {}
    for runtime in ("torch", "onnx"):
        out = tmp_path / f"{runtime}.mp4"
        arguments = ["--checkpoint_path", str(exported.path), "--prompt", "a cat", "--video_save_path", str(out)]
        assert generate.main([*arguments, "--runtime", runtime, "--device", "cpu"]) == 0
        assert out.stat().st_size > 0
        pipeline = TextToVideo.from_pretrained(exported, device="cpu", runtime=runtime)
        latents[runtime] = pipeline(["a cat", "a dog"], seeds=[1, 2])
    for ours, theirs in zip(latents["onnx"], latents["torch"], strict=True):
        error = np.abs(ours.video.astype(int) - theirs.video.astype(int))
        assert error.max() <= 1 and (error > 0).mean() < 0.01  # rounding to 8 bits may fall either way
    again = [
        "--recorded_files",
        "--repeat",
        str(tmp_path / "onnx.mp4"),
        "--video_save_path",
        str(tmp_path / "again.mp4"),
        "--device",
        "cpu",
    ]
    assert generate.main(again) == 0
    assert (tmp_path / "again.mp4").read_bytes() == (tmp_path / "onnx.mp4").read_bytes()
    assert json.loads((tmp_path / "again.mp4.json").read_text())["runtime"] == "onnx"


@pytest.mark.slow
def test_same_bytes_for_the_same_network_and_none_of_this_machine(exported, specs, tmp_path):
    network = build_network("denoiser", exported, exported.load_tokenizer(), torch.float32)
    path, spec = tmp_path / "denoiser.onnx", specs["denoiser"]
    about = {"megadit_version": "0.1.0", "source": open_exported(exported, "onnx").settings["source"]}
    export_onnx(network, spec, sample_inputs(spec, trace_sizes(spec), seed=5), path, metadata=about)
    content = path.read_bytes()
    assert content == (exported.path / "onnx/denoiser.onnx").read_bytes()
    assert b"/home" not in content and b"site-packages" not in content and b"forward" not in content


def test_graphs_are_sound_and_named(exported):
    for name in NETWORKS:
        path = exported.path / f"onnx/{name}.onnx"
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.load(path)
        names = [node.name for node in model.graph.node]
        assert len(set(names)) == len(names)
        assert {one.key: one.value for one in model.metadata_props}["source"]
        kinds = {value.type.tensor_type.elem_type for value in model.graph.value_info}
        assert onnx.TensorProto.DOUBLE not in kinds  # which TensorRT has not
        assert "denoiser.dit.blocks.1.mlp.fc2/MatMul" in " ".join(names) or name != "denoiser"


def test_attention_is_a_softmax_between_two_products(exported):
    """What TensorRT makes one kernel of; what stands between, as `IsNaN` behind a masked softmax, would end it."""
    nodes = onnx.load(exported.path / "onnx/denoiser.onnx").graph.node
    softmaxes = [node for node in nodes if node.op_type == "Softmax"]
    assert len(softmaxes) == 4, "of videos and of texts, in two blocks"
    for softmax in softmaxes:
        assert [node.op_type for node in nodes if softmax.output[0] in node.input] == ["MatMul"], softmax.name
    assert not [node.name for node in nodes if node.op_type == "IsNaN"]


@pytest.mark.slow
def test_attention_is_one_operator_where_there_is_one(shallow, specs, tmp_path):
    spec, path = specs["denoiser"], tmp_path / "denoiser.onnx"
    network = build_network("denoiser", shallow, shallow.load_tokenizer(), torch.float32)
    inputs = sample_inputs(spec, trace_sizes(spec))
    export_onnx(network, spec, inputs, path, opset=ATTENTION_OPSET, metadata={"megadit_version": "0"})
    kinds = [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]
    assert kinds.count("Attention") == 2 and "Softmax" not in kinds, "of videos and of texts"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_in_halves_is_scaled_as_in_torch(tmp_path, dtype):
    """Not by the rounded root of its scale twice."""

    class Attention(torch.nn.Module):
        def forward(self, x):
            x = x.to(dtype)
            return torch.nn.functional.scaled_dot_product_attention(x, x, x).float()

    batch = Axis(name="batch", min=1, opt=2, max=4)
    inputs = (TensorSpec(name="x", dtype="float32", axes=(batch, 2, 5, 40)),)
    spec, path = NetworkSpec(name="attention", inputs=inputs, output="y"), tmp_path / "attention.onnx"
    export_onnx(Attention(), spec, {"x": torch.randn(3, 2, 5, 40)}, path, metadata={"megadit_version": "0"})
    graph = onnx.load(path).graph
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor).astype(float) for tensor in graph.initializer}
    factors = [constants[name] for node in graph.node if node.op_type == "Mul" for name in node.input[1:]]
    assert np.prod(factors) == pytest.approx(40**-0.5, rel=1e-5) and len(factors) == 2
    rounded = torch.tensor(40**-0.25, dtype=dtype).item()
    assert rounded**2 != pytest.approx(40**-0.5, rel=1e-4), "negative control"


def test_sizes_beyond_the_profile_say_so(exported):
    denoiser = load_denoiser(exported, RuntimeOptions(runtime="onnx"), device=CPU, dtype=torch.float32)
    x = torch.zeros(1, exported.config.in_channels, 1, 4, 400)
    with pytest.raises(ValueError, match="width is 400 in x, but was exported for 2 to 24 in steps of 2"):
        denoiser(x, torch.ones(1), conditioning(exported.config, [1]))


def test_other_weights_and_missing_folders_say_what_to_run(exported, tiny_bundle, tmp_path, capsys):
    with pytest.raises(ValueError, match="has no onnx/: make a bundle that has it with `megadit export"):
        TextToVideo.from_pretrained(tiny_bundle, device="cpu", runtime="onnx")
    shutil.copytree(exported.path, tmp_path / "other")
    settings = tmp_path / "other/onnx/settings.json"
    changed = json.loads(settings.read_text()) | {"source": "0" * 64}
    settings.write_text(json.dumps(changed))
    manifest = json.loads((tmp_path / "other/megadit.json").read_text())
    manifest["files"]["onnx/settings.json"]["bytes"] = settings.stat().st_size
    (tmp_path / "other/megadit.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="made from other weights"):
        TextToVideo.from_pretrained(tmp_path / "other", device="cpu", runtime="onnx")
    with pytest.raises(ValueError, match="choose the precision when exporting"):
        TextToVideo.from_pretrained(exported, device="cpu", runtime="onnx", dtype="bfloat16")
    with pytest.raises(ValueError, match="did you mean 'onnx'"):
        TextToVideo.from_pretrained(exported, device="cpu", runtime="onxx")
    if "TensorrtExecutionProvider" not in onnxruntime.get_available_providers():
        with pytest.raises(ValueError, match="has no TensorrtExecutionProvider"):
            TextToVideo.from_pretrained(exported, device="cpu", runtime="onnx_tensorrt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{missing}", "{out}"], "neither a bundle"),
        (["{bundle}", "{out}", "--opset", "9"], "opset 9 is not supported"),
        (["{bundle}", "{out}", "--precision", "fp4"], "--precision='fp4' is unknown"),
        (
            ["{bundle}", "{out}", "--precision", "int8", "--opset", "18"],
            "precision int8 needs opset 20 or newer, not 18",
        ),
        (
            ["{bundle}", "{out}", "--calibration_prompts", "{bundle}/megadit.json"],
            "calibration prompts are for int8 and fp8",
        ),
        (["{bundle}", "{out}", "--calibration_prompts", "{out}"], "cannot be read"),
        (["{bundle}", "{out}", "--profile", "frames=9,5,1"], "must be 1 <= min <= opt <= max"),
        (["{bundle}", "{out}", "--profile", "frame=1,5,9"], "did you mean 'frames'?"),
        (["{bundle}", "{out}", "--profile", "height=many"], "three whole numbers"),
        (["{bundle}", "{out}", "--profile", "height=16,18,20"], "height 9 is not a multiple of the patch size 2"),
        (["{bundle}", "{bundle}"], "is the bundle to export"),
        (["{newer}", "{out}"], "upgrade megadit"),
        (["{bundle}", "{full}"], "holds files that are not a bundle"),
    ],
)
def test_bad_input_is_told_in_one_line_and_leaves_nothing(tiny_bundle, tmp_path, capsys, arguments, message):
    newer, full = tmp_path / "newer", tmp_path / "full"
    shutil.copytree(tiny_bundle.path, newer)
    manifest = json.loads((newer / "megadit.json").read_text())
    (newer / "megadit.json").write_text(json.dumps(manifest | {"format_version": 99}))
    full.mkdir()
    (full / "thesis.txt").touch()
    places = {"bundle": tiny_bundle.path, "out": tmp_path / "out", "newer": newer, "full": full}
    (tmp_path / "empty").mkdir()
    filled = [argument.format(missing=tmp_path / "empty", **places) for argument in arguments]
    assert command.main(filled) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("error: ") and message in error
    assert not (tmp_path / "out").exists()


@pytest.fixture
def largest_file():
    """largest_file(bytes): the system refuses to write files beyond this size, as a full disk does."""
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("what", ["a copy of the weights", pytest.param("the graph", marks=pytest.mark.slow)])
def test_full_disk_leaves_no_half_export(shallow, tmp_path, capsys, largest_file, what):
    weights = shallow.path / "transformer/model.safetensors"
    largest_file(weights.stat().st_size + (1024 if what == "the graph" else -1))
    assert command.main([str(shallow.path), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert (
        error == f"error: {tmp_path}/out cannot be written: File too large; raise the limit of this shell (ulimit -f)"
    )
    assert not list(tmp_path.iterdir())


def test_onnxruntimes_tensorrt_is_told_the_contracts_profile(specs):
    options = tensorrt_options(specs["denoiser"])
    assert options["trt_profile_min_shapes"] == "x:1x48x1x2x2,sigma:1,text:1x1x16,text_length:1,fps:1"
    assert options["trt_profile_max_shapes"].startswith("x:8x48x") and "x9x16," in options["trt_profile_max_shapes"]
    assert options["trt_engine_cache_path"].endswith("megadit/tensorrt")


def test_damaged_graph_is_no_bundle(exported, tmp_path):
    shutil.copytree(exported.path, tmp_path / "cut")
    file = tmp_path / "cut/onnx/denoiser.onnx"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match="1000 bytes instead of"):
        Bundle.open(tmp_path / "cut")


@pytest.mark.parametrize("place", ["../secret.bin", "{folder}/secret.bin", "link.bin"])
def test_a_graph_reads_no_file_outside_of_its_folder(tmp_path, place):
    (tmp_path / "secret.bin").write_bytes(bytes(range(64)))
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx/link.bin").symlink_to(tmp_path / "secret.bin")
    (tmp_path / "onnx/own.bin").write_bytes(bytes(64))

    def graph(location: str) -> Path:
        weight = onnx.TensorProto(name="w", data_type=onnx.TensorProto.UINT8, dims=[64], data_location="EXTERNAL")
        for key, value in {"location": location, "offset": "0", "length": "64"}.items():
            weight.external_data.add(key=key, value=value)
        x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.UINT8, [64]) for name in "xy")
        made = onnx.helper.make_graph([onnx.helper.make_node("Add", ["x", "w"], ["y"])], "g", [x], [y], [weight])
        model = onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
        (tmp_path / "onnx/a.onnx").write_bytes(model.SerializeToString())
        return tmp_path / "onnx/a.onnx"

    path = graph(place.format(folder=tmp_path))
    with pytest.raises(UserError, match="cannot open .*a.onnx: .*[Ee]xternal data") as raised:
        open_session(path, torch.device("cpu"))
    assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match=r"a.onnx cannot be converted .*outside the base directory"), widened(path):
        pass
    x = np.zeros(64, np.uint8)
    assert open_session(graph("own.bin"), torch.device("cpu")).run(None, {"x": x})[0].tolist() == x.tolist()


def test_network_takes_the_contract(exported, specs):
    """Types and order of the graph's inputs are the contract's."""
    for name, spec in specs.items():
        graph = onnx.load(exported.path / f"onnx/{name}.onnx").graph
        assert [value.name for value in graph.input] == [tensor.name for tensor in spec.inputs]
        assert [value.name for value in graph.output] == [spec.output]
        network = OnnxNetwork(exported.path / f"onnx/{name}.onnx", spec, device=CPU)
        assert network.spec == spec == open_exported(exported, "onnx").network(name)


def test_benchmark_takes_runtimes_in_turn(exported, tmp_path, capsys):
    arguments = [str(exported.path), "--rounds", "1", "--device", "cpu", "--num_steps", "2"]
    out = tmp_path / "figures.json"
    assert benchmark_generate.main([*arguments, "--runtime", "eager", "onnx", "--json", str(out)]) == 0
    record = json.loads(out.read_text())
    figures = {(one["runtime"], one["what"]): one for one in record["measurements"]}
    whats = ("guided denoiser call", "decoder", "encoder", "whole video")
    assert figures.keys() == {(runtime, what) for runtime in ("eager", "onnx") for what in whats}
    assert all(0 < one["lowest"] <= one["median"] <= one["highest"] for one in figures.values())
    calls = [figures[runtime, "guided denoiser call"] for runtime in ("eager", "onnx")]
    assert calls[0]["tflops"] * calls[0]["median"] == pytest.approx(calls[1]["tflops"] * calls[1]["median"])
    for part in (*record["parts"].values(), record["operations"]):
        assert sum(part.values()) == pytest.approx(1)
    assert record["settings"]["num_steps"] == 2 and record["machine"]["torch"] == metadata.version("torch")
    assert benchmark_generate.main([*arguments, "--runtime", "onxx"]) == 2
    assert "did you mean 'onnx'?" in capsys.readouterr().err
    assert benchmark_generate.main([str(exported.path), "--rounds", "0"]) == 2


def test_every_option_reaches_the_export(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(command, "export_bundle", lambda *export: asked.append(export))
    monkeypatch.setattr(command, "check_memory", lambda *of_a_bundle: None)  # there is none
    monkeypatch.setattr(command, "add_engines", lambda *engines: asked.append(engines))
    (tmp_path / "prompts.txt").write_text("a red seven\n")

    def export(*more):
        asked.clear()
        assert command.main(["bundle", "out", *more]) == 0
        return list(asked)

    plain = export()
    for option in (
        *(["--precision", "bf16"], ["--profile", "text=1,4,9"], ["--opset", "18"], ["--no_text_encoder"]),
        *(["--video_steps", "3"], ["--default", "num_steps=3"], ["--format", "tensorrt"], ["--adapter_rank", "8"]),
    ):
        assert export(*option) != plain, option
    room = ["--adapter_rank", "8"]
    assert export(*room) != export(*room, "--adapter_targets", "blocks.*.mlp.*")
    int8 = ["--precision", "int8"]
    assert export(*int8) != export(*int8, "--calibration_prompts", str(tmp_path / "prompts.txt"))
    engines = export("--format", "tensorrt")
    for option in (
        *(["--workspace_gb", "2"], ["--optimization_level", "5"], ["--timing_cache", "t.cache"], ["--refittable"]),
        *(["--version_compatible"], ["--hardware_compatible"], ["--weight_streaming"]),
    ):
        assert export("--format", "tensorrt", *option) != engines, option
    assert export() == plain and export("--format", "tensorrt") == engines


def export_half(told, out):
    """An export that stops half-way, for ever."""

    def half(source, out, settings):
        with atomic_directory(out) as directory:
            (directory / "half").write_text("half")
            told.send("half-way")
            signal.pause()

    command.export_bundle = half
    command.main(["bundle", str(out)])


def test_an_export_has_its_folder_alone_and_what_a_killed_one_left_goes(tmp_path, monkeypatch, capsys):
    """Also where a link leads to the folder; what an earlier one wrote stays until the new one is whole."""
    out = tmp_path / "exported"
    out.mkdir()
    (out / "before").touch()
    (tmp_path / "link").symlink_to(out)
    (tmp_path / ".exported.old").mkdir()
    monkeypatch.setattr(command, "check_memory", lambda *_: None)
    monkeypatch.setattr(command, "export_bundle", lambda *asked: asked)
    told, telling = multiprocessing.Pipe(duplex=False)
    first = multiprocessing.get_context("fork").Process(target=export_half, args=[telling, out], daemon=True)
    first.start()
    assert told.recv() == "half-way"
    for name in ("exported", "link"):
        assert command.main(["bundle", str(tmp_path / name)]) == 2
        assert f"in use: process {first.pid} on" in capsys.readouterr().err
    first.kill()
    first.join()
    assert [path.name for path in out.iterdir()] == ["before"] and list(tmp_path.glob(".exported.*/half"))
    assert command.main(["bundle", str(out)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"exported", "link", ".exported.old"}


@pytest.mark.slow
def test_previews_are_fitted_within_the_exported_sizes(shallow, tmp_path):
    """Which are fewer frames, and wider ones, than those that previews prefer."""
    profiles = ("frames=1,5,5", "height=16,16,16", "width=20,24,32", "batch=1,1,1", "text=1,2,8")
    exported = export_denoiser(shallow.path, tmp_path / "out", profiles=profiles, video_steps=1)
    pipeline = TextToVideo.from_pretrained(exported, device="cpu", runtime="onnx")
    (made,) = pipeline(["a"], num_steps=1)
    shown = pipeline.preview(made.latents_CTHW[None]).astype(int)
    of_torch = TextToVideo.from_pretrained(shallow, device="cpu").preview(made.latents_CTHW[None])
    assert shown.shape == of_torch.shape and np.abs(shown - of_torch).mean() < 8, "fitted to other videos"
    assert np.abs(shown[:, :, :, ::-1] - of_torch).mean() > 16, "the control: the wrong way around"


def test_an_export_that_cannot_fit_is_refused(tiny_bundle, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(build, "free_memory", lambda device: 1000)
    told = [str(tiny_bundle.path), str(tmp_path / "out")]
    assert command.main(told) == 2
    assert f"the export of {tiny_bundle.path} needs about" in capsys.readouterr().err and not list(tmp_path.iterdir())
    monkeypatch.setattr(command, "export_bundle", lambda *_: None)
    assert command.main([*told, "--even_if_too_large"]) == 0
