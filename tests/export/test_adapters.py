"""Exported denoisers that take adapters: torch's videos, a slot for each sample, the base where one is empty."""

import json
from dataclasses import replace

import imageio.v3 as iio
import numpy as np
import pytest
import torch

from megadit.export import signatures as contract
from megadit.export import verify
from megadit.export.build import ExportSettings, export_network
from megadit.export.command import main as export
from megadit.export.networks import build_network
from megadit.export.references import Case, reference_cases
from megadit.infer.commands.check_adapter import problem_of
from megadit.infer.generate import command as generate
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.runtimes.exported import ExportedDenoiser
from megadit.infer.runtimes.load import adapter_inputs, open_exported
from megadit.infer.runtimes.onnx import tensorrt_options
from megadit.models.configs.adapter import AdapterConfig
from megadit.models.convert.adapters.files import bundle_fingerprint
from megadit.models.lora.inputs import AdapterInputs
from megadit.models.shared.errors import UserError
from tests.bundles import CONFIG, write_tiny_bundle
from tests.exports import RANK
from tests.infer.conftest import make_adapter

PROMPTS, SEEDS = ["a red seven", "a blue two", "waves"], [3, 4, 5]


@pytest.fixture(scope="module")
def adapters(tiny_bundle, tmp_path_factory) -> dict[str, str]:
    folder, path = tmp_path_factory.mktemp("adapters"), tiny_bundle.path
    return {
        "one": make_adapter(folder / "one", path, 1),
        "two": make_adapter(folder / "two", path, 2, rank=3),
        "few": make_adapter(folder / "few", path, 3, rank=4, patterns=("blocks.1.*attention.[qv]",)),
        "dora": make_adapter(folder / "dora", path, 4, kind="dora"),
        "large": make_adapter(folder / "large", path, 5, rank=RANK + 1),
        "elsewhere": make_adapter(folder / "elsewhere", path, 6, patterns=("text_embedder",)),
    }


@pytest.fixture(scope="module")
def pipelines(slotted) -> dict[str, TextToVideo]:
    return {
        runtime: TextToVideo.from_pretrained(slotted, device="cpu", runtime=runtime) for runtime in ("torch", "onnx")
    }


def made(pipeline: TextToVideo, asked, prompts=PROMPTS, seeds=SEEDS, **settings) -> list[np.ndarray]:
    videos = pipeline(prompts, seeds=seeds, adapters=asked, **settings)
    return [video.video.astype(int) for video in videos]


def difference(one: np.ndarray, other: np.ndarray) -> int:
    return np.abs(one - other).max()


@pytest.mark.slow
def test_each_sample_has_its_own_and_videos_are_torchs(pipelines, adapters):
    asked = [{adapters["one"]: 0.8}, {adapters["one"]: -0.5, adapters["two"]: 0.7}, {}]
    ours, theirs = (made(pipelines[name], asked) for name in ("onnx", "torch"))
    assert max(map(difference, ours, theirs)) <= 1
    for place, scales in enumerate(asked):
        alone = made(pipelines["onnx"], scales, PROMPTS[place : place + 1], SEEDS[place : place + 1])
        assert difference(alone[0], ours[place]) <= 1
    swapped = made(pipelines["onnx"], asked[::-1])
    assert min(difference(swapped[place], ours[place]) for place in (0, 2)) > 1, "negative control"
    for settings in ({"adapter_interval": (0.5, 10.0)}, {"second_prompt": "left", "second_guidance": 1.5}):
        few = [{adapters["few"]: 1.0}, {adapters["two"]: 1.0}, {adapters["one"]: 0.0}]
        ours, theirs = (made(pipelines[name], few, **settings) for name in ("onnx", "torch"))
        assert max(map(difference, ours, theirs)) <= 1, settings


@pytest.mark.slow
def test_an_empty_slot_is_a_graph_without_slots_bit_for_bit(pipelines, exported, adapters):
    """On this runtime; and nothing of what was in it stays."""
    base = made(TextToVideo.from_pretrained(exported, device="cpu", runtime="onnx"), {})
    assert all(map(np.array_equal, made(pipelines["onnx"], {}), base))
    first = made(pipelines["onnx"], {adapters["one"]: 1.0})
    made(pipelines["onnx"], {adapters["two"]: 1.0})
    assert all(map(np.array_equal, made(pipelines["onnx"], {adapters["one"]: 1.0}), first))
    assert all(map(np.array_equal, made(pipelines["onnx"], {adapters["one"]: 0.0}), base))
    mixed = made(pipelines["onnx"], [{}, {adapters["one"]: 1.0}, {}])
    assert np.array_equal(mixed[0], base[0]) and np.array_equal(mixed[2], base[2])
    assert difference(mixed[1], base[1]) > 1


