"""Report of a preparation: counts, reasons, hours, and histograms as a picture."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from megadit.models.shared.files import atomic_path, read_json, write_json
from megadit.models.shared.progress import duration
from megadit.train.data.ingest.clips.select import SPLITS
from megadit.train.data.ingest.lines import read_lines
from megadit.train.data.ingest.plan import REST, Notes, Skip, skip_from_json

REPORT = "report.json"
PICTURE = "report.png"
TEMPORAL = 4
"""Temporal compression of tokenizers: lengths are one frame plus a multiple of it."""
FLAGS = {
    "near-duplicate": " (--max_duplicate_bits: how alike, -1 keeps all; --duplicates: of one caption or of any)",
    "in another data set": " (--not_in)",
    "static": " (--min_motion)",
    "slow": " (--min_flow)",
    "black": " (--min_brightness)",
    "blank": " (--min_contrast)",
    "too large": " (--max_megapixels)",
    "long": " (--max_minutes)",
    "small": " (--sizes)",
    "short": " (--num_frames)",
}
"""Reason -> hint at the option that controls it."""
CONVERSIONS = {
    "HDR": "HDR (HLG or PQ), tone-mapped to the colours of an ordinary screen",
    "wide gamut": "wide gamut (BT.2020 or P3), converted to sRGB",
    "interlaced": "interlaced, made whole by bwdif",
    "colour profile": "pictures with a colour profile or gamma, converted to sRGB",
    "deep grey": "grey of more than eight bits, or of floating point, scaled to eight",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The contents of `report.json`."""

    sources: int
    """Number of all files and table rows, except captions: the sum of the next three."""
    used: int
    """Videos and images from which samples were made."""
    left_out: int
    """Sources without a sample, for reasons in `skips`."""
    not_used: int
    """Files that are not videos or images, for reasons in `not_used_reasons`."""
    hours_read: float
    hours_used: float
    samples: dict[str, int]
    """Samples of each split."""
    without_caption: int
    transparent: int
    """Samples with transparent pixels."""
    conversions: dict[str, int]
    """Conversion -> number of samples."""
    skips: dict[str, int]
    """Reason -> number of left out sources or intervals."""
    skipped_hours: dict[str, float]
    rest_frames: int
    """Number of frames after the last whole clip of their scene."""
    rest_length: int
    """Median length of such remainders, in frames."""
    not_used_reasons: dict[str, int]
    remarks: dict[str, int]
    """Change made to sources that are used -> number of sources."""
    sizes: dict[str, int]
    """height x width -> samples."""
    lengths: dict[str, int]
    """Frames -> samples."""


def write_report(notes: Notes) -> Report:
    """Write report.json and report.png, and return the report."""
    plans, selection = {split: notes.clips(split) for split in SPLITS}, read_json(notes.selection)
    fps, seconds, words, names = array("d"), array("d"), array("q"), array("q")
    conversions, sizes, lengths, transparent = Counter(), Counter(), Counter(), 0
    for clip in chain(*plans.values()):
        fps.append(clip.fps)
        seconds.append(clip.seconds)
        words.append(len(clip.source.caption.split()) if clip.source.caption else -1)
        names.append(hash(clip.source.name))
        conversions.update(clip.conversions)
        sizes[f"{clip.height}x{clip.width}"] += 1
        lengths[str(clip.num_frames)] += 1
        transparent += clip.is_transparent
    skips, skipped, rests = Counter(), defaultdict(lambda: array("d")), array("q")
    for skip in map(skip_from_json, read_lines(notes.skips)):
        skips[skip.reason] += 1
        if skip.seconds:
            skipped[skip.reason].append(skip.seconds)
        if skip.reason == REST:
            rests.append(_frames_of(skip))
    not_used, remarks = (Counter(_all(path, "reason")) for path in (notes.not_used, notes.remarks))
    used = _num_different(names)
    looked_at = selection["sources"] + _num_different(map(hash, _all(notes.skipped, "source")))
    report = Report(
        sources=looked_at + not_used.total(),
        used=used,
        left_out=looked_at - used,
        not_used=not_used.total(),
        hours_read=round(selection["hours_read"], 6),
        hours_used=round(sum(seconds) / 3600, 6),
        samples={split: len(plan) for split, plan in plans.items()},
        without_caption=words.count(-1),
        transparent=transparent,
        conversions=_sorted(conversions),
        skips=_sorted(skips),
        skipped_hours={reason: round(sum(skipped[reason]) / 3600, 4) for reason in sorted(skipped)},
        rest_frames=sum(rests),
        rest_length=int(median(rests)) if rests else 0,
        not_used_reasons=_sorted(not_used),
        remarks=_sorted(remarks),
        sizes=_sorted(sizes),
        lengths=_sorted(lengths),
    )
    write_json(notes.root / REPORT, {name: getattr(report, name) for name in report.__dataclass_fields__})
    draw(notes.root / PICTURE, report, *map(np.asarray, (fps, seconds)), np.maximum(words, 0))
    return report


