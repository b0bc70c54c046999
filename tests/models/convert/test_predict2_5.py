"""Predict2.5: a Qwen2.5-VL's states, what reads them, and whole videos, as diffusers has them."""

import inspect
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megadit.infer.conditioning.items import ConditioningItem
from megadit.infer.generate import command as generate
from megadit.infer.media.untrusted import decode
from megadit.infer.media.video_io import read_video
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.sampling.schedules import settings_sigmas
from megadit.models.bundle import Bundle
from megadit.models.commands.convert import main
from megadit.models.configs.named import NAMED_CONFIGS
from megadit.models.convert import cosmos
from megadit.models.diffusion.conditioning_settings import MediaLimits
from megadit.models.shared.errors import UserError
from megadit.models.storage.tensor_source import open_safetensors
from megadit.models.text_encoders import QwenVLTextEncoder, load_text_encoder
from megadit.serve.backend.engine import Engine
from megadit.serve.contract import VideoRequest
from megadit.serve.repository.build import service_info
from tests.conftest import WORDS
from tests.models.convert.test_conditioning import frames, pictures, random_cosmos
from tests.models.convert.test_parity import distance, num_parameters, of_layers
from tests.models.convert.test_pipelines import Harmless
from tests.models.convert.test_wan import save, small_autoencoder, start_noise
from tests.serve.backend.test_engine import Asker, run
from tests.serve.media import MP4, PNG

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

PROMPT, NEGATIVE, STEPS, LENGTH = "a red seven moving left", "a blue robot", 5, 512
SIZE = {"num_frames": 9, "height": 32, "width": 48}
LAYERS, WIDTH = 3, 16
TEMPLATE = "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content[0].text }}<|im_end|>\n{% endfor %}"
"""Qwen's, for texts alone."""


def write_words(path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = ["<|pad|>", "<|unk|>", "<|im_start|>", "<|im_end|>", "system", "user", "You", "helpful", "image", *WORDS]
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="<|unk|>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<|pad|>", unk_token="<|unk|>", **special
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return transformers.AutoTokenizer.from_pretrained(path), len(known)


def random_qwen(num_words):
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    rotary = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**sizes, "num_key_value_heads": 1, "vocab_size": num_words, "rope_parameters": rotary},
        vision_config={"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 16},
        **dict.fromkeys(("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"), 1),
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config).float().eval()


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """(diffusers' pipeline, the same on disk)."""
    path = tmp_path_factory.mktemp("predict2_5") / "Predict2.5-Tiny"
    words, num_words = write_words(path / "words")
    made = diffusers.Cosmos2_5_PredictBasePipeline(
        text_encoder=random_qwen(num_words),
        tokenizer=words,
        transformer=random_cosmos(
            extra_pos_embed_type=None,
            rope_scale=(1.0, 3.0, 3.0),
            use_crossattn_projection=True,
            crossattn_proj_in_channels=LAYERS * WIDTH,
            encoder_hidden_states_channels=16,
        ),
        vae=small_autoencoder(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        safety_checker=Harmless(),
    )
    save(made, path, "Cosmos2_5_PredictBasePipeline")
    published_scheduler().save_pretrained(path / "scheduler")
    return made, path


def encoder_of(path, **settings):
    return QwenVLTextEncoder(model=str(path), dtype="float32", **settings)


def test_states_equal_diffusers(pipeline):
    theirs, path = pipeline
    encoder = encoder_of(path)
    features = encoder.encode([PROMPT, "", PROMPT])
    expected = theirs._get_prompt_embeds([PROMPT, ""], max_sequence_length=LENGTH)
    assert encoder.dim == LAYERS * WIDTH and features.length_B.tolist() == [LENGTH] * 3
    torch.testing.assert_close(features.features_BLE, expected[[0, 1, 0]], rtol=1e-5, atol=1e-5)
    assert distance(expected[:1], expected[1:]) > 1e-2, "negative control: words must matter"


def test_no_template_of_a_tokenizer_is_run(pipeline, tmp_path):
    _, path = pipeline
    shutil.copytree(path, tmp_path / "hostile")
    (tmp_path / "hostile/tokenizer/chat_template.jinja").write_text(
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ 'a' * 99999 }}{% endfor %}{% endfor %}"
    )
    theirs, ours = (encoder_of(place)._tokens(PROMPT) for place in (tmp_path / "hostile", path))
    assert torch.equal(theirs, ours)


