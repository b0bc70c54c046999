import os
import shutil
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from megadit.infer.conditioning.encode import EncodedConditioning
from megadit.infer.pipeline.batches import Cancelled, solve
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.sampling.resolve import latent_size, resolve_settings, with_changed_defaults
from megadit.infer.sampling.samplers import SAMPLERS
from megadit.infer.sampling.schedules import karras_sigmas
from megadit.models import bundle as bundle_file
from megadit.models.bundle import Bundle, open_bundle
from megadit.models.bundle_writer import write_bundle
from megadit.models.diffusion.noise import Stream, latent_noise, seed_key
from megadit.models.diffusion.settings import SAMPLERS as TRAITS
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json, write_json
from megadit.models.text_encoders import HashedWordEncoder
from megadit.models.text_encoders import base as encoders
from megadit.models.text_encoders.base import TextFeaturesCache
from megadit.models.tokenizers import HaarTokenizer

from ...half_products import without_half_products

PROMPTS = ["a red seven moving left", "a blue two", "", "one green zero going up very slowly"]
SEEDS = [3, 1, 4, 1]


def largest_difference(a: np.ndarray, b: np.ndarray) -> int:
    return int(np.abs(a.astype(int) - b.astype(int)).max())


def test_defaults_come_from_the_bundle(pipeline):
    (result,) = pipeline(["a red seven"])
    assert result.video.shape == (5, 16, 24, 3) and result.video.dtype == np.uint8
    assert result.video.std() > 1
    assert (result.prompt, result.seed, result.settings) == ("a red seven", 0, pipeline.defaults)


