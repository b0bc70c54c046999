"""Videos of any length, in windows."""

import ctypes
import gc
from dataclasses import replace

import numpy as np
import pytest

from megadit.infer.conditioning.items import ConditioningItem
from megadit.infer.generate.command import main
from megadit.infer.media.video_io import encode_mp4, read_video, stream_mp4
from megadit.infer.pipeline.windows import num_windows, stream_windows
from megadit.models.shared.errors import UserError


@pytest.mark.parametrize(
    ("total", "window", "keep", "expected"), [(65, 9, 1, 8), (9, 9, 1, 1), (5, 9, 1, 1), (10, 9, 1, 2), (21, 9, 5, 4)]
)
def test_windows_are_counted(total, window, keep, expected):
    assert num_windows(total, window, keep) == expected


@pytest.mark.parametrize("keep", [0, 9, 10])
def test_a_window_makes_something_new(keep):
    with pytest.raises(UserError, match="must be at least 1 and leave some of the 9"):
        num_windows(20, 9, keep)


def test_each_window_goes_on_from_the_last(able):
    parts = list(stream_windows(able, [["a", "b"], ["c"]], total_frames=15, keep_frames=1, seeds=[0, 50]))
    first, second = (np.concatenate(frames) for frames in zip(*parts, strict=True))
    assert first.shape == second.shape == (15, 16, 24, 3)
    assert [len(frames) for frames, _ in parts] == [5, 4, 4, 2]
    # the same by hand: the second window from the first one's last frame, with the second prompt
    given = ConditioningItem(frames=first[4:5], kind="prefix", keep_frames=1)
    (again,) = able(["b"], seeds=1, conditioning=given)
    assert np.abs(again.video[1:].astype(int) - first[5:9]).max() <= 1
    (alone,) = zip(*stream_windows(able, [["c"]], total_frames=15, seeds=[50]), strict=True)
    assert np.abs(np.concatenate(alone).astype(int) - second).max() <= 1, "its company changes nothing"


def test_a_window_leaves_out_only_what_it_repeats(able):
    """Of six frames the tokenizer encodes five, from which the next window goes on."""
    settings = replace(able.defaults, num_frames=13)
    parts = [frames for (frames,) in stream_windows(able, [["a"]], settings, total_frames=22, keep_frames=6, seeds=[0])]
    assert [len(frames) for frames in parts] == [13, 8, 1]
    given = ConditioningItem(frames=parts[0][-5:], kind="prefix", keep_frames=5)
    (again,) = able(["a"], seeds=1, conditioning=given, num_frames=13)
    assert np.abs(again.video[5:].astype(int) - parts[1]).max() <= 1


def test_a_network_of_first_frames_sees_those_of_later_windows(able, monkeypatch):
    """As Wan's of images, which take no longer beginnings."""
    monkeypatch.setattr(able, "conditionings", ("first_frame",))
    (first,), (second,) = stream_windows(able, [["a"]], total_frames=9, seeds=[0])
    for kind, is_seen in (("first_frame", True), ("prefix", False)):
        (again,) = able(["a"], seeds=1, conditioning=ConditioningItem(frames=first[4:], kind=kind))
        assert (np.abs(again.video[1:].astype(int) - second).max() <= 1) == is_seen, kind


def test_the_first_window_can_stay_beside_all(able):
    """As a clip to edit, of which the first window itself knows nothing."""
    parts, alone = (
        [frames for (frames,) in stream_windows(able, [["a"]], total_frames=13, keep_first=keep_first, seeds=[3])]
        for keep_first in (True, False)
    )
    assert np.array_equal(parts[0], alone[0]) and not np.array_equal(parts[1], alone[1])
    long = np.concatenate(parts)
    for window in (1, 2):
        last = ConditioningItem(frames=long[4 * window : 4 * window + 1], kind="prefix", keep_frames=1)
        given = (last, ConditioningItem(frames=long[:5], kind="edit"))
        (again,) = able(["a"], seeds=3 + window, conditioning=given)
        assert np.abs(again.video[1:].astype(int) - long[4 * window + 1 : 4 * window + 5]).max() <= 1


def test_an_mp4_that_comes_in_parts_is_the_same_file(tmp_path):
    frames = np.random.default_rng(0).integers(0, 255, (11, 16, 24, 3), dtype=np.uint8)
    stream_mp4(tmp_path / "parts.mp4", (frames[first : first + 4] for first in range(0, 11, 4)), 8)
    assert (tmp_path / "parts.mp4").read_bytes() == encode_mp4(frames, 8)

    def breaks():
        yield frames
        raise RuntimeError

    with pytest.raises(RuntimeError):
        stream_mp4(tmp_path / "broken.mp4", breaks(), 8)
    assert [path.name for path in tmp_path.iterdir()] == ["parts.mp4"], "nothing is left of one that broke off"


def test_a_long_video_is_one_file_that_can_be_repeated(able_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--checkpoint_path", str(able_dir), "--device", "cpu", "--num_steps", "2"]
    prompts = ["--prompt", "a red seven", "a blue two", "--total_frames", "14", "--story", "--keep_first"]
    assert main([*options, *prompts, "--video_save_path", "long.mp4"]) == 0
    frames, fps = read_video("long.mp4")
    assert (len(frames), fps) == (14, 8)
    assert main(["--repeat", "long.mp4", "--device", "cpu", "--video_save_path", "again.mp4", "--recorded_files"]) == 0
    assert np.array_equal(read_video("again.mp4")[0], frames)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--format", "gif"], "makes an mp4"),
        (["--contact_sheet", "a.png"], "makes no contact sheet"),
        (["--video_save_path", "a.gif"], "makes an mp4"),
        (["--keep_frames", "5"], "leave some of the 5 of a window"),
        (["--story", "--seeds", "1", "2"], "makes one video"),
        (["--keep_first", "--checkpoint_path", "{plain}"], "--keep_first needs a model with edit conditioning"),
    ],
)
def test_mistakes(able_dir, bundle_dir, tmp_path, monkeypatch, capsys, more, message):
    monkeypatch.chdir(tmp_path)
    more = [option.format(plain=bundle_dir) for option in more]
    options = ["--checkpoint_path", str(able_dir), "--device", "cpu", "--prompt", "a", "--total_frames", "9", *more]
    assert main(options) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1


@pytest.mark.slow
def test_three_minutes_take_no_more_memory_than_one(able, tmp_path):
    """1,440 frames at 8 a second into an mp4; of those after the first minute, 9 MB, nothing is held."""
    import av
    import psutil

    process, held, path = psutil.Process(), [], tmp_path / "long.mp4"
    settings = replace(able.defaults, num_frames=41, num_steps=1, guidance=1.0, height=48, width=64)

    def watched():
        windows = stream_windows(able, [["a red seven"]], settings, total_frames=1440, seeds=[0])
        for number, (frames,) in enumerate(windows):
            yield frames
            if number % 3 == 2:
                gc.collect()
                ctypes.CDLL(None).malloc_trim(0)  # what is free is held no longer
                held.append(process.memory_info().rss)

    stream_mp4(path, watched(), settings.fps)
    with av.open(str(path)) as container:
        assert container.streams.video[0].frames == 1440
    assert len(held) == 12 and max(held[4:]) - held[3] < 2**22, held
