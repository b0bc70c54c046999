"""Every option of `megadit generate` does something: given, the command makes, loads or says something else.

An option without an entry in `BY_OWN_NAMES` fails. What needs several processes or a GPU ends here with an error that
says so, and is tried in test_ranks.py and test_graphs.py.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megadit.infer.commands import calibrate_cache
from megadit.infer.generate import command as generate
from megadit.infer.generate.options import GenerateOptions
from megadit.infer.media.video_io import write_video
from megadit.infer.runtimes.options import RuntimeOptions
from megadit.models.diffusion.settings import SERVED, PartialSettings
from megadit.models.networks.dit import DiT
from megadit.models.shared.cli.setting import other_names, settings_of

from .conftest import make_adapter

BASE = ("--checkpoint_path", "{bundle}", "--device", "cpu", "--num_steps", "2", "--num_video_frames", "1")
LATENTS = ("--format", "safetensors")
PROMPT = ("--prompt", "a red seven")
TWO = (*PROMPT, "a blue two")
SUBJECT = ("--prompt", "a {subject}", "--subject_name", "two")
VIDEO = ("--num_video_frames", "9")
ABLE = ("--checkpoint_path", "{room}/able")


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What is given to an option, in which command, and where the difference shows."""

    words: tuple[str, ...]
    sees: str
    given: tuple[str, ...] = ()
    says: str = ""
    """Of an error."""


def other(*words, given=(*LATENTS, *PROMPT)):
    """Other latents, or more of them."""
    return Effect(words=words, sees="latents", given=given)


def ends(says, *words, given=PROMPT):
    """The command ends with an error, or another error than without."""
    return Effect(words=words, sees="error", given=given, says=says)


def seen(where, *words, given=PROMPT):
    return Effect(words=words, sees=where, given=given)


