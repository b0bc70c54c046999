"""Stages of a preparation, each of which does its missing work.

| stage | does | results in OUT |
|---|---|---|
| fetch | extracts media from tables, downloads; lists sources | prepare/fetched/, prepare/sources.jsonl |
| scan | decodes every source at low resolution; cuts, filters, fingerprints | prepare/scan/ |
| select | drops near-duplicates; captions, scores; assigns clips to shards | prepare/train.jsonl, val.jsonl, ... |
| encode | decodes the clips, encodes, writes shards | train-000000.tar, ... |
| index | metadata, report | .nv-meta/, megadit.json, report.json, report.png, prepare/left_out/ |
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path

import torch

from megadit.models.bundle import check_kind, open_any_bundle
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_directory, write_json
from megadit.models.shared.progress import Progress, duration
from megadit.models.storage.components import component_folder
from megadit.models.text_encoders import ClassLabels, TokenIds
from megadit.models.text_encoders.token_ids import learned_words
from megadit.models.tokenizers import HaarTokenizer, load_tokenizer
from megadit.train.data.ingest.clips.captions import NOT_CAPTIONED, CaptionServer, caption_clips, check_captions
from megadit.train.data.ingest.clips.encode import decoded_clips, encode_shard, store_shard, to_video
from megadit.train.data.ingest.clips.encodings import (
    BUILT_IN,
    HAAR,
    LABELS,
    LATENT,
    TEXT,
    TOKENS,
    Encoder,
    Encoding,
    fit_haar,
    gather_labels,
    load_encoder,
)
from megadit.train.data.ingest.clips.fitting import drop_unfit, parse_least
from megadit.train.data.ingest.clips.scan import scan
from megadit.train.data.ingest.clips.scoring import NO_SCORE, open_scorer, score_clips
from megadit.train.data.ingest.clips.select import (
    SPLITS,
    Filter,
    add_caption,
    check_not_in,
    drop_annotated,
    select,
    shards,
)
from megadit.train.data.ingest.clips.source_media import (
    expected,
    source_media_bytes,
    source_media_of,
    write_source_media,
)
from megadit.train.data.ingest.lines import Lines, line_starts, read_lines, write_lines
from megadit.train.data.ingest.plan import Clip, Finding, Notes, Settings, Skip, Source, source_from_json
from megadit.train.data.ingest.pool import Pool
from megadit.train.data.ingest.rejected import picture_left_out
from megadit.train.data.ingest.report import more_channels_in_words, summary, write_report
from megadit.train.data.ingest.sources.listing import Listing, shorten_captions
from megadit.train.data.ingest.tables import Tables
from megadit.train.data.ingest.update import EarlierFindings, changes, keep_findings
from megadit.train.data.ingest.workers import Workers
from megadit.train.data.writer import describe_dataset
from megadit.train.dataset.dataset_info import INFO_FILE

STAGES = ("fetch", "scan", "select", "encode", "index")
SHARED_STAGES = ("fetch", "scan", "encode")
"""Stages that are divided among ranks and `--shard` jobs; the others take one process seconds."""
SOURCES_OF_A_UNIT = 64
LEARNED_WORDS = 32_768
"""Maximum vocabulary learned from captions."""
FITTING_CLIPS = 256
"""Number of clips to which a `haar` tokenizer is fitted."""
RETRIED = (NOT_CAPTIONED, NO_SCORE)
"""Prefixes of reasons that `--redo failed` retries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparation:
    """Inputs common to the stages."""

    notes: Notes
    settings: Settings
    encodings: tuple[Encoding, ...]
    channels: int
    """Latent channels of a `haar` tokenizer."""
    list_sources: Callable[[], Listing | None]
    """Function that lists the sources, or returns None while not all of them are fetched."""
    num_workers: int
    workers: Workers
    tables: Tables | None = None
    """Tables whose rows must be fetched first."""
    is_update: bool = False
    """Whether changed sources are prepared again (`--update`)."""
    redo: range | None = None
    """Numbers of shards to encode again; shards of all splits are numbered consecutively."""
    redo_failed: bool = False
    """Whether failed downloads, captions and scores are retried."""
    caption_server: CaptionServer = CaptionServer()  # noqa: RUF009  (it is frozen)

    @property
    def root(self) -> Path:
        return self.notes.root