def test_what_is_too_long_is_cut_with_a_warning(pipeline):
    theirs, path = pipeline
    with pytest.warns(UserWarning, match=r"a text of \d+ tokens is cut to its first 20"):
        features = encoder_of(path, max_length=20).encode([PROMPT]).features_BLE
    torch.testing.assert_close(
        features, theirs._get_prompt_embeds([PROMPT], max_sequence_length=20), rtol=1e-5, atol=1e-5
    )


def test_on_disk(pipeline, tmp_path):
    theirs, path = pipeline
    linear = theirs.transformer.crossattn_proj[0]
    projection = {"weight": linear.weight.detach(), "bias": linear.bias.detach()}
    encoder = encoder_of(path, projection=projection, feature_cache=str(tmp_path / "kept"))
    encoder.save(tmp_path / "part")
    again = load_text_encoder(tmp_path / "part")
    assert again.dim == 16 and again.fingerprint() == encoder.fingerprint() != encoder_of(path).fingerprint()
    expected = encoder.encode([PROMPT]).features_BLE
    with torch.no_grad():
        states = theirs._get_prompt_embeds([PROMPT], max_sequence_length=LENGTH)
        torch.testing.assert_close(expected, theirs.transformer.crossattn_proj(states), rtol=1e-5, atol=1e-5)
    assert torch.equal(again.encode([PROMPT]).features_BLE, expected) and "network" not in again._loaded, "kept"
    with pytest.raises(UserError, match="a weight ED and a bias E"):
        encoder_of(path, projection={"weight": projection["weight"]})


@pytest.fixture
def bundle(pipeline, tmp_path):
    assert main([str(pipeline[1]), str(tmp_path / "bundle")]) == 0
    return Bundle.open(tmp_path / "bundle", verify=True)


def published_scheduler():
    """As diffusers' conversion of the published weights writes it."""
    return diffusers.UniPCMultistepScheduler(
        use_karras_sigmas=True, use_flow_sigmas=True, prediction_type="flow_prediction", sigma_max=200.0, sigma_min=0.01
    )


def published_levels(num_steps):
    """t of that scheduler, with the last 0."""
    scheduler = published_scheduler()
    scheduler.set_timesteps(num_steps)
    return scheduler.sigmas.double()


def test_it_is_sampled_as_diffusers_does(bundle):
    defaults, theirs = bundle.defaults, inspect.signature(diffusers.Cosmos2_5_PredictBasePipeline.__call__).parameters
    names = ("height", "width", "num_frames", "num_inference_steps")
    ours = (defaults.height, defaults.width, defaults.num_frames, defaults.num_steps)
    assert ours == tuple(theirs[name].default for name in names)
    assert defaults.guidance == 1 + theirs["guidance_scale"].default, "theirs adds it to the conditioned half"
    assert defaults.negative_prompt == diffusers.pipelines.cosmos.pipeline_cosmos2_5_predict.DEFAULT_NEGATIVE_PROMPT
    sigmas = settings_sigmas(defaults)
    torch.testing.assert_close(sigmas / (1 + sigmas), published_levels(36), rtol=0, atol=1e-6)
    t = bundle.config.conditioning_sigma / (1 + bundle.config.conditioning_sigma)
    assert t == pytest.approx(theirs["conditional_frame_timestep"].default, rel=1e-3)