BY_OWN_NAMES = {
    "--checkpoint_path": ends("nowhere", "nowhere"),
    "--repeat": other("{room}/made.safetensors"),
    "--recorded_files": ends("needs --repeat"),
    "--prompt": other("a blue two"),
    "--prompt_file": other("{room}/prompts.txt"),
    "--adapter": other("{room}/adapter"),
    "--adapter_interval": other("0.1", "5", given=(*LATENTS, *PROMPT, "--adapter", "{room}/adapter")),
    "--subject_name": other("seven", given=(*LATENTS, *SUBJECT)),
    "--seed": other("3"),
    "--seeds": other("0", "1"),
    "--num_video_frames": other("5"),
    "--num_frames": other("5"),
    "--height": other("32"),
    "--width": other("32"),
    "--fps": other("12", given=(*LATENTS, *PROMPT, *VIDEO)),
    "--input_video": other("{room}/given.gif"),
    "--strength": other("0.9", given=(*LATENTS, *PROMPT, "--input_video", "{room}/given.gif")),
    "--continue_video": other("{room}/given.gif", given=(*LATENTS, *PROMPT, *VIDEO)),
    "--keep_frames": other("5", given=(*LATENTS, *PROMPT, *VIDEO, "--continue_video", "{room}/given.gif")),
    "--lead_to_video": other("{room}/given.gif", given=(*LATENTS, *PROMPT, *VIDEO)),
    "--image": other("{room}/given.gif", given=(*LATENTS, *PROMPT, *VIDEO)),
    "--first_frame": other("{room}/given.gif", given=(*LATENTS, *PROMPT, *VIDEO)),
    "--conditioned_image_or_video_path": other("{room}/given.gif", given=(*LATENTS, *PROMPT, *VIDEO)),
    "--last_image": other("{room}/given.gif", given=(*LATENTS, *PROMPT, *VIDEO, *ABLE)),
    "--last_frame": other("{room}/given.gif", given=(*LATENTS, *PROMPT, *VIDEO, *ABLE)),
    "--keyframe": other("5:{room}/given.gif", given=(*LATENTS, *PROMPT, *VIDEO, *ABLE)),
    "--video": other("{room}/given.gif", given=(*LATENTS, *PROMPT, *VIDEO, *ABLE)),
    "--mask": other("{room}/mask.png", given=(*LATENTS, *PROMPT, *VIDEO, *ABLE, "--video", "{room}/given.gif")),
    "--instruction": ends("the prompt: give one", "make it red", given=(*PROMPT, *ABLE, "--video", "{room}/mask.png")),
    "--image_guidance": other("3", given=(*LATENTS, *PROMPT, *VIDEO, *ABLE, "--video", "{room}/given.gif")),
    "--total_frames": seen("calls", "25", given=(*PROMPT, *VIDEO)),
    "--story": seen("files", given=(*TWO, *VIDEO, "--total_frames", "25")),
    "--keep_first": ends("needs a model with edit conditioning", given=(*PROMPT, *VIDEO, "--total_frames", "25")),
    "--negative_prompt": other("blue"),
    "--guidance": other("5"),
    "--guidances": other("2", "5"),
    "--guidance_convention": other("nemo", given=(*LATENTS, *PROMPT, "--guidance", "2")),
    "--guidance_interval": other("0.1", "5"),
    "--guidance_rescale": other("0.7"),
    "--low_guidance": ends("is for checkpoints of a high-noise and a low-noise", "3"),
    "--autoguidance": other("{bundle}"),
    "--second_prompt": other("green", given=(*LATENTS, *PROMPT, "--second_prompt", "blue", "--second_guidance", "3")),
    "--second_guidance": other("9", given=(*LATENTS, *PROMPT, "--second_prompt", "blue", "--second_guidance", "3")),
    "--sampler": other("heun"),
    "--num_steps": other("3"),
    "--schedule": other("log_linear", given=(*LATENTS, *PROMPT, "--num_steps", "3")),
    "--sigmas": other("9", "3", "1"),
    "--sigma_min": other("0.5"),
    "--sigma_max": other("9"),
    "--rho": other("3", given=(*LATENTS, *PROMPT, "--num_steps", "3")),
    "--shift": other("2"),
    "--noise_scale": other("0.5"),
    "--churn": other("1", given=(*LATENTS, *PROMPT, "--sampler", "heun")),
    "--churn_interval": other("0", "1", given=(*LATENTS, *PROMPT, "--sampler", "heun", "--churn", "1")),
    "--eta": other("0.5"),
    "--cache_budget": ends("was not calibrated", "0.1"),
    "--cache_measure": seen("loaded", "lpips"),
    "--lpips_weights": ends("is for `megadit calibrate-cache`", "."),
    "--video_save_path": seen("files", "elsewhere"),
    "--format": seen("files", "jpg"),
    "--contact_sheet": seen("files", "sheet.png"),
    "--batch_size": seen("said", "1", given=TWO),
    "--device": ends("'abacus' cannot be used", "abacus"),
    "--dtype": other("bf16"),
    "--runtime": ends("has no onnx/", "onnx"),
    "--sequential_guidance": seen("calls"),
    "--offload_text_encoder": seen("loaded"),
    "--compile": seen("loaded"),
    "--cuda_graphs": seen("loaded"),
    "--resident_blocks": seen("loaded", "1"),
    "--dry_run": seen("calls"),
    "--dry-run": seen("calls"),
    "--device_memory": seen("printed", "0.01", given=(*PROMPT, "--dry_run")),
    "--even_if_too_large": seen("error", given=(*PROMPT, "--device_memory", "0.0001")),
    "--overlap_decoding": seen("loaded"),
    "--tokenizer_model": ends("nowhere/config.json", "nowhere"),
    "--tokenizer_cache_dir": ends("", "{bundle}", given=(*PROMPT, "--tokenizer_model", "tokenizer")),
    "--t5_cache_dir": ends("nowhere/config.json", "nowhere"),
    "--num_devices": ends("but 1 were started", "2"),
    "--tp_size": ends("tp_size=2", "2"),
    "--cp_size": ends("cp_size=2", "2"),
    "--cfg_parallel": ends("cfg_parallel"),
    "--guardrail_dir": ends("there is no guardrail.py", "."),
}


SECOND_NAMES = {f"--{second}": f"--{name}" for second, name in other_names(SERVED).items()}
EFFECTS = {second: BY_OWN_NAMES[name] for second, name in SECOND_NAMES.items()} | BY_OWN_NAMES


def test_every_option_has_an_entry():
    parts = GenerateOptions, RuntimeOptions, PartialSettings
    known = [option for part in parts for option in settings_of(part).values()]
    assert EFFECTS.keys() == {name for option in known for name in option.names or (f"--{option.name}",)}


class NotLoadedError(Exception):
    """Loading was asked for, and noted."""


