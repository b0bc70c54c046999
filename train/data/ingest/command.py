"""`megadit prepare videos|images|webdataset|hf|butterfly SRC OUT`: its options."""

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from megadit.models.shared.cli.options import SIDES, read_options
from megadit.models.shared.cli.setting import group, setting
from megadit.models.shared.errors import UserError, choose_one
from megadit.models.shared.files import read_json
from megadit.train.data.ingest import stages
from megadit.train.data.ingest.clips.captions import CaptionServer
from megadit.train.data.ingest.clips.encodings import default_encodings, read_encodings
from megadit.train.data.ingest.clips.probe import USUAL_SIDE, side_filled, summarize_sources
from megadit.train.data.ingest.engine import choose_engine, run_on_ray, start_ray
from megadit.train.data.ingest.lines import read_lines
from megadit.train.data.ingest.plan import Notes, Settings, source_from_json
from megadit.train.data.ingest.pool import default_workers
from megadit.train.data.ingest.sources.download import Downloads
from megadit.train.data.ingest.sources.listing import Listing, Reading, shorten_captions
from megadit.train.data.ingest.sources.sources import list_folder
from megadit.train.data.ingest.sources.webdataset import list_webdataset
from megadit.train.data.ingest.tables import Tables
from megadit.train.data.ingest.update import changes
from megadit.train.data.ingest.workers import Shard, join_workers
from megadit.train.data.writer import is_prepared, lock_of
from megadit.train.dataset.dataset_info import INFO_FILE
from megadit.train.dataset.places import is_url

BUTTERFLIES = "huggan/smithsonian_butterflies_subset"
FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """Options common to all sources."""

    height: int | None = setting(
        None, f"height of samples in pixels (default: that of the sources, {USUAL_SIDE} at most)"
    )
    width: int | None = setting(None, "width of samples in pixels (default: as for the height)")
    sizes: str | None = setting(None, "buckets in place of one size: 256x256,192x320,320x192 (height x width)")
    num_frames: str = setting("33", "frames per clip; several: 17,33,121 (default: {default})")
    settings: Settings = group(Settings)
    caption_server: CaptionServer = group(CaptionServer)
    tokenizer: str = setting(
        "haar",
        "folder of a tokenizer, haar (fitted to the clips), or pixels (none)",
        names=("--tokenizer", "--tokenizer_cache_dir"),
    )
    channels: int = setting(32, "latent channels of a fitted tokenizer (default: {default})")
    text_encoder: str = setting(
        "hashed_words",
        "folder of a text encoder, hashed_words, labels (captions are class names), or tokens (for CLIP)",
        names=("--text_encoder", "--t5_cache_dir"),
    )
    encodings: Path | None = setting(None, "YAML list of encodings, in place of --tokenizer and --text_encoder")
    num_workers: int | None = setting(None, "decoding processes of each rank")
    shard: str = setting(
        "0/1", f"share of {', '.join(stages.SHARED_STAGES)} that this job does: 3/100 is the fourth of 100"
    )
    engine: str = setting(
        "none", "ray: run the stages as tasks of a Ray cluster, or of Ray on this machine", metavar="NAME"
    )
    engine_tasks: int | None = setting(
        None, "number of tasks per stage with --engine (default: as many as have room)", low=1
    )
    stages: str | None = setting(None, f"stages to run, of {','.join(stages.STAGES)} (default: all)")
    redo: str | None = setting(
        None, "shards to encode again (7, or 3:8 for 3 to 7); failed: retry downloads, captions and scores"
    )
    update: bool = setting(False, "prepare what has changed in the source since the last run")
    overwrite: bool = setting(False, "remove the folder's contents and start anew")


_SOURCE = "source of the data: a folder, or a URL such as s3://BUCKET/PATH"
_OUT = "folder to write"
_SPLIT = "split of the data set (default: {default})"


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderOptions:
    source: str = setting(help=_SOURCE, positional=True, metavar="SRC")
    out: Path = setting(help=_OUT, positional=True, metavar="OUT")
    common: PrepareOptions = group(PrepareOptions)
    captions: str | None = setting(
        None, "table (.csv, .tsv, .jsonl, .json, .parquet) of files and captions; folders: their names are labels"
    )
    split: str = setting("train", "split to use: folders of others are skipped (default: {default})")
    reading: Reading = group(Reading)