@pytest.mark.parametrize(
    "settings",
    [{"sampler": name} for name in SAMPLERS] + [{"churn": 3.0}, {"eta": 1.0, "sampler": "dpm2"}],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_four_prompts_at_once_are_four_times_one(pipeline, settings):
    together = pipeline(PROMPTS, seeds=SEEDS, batch_size=4, **settings)
    for result, prompt, seed in zip(together, PROMPTS, SEEDS, strict=True):
        (alone,) = pipeline([prompt], seeds=[seed], **settings)
        assert (result.prompt, result.seed) == (prompt, seed)
        # Float32 sums in another order may cross the boundary between two of the 256 values.
        assert largest_difference(result.video, alone.video) <= 1


ANCESTRAL = [{"sampler": name, "eta": 1.0} for name, traits in TRAITS.items() if traits.adds_noise]
STUDENT = {"sampler": "consistency", "sigmas": [20.0, 5.0, 1.0], "guidance": 1.0}
"""As a student in several steps samples: noise of its own in each of them, and no guidance."""


@pytest.mark.parametrize("settings", [{}, *ANCESTRAL, STUDENT], ids=lambda settings: settings.get("sampler", "default"))
def test_latents_do_not_depend_on_the_batch(pipeline, settings):
    """Those of a seed are the same in a batch of any size and at any place in it, noise of later steps included."""

    def sample(prompts, seeds, **more):
        return [result.latents_CTHW for result in pipeline(prompts, seeds=seeds, **settings, **more)]

    together = sample(PROMPTS, SEEDS)
    moved = sample(PROMPTS[::-1], SEEDS[::-1], batch_size=3)[::-1]  # the first one is alone in its batch
    for latents_CTHW, moved_CTHW in zip(together, moved, strict=True):
        # float32 sums in another order: 5e-7 by default, 3e-5 where a random network is evaluated twice in a step
        assert (latents_CTHW - moved_CTHW).norm() <= 1e-4 * latents_CTHW.norm()
    (other_seed_CTHW,) = sample(PROMPTS[:1], [SEEDS[0] + 1])
    assert (together[0] - other_seed_CTHW).norm() > 1e-2 * together[0].norm()


def test_batches_of_any_size_give_the_same_videos(pipeline):
    whole = pipeline(PROMPTS, seeds=SEEDS, batch_size=4)
    for batch_size in (1, 3):
        parts = pipeline(PROMPTS, seeds=SEEDS, batch_size=batch_size)
        assert max(largest_difference(a.video, b.video) for a, b in zip(whole, parts, strict=True)) <= 1


def test_prompt_seed_fps_and_steps_each_change_the_video(pipeline):
    def video(prompt="a red seven", **arguments):
        return pipeline([prompt], **arguments)[0].video

    reference = video()
    assert np.array_equal(reference, video())
    assert largest_difference(reference, video("a blue two")) > 1
    for arguments in ({"seeds": 1}, {"fps": 30}, {"num_steps": 4}, {"sampler": "heun"}, {"guidance": 3.0}):
        assert largest_difference(reference, video(**arguments)) > 1, arguments


def test_negative_prompt_changes_the_video(pipeline):
    def video(**arguments):
        return pipeline(["a red seven"], **arguments)[0].video

    assert largest_difference(video(), video(negative_prompt="blue")) > 1
    # Negative controls: no text is what it replaces, and without guidance there is nothing to replace.
    assert np.array_equal(video(), video(negative_prompt=""))
    assert np.array_equal(video(guidance=1), video(guidance=1, negative_prompt="blue"))
    # The prompt as its own negative is the prompt without guidance.
    assert largest_difference(video(negative_prompt="a red seven"), video(guidance=1)) <= 1


def test_guidance_in_one_batch_and_in_turn_make_the_same_video(bundle_dir, pipeline):
    in_turn = TextToVideo.from_pretrained(bundle_dir, device="cpu", batch_guidance=False)
    for a, b in zip(pipeline(PROMPTS), in_turn(PROMPTS), strict=True):
        assert largest_difference(a.video, b.video) <= 1


def test_autoguidance_leads_away_from_a_weaker_checkpoint(bundle_dir, pipeline, tmp_path):
    def video(**settings):
        return pipeline(["a red seven"], **settings)[0].video

    # The checkpoint itself is no weaker: nothing leads away from it.
    assert largest_difference(video(autoguidance=str(bundle_dir)), video(guidance=1)) <= 1
    bundle = Bundle.open(bundle_dir)
    weaker = {name: 0.9 * value for name, value in bundle.load_dit().state_dict().items()}

    def write(path, **parts):
        write_bundle(
            path,
            config=bundle.config,
            state_dict=weaker,
            defaults=bundle.defaults,
            **({"tokenizer": bundle.load_tokenizer(), "text_encoder": bundle.load_text_encoder()} | parts),
        )

    write(tmp_path / "weak")
    assert largest_difference(video(autoguidance=str(tmp_path / "weak")), video(guidance=1)) > 1
    write(tmp_path / "other", tokenizer=replace(bundle.load_tokenizer(), reconstruction_psnr=7.0))
    with pytest.raises(UserError, match="has another tokenizer than"):
        video(autoguidance=str(tmp_path / "other"))
    with pytest.raises(UserError, match="nowhere"):
        video(autoguidance="nowhere")
    closed = TextToVideo.from_pretrained(bundle_dir, device="cpu", opens_paths=False)
    with pytest.raises(UserError, match="cannot load a second checkpoint"):
        closed(["a"], autoguidance=str(tmp_path / "weak"))


def test_no_bundle_names_a_checkpoint_beside_it(bundle_dir, tmp_path):
    """Whoever wrote it would have its user's machine open, or convert, what they name."""
    shutil.copytree(bundle_dir, tmp_path / "foreign")
    manifest, weaker = read_json(tmp_path / "foreign" / "megadit.json"), {"autoguidance": "/etc/shadow"}
    write_json(tmp_path / "foreign" / "megadit.json", manifest | {"defaults": manifest["defaults"] | weaker})
    with pytest.raises(UserError, match="defaults.autoguidance='/etc/shadow'"):
        Bundle.open(tmp_path / "foreign")
    with pytest.raises(UserError, match="bundles do not store"):
        with_changed_defaults(Bundle.open(bundle_dir), ["autoguidance=/etc/shadow"])


def test_the_text_encoder_sees_each_text_once_and_may_leave(bundle_dir):
    asked, loaded = [], []

    class Counting(HashedWordEncoder):
        def encode(self, texts):
            asked.append(texts)
            return super().encode(texts)

    bundle = Bundle.open(bundle_dir)

    def load_text_encoder():
        loaded.append(True)
        return Counting.load(bundle_dir / "text_encoder")

    plain = TextToVideo.from_pretrained(bundle, device="cpu")
    parts = {name: getattr(plain, name) for name in ("denoiser", "tokenizer", "config", "defaults")}
    leaving = TextToVideo(text_encoder=load_text_encoder(), reload_text_encoder=load_text_encoder, **parts)
    results = leaving(["a", "b", "a"], batch_size=1)
    assert asked == [["a"], ["b"], [""]] and len(loaded) == 1
    leaving(["b"])
    assert len(asked) == 3 and len(loaded) == 1
    leaving(["c"])
    assert asked[3:] == [["c"]] and len(loaded) == 2
    for result, expected in zip(results, plain(["a", "b", "a"], batch_size=1), strict=True):
        assert np.array_equal(result.video, expected.video)


@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_a_video_begins_with_its_noise_times_the_scale(pipeline, scale):
    """What a sampler adds on its way is not scaled, nor noise where something given is kept."""
    seen, shape, key_B = [], (4, 1, 2, 2), torch.tensor([seed_key(7)])
    settings = resolve_settings(pipeline.defaults, sampler="consistency", sigmas=[80.0, 3.0], noise_scale=scale)
    is_read = torch.arange(4).view(shape[1:]) == 2
    known = EncodedConditioning(torch.ones(1, *shape), is_read)

    def nothing(x, sigma_B):
        seen.append(x)
        return torch.zeros_like(x)

    for given in (None, known):
        solve(nothing, settings, torch.tensor([80.0, 3.0, 0.0]), key_B, shape, given)
    noise, renewed = (latent_noise(key_B, shape, stream=stream) for stream in (Stream.NOISE, Stream.STEP))
    first = 80 * scale * noise
    kept = 1 + torch.where(is_read, 80 * noise, first)
    for found, expected in zip(seen, (first, 3 * renewed, kept, 3 * renewed), strict=True):
        torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-6, atol=1e-6)