@contextmanager
def watched(notes, *, loads):
    """Notes what is asked of the pipeline (and loads none unless told to) and how often the network is called."""
    load, forward = generate.TextToVideo.from_pretrained, DiT.forward

    def note_load(bundle, **settings):
        notes["loaded"] = {name: value for name, value in settings.items() if isinstance(value, str | int | None)}
        if not loads:
            raise NotLoadedError
        return load(bundle, **settings)

    def note_call(network, *arguments, **settings):
        notes["calls"] += 1
        return forward(network, *arguments, **settings)

    with (
        mock.patch.object(generate.TextToVideo, "from_pretrained", note_load),
        mock.patch.object(DiT, "forward", note_call),
    ):
        yield


@pytest.fixture(scope="module")
def room(bundle_dir, able_dir, tmp_path_factory):
    """A folder with all that options name."""
    folder = tmp_path_factory.mktemp("room")
    (folder / "prompts.txt").write_text("a green three\n")
    make_adapter(folder / "adapter", bundle_dir, 1)
    shades = np.arange(9, dtype=np.uint8)[:, None, None, None]
    write_video(folder / "given.gif", shades * np.full((16, 24, 3), 20, np.uint8), 8)
    write_video(
        folder / "mask.png",
        np.repeat([0, 255], 12).astype(np.uint8)[None, None, :, None] * np.ones((1, 16, 1, 3), np.uint8),
    )
    (folder / "able").symlink_to(able_dir)
    made = [*filled((*BASE, *PROMPT), bundle_dir, folder), "--seed", "9", "--video_save_path"]
    assert generate.main([*made, str(folder / "made.safetensors")]) == 0
    return folder


def filled(words, bundle, room):
    return [word.replace("{bundle}", str(bundle)).replace("{room}", str(room)) for word in words]


@pytest.fixture(scope="module")
def known():
    """What was seen of commands that several options are compared with."""
    return {}


@pytest.fixture
def observe(bundle_dir, room, known, tmp_path_factory, monkeypatch, capsys):
    """observe(words): what is seen of one command, in a folder of its own."""

    def observe(words, *, loads=True):
        folder, notes = tmp_path_factory.mktemp("made"), {"loaded": None, "calls": 0}
        monkeypatch.chdir(folder)
        with watched(notes, loads=loads):
            try:
                code = generate.main(filled(words, bundle_dir, room))
            except NotLoadedError:
                code = 0
        told = capsys.readouterr()
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        made = [load_file(path)["latents_CTHW"].numpy() for path in files if path.suffix == ".safetensors"]
        return notes | {
            "error": told.err if code else None,
            "printed": told.out if "--dry_run" in words else "",
            "said": told.err.partition("  ")[0],  # times follow
            "files": [str(path.relative_to(folder)) for path in files],
            "latents": [(latents.shape, latents.tobytes()) for latents in made],
        }

    def once(words, **how):
        key = (words, *how.values())
        if key not in known:
            known[key] = observe(words, **how)
        return known[key]

    observe.once = once
    return observe


@pytest.mark.parametrize("flag", EFFECTS)
def test_an_option_changes_what_is_made(observe, flag):
    effect = EFFECTS[flag]
    plain = (*BASE, *effect.given)
    loads = effect.sees != "loaded"
    first, second = observe.once(plain, loads=loads), observe((*plain, flag, *effect.words), loads=loads)
    assert first[effect.sees] != second[effect.sees]
    if effect.sees == "error":
        assert effect.says in (second["error"] or "")
    else:
        assert (first["error"], second["error"]) == (None, None)


def test_compiling_is_said_before_it_begins(observe):
    words = "the network is compiled at its first call"
    plain = (*BASE, *PROMPT)
    assert words in observe((*plain, "--compile"), loads=False)["said"]
    assert words not in observe(plain, loads=False)["said"]


def test_nothing_differs_without_a_change(observe):
    """The control: were it otherwise, the test above would see effects of nothing."""
    words = (*BASE, *LATENTS, *PROMPT)
    first = observe(words)
    assert first == observe(words) and first["latents"] and first["files"] and first["calls"]


# ------------------------------------------------------------------------------ calibrate-cache, check-cache


