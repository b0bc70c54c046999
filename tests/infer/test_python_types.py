"""What notebooks do: numpy's and torch's numbers, other names, another default dtype, copies."""

import copy
import dataclasses
import json
import multiprocessing
import pickle

import numpy as np
import pytest
import torch

from megadit.infer.pipeline.batches import Videos
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.runtimes.torch import float32_by_default
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.shared.errors import UserError
from megadit.serve.transports import _in_json

from .conftest import make_adapter

SIZE = {"num_frames": 1, "height": 16, "width": 16}


def latents(pipeline, **given):
    (video,) = pipeline(["a"], **{"seeds": 3, "num_steps": 2, **SIZE, **given})
    json.dumps({"settings": video.settings.to_dict(), "seed": video.seed})
    return video.latents_CTHW


@pytest.mark.parametrize(
    "given",
    [
        {"seeds": np.int64(3), "num_steps": np.int32(2), "height": np.int16(16)},
        {"seeds": np.array([3]), "num_steps": np.array(2), "width": np.uint8(16)},
        {"seeds": torch.tensor(3), "num_steps": torch.tensor(2), "batch_size": np.int64(1)},
        {"seeds": torch.tensor([3]), "guidance_interval": np.array([0.0, 1e9])},
        {"seeds": [np.int64(3)], "sigma_min": np.float32(0.002)},
        {"seeds": (torch.tensor(3),), "num_frames": np.int64(1)},
    ],
    ids=lambda given: "-".join(given),
)
def test_numbers_of_other_libraries(pipeline, given):
    assert (latents(pipeline, **given) - latents(pipeline)).abs().max() <= 1e-6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"seeds": 3.0}, "seed=3.0 must be a whole number"),
        ({"seeds": np.float64(3)}, "seed=3.0 must be a whole number"),
        ({"seeds": [None]}, "seed=None must be a whole number"),
        ({"seeds": "3"}, "seed='3' must be a whole number"),
        ({"prompts": [None]}, "prompts must be texts; got None"),
        ({"prompts": None}, "prompts are missing"),
        ({"height": np.float32(16)}, "height=16.0 must be a whole number"),
        ({"batch_size": 1.5}, "batch_size=1.5 must be a whole number"),
        ({"guidance_scale": 5.0}, "unknown setting 'guidance_scale'; did you mean 'guidance'"),
        ({"num_inference_steps": 5}, "unknown setting 'num_inference_steps'; did you mean 'num_steps'"),
        ({"prompts": None, "prompt": "a"}, "unknown setting 'prompt'; did you mean 'prompts'"),
        ({"generator": 0}, "unknown setting 'generator'"),
    ],
)
def test_what_is_none_of_these_is_told_in_one_line(pipeline, call, message):
    with pytest.raises(UserError, match=message):
        pipeline(**{"prompts": ["a"], **SIZE, **call})


def test_settings_hold_pythons_own_numbers():
    settings = SamplingSettings(
        num_steps=np.int64(4), guidance=torch.tensor(2.0), num_frames=1, height=8, width=8, fps=np.float32(8)
    )
    assert [type(value) for value in (settings.num_steps, settings.guidance, settings.fps)] == [int, float, float]
    for value in (np.int64(3), np.int32(3), torch.tensor(3)):
        assert type(_in_json("seed", value)) is int, "what a client sends"
    assert Videos.read(np.array(["a"]), np.int64(1), {"x": np.float32(0.5)}, [()]).adapters == [{"x": 0.5}]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_another_default_dtype(bundle_dir, pipeline, dtype):
    expected = latents(pipeline)
    torch.set_default_dtype(dtype)
    try:
        made = TextToVideo.from_pretrained(bundle_dir, device="cpu", dtype="float32", overlap_decoding=True)
        stream = made.stream(["a"], made.defaults)
        next(stream)
        assert torch.get_default_dtype() == dtype, "between two videos"
        found = latents(made)
        with float32_by_default(), float32_by_default():
            assert torch.get_default_dtype() == torch.float32
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("options", [{}, {"resident_blocks": 1}, {"offload_text_encoder": True}], ids=str)
def test_a_copy_makes_the_same_video(bundle_dir, tmp_path, options):
    """Pickled or copied, after a generation with an adapter and with a weight changed by hand, which it keeps."""
    adapters = {make_adapter(tmp_path / "one", bundle_dir, 1): 1.0}
    pipeline = TextToVideo.from_pretrained(bundle_dir, device="cpu", **options)
    pipeline.defaults = dataclasses.replace(pipeline.defaults, num_steps=2)
    asked = {} if "resident_blocks" in options else {"adapters": adapters}
    if not options:
        next(pipeline.denoiser.dit.parameters()).data.mul_(1.5)
    expected = latents(pipeline, **asked)
    for copied in (pickle.loads(pickle.dumps(pipeline)), copy.copy(pipeline), copy.deepcopy(pipeline)):
        assert torch.equal(latents(copied, **asked), expected) and copied.defaults == pipeline.defaults


@pytest.mark.slow
def test_a_pipeline_is_sent_to_another_process(bundle_dir):
    pipeline = TextToVideo.from_pretrained(bundle_dir, device="cpu")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        (found,) = pool.map(latents, [pipeline])
    assert torch.equal(found, latents(pipeline))
