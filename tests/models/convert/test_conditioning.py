"""Published networks of images and videos: what is given reaches them as in diffusers, in networks and whole videos."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from megadit.infer.conditioning.items import ConditioningItem
from megadit.infer.generate import command as generate
from megadit.infer.media.video_io import read_video
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.models.bundle import Bundle
from megadit.models.commands.convert import main
from megadit.models.convert import cosmos, wan
from megadit.models.convert.converted import to_theirs
from megadit.models.convert.published import open_published
from megadit.models.diffusion.noise import Stream, latent_noise, seed_key
from megadit.models.networks.conditioning import CleanLatents, Conditioning
from megadit.models.shared.errors import UserError
from megadit.models.storage.tensor_source import from_state_dict, write_safetensors
from megadit.serve.backend.engine import Engine
from megadit.serve.contract import VideoRequest
from megadit.serve.repository.build import service_info
from tests.models.convert.test_parity import assert_round_trip, distance, in_random_type, ours_from, randomised
from tests.models.convert.test_pipelines import Harmless
from tests.models.convert.test_wan import converted, random_wan, save, small_autoencoder, start_noise, text_parts
from tests.serve.backend.test_engine import Asker, run

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

FRAMES, HEIGHT, WIDTH, STEPS = 9, 32, 48, 5
PROMPT, NEGATIVE = "a red seven moving left", "a blue robot"
SIZE = {"num_frames": FRAMES, "height": HEIGHT, "width": WIDTH}


def random_cosmos(channels=5, **settings):
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "text_embed_dim": 16}
    network = diffusers.CosmosTransformer3DModel(
        in_channels=channels, out_channels=4, adaln_lora_dim=8, max_size=(8, 24, 24), **sizes, **settings
    )
    return randomised(network)


PREDICT2 = {"extra_pos_embed_type": None, "rope_scale": (1.0, 3.0, 3.0)}
OF_IMAGES = {"in_channels": 12, "out_channels": 4, "patch_size": (1, 2, 2), "text_dim": 16, "num_layers": 2}
NETWORKS = {
    "cosmos": lambda: random_cosmos(),
    "cosmos2": lambda: random_cosmos(**PREDICT2),
    "wan2.2 5b": lambda: random_wan(1, **OF_IMAGES | {"in_channels": 4}),
    "wan2.2 i2v": lambda: random_wan(1, **OF_IMAGES),
    "wan2.1 i2v": lambda: random_wan(1, **OF_IMAGES, **clip_sizes(1)),
    "wan2.1 flf2v": lambda: random_wan(1, **OF_IMAGES, **clip_sizes(1), pos_embed_seq_len=14),
}
FORMS = dict(zip(NETWORKS, ("augmented", "marked", "tokens", "channels", "channels", "channels"), strict=True))


def clip_sizes(seed):
    width = random_wan(seed, **OF_IMAGES).config
    return {"image_dim": 20, "added_kv_proj_dim": width.num_attention_heads * width.attention_head_dim}


def known_of(model):
    return wan if isinstance(model, diffusers.WanTransformer3DModel) else cosmos


def of_first_frame(model):
    """Their configuration as ours; that a first frame has a level of its own, no tensor of Wan 2.2's tells."""
    config = known_of(model).config_from_diffusers(model.config)
    return config if config.conditioning_sigma is not None else replace(config, conditioning_sigma=0.0)


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_equal_diffusers(name, without_torchvision):
    """The network alone: marks, channels, features of an image, noise levels of tokens."""
    published, model = in_random_type(NETWORKS[name](), 1)
    config = of_first_frame(model)
    assert config.conditioning_mode == FORMS[name]
    entries = known_of(model).diffusers_entries(config)
    # diffusers' learned positions are in float32 alone: two orders of the same sums over a few hundred numbers
    dtype, tolerance = (torch.float32, 1e-5) if config.learned_positions else (torch.float64, 1e-6)
    dit, draw = ours_from(model, config, entries).to(dtype), torch.Generator().manual_seed(1)
    model = model.to(dtype)

    def random(*shape):
        return torch.randn(shape, generator=draw).to(dtype)

    x, latents, c_noise = random(2, 4, 3, 4, 6), random(2, 4, 3, 4, 6), torch.tensor([0.3, 0.7])
    is_given = torch.zeros(3, 4, 6, dtype=torch.bool)
    is_given[0] = True
    marks = torch.rand(4, 3, 4, 6, generator=draw) < 0.5 if FORMS[name] == "channels" else None
    image = random(2, 14 if config.image_positions else 7, 20) if config.image_size else None
    text = random(2, 512 if config.image_size else 5, 16)  # diffusers cuts off the last 512 as text
    given = CleanLatents(latents, is_given, marks_MTHW=marks)
    conditioning = Conditioning(text, torch.full((2,), text.shape[1]), torch.zeros(2), clean=given, image_BIE=image)
    mask = is_given.to(dtype).expand(2, 1, -1, -1, -1)
    levels = torch.stack([torch.zeros(2), c_noise, c_noise], 1)
    common = {"encoder_hidden_states": text, "return_dict": False}
    with torch.no_grad():
        match FORMS[name]:
            case "channels":
                x_in, seen = x, torch.cat([x, marks.to(dtype).expand(2, -1, -1, -1, -1), latents], dim=1)
                # features of two images come one after another in the batch
                images = None if image is None else image.reshape(-1, 7, 20)
                theirs = model(seen, 1000 * c_noise, encoder_hidden_states_image=images, **common)[0]
            case "tokens":
                x_in = given.among(x)
                theirs = model(x_in, 1000 * levels.repeat_interleave(6, 1), **common)[0]
            case form:
                x_in, is_frame = given.among(x), form == "marked"
                t = levels[:, None, :, None, None] if is_frame else c_noise
                padding = torch.zeros(1, 1, 4, 6, dtype=dtype)
                theirs = model(x_in, t, condition_mask=mask, padding_mask=padding, **common)[0]
        own = torch.cat([c_noise, torch.zeros(2) if config.conditioning.has_own_level else c_noise])
        ours = dit(x_in, own if config.conditioning.is_among else c_noise, conditioning)
        assert distance(ours, theirs) <= tolerance
        for changed in (
            replace(conditioning, clean=replace(given, is_clean_THW=~is_given, marks_MTHW=marks))
            if marks is None
            else replace(conditioning, clean=replace(given, marks_MTHW=~marks)),
            *([] if image is None else [replace(conditioning, image_BIE=image.flip(2))]),
        ):
            assert distance(dit(x_in, own if config.conditioning.is_among else c_noise, changed), theirs) > 1e-4, (
                "control"
            )
    assert_round_trip(published, config, entries)
    rebuilt = type(model).from_config(known_of(model).config_to_diffusers(config))
    assert {n: t.shape for n, t in rebuilt.state_dict().items()} == {n: t.shape for n, t in model.state_dict().items()}