MANY = ("--checkpoint_path", "{bundle}", "--device", "cpu", "--cache_budget", "0.1", "--prompt", *"abcdefghijklmnop")
NEEDS = {
    "--subject_name": SUBJECT,
    "--guidance_convention": ("--guidance", "2"),
    "--second_prompt": ("--second_prompt", "blue", "--second_guidance", "3"),
    "--second_guidance": ("--second_prompt", "blue", "--second_guidance", "3"),
    "--churn": ("--sampler", "heun"),
    "--churn_interval": ("--sampler", "heun", "--churn", "1"),
    "--cache_measure": ("--cache_measure", "lpips", "--lpips_weights", "here"),
    "--lpips_weights": ("--cache_measure", "lpips", "--lpips_weights", "here"),
    "--strength": ("--input_video", "{room}/given.gif"),
    "--lead_to_video": VIDEO,
    "--keep_frames": (*VIDEO, "--continue_video", "{room}/given.gif"),
    **dict.fromkeys(("--last_image", "--last_frame", "--keyframe", "--video"), (*VIDEO, *ABLE)),
    "--mask": (*VIDEO, *ABLE, "--video", "{room}/given.gif"),
}
CALIBRATED = {
    **{"--batch_size": ("3",), "--device": ("auto",), "--compile": (), "--lpips_weights": ("there",)},
    **{"--cache_budget": ("0.2",), "--cache_measure": ("latents",), "--guidances": ("5",)},
    **{"--num_video_frames": ("9",), "--num_frames": ("9",), "--num_steps": ("4",)},
}
"""Given to options that show elsewhere there, or end that command."""
OF_OUTPUT = ("--video_save_path", "--format", "--contact_sheet")
"""Options that calibration takes, so that the same command can be given to both, and has no use for."""
REFUSED = (
    *(
        "--checkpoint_path",
        "--repeat",
        "--recorded_files",
        "--runtime",
        "--instruction",
        "--total_frames",
        "--story",
        "--keep_first",
    ),
    *("--sequential_guidance", "--offload_text_encoder", "--cuda_graphs", "--overlap_decoding", "--tokenizer_model"),
    *("--tokenizer_cache_dir", "--t5_cache_dir", "--num_devices", "--tp_size", "--cp_size", "--cfg_parallel"),
    *("--guardrail_dir", "--cache_measure", "--adapter", "--adapter_interval", "--resident_blocks"),
    *("--dry_run", "--dry-run", "--device_memory", "--even_if_too_large"),
)


@pytest.fixture
def calibrated(bundle_dir, room, monkeypatch, capsys):
    """calibrated(command, words): what a calibration, or its check, would sample and how; or its error."""
    notes = []

    class Pipeline:
        def num_denoiser_calls(self, *_, conditioning):
            return 2

        def stream(self, prompts, settings, **more):
            notes.append((prompts, settings, more))
            raise NotLoadedError

    def calibrate(trial, bar):
        notes.append(
            (trial.num_videos, trial.settings.cache_budget, trial.settings, trial.options.running.cache_measure)
        )
        trial.sample(trial.num_videos, ())

    monkeypatch.setattr(
        calibrate_cache.TextToVideo, "from_pretrained", lambda bundle, **how: notes.append(how) or Pipeline()
    )
    monkeypatch.setattr(calibrate_cache, "use_device", lambda name: torch.device("cpu:0" if name == "auto" else name))
    monkeypatch.setattr(calibrate_cache.LPIPS, "load", notes.append)
    monkeypatch.setattr(calibrate_cache, "calibrate", calibrate)
    monkeypatch.setattr(calibrate_cache, "bundle_plans", lambda bundle, measure: notes.append(measure))
    monkeypatch.setattr(calibrate_cache, "find_plan", lambda *_: SimpleNamespace(skipped=()))

    def calibrated(command, words):
        notes.clear()
        capsys.readouterr()
        try:
            assert command(filled(words, bundle_dir, room)) == 2
        except NotLoadedError:
            return list(notes)
        return capsys.readouterr().err

    return calibrated


@pytest.mark.parametrize("command", [calibrate_cache.main, calibrate_cache.check])
@pytest.mark.parametrize("flag", EFFECTS)
def test_an_option_changes_what_is_calibrated(calibrated, flag, command):
    plain = (*MANY, *NEEDS.get(flag, ()))
    words = (*plain, flag, *CALIBRATED.get(SECOND_NAMES.get(flag, flag), EFFECTS[flag].words))
    first, second = calibrated(command, plain), calibrated(command, words)
    assert isinstance(first, list) and len(first) >= 3
    assert isinstance(second, str) == (flag in REFUSED)
    assert (first == second) == (flag in OF_OUTPUT)
