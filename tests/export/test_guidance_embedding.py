"""Networks that are told a scale of guidance: an input of their graph, which passes the gate and is asked once."""

from dataclasses import replace

import pytest
import torch

from megadit.export import signatures as contract
from megadit.export.conditioning_cases import combined_conditioning, conditioning_inputs
from megadit.export.networks import build_network
from megadit.export.references import inputs_at
from megadit.infer.pipeline.pipeline import TextToVideo
from tests.bundles import CONFIG, write_tiny_bundle
from tests.exports import export_denoiser

TOLD = replace(CONFIG, num_layers=1, guidance_embedding_range=(1.0, 6.0))
PROMPTS = ["a cat", "two dogs"]


@pytest.fixture
def exported_given(tmp_path):
    """One to which a first frame is given, too."""
    config, training = replace(TOLD, conditioning_sigma=0.02), {"conditioning": {"first_frame": 0.5}}
    bundle = write_tiny_bundle(tmp_path / "bundle", config, training=training)
    return export_denoiser(bundle.path, tmp_path / "exported", profiles=("text=1,4,9", "batch=1,2,2"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exported_told", "exported_given"])
def test_its_scale_is_an_input_of_the_graph(request, name):
    exported = request.getfixturevalue(name)
    report = exported.manifest["export"]["onnx"]["report"]
    assert report["denoiser"]["worst"] <= 1e-4 and report["video"]["psnr"] >= 50
    by_torch, by_onnx = (
        TextToVideo.from_pretrained(exported, device="cpu", runtime=runtime) for runtime in ("torch", "onnx")
    )
    found = {}
    for scale in (1.0, 2.5, 6.0):
        expected, found[scale] = (
            torch.stack([video.latents_CTHW for video in pipeline(PROMPTS, guidance=scale, batch_size=2)])
            for pipeline in (by_torch, by_onnx)
        )
        assert (found[scale] - expected).norm() <= 1e-4 * expected.norm()
    assert (found[6.0] - found[1.0]).norm() > 1e-2 * found[1.0].norm(), "negative control"


@pytest.mark.parametrize("form", ["tokens", "channels"])
def test_graphs_that_are_given_something_read_it_too(tmp_path, form):
    """The network behind the graph, fed with tensors, beside torch's way."""
    family = {} if form == "tokens" else {"family": "wan", "parameterization": "flow", "conditioning_mode": "channels"}
    config = replace(TOLD, **family, conditioning_sigma=0.02 if form == "tokens" else 0.0)
    bundle = write_tiny_bundle(tmp_path / "bundle", config, training={"conditioning": {"first_frame": 0.5}})
    tokenizer, encoder = bundle.load_tokenizer(), bundle.load_text_encoder()
    profiles = contract.default_profiles(bundle, tokenizer, encoder)
    spec = contract.specs(profiles, config, tokenizer, conditionings=bundle.conditionings)["denoiser"]
    assert spec.axes["batch"].max == profiles.batch[2], "one call has no second half"
    network = build_network("denoiser", bundle, tokenizer, torch.float32)
    usual = inputs_at(spec, 2.0, bundle) | {"guidance": torch.tensor([3.0])}
    (media,) = combined_conditioning(bundle).values()
    inputs, conditioning = conditioning_inputs(media, bundle, usual)
    assert list(inputs) == [tensor.name for tensor in spec.inputs] and conditioning.guidance_B.tolist() == [3]
    with torch.no_grad():
        found, expected = network(*inputs.values()), network.denoiser(inputs["x"], inputs["sigma"], conditioning)
        other = network(*(inputs | {"guidance": torch.tensor([5.0])}).values())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (found - other).abs().max() > 1e-3
