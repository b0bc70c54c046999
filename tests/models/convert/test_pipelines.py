"""Videos of a converted pipeline are those of diffusers' own."""

import json
from types import SimpleNamespace

import pytest
import torch

from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.models.bundle import Bundle
from megadit.models.commands.convert import main
from megadit.models.diffusion.noise import latent_noise, seed_key
from megadit.models.diffusion.parameterization import ddpm_sigmas
from megadit.models.shared.files import read_json
from megadit.models.text_encoders import T5TextEncoder

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

HEIGHT, WIDTH, FRAMES, FPS, STEPS = 32, 48, 9, 12, 5


def nearest_resize(mask, size, interpolation=None):
    return torch.nn.functional.interpolate(mask, size, mode="nearest")


class Harmless:
    """In place of the safety checker, a package of its own."""

    def to(self, device):
        return self

    def check_text_safety(self, prompt):
        return True

    def check_video_safety(self, frames):
        return frames


def random_cosmos_transformer():
    torch.manual_seed(0)
    network = diffusers.CosmosTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        text_embed_dim=16,
        adaln_lora_dim=8,
        max_size=(8, 24, 24),
    )
    for name, parameter in network.named_parameters():
        torch.nn.init.normal_(parameter, std=0.2, mean=float("norm" in name and parameter.ndim == 1))
    return network.eval()


@pytest.fixture(scope="module")
def cosmos_pipeline(tmp_path_factory, write_t5, make_cosmos_autoencoder):
    """(diffusers' pipeline, the same on disk)."""
    from transformers import AutoTokenizer, T5EncoderModel

    path = tmp_path_factory.mktemp("cosmos") / "Cosmos-Tiny"
    write_t5(path / "tokenizer")
    t5, words = T5EncoderModel.from_pretrained(path / "tokenizer"), AutoTokenizer.from_pretrained(path / "tokenizer")
    (path / "tokenizer/model.safetensors").unlink()
    pipeline = diffusers.CosmosTextToWorldPipeline(
        text_encoder=t5.eval(),
        tokenizer=words,
        transformer=random_cosmos_transformer(),
        vae=make_cosmos_autoencoder(8, statistics=True),
        scheduler=diffusers.EDMEulerScheduler(sigma_max=80.0, sigma_min=0.002, sigma_data=0.5),
        safety_checker=Harmless(),
    )
    pipeline.set_progress_bar_config(disable=True)
    t5.save_pretrained(path / "text_encoder")
    pipeline.transformer.save_pretrained(path / "transformer")
    pipeline.vae.save_pretrained(path / "vae")
    (path / "model_index.json").write_text(json.dumps({"_class_name": "CosmosTextToWorldPipeline"}))
    (path / "LICENSE").write_text("the license of these weights")
    (path / "README.md").write_text("---\nlicense: other\nlicense_name: open-model-license\n---\n# Tiny\n")
    return pipeline, path


def test_cosmos_videos_equal_diffusers(cosmos_pipeline, tmp_path, monkeypatch, capsys):
    stand_in = SimpleNamespace(
        functional=SimpleNamespace(resize=nearest_resize), InterpolationMode=SimpleNamespace(NEAREST="nearest")
    )
    monkeypatch.setattr("diffusers.models.transformers.transformer_cosmos.transforms", stand_in, raising=False)
    pipeline, path = cosmos_pipeline
    assert main([str(path), str(tmp_path / "bundle")]) == 0
    told = capsys.readouterr()
    assert "license of the weights: other, open-model-license" in told.out
    assert "the license of these weights asks for a content filter" in told.err

    t5 = T5TextEncoder(model=str(path), dtype="float32", text_padding="zeros")
    ours = TextToVideo.from_pretrained(tmp_path / "bundle", device="cpu", text_encoder=t5)
    (video,) = ours(
        ["a red seven moving left"],
        seeds=3,
        negative_prompt="a blue robot",
        num_frames=FRAMES,
        height=HEIGHT,
        width=WIDTH,
        fps=FPS,
        guidance=4.0,
        num_steps=STEPS,
        sampler="euler",
    )
    noise = latent_noise(torch.tensor([seed_key(3)]), ours.tokenizer.latent_shape(FRAMES, HEIGHT, WIDTH))
    arguments = {
        "prompt": ["a red seven moving left"],
        "negative_prompt": ["a blue robot"],
        "height": HEIGHT,
        "width": WIDTH,
        "num_frames": FRAMES,
        "num_inference_steps": STEPS,
        "guidance_scale": 3.0,
        "fps": FPS,
        "latents": noise,
    }
    latents = pipeline(**arguments, output_type="latent").frames[0]
    # diffusers keeps its state and its noise levels in float32, ours are float64
    assert (video.latents_CTHW - latents).norm() <= 1e-5 * latents.norm()
    frames = pipeline(**arguments, output_type="np").frames[0]
    # diffusers cuts off to whole numbers where we round, in its safety checker's name
    difference = abs(video.video.astype(float) - frames * 255)
    assert difference.max() <= 1.5 and frames.std() > 0.05
    changed = pipeline(**arguments | {"guidance_scale": 4.0}, output_type="latent").frames[0]
    assert (changed - latents).norm() > 1e-3 * latents.norm(), "negative control: guidance must matter"