# ------------------------------------------------------------------------------------------------- whole videos


def frames(count, seed=5):
    return np.random.default_rng(seed).integers(0, 256, (count, HEIGHT, WIDTH, 3), dtype=np.uint8)


def pictures(video):
    from PIL import Image

    return [Image.fromarray(frame) for frame in video]


def image_parts():
    """A tiny CLIP and what prepares its images."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    sizes = {"hidden_size": 20, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 3}
    torch.manual_seed(0)
    network = CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=16, patch_size=8)).eval()
    side = {"height": 16, "width": 16}
    return network, CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=side)


def cosmos_pipeline(path, write_t5, make_cosmos_autoencoder):
    encoder, words = text_parts(path / "text", write_t5, "T5")
    return diffusers.CosmosVideoToWorldPipeline(
        text_encoder=encoder,
        tokenizer=words,
        transformer=random_cosmos(),
        vae=make_cosmos_autoencoder(8, statistics=True),
        scheduler=diffusers.EDMEulerScheduler(sigma_max=80.0, sigma_min=0.002, sigma_data=0.5),
        safety_checker=Harmless(),
    )


def cosmos2_pipeline(path, write_t5, make_cosmos_autoencoder):
    encoder, words = text_parts(path / "text", write_t5, "T5")
    pipeline = diffusers.Cosmos2VideoToWorldPipeline(
        text_encoder=encoder,
        tokenizer=words,
        transformer=random_cosmos(**PREDICT2),
        vae=small_autoencoder(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
        safety_checker=Harmless(),
    )
    # as published the network is asked at the last level, and its answer thrown away
    pipeline.scheduler.register_to_config(final_sigmas_type="zero")
    return pipeline


@pytest.mark.parametrize("given", ["image", "video"])
@pytest.mark.parametrize("make", [cosmos_pipeline, cosmos2_pipeline])
def test_cosmos_videos_equal_diffusers(
    make, given, tmp_path, write_t5, make_cosmos_autoencoder, monkeypatch, without_torchvision
):
    pipeline = make(tmp_path, write_t5, make_cosmos_autoencoder)
    save(pipeline, tmp_path / "Tiny", type(pipeline).__name__)
    bundle, ours = converted(tmp_path / "Tiny", tmp_path / "bundle")
    assert bundle.conditionings == ("first_frame", "prefix")
    compression = ours.tokenizer.temporal_compression
    clip, size = frames(1 if given == "image" else 1 + compression), SIZE | {"num_frames": 1 + 2 * compression}
    kind = ConditioningItem(
        frames=clip, **({"kind": "first_frame"} if given == "image" else {"keep_frames": len(clip)})
    )
    (video,) = ours(
        [PROMPT], seeds=3, **size, fps=12, sampler="euler", guidance=4.0, num_steps=STEPS, negative_prompt=NEGATIVE,
        conditioning=kind,
    )  # fmt: skip
    shape = ours.tokenizer.latent_shape(size["num_frames"], HEIGHT, WIDTH)
    augmented = latent_noise(torch.tensor([seed_key(3)]), shape, stream=Stream.CONDITIONING_NOISE)
    module = f"diffusers.pipelines.cosmos.{type(pipeline).__module__.rpartition('.')[2]}"
    # theirs draws this noise anew at every step and for each half of guidance, ours once
    monkeypatch.setattr(f"{module}.randn_tensor", lambda *_, **__: augmented)
    # theirs draws latents from what the autoencoder says of them, ours are the most likely ones
    monkeypatch.setattr(f"{module}.retrieve_latents", lambda encoded, *_: encoded.latent_dist.mode())
    arguments = {
        "prompt": [PROMPT],
        "negative_prompt": [NEGATIVE],
        **size,
        **({"image": pictures(clip)[0]} if given == "image" else {"video": pictures(clip)}),
        "fps": 12,
        "num_inference_steps": STEPS,
        "guidance_scale": 3.0,
        "latents": start_noise(ours, size["num_frames"]),
        "output_type": "latent",
    }
    latents = pipeline(**arguments).frames[0]
    assert distance(video.latents_CTHW, latents) <= 1e-5
    changed = pipeline(**arguments | {"guidance_scale": 2.0}).frames[0]
    assert distance(changed, latents) > 1e-3, "negative control: guidance must matter"
    another = pictures(frames(len(clip), 6))
    other = {"image": another[0]} if given == "image" else {"video": another}
    later = pipeline(**arguments | other).frames[0][:, 2:]
    assert distance(later, latents[:, 2:]) > 1e-4, "negative control: what is given must matter to the rest"


def wan_image_pipeline(path, write_t5, network, **settings):
    encoder, words = text_parts(path / "text", write_t5, "UMT5")
    parts = {"image_encoder": None, "image_processor": None}
    if network.config.image_dim:
        parts = dict(zip(parts, image_parts(), strict=True))
    pipeline = diffusers.WanImageToVideoPipeline(
        tokenizer=words,
        text_encoder=encoder,
        vae=small_autoencoder(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=network,
        **parts,
        **settings,
    )
    save(pipeline, path / "Tiny", "WanImageToVideoPipeline")
    for part in parts:
        if parts[part] is not None:
            parts[part].save_pretrained(path / "Tiny" / part)
    (path / "Tiny/model_index.json").write_text(json.dumps({"_class_name": "WanImageToVideoPipeline", **settings}))
    return pipeline


@pytest.mark.parametrize("name", [name for name in NETWORKS if name.startswith("wan")])
def test_wan_videos_of_images_equal_diffusers(name, tmp_path, write_t5, monkeypatch):
    is_tokens, has_last = FORMS[name] == "tokens", "flf" in name
    network = random_wan(1, **OF_IMAGES, **clip_sizes(1), pos_embed_seq_len=10) if has_last else NETWORKS[name]()
    pipeline = wan_image_pipeline(tmp_path, write_t5, network, **({"expand_timesteps": True} if is_tokens else {}))
    bundle, ours = converted(tmp_path / "Tiny", tmp_path / "bundle")
    assert bundle.conditionings == (("first_frame", "last_frame") if has_last else ("first_frame",))
    clip = frames(2)
    given = [
        ConditioningItem(frames=clip[:1], kind="first_frame"),
        ConditioningItem(frames=clip[1:], kind="last_frame"),
    ]
    assert (bundle.defaults.schedule, bundle.defaults.sampler, bundle.defaults.shift) == (
        "flow_match_euler",
        "euler",
        3,
    )
    settings = {"fps": 16, "guidance": 5.0, "num_steps": STEPS}
    (video,) = ours(
        [PROMPT], seeds=3, **SIZE, **settings, negative_prompt=NEGATIVE, conditioning=tuple(given[: 1 + has_last])
    )
    monkeypatch.setattr("diffusers.pipelines.wan.pipeline_wan_i2v.prompt_clean", str)
    arguments = {
        "image": pictures(clip)[0],
        **({"last_image": pictures(clip)[1]} if has_last else {}),
        "prompt": PROMPT,
        "negative_prompt": NEGATIVE,
        **SIZE,
        "num_inference_steps": STEPS,
        "guidance_scale": 5.0,
        "latents": start_noise(ours, FRAMES),
        "output_type": "latent",
    }
    latents = pipeline(**arguments).frames[0]
    assert distance(video.latents_CTHW, latents) <= 1e-5
    changed = pipeline(**arguments | {"image": pictures(frames(1, 6))[0]}).frames[0]
    assert distance(changed[:, 1:], latents[:, 1:]) > 3e-4, "negative control: the image must matter to the rest"
    if not is_tokens:
        with pytest.raises(UserError, match="needs a first frame"):
            ours([PROMPT], **SIZE)


@pytest.mark.parametrize("name", ["cosmos", "cosmos2", "wan2.1 flf2v"])
def test_released_tensors_are_read_back(name, tmp_path):
    """Under the names of the first publication; heads of Wan's are 128 wide, as in every published size."""
    model = NETWORKS[name]()
    if name.startswith("wan"):
        sizes = {"num_attention_heads": 2, "attention_head_dim": 128, "image_dim": 20, "added_kv_proj_dim": 256}
        model = random_wan(1, **OF_IMAGES | sizes | {"num_layers": 1}, pos_embed_seq_len=14)
    known = known_of(model)
    config = known.config_from_diffusers(model.config)
    dit = ours_from(model, config, known.diffusers_entries(config))
    theirs = to_theirs(from_state_dict(dit.state_dict()), known.released_entries(config))
    if name.startswith("wan"):
        assert {"img_emb.proj.1.weight", "img_emb.emb_pos", "blocks.0.cross_attn.k_img.weight"} <= set(theirs.stored)
        assert "blocks.0.cross_attn.norm_k_img.weight" in theirs.stored
    write_safetensors(tmp_path / "model.safetensors", theirs)
    published = open_published(tmp_path / "model.safetensors")
    assert (published.config.conditioning_mode, published.config.image_size) == (FORMS[name], config.image_size)
    assert all(torch.equal(published.tensors.read(each), tensor) for each, tensor in dit.state_dict().items())