def run(preparation: Preparation, stages: Sequence[str]) -> None:
    """Run the stages in order; short ones on the first rank alone."""
    workers = preparation.workers
    for stage in (name for name in STAGES if name in stages):
        if stage in SHARED_STAGES:
            {"fetch": fetch, "scan": scan_sources, "encode": encode_shards}[stage](preparation)
        elif workers.is_first:
            {"select": select_clips, "index": index}[stage](preparation)
        workers.wait()


def fetch(preparation: Preparation) -> None:
    """Fetch rows of tables; when all are there, list the sources, and remove results of earlier, shorter listings."""
    notes, workers = preparation.notes, preparation.workers
    if notes.sources.is_file() and not preparation.redo_failed:
        if workers.is_first and preparation.tables is None:
            go_on(preparation)
        return
    if preparation.tables is not None:
        preparation.tables.fetch(workers, again=True)
        workers.wait()
    listing = preparation.list_sources() if workers.is_first else None
    if listing is None:
        return
    write_listing(preparation, listing)


def go_on(preparation: Preparation) -> None:
    """Start an update if the sources have changed.

    Raises:
        UserError: if they have, without `--update`.
    """
    notes = preparation.notes
    listing = preparation.list_sources()
    shorten_captions(listing, preparation.settings.max_caption_words)
    found = changes(map(source_from_json, read_lines(notes.sources)), listing.sources)
    if not found:
        return
    if not preparation.is_update:
        raise UserError(
            f"{preparation.root} was begun with a different source ({found}); --update continues with the present "
            "one, --overwrite begins anew"
        )
    print(f"updating: {found}", flush=True)
    keep_findings(notes)
    notes.forget_results()
    notes.scores.unlink(missing_ok=True)  # captions may have changed
    write_listing(preparation, listing)


def write_listing(preparation: Preparation, listing: Listing) -> None:
    """Record the sources; results of other sources are removed."""
    notes = preparation.notes
    shorten_captions(listing, preparation.settings.max_caption_words)
    if notes.sources.is_file():
        before = map(source_from_json, read_lines(notes.sources))
        if all(old == new for old, new in zip_longest(before, listing.sources)):
            return
        notes.forget_results()
    listing.skips.write(notes.skipped)
    listing.not_used.write(notes.not_used)
    listing.remarks.write(notes.remarks)
    listing.sources.write(notes.sources)


def scan_sources(preparation: Preparation) -> None:
    notes, workers = preparation.notes, preparation.workers
    _require(notes.sources, "fetch")
    starts, count = line_starts(notes.sources, SOURCES_OF_A_UNIT)
    mine = [unit for unit in workers.mine(len(starts)) if not notes.scan(unit).is_file()]
    total, kept = sum(min(SOURCES_OF_A_UNIT, count - unit * SOURCES_OF_A_UNIT) for unit in mine), EarlierFindings(notes)
    bar = Progress(total, "scanning", enabled=workers.is_first and total > 0)

    def while_waiting(seconds: float) -> None:
        bar.advance(0, **({"read": duration(seconds)} if seconds else {}))

    with bar, Pool(preparation.num_workers, while_waiting=while_waiting) as pool:
        for unit in mine:
            sources = list(map(source_from_json, islice(read_lines(notes.sources, starts[unit]), SOURCES_OF_A_UNIT)))
            known = list(map(kept.of, sources))
            new = [source for source, finding in zip(sources, known, strict=True) if finding is None]
            scanned = pool.map(partial(scan, settings=preparation.settings), new, _lost)
            findings = []
            for finding in known:
                findings.append(finding or next(scanned))
                bar.advance()
            write_lines(notes.scan(unit), findings)


def _lost(source: Source) -> Finding:
    skip = Skip(source=source.name, reason="broken", detail="it crashes the decoder, or hangs it")
    return Finding(source=source.name, skips=(skip,))


