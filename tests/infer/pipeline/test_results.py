"""What Python users hold: pipelines and videos that say what they are, are saved, and are shown in notebooks."""

import base64
import io
import json
import pickle
import re

import av
import numpy as np
import pytest
from PIL import Image

from megadit.infer.conditioning.items import ConditioningItem
from megadit.infer.generate.command import main
from megadit.infer.generate.outputs import read_record
from megadit.infer.media.video_io import read_comment, read_video, write_video
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.models.shared.errors import UserError


@pytest.fixture(scope="module")
def videos(pipeline):
    return pipeline(["a <red> seven", "a two"], seeds=[1, 2])


def test_a_video_is_saved_with_all_that_made_it(videos, tmp_path):
    path = videos[0].save(tmp_path / "seven.mp4")
    frames, fps = read_video(path)
    assert frames.shape == videos[0].video.shape and fps == 8
    record = json.loads(read_comment(path))
    assert record["prompt"] == "a <red> seven" and record["seed"] == 1 and record["num_steps"] == 3
    videos[0].save(tmp_path / "seven.webp")
    assert (read_video(tmp_path / "seven.webp")[0].shape) == videos[0].video.shape
    with pytest.raises(UserError, match=r"cannot write .*seven\.doc"):
        videos[0].save(tmp_path / "seven.doc")


@pytest.mark.parametrize(
    "words",
    [
        "[" * 50_000,
        '{"megadit_record": ' + "1" * 5000 + "}",
        "null",
        "a comment",
        '{"megadit_record": "' + "a" * (1 << 18) + '"}',
    ],
)
def test_words_of_others_in_a_file_are_no_record(tmp_path, words):
    write_video(tmp_path / "a.png", np.zeros((1, 8, 8, 3), np.uint8), metadata={"comment": words})
    with pytest.raises(UserError, match="has no record of its settings"):
        read_record(str(tmp_path / "a.png"))


STRANGE = {
    "checkpoint_path": ("/etc/hostname", "--checkpoint_path '/etc/hostname'"),
    "autoguidance": ("/etc/passwd", "--autoguidance '/etc/passwd'"),
    "adapters": ([{"path": "high=/etc/shadow", "scale": 1.0, "sha256": ""}], "--adapter 'high=/etc/shadow:1.0'"),
    "conditioning": (
        [
            {"path": "/proc/self/environ\x1b[2J", "kind": "keyframe", "frame": 2},
            {"path": "/dev/zero", "mask": "/dev/tty"},
        ],
        "--keyframe '2:/proc/self/environ\\x1b[2J' --continue_video '/dev/zero' --mask '/dev/tty'",
    ),
}
"""Values of a stranger's record -> the options for them, as the refusal lists them."""


def test_a_stranger_s_video_opens_no_file(bundle_dir, videos, tmp_path, capsys, monkeypatch):
    """Alone, and in addition to the user's own checkpoint; types that a record of ours never has are refused too."""
    opened = []
    for module in ("outputs.adapters_of", "specs.sha256_of", "command.open_bundle"):
        monkeypatch.setattr(f"megadit.infer.generate.{module}", lambda *paths: opened.append(paths) or 1 / 0)
    ours = videos[1].record()

    def refused(*more: str, **values: object) -> str:
        write_video(tmp_path / "a.mp4", videos[1].video, 8, metadata={"comment": json.dumps(ours | values)})
        assert main(["--repeat", str(tmp_path / "a.mp4"), *more]) == 2 and not opened
        return capsys.readouterr().err

    for name, (value, options) in STRANGE.items():
        error = refused(*(["--checkpoint_path", str(bundle_dir)] if name != "checkpoint_path" else []), **{name: value})
        assert error.count("\n") == 1 and error.rstrip().endswith(
            f"add --recorded_files, else give your own: {options}"
        )
    every = refused(**{name: value for name, (value, _) in STRANGE.items()})
    assert all(options in every for _, options in STRANGE.values())
    for values in ({"checkpoint_path": 0}, {"prompt": 3}, {"seed": "x"}, {"conditioning": 3}, {"adapters": ["a"]}):
        error = refused("--recorded_files", **values)
        assert error.count("\n") == 1 and "--repeat=" in error, values


def test_what_was_saved_from_python_is_made_again(pipeline, videos, tmp_path, capsys):
    path = videos[1].save(tmp_path / "two.mp4")
    assert main(["--repeat", str(path), "--video_save_path", str(tmp_path / "again.mp4"), "--recorded_files"]) == 0
    assert np.array_equal(read_video(tmp_path / "again.mp4")[0], read_video(path)[0])
    assert read_record(str(tmp_path / "again.mp4")) == read_record(str(path))
    first = ConditioningItem(frames=videos[0].video[:1], kind="first_frame")
    (given,) = pipeline(["a two"], conditioning=first)
    repeat = ["--repeat", str(given.save(tmp_path / "given.mp4")), "--recorded_files", "--video_save_path"]
    repeat += [str(tmp_path / "more.mp4")]
    assert main(repeat) == 2
    assert "its first_frame came from Python and is in no file; pass it as an option" in capsys.readouterr().err
    write_video(tmp_path / "first.png", videos[0].video[:1])
    assert main([*repeat, "--image", str(tmp_path / "first.png")]) == 0
    assert np.array_equal(read_video(tmp_path / "more.mp4")[0], read_video(tmp_path / "given.mp4")[0])


def test_videos_go_to_other_processes(videos):
    again = pickle.loads(pickle.dumps(videos[0]))
    assert again.record() == videos[0].record() and np.array_equal(again.video, videos[0].video)


def test_notebooks_show_videos_and_their_prompts(videos):
    shown = videos._repr_html_()
    found = re.findall(r"data:video/mp4;base64,([^\"]+)", shown)
    assert len(found) == 2 and "a &lt;red&gt; seven · seed 1" in shown and "<red>" not in shown
    with av.open(io.BytesIO(base64.b64decode(found[0]))) as container:
        assert len(list(container.decode(video=0))) == len(videos[0].video)


def test_notebooks_show_one_frame_as_a_picture(pipeline):
    (image,) = pipeline(["a two"], num_frames=1)
    (data,) = re.findall(r"data:image/png;base64,([^\"]+)", image._repr_html_())
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))), image.video[0])


def test_what_they_are_is_said_in_a_line(pipeline, videos):
    assert repr(videos[1]) == "<GeneratedVideo 'a two', seed 2: 5 frames of 24x16>"
    assert repr(videos) == f"[{videos[0]!r}, {videos[1]!r}]"
    assert repr(pipeline) == "<TextToVideo megadit, 2 blocks of 32: 5 frames of 24x16>"


def test_a_bundle_is_found_by_its_name_in_the_cache_of_a_hub(bundle_dir, pipeline, tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub.constants", reason="huggingface-hub is not installed")
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--somebody--digits"
    (model / "snapshots").mkdir(parents=True)
    (model / "snapshots" / ("0" * 40)).symlink_to(bundle_dir)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0" * 40)
    found = TextToVideo.from_pretrained("somebody/digits", device="cpu")
    assert (found(["a two"])[0].video == pipeline(["a two"])[0].video).all()
    with pytest.raises(UserError, match="^somebody/letters does not exist: give a bundle"):
        TextToVideo.from_pretrained("somebody/letters")


def test_a_pipeline_of_diffusers_says_what_to_do(tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(UserError, match="run `megadit convert .* OUT`"):
        TextToVideo.from_pretrained(tmp_path)
