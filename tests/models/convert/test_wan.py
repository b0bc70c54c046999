"""Wan and Cosmos-Predict2: networks, autoencoders and whole videos are those of diffusers, there and back."""

import dataclasses
import json
import random

import pytest
import torch
from safetensors.torch import save_file

from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.models.bundle import Bundle
from megadit.models.commands.convert import main
from megadit.models.configs.named import NAMED_CONFIGS
from megadit.models.convert import cosmos, wan
from megadit.models.convert.adapters.files import read_adapter, read_adapter_of
from megadit.models.convert.converted import to_theirs
from megadit.models.convert.merging.merge import merge_bundle
from megadit.models.convert.published import open_published
from megadit.models.diffusion.noise import latent_noise, seed_key
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.dit import DiT
from megadit.models.shared.errors import UserError
from megadit.models.storage.tensor_source import from_state_dict, open_safetensors, write_safetensors
from megadit.models.text_encoders import T5TextEncoder
from megadit.models.tokenizers import load_tokenizer, published_tokenizer
from tests.models.convert.test_parity import (
    assert_round_trip,
    distance,
    in_random_type,
    num_parameters,
    of_layers,
    ours_from,
    randomised,
)
from tests.models.convert.test_pipelines import Harmless

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

FRAMES, HEIGHT, WIDTH, STEPS = 5, 32, 48, 5
PROMPT, NEGATIVE = "a red seven moving left", "a blue robot"


def random_wan(seed, **sizes):
    draw = random.Random(seed)
    usual = {
        "num_attention_heads": draw.choice([2, 3]),
        "attention_head_dim": draw.choice([12, 16, 24]),
        "in_channels": (channels := draw.choice([3, 4])),
        "out_channels": channels,
        "text_dim": draw.choice([8, 20]),
        "ffn_dim": draw.choice([40, 64]),
        "num_layers": draw.choice([1, 2]),
        "patch_size": (draw.choice([1, 2]), *[draw.choice([1, 2])] * 2),
        "rope_max_seq_len": 32,
    }
    torch.manual_seed(seed)
    return randomised(diffusers.WanTransformer3DModel(**usual | sizes), std=0.1)


@pytest.mark.parametrize("seed", range(6))
def test_wan_equals_diffusers(seed):
    published, model = in_random_type(random_wan(seed), seed)
    config = wan.config_from_diffusers(model.config)
    entries = wan.diffusers_entries(config)
    dit, draw = ours_from(model, config, entries).double(), torch.Generator().manual_seed(seed)
    model = model.double()
    T, H, W = 2 * config.patch_temporal, 4 * config.patch_spatial, 3 * config.patch_spatial
    x = torch.randn(2, config.in_channels, T, H, W, generator=draw).double()
    t, text = torch.rand(2, generator=draw), torch.randn(2, 5, config.crossattn_emb_size, generator=draw).double()
    conditioning = Conditioning(text, torch.tensor([5, 5]), torch.zeros(2))
    with torch.no_grad():
        theirs = model(x, 1000 * t, text, return_dict=False)[0]
        # both compute noise levels, positions and norms in float32
        assert distance(dit(x, t, conditioning), theirs) <= 1e-6
        assert distance(dit(x, t + 1e-2, conditioning), theirs) > 1e-3, "negative control: the noise level must matter"
        assert distance(dit(x.flip(4), t, conditioning).flip(4), theirs) > 1e-3, "negative control: so must places"
    assert_round_trip(published, config, entries)
    assert_round_trip(to_theirs(from_state_dict(dit.state_dict()), entries).state_dict(), config, entries)
    rebuilt = diffusers.WanTransformer3DModel.from_config(wan.config_to_diffusers(config))
    assert {n: t.shape for n, t in rebuilt.state_dict().items()} == {n: t.shape for n, t in model.state_dict().items()}


def test_no_text_is_text_of_zeros():
    model = random_wan(0)
    dit = ours_from(model, config := wan.config_from_diffusers(model.config), wan.diffusers_entries(config))
    x = torch.randn(1, config.in_channels, 2, 4, 4)
    text, t = torch.randn(1, 3, config.crossattn_emb_size), torch.tensor([0.3])
    with torch.no_grad():
        null = dit(x, t, Conditioning(text, torch.tensor([0]), torch.zeros(1)))
        zeros = model(x, 1000 * t, torch.zeros(1, 512, config.crossattn_emb_size), return_dict=False)[0]
    assert distance(null, zeros) <= 1e-5