def select_clips(preparation: Preparation) -> None:
    notes = preparation.notes
    _require(notes.sources, "fetch")
    if len(list(notes.scans.glob("*.jsonl"))) < len(line_starts(notes.sources, SOURCES_OF_A_UNIT)[0]):
        raise UserError(f"{preparation.root}: not all sources are scanned; run the stage scan first")
    if preparation.redo_failed and notes.selection.is_file():
        if any(skip["reason"].startswith(RETRIED) for skip in read_lines(notes.skips)):
            notes.forget_selected()
    if not notes.selection.is_file():
        select(notes, preparation.settings, _filters(preparation))
    if not notes.clips("train"):
        report = write_report(notes)
        raise UserError(f"no clip is left to train on; {summary(report, notes)}".replace("\n", "; "))
    if preparation.settings.source_media:
        print(expected(chain(*map(notes.clips, SPLITS))))
    for name, make in {HAAR: _fit, LABELS: _gather, TOKENS: _learn}.items():
        if any(encoding.encoder == name for encoding in preparation.encodings) and not (notes.folder / name).is_dir():
            encoder = make(preparation)
            with atomic_directory(notes.folder / name) as folder:
                encoder.save(folder)


def _filters(preparation: Preparation) -> list[Filter]:
    """Filters in order: those that read captions come after those that create them."""
    notes, means = preparation.notes, {"settings": preparation.settings, "num_workers": preparation.num_workers}
    return [
        partial(drop_annotated, settings=preparation.settings),
        partial(add_caption, settings=preparation.settings),
        partial(caption_clips, server=preparation.caption_server, notes=notes, **means),
        partial(score_clips, notes=notes, **means),
        partial(drop_unfit, device=preparation.workers.device, **means),
    ]


def _captions(preparation: Preparation, splits: Sequence[str]) -> Iterator[str]:
    clips = chain(*map(preparation.notes.clips, splits))
    return (caption for clip in clips for caption in clip.source.captions or ("",))


def _learn(preparation: Preparation) -> TokenIds:
    words = learned_words(_captions(preparation, ["train"]), num_words=LEARNED_WORDS)
    print(f"words: {words.num_words:,} tokens")
    return words


def _gather(preparation: Preparation) -> ClassLabels:
    labels = gather_labels(_captions(preparation, SPLITS))
    print(f"labels: {len(labels.names):,} classes")
    return labels


def _fit(preparation: Preparation) -> HaarTokenizer:
    settings, train = preparation.settings, preparation.notes.clips("train")
    with Pool(preparation.num_workers) as pool:
        videos = [
            to_video(torch.from_numpy(decoded.frames_THWC)[None])
            for decoded in islice(decoded_clips(train[:FITTING_CLIPS], settings, pool), FITTING_CLIPS)
        ]
    tokenizer, usual = fit_haar(videos, preparation.channels)
    write_json(preparation.notes.channels, usual)
    if (channels := tokenizer.latent_channels) < preparation.channels:
        print(f"note: the clips have {channels} principal components, so latents have {channels} channels, not "
              f"{preparation.channels}: they are few, or much alike")  # fmt: skip
    print(
        f"tokenizer: {channels} channels, {tokenizer.reconstruction_psnr:.1f} dB on what it was fitted to"
        + more_channels_in_words(usual, than=channels)
    )
    return tokenizer


def all_shards(preparation: Preparation) -> list[tuple[Path, Lines[Clip], slice]]:
    """(file, plan, slice of its clips) of the shards of all splits."""
    found = []
    for split in SPLITS:
        plan = preparation.notes.clips(split)
        parts = shards(len(plan), preparation.settings.shard_size)
        found += [(preparation.root / f"{split}-{number:06d}.tar", plan, part) for number, part in enumerate(parts)]
    return found