@dataclass(frozen=True, kw_only=True, slots=True)
class WebDatasetOptions:
    source: str = setting(help=_SOURCE, positional=True, metavar="SRC")
    out: Path = setting(help=_OUT, positional=True, metavar="OUT")
    common: PrepareOptions = group(PrepareOptions)
    reading: Reading = group(Reading)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableOptions:
    source: str = setting(help=_SOURCE, positional=True, metavar="SRC")
    out: Path = setting(help=_OUT, positional=True, metavar="OUT")
    common: PrepareOptions = group(PrepareOptions)
    split: str = setting("train", _SPLIT)
    reading: Reading = group(Reading)
    downloads: Downloads = group(Downloads)


@dataclass(frozen=True, kw_only=True, slots=True)
class ButterflyOptions:
    source: str = setting(BUTTERFLIES, "a folder with the Parquet files (default: download {default})")
    output_dir: Path = setting(Path("butterfly_webdataset"), names=("--output_dir", "--out"))
    folder: Path | None = setting(None, "the same as --output_dir", positional=True, metavar="OUT")
    common: PrepareOptions = group(PrepareOptions)
    split: str = setting("train", _SPLIT)
    reading: Reading = group(Reading)
    downloads: Downloads = group(Downloads)

    @property
    def out(self) -> Path:
        return self.folder or self.output_dir


_MOST_USED = ("sizes", "height", "width", "num_frames", "fps", "num_workers", "overwrite")
_CAPTIONS = (
    *("default_caption", "caption_server", "caption_model", "caption_prompt", "caption_frames"),
    *("caption_requests", "caption_seconds", "max_caption_words", "caption_columns", "caption_encoding"),
)
_GROUPS: dict[str, tuple[str, ...]] = {
    "most used": _MOST_USED,
    "clips": ("cut", "overlap", "scene_threshold", "mirror", "background", "keyframes"),
    "captions": _CAPTIONS,
    "what is left out": (
        *("min_brightness", "min_motion", "min_flow", "min_contrast", "max_duplicate_bits", "duplicates", "not_in"),
        *("min_aesthetic_score", "min_clip_score", "scorer_dir", "min_score", "max_score"),
        *("max_megapixels", "max_minutes"),
    ),
    "encoding": ("tokenizer", "channels", "text_encoder", "encodings", "store"),
    "the data set": ("val_share", "seed", "shard_size", "source_media", "update", "follow_links"),
    "large jobs": ("shard", "engine", "engine_tasks", "stages", "redo"),
}
_OF_FOLDERS = _GROUPS | {"captions": ("captions", "split", *_CAPTIONS)}
_OF_TABLES = _GROUPS | {
    "tables and downloads": ("split", "requests", "seconds", "private_addresses"),
}
Options = FolderOptions | WebDatasetOptions | TableOptions | ButterflyOptions
KINDS: dict[str, tuple[type[Options], str]] = {
    "videos": (
        FolderOptions,
        "A folder of videos, captioned by clip.txt, clip.json or metadata.csv|jsonl|parquet.",
    ),
    "images": (
        FolderOptions,
        "A folder of images, captioned by picture.txt, picture.json or metadata.csv|jsonl|parquet.",
    ),
    "webdataset": (WebDatasetOptions, "WebDataset shards of videos or images and captions."),
    "hf": (TableOptions, "A Hugging Face data set of images: a folder of Parquet files, or an id to download."),
    "butterfly": (ButterflyOptions, f"The butterflies of {BUTTERFLIES}."),
}
"""Source -> its options, and what it is."""
GROUPS: dict[type[Options], dict[str, tuple[str, ...]]] = {
    FolderOptions: _OF_FOLDERS,
    WebDatasetOptions: _GROUPS,
    TableOptions: _OF_TABLES,
    ButterflyOptions: _OF_TABLES | {"most used": ("source", "output_dir", *_MOST_USED)},
}
EXAMPLES = {
    "videos": (
        "megadit prepare videos clips data/clips --sizes 64x64 --fps 8 --num_frames 17",
        "megadit prepare videos clips data/clips --sizes 256x256,192x320 --num_frames 33,121 --captions table.csv",
    ),
    "images": ("megadit prepare images pictures data/pictures --sizes 256x256 --captions folders",),
    "webdataset": ("megadit prepare webdataset s3://BUCKET/shards data/clips --sizes 256x256 --num_frames 33",),
    "hf": ("megadit prepare hf huggan/smithsonian_butterflies_subset data/butterflies --sizes 256x256",),
    "butterfly": ("megadit prepare butterfly --sizes 256x256",),
}