def test_the_released_names():
    """A few of those in the released files, as published."""
    names = {
        "blocks.3.attn1.to_q.weight": "blocks.3.self_attn.q.weight",
        "blocks.0.attn2.to_out.0.bias": "blocks.0.cross_attn.o.bias",
        "blocks.0.norm2.weight": "blocks.0.norm3.weight",
        "blocks.0.scale_shift_table": "blocks.0.modulation",
        "scale_shift_table": "head.modulation",
        "condition_embedder.time_proj.weight": "time_projection.1.weight",
        "condition_embedder.text_embedder.linear_2.bias": "text_embedding.2.bias",
        "blocks.7.ffn.net.0.proj.weight": "blocks.7.ffn.0.weight",
        "blocks.7.attn1.norm_k.weight": "blocks.7.self_attn.norm_k.weight",
    }
    assert {theirs: wan.released_name(theirs) for theirs in names} == names


@pytest.mark.parametrize(
    ("setting", "value"), [("image_dim", 1280), ("added_kv_proj_dim", 64), ("cross_attn_norm", False), ("freq_dim", 64)]
)
def test_what_is_not_published_is_refused(setting, value):
    with pytest.raises(UserError, match=f"{setting}={value}.* is not supported"):
        wan.config_from_diffusers({**random_wan(0).config, setting: value})
    with pytest.raises(UserError, match="in_channels=35 but out_channels=16"):
        wan.config_from_diffusers({**random_wan(0).config, "in_channels": 35, "out_channels": 16})


COUNTS = {
    "wan_1_3b": 1_418_996_800,
    "wan_14b": 14_288_491_584,
    "wan_14b_image": 16_394_878_784,
    "wan_14b_first_last": 16_395_536_704,
    "wan2_2_14b_image": 14_288_901_184,
    "wan2_2_5b": 4_999_787_712,
    "cosmos_7b_video": 7_236_208_640,
    "cosmos_14b_video": 14_267_169_792,
    "cosmos2_2b": 1_956_405_248,
    "cosmos2_14b": 14_265_265_152,
    "cosmos2_2b_video": 1_956_413_440,
    "cosmos2_14b_video": 14_265_285_632,
}
"""Parameters of whole networks."""


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_whole_sizes_have_as_many_parameters_as_diffusers_networks(name, count):
    config = NAMED_CONFIGS[name]
    known = wan if config.family == "wan" else cosmos
    values, theirs = known.config_to_diffusers(config), getattr(diffusers, known.DIFFUSERS_CLASS)
    found = num_parameters(config)
    assert found == of_layers(lambda num_layers: theirs.from_config(values | {"num_layers": num_layers}), config)
    assert found == count
    with torch.device("meta"):
        again = dict(theirs.from_config(values | {"num_layers": 1}).config) | {"num_layers": config.num_layers}
    assert dataclasses.replace(known.config_from_diffusers(again), ffn_hidden_size=config.mlp_size) == (
        dataclasses.replace(config, ffn_hidden_size=config.mlp_size)
    )


# ------------------------------------------------------------------------------------------------- whole videos


def small_autoencoder(z_dim=4, **settings):
    torch.manual_seed(0)
    network = diffusers.AutoencoderKLWan(
        base_dim=8,
        z_dim=z_dim,
        dim_mult=[1, 1, 2, 2],
        num_res_blocks=1,
        latents_mean=torch.randn(z_dim).tolist(),
        latents_std=(1 + torch.rand(z_dim)).tolist(),
        **settings,
    )
    return network.eval()


def save(pipeline, path, name):
    """A pipeline on disk, in the parts that matter here."""
    pipeline.set_progress_bar_config(disable=True)
    for part in ("text_encoder", "tokenizer", "transformer", "vae", "scheduler"):
        getattr(pipeline, part).save_pretrained(path / part)
    (path / "model_index.json").write_text(json.dumps({"_class_name": name}))


def published_scheduler(flow_shift=3.0):
    """As Wan's pipelines are published."""
    return diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift
    )