def test_licences_travel_and_a_bundle_becomes_a_pipeline_again(cosmos_pipeline, tmp_path):
    _, path = cosmos_pipeline
    main([str(path), str(tmp_path / "bundle")])
    bundle = Bundle.open(tmp_path / "bundle", verify=True)
    assert bundle.license.asks_for_guardrail and bundle.license.name == "other, open-model-license"
    assert (tmp_path / "bundle/notices/LICENSE").read_text() == "the license of these weights"
    assert main([str(tmp_path / "bundle"), str(tmp_path / "out"), "--to", "diffusers"]) == 0
    again = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "out", safety_checker=Harmless())
    assert type(again) is diffusers.CosmosTextToWorldPipeline and again.tokenizer("a b").input_ids
    for part, kind in (("transformer", diffusers.CosmosTransformer3DModel), ("vae", diffusers.AutoencoderKLCosmos)):
        before, after = kind.from_pretrained(path / part), kind.from_pretrained(tmp_path / "out" / part)
        assert all(torch.equal(after.state_dict()[name], tensor) for name, tensor in before.state_dict().items())
    assert (tmp_path / "out/LICENSE").exists()
    assert main([str(tmp_path / "bundle"), str(tmp_path / "original"), "--to", "original"]) == 0
    # the released form, read back, is the same network
    assert (
        main(
            [str(tmp_path / "original/model.safetensors"), str(tmp_path / "again"), "--tokenizer", str(path / "vae")]
            + ["--text_encoder", str(path)]
        )
        == 0
    )
    first, second = (b.load_dit().state_dict() for b in (bundle, Bundle.open(tmp_path / "again")))
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())


@pytest.fixture(scope="module")
def class_pipeline(tmp_path_factory):
    path = tmp_path_factory.mktemp("dit") / "DiT-Tiny"
    torch.manual_seed(0)
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=1000,
    )
    for parameter in transformer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    for block in transformer.transformer_blocks[1:]:
        block.norm1.emb.load_state_dict(transformer.transformer_blocks[0].norm1.emb.state_dict())
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        scaling_factor=0.3,
    )
    scheduler = diffusers.DDIMScheduler(beta_start=1e-4, beta_end=0.02, beta_schedule="linear", clip_sample=False)
    pipeline = diffusers.DiTPipeline(transformer.eval(), vae.eval(), scheduler)
    pipeline.set_progress_bar_config(disable=True)
    transformer.save_pretrained(path / "transformer")
    vae.save_pretrained(path / "vae")
    labels = {str(i): f"thing {i}, object {i}" for i in range(1000)}
    (path / "model_index.json").write_text(json.dumps({"_class_name": "DiTPipeline", "id2label": labels}))
    return pipeline, path


def test_images_of_classes_equal_ddim(class_pipeline, tmp_path, monkeypatch):
    pipeline, path = class_pipeline
    assert main([str(path), str(tmp_path / "bundle")]) == 0
    ours = TextToVideo.from_pretrained(tmp_path / "bundle", device="cpu")
    assert ours.defaults.schedule == "ddpm" and ours.defaults.height == 16
    images = ours(["object 7", "999"], seeds=[1, 2], num_steps=10, guidance=3.0)
    noise = latent_noise(torch.tensor([seed_key(1), seed_key(2)]), (4, 1, 8, 8))[:, :, 0]
    sigma = ddpm_sigmas()[900].item()
    # DDPM's state at sigma has unit variance; ours starts from sigma times noise, whose variance lacks 1 in sigma^2
    start = (noise.double() * sigma / (1 + sigma**2) ** 0.5).float()
    monkeypatch.setattr("diffusers.pipelines.dit.pipeline_dit.randn_tensor", lambda *_, **__: start)
    expected = pipeline([7, 999], guidance_scale=3.0, num_inference_steps=10, output_type="np").images
    for image, reference in zip(images, expected, strict=True):
        # one step of 8 bits where rounding falls differently
        assert abs(image.video[0].astype(float) - reference * 255).max() <= 0.51 and reference.std() > 0.01
    other = pipeline([8, 999], guidance_scale=3.0, num_inference_steps=10, output_type="np").images
    assert abs(images[0].video[0] - other[0] * 255).max() > 2, "negative control: the class must matter"


def test_a_class_pipeline_round_trips(class_pipeline, tmp_path):
    pipeline, path = class_pipeline
    main([str(path), str(tmp_path / "bundle")])
    assert main([str(tmp_path / "bundle"), str(tmp_path / "out"), "--to", "diffusers"]) == 0
    whole = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "out")
    assert type(whole) is type(pipeline) and whole.get_label_ids(["object 7"]) == [7]
    again = diffusers.DiTTransformer2DModel.from_pretrained(tmp_path / "out/transformer")
    before = pipeline.transformer.state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.state_dict().items())
    assert read_json(tmp_path / "out/transformer/config.json")["sample_size"] == 8
