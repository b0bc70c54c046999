"""Predict2.5: a Qwen2.5-VL's states, what reads them, and whole videos, as diffusers has them."""

import json

import pytest
import torch

from megadit.infer.pipeline import TextToVideo
from megadit.models.bundle.bundle import Bundle
from megadit.models.convert.cli import main
from megadit.models.shared.errors import UserError
from megadit.models.text_encoders import QwenVLTextEncoder, load_text_encoder
from tests.conftest import WORDS
from tests.models.convert.test_given_weights import random_cosmos
from tests.models.convert.test_parity import distance
from tests.models.convert.test_pipelines import Harmless
from tests.models.convert.test_wan import save, small_autoencoder, start_noise

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

PROMPT, NEGATIVE, STEPS, LENGTH = "a red seven moving left", "a blue robot", 10, 512
SIZE = {"num_frames": 9, "height": 32, "width": 48}
LAYERS, WIDTH = 3, 16
TEMPLATE = "{% for turn in messages %}<|start|>{{ turn.role }} {{ turn.content[0].text }} <|end|>{% endfor %}"
"""Qwen's, in short."""


def write_words(path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = ["<|pad|>", "<|unk|>", "<|start|>", "<|end|>", "system", "user", "You", "helpful", "image", *WORDS]
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="<|unk|>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"additional_special_tokens": ["<|start|>", "<|end|>"]}
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


def test_videos_equal_diffusers(pipeline, tmp_path, monkeypatch, without_torchvision):
    theirs, path = pipeline
    assert main([str(path), str(tmp_path / "bundle")]) == 0
    bundle = Bundle.open(tmp_path / "bundle", verify=True)
    assert bundle.takes == () and (bundle.defaults.num_steps, bundle.defaults.guidance) == (36, 8.0)
    saved = bundle.load_text_encoder()
    encoder = encoder_of(path, projection=saved.projection)
    ours = TextToVideo.from_pretrained(bundle, device="cpu", text_encoder=encoder)
    settings = {"sampler": "euler", "schedule": "flow", "sigma_max": 999.0, "num_steps": STEPS, "fps": 16}
    (video,) = ours([PROMPT], seeds=3, guidance=4.0, negative_prompt=NEGATIVE, **SIZE, **settings)
    levels = torch.linspace(0.999, 0, STEPS + 1)[:-1].tolist()
    set_timesteps = theirs.scheduler.set_timesteps
    monkeypatch.setattr(
        theirs.scheduler, "set_timesteps", lambda n, device: set_timesteps(sigmas=levels, device=device)
    )
    arguments = {
        "prompt": PROMPT,
        "negative_prompt": NEGATIVE,
        **SIZE,
        "num_inference_steps": STEPS,
        "guidance_scale": 3.0,
        "latents": start_noise(ours, SIZE["num_frames"]) * 0.999,
        "output_type": "latent",
    }
    latents = theirs(**arguments).frames
    assert distance(video.latents_CTHW[None], latents) <= 1e-5
    changed = theirs(**arguments | {"guidance_scale": 2.0}).frames
    assert distance(changed, latents) > 1e-3, "negative control: guidance must matter"
    assert main([str(tmp_path / "bundle"), str(tmp_path / "out"), "--to", "diffusers"]) == 0
    before, after = (
        diffusers.CosmosTransformer3DModel.from_pretrained(folder / "transformer")
        for folder in (path, tmp_path / "out")
    )
    assert after.config["crossattn_proj_in_channels"] == LAYERS * WIDTH
    assert all(torch.equal(after.state_dict()[name], tensor) for name, tensor in before.state_dict().items())
    theirs.transformer.crossattn_proj[0].bias.data += 1
    assert distance(theirs(**arguments).frames, latents) > 1e-3, "negative control: the projection must matter"


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
    assert "crossattn_proj.0.weight, which use_crossattn_projection asks for" in told and told.count("\n") == 1
