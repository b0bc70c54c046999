"""Stable Diffusion's U-Nets through `megadit export`: the same pictures by ONNX Runtime, engines of the same sizes."""

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from safetensors.torch import save_file

from megadit.export import signatures as contract
from megadit.export import verify
from megadit.export.build import ExportSettings, export_bundle, export_network
from megadit.export.engines import write_engines
from megadit.export.layers import weight_hashes
from megadit.export.networks import build_network
from megadit.export.operators import check_operators
from megadit.export.references import reference, reference_cases
from megadit.export.to_tensorrt import EngineSettings, Libraries
from megadit.infer.generate import command as generate
from megadit.infer.media.video_io import read_video
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.runtimes.load import adapter_inputs, open_exported
from megadit.models.bundle import Bundle
from megadit.models.commands.convert import main
from megadit.models.shared.errors import UserError
from megadit.train.checkpoints.to_bundle import main as bundle_main
from tests.export.test_to_tensorrt import FakePolygraphy, fake_tensorrt
from tests.exports import export_denoiser
from tests.models.convert.adapters.test_unet import kohya
from tests.stable_diffusion import SHALLOW, UNETS, make_pipeline

pytest.importorskip("diffusers", reason="diffusers is not installed")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory, write_clip):
    """kind -> its bundle, made once."""
    found = {}

    def make(kind):
        if kind not in found:
            folder = tmp_path_factory.mktemp("unet")
            make_pipeline(folder / "pipeline", kind, write_clip, **SHALLOW)
            assert main([str(folder / "pipeline"), str(folder / "bundle")]) == 0
            found[kind] = Bundle.open(folder / "bundle")
        return found[kind]

    return make


def specs_of(bundle, *profiles, slots=None):
    tokenizer, encoder = bundle.load_tokenizer(), bundle.load_text_encoder()
    sizes = contract.parse_profiles(profiles, contract.default_profiles(bundle, tokenizer, encoder))
    return contract.specs(sizes, bundle.config, tokenizer, encoder, slots=slots)


@pytest.fixture(scope="module")
def exported(exported_stable_diffusion):
    """An XL, whole."""
    return Bundle.open(exported_stable_diffusion, verify=True)


