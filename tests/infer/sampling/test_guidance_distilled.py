"""Videos by a network that is told the scale of guidance: one call of it, whatever the scale, and no second answer."""

from dataclasses import replace

import pytest
import torch

from megadit.infer.commands import tune_sampler
from megadit.infer.commands.tune_sampler import candidates_of
from megadit.infer.generate.command import main as generate
from megadit.infer.generate.memory_plan import Choices, plan_memory
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.runtimes.cuda_graphs import RecordedDenoiser
from megadit.infer.sampling.resolve import num_function_evaluations
from megadit.models.shared.errors import UserError
from tests.bundles import CONFIG, write_tiny_bundle
from tests.infer.runtimes.test_cuda_graphs import CPU, record_on_cpu

PROMPTS = ["a red seven", "a blue two"]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    config = replace(CONFIG, guidance_embedding_range=(1.0, 5.0))
    return write_tiny_bundle(tmp_path_factory.mktemp("told") / "bundle", config)


class Counted:
    """The batch sizes and scales that a denoiser is asked with."""

    def __init__(self, denoiser):
        self.denoiser, self.asked = denoiser, []

    def __call__(self, x_BCTHW, sigma_B, conditioning):
        self.asked.append((len(x_BCTHW), conditioning.guidance_B.tolist()))
        return self.denoiser(x_BCTHW, sigma_B, conditioning)


def test_guidance_is_told_and_costs_no_call(told):
    pipeline = TextToVideo.from_pretrained(told, device="cpu")
    pipeline.denoiser = counted = Counted(pipeline.denoiser)
    videos = {scale: pipeline(PROMPTS, guidance=scale, num_steps=2, batch_size=2) for scale in (1.0, 3.0)}
    assert counted.asked == [(2, [1.0, 1.0])] * 2 + [(2, [3.0, 3.0])] * 2
    assert videos[3.0][0].settings.guidance == 3
    assert not torch.equal(videos[1.0][0].latents_CTHW, videos[3.0][0].latents_CTHW)


def test_recorded_calls_are_told_it_too(told):
    pipeline = TextToVideo.from_pretrained(told, device="cpu")
    expected = [pipeline(PROMPTS, guidance=scale)[1].latents_CTHW for scale in (2.0, 4.0)]
    pipeline.denoiser = RecordedDenoiser(pipeline.denoiser, CPU, record_on_cpu)
    found = [pipeline(PROMPTS, guidance=scale)[1].latents_CTHW for scale in (2.0, 4.0)]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"guidance": 6.0}, "guidance=6 is outside 1 to 5, the range of this guidance-distilled model"),
        ({"negative_prompt": "blue"}, "negative_prompt=blue needs a second function evaluation"),
        ({"guidance_rescale": 0.5}, "guidance_rescale=0.5 needs a second function evaluation"),
        ({"guidance_interval": (0.1, 5.0)}, "guidance_interval=(0.1, 5.0) needs a second function evaluation"),
        ({"second_prompt": "a two", "second_guidance": 1.0}, "second_prompt=a two needs a second function evaluation"),
    ],
)
def test_what_it_cannot_be_told_is_refused(told, settings, says):
    pipeline = TextToVideo.from_pretrained(told, device="cpu")
    with pytest.raises(UserError) as error:
        pipeline(PROMPTS, **settings)
    assert says in str(error.value)


def test_the_command_refuses_it_before_anything_is_loaded(told, tmp_path, capsys):
    asked = ["--checkpoint_path", str(told.path), "--prompt", "a", "--video_save_path", str(tmp_path / "a.mp4")]
    assert generate([*asked, "--guidance", "7"]) == 2
    assert "guidance=7 is outside" in capsys.readouterr().err


def test_memory_and_evaluations_count_one_answer(told):
    settings, plain = told.defaults, replace(told, config=CONFIG)
    function_evaluations = [num_function_evaluations(settings, each.config) for each in (told, plain)]
    assert settings.guidance == 2 and function_evaluations == [settings.num_steps, 2 * settings.num_steps]
    choices = Choices(dtype=torch.float32, num_videos=1)
    tokenizer, encoder = told.load_tokenizer(), told.load_text_encoder()
    with_guidance_embedding, of_plain = (
        plan_memory(each, settings, tokenizer, encoder, choices).sampling for each in (told, plain)
    )
    assert with_guidance_embedding < of_plain
    variants = list(candidates_of(told, (3,)))
    assert {variant.settings.guidance for variant in variants} == {1.0, 1.5, 2.0, 3.0}
    assert all(len(variant.settings.sigmas) == 3 for variant in variants)


def test_scales_that_a_network_was_not_told_are_not_tried(told, tmp_path, capsys):
    command = [str(told.path), "--real", "nowhere", "--out", str(tmp_path / "out"), "--extractors", "none"]
    assert tune_sampler.main([*command, "--guidance", "2", "9"]) == 2
    assert "9" in capsys.readouterr().err and not (tmp_path / "out").exists()
