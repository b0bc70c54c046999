"""The content filter is a hook: off by default, asked about every prompt and video where it is on."""

import shutil

import numpy as np
import pytest

from megadit.infer.hooks.guardrail import Guardrail
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json, write_json

PROGRAM = """
import numpy
def check_prompt(prompt):
    return "it is about sevens" if "seven" in prompt else None
def check_video(video):
    return "too bright" if {hold} else numpy.zeros_like(video)
"""


def write(directory, text):
    directory.mkdir(exist_ok=True)
    (directory / "guardrail.py").write_text(text)
    return directory


def test_prompts_are_refused_and_videos_changed_or_held_back(bundle_dir, tmp_path):
    filtered = TextToVideo.from_pretrained(
        bundle_dir, device="cpu", guardrail_dir=write(tmp_path / "guard", PROGRAM.format(hold=False))
    )
    (video,) = filtered(["a red three"], seeds=1)
    assert not video.video.any(), "what check_video gives is given out"
    with pytest.raises(UserError, match="the guardrail refuses the prompt 'a red seven': it is about sevens"):
        filtered(["a red three", "a red seven"])
    holding = Guardrail.load(write(tmp_path / "guard", PROGRAM.format(hold=True)))
    with pytest.raises(UserError, match="holds a video back: too bright"):
        holding.screen(video.video)
    assert TextToVideo.from_pretrained(bundle_dir, device="cpu")(["a red seven"], seeds=1)[0].video.any(), "off"


def test_a_licence_that_asks_for_a_filter_is_told(bundle_dir, tmp_path, capsys):
    TextToVideo.from_pretrained(bundle_dir, device="cpu")
    assert "WARNING" not in capsys.readouterr().err
    bundle = shutil.copytree(bundle_dir, tmp_path / "bundle")
    manifest = read_json(bundle / "megadit.json")
    write_json(bundle / "megadit.json", {**manifest, "license": {"name": "open", "asks_for_guardrail": True}})
    TextToVideo.from_pretrained(bundle, device="cpu")
    assert "WARNING: the license of these weights (open) asks for a content filter" in capsys.readouterr().err
    TextToVideo.from_pretrained(
        bundle, device="cpu", guardrail_dir=write(tmp_path / "guard", PROGRAM.format(hold=False))
    )
    assert "WARNING" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import nothing_of_the_kind", "fails: ModuleNotFoundError"),
        ("x = 1", "defines neither check_prompt nor check_video"),
        ("def check_video(video): return video[:1]", "must give a uint8 video of the same shape"),
    ],
)
def test_programs_that_cannot_filter_are_told(tmp_path, program, message):
    with pytest.raises(UserError, match=message):
        Guardrail.load(write(tmp_path / "guard", program)).screen(np.ones((2, 4, 4, 3), np.uint8))