@pytest.mark.parametrize("kind", UNETS)
def test_a_graph_takes_what_the_network_reads(made, kind):
    """Pictures of one frame, all rows of a text, of XL its pooled feature; neither lengths nor frame rates."""
    bundle = made(kind)
    spec = specs_of(bundle)["denoiser"]
    assert [tensor.name for tensor in spec.inputs] == ["x", "sigma", "text", *(["pooled"] if kind == "xl" else [])]
    shapes = {tensor.name: tensor.shape_at("max") for tensor in spec.inputs}
    width = bundle.config.crossattn_emb_size
    assert shapes["x"] == (8, 4, 1, 32, 32) and shapes["text"] == (8, 77, width), "twice the sides, 4 guided pictures"
    assert shapes.get("pooled") == ((8, 20) if kind == "xl" else None)
    assert spec.axes["height"].step == bundle.config.patch_spatial and spec.axes["text"].opt == 77


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adapter_rank": 4, "adapter_targets": ("blocks.*",)}, "no linear of the network is named 'blocks.*'"),
        ({"precision": "int8"}, "a U-Net of 2 levels.*int8 is for products of blocks; take fp16"),
        ({"profiles": ("frames=1,1,5",)}, "max 5x64x64: Stable Diffusion makes images, not videos"),
        ({"profiles": ("height=6,32,64",)}, "min 1x6x4: latent height 3 is not a multiple of 2"),
    ],
)
def test_what_a_unet_has_not_is_refused_before_anything_is_written(made, tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        export_bundle(made("1.x").path, tmp_path / "out", ExportSettings(**settings))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_network_that_predicts_velocity_passes_the_gate_in_halves(made, tmp_path):
    """Pages export a 1.x, and the tests below an XL."""
    bundle, path = made("2.x"), tmp_path / "denoiser.onnx"
    spec, settings = specs_of(bundle, "batch=1,1,2")["denoiser"], ExportSettings(precision="fp16")
    report = export_network("denoiser", bundle, bundle.load_tokenizer(), spec, path, settings)
    cases = report["cases"]
    assert {"sigma 0.002", "sigma 80.0", "all sides max", "all sides min", "text max, others min"} <= cases.keys()
    assert 0 < report["worst"] <= verify.TOLERANCES["fp16"] / 2
    check_operators(path, "10.1")
    nodes = onnx.load(path).graph.node
    softmaxes = [node for node in nodes if node.op_type == "Softmax"]
    assert len(softmaxes) == 2 * 4, "of pictures and of texts, in each of four places"
    for softmax in softmaxes:
        assert [node.op_type for node in nodes if softmax.output[0] in node.input] == ["MatMul"], softmax.name


@pytest.mark.slow
def test_every_part_of_a_bundle_is_exported(exported):
    report = exported.manifest["export"]["onnx"]["report"]
    assert report.keys() == {"text_encoder", "denoiser", "video_decoder", "video_encoder", "video"}
    assert all(report[name]["worst"] <= 1e-5 for name in report.keys() - {"video"}) and report["video"]["psnr"] >= 50
    for name in report.keys() - {"video"}:
        check_operators(exported.path / f"onnx/{name}.onnx", "10.1")


@pytest.mark.slow
def test_the_picture_is_torchs(exported, tmp_path):
    """At its own size and another, two in a batch; from the command line, in a file without loss."""
    settings = {"seeds": [1, 2], "num_steps": 5, "guidance": 7.5, "negative_prompt": "a blue robot"}
    made = {}
    for runtime in ("torch", "onnx"):
        pipeline = TextToVideo.from_pretrained(exported, device="cpu", runtime=runtime)
        made[runtime] = [
            video.video[0].astype(int)
            for size in ({}, {"height": 24, "width": 56})
            for video in pipeline(["a red seven", "the robot waves"], **settings, **size)
        ]
        out = tmp_path / f"{runtime}.png"
        arguments = ["--checkpoint_path", str(exported.path), "--prompt", "a red seven", "--device", "cpu"]
        told = ["--num_steps", "5", "--runtime", runtime, "--video_save_path", str(out)]
        assert generate.main([*arguments, *told]) == 0
        made[runtime].append(read_video(out)[0][0].astype(int))
    assert [picture.shape for picture in made["onnx"]] == [(32, 32, 3)] * 2 + [(24, 56, 3)] * 2 + [(32, 32, 3)]
    for ours, theirs in zip(made["onnx"], made["torch"], strict=True):
        assert np.abs(ours - theirs).max() <= 1 and theirs.std() > 1
    assert np.abs(made["onnx"][0] - made["onnx"][1]).max() > 1, "negative control"
    assert json.loads((tmp_path / "onnx.png.json").read_text())["runtime"] == "onnx"


def lora(bundle, folder):
    """A file of kohya's scripts, at its scale."""
    save_file(kohya(bundle), folder / "lora.safetensors")
    return {str(folder / "lora.safetensors"): 0.8}


def pictures_of(path, runtime, **settings):
    pipeline = TextToVideo.from_pretrained(path, device="cpu", runtime=runtime)
    made = pipeline(["a red seven", "the robot waves"], seeds=[1, 2], num_steps=3, guidance=5.0, **settings)
    return [video.video[0].astype(int) for video in made]


@pytest.fixture(scope="module")
def slotted(made, tmp_path_factory):
    """An XL with room for adapters of every linear, and of its convolutions of single pixels."""
    out = tmp_path_factory.mktemp("slotted") / "exported"
    room = {"adapter_rank": 4, "adapter_targets": ("*",)}
    return export_denoiser(made("xl").path, out, profiles=("batch=1,1,2",), video_steps=2, **room)


@pytest.mark.slow
def test_the_gate_compares_with_adapters_beside_torchs_linears(slotted):
    report = slotted.manifest["export"]["onnx"]["report"]["denoiser"]
    assert {"adapters, two in a slot", "adapters, one beside none"} <= report["cases"].keys()
    assert report["worst"] <= 1e-5
    path, spec = slotted.path / "onnx/denoiser.onnx", open_exported(slotted, "onnx").network("denoiser")
    check_operators(path, "10.1")
    slots = adapter_inputs(slotted, "onnx")
    network = build_network("denoiser", slotted, slotted.load_tokenizer(), torch.float32, slots)
    (case,) = (
        case for case in reference_cases(network, spec, slotted, slots) if case.name == "adapters, two in a slot"
    )
    verify.verify_network(path, spec, [case], slotted.config, "fp32", {}, lambda: network)
    for key in ("blocks.attn2.to_k.up", "blocks.conv_shortcut.24x8.down", "network.add_embedding.linear_1.up"):
        turned = replace(case, inputs=case.inputs | {key: case.inputs[key].flip(0)})
        with pytest.raises(UserError, match="its F.* differs"):
            verify.verify_network(path, spec, [turned], slotted.config, "fp32", {}, lambda: network)


@pytest.mark.slow
def test_each_picture_has_a_file_of_its_own(slotted, tmp_path):
    asked = [lora(slotted, tmp_path), {}]
    ours, theirs, none = (
        pictures_of(slotted.path, runtime, adapters=adapters)
        for runtime, adapters in (("onnx", asked), ("torch", asked), ("onnx", {}))
    )
    assert max(np.abs(one - other).max() for one, other in zip(ours, theirs, strict=True)) <= 1
    assert np.abs(ours[0] - none[0]).max() > 1, "negative control"
    assert np.array_equal(ours[1], none[1])


@pytest.mark.slow
def test_a_merged_network_makes_the_pictures_of_its_adapter(made, tmp_path):
    """`megadit bundle --merge`: a bundle as any other, and those of 1.x are exported by README.md."""
    bundle = made("1.x")
    adapters = lora(bundle, tmp_path)
    merged = [str(tmp_path / "merged"), "--merge", *(f"{path}:{scale}" for path, scale in adapters.items())]
    assert bundle_main([str(bundle.path), *merged]) == 0
    ours = pictures_of(tmp_path / "merged", "torch")
    beside, base = (pictures_of(bundle.path, "torch", adapters=each) for each in (adapters, {}))
    assert max(np.abs(one - other).max() for one, other in zip(ours, beside, strict=True)) <= 1
    assert np.abs(ours[0] - base[0]).max() > 1, "negative control"


@pytest.mark.slow
def test_sizes_that_are_fixed_in_a_graph_of_xl_are_refused(exported, tmp_path):
    """Negative control: it is told the size of the picture that it was traced with, whatever the picture's."""
    spec, path = open_exported(exported, "onnx").network("denoiser"), tmp_path / "denoiser.onnx"
    network = build_network("denoiser", exported, exported.load_tokenizer(), torch.float32)
    model = onnx.load(exported.path / "onnx/denoiser.onnx")
    (told,) = (node for node in model.graph.node if node.op_type == "Concat" and len(node.input) == 6)
    values = helper.make_tensor("fixed", onnx.TensorProto.FLOAT, [6], [8.0, 12.0, 0.0, 0.0, 8.0, 12.0])
    model.graph.initializer.append(values)
    told.CopyFrom(helper.make_node("Identity", ["fixed"], list(told.output), name=told.name))
    onnx.save(model, path)
    weights, largest = weight_hashes(network), {name: axis.max for name, axis in spec.axes.items()}
    case = reference(network, "all sides max", contract.sample_inputs(spec, largest))
    with pytest.raises(UserError, match="is not the network: with all sides max .* layer that differs is "):
        verify.verify_network(path, spec, [case], exported.config, "fp32", weights, lambda: network)


@pytest.mark.slow
def test_engines_are_asked_for_the_same_sizes(exported, tmp_path):
    fake = FakePolygraphy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megadit.export.engines._gpu", lambda: ("H200", (9, 0)))
        write_engines(open_exported(exported, "onnx"), tmp_path, EngineSettings(), Libraries(fake_tensorrt(), fake))
    profiles = dict(zip(("text_encoder", "denoiser", "video_decoder", "video_encoder"), fake.profiles, strict=True))
    assert profiles["denoiser"] == {
        "x": ((1, 4, 1, 2, 2), (2, 4, 1, 16, 16), (4, 4, 1, 32, 32)),
        "sigma": ((1,), (2,), (4,)),
        "text": ((1, 1, 40), (2, 77, 40), (4, 77, 40)),
        "pooled": ((1, 20), (2, 20), (4, 20)),
    }
    assert profiles["text_encoder"] == {"tokens": ((1, 2, 77), (1, 2, 77), (2, 2, 77))}
    assert {file.name for file in tmp_path.iterdir()} == {"settings.json", *(f"{name}.plan" for name in profiles)}
