"""Videos of any length, by windows: each begins with the last frames of the one before.

However long a video is, no more than a window of it is in memory, or two with the first one.
"""

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from megadit.infer.conditioning.items import ConditioningItem, Media
from megadit.infer.pipeline.pipeline import StepCallback, TextToVideo
from megadit.infer.sampling.resolve import resolve_settings
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.shared.errors import UserError


def num_windows(total_frames: int, num_frames: int, keep_frames: int) -> int:
    """Windows of `num_frames` that make a video of `total_frames`, of which each keeps `keep_frames` of the last.

    Raises:
        UserError: if a window makes nothing new.
    """
    if not 1 <= keep_frames < num_frames:
        raise UserError(f"keep_frames={keep_frames} must be at least 1 and leave some of the {num_frames} of a window")
    return 1 + max(0, -(-(total_frames - num_frames) // (num_frames - keep_frames)))


def stream_windows(
    pipeline: TextToVideo,
    stories: Sequence[Sequence[str]],
    settings: SamplingSettings | None = None,
    *,
    total_frames: int,
    keep_frames: int = 1,
    keep_first: bool = False,
    seeds: Sequence[int],
    conditioning: Sequence[Media] | None = None,
    batch_size: int | None = None,
    on_step: StepCallback | None = None,
) -> Iterator[list[np.ndarray]]:
    """The frames (uint8 THWC) that each window adds to each of several videos.

    Args:
        stories: of each video, a prompt for each window; the last one serves all that are left.
        keep_frames: of a window, with which the next one begins.
        keep_first: gives each window the first one, too, as a clip to edit: small errors do not add up from window to
            window, as they do where each knows the one before alone.
        seeds: of each video. Window n has the noise of seed + n.
        given: of each video's first window.

    Raises:
        UserError: if a window makes nothing new, and for what `TextToVideo.stream` refuses.
    """
    settings = resolve_settings(pipeline.defaults if settings is None else settings)
    media, first, made = list(conditioning or [()] * len(stories)), [], 0
    for window in range(num_windows(total_frames, settings.num_frames, keep_frames)):
        prompts = [story[min(window, len(story) - 1)] for story in stories]
        videos = [
            result.video
            for result in pipeline.stream(
                prompts,
                settings,
                seeds=[seed + window for seed in seeds],
                conditioning=media,
                batch_size=batch_size,
                on_step=on_step,
            )
        ]
        kept = keep_frames if window else 0
        new = min(settings.num_frames - kept, total_frames - made)
        made += new
        yield [video[kept : kept + new] for video in videos]
        if window == 0:
            first = videos if keep_first else [None] * len(videos)
        media = [
            later_conditioning(video, keep_frames, pipeline.conditionings, also)
            for video, also in zip(videos, first, strict=True)
        ]


def later_conditioning(
    before_THWC: np.ndarray, keep_frames: int, conditionings: Collection[str], first_THWC: np.ndarray | None = None
) -> Media:
    """Conditioning media of a window: the end of the one before, and the first window where it is kept for all."""
    # one frame is a prefix, too, but not every network that was trained to go on from a first frame takes those
    kind = "first_frame" if keep_frames == 1 and "first_frame" in conditionings else "prefix"
    before = ConditioningItem(frames=before_THWC[-keep_frames:], kind=kind, keep_frames=keep_frames)
    return (before,) if first_THWC is None else (before, ConditioningItem(frames=first_THWC, kind="edit"))
