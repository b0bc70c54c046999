"""Filter by CLIP similarity of clip and caption: `--min_clip_score BUNDLE:SCORE`."""

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import torch

from megadit.infer.evaluate.videos import Clip as Seen
from megadit.infer.matching import Matcher
from megadit.models.bundle import open_any_bundle
from megadit.models.shared.errors import UserError
from megadit.train.data.ingest.clips.encode import decoded_clips
from megadit.train.data.ingest.clips.select import divide
from megadit.train.data.ingest.plan import Clip, Settings, Skip
from megadit.train.data.ingest.pool import Pool

REASON = "low CLIP score"
AT_ONCE = 32
"""Batch size of the network."""


def parse_least(text: str) -> tuple[str, float]:
    """The bundle and the least similarity of `BUNDLE:SCORE`.

    Raises:
        UserError: if it is not that, or the score not within -1 and 1.
    """
    bundle, _, score = text.rpartition(":")
    try:
        least = float(score)
    except ValueError:
        least = np.nan
    if not bundle or not -1 <= least <= 1:
        raise UserError(f"--min_clip_score {text}: write BUNDLE:SCORE, a score between -1 and 1")
    return bundle, least


def drop_unfit(
    clips: Sequence[Clip], settings: Settings, num_workers: int, device: torch.device
) -> tuple[Sequence[Clip], Sequence[Skip]]:
    """Keep clips whose middle frame and caption reach `min_clip_score`, in their order; clips without a caption are
    dropped.

    Raises:
        UserError: for a bundle that matches nothing, or a source that has changed since it was scanned.
    """
    if settings.min_clip_score is None:
        return clips, []
    bundle, least = parse_least(settings.min_clip_score)
    matcher = Matcher(open_any_bundle(bundle), device=device)

    def why_not(part: Sequence[Clip]) -> Iterator[tuple[str, str] | None]:
        frames = [decoded.frames_THWC for decoded in decoded_clips(part, settings, pool)]
        middles = [Seen(x[len(x) // 2 :][:1], 0.0, clip.source.name) for x, clip in zip(frames, part, strict=True)]
        texts_NE = matcher.texts([clip.source.caption for clip in part])
        scores = (matcher.pictures(middles) * texts_NE).sum(1).tolist()
        for clip, score in zip(part, scores, strict=True):
            is_fit = clip.source.caption and score >= least
            yield None if is_fit else (REASON, f"{score:.3f}" if clip.source.caption else "no caption")

    with Pool(num_workers) as pool:
        parts = (clips[first : first + AT_ONCE] for first in range(0, len(clips), AT_ONCE))
        return divide(clips, chain.from_iterable(map(why_not, parts)))
