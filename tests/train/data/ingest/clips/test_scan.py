"""Cutting, buckets, filters and frames of single videos."""

from fractions import Fraction

import numpy as np
import pytest

from megadit.train.data.ingest.clips.decode import THUMBNAIL, read_frames, read_timeline
from megadit.train.data.ingest.clips.scan import bucket, find_scenes, fingerprint, scan, windows
from megadit.train.data.ingest.clips.select import Fingerprints
from megadit.train.data.ingest.plan import Settings, Source

SETTINGS = Settings(sizes=((64, 64),), num_frames=(9,))


def duplicates(clips, max_bits: int = 7) -> list[int | None]:
    return list(Fingerprints(clips, max_bits).duplicates())


def luma(*means: float) -> np.ndarray:
    texture = np.random.default_rng(0).uniform(-5, 5, (THUMBNAIL, THUMBNAIL))
    return np.stack([np.clip(mean + texture, 0, 255) for mean in means]).astype(np.uint8)


def video(path, **fields) -> Source:
    return Source(name=path.name, kind="video", path=str(path), **fields)


def test_a_change_of_scene_stands_out_and_a_fast_pan_does_not():
    assert find_scenes(luma(20, 21, 22, 90, 91, 92), 20.0) == [(0, 3), (3, 6)]
    assert find_scenes(luma(20, 50, 80, 110, 140, 170), 20.0) == [(0, 6)]
    assert find_scenes(luma(20), 20.0) == [(0, 1)]


def test_windows_take_the_longest_that_fits():
    assert windows(3, 50, (9, 33)) == [(3, 36), (36, 45)]
    assert windows(0, 8, (9,)) == [] == windows(0, 8, (9,), overlap=True)
    assert windows(0, 24, (17,), overlap=True) == [(0, 17), (7, 24)] and len(windows(0, 34, (17,), overlap=True)) == 2


def test_buckets_follow_shape_then_size_and_never_enlarge():
    settings = Settings(sizes=((64, 64), (128, 128), (48, 96), (96, 48)))
    assert bucket(200, 210, settings) == (128, 128)
    assert bucket(100, 100, settings) == (64, 64)
    assert bucket(60, 200, settings) == (48, 96)
    assert bucket(1000, 400, settings) == (96, 48)


def test_a_variable_rate_is_sampled_evenly(tmp_path, make_clip, make_pan):
    times = [0, 10, 20, 500, 520, 540, 1000, 1040, 1080]  # milliseconds
    path = make_clip(tmp_path / "uneven.webm", make_pan("china.jpg", 9, 96, 96), codec="libvpx-vp9", times=times)
    timeline = read_timeline(video(path), Settings(sizes=((64, 64),), fps=5.0))
    assert timeline.fps == pytest.approx(5, abs=1e-6)
    # at 0, 200, 400, 600, 800, 1000 ms the frames of 0, 20, 20, 540, 540, 1000 ms are on screen
    assert timeline.pts == [0, 20, 20, 540, 540, 1000]


def test_a_higher_rate_is_thinned_and_a_lower_one_kept(tmp_path, make_clip, make_pan):
    fast = make_clip(tmp_path / "fast.mp4", make_pan("china.jpg", 31, 96, 96), fps=60)
    slow = make_clip(tmp_path / "slow.mp4", make_pan("china.jpg", 9, 96, 96), fps=8)
    assert len(read_timeline(video(fast), Settings(sizes=((64, 64),), fps=20.0)).pts) == 11
    assert read_timeline(video(slow), SETTINGS).fps == 8