def text_parts(path, write_t5, kind):
    import transformers

    write_t5(path, kind=kind)
    encoder = getattr(transformers, f"{kind}EncoderModel").from_pretrained(path)
    return encoder.eval(), transformers.AutoTokenizer.from_pretrained(path)


def text_to_video(folder, write_t5, *, num_layers=2, has_experts=False, **settings):
    """diffusers' pipeline, with an expert for low noise if it `has_experts`; the same on disk in `Tiny`."""
    encoder, words = text_parts(folder / "text", write_t5, "UMT5")
    sizes = {"in_channels": 4, "out_channels": 4, "text_dim": 16, "patch_size": (1, 2, 2), "num_layers": num_layers}
    pipeline = diffusers.WanPipeline(
        tokenizer=words,
        text_encoder=encoder,
        vae=small_autoencoder(),
        scheduler=published_scheduler(),
        transformer=random_wan(1, **sizes),
        transformer_2=randomised(random_wan(1, **sizes), std=0.11) if has_experts else None,
        **settings,
    )
    save(pipeline, folder / "Tiny", "WanPipeline")
    if has_experts:
        pipeline.transformer_2.save_pretrained(folder / "Tiny" / "transformer_2")
    (folder / "Tiny/model_index.json").write_text(json.dumps({"_class_name": "WanPipeline", **settings}))
    return pipeline


@pytest.fixture(scope="module")
def wan_pipeline(tmp_path_factory, write_t5):
    """(diffusers' pipeline, the same on disk)."""
    folder = tmp_path_factory.mktemp("wan")
    return text_to_video(folder, write_t5), folder / "Tiny"


def converted(path, out):
    """Our pipeline of theirs, its text encoder in float32."""
    assert main([str(path), str(out)]) == 0
    bundle = Bundle.open(out)
    t5 = T5TextEncoder(model=str(path), dtype="float32", text_padding="zeros")
    return bundle, TextToVideo.from_pretrained(bundle, device="cpu", text_encoder=t5)


def start_noise(ours, frames, seed=3):
    return latent_noise(torch.tensor([seed_key(seed)]), ours.tokenizer.latent_shape(frames, HEIGHT, WIDTH))


def test_wan_videos_equal_diffusers(wan_pipeline, tmp_path, monkeypatch):
    pipeline, path = wan_pipeline
    bundle, ours = converted(path, tmp_path / "bundle")
    defaults = bundle.defaults
    assert (defaults.schedule, defaults.sampler, defaults.shift) == ("wan_diffusers", "unipc_bh2", 3.0)
    size = {"num_frames": FRAMES, "height": HEIGHT, "width": WIDTH}
    settings = dict(**size, fps=16, guidance=5.0, num_steps=STEPS, negative_prompt=NEGATIVE)
    (video,) = ours([PROMPT], seeds=3, **settings)
    monkeypatch.setattr("diffusers.pipelines.wan.pipeline_wan.prompt_clean", str)
    arguments = {
        "prompt": PROMPT,
        "negative_prompt": NEGATIVE,
        **size,
        "num_inference_steps": STEPS,
        "guidance_scale": 5.0,
        "latents": start_noise(ours, FRAMES),
    }
    latents = pipeline(**arguments, output_type="latent").frames
    assert distance(video.latents_CTHW[None], latents) <= 1e-5
    frames = pipeline(**arguments, output_type="np").frames[0]
    assert abs(video.video.astype(float) - frames * 255).max() <= 0.51 and frames.std() > 0.02
    (exact,) = ours([PROMPT], seeds=3, **settings, sampler="unipc", schedule="flow")
    assert 1e-3 < distance(exact.latents_CTHW[None], latents) < 0.1, "negative control: levels and weights must matter"
    changed = pipeline(**arguments | {"guidance_scale": 1.5}, output_type="latent").frames
    assert distance(changed, latents) > 1e-3, "negative control: guidance must matter"