def test_nemo_guidance_is_one_more(pipeline):
    (nemo,) = pipeline(["a red seven"], guidance=2, guidance_convention="nemo")
    (standard,) = pipeline(["a red seven"], guidance=3)
    assert nemo.settings == standard.settings
    assert np.array_equal(nemo.video, standard.video)


@pytest.mark.parametrize("num_frames", [1, 2, 4, 5, 6, 9])
def test_any_number_of_frames(pipeline, num_frames):
    (result,) = pipeline(["a red seven"], num_frames=num_frames)
    assert result.video.shape == (num_frames, 16, 24, 3)


def test_cutting_the_tail_keeps_the_frames_before_it(pipeline):
    (whole,) = pipeline(["a red seven"], num_frames=9)
    (cut,) = pipeline(["a red seven"], num_frames=7)
    assert np.array_equal(whole.video[:7], cut.video)


def test_frames_are_rounded_up_to_the_temporal_patch_too(pipeline):
    config = replace(pipeline.config, patch_temporal=2)
    tokenizer = pipeline.tokenizer
    sizes = {n: latent_size(replace(pipeline.defaults, num_frames=n), config, tokenizer)[:2] for n in (1, 5, 6, 13, 14)}
    assert {n: (frames, shape[1]) for n, (frames, shape) in sizes.items()} == {
        1: (5, 2), 5: (5, 2), 6: (13, 4), 13: (13, 4), 14: (21, 6),
    }  # fmt: skip


def test_steps_count_denoiser_calls_over_all_batches(pipeline):
    steps = []
    pipeline(PROMPTS, on_step=steps.append, sampler="heun", num_steps=3, batch_size=3)
    assert [(step.step, step.num_steps) for step in steps] == [(i + 1, 10) for i in range(10)]
    assert [step.videos for step in steps] == [range(3)] * 5 + [range(3, 4)] * 5
    sigmas = karras_sigmas(3, pipeline.defaults.sigma_min, pipeline.defaults.sigma_max)
    assert [step.sigma for step in steps[:5]] == pytest.approx([sigmas[i].item() for i in (0, 1, 1, 2, 2)])
    settings = resolve_settings(pipeline.defaults, sampler="heun", num_steps=3)
    assert pipeline.num_denoiser_calls(4, settings, 3) == 10


def test_a_callback_cancels_before_the_next_step(pipeline):
    steps = []

    def stop(step):
        steps.append(step)
        return step.step < 4

    with pytest.raises(Cancelled, match="after denoiser call 4 of 6"):
        for result in pipeline.stream(PROMPTS[:2], batch_size=1, on_step=stop):
            finished = result.prompt
    assert len(steps) == 4 and finished == PROMPTS[0]