def prepare_command(kind: str, argv: list[str]) -> int:
    """Run one of the sources above; after an interruption the same command continues."""
    of, description = KINDS[kind]
    about = {"groups": GROUPS[of], "examples": EXAMPLES[kind], "description": description}
    prepare(kind, read_options(of, argv, prog=f"megadit prepare {kind}", **about))
    return 0


def prepare(kind: str, options: Options, *, is_task: bool = False) -> None:
    """Prepare a source, or one shard of the work; a Ray task leaves the lock of the folder to its command."""
    common, notes = options.common, Notes(root=options.out)
    is_on_ray = choose_engine(common.engine) == "ray"
    with join_workers(Shard.parse(common.shard)) as workers, ExitStack() as held:
        if is_on_ray and not workers.is_whole:
            raise UserError("--engine ray divides the stages itself; leave out --shard")
        names = _stages(common)
        if not workers.is_whole and (alone := [name for name in names if name not in stages.SHARED_STAGES]):
            raise UserError(f"--shard divides {', '.join(stages.SHARED_STAGES)}; give --stages without {alone[0]}")
        tables = _tables(options, notes)
        if tables and common.update:
            raise UserError(
                "--update is for folders and tar files; for tables, --redo failed fetches missing rows again"
            )
        preparation = stages.Preparation(
            notes=notes,
            settings=_settings(options, notes),
            encodings=(
                read_encodings(common.encodings)
                if common.encodings
                else default_encodings(common.tokenizer, common.text_encoder)
            ),
            channels=common.channels,
            list_sources=tables.listing if tables else _listing(kind, options),
            tables=tables,
            num_workers=default_workers() if common.num_workers is None else common.num_workers,
            workers=workers,
            is_update=common.update,
            redo=None if common.redo in (None, FAILED) else _range(common.redo),
            redo_failed=common.redo == FAILED,
            caption_server=common.caption_server,
        )
        stages.check_encoders(preparation)
        settings, chosen = _fitted(preparation.settings, kind, options, notes)
        if chosen:
            stages.check_sizes(settings, preparation.encodings)
            preparation = replace(preparation, settings=settings)
        ray = start_ray() if is_on_ray else None
        if workers.is_first:
            if not is_task:
                part = "" if workers.is_whole else f".{workers.shard.number}-{workers.shard.count}"
                held.enter_context(lock_of(options.out, part))
            # only after all checks of its replacement, and only a data set (other folders have a megadit.json too)
            if common.overwrite and (notes.settings.is_file() or is_prepared(notes.root)):
                _remove(options)
            request = {
                "source": f"{kind} {options.source}",
                "encodings": [asdict(encoding) for encoding in preparation.encodings],
                "channels": common.channels,
            }
            notes.begin(preparation.settings, request, is_alone=workers.is_whole)
            if chosen:
                print(chosen, flush=True)
        workers.wait()
        is_finished = (options.out / INFO_FILE).is_file() and common.redo is None and common.stages is None
        if is_finished and not common.update:
            if workers.is_first:
                print(_already_prepared(options, _changes(preparation)))
            return
        try:
            if ray is None:
                stages.run(preparation, names)
            else:
                run_on_ray(
                    ray,
                    partial(_prepare_shard, kind, options),
                    stages=[(name, name in stages.SHARED_STAGES) for name in names],
                    num_workers=preparation.num_workers,
                    num_tasks=common.engine_tasks,
                )
        except UserError:
            if workers.is_first and workers.is_whole:
                notes.withdraw()
            raise


def _changes(preparation: stages.Preparation) -> str:
    """Describe how the source of a finished data set has changed; "" if it is gone."""
    if preparation.tables is not None or not preparation.notes.sources.is_file():
        return ""
    try:
        listing = preparation.list_sources()
    except UserError:
        return ""
    shorten_captions(listing, preparation.settings.max_caption_words)
    return changes(map(source_from_json, read_lines(preparation.notes.sources)), listing.sources)