def test_wan_becomes_a_pipeline_again(wan_pipeline, tmp_path):
    _, path = wan_pipeline
    main([str(path), str(tmp_path / "bundle")])
    assert main([str(tmp_path / "bundle"), str(tmp_path / "out"), "--to", "diffusers"]) == 0
    for part, kind in (("transformer", diffusers.WanTransformer3DModel), ("vae", diffusers.AutoencoderKLWan)):
        before, after = kind.from_pretrained(path / part), kind.from_pretrained(tmp_path / "out" / part)
        assert all(torch.equal(after.state_dict()[name], tensor) for name, tensor in before.state_dict().items())
    assert main([str(tmp_path / "bundle"), str(tmp_path / "original"), "--to", "original"]) == 0
    names = open_safetensors(tmp_path / "original/model.safetensors").stored
    assert {"patch_embedding.weight", "head.modulation", "blocks.1.cross_attn.norm_q.weight"} <= set(names)


def test_released_tensors_are_read_back(tmp_path):
    """As they lie in the released folder; heads are 128 wide, as in every published size."""
    model = random_wan(2, num_attention_heads=2, attention_head_dim=128, patch_size=(1, 2, 2), num_layers=1)
    config = wan.config_from_diffusers(model.config)
    dit = ours_from(model, config, wan.diffusers_entries(config))
    entries = wan.released_entries(config)
    write_safetensors(
        tmp_path / "diffusion_pytorch_model.safetensors", to_theirs(from_state_dict(dit.state_dict()), entries)
    )
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "WanModel", "model_type": "t2v", "dim": 256}))
    published = open_published(tmp_path)
    assert published.config == config
    assert all(torch.equal(published.tensors.read(name), tensor) for name, tensor in dit.state_dict().items())


@pytest.mark.parametrize("kept", [{}, {"resident_blocks": 1}], ids=["whole", "streamed"])
def test_a_pair_of_networks_equals_diffusers(kept, tmp_path, write_t5, monkeypatch):
    """Wan 2.2's 14B: one network for high noise, one for low, each with its guidance; and back again."""
    pipeline = text_to_video(tmp_path, write_t5, num_layers=3, has_experts=True, boundary_ratio=0.8)
    path = tmp_path / "Tiny"
    assert main([str(path), str(tmp_path / "bundle")]) == 0
    bundle = Bundle.open(tmp_path / "bundle", verify=True)
    assert bundle.boundary == pytest.approx(4)
    t5 = T5TextEncoder(model=str(path), dtype="float32", text_padding="zeros")
    ours = TextToVideo.from_pretrained(bundle, device="cpu", text_encoder=t5, **kept)
    size = {"num_frames": FRAMES, "height": HEIGHT, "width": WIDTH}
    settings = dict(**size, fps=16, num_steps=STEPS, negative_prompt=NEGATIVE)
    (video,) = ours([PROMPT], seeds=3, guidance=5.0, low_guidance=2.0, **settings)
    monkeypatch.setattr("diffusers.pipelines.wan.pipeline_wan.prompt_clean", str)
    arguments = {
        "prompt": PROMPT,
        "negative_prompt": NEGATIVE,
        **size,
        "num_inference_steps": STEPS,
        "guidance_scale": 5.0,
        "guidance_scale_2": 2.0,
        "latents": start_noise(ours, FRAMES),
        "output_type": "latent",
    }
    latents = pipeline(**arguments).frames
    assert distance(video.latents_CTHW[None], latents) <= 1e-5
    for change in ({"guidance": 5.0}, {"guidance": 5.0, "low_guidance": 5.0}):
        (other,) = ours([PROMPT], seeds=3, **settings, **change)
        assert distance(other.latents_CTHW[None], latents) > 1e-3, "negative control: each guidance must matter"
    if kept:
        return
    assert_adapters_equal(
        pipeline, arguments, bundle, t5, dict(seeds=3, guidance=5.0, low_guidance=2.0, **settings), tmp_path
    )
    pipeline.register_modules(transformer_2=pipeline.transformer)
    assert distance(pipeline(**arguments).frames, latents) > 1e-3, "negative control: the second network must matter"
    with pytest.raises(UserError, match="two experts, for high and for low noise"):
        bundle.load_dit()
    assert main([str(tmp_path / "bundle"), str(tmp_path / "out"), "--to", "diffusers"]) == 0
    scheduler = diffusers.UniPCMultistepScheduler.from_pretrained(tmp_path / "out" / "scheduler")
    for each in (scheduler, pipeline.scheduler):
        each.set_timesteps(STEPS)
    assert torch.equal(scheduler.sigmas, pipeline.scheduler.sigmas)
    for part in ("transformer", "transformer_2"):
        before, after = (
            diffusers.WanTransformer3DModel.from_pretrained(folder / part).state_dict()
            for folder in (path, tmp_path / "out")
        )
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert main([str(tmp_path / "bundle"), str(tmp_path / "original"), "--to", "original"]) == 2


