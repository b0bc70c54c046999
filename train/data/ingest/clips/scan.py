"""Cutting of a source into clips: by length or change of scene, assigned to a bucket, filtered.

Shapes: T/H/W frames, height, width.
"""

import math
from dataclasses import replace

import numpy as np

from megadit.infer.decoding.rules import CONVERSIONS, TRANSPARENT, UnusableSourceError
from megadit.train.data.ingest.clips.decode import THUMBNAIL, image_thumbnail, read_image, read_timeline
from megadit.train.data.ingest.plan import REST, Clip, Finding, Settings, Skip, Source, with_key

SHARE_OF_SUBJECT = 95
"""Percentile of a picture's brightness, so that a bright subject on black counts if it fills a twentieth of it."""
CLEARLY_BRIGHTER = 4.0
"""Threshold of brightness differences of fields, 0..255, above changes by compression."""


def scan(source: Source, settings: Settings) -> Finding:
    """Find the clips of a source, and reasons for what is left out; never raises for the contents of a file."""
    try:
        _check_score(source, settings)
        return _scan_image(source, settings) if source.kind == "image" else _scan_video(source, settings)
    except UnusableSourceError as error:
        return Finding(source=source.name, skips=(_skip(source, error.reason, error.detail),))


def _check_score(source: Source, settings: Settings) -> None:
    if settings.min_aesthetic_score is None:
        return
    if source.aesthetic_score is None:
        raise UnusableSourceError("no aesthetic score")
    if source.aesthetic_score < settings.min_aesthetic_score:
        raise UnusableSourceError("low aesthetic score", f"{source.aesthetic_score:g}")


def _scan_image(source: Source, settings: Settings) -> Finding:
    image = read_image(source, settings)
    height, width = bucket(image.height, image.width, settings)
    luma_THW = image_thumbnail(image)
    if luma_THW.std() < settings.min_contrast:
        raise UnusableSourceError("blank", "it shows one colour")
    clip = Clip(
        key="", source=source, height=height, width=width, fps=0.0, pts=(0,), start=0.0,
        fingerprint=fingerprint(luma_THW), is_transparent=TRANSPARENT in image.info,
        conversions=image.info.get(CONVERSIONS, ()), is_whole=True,
    )  # fmt: skip
    return Finding(source=source.name, clips=(with_key(clip, 0),))


def _scan_video(source: Source, settings: Settings) -> Finding:
    timeline = read_timeline(source, settings)
    height, width = bucket(timeline.height, timeline.width, settings)
    num_frames = len(timeline.pts)
    clips: list[Clip] = []
    skips: list[Skip] = []

    def leave_out(reason: str, start: int, stop: int, measured: str = "") -> None:
        detail = f"frames {start} to {stop}{measured and f', {measured}'}"
        skips.append(_skip(source, reason, detail, start / timeline.fps, (stop - start) / timeline.fps))

    scenes = find_scenes(timeline.luma_THW, settings.scene_threshold) if settings.cut == "scene" else [(0, num_frames)]
    for start, stop in runs(timeline.is_damaged_T):
        leave_out("damaged", start, stop)
    for scene_start, scene_stop in undamaged(scenes, timeline.is_damaged_T):
        end = scene_start
        for start, stop in windows(scene_start, scene_stop, settings.num_frames, overlap=settings.overlap):
            end = stop
            luma_THW = timeline.luma_THW[start:stop]
            if found := dull(luma_THW, timeline.motion_T[start + 1 : stop], timeline.fps, settings):
                reason, measured = found
                leave_out(reason, start, stop, measured)
                continue
            clip = Clip(
                key="",
                source=source,
                height=height,
                width=width,
                fps=timeline.fps,
                pts=tuple(timeline.pts[start:stop]),
                start=start / timeline.fps,
                fingerprint=fingerprint(luma_THW),
                is_transparent=timeline.is_transparent,
                conversions=timeline.conversions,
                is_regular=timeline.is_regular,
            )
            clips.append(with_key(clip, len(clips)))
        if end == scene_start:
            leave_out("short", scene_start, scene_stop)
        elif end < scene_stop:
            leave_out(REST, end, scene_stop)
    if len(clips) == 1 and 2 * clips[0].num_frames >= num_frames:
        clips = [replace(clips[0], is_whole=True)]
    return Finding(source=source.name, clips=tuple(clips), skips=tuple(skips), seconds=timeline.seconds)


