"""Pictures of a converted Stable Diffusion are those of diffusers' own pipeline; what is not supported is refused."""

import contextlib
import inspect
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megadit.infer.benchmarks.generate import measure
from megadit.infer.evaluate.metrics.loss import LossScorer
from megadit.infer.generate import command as generate
from megadit.infer.inspect import info
from megadit.infer.pipeline.batches import batch_size
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.runtimes.load import load_denoiser
from megadit.infer.runtimes.options import RuntimeOptions
from megadit.models.bundle import Bundle
from megadit.models.commands.convert import main
from megadit.models.configs.unet import FIXED, USUAL
from megadit.models.diffusion.noise import latent_noise, seed_key
from megadit.models.diffusion.parameterization import EDMDenoiser, ddpm_sigmas
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.unet import UNet
from megadit.models.shared.errors import UserError
from megadit.serve.repository.build import build_repository
from megadit.serve.repository.model_config import Scheduling
from tests.stable_diffusion import SCHEDULE, UNETS, make_pipeline

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

PROMPT, NEGATIVE, SEED, STEPS = "a red seven on the beach", "a blue robot", 3, 5
SIGMA = ddpm_sigmas("stable_diffusion")[801].item()
"""Of the first of 5 steps: 801, 601, ..., 1."""
SPLIT = Scheduling(device="0,1", ranks=2, tp_size=2)


@pytest.fixture(scope="module")
def made(tmp_path_factory, write_clip):
    """kind -> (diffusers' pipeline, the same on disk, its bundle), each made once."""
    found = {}

    def make(kind):
        if kind not in found:
            folder = tmp_path_factory.mktemp("sd") / "pipeline"
            pipeline = make_pipeline(folder, kind, write_clip)
            assert main([str(folder), str(folder.parent / "bundle")]) == 0
            found[kind] = pipeline, folder, folder.parent / "bundle"
        return found[kind]

    return make


def start(size=16):
    """DDPM's state has unit variance; ours starts from sigma times noise, whose variance lacks 1 in sigma^2."""
    noise = latent_noise(torch.tensor([seed_key(SEED)]), (4, 1, size, size))[:, :, 0]
    return (noise.double() * SIGMA / (1 + SIGMA**2) ** 0.5).float()


def theirs(pipeline, **settings):
    usual = {"negative_prompt": NEGATIVE, "guidance_scale": 7.5, "num_inference_steps": STEPS, "latents": start()}
    return pipeline(PROMPT, **usual | settings).images


def close(found, expected):
    """As "Must hold" asks; their state is float32, ours float64."""
    assert np.abs(np.asarray(found) - np.asarray(expected)).max() <= 1e-4


@pytest.mark.parametrize("kind", UNETS)
def test_steps_of_ddim_equal_diffusers(made, kind):
    pipeline, _, bundle = made(kind)
    ours = TextToVideo.from_pretrained(bundle, device="cpu")
    settings = {"seeds": SEED, "num_steps": STEPS, "guidance": 7.5}
    (image,) = ours([PROMPT], negative_prompt=NEGATIVE, **settings)
    latents = theirs(pipeline, output_type="latent")
    close(image.latents_CTHW[:, 0], latents[0])
    picture = theirs(pipeline, output_type="np")[0]
    assert np.abs(image.video[0] - 255 * picture).max() <= 0.53 and picture.std() > 0.02  # rounded to 8 bits
    (unlike,) = ours([PROMPT], negative_prompt="", **settings)
    without = theirs(pipeline, output_type="latent", negative_prompt=None)
    close(unlike.latents_CTHW[:, 0], without[0])
    assert (without - latents).abs().max() > 1e-3, "negative control: the negative prompt must matter"


@pytest.mark.parametrize("kind", ["1.x", "xl"])
def test_euler_discrete_is_the_same_schedule(made, kind):
    """XL's own scheduler, of which every step of ours is one."""
    pipeline, _, bundle = made(kind)
    other = type(pipeline)(**pipeline.components | {
        "scheduler": diffusers.EulerDiscreteScheduler(**SCHEDULE, timestep_spacing="leading")
    }, **({} if kind == "xl" else {"requires_safety_checker": False}))  # fmt: skip
    other.set_progress_bar_config(disable=True)
    (image,) = TextToVideo.from_pretrained(bundle, device="cpu")(
        [PROMPT], seeds=SEED, num_steps=STEPS, guidance=7.5, negative_prompt=NEGATIVE
    )
    close(image.latents_CTHW[:, 0], theirs(other, output_type="latent")[0])