def assert_adapters_equal(pipeline, arguments, bundle, text_encoder, settings, path):
    """A file for each network as diffusers loads it, and one for both; merged, and as `megadit convert` writes it."""
    files = {}
    for expert, part in (("high", "transformer"), ("low", "transformer_2")):
        linears = [
            name for name, module in getattr(pipeline, part).named_modules() if name.endswith(("to_q", "to_v", "net.2"))
        ]
        sizes = {name: getattr(pipeline, part).get_submodule(name).weight.shape for name in linears}
        tensors = {
            f"transformer.{name}.lora_{side}.weight": 0.3 * torch.randn(shape)
            for name, (rows, columns) in sizes.items()
            for side, shape in (("A", (3, columns)), ("B", (rows, 3)))
        }
        (path / expert).mkdir()
        save_file(tensors, files.setdefault(expert, path / expert / "lora.safetensors"))

    def theirs(high, low):
        pipeline.load_lora_weights(str(high.parent), weight_name=high.name, adapter_name="high")
        pipeline.load_lora_weights(
            str(low.parent), weight_name=low.name, adapter_name="low", load_into_transformer_2=True
        )
        latents = pipeline(**arguments).frames
        pipeline.unload_lora_weights()
        pipeline.transformer_2.unload_lora()
        return latents

    apart, both = theirs(files["high"], files["low"]), theirs(files["high"], files["high"])
    for expert, file in files.items():
        assert main([f"{expert}={file}", str(path / f"{expert}_ours"), "--base", str(bundle.path)]) == 0
        assert main([str(path / f"{expert}_ours"), str(path / f"{expert}_back.safetensors")]) == 0
        back = read_adapter(path / f"{expert}_back.safetensors", bundle.config)
        assert back.base == read_adapter_of(f"{expert}={path / f'{expert}_ours'}", bundle).base is not None
        assert all(
            torch.equal(value, back.to_state()[0][name])
            for name, value in read_adapter(file, bundle.config).to_state()[0].items()
        )
    assert main([f"high={files['high']}", str(path / "unsaid")]) == 2
    assert main([str(files["high"]), str(path / "of_both"), "--base", str(bundle.path)]) == 0
    ours = TextToVideo.from_pretrained(bundle, device="cpu", text_encoder=text_encoder)
    cases = {
        (f"high={files['high']}", f"low={files['low']}"): apart,
        (f"high={path / 'high_ours'}", f"low={path / 'low_back.safetensors'}"): apart,
        (str(files["high"]),): both,
        (str(path / "of_both"),): both,
    }
    for asked, latents in cases.items():
        scales = dict.fromkeys(asked, 1.0)
        (video,) = ours([PROMPT], adapters=scales, **settings)
        assert distance(video.latents_CTHW[None], latents) <= 1e-5, asked
    merge_bundle(bundle, scales := dict.fromkeys(next(iter(cases)), 1.0), path / "merged")
    merged = TextToVideo.from_pretrained(path / "merged", device="cpu", text_encoder=text_encoder)
    (video,) = merged([PROMPT], **settings)
    assert distance(video.latents_CTHW[None], apart) <= 1e-5, scales
    assert distance(both, apart) > 1e-3, "negative control: each has its own"


def test_a_pair_must_be_alike(tmp_path):
    sizes = {"in_channels": 4, "out_channels": 4, "text_dim": 16, "patch_size": (1, 2, 2)}
    random_wan(1, **sizes, num_layers=1).save_pretrained(tmp_path / "transformer")
    random_wan(1, **sizes, num_layers=2).save_pretrained(tmp_path / "transformer_2")
    with pytest.raises(UserError, match="differ in their configurations"):
        open_published(tmp_path)