@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_rotated_videos_stand_upright(tmp_path, make_clip, rotation):
    frames = np.full((9, 96, 128, 3), 30, np.uint8)
    frames[:, :48, :64] = 220  # light in the upper left
    path = make_clip(tmp_path / "turned.mp4", frames, rotation=rotation)
    timeline = read_timeline(video(path), SETTINGS)
    assert (timeline.height, timeline.width) == ((128, 96) if rotation % 180 else (96, 128))
    picture = read_frames(video(path), SETTINGS, tuple(timeline.pts[:1]), 64, 64)[0].mean(axis=2)
    expected = np.rot90(frames[0], rotation // 90)[::32, ::32].mean(axis=2)
    corners = picture[[8, 8, 56, 56], [8, 56, 8, 56]] > 128
    assert corners.tolist() == (expected[[0, 0, -1, -1], [0, -1, 0, -1]] > 128).tolist()


@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_transparent_videos_stand_upright_with_square_pixels(tmp_path, make_clip, rotation):
    frames = np.full((9, 96, 64, 4), (30, 30, 30, 255), np.uint8)
    frames[:, :48, :32, :3] = 220  # light in the upper left
    frames[:, :, -8:, 3] = 0
    shown = {"codec": "qtrle", "rotation": rotation, "aspect": Fraction(2)}
    sizes, corners = [], []
    for pix_fmt, channels in (("argb", 4), ("rgb24", 3)):
        path = make_clip(tmp_path / f"{pix_fmt}.mov", frames[..., :channels], pix_fmt=pix_fmt, **shown)
        timeline = read_timeline(video(path), SETTINGS)
        assert timeline.is_transparent == (pix_fmt == "argb")
        sizes.append((timeline.height, timeline.width))
        picture = read_frames(video(path), SETTINGS, tuple(timeline.pts[:1]), 64, 64)[0].mean(axis=2)
        corners.append((picture[[16, 16, 48, 48], [16, 48, 16, 48]] > 128).tolist())
    assert sizes == [(128, 96) if rotation % 180 else (96, 128)] * 2
    assert corners[0] == corners[1] and sum(corners[0]) == 1


def test_what_is_as_bright_as_its_ground_moves_too(tmp_path, make_clip):
    """Red over a green of the same brightness; noise that compression leaves is still."""
    frames = np.full((17, 96, 96, 3), (60, 130, 60), np.uint8)
    for number, frame in enumerate(frames):
        frame[30:60, 4 * number : 4 * number + 30] = (230, 45, 60)
    grey = frames @ np.array([0.299, 0.587, 0.114])
    assert grey.std() < 1
    (finding,) = scan(video(make_clip(tmp_path / "moves.mp4", frames)), SETTINGS).clips
    assert finding.num_frames == 9
    still = scan(video(make_clip(tmp_path / "still.mp4", frames[:1].repeat(17, 0))), SETTINGS)
    assert not still.clips and {skip.reason for skip in still.skips} == {"static", "rest of a scene"}


def dot(size: int, speed: float) -> np.ndarray:
    """A square that moves over a plain ground."""
    frames = np.full((9, 256, 256, 3), 250, np.uint8)
    for number, frame in enumerate(frames):
        x = 20 + round(number * speed)
        frame[120 : 120 + size, x : x + size] = 60
    return frames


def needle() -> np.ndarray:
    """A line that turns by two degrees a frame."""
    y, x = np.mgrid[-64:64, -64:64]
    angles = np.deg2rad(2) * np.arange(9)[:, None, None]
    is_drawn = (abs(y * np.cos(angles) - x * np.sin(angles)) < 1) & (np.hypot(x, y) < 30)
    return np.where(is_drawn[..., None], (200, 30, 30), 240).astype(np.uint8)


def grain(strength: float) -> np.ndarray:
    noise = np.random.default_rng(0).normal(0, strength, (9, 128, 128, 3))
    return np.clip(np.linspace(20, 230, 128)[:, None] + noise, 0, 255).astype(np.uint8)


@pytest.mark.parametrize(
    "frames", [dot(8, 1), dot(4, 4), dot(24, 0.5), needle()], ids=["slow", "tiny", "large", "line"]
)
def test_small_things_move_before_plain_grounds(tmp_path, make_clip, frames):
    assert scan(video(make_clip(tmp_path / "a.mp4", frames)), SETTINGS).clips


@pytest.mark.parametrize(("brightness", "is_read"), [(200, True), (60, True), (5, False)])
def test_a_figure_on_black_is_kept_and_black_is_not(tmp_path, make_clip, brightness, is_read):
    frames = np.zeros((9, 128, 128, 3), np.uint8)
    for number, frame in enumerate(frames):
        frame[50:80, 20 + 4 * number : 55 + 4 * number] = brightness
    assert frames.mean() < Settings().min_brightness * (brightness / 140 + 1)
    finding = scan(video(make_clip(tmp_path / "a.mp4", frames)), SETTINGS)
    assert bool(finding.clips) == is_read and [skip.reason for skip in finding.skips] == ["black"] * (not is_read)


@pytest.mark.parametrize("strength", [0, 3, 6])
def test_grain_is_no_motion(tmp_path, make_clip, strength):
    finding = scan(video(make_clip(tmp_path / "a.mp4", grain(strength))), SETTINGS)
    assert [skip.reason for skip in finding.skips] == ["static"]


def test_frames_of_the_middle_are_those_that_the_scan_saw(tmp_path, make_clip, make_pan):
    path = make_clip(tmp_path / "long.mp4", make_pan("flower.jpg", 60, 96, 96))
    finding = scan(video(path), SETTINGS)
    everything = read_frames(video(path), SETTINGS, tuple(read_timeline(video(path), SETTINGS).pts), 64, 64)
    assert len(finding.clips) == 6
    for number, clip in enumerate(finding.clips):
        frames = read_frames(clip.source, SETTINGS, clip.pts, 64, 64)
        np.testing.assert_array_equal(frames, everything[9 * number : 9 * number + 9])


def test_a_stretch_of_a_file_is_read_like_a_file(tmp_path, make_clip, make_pan):
    path = make_clip(tmp_path / "clip.mp4", make_pan("flower.jpg", 9, 96, 96))
    content = path.read_bytes()
    archive = tmp_path / "archive"
    archive.write_bytes(b"x" * 777 + content + b"y" * 999)
    inside = Source(name="inside", kind="video", path=str(archive), offset=777, size=len(content))
    found, alone = scan(inside, SETTINGS), scan(video(path), SETTINGS)
    assert [clip.fingerprint for clip in found.clips] == [clip.fingerprint for clip in alone.clips] != []


def test_what_follows_a_damaged_stretch_is_used(tmp_path, make_clip, make_pan):
    path = make_clip(tmp_path / "hurt.webm", make_pan("flower.jpg", 60, 96, 96), codec="libvpx-vp9")
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 300] = bytes(300)
    path.write_bytes(content)
    assert 40 <= len(read_timeline(video(path), SETTINGS).pts) <= 60
    path.write_bytes(content[:middle])  # cut short: the container tells no length
    assert 10 <= len(read_timeline(video(path), SETTINGS).pts) < 50