def _all(path: Path, name: str) -> Iterator[str]:
    return (values[name] for values in read_lines(path)) if path.is_file() else iter(())


def _num_different(hashes: Iterable[int]) -> int:
    return len(np.unique(np.fromiter(hashes, np.int64)))


def summary(report: Report, notes: Notes) -> str:
    """A few lines for the terminal."""
    samples = ", ".join(f"{count:,} {split}" for split, count in report.samples.items())
    length = f"{duration(3600 * report.hours_used)} of {duration(3600 * report.hours_read)} of video"
    lines = [f"{report.sources:,} sources -> {samples} samples" + (f", {length}" if report.hours_read else "")]
    lines.append(f"{report.used:,} used, {report.left_out:,} left out, {report.not_used:,} not used")
    if report.without_caption:
        lines.append(f"{report.without_caption:,} samples have no caption")
    if report.transparent:
        lines.append(f"{report.transparent:,} samples are transparent in parts; --background says what is seen there")
    lines += [f"{count:,} samples: {CONVERSIONS[name]}" for name, count in report.conversions.items()]
    lines += [
        f"left out: {count:,} x {reason}{_rest(report) if reason == REST else FLAGS.get(reason, '')}"
        for reason, count in report.skips.items()
    ]
    lines += [f"not used: {count:,} x {reason}" for reason, count in report.not_used_reasons.items()]
    lines += [f"{count:,} x {reason}" for reason, count in report.remarks.items()]
    named = [
        str(path)
        for path, counts in (
            (notes.skips, report.skips),
            (notes.not_used, report.not_used),
            (notes.remarks, report.remarks),
        )
        if counts
    ]
    if named:
        lines.append(f"each by its name: {', '.join(named)}")
    return "\n".join(lines)


def _frames_of(skip: Skip) -> int:
    """Length in frames of an interval whose detail begins "frames 17 to 24"."""
    start, stop = (int(word) for word in skip.detail.split()[1:4:2])
    return stop - start


def _rest(report: Report) -> str:
    """Describe the number of frames after the last whole clips, and the lengths that would use them."""
    used = sum(int(length) * count for length, count in report.lengths.items())
    lengths = sorted(map(int, report.lengths), reverse=True)
    shorter = 1 + (report.rest_length - 1) // TEMPORAL * TEMPORAL
    is_new = shorter > TEMPORAL and shorter not in lengths
    remedy = f"--num_frames {','.join(map(str, [*lengths, shorter]))} or --overlap" if is_new else "--overlap"
    every = used + report.rest_frames
    return f": {report.rest_frames:,} of {every:,} frames lie past the last whole clip; {remedy} would use them"


def more_channels_in_words(psnr_by_channels: Mapping[int, float], *, than: int) -> str:
    """Describe the PSNR of tokenizers fitted with more channels, as an addition to a sentence about one with `than`."""
    more = {channels: psnr for channels, psnr in psnr_by_channels.items() if channels > than}
    counts, decibels = ", ".join(map(str, more)), ", ".join(f"{psnr:.1f}" for psnr in more.values())
    return f"; --channels {counts} would give {decibels} dB" if more else ""


def draw(path: Path, report: Report, fps: Sequence[float], seconds: Sequence[float], words: Sequence[int]) -> None:
    """Draw histograms of the samples and bars of left out sources."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a second to import, and for people only
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3).flatten()
    _bars(axes[0], "size, height x width", report.sizes)
    _bars(axes[1], "frames", report.lengths)
    _bars(axes[2], "left out, by reason", report.skips)
    axes[3].hist(fps, bins=30)
    axes[3].set_title("frames per second (0: images)")
    axes[4].hist(seconds, bins=30)
    axes[4].set_title("seconds")
    axes[5].hist(words, bins=30)
    axes[5].set_title("words of the caption")
    figure.suptitle(
        f"{sum(report.samples.values()):,} samples of {report.sources:,} sources, {duration(3600 * report.hours_used)}"
    )
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110)


def _bars(axes: Any, title: str, counts: dict[str, int]) -> None:
    names = list(counts)[:12]
    axes.barh(names, [counts[name] for name in names])
    axes.invert_yaxis()
    axes.set_title(title)


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