@pytest.mark.parametrize(
    "settings", [{}, {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12}]
)
def test_autoencoders_equal_diffusers_and_stream(settings, tmp_path):
    """Of 2.1, and of 2.2 in its form; a video longer than any piece of other tokenizers has no seam in time."""
    side = 16 if settings else 8
    model = small_autoencoder(**settings, **({"scale_factor_spatial": side} if settings else {}))
    model.save_pretrained(tmp_path / "theirs")
    published_tokenizer(tmp_path / "theirs").save(tmp_path / "ours")
    tokenizer = load_tokenizer(tmp_path / "ours")
    assert (tokenizer.latent_channels, tokenizer.temporal_compression, tokenizer.spatial_compression) == (4, 4, side)
    frames = 1 + 4 * 18
    assert 1 + (frames - 1) // 4 > tokenizer.tiles.frames
    video = torch.rand(1, 3, frames, 2 * side, 2 * side) * 2 - 1
    mean, std = (torch.tensor(model.config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    with torch.no_grad():
        z = model.encode(video).latent_dist.mode()
        expected = model.decode(z).sample
    latents = tokenizer.encode(video)
    assert distance(latents, (z - mean) / std) <= 1e-5
    assert distance(tokenizer.decode(latents), expected) <= 1e-4
    assert distance(tokenizer.encode(video.flip(2)), (z - mean) / std) > 1e-2, "negative control: frames must matter"


# ---------------------------------------------------------------------------------------------- Cosmos-Predict2


def test_predict2_images_equal_diffusers(tmp_path, write_t5, monkeypatch, without_torchvision):
    encoder, words = text_parts(tmp_path / "text", write_t5, "T5")
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
        rope_scale=(1.0, 4.0, 4.0),
        extra_pos_embed_type=None,
    )
    pipeline = diffusers.Cosmos2TextToImagePipeline(
        text_encoder=encoder,
        tokenizer=words,
        transformer=randomised(network),
        vae=small_autoencoder(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
        safety_checker=Harmless(),
    )
    # as published the network is asked at the last level, and its answer thrown away
    pipeline.scheduler.register_to_config(final_sigmas_type="zero")
    save(pipeline, tmp_path / "Predict2", "Cosmos2TextToImagePipeline")
    bundle, ours = converted(tmp_path / "Predict2", tmp_path / "bundle")
    assert (bundle.config.parameterization, bundle.defaults.num_frames) == ("flow", 1)
    settings = {"height": HEIGHT, "width": WIDTH, "sampler": "euler", "guidance": 8.0, "negative_prompt": NEGATIVE}
    (image,) = ours([PROMPT], seeds=3, num_frames=1, num_steps=STEPS, **settings)
    arguments = {
        "prompt": [PROMPT],
        "negative_prompt": [NEGATIVE],
        "height": HEIGHT,
        "width": WIDTH,
        "num_inference_steps": STEPS,
        "guidance_scale": 7.0,
        "latents": start_noise(ours, 1),
    }
    latents = pipeline(**arguments, output_type="latent").images
    assert distance(image.latents_CTHW[None, :, 0], latents) <= 1e-5
    changed = pipeline(**arguments | {"guidance_scale": 6.0}, output_type="latent").images
    assert distance(changed, latents) > 1e-3, "negative control: guidance must matter"


def test_predict2_released_names_read_back(tmp_path):
    config = NAMED_CONFIGS["cosmos2_2b"]
    names = {
        "transformer_blocks.3.norm2.linear_1.weight": "blocks.3.adaln_modulation_cross_attn.1.weight",
        "transformer_blocks.0.attn1.to_out.0.weight": "blocks.0.self_attn.output_proj.weight",
        "time_embed.norm.weight": "t_embedding_norm.weight",
        "norm_out.linear_2.weight": "final_layer.adaln_modulation.2.weight",
    }
    entries = {entry.name: entry.theirs for entry in cosmos.released_entries(config)}
    released = {name for theirs in entries.values() for name in theirs}
    assert set(names.values()) <= released

    small = cosmos.config_from_diffusers(
        {
            **cosmos.config_to_diffusers(config),
            "num_layers": 1,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "text_embed_dim": 8,
            "adaln_lora_dim": 8,
        }
    )
    dit = randomised(DiT(small))
    theirs = to_theirs(from_state_dict(dit.state_dict()), cosmos.released_entries(small))
    write_safetensors(tmp_path / "model.safetensors", theirs)
    published = open_published(tmp_path / "model.safetensors")
    assert published.config == small
    assert all(torch.equal(published.tensors.read(name), tensor) for name, tensor in dit.state_dict().items())
