"""Pictures of an evaluation: grids of videos, the best and worst videos, and the curve over guidance scales.

Shapes: T/H/W frames, height, width, C colour channels. Pixels are uint8, RGB, 0..255.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megadit.infer.evaluate.evaluation import Candidate, Evaluation, MetricValue
from megadit.infer.evaluate.extractors.base import resized
from megadit.infer.evaluate.metrics.table import ADHERENCE
from megadit.infer.evaluate.videos import Clip, VideoSet
from megadit.infer.evaluate.window import Window, cut
from megadit.infer.media.contact_sheet import contact_sheet, under_heading
from megadit.models.shared.files import atomic_path

NUM_PAIRED = 6
"""Prompts of the grid of all candidates."""
NUM_EXTREME = 5
"""Best, and worst, videos of a candidate."""
MOST_CANDIDATES = 6
"""Rows of the grid."""
NUM_LINES = 3
"""Most lines of a caption."""
MOST_SIDE = 256
"""Pixels of a video's longer side on the page."""
BACKGROUND, TEXT, FAINT = "#ffffff", "#1c1e21", "#7a828e"
COLOURS = ("#2f6fed", "#1a9c6b", "#d1495b", "#b07d00", "#7a4fd0", "#5b6470")


def paired_grid(candidates: Sequence[Candidate], window: Window) -> np.ndarray:
    """The same prompts and seeds by all candidates, a row for each of them: THWC."""
    chosen = candidates[:MOST_CANDIDATES]
    count = min(each.videos.count for each in chosen)
    places = [number * count // NUM_PAIRED for number in range(min(NUM_PAIRED, count))]
    rows, last = [], None
    for candidate in chosen:
        clips = clips_at(candidate.videos, places)
        prompts = [clip.prompt for clip in clips]
        num_lines = 0 if prompts == last or not any(prompts) else NUM_LINES  # once, above the first row
        row = contact_sheet([_small(clip, window) for clip in clips], prompts, len(places), num_lines=num_lines)
        rows.append(under_heading(row, candidate.label))
        last = prompts
    return np.concatenate(rows, axis=1)


def extremes(candidate: Candidate, evaluation: Evaluation) -> tuple[np.ndarray, str] | None:
    """The best videos of a candidate above its worst, THWC, and the name of their score; None if nothing scores single
    videos."""
    if (score := evaluation.quality(candidate)) is None:
        return None
    quality_N, name = score
    order = quality_N.argsort(descending=True, stable=True).tolist()
    count = min(NUM_EXTREME, len(order) // 2)
    places = [*order[:count], *order[len(order) - count :]]
    clips = clips_at(candidate.videos, places)
    captions = [f"{quality_N[place]:.3g}: {clip.prompt}" for place, clip in zip(places, clips, strict=True)]
    videos = [_small(clip, evaluation.store.window) for clip in clips]
    return contact_sheet(videos, captions, max(count, 1), num_lines=NUM_LINES), name


def _small(clip: Clip, window: Window) -> np.ndarray:
    """Return a video cut to the window, THWC, resized for the page."""
    video_THWC = cut(clip, "", window)
    height, width = video_THWC.shape[1:3]
    if (share := MOST_SIDE / max(height, width)) < 1:
        scaled_1CTHW = resized(video_THWC[None], round(share * height), round(share * width))
        video_THWC = scaled_1CTHW[0].round().byte().permute(1, 2, 3, 0)
    return video_THWC.numpy()


def clips_at(videos: VideoSet, places: Sequence[int]) -> list[Clip]:
    """The videos at these indices of a set; only their chunks are read."""
    starts, first = [], 0
    for part in videos.parts:
        starts.append(first)
        first += len(part.names)
    read: dict[int, Sequence[Clip]] = {}
    found = []
    for place in places:
        number = max(index for index, start in enumerate(starts) if start <= place)
        if number not in read:
            read[number] = videos.parts[number].read()
        found.append(read[number][place - starts[number]])
    return found


# ------------------------------------------------------------------------------------------------------------ curves


def has_curve(metric_values: Sequence[MetricValue]) -> bool:
    """Whether a model was evaluated at several guidance scales."""
    return len({metric_value.candidate.guidance for metric_value in metric_values} - {None}) > 1


def draw_curves(path: Path, metric_values: Sequence[MetricValue]) -> None:
    """Draws each distance against prompt adherence (or guidance, if that was not measured), a line per model.

    Bars are 95 % intervals; the grey band is real against real.
    """
    from matplotlib.figure import Figure as Page

    of_prompts = {
        each.metric: each.title for each in metric_values if each.better == "higher" and each.baseline is None
    }
    adherence = ADHERENCE if ADHERENCE in of_prompts else next(iter(of_prompts), None)
    every = list(dict.fromkeys((each.metric, each.of, each.title) for each in metric_values))
    names = [name for name in every if name[0] != adherence]
    if not names:  # nothing to draw
        adherence, names = None, every
    names = [name for name in names if _is_distance(name[0])] or names[:1]
    page = Page(figsize=(4.6 * len(names), 3.9), facecolor=BACKGROUND, layout="constrained")
    for axis, (metric, of, title) in zip(page.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        chosen = [each for each in metric_values if (each.metric, each.of) == (metric, of)]
        _draw(axis, chosen, {_place(each): each for each in metric_values if each.metric == adherence})
        axis.set_title(f"{metric} by {of}: {title}", color=TEXT, fontsize=9, loc="left")
        axis.set_xlabel(of_prompts.get(adherence, "guidance"), color=FAINT, fontsize=8)
    with atomic_path(path) as temporary:
        page.savefig(temporary, dpi=120, metadata={"Software": None})


def _is_distance(metric: str) -> bool:
    return metric in ("fid", "kid", "fvd", "kvd")


def _place(metric_value: MetricValue) -> tuple[str, float | None]:
    return metric_value.candidate.model, metric_value.candidate.guidance


def _draw(axis, metric_values: Sequence[MetricValue], adherence: dict[tuple, MetricValue]) -> None:
    models = dict.fromkeys(each.candidate.model for each in metric_values)
    for colour, model in zip(COLOURS, models, strict=False):
        line = [each for each in metric_values if each.candidate.model == model]
        along = [adherence.get(_place(each)) for each in line]
        x = [
            each.candidate.guidance or 0.0 if other is None else other.estimate.value
            for each, other in zip(line, along, strict=True)
        ]
        y = [each.estimate.value for each in line]
        style = {"color": colour, "marker": "o", "ms": 4, "lw": 1.4, "elinewidth": 0.8, "capsize": 2}
        axis.errorbar(x, y, yerr=_bars(line), xerr=_bars(along) if all(along) else None, label=model, **style)
        for each, left, height in zip(line, x, y, strict=True):
            if (scale := each.candidate.guidance) is not None:
                axis.annotate(f"{scale:g}", (left, height), (5, 5), textcoords="offset points", fontsize=8)
    floors = [each.baseline.interval for each in metric_values if each.baseline is not None]
    if floors:
        axis.axhspan(*floors[0], color=FAINT, alpha=0.15, lw=0, label="real against real")
    axis.legend(fontsize=7, frameon=False)
    axis.tick_params(colors=FAINT, labelsize=8)
    axis.grid(alpha=0.2)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _bars(metric_values: Sequence[MetricValue]) -> list[list[float]]:
    intervals = [(each.estimate.value, *each.estimate.interval) for each in metric_values]
    return [
        [max(0.0, value - low) for value, low, _ in intervals],
        [max(0.0, high - value) for value, _, high in intervals],
    ]