def test_a_network_that_reads_images_needs_its_clip(tmp_path, write_t5):
    pipeline = wan_image_pipeline(tmp_path, write_t5, NETWORKS["wan2.1 i2v"]())
    assert pipeline.image_encoder is not None
    for file in (tmp_path / "Tiny/image_encoder").iterdir():
        file.unlink()
    (tmp_path / "Tiny/image_encoder").rmdir()
    bundle, clip = tmp_path / "bundle", tmp_path / "clip"
    assert main([str(tmp_path / "Tiny"), str(bundle)]) == 2
    for part in image_parts():
        part.save_pretrained(clip)
    assert main([str(tmp_path / "Tiny"), str(bundle), "--image_encoder", str(clip)]) == 0
    assert Bundle.open(bundle).load_image_encoder().encode(frames(1)[0]).shape == (1, 5, 20)
    pictures(frames(1))[0].save(tmp_path / "first.png")
    command = ["--checkpoint_path", bundle, "--prompt", PROMPT, "--device", "cpu", "--num_frames", 5, "--num_steps", 2]
    command += ["--height", HEIGHT, "--width", WIDTH, "--video_save_path", tmp_path / "made.mp4"]
    assert generate.main(list(map(str, command))) == 2, "an image must be given"
    assert generate.main([*map(str, command), "--image", str(tmp_path / "first.png")]) == 0
    made = read_video(tmp_path / "made.mp4")[0]
    size = {"num_frames": 5, "num_steps": 2, "height": HEIGHT, "width": WIDTH}
    asker = Asker(VideoRequest(prompt=PROMPT, seed=0, image=(tmp_path / "first.png").read_bytes(), **size))
    opened = Bundle.open(bundle)
    served_by = TextToVideo.from_pretrained(opened, device="cpu")
    run(Engine(served_by, service_info(opened, opened.defaults, None)), asker)
    assert asker.endings == [None]
    (tmp_path / "served.mp4").write_bytes(asker.videos[0].data)
    assert np.array_equal(read_video(tmp_path / "served.mp4")[0], made) and len(made) == 5
