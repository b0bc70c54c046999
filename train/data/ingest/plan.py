"""Settings, clips, findings and state files of a preparation.

State is kept in files under `prepare/` in the data set's folder. Each is the result of one unit of work, a function of
settings and sources alone, and written atomically. After an interruption a preparation continues with the first missing
unit, and writes the same bytes.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from PIL import ImageColor

from megadit.models.shared.cli.setting import check_settings, setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import differences, read_json, write_json
from megadit.train.data.ingest.lines import Lines, read_lines
from megadit.train.dataset.description import MOST_FRAMES

NOTES = "prepare"
TEMPORARY = re.compile(r"\..*\.[0-9a-f]{8}(\.[a-z]+)?")
"""Temporary names of `atomic_path` and `atomic_directory`."""
Kind = Literal["video", "image"]
REST = "rest of a scene"
"""Reason for leaving out the frames after the last whole clip of a scene."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """All settings that determine the contents of the data set."""

    sizes: tuple[tuple[int, int], ...] = ((256, 256),)
    """(height, width) of the buckets; a clip gets the one nearest in aspect ratio among those it fills."""
    num_frames: tuple[int, ...] = (33,)
    """Lengths of clips in frames; a scene is cut into the longest that fit."""
    fps: float = setting(24.0, "frames per second of clips (default: 24)", above=0)
    """Frame rate at which clips are sampled; slower videos keep their own."""
    overlap: bool = setting(False, "end the last clip of a scene at its last frame, overlapping the clip before")
    cut: Literal["length", "scene"] = setting(
        "scene", "cut clips at changes of scene, too, or by length alone (default: {default})"
    )
    """`scene`: clips end at changes of scene; `length`: they may cross them."""
    scene_threshold: float = setting(20.0, "change of brightness (0..255) that ends a scene (default: {default})")
    """Measured as the mean difference between neighbouring frames."""
    min_brightness: float = setting(12.0, "brightness below which clips are dropped as black (default: {default})")
    """Measured as the brightest twentieth of the brightest frame (0..255)."""
    min_motion: float = setting(0.4, "motion below which clips are dropped as static (default: {default})")
    """Measured between neighbouring frames: their mean difference (0..255), or a tenth of that of the pixels that
    change most, whichever is larger (`clips/decode.py`)."""
    min_flow: float = setting(0.0, "optical flow below which clips are dropped as slow (default: {default})", low=0)
    """Measured as mean speed of all pixels, in frame sides per second; fading and flicker do not count."""
    min_contrast: float = setting(2.0, "contrast below which images are dropped as blank (default: {default})")
    """Standard deviation of brightness (0..255)."""
    max_duplicate_bits: int = setting(
        7, "fingerprint bits, of 192, that near-duplicates may differ in; -1 keeps all (default: {default})"
    )
    duplicates: Literal["same_caption", "any_caption"] = setting(
        "same_caption", "drop near-duplicates with the same caption, or with any caption (default: {default})"
    )
    """An empty caption equals any other."""
    not_in: tuple[str, ...] = setting((), "data set whose near-duplicates are dropped", metavar="DATA", repeated=True)
    """Captions are ignored."""
    background: str = setting("black", "background colour of transparent pictures: white, #8040ff (default: {default})")
    min_aesthetic_score: float | None = setting(None, "drop sources whose aesthetic score is lower or missing")
    """Compared with the `aesthetic_score` of a source."""
    min_clip_score: str | None = setting(
        None, "drop clips whose caption has a lower similarity in this CLIP model, or none", metavar="BUNDLE:SCORE"
    )
    """Similarity of the middle frame to the caption, -1..1."""
    max_caption_words: int = setting(512, "words after which captions are cut (default: {default})", low=1)
    default_caption: str | None = setting(None, "caption of all clips that have none", metavar="TEXT")
    caption_model: str | None = setting(None, "model of --caption_server that describes clips", metavar="NAME")
    caption_prompt: str = setting(
        "Describe this in one or two sentences: what is seen, how it moves, how it looks. Give the description alone.",
        "instruction to --caption_model for each clip",
        metavar="TEXT",
    )
    caption_frames: int = setting(4, "frames of a clip sent to --caption_model (default: {default})", low=1, high=64)
    scorer_dir: str | None = setting(
        None, "folder of your scorer.py, whose score(video, caption) returns scores of a clip", metavar="DIR"
    )
    min_score: tuple[str, ...] = setting(
        (), "drop clips whose score by --scorer_dir is lower or missing", metavar="NAME=SCORE", repeated=True
    )
    max_score: tuple[str, ...] = setting(
        (), "drop clips whose score by --scorer_dir is higher or missing", metavar="NAME=SCORE", repeated=True
    )
    max_megapixels: float = setting(100.0, "megapixels above which pictures are dropped (default: {default})", above=0)
    """Applied before decoding."""
    max_minutes: float = setting(240.0, "minutes above which videos are dropped (default: {default})", above=0)
    """Applied before reading."""
    shard_size: int = setting(1000, "most samples per shard (default: {default})", above=0)
    """Shards of a split differ by at most one sample."""
    val_share: float = setting(
        0.02, "share of the sources held out for validation (default: {default})", low=0, below=1
    )
    mirror: bool = setting(False, "add a horizontally flipped copy of each training clip")
    """Both have the same caption, so captions must not say left or right."""
    seed: int = setting(0, "seed of the order and the splits (default: {default})")
    keyframes: int = setting(
        0,
        "frames per clip, evenly up to the last, also encoded as images, for data.conditioning=[last_frame, keyframes]",
        low=0,
        high=MOST_FRAMES,
    )
    """Frames for conditioning, encoded separately from the clip (`train/data/packs/conditioning.py`)."""
    store: Literal["latents", "raw"] = setting("latents", "encode now (latents), or while training (raw)")
    """Latents, or pixels that training encodes (`data.encode=on_the_fly`)."""
    source_media: bool = setting(
        False, "also store the source files, and the clips cut out of longer videos, unencoded"
    )
    """Not read by training, but by `megadit prepare webdataset` on the data set (`clips/source_media.py`)."""

    def __post_init__(self) -> None:
        if not self.sizes or any(side < 1 for size in self.sizes for side in size):
            raise UserError(f"sizes={self.sizes} needs at least one height and width, each 1 or more")
        if not self.num_frames or min(self.num_frames) < 1:
            raise UserError(f"num_frames={self.num_frames} needs at least one length, each 1 or more")
        try:
            ImageColor.getrgb(self.background)
        except ValueError:
            raise UserError(f"background={self.background!r} is no colour; white, black and #8040ff are") from None
        check_settings(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A video or an image: a file, or a byte range of one."""

    name: str
    """Unique and stable name, from which keys of samples are derived."""
    kind: Kind
    path: str
    offset: int = 0
    size: int | None = None
    """Number of bytes; None: to the end of the file."""
    caption: str = ""
    aesthetic_score: float | None = None
    more_captions: tuple[str, ...] = ()
    """Captions after the first one; training draws one of all in each epoch."""
    stamp: str = ""
    """Size and modification time of its file, to detect changes; empty if unknown."""

    @property
    def content(self) -> tuple[Any, ...]:
        """Values on which the result of a scan depends: file, stamp, and aesthetic score."""
        return self.name, self.kind, self.path, self.offset, self.size, self.stamp, self.aesthetic_score

    @property
    def captions(self) -> tuple[str, ...]:
        return (self.caption, *self.more_captions) if self.caption else ()

    @property
    def key(self) -> str:
        return hashlib.blake2b(self.name.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """Frames of a source that become one sample."""

    key: str
    source: Source
    height: int
    width: int
    fps: float
    """0 for images."""
    pts: tuple[int, ...]
    """Timestamps of its frames, in units of the stream; (0,) for images."""
    start: float
    """Seconds."""
    fingerprint: str
    """Hexadecimal perceptual hash."""

    is_transparent: bool = False
    """Whether it has transparent pixels."""
    conversions: tuple[str, ...] = ()
    """Conversions of format and colour (`infer/decoding`), as short names."""
    is_regular: bool = True
    """Whether its timestamps are those of the file; if not, it must be decoded from the beginning."""
    is_mirrored: bool = False
    """Whether left and right are exchanged."""

    is_whole: bool = False
    """Whether its source is an image, or a video at most twice as long without another clip."""

    @property
    def num_frames(self) -> int:
        return len(self.pts)

    @property
    def seconds(self) -> float:
        """0 for images."""
        return self.num_frames / self.fps if self.fps else 0.0

    @property
    def place(self) -> str:
        return f"{self.source.name} at {self.start:.2f} s"

    def left_out(self, reason: str, detail: str = "") -> "Skip":
        name, caption = self.source.name, self.source.caption
        return Skip(source=name, reason=reason, detail=detail, start=self.start, seconds=self.seconds, caption=caption)


@dataclass(frozen=True, kw_only=True, slots=True)
class Skip:
    """A source, or an interval of one, that is left out."""

    source: str
    reason: str
    detail: str = ""
    start: float = 0.0
    seconds: float = 0.0
    caption: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Result of scanning one source."""

    source: str
    clips: tuple[Clip, ...] = ()
    skips: tuple[Skip, ...] = ()
    seconds: float = 0.0
    """Seconds of video that could be read."""

    def of(self, source: Source) -> "Finding":
        """The finding for a source with other captions."""
        clips = tuple(replace(clip, source=source) for clip in self.clips)
        return replace(self, clips=clips, skips=tuple(replace(skip, caption=source.caption) for skip in self.skips))


def source_from_json(values: dict[str, Any]) -> Source:
    return Source(**{**values, "more_captions": tuple(values.get("more_captions", ()))})


def clip_from_json(values: dict[str, Any]) -> Clip:
    changed = {name: tuple(values[name]) for name in ("pts", "conversions") if name in values}
    return Clip(**{**values, **changed, "source": source_from_json(values["source"])})


def skip_from_json(values: dict[str, Any]) -> Skip:
    return Skip(**values)


def finding_from_json(values: dict[str, Any]) -> Finding:
    clips = tuple(clip_from_json(clip) for clip in values["clips"])
    return Finding(**{**values, "clips": clips, "skips": tuple(map(skip_from_json, values["skips"]))})


def _inside(name: str) -> property:
    """Path of a file or folder in `prepare/`."""
    return property(lambda notes: notes.folder / name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Notes:
    """The files under `prepare/` of a data set's folder."""

    root: Path

    @property
    def folder(self) -> Path:
        return self.root / NOTES

    settings = _inside("settings.json")
    sources = _inside("sources.jsonl")
    fetched = _inside("fetched")
    """Images and videos from tables or downloads."""
    skipped = _inside("skipped_sources.jsonl")
    """Sources dropped by the listing, before they were read."""
    not_used = _inside("not_used.jsonl")
    """Files in the folder, or named by a table, that are not sources."""
    previous = _inside("previous.jsonl")
    """Findings of sources that are unchanged by an update."""
    remarks = _inside("remarks.jsonl")
    """Changes made to used sources, such as cut captions."""
    captions = _inside("captions.jsonl")
    """Captions of the caption server."""
    scores = _inside("scores.jsonl")
    """Scores of the scorer."""
    channels = _inside("channels.json")
    """PSNR in dB of fitted tokenizers with other numbers of channels."""
    left_out = _inside("left_out")
    """Pictures of a few left out sources for each reason."""
    scans = _inside("scan")

    def scan(self, unit: int) -> Path:
        return self.scans / f"{unit:06d}.jsonl"

    def plan(self, split: str) -> Path:
        """The clips of a split, in the order of its shards."""
        return self.folder / f"{split}.jsonl"

    skips = _inside("skips.jsonl")
    """Clips and sources left out of the data set, with reasons."""
    selection = _inside("selection.json")
    """Counts of the selection; its existence marks complete plans."""

    def begin(self, settings: Settings, request: dict[str, Any], *, is_alone: bool = True) -> None:
        """Record the request, or check that it equals the recorded one; remove leftovers of a killed process if
        `is_alone`.

        Raises:
            UserError: if the folder was started with other settings, or holds something else.
        """
        values = json.loads(json.dumps({"settings": asdict(settings), **request}))
        path = self.settings
        if is_alone:
            self._clear_temporaries()
        # checked before the request: concurrent shards write the request first
        holds_files = self.root.exists() and (not self.root.is_dir() or any(map(_is_whole_file, self.root.rglob("*"))))
        if not path.is_file():
            if holds_files:
                raise UserError(f"{self.root} exists and is not a prepared data set; give another folder, or remove it")
            write_json(path, values)
            return
        before = read_json(path)
        for name, saved, asked in differences(json.loads(json.dumps(before)), values):
            raise UserError(
                f"{self.root} was begun with {name.removeprefix('settings.')}={saved}, and this command has "
                f"{asked}; give the same value, another folder, or --overwrite"
            )

    def withdraw(self) -> None:
        """Remove a request without results, and its folders, so that the next one may differ."""
        if all(path.is_dir() or path == self.settings for path in self.root.rglob("*")):
            shutil.rmtree(self.folder)
            with suppress(OSError):
                self.root.rmdir()

    def forget_results(self) -> None:
        """Remove all results; the request, fetched files and annotation caches remain."""
        self._keep_only()

    def forget_selected(self) -> None:
        """Remove the selection and all results of it."""
        self._keep_only(self.sources, self.skipped, self.not_used, self.remarks, self.scans)

    def _keep_only(self, *paths: Path) -> None:
        kept = (self.folder, self.settings, self.fetched, self.captions, self.scores, self.previous, *paths)
        for path in [*self.root.iterdir(), *self.folder.iterdir()]:
            if path not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _clear_temporaries(self) -> None:
        if self.folder.is_dir():
            for path in [*self.root.glob(".*"), *self.folder.rglob(".*")]:
                if TEMPORARY.fullmatch(path.name):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def findings(self) -> Iterator[Finding]:
        """Findings of all sources, in their order."""
        for path in sorted(self.scans.glob("*.jsonl")):
            yield from map(finding_from_json, read_lines(path))

    def clips(self, split: str) -> Lines[Clip]:
        return Lines.open(self.plan(split), clip_from_json)


def _is_whole_file(path: Path) -> bool:
    return path.is_file() and not TEMPORARY.fullmatch(path.name)


def with_key(clip: Clip, number: int) -> Clip:
    return replace(clip, key=f"{clip.source.key}-{number:04d}")