def test_fingerprints_survive_compression_and_tell_clips_apart(tmp_path, make_clip, make_pan):
    frames = make_pan("flower.jpg", 9, 96, 96)
    darker = (frames * 0.9).astype(np.uint8)
    prints = [
        scan(video(make_clip(tmp_path / name, pixels, codec=codec)), SETTINGS).clips[0].fingerprint
        for name, pixels, codec in (
            ("a.mp4", frames, "libx264"),
            ("b.avi", darker, "mpeg4"),
            ("c.mp4", make_pan("flower.jpg", 9, 96, 96, flip=1), "libx264"),
        )
    ]
    assert duplicates((each, "") for each in prints) == [None, 0, None]


def test_pictures_that_look_alike_but_are_told_apart_stay():
    number = int.from_bytes(np.random.default_rng(0).bytes(24))
    captions = ("a red ball", "a ball on the left", "a red ball", "")
    alike = [(f"{number ^ 1 << bit:048x}", caption) for bit, caption in enumerate(captions)]
    assert duplicates(alike) == [None, None, 0, 0], "no words differ from none"


def first_like(kept, number, caption, *, max_bits):
    """By looking at all: the first that agrees in the first band in which one does."""

    def is_alike(other, other_caption):
        is_same = not caption or not other_caption or caption == other_caption
        return is_same and (number ^ other).bit_count() <= max_bits

    width = min(24, 192 // (max_bits + 1))
    masks = [((1 << width) - 1) << place for place in range(0, 192 - width + 1, width)]
    told = [mask for mask in masks if number & mask] or [(1 << 192) - 1]  # flat ones are compared as a whole
    for mask in told:
        for other, name, other_caption in kept:
            if number & mask == other & mask and is_alike(other, other_caption):
                return name
    return None


@pytest.mark.parametrize("max_bits", [0, 7, 9, 40])
def test_duplicates_are_those_that_looking_at_all_finds(max_bits):
    generator = np.random.default_rng(max_bits)
    source_media = [generator.integers(0, 2, 192) for _ in range(6)]
    for bits in source_media[:3]:
        bits[24:48] = source_media[3][24:48]  # a band that several share
    source_media[4][:] = 0
    source_media[5][:100] = 0
    clips, kept, expected = [], [], []
    for count in range(600):
        bits = source_media[generator.integers(6)].copy()
        bits[generator.choice(192, generator.integers(0, max_bits + 2), replace=False)] ^= 1
        number, caption = int(np.packbits(bits).tobytes().hex(), 16), generator.choice(["", "a cat", "a dog", "a fox"])
        clips.append((f"{number:048x}", str(caption)))
        expected.append(first_like(kept, number, caption, max_bits=max_bits))
        if expected[-1] is None:
            kept.append((number, count, caption))
    assert duplicates(clips, max_bits) == expected and 6 < len(kept) < 500


def test_fingerprints_within_the_limit_are_always_found():
    generator = np.random.default_rng(1)
    for _ in range(200):
        bits = generator.integers(0, 2, 192)
        near, far = bits.copy(), bits.copy()
        near[generator.choice(192, 7, replace=False)] ^= 1
        far[generator.choice(192, 8, replace=False)] ^= 1
        assert duplicates((np.packbits(each).tobytes().hex(), "") for each in (bits, near, far))[:2] == [None, 0]
        assert duplicates((np.packbits(each).tobytes().hex(), "") for each in (bits, far)) == [None, None]


def test_a_fingerprint_of_equal_fields_is_flat():
    assert int(fingerprint(np.full((3, THUMBNAIL, THUMBNAIL), 100, np.uint8)), 16) == 0