@pytest.mark.slow
def test_the_gate_compares_with_adapters_loaded_in_torch(slotted):
    """And finds a graph whose slots are another's."""
    report = slotted.manifest["export"]["onnx"]["report"]["denoiser"]
    names = {"adapters, two in a slot", "adapters, one beside none"}
    assert names <= report["cases"].keys() and report["worst"] <= 1e-4
    spec, slots = open_exported(slotted, "onnx").network("denoiser"), adapter_inputs(slotted, "onnx")
    network = build_network("denoiser", slotted, slotted.load_tokenizer(), torch.float32, slots)
    cases = {case.name: case for case in reference_cases(network, spec, slotted, slots)}
    path = slotted.path / "onnx/denoiser.onnx"

    def compare(case: Case) -> None:
        verify.verify_network(path, spec, [case], slotted.config, "fp32", {}, lambda: network)

    for name in names:
        compare(cases[name])
        for key in ("blocks.mlp.fc2.up", "blocks.self_attention.v.down", "final_layer.linear.up"):
            turned = cases[name].inputs | {key: cases[name].inputs[key].flip(0)}
            with pytest.raises(UserError, match=f"with {name} its F.* differs"):
                compare(replace(cases[name], inputs=turned))


@pytest.mark.slow
def test_what_inputs_cannot_hold_is_refused_before_any_work(pipelines, adapters, slotted, capsys):
    refused = {
        "dora": "a DoRA scales the output of its base",
        "large": f"rank {RANK + 1} together, the exported networks at most {RANK}.*--adapter_rank {RANK + 1}",
        "elsewhere": "text_embedder, which was exported without inputs for adapters",
    }
    base = {"network": slotted.config.to_dict(), "base": bundle_fingerprint(slotted)}
    slots = adapter_inputs(slotted, "onnx").to_dict()
    for name, reason in refused.items():
        with pytest.raises(UserError, match=reason):
            made(pipelines["onnx"], {adapters[name]: 1.0})
        assert problem_of(adapters[name], **base) is None
        assert problem_of(adapters[name], **base, slots=slots) is not None
    asked = []
    together = {adapters["two"]: 1.0, adapters["few"]: 1.0}
    with pytest.raises(UserError, match="rank 7 together"):
        pipelines["onnx"](PROMPTS, adapters=[{}, together, {}], on_step=asked.append)
    assert not asked
    made(pipelines["onnx"], {adapters["two"]: 1.0, adapters["few"]: 0.0})
    command = ["--checkpoint_path", str(slotted.path), "--prompt", "a", "--device", "cpu", "--runtime", "onnx"]
    assert generate.main([*command, "--adapter", adapters["two"], "--adapter", adapters["few"]]) == 2
    assert "rank 7 together" in capsys.readouterr().err


@pytest.mark.slow
def test_generate_takes_them(slotted, adapters, tmp_path):
    lines = [{"prompt": "a", "adapter": [f"{adapters['one']}:0.8"]}, {"prompt": "b"}, {"prompt": "c", "adapter": []}]
    lines[2]["adapter"] = [adapters["two"], f"{adapters['one']}:-1"]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    videos = {}
    for runtime in ("torch", "onnx"):
        command = ["--checkpoint_path", str(slotted.path), "--prompt_file", str(tmp_path / "prompts.jsonl"), "--device"]
        command += ["cpu", "--seed", "1", "--num_video_frames", "1"]  # images, which are written without loss
        out = tmp_path / runtime
        assert generate.main([*command, "--runtime", runtime, "--video_save_path", str(out)]) == 0
        videos[runtime] = [iio.imread(path).astype(int) for path in sorted(out.glob("*.png"))]
    assert len(videos["onnx"]) == 3
    assert max(map(difference, *videos.values())) <= 1
    assert difference(videos["onnx"][0], videos["onnx"][1]) > 1