@pytest.mark.parametrize("kind", UNETS)
def test_a_network_is_diffusers_own(made, kind):
    """At a whole step and one between two, for a size that it was not trained at; its weights are the same bytes."""
    pipeline, folder, path = made(kind)
    bundle = Bundle.open(path, verify=True)
    network = bundle.load_network()
    assert isinstance(network, UNet)
    text, pooled = torch.randn(2, 77, network.config.crossattn_emb_size), torch.randn(2, 20)
    x = torch.randn(2, 4, 1, 8, 12)
    conditioning = Conditioning(text, torch.tensor([77, 77]), torch.zeros(2), pooled_BP=pooled)
    steps = torch.tensor([500.0, 32.5])
    sizes = torch.tensor([[16.0, 24.0, 0.0, 0.0, 16.0, 24.0]] * 2)  # of a picture whose latents are 8 x 12
    added = {"text_embeds": pooled, "time_ids": sizes}
    with torch.no_grad():
        expected = pipeline.unet(x[:, :, 0], steps, text, added_cond_kwargs=added).sample
        torch.testing.assert_close(network(x, steps, conditioning)[:, :, 0], expected, rtol=0, atol=1e-5)
    (saved,) = (folder / "unet").glob("*.safetensors")
    theirs, ours = load_file(saved), load_file(path / "transformer/model.safetensors")
    assert {name.removeprefix("network.") for name in ours} == theirs.keys()
    assert all(torch.equal(ours[f"network.{name}"], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize("kind", UNETS)
def test_a_denoiser_takes_what_ddpm_knows(made, kind):
    """D at a step is the x0 that diffusers' scheduler predicts from the same output."""
    pipeline, _, path = made(kind)
    network = Bundle.open(path).load_network()
    t, noisy = 401, torch.randn(1, 4, 8, 8)
    sigma = ddpm_sigmas("stable_diffusion")[t]
    text, pooled = torch.randn(1, 77, network.config.crossattn_emb_size), torch.randn(1, 20)
    conditioning = Conditioning(text, torch.tensor([77]), torch.zeros(1), pooled_BP=pooled)
    x = (noisy.double() * (1 + sigma**2).sqrt()).float()
    with torch.no_grad():
        F = network(noisy[:, :, None], torch.tensor([float(t)]), conditioning)[:, :, 0]
        found = EDMDenoiser(network)(x[:, :, None], sigma.float()[None], conditioning)[:, :, 0]
    pipeline.scheduler.set_timesteps(20)
    expected = pipeline.scheduler.step(F, t, noisy).pred_original_sample
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def settings_of(network):
    """As JSON has them."""
    values = json.loads(json.dumps(dict(network.config), default=str))
    return {name: value for name, value in values.items() if not name.startswith("_")}


def test_a_bundle_becomes_a_network_of_diffusers_again(made, tmp_path):
    for kind in UNETS:
        pipeline, folder, path = made(kind)
        assert main([str(path), str(tmp_path / kind), "--to", "diffusers"]) == 0
        for part in ("unet", "vae"):
            name = "diffusion_pytorch_model.safetensors"
            again, first = (load_file(where / part / name) for where in (tmp_path / kind, folder))
            assert again.keys() == first.keys() and all(torch.equal(again[key], first[key]) for key in first), part
        again = diffusers.UNet2DConditionModel.from_pretrained(tmp_path / kind / "unet")
        assert all(torch.equal(again.state_dict()[k], v) for k, v in pipeline.unet.state_dict().items())
        assert settings_of(again) == settings_of(pipeline.unet)


def test_every_setting_of_the_class_is_known():
    signature = inspect.signature(diffusers.UNet2DConditionModel.__init__).parameters
    usual = {name: each.default for name, each in signature.items() if name != "self"}
    assert USUAL.keys() | FIXED.keys() == usual.keys() and not USUAL.keys() & FIXED.keys()
    assert {name: usual[name] for name in USUAL if name != "sample_size"} == {
        name: value for name, value in USUAL.items() if name != "sample_size"
    }
    assert {name: usual[name] for name in FIXED} == FIXED


@pytest.mark.parametrize(
    "settings",
    [
        {"sampler": "dpmpp_2m"},
        {"sampler": "heun", "schedule": "karras", "sigma_min": 0.03, "sigma_max": 14.6},
        {"sampler": "unipc"},
        {"sampler": "euler", "eta": 1.0},
        {"sampler": "consistency"},
        {"guidance_rescale": 0.5},
    ],
)
def test_every_sampler_takes_it(made, settings):
    (image,) = TextToVideo.from_pretrained(made("1.x")[2], device="cpu")([PROMPT], num_steps=3, **settings)
    assert image.video.shape == (1, 32, 32, 3) and image.video.std() > 0


def test_defaults_are_those_of_the_family(made):
    of_kinds = {kind: Bundle.open(made(kind)[2]) for kind in UNETS}
    assert {kind: bundle.defaults.guidance for kind, bundle in of_kinds.items()} == {"1.x": 7.5, "2.x": 7.5, "xl": 5.0}
    for bundle in of_kinds.values():
        told = bundle.defaults
        assert (told.num_frames, told.height, told.width, told.num_steps) == (1, 32, 32, 50)
        assert (told.sampler, told.schedule) == ("euler", "stable_diffusion")
    assert {kind: bundle.config.prediction for kind, bundle in of_kinds.items()} == {
        "1.x": "noise", "2.x": "velocity", "xl": "noise"
    }  # fmt: skip


def test_commands_take_a_bundle(made, tmp_path, capsys):
    path = str(made("xl")[2])
    arguments = ["--checkpoint_path", path, "--prompt", PROMPT, "--device", "cpu", "--num_steps", "2"]
    assert generate.main([*arguments, "--video_save_path", str(tmp_path / "seven.png")]) == 0
    from PIL import Image

    assert Image.open(tmp_path / "seven.png").size == (32, 32)
    assert generate.main([*arguments, "--dry-run", "--video_save_path", str(tmp_path / "no.png")]) == 0
    capsys.readouterr()
    assert info.main([path, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["transformer"].startswith("unet, ") and told["text_encoder"].startswith("clip, ")
    assert (told["levels"], told["predicts"], told["pooled text width"]) == ("2, 8 to 16 wide", "noise", 20)


@contextlib.contextmanager
def changed(folder, file, **values):
    path = folder / file
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | values))
    yield
    path.write_text(before)


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("unet/config.json", {"in_channels": 9}, "in_channels=9 reads more than noisy latents"),
        ("unet/config.json", {"class_embed_type": "timestep"}, "with class_embed_type='timestep' is not supported"),
        ("unet/config.json", {"time_cond_proj_dim": 256}, "with time_cond_proj_dim=256 is not supported"),
        ("unet/config.json", {"layers_per_block": 10**9}, "layers_per_block=1000000000 is too large"),
        ("unet/config.json", {"norm_num_groups": 3}, "cannot build this UNet2DConditionModel"),
        ("unet/config.json", {"from_the_future": 1}, "has the setting 'from_the_future'"),
        ("unet/config.json", {"addition_embed_type": "image"}, "addition_embed_type=image"),
        ("scheduler/scheduler_config.json", {"beta_schedule": "linear"}, "beta_schedule='linear' is not supported"),
        (
            "scheduler/scheduler_config.json",
            {"rescale_betas_zero_snr": True},
            "rescale_betas_zero_snr is",
        ),
        ("scheduler/scheduler_config.json", {"prediction_type": "sample"}, "prediction_type='sample' is not one of"),
    ],
)
def test_other_networks_are_refused_in_one_line(made, tmp_path, capsys, file, values, message):
    folder = made("1.x")[1]
    with changed(folder, file, **values):
        assert main([str(folder), str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert message in told[-1] and not (tmp_path / "out").exists()


def test_a_network_needs_its_pipeline(made, tmp_path, capsys):
    _, folder, bundle = made("1.x")
    shutil.copytree(folder / "unet", tmp_path / "unet")
    assert main([str(tmp_path / "unet"), str(tmp_path / "out"), "--tokenizer", str(folder / "vae")]) == 2
    assert "which belongs to it: give its pipeline" in capsys.readouterr().err
    pipeline = TextToVideo.from_pretrained(bundle, device="cpu")
    with pytest.raises(UserError, match="makes images, not videos: num_frames must be 1"):
        pipeline([PROMPT], num_frames=5, fps=8.0)
    with pytest.raises(UserError, match="height=30 is not a multiple of 4"):
        pipeline([PROMPT], height=30)
    with pytest.raises(UserError, match="it changes no linear"):
        pipeline([PROMPT], adapters={str(next((folder / "unet").glob("*.safetensors"))): 1.0})
    for options in ({"resident_blocks": 1}, {"tensor_parallel": 2}, {"cuda_graphs": True}):
        with pytest.raises(UserError, match="it does not support CUDA graphs, block offloading and several ranks"):
            load_denoiser(
                Bundle.open(bundle), RuntimeOptions(**options), device=torch.device("cpu"), dtype=torch.float32
            )
    assert main([str(bundle), str(tmp_path / "published"), "--to", "original"]) == 2
    assert "no other form of the family stable_diffusion is written" in capsys.readouterr().err
    save_file({"lora_unet_x.lora_down.weight": torch.ones(2, 2)}, tmp_path / "lora.safetensors")
    assert main([str(tmp_path / "lora.safetensors"), str(tmp_path / "lora"), "--base", str(bundle)]) == 2
    assert "does not fit the network; unexpected: lora_unet_x.lora_down.weight [2, 2]" in capsys.readouterr().err


def test_a_batch_counts_latent_pixels(made):
    config = Bundle.open(made("1.x")[2]).config
    assert [batch_size(None, config.num_tokens(1, side, side)) for side in (64, 128)] == [8, 2]


def test_it_is_timed_and_its_loss_is_measured(made):
    """XL's, which reads a pooled feature too."""
    bundle = Bundle.open(made("xl")[2])
    pipeline = TextToVideo.from_pretrained(bundle, device="cpu")
    (network, *_) = measure({"torch": pipeline}, replace(pipeline.defaults, num_steps=2), PROMPT, 1)
    assert network.median > 0 and network.tflops is None
    video_BTHWC = torch.zeros(1, 1, 32, 32, 3, dtype=torch.uint8)
    losses = LossScorer(bundle, torch.device("cpu"), "float32")(video_BTHWC, [PROMPT])
    assert losses.shape == (1, 5) and losses.isfinite().all()


@pytest.mark.parametrize("is_adapter", [False, True], ids=["all of it", "an adapter"])
def test_training_is_refused_with_the_reason_and_the_recipe_to_take(made, is_adapter):
    from megadit.train.checkpoints.init_from import read_initial_weights
    from megadit.train.config.load import resolve_config

    path = str(made("1.x")[2])
    of_adapter = ["train.adapter.rank=4", f"checkpoint.init_from={path}"]
    run = resolve_config("digits", overrides=of_adapter if is_adapter else [])
    with pytest.raises(UserError, match="a U-Net of 2 levels.* is not trained here.*--recipe image_xl_256"):
        read_initial_weights(run, path)


def test_ranks_that_share_it_are_refused_before_anything_is_written(made, tmp_path):
    with pytest.raises(
        UserError, match="a U-Net of 2 levels.*it does not support several ranks; leave out --tp_size and --cp_size"
    ):
        build_repository(made("1.x")[2], tmp_path / "out", scheduling=SPLIT)
    assert not (tmp_path / "out").exists()


def test_an_autoencoder_of_earlier_names_is_read(made, tmp_path):
    """As in the files of Stable Diffusion 1."""
    _, folder, path = made("1.x")
    shutil.copytree(folder, tmp_path / "old")
    file = tmp_path / "old/vae/diffusion_pytorch_model.safetensors"
    names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    tensors = load_file(file)
    for now, before in names.items():
        tensors = {name.replace(f".attentions.0.{now}.", f".attentions.0.{before}."): t for name, t in tensors.items()}
    assert tensors.keys() != load_file(file).keys()
    save_file(tensors, file)
    assert main([str(tmp_path / "old"), str(tmp_path / "bundle")]) == 0
    fingerprints = [Bundle.open(each).manifest["fingerprints"] for each in (path, tmp_path / "bundle")]
    assert fingerprints[0]["tokenizer"] == fingerprints[1]["tokenizer"]