def encode_shards(preparation: Preparation) -> None:
    workers, settings = preparation.workers, preparation.settings
    _require(preparation.notes.selection, "select")
    every, redo = all_shards(preparation), preparation.redo
    if redo is not None and (not redo or redo.stop > len(every)):
        raise UserError(f"shards {redo.start}:{redo.stop} do not exist; there are 0 to {len(every) - 1}")
    numbers = [number for number in workers.mine(len(every)) if redo is None or number in redo]
    mine = [every[number] for number in numbers if redo is not None or _missing(preparation, every[number][0])]
    if not mine:
        return
    encoders = load_encoders(preparation) if settings.store == "latents" else []
    total = sum(part.stop - part.start for _, _, part in mine)
    with Pool(preparation.num_workers) as pool, Progress(total, "encoding", enabled=workers.is_first) as bar:
        # of all shards: while one is written, clips of the next are decoded
        decoded = decoded_clips(
            (plan[n] for _, plan, part in mine for n in range(part.start, part.stop)), settings, pool
        )
        for path, plan, part in mine:
            clips = plan[part]
            if settings.source_media:
                write_source_media(path, clips, settings, pool)
            if settings.store == "raw":
                store_shard(path, clips, settings, decoded)
            else:
                encode_shard(path, clips, settings, encoders, decoded)
            bar.advance(len(clips))


def _missing(preparation: Preparation, shard: Path) -> list[Path]:
    """Paths of a shard and its source media that are not written yet."""
    paths = [shard, source_media_of(shard)] if preparation.settings.source_media else [shard]
    return [path for path in paths if not path.is_file()]


def index(preparation: Preparation) -> None:
    notes, root = preparation.notes, preparation.root
    _require(notes.selection, "select")
    missing = [path for shard, _, _ in all_shards(preparation) for path in _missing(preparation, shard)]
    if missing:
        raise UserError(
            f"{root}: {len(missing)} shards are missing, {missing[0].relative_to(root)} first; run the stage encode"
        )
    report = write_report(notes)
    if not notes.left_out.is_dir():
        picture_left_out(notes, preparation.settings, preparation.num_workers)
    if not (root / INFO_FILE).is_file():
        models = {encoder.name: encoder.model for encoder in load_encoders(preparation)}
        tokenizer, text_encoder = models[LATENT], models[TEXT]
        for name, part in (("tokenizer", tokenizer), ("text_encoder", text_encoder)):
            with atomic_directory(root / name) as folder:
                part.save(folder)
        describe_dataset(root, tokenizer, text_encoder, report.samples)
    notes.previous.unlink(missing_ok=True)
    print(summary(report, notes))
    if preparation.settings.source_media:
        print(f"source media: {source_media_bytes(root):,} bytes")


def load_encoders(preparation: Preparation) -> list[Encoder]:
    torch.set_num_threads(1 if preparation.num_workers else torch.get_num_threads())
    made, device = preparation.notes.folder, preparation.workers.device
    return [load_encoder(encoding, made, device) for encoding in preparation.encodings]


def check_encoders(preparation: Preparation) -> None:
    """Raises UserError for missing filters or encoders, and for sizes and lengths that encoders do not support; called
    before anything is decoded."""
    check_not_in(preparation.settings, preparation.root)
    check_captions(preparation.settings, preparation.caption_server)
    open_scorer(preparation.settings)
    if preparation.settings.min_clip_score is not None:
        check_kind(open_any_bundle(parse_least(preparation.settings.min_clip_score)[0]), "clip")
    for encoding in preparation.encodings:
        if encoding.modality != "video" and encoding.encoder not in (*BUILT_IN, LABELS, TOKENS):
            component_folder(encoding.encoder, "text_encoder")
    check_sizes(preparation.settings, preparation.encodings)


def check_sizes(settings: Settings, encodings: Sequence[Encoding]) -> None:
    """Check sizes and lengths against the video encoders.

    Raises:
        UserError: for unsupported ones, naming the nearest supported.
    """
    for name in (encoding.encoder for encoding in encodings if encoding.modality == "video"):
        tokenizer = BUILT_IN[name]() if name in BUILT_IN else load_tokenizer(name)
        for height, width in settings.sizes:
            for frames in settings.num_frames:
                tokenizer.latent_shape(frames, height, width)


def _require(path: Path, stage: str) -> None:
    if not path.is_file():
        raise UserError(f"{path} does not exist; run the stage {stage} first")