@pytest.mark.parametrize("num_given", [0, 1, 5])
def test_videos_equal_diffusers(pipeline, bundle, num_given, monkeypatch, without_torchvision):
    """Of text, of an image (its first frame) and of a clip (its first five), at the published noise levels."""
    theirs, path = pipeline
    assert bundle.conditionings == ("first_frame", "prefix")
    encoder = encoder_of(path, projection=bundle.load_text_encoder().projection)
    ours = TextToVideo.from_pretrained(bundle, device="cpu", text_encoder=encoder)
    settings = {**SIZE, "sampler": "euler", "num_steps": STEPS, "fps": 16}
    clip, other = frames(5), frames(5, seed=6)
    kind = {0: None, 1: {"kind": "first_frame"}, 5: {"keep_frames": 5}}[num_given]
    given = kind and ConditioningItem(frames=clip[:num_given], **kind)
    (video,) = ours([PROMPT], seeds=3, guidance=4.0, negative_prompt=NEGATIVE, conditioning=given, **settings)
    levels, set_timesteps = published_levels(STEPS)[:-1].tolist(), theirs.scheduler.set_timesteps
    monkeypatch.setattr(
        theirs.scheduler, "set_timesteps", lambda n, device: set_timesteps(sigmas=levels, device=device)
    )

    def diffused(clip, guidance=3.0):
        """Theirs, of the first frames of `clip`."""
        return theirs(
            prompt=PROMPT,
            negative_prompt=NEGATIVE,
            **SIZE,
            **{0: {}, 1: {"image": pictures(clip)[0]}, 5: {"video": pictures(clip)}}[num_given],
            num_inference_steps=STEPS,
            guidance_scale=guidance,
            latents=start_noise(ours, SIZE["num_frames"]) * levels[0],
            output_type="latent",
        ).frames[0]

    latents, kept = diffused(clip), {0: 0, 1: 1, 5: 2}[num_given]
    assert distance(video.latents_CTHW[:, kept:], latents[:, kept:]) <= 1e-5
    assert distance(diffused(clip, guidance=2.0)[:, kept:], latents[:, kept:]) > 1e-3, "negative control: guidance"
    if num_given:
        # theirs begins at t < 1 as if it were 1, so that of what is given 1 - t of the first noise is left at the end
        noise = start_noise(ours, SIZE["num_frames"])[0, :, :kept] * levels[0]
        left = (1 - levels[0]) * (noise - video.latents_CTHW[:, :kept])
        assert distance(video.latents_CTHW[:, :kept] + left, latents[:, :kept]) <= 1e-5
        assert distance(diffused(other)[:, kept:], latents[:, kept:]) > 1e-4, "negative control: what is given matters"
    bias = theirs.transformer.crossattn_proj[0].bias.data
    bias += 1
    assert distance(diffused(clip)[:, kept:], latents[:, kept:]) > 1e-3, "negative control: the projection must matter"
    bias -= 1


GIVEN = {
    "image": ({"image": PNG}, "first.png", ConditioningItem(frames=decode(PNG, MediaLimits()), kind="first_frame")),
    "clip": (
        {"continue_video": MP4, "keep_frames": 5},
        "beginning.mp4",
        ConditioningItem(frames=decode(MP4, MediaLimits()), keep_frames=5),
    ),
}
"""What a request gives, the name of the same as a file, and what it is."""


@pytest.mark.parametrize("kind", GIVEN)
def test_what_is_given_is_generated_and_served(bundle, tmp_path, kind):
    asked, name, given = GIVEN[kind]
    ours, settings = TextToVideo.from_pretrained(bundle, device="cpu"), {**SIZE, "num_steps": 2, "fps": 16.0}
    (expected,) = ours([PROMPT], seeds=3, conditioning=given, **settings)
    (without,) = ours([PROMPT], seeds=3, **settings)
    assert not np.array_equal(expected.video, without.video), "negative control"
    asker = Asker(VideoRequest(prompt=PROMPT, seed=3, **settings, **asked))
    run(Engine(ours, service_info(bundle, bundle.defaults, None)), asker)
    assert asker.endings == [None]
    (tmp_path / "served.mp4").write_bytes(asker.videos[0].data)
    (tmp_path / name).write_bytes(PNG if kind == "image" else MP4)
    options = {**settings, "seed": 3, **asked, next(iter(asked)): tmp_path / name, "device": "cpu"}
    options |= {"checkpoint_path": bundle.path, "prompt": PROMPT, "video_save_path": tmp_path / "generated.mp4"}
    assert generate.main([str(part) for option, value in options.items() for part in (f"--{option}", value)]) == 0
    expected.save(tmp_path / "expected.mp4")
    frames = [read_video(tmp_path / f"{name}.mp4")[0] for name in ("expected", "served", "generated")]
    assert np.array_equal(frames[0], frames[1]) and np.array_equal(frames[0], frames[2])