def bucket(height: int, width: int, settings: Settings) -> tuple[int, int]:
    """The bucket nearest in aspect ratio among those that the picture fills without upscaling; the largest of several.

    Raises:
        UnusableSourceError: if the picture is smaller than all of them.
    """
    filled = [size for size in settings.sizes if size[0] <= height and size[1] <= width]
    if not filled:
        raise UnusableSourceError("small", f"{height}x{width} fills none of the sizes")
    shape = math.log(height / width)
    return min(filled, key=lambda size: (round(abs(math.log(size[0] / size[1]) - shape), 6), -size[0] * size[1]))


def find_scenes(luma_THW: np.ndarray, threshold: float) -> list[tuple[int, int]]:
    """(start, stop) of each scene. A change of scene is a difference above the threshold that exceeds its neighbours;
    fast motion has large differences in every frame."""
    change_T = _changes(luma_THW)
    padded = np.pad(change_T, 1)
    neighbours_T = np.maximum(padded[:-2], padded[2:])
    cuts = 1 + np.flatnonzero((change_T > threshold) & (change_T > 2.5 * neighbours_T))
    bounds = [0, *cuts.tolist(), len(luma_THW)]
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def runs(flags_T: np.ndarray) -> list[tuple[int, int]]:
    """(start, stop) of each run of True."""
    bounds = np.flatnonzero(np.diff(np.concatenate([[False], flags_T, [False]]).astype(int)))
    return [(int(start), int(stop)) for start, stop in bounds.reshape(-1, 2)]


def undamaged(scenes: list[tuple[int, int]], is_damaged_T: np.ndarray) -> list[tuple[int, int]]:
    """Return the undamaged intervals of each scene."""
    if not is_damaged_T.any():
        return scenes
    return [(begin + start, begin + stop) for begin, end in scenes for start, stop in runs(~is_damaged_T[begin:end])]


def windows(start: int, stop: int, lengths: tuple[int, ...], *, overlap: bool = False) -> list[tuple[int, int]]:
    """Consecutive intervals, each the longest that fits; with `overlap` one more at the end, as long as the last."""
    found = []
    for length in sorted(lengths, reverse=True):
        while stop - start >= length:
            found.append((start, start + length))
            start += length
    if overlap and found and start < stop:
        first, last = found[-1]
        found.append((stop - (last - first), stop))
    return found


def dull(luma_THW: np.ndarray, motion_T: np.ndarray, fps: float, settings: Settings) -> tuple[str, str] | None:
    """Return the reason to drop frames (dark, static, slow), with the measured value, or None; `motion_T` has the
    changes between frames, one fewer."""
    if (brightness := np.percentile(luma_THW, SHARE_OF_SUBJECT, axis=(1, 2)).max()) < settings.min_brightness:
        return "black", f"brightness {brightness:.1f}"
    if len(motion_T) and (change := motion_T.max()) < settings.min_motion:
        return "static", f"change {change:.2f}"
    if len(motion_T) and settings.min_flow:
        from megadit.train.data.ingest.clips.flow import mean_speed  # and torch, without which processes start sooner

        if (speed := mean_speed(luma_THW, fps)) < settings.min_flow:
            return "slow", f"{speed:.3f} sides a second"
    return None


def fingerprint(luma_THW: np.ndarray) -> str:
    """Difference hashes (is a field clearly brighter than its left neighbour?) of the first, middle and last frame: 192
    bits, of which size, compression and brightness change few."""
    bits = []
    for index in (0, len(luma_THW) // 2, len(luma_THW) - 1):
        columns = np.linspace(0, THUMBNAIL, 10).astype(int)
        rows = luma_THW[index].astype(np.float32).reshape(8, THUMBNAIL // 8, THUMBNAIL).mean(axis=1)
        fields = np.stack([rows[:, a:b].mean(axis=1) for a, b in zip(columns[:-1], columns[1:], strict=True)], axis=1)
        bits.append(fields[:, 1:] > fields[:, :-1] + CLEARLY_BRIGHTER)
    return np.packbits(np.stack(bits)).tobytes().hex()


def _changes(luma_THW: np.ndarray) -> np.ndarray:
    """Mean difference between each frame and the one before it."""
    luma = luma_THW.astype(np.float32)
    return np.abs(luma[1:] - luma[:-1]).mean(axis=(1, 2))


def _skip(source: Source, reason: str, detail: str, start: float = 0.0, seconds: float = 0.0) -> Skip:
    caption = source.caption
    return Skip(source=source.name, reason=reason, detail=detail, start=start, seconds=seconds, caption=caption)
