"""Videos of any length, generated in windows: each begins with the last frames of the one before.

At most one window of a video is in memory, or two if the first one is kept.
"""

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from megadit.infer.conditioning.items import ConditioningItem, Media, encodable_frames
from megadit.infer.pipeline.pipeline import StepCallback, TextToVideo
from megadit.infer.sampling.resolve import resolve_settings
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.shared.errors import UserError
from megadit.models.tokenizers import VideoTokenizer


def num_windows(total_frames: int, num_frames: int, keep_frames: int) -> int:
    """Number of windows of `num_frames` in a video of `total_frames`; each repeats `keep_frames` of the one before.

    Raises:
        UserError: if a window adds no frames.
    """
    if not 1 <= keep_frames < num_frames:
        raise UserError(f"keep_frames={keep_frames} must be at least 1 and leave some of the {num_frames} of a window")
    return 1 + max(0, -(-(total_frames - num_frames) // (num_frames - keep_frames)))


def windows_of(total_frames: int, num_frames: int, keep_frames: int, tokenizer: VideoTokenizer) -> tuple[int, int]:
    """`num_windows`, and the frames that each repeats: `keep_frames`, rounded down to a number that can be encoded.

    Raises:
        UserError: as `num_windows`, and for several windows of a tokenizer that is not causal.
    """
    if num_windows(total_frames, num_frames, keep_frames) > 1:
        keep_frames = encodable_frames(keep_frames, tokenizer)
    return num_windows(total_frames, num_frames, keep_frames), keep_frames


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
        stories: for each video, a prompt for each window; the last one is used for all windows that follow.
        keep_frames: frames of a window with which the next one begins; see `windows_of`.
        keep_first: also conditions each window on the first one, as a clip to edit, so that small errors do not add up
            from window to window.
        seeds: one for each video. Window n has the noise of seed + n.
        conditioning: media of each video's first window.

    Raises:
        UserError: if a window adds no frames, and as `TextToVideo.stream`.
    """
    settings = resolve_settings(pipeline.defaults if settings is None else settings)
    media, first, made = list(conditioning or [()] * len(stories)), [], 0
    count, keep_frames = windows_of(total_frames, settings.num_frames, keep_frames, pipeline.tokenizer)
    for window in range(count):
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
    """Conditioning media of a window: the end of the one before, and the first window where it is kept."""
    # one frame is also a prefix, but not every network that was trained with first frames supports prefixes
    kind = "first_frame" if keep_frames == 1 and "first_frame" in conditionings else "prefix"
    before = ConditioningItem(frames=before_THWC[-keep_frames:], kind=kind, keep_frames=keep_frames)
    return (before,) if first_THWC is None else (before, ConditioningItem(frames=first_THWC, kind="edit"))