def test_an_export_without_such_inputs_takes_none(exported, adapters, capsys):
    command = ["--checkpoint_path", str(exported.path), "--prompt", "a", "--device", "cpu", "--runtime", "onnx"]
    assert generate.main([*command, "--adapter", adapters["one"]]) == 2
    assert "exported without inputs for adapters: export again with --adapter_rank" in capsys.readouterr().err
    with pytest.raises(UserError, match="networks exported with --adapter_rank"):
        made(TextToVideo.from_pretrained(exported, device="cpu", runtime="onnx"), {adapters["one"]: 1.0})
    assert export([str(exported.path), "out", "--adapter_targets", "blocks.*"]) == 2
    assert "--adapter_targets needs --adapter_rank" in capsys.readouterr().err


def test_a_network_of_many_blocks_has_few_inputs():
    many = AdapterInputs(config=replace(CONFIG, num_layers=28), rank=16)
    assert len(many.inputs) == len(AdapterInputs(config=CONFIG, rank=16).inputs) == 20
    assert many.inputs["blocks.self_attention.q.down"] == (28, 16, CONFIG.hidden_size)
    assert many.inputs["blocks.mlp.fc1.up"] == (28, 4 * CONFIG.hidden_size, 16)


def test_profiles_have_the_slots_of_a_batch(tiny_bundle):
    tokenizer = tiny_bundle.load_tokenizer()
    profiles = contract.default_profiles(tiny_bundle, tokenizer, tiny_bundle.load_text_encoder())
    slots = AdapterInputs(config=CONFIG, rank=4, targets=("blocks.*.mlp.fc2",))
    spec = contract.specs(profiles, CONFIG, tokenizer, slots=slots)["denoiser"]
    options = tensorrt_options(spec)
    assert options["trt_profile_min_shapes"].endswith("blocks.mlp.fc2.down:1x2x4x128,blocks.mlp.fc2.up:1x2x32x4")
    assert options["trt_profile_max_shapes"].endswith("blocks.mlp.fc2.down:8x2x4x128,blocks.mlp.fc2.up:8x2x32x4")


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "conditionings"), [("bf16", ("first_frame",)), ("int8", ())])
def test_precisions_and_given_parts(tmp_path, precision, conditionings):
    """The export compares, and refuses what differs; with parts given, conditions come twice, and so do their slots."""
    config = replace(CONFIG, num_layers=1, conditioning_sigma=0.02) if conditionings else replace(CONFIG, num_layers=1)
    training = {"conditioning": dict.fromkeys(conditionings, 0.5)} if conditionings else None
    bundle = write_tiny_bundle(tmp_path / "bundle", config, training=training)
    tokenizer = bundle.load_tokenizer()
    targets = ("blocks.*.modulation.*", "blocks.*.self_attention.*")
    settings = ExportSettings(adapter_rank=RANK, adapter_targets=targets, precision=precision)
    sizes = contract.default_profiles(bundle, tokenizer, bundle.load_text_encoder())
    profiles = contract.parse_profiles(["text=1,4,9", "batch=1,1,2"], sizes)
    slots = settings.adapter_inputs(config)
    spec = contract.specs(profiles, config, tokenizer, conditionings=bundle.conditionings, slots=slots)["denoiser"]
    report = export_network("denoiser", bundle, tokenizer, spec, tmp_path / "denoiser.onnx", settings)
    assert {"all sides max", "adapters, two in a slot", *(f"conditioning {kind}" for kind in conditionings)} <= report[
        "cases"
    ].keys()


def test_packing_folds_scaling_and_pads():
    slots = AdapterInputs(config=CONFIG, rank=3, targets=("blocks.*.mlp.fc2",))
    about = AdapterConfig(rank=2, alpha=8.0, targets=slots.targets)
    state = {"blocks.1.mlp.fc2.down": torch.randn(2, 128), "blocks.1.mlp.fc2.up": torch.randn(32, 2)}
    packed = slots.packed(state, about)
    filled = slots.filled(2, [(packed, torch.tensor([0.0, 0.5]))])
    down, up = filled["blocks.mlp.fc2.down"], filled["blocks.mlp.fc2.up"]
    expected = 0.5 * 4.0 * state["blocks.1.mlp.fc2.up"] @ state["blocks.1.mlp.fc2.down"]
    torch.testing.assert_close(up[1, 1] @ down[1, 1], expected)
    assert not down[0].any() and not up[0].any() and not up[1, 0].any() and not down[1, 1, 2].any()
    networks = {"denoiser": lambda inputs, shape: inputs["x"]}
    denoiser = ExportedDenoiser(type("Networks", (dict,), {"device": torch.device("cpu")})(networks), slots)
    denoiser.load_adapter("a", state, about)
    denoiser.remove_adapter("a")
    assert not denoiser.adapters
