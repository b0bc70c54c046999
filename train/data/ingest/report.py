"""Report of a preparation: counts, reasons, hours, and histograms as a picture."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megadit.models.shared.files import atomic_path, read_json, write_json
from megadit.models.shared.progress import duration
from megadit.train.data.ingest.lines import read_lines
from megadit.train.data.ingest.plan import REST, Clip, Notes, Skip
from megadit.train.data.ingest.select import SPLITS

REPORT = "report.json"
PICTURE = "report.png"
TEMPORAL = 4
"""Frames that tokenizers make one of: a length is one frame and a multiple."""
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
"""Reason -> the option that decides it."""
CONVERSIONS = {
    "HDR": "HDR (HLG or PQ), tone-mapped to the colours of an ordinary screen",
    "wide gamut": "wide-gamut video (BT.2020 or P3), converted to sRGB",
    "interlaced": "interlaced, made whole by bwdif",
    "colour profile": "pictures with a colour profile, converted to sRGB",
    "deep grey": "grey of more than eight bits, or of floating point, scaled to eight",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The contents of `report.json`."""

    sources: int
    """Everything that lies there or that a table names, but for captions that were read: the sum of the next three."""
    used: int
    """Videos and images that samples were made of."""
    left_out: int
    """Sources that gave no sample, for reasons in `skips`."""
    not_used: int
    """Files that are no videos or images to be read, for reasons in `not_used_reasons`."""
    hours_read: float
    hours_kept: float
    samples: dict[str, int]
    """Samples of each split."""
    without_caption: int
    transparent: int
    """Samples through which the background shows."""
    conversions: dict[str, int]
    """Conversion -> number of samples."""
    skips: dict[str, int]
    """Reason -> sources, or stretches of one, that were left out for it."""
    skipped_hours: dict[str, float]
    rest_frames: int
    """Frames past the last whole clip of their scene."""
    rest_length: int
    """Median length of such a rest, in frames."""
    not_used_reasons: dict[str, int]
    remarks: dict[str, int]
    """Change made to sources that are used -> number of sources."""
    sizes: dict[str, int]
    """height x width -> samples."""
    lengths: dict[str, int]
    """Frames -> samples."""


def write_report(notes: Notes) -> Report:
    """Writes report.json and report.png, and returns what they say."""
    clips = {split: notes.clips(split) for split in SPLITS}
    skips = [Skip(**values) for values in read_lines(notes.skips)]
    every = [clip for plan in clips.values() for clip in plan]
    selection = read_json(notes.selection)
    unlisted = {values["source"] for values in read_lines(notes.skipped)}
    not_used = [values["reason"] for values in read_lines(notes.not_used)] if notes.not_used.is_file() else []
    remarks = [values["reason"] for values in read_lines(notes.remarks)] if notes.remarks.is_file() else []
    used, looked_at = len({clip.source.name for clip in every}), selection["sources"] + len(unlisted)
    rests = [_frames_of(skip) for skip in skips if skip.reason == REST]
    report = Report(
        sources=looked_at + len(not_used),
        used=used,
        left_out=looked_at - used,
        not_used=len(not_used),
        hours_read=round(selection["hours_read"], 6),
        hours_kept=round(sum(clip.seconds for clip in every) / 3600, 6),
        samples={split: len(plan) for split, plan in clips.items()},
        without_caption=sum(not clip.source.caption for clip in every),
        transparent=sum(clip.is_transparent for clip in every),
        conversions=_counts(name for clip in every for name in clip.conversions),
        skips=_counts(skip.reason for skip in skips),
        skipped_hours={
            reason: round(sum(skip.seconds for skip in skips if skip.reason == reason) / 3600, 4)
            for reason in sorted({skip.reason for skip in skips if skip.seconds})
        },
        rest_frames=sum(rests),
        rest_length=int(median(rests)) if rests else 0,
        not_used_reasons=_counts(not_used),
        remarks=_counts(remarks),
        sizes=_counts(f"{clip.height}x{clip.width}" for clip in every),
        lengths=_counts(str(clip.num_frames) for clip in every),
    )
    write_json(notes.root / REPORT, {name: getattr(report, name) for name in report.__dataclass_fields__})
    draw(notes.root / PICTURE, report, every)
    return report


def summary(report: Report, notes: Notes) -> str:
    """A few lines for the terminal."""
    samples = ", ".join(f"{count:,} {split}" for split, count in report.samples.items())
    length = f"{duration(3600 * report.hours_kept)} of {duration(3600 * report.hours_read)} of video"
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
    """Length in frames of a stretch whose detail begins "frames 17 to 24"."""
    start, stop = (int(word) for word in skip.detail.split()[1:4:2])
    return stop - start


def _rest(report: Report) -> str:
    """Describe the number of frames past the last whole clips, and the lengths that would use them."""
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


def draw(path: Path, report: Report, clips: list[Clip]) -> None:
    """Draw histograms of what was kept and bars of what was not."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a second to import, and for people only
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3).flatten()
    _bars(axes[0], "size, height x width", report.sizes)
    _bars(axes[1], "frames", report.lengths)
    _bars(axes[2], "left out, by reason", report.skips)
    axes[3].hist([clip.fps for clip in clips], bins=30)
    axes[3].set_title("frames per second (0: images)")
    axes[4].hist([clip.seconds for clip in clips], bins=30)
    axes[4].set_title("seconds")
    axes[5].hist([len(clip.source.caption.split()) for clip in clips], bins=30)
    axes[5].set_title("words of the caption")
    figure.suptitle(
        f"{sum(report.samples.values()):,} samples of {report.sources:,} sources, {duration(3600 * report.hours_kept)}"
    )
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110)


def _bars(axes: Any, title: str, counts: dict[str, int]) -> None:
    names = list(counts)[:12]
    axes.barh(names, [counts[name] for name in names])
    axes.invert_yaxis()
    axes.set_title(title)


def _counts(values: Any) -> dict[str, int]:
    return dict(sorted(Counter(values).items(), key=lambda item: (-item[1], item[0])))
