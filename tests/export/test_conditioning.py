"""Exported denoisers to which parts of a video are given: torch's videos for every use."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megadit.export import signatures as contract
from megadit.export import verify
from megadit.export.conditioning_cases import conditioning_inputs, random_medium
from megadit.export.networks import build_network
from megadit.export.quantize import calibrate
from megadit.export.references import inputs_at, reference_cases
from megadit.infer.conditioning.items import ConditioningItem
from megadit.infer.generate import command as generate
from megadit.infer.media.animations import encode_image
from megadit.infer.media.video_io import read_video
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.runtimes.load import open_exported, taken
from megadit.infer.runtimes.onnx import OnnxNetwork, tensorrt_options
from megadit.models.shared.errors import UserError
from megadit.models.text_encoders.image_encoder import ImageEncoder
from megadit.train.data.packs.conditioning import KINDS
from tests.bundles import CONFIG, DEFAULTS, write_tiny_bundle
from tests.exports import export_denoiser
from tests.models.convert.test_conditioning import image_parts

SETTINGS = {"num_frames": 9, "seeds": [1, 2]}
"""Neither the size that was traced, nor that which is compared."""


@pytest.fixture(scope="module")
def pipelines(exported_able) -> dict[str, TextToVideo]:
    return {
        runtime: TextToVideo.from_pretrained(exported_able, device="cpu", runtime=runtime)
        for runtime in ("torch", "onnx")
    }


def medium(kind: str) -> ConditioningItem:
    return random_medium(kind, replace(DEFAULTS, num_frames=SETTINGS["num_frames"]), seed=7)


CASES = {kind: ((medium(kind),), {}) for kind in KINDS} | {
    "both ends": ((medium("first_frame"), medium("last_frame")), {}),
    "two scales": ((medium("edit"),), {"image_guidance": 1.5}),
    "two scales of a frame": ((medium("first_frame"),), {"image_guidance": 3.0, "negative_prompt": "a dog"}),
    "nothing": ((), {}),
}


def difference(one: np.ndarray, other: np.ndarray) -> int:
    return np.abs(one.astype(int) - other).max()


@pytest.mark.parametrize("patch_temporal", [1, 3], ids=["every frame", "patches in time"])
def test_inputs_say_what_torch_is_told(tmp_path, patch_temporal):
    """The network behind the graph, fed with tensors, beside torch's way, which knows the places."""
    config = replace(CONFIG, conditioning_sigma=0.02, patch_temporal=patch_temporal)
    training, defaults = {"conditioning": dict.fromkeys(KINDS, 0.1)}, replace(DEFAULTS, num_frames=21)
    bundle = write_tiny_bundle(tmp_path / "bundle", config, defaults=defaults, training=training)
    tokenizer, encoder = bundle.load_tokenizer(), bundle.load_text_encoder()
    profiles = contract.default_profiles(bundle, tokenizer, encoder)
    spec = contract.specs(profiles, config, tokenizer, conditionings=bundle.conditionings)["denoiser"]
    network = build_network("denoiser", bundle, tokenizer, torch.float32)
    usual, found = inputs_at(spec, 2.0, bundle), {}
    for kind in KINDS:
        if patch_temporal > 1 and kind in ("last_frame", "keyframes"):
            continue  # one frame is no token there
        inputs, conditioning = conditioning_inputs((random_medium(kind, bundle.defaults, seed=4),), bundle, usual)
        with torch.no_grad():
            found[kind] = network(*inputs.values())
            expected = network.denoiser(inputs["x"], inputs["sigma"], conditioning)
        torch.testing.assert_close(found[kind], expected, atol=1e-5, rtol=1e-5, msg=kind)
        assert inputs["is_clean"].any() and not inputs["is_clean"].all(), kind
    edited = found.pop("edit")[:, :, :6]
    assert all((edited - video[:, :, :6]).abs().max() > 0.01 for video in found.values())