def test_what_a_callback_raises_ends_the_generation(pipeline):
    def interrupt(step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipeline(["a red seven"], on_step=interrupt)


def test_the_last_preview_shows_the_video(pipeline):
    previews = []
    (result,) = pipeline(["a red seven"], on_step=lambda step: previews.append(step.preview()))
    assert len(previews) == 3 and previews[-1].shape == (1, 2, 16, 24, 3) and previews[-1].dtype == np.uint8
    first = result.video[0].ravel()
    agreement = [np.corrcoef(preview[0, 0].ravel(), first)[0, 1] for preview in previews]
    assert agreement[-1] > 0.95 > 0.5 > np.corrcoef(previews[-1][0, 0][::-1].ravel(), first)[0, 1]


def test_lower_precision_stays_close(bundle_dir, pipeline):
    (reference,) = pipeline(["a red seven"])
    (low,) = TextToVideo.from_pretrained(bundle_dir, device="cpu", dtype="bfloat16")(["a red seven"])
    error = np.abs(reference.video.astype(float) - low.video).mean()
    assert 0 < error < 8  # of 255; bfloat16 has 8 bits


@pytest.mark.gpu
def test_a_gpu_makes_the_same_video(bundle_dir, pipeline):
    (cpu,) = pipeline(["a red seven"])
    (gpu,) = TextToVideo.from_pretrained(bundle_dir, device="cuda")(["a red seven"])
    # The same noise to the bit; float32 sums in another order may cross the boundary between two of the 256 values.
    assert largest_difference(cpu.video, gpu.video) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "no prompt"),
        ({"prompts": "a red seven"}, "must be a list"),
        ({"seeds": [1, 2]}, "2 seeds for 1 prompts"),
        ({"num_steps": 0}, "num_steps=0"),
        ({"num_frames": 0}, "num_frames=0"),
        ({"fps": 0}, "fps=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"sampler": "DDIM"}, "euler takes the same steps"),
        ({"height": 18}, "height=18 is not a multiple of 4; use 16 or 20"),
        ({"width": 3}, "width=3 is not a multiple of 4; use 4"),
        ({"guidance": 2.0, "guidance_convention": "dfm"}, "'dfm' is unknown"),
    ],
)
def test_mistakes_are_told_before_the_network_is_asked(pipeline, arguments, message):
    steps = []
    with pytest.raises(UserError, match=message):
        pipeline(**({"prompts": ["a"], "on_step": steps.append} | arguments))
    assert not steps


def test_more_texts_than_are_remembered_are_still_encoded_once(monkeypatch):
    """Of one generation: while it samples, an encoder that has left would come back and stay."""
    monkeypatch.setattr(encoders, "_CACHED", 2)
    encoded, encoder = [], HashedWordEncoder(dim=8)

    class Counting:
        def encode(self, texts):
            encoded.extend(texts)
            return encoder.encode(texts)

    texts = [f"number {index}" for index in range(5)]
    cache = TextFeaturesCache(Counting(), Counting)
    cache.prepare(texts)
    for text in texts:
        cache.encode([text])
    assert encoded == texts
    cache.prepare(["another", "two"])
    assert len(cache._seen) == 2, "what nobody asks for is forgotten"


def test_another_text_encoder_or_tokenizer_is_refused(bundle_dir):
    bundle = Bundle.open(bundle_dir)
    TextToVideo.from_pretrained(
        bundle, device="cpu", tokenizer=bundle.load_tokenizer(), text_encoder=bundle.load_text_encoder()
    )
    with pytest.raises(UserError, match="this tokenizer .* is not the one"):
        other = HaarTokenizer(temporal_compression=4, spatial_compression=2, sigma_data=1.0)
        TextToVideo.from_pretrained(bundle, device="cpu", tokenizer=other)
    with pytest.raises(UserError, match="this text encoder .* is not the one"):
        TextToVideo.from_pretrained(bundle, device="cpu", text_encoder=HashedWordEncoder(dim=8))


def test_latents_that_are_not_numbers_are_refused(pipeline):
    broken = TextToVideo(
        denoiser=lambda x, sigma_B, conditioning: x * float("nan"),
        tokenizer=pipeline.tokenizer,
        text_encoder=pipeline.text_encoder,
        config=pipeline.config,
        defaults=pipeline.defaults,
    )
    with pytest.raises(UserError, match="not finite"):
        broken(["a red seven"])