def _already_prepared(options: Options, found: str) -> str:
    if not found:
        return f"{options.out} is already prepared; nothing to do (--overwrite replaces it)"
    return (
        f"{options.out} is already prepared, and its source has changed since: {found}; --update prepares the "
        "difference, --overwrite everything"
    )


def _prepare_shard(kind: str, options: Options, stage: str, shard: str) -> None:
    common = replace(options.common, stages=stage, shard=shard, engine="none", overwrite=False)
    prepare(kind, replace(options, common=common), is_task=True)


def _remove(options: Options) -> None:
    """Remove the data set to start anew.

    Raises:
        UserError: if the source is missing, or lies in the data set's folder.
    """
    if not isinstance(options, TableOptions | ButterflyOptions) and not is_url(options.source):
        source, out = Path(options.source).resolve(), options.out.resolve()
        if not source.exists():
            raise UserError(f"{options.source} does not exist; {options.out} is left as it is")
        if source.is_relative_to(out):
            raise UserError(f"--overwrite would remove {options.source}, which lies in {options.out}; give another OUT")
    shutil.rmtree(options.out)


def _settings(options: Options, notes: Notes) -> Settings:
    """Settings with the given sizes, or else the default size."""
    common, sizes = options.common, _named_sizes(options.common, notes) or ((USUAL_SIDE, USUAL_SIDE),)
    lengths = {_whole("num_frames", part) for part in common.num_frames.split(",")}
    return replace(common.settings, sizes=sizes, num_frames=tuple(sorted(lengths)))


def _named_sizes(common: PrepareOptions, notes: Notes) -> tuple[tuple[int, int], ...]:
    """Sizes of the options, or else those recorded in the data set; () if there are none."""
    if common.sizes:
        return _sizes(common.sizes)
    if common.height or common.width:
        return ((common.height or common.width, common.width or common.height),)
    if notes.settings.is_file() and not common.overwrite:
        return tuple(map(tuple, read_json(notes.settings)["settings"]["sizes"]))
    return ()


def _fitted(settings: Settings, kind: str, options: Options, notes: Notes) -> tuple[Settings, str]:
    """Settings with the size that most sources fill, if none is given, and a line that says so."""
    if not isinstance(options, FolderOptions) or _named_sizes(options.common, notes):
        return settings, ""
    side = side_filled(summarize_sources(_listing(kind, options)().sources)[0])
    chosen = f"size of samples: {side}x{side}, which nine of ten {kind} fill; --size and --sizes choose others"
    return replace(settings, sizes=((side, side),)), chosen


def _listing(kind: str, options: FolderOptions | WebDatasetOptions) -> Callable[[], Listing]:
    if isinstance(options, FolderOptions):
        return partial(
            list_folder,
            options.source,
            "video" if kind == "videos" else "image",
            options.captions,
            reading=options.reading,
            split=options.split,
            without=options.out,
        )
    return partial(list_webdataset, options.source, reading=options.reading)


def _tables(options: Options, notes: Notes) -> Tables | None:
    if not isinstance(options, TableOptions | ButterflyOptions):
        return None
    return Tables(
        root=options.source,
        fetched=notes.fetched,
        split=options.split,
        reading=options.reading,
        names_are_captions=isinstance(options, ButterflyOptions),
        downloads=options.downloads,
    )


def _stages(options: PrepareOptions) -> list[str]:
    if options.stages is None:
        return ["encode", "index"] if options.redo not in (None, FAILED) else list(stages.STAGES)
    names = options.stages.split(",")
    return [choose_one(name, stages.STAGES, f"--stages: unknown stage {name!r}") for name in names]


def _range(text: str) -> range:
    first, colon, last = text.partition(":")
    start = _whole("redo", first)
    return range(start, _whole("redo", last) if colon else start + 1)


def _sizes(text: str) -> tuple[tuple[int, int], ...]:
    sizes = []
    for part in text.split(","):
        if not (sides := SIDES.fullmatch(part)):
            raise UserError(f"--sizes: {part!r} is no size; write heights and widths such as 256x256,192x320")
        sizes.append(tuple(map(int, sides.groups())))
    return tuple(sorted(set(sizes)))


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"--{name}: {text!r} is not a whole number") from None