FIRST, LAST = (
    ConditioningItem(kind=kind, frames=np.random.default_rng(seed).integers(0, 256, (1, 32, 48, 3), dtype=np.uint8))
    for seed, kind in enumerate(("first_frame", "last_frame"))
)
BESIDE = {
    "wan2.2": ({}, (FIRST,)),
    "wan2.1": ({"image_size": 20, "image_positions": 10}, (FIRST, LAST)),
}
"""Wan's networks of images -> what they read that 2.2's do not, and what they are given (2.1's first and last)."""


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
def test_networks_that_read_images_beside_their_latents(tmp_path, name):
    changes, given = BESIDE[name]
    config = replace(
        CONFIG,
        num_layers=1,
        family="wan",
        parameterization="flow",
        conditioning_mode="channels",
        conditioning_sigma=0.0,
    )
    for part in image_parts():
        part.save_pretrained(tmp_path / "clip")
    clip = ImageEncoder(model=str(tmp_path / "clip")) if changes else None
    uses = [medium.kind for medium in given]
    bundle = write_tiny_bundle(
        tmp_path / "bundle", replace(config, **changes), training={"conditioning": uses}, image_encoder=clip
    )
    exported = export_denoiser(bundle.path, tmp_path / "exported", profiles=("text=1,4,9", "batch=1,1,2"))
    report = exported.manifest["export"]["onnx"]["report"]
    cases = report["denoiser"]["cases"]
    assert (
        f"conditioning {' and '.join(uses)}" in cases and len([case for case in cases if case.startswith("sigma")]) == 7
    )
    assert report["denoiser"]["worst"] <= 1e-4 and report["video"]["psnr"] >= 50
    assert taken(exported, "onnx") == tuple(uses)
    assert min(calibrate(bundle, ["a cat"]).values()) > 0, "for 8 bits it is given something, too"
    by_onnx, by_torch = (
        TextToVideo.from_pretrained(exported, device="cpu", runtime=name) for name in ("onnx", "torch")
    )
    asked = {"seeds": [1, 2], "num_frames": 9}
    made, expected = (pipeline(["a cat", "dogs"], conditioning=given, **asked) for pipeline in (by_onnx, by_torch))
    assert max(difference(ours.video, theirs.video) for ours, theirs in zip(made, expected, strict=True)) <= 1
    others = tuple(replace(medium, frames=255 - medium.frames) for medium in given)
    (other, _) = by_onnx(["a cat", "dogs"], conditioning=others, **asked)
    assert difference(other.video, made[0].video) > 1, "negative control: what is given must matter"
    for missing in range(len(given)):
        with pytest.raises(UserError, match="needs a first frame"):
            by_onnx(["a cat"], conditioning=given[:missing])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["augmented", "marked"])
def test_networks_that_are_told_by_marks(tmp_path, form):
    """Cosmos' forms, whose marks are a channel of the tokens, at every noise level."""
    family = {"family": "cosmos", "adaln_lora_dim": 4, "padding_mask_channel": True}
    config = replace(
        CONFIG, num_layers=1, parameterization="flow", conditioning_mode=form, conditioning_sigma=1e-3, **family
    )
    uses = ("first_frame", "prefix")
    bundle = write_tiny_bundle(tmp_path / "bundle", config, training={"conditioning": dict.fromkeys(uses, 0.5)})
    exported = export_denoiser(bundle.path, tmp_path / "exported", profiles=("text=1,4,9", "batch=1,1,2"))
    report = exported.manifest["export"]["onnx"]["report"]["denoiser"]
    assert report["worst"] <= 1e-4 and {f"conditioning {kind}" for kind in uses} <= report["cases"].keys()
    assert len([name for name in report["cases"] if name.startswith("sigma")]) == 7
    ours, theirs = (
        TextToVideo.from_pretrained(exported, device="cpu", runtime=runtime)(
            ["a cat"], seeds=1, num_frames=9, conditioning=medium("prefix")
        )
        for runtime in ("onnx", "torch")
    )
    assert difference(ours[0].video, theirs[0].video) <= 1