def test_missing_checkpoints(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        open_bundle(tmp_path / "nowhere")
    with pytest.raises(UserError, match="neither a bundle .* nor a training directory"):
        open_bundle(tmp_path)


def test_training_directory_is_converted_once_and_again_after_a_new_checkpoint(tmp_path, bundle_dir, monkeypatch):
    conversions = []

    def convert(training_directory, bundle):
        conversions.append(training_directory)
        shutil.copytree(bundle_dir, bundle, dirs_exist_ok=True, copy_function=shutil.copyfile)

    monkeypatch.setattr(bundle_file, "_convert", convert)
    (tmp_path / "checkpoints").mkdir()
    for _ in range(2):
        assert open_bundle(tmp_path).path == tmp_path / "bundle"
    assert len(conversions) == 1
    (tmp_path / "checkpoints/step_9").mkdir()
    later = (tmp_path / "bundle/megadit.json").stat().st_mtime + 10
    os.utime(tmp_path / "checkpoints", (later, later))
    open_bundle(tmp_path)
    assert len(conversions) == 2


def test_of_several_processes_that_ask_one_converts(tmp_path, bundle_dir, monkeypatch):
    (tmp_path / "checkpoints").mkdir()
    conversions, others_wait = [], threading.Barrier(3)

    def convert(training_directory, bundle):
        conversions.append(training_directory)
        assert not bundle.exists()
        shutil.copytree(bundle_dir, bundle, copy_function=shutil.copyfile)

    def is_older(*paths, look=bundle_file._is_older):
        found = look(*paths)
        if threading.current_thread() not in seen:
            seen.append(threading.current_thread())
            others_wait.wait(timeout=120)  # each has seen that there is none before any may make it
        return found

    seen = []
    monkeypatch.setattr(bundle_file, "_convert", convert)
    monkeypatch.setattr(bundle_file, "_is_older", is_older)
    with ThreadPoolExecutor(3) as threads:
        bundles = list(threads.map(open_bundle, [tmp_path] * 3))
    assert {bundle.path for bundle in bundles} == {tmp_path / "bundle"} and len(conversions) == 1


def test_a_checkpoint_that_was_written_during_a_conversion_is_converted_next(tmp_path, bundle_dir, monkeypatch):
    (tmp_path / "checkpoints").mkdir()
    conversions = []

    def convert(training_directory, bundle):
        conversions.append(training_directory)
        if len(conversions) == 1:
            (training_directory / "checkpoints/iter_0000002").mkdir()
            later = (training_directory / "checkpoints").stat().st_mtime_ns + 1_000_000  # clocks may stand still
            os.utime(training_directory / "checkpoints", ns=(later, later))
        shutil.copytree(bundle_dir, bundle, dirs_exist_ok=True, copy_function=shutil.copyfile)

    monkeypatch.setattr(bundle_file, "_convert", convert)
    for _ in range(3):
        open_bundle(tmp_path)
    assert len(conversions) == 2


def test_a_failed_conversion_gives_its_reason(tmp_path, monkeypatch):
    def failing(module, *arguments):
        assert find_spec(module) and arguments == (str(tmp_path), str(tmp_path / "bundle"))
        return [sys.executable, "-S", "-c", "raise SystemExit('a warning\\nerror: no whole checkpoint\\n')"]

    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(bundle_file, "python_module", failing)
    with pytest.raises(UserError, match=r"cannot convert .* \(no whole checkpoint\); try: megadit bundle"):
        open_bundle(tmp_path)


def test_decoding_beside_sampling_changes_nothing_and_does_overlap(bundle_dir, pipeline):
    aside = TextToVideo.from_pretrained(bundle_dir, device="cpu", overlap_decoding=True)
    next_is_sampled, decode, calls = threading.Event(), aside.tokenizer.decode, []

    class Waiting:
        """The tokenizer, which decodes the first video only once the second is being sampled."""

        def __getattr__(self, name):
            return getattr(pipeline.tokenizer, name)

        def decode(self, latents_BCTHW):
            assert calls or next_is_sampled.wait(timeout=300), "nothing was sampled meanwhile"
            calls.append(threading.current_thread())
            return decode(latents_BCTHW)

    aside.tokenizer = Waiting()

    def on_step(step):
        if step.videos.start == 1:
            next_is_sampled.set()

    results = aside(PROMPTS, seeds=SEEDS, batch_size=1, on_step=on_step)
    assert len(calls) == 4 and threading.main_thread() not in calls
    for found, expected in zip(results, pipeline(PROMPTS, seeds=SEEDS, batch_size=1), strict=True):
        assert np.array_equal(found.video, expected.video) and found.seed == expected.seed


def test_what_was_sampled_before_a_cancel_is_still_decoded(bundle_dir):
    aside = TextToVideo.from_pretrained(bundle_dir, device="cpu", overlap_decoding=True)
    videos = aside.stream(PROMPTS, batch_size=1, on_step=lambda step: step.videos.start < 2)
    assert [next(videos).prompt, next(videos).prompt] == PROMPTS[:2]
    with pytest.raises(Cancelled):
        next(videos)


def test_it_is_said_what_half_precision_costs_a_processor_without_it(bundle_dir):
    with without_half_products(), pytest.warns(UserWarning, match=r"not multiply bfloat16: .* as long as in float32"):
        TextToVideo.from_pretrained(bundle_dir, device="cpu", dtype="bfloat16")
    with without_half_products(), warnings.catch_warnings():
        warnings.simplefilter("error")
        TextToVideo.from_pretrained(bundle_dir, device="cpu")