def test_weights_go_back(pipeline, bundle, tmp_path):
    assert main([str(bundle.path), str(tmp_path / "out"), "--to", "diffusers"]) == 0
    before, after = (
        diffusers.CosmosTransformer3DModel.from_pretrained(folder / "transformer")
        for folder in (pipeline[1], tmp_path / "out")
    )
    assert after.config["crossattn_proj_in_channels"] == LAYERS * WIDTH
    again = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "out", safety_checker=Harmless())
    assert type(again) is type(pipeline[0]) and again.text_encoder.config.model_type == "qwen2_5_vl"
    assert all(torch.equal(after.state_dict()[name], tensor) for name, tensor in before.state_dict().items())


def test_the_released_names_go_out_and_come_in(pipeline, bundle, tmp_path):
    """Predict2's, with what reads the states beside them under the name that it has in diffusers."""
    assert main([str(bundle.path), str(tmp_path / "out"), "--to", "original"]) == 0
    stored = open_safetensors(tmp_path / "out/model.safetensors").stored
    assert {"t_embedding_norm.weight", "blocks.1.cross_attn.k_norm.weight", "crossattn_proj.0.bias"} <= stored.keys()
    parts = ("--tokenizer", str(pipeline[1] / "vae"), "--text_encoder", str(pipeline[1]))
    assert main([str(tmp_path / "out/model.safetensors"), str(tmp_path / "again"), *parts]) == 0
    again = Bundle.open(tmp_path / "again", verify=True)
    assert (again.config, again.conditionings) == (bundle.config, bundle.conditionings)
    assert again.defaults == bundle.defaults
    for part in ("transformer", "text_encoder"):
        before, after = (load_file(one.path / part / "model.safetensors") for one in (bundle, again))
        assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)


STATES = 100_352
"""Numbers of a token: 28 layers of 3,584."""
COUNTS = {"cosmos2_5_2b": (16, 28, 1_956_413_440), "cosmos2_5_14b": (40, 36, 14_265_285_632)}
"""Name -> heads and layers, by diffusers' conversion of the published files, and our parameters."""


@pytest.mark.parametrize("name", COUNTS)
def test_whole_sizes_have_as_many_parameters_as_diffusers_networks(name):
    """What reads the states is of our text encoder."""
    num_heads, num_layers, count = COUNTS[name]

    def theirs(num_layers):
        return diffusers.CosmosTransformer3DModel(
            in_channels=17,
            out_channels=16,
            num_attention_heads=num_heads,
            attention_head_dim=128,
            num_layers=num_layers,
            max_size=(128, 240, 240),
            rope_scale=(1.0, 3.0, 3.0),
            extra_pos_embed_type=None,
            use_crossattn_projection=True,
            crossattn_proj_in_channels=STATES,
            encoder_hidden_states_channels=1024,
        )

    config = NAMED_CONFIGS[name]
    with torch.device("meta"):
        one = cosmos.config_from_diffusers(theirs(1).config)
    assert replace(config, ffn_hidden_size=num_heads * 512) == replace(one, num_layers=num_layers)
    assert num_parameters(config) == count
    assert of_layers(theirs, config) == count + (STATES + 1) * 1024


def test_what_is_missing_is_told(pipeline, tmp_path, capsys):
    _, path = pipeline
    config = json.loads((path / "transformer/config.json").read_text())
    part = tmp_path / "transformer"
    part.mkdir()
    (part / "config.json").write_text(json.dumps(config))
    random_cosmos(extra_pos_embed_type=None, rope_scale=(1.0, 3.0, 3.0)).save_pretrained(tmp_path / "plain")
    (tmp_path / "plain/diffusion_pytorch_model.safetensors").rename(part / "diffusion_pytorch_model.safetensors")
    assert main([str(part), str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert "crossattn_proj.0.weight, which use_crossattn_projection=true needs" in told and told.count("\n") == 1