@pytest.mark.slow
def test_every_use_is_torchs(pipelines):
    """Two videos at once, of which each has a seed and text of its own."""
    made = {}
    for name, (media, settings) in CASES.items():
        ours, theirs = (
            [video.video for video in pipeline(["a cat", "dogs"], conditioning=media, **SETTINGS, **settings)]
            for pipeline in (pipelines["onnx"], pipelines["torch"])
        )
        assert max(map(difference, ours, theirs)) <= 1, name
        made[name] = ours[0]
    assert min(difference(made["nothing"], video) for name, video in made.items() if name != "nothing") > 1
    assert difference(made["edit"], made["two scales"]) > 1


@pytest.mark.slow
def test_the_gate_compares_every_use(exported_able):
    report = exported_able.manifest["export"]["onnx"]["report"]["denoiser"]
    assert report["worst"] <= 1e-4 and {f"conditioning {kind}" for kind in KINDS} <= report["cases"].keys()
    assert taken(exported_able, "onnx") == taken(exported_able, "torch") == tuple(KINDS)


@pytest.mark.slow
def test_a_graph_with_another_noise_level_of_given_tokens_is_refused(exported_able):
    """The graph is compared with a network that differs in nothing else."""
    spec, path = open_exported(exported_able, "onnx").network("denoiser"), exported_able.path / "onnx/denoiser.onnx"
    network = build_network("denoiser", exported_able, exported_able.load_tokenizer(), torch.float32)
    network.denoiser.dit.config = replace(exported_able.config, conditioning_sigma=0.5)
    cases = {case.name: case for case in reference_cases(network, spec, exported_able)}

    def compare(name: str) -> None:
        verify.verify_network(path, spec, [cases[name]], exported_able.config, "fp32", {}, lambda: network)

    compare("sigma 5.0")
    for kind in KINDS:
        with pytest.raises(ValueError, match=f"with conditioning {kind} its F.* differs"):
            compare(f"conditioning {kind}")


@pytest.mark.slow
def test_more_than_was_exported_for_is_refused(pipelines):
    keyframes = tuple(replace(medium("keyframes"), frame=1) for _ in range(40))
    with pytest.raises(ValueError, match="time is 43 in x, but was exported for 1 to 16"):
        pipelines["onnx"](["a cat"], conditioning=keyframes, num_frames=9)


@pytest.mark.slow
def test_profiles_have_room_for_what_is_given(exported_able):
    spec = open_exported(exported_able, "onnx").network("denoiser")
    options = tensorrt_options(spec)
    assert options["trt_profile_min_shapes"].endswith("clean:1x48x1x2x2,is_clean:1x2x2,times:1")
    assert options["trt_profile_max_shapes"].endswith("clean:4x48x16x16x24,is_clean:16x16x24,times:16")
    assert OnnxNetwork(exported_able.path / "onnx/denoiser.onnx", spec, device=torch.device("cpu")).spec == spec


@pytest.mark.slow
def test_generate_takes_files(exported_able, tmp_path):
    picture = encode_image(medium("first_frame").frames[0], ".png")
    (tmp_path / "a.png").write_bytes(picture)
    videos = []
    for runtime in ("torch", "onnx"):
        out = tmp_path / f"{runtime}.mp4"
        arguments = ["--checkpoint_path", str(exported_able.path), "--prompt", "a cat"]
        arguments += ["--last_image", str(tmp_path / "a.png")]
        arguments += ["--device", "cpu", "--runtime", runtime, "--video_save_path", str(out)]
        assert generate.main(arguments) == 0
        videos.append(read_video(out)[0])
    assert difference(*videos) <= 3, "two encodings of frames that differ by 1"


def test_an_export_without_such_inputs_takes_nothing(exported, tmp_path):
    """As all were before, and as networks are that were not trained for it."""
    assert taken(exported, "onnx") == ()
    (tmp_path / "a.png").write_bytes(encode_image(medium("first_frame").frames[0], ".png"))
    arguments = ["--checkpoint_path", str(exported.path), "--prompt", "a cat", "--last_image", str(tmp_path / "a.png")]
    assert generate.main([*arguments, "--device", "cpu", "--runtime", "onnx"]) == 2
