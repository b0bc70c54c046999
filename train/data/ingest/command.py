"""`megadit prepare videos|images|webdataset|hf|butterfly SRC OUT`: its options."""

import shutil
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

from megadit.models.shared.command import CommandParser
from megadit.models.shared.errors import UserError, choose_one
from megadit.train.data.dataset_info import INFO_FILE
from megadit.train.data.ingest import stages
from megadit.train.data.ingest.encodings import default_encodings, read_encodings
from megadit.train.data.ingest.plan import CUTS, Notes, Settings
from megadit.train.data.ingest.pool import default_workers
from megadit.train.data.ingest.sources import Listing, list_folder, list_tables, list_webdataset
from megadit.train.data.ingest.team import join_team
from megadit.train.data.writer import is_prepared

BUTTERFLIES = "huggan/smithsonian_butterflies_subset"
DESCRIPTIONS = {
    "videos": "A folder of videos, captioned by clip.txt, clip.json or metadata.csv|jsonl|parquet.",
    "images": "A folder of images, captioned by picture.txt, picture.json or metadata.csv|jsonl|parquet.",
    "webdataset": "WebDataset shards of videos or images and captions.",
    "hf": "A Hugging Face data set of images: a folder of Parquet files, or an id to download.",
    "butterfly": f"The butterflies of {BUTTERFLIES}.",
}


def prepare_command(kind: str, argv: list[str]) -> int:
    """Runs one of the sources above; a second run goes on where the first was stopped."""
    options = _parse(kind, argv)
    notes = Notes(root=options.out)
    with join_team() as team:
        preparation = stages.Preparation(
            notes=notes,
            settings=_settings(options),
            encodings=(
                read_encodings(options.encodings)
                if options.encodings
                else default_encodings(options.tokenizer, options.text_encoder)
            ),
            channels=options.channels,
            list_sources=_listing(kind, options, notes),
            num_workers=options.num_workers,
            team=team,
            redo=_range(options.redo),
        )
        stages.check_sizes(preparation)
        if team.is_first:
            if options.overwrite and _is_ours(notes):
                shutil.rmtree(options.out)  # only now that nothing is wrong with what is to take its place
            request = {
                "source": f"{kind} {options.source}",
                "encodings": [_plain(encoding) for encoding in preparation.encodings],
                "channels": options.channels,
            }
            notes.begin(preparation.settings, request)
        team.wait()
        names = _stages(options)
        if (options.out / INFO_FILE).is_file() and options.redo is None and options.stages is None:
            if team.is_first:
                print(f"{options.out} is already prepared; nothing to do (--overwrite replaces it)")
            return 0
        stages.run(preparation, names)
    return 0


def _is_ours(notes: Notes) -> bool:
    """Whether a data set lies there, or a part of one; other folders of ours have a megadit.json too."""
    return notes.settings.is_file() or is_prepared(notes.root)


def commands() -> dict[str, Callable[[list[str]], int]]:
    """Source -> its command."""
    return {kind: partial(prepare_command, kind) for kind in DESCRIPTIONS}


def _parse(kind: str, argv: list[str]) -> Namespace:
    options = _parser(kind).parse_args(argv)
    options.out = getattr(options, "folder", None) or options.out
    return options


def _parser(kind: str) -> CommandParser:
    parser = CommandParser(prog=f"megadit prepare {kind}", description=DESCRIPTIONS[kind])
    default = Settings(sizes=((256, 256),))
    if kind == "butterfly":
        parser.set_defaults(source=BUTTERFLIES)
        parser.add_argument("--source", help=f"a folder with the Parquet files (default: download {BUTTERFLIES})")
        parser.add_argument("--output_dir", "--out", dest="out", type=Path, default=Path("butterfly_webdataset"))
        parser.add_argument("folder", type=Path, metavar="OUT", nargs="?", help="the same as --output_dir")
    else:
        parser.add_argument(
            "source", metavar="SRC", help="where the data are: a folder, or a URL such as s3://BUCKET/PATH"
        )
        parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument("--height", type=int, default=256, help="of samples, in pixels (default: 256)")
    parser.add_argument("--width", type=int, default=256, help="of samples, in pixels (default: 256)")
    parser.add_argument("--sizes", help="buckets in place of one size: 256x256,192x320,320x192 (height x width)")
    parser.add_argument("--num_frames", default="33", help="of clips; several: 17,33,121 (default: 33)")
    parser.add_argument("--fps", type=float, default=default.fps, help="frames per second (default: 24)")
    parser.add_argument("--cut", choices=CUTS, default=default.cut, help="where clips end (default: scene)")
    for name, text in (
        ("scene_threshold", "change of brightness (0..255) that ends a scene"),
        ("min_brightness", "darker clips are left out as black"),
        ("min_motion", "stiller clips are left out as static"),
        ("min_contrast", "plainer images are left out as blank"),
        ("max_duplicate_bits", "of 192: clips that differ in no more are duplicates; -1 keeps all"),
        ("max_megapixels", "larger pictures are left out"),
        ("max_minutes", "longer videos are left out"),
        ("shard_size", "samples of a shard, at most"),
        ("val_share", "share of the sources held out for validation"),
        ("seed", "decides order and splits"),
    ):
        value = getattr(default, name)
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"{text} (default: {value})")
    parser.add_argument("--min_aesthetic_score", type=float, help="sources with a lower one, or none, are left out")
    parser.add_argument("--store", choices=("latents", "raw"), default="latents", help="encode now, or while training")
    parser.add_argument(
        "--tokenizer",
        "--tokenizer_cache_dir",
        default="haar",
        help="folder of a tokenizer, or haar: fitted to the clips",
    )
    parser.add_argument("--channels", type=int, default=32, help="latent channels of a fitted tokenizer (default: 32)")
    parser.add_argument(
        "--text_encoder", "--t5_cache_dir", default="hashed_words", help="folder of a text encoder, or hashed_words"
    )
    parser.add_argument("--encodings", type=Path, help="YAML list of encodings in place of these two")
    parser.add_argument("--num_workers", type=int, default=default_workers(), help="decoding processes of a rank")
    parser.add_argument("--stages", help=f"only these of {','.join(stages.STAGES)}")
    parser.add_argument("--redo", help="shards to make again: 7, or 3:8 for 3 to 7")
    parser.add_argument("--overwrite", action="store_true", help="start anew")
    if kind in ("videos", "images"):
        parser.add_argument("--captions", help="table (.csv, .jsonl, .parquet) of files and captions")
    if kind in ("hf", "butterfly"):
        parser.add_argument("--split", default="train", help="of the data set (default: train)")
        parser.add_argument("--caption_column", help="column of captions (default: caption, text, prompt or name)")
    return parser


def _settings(options: Namespace) -> Settings:
    names = [name for name in Settings.__dataclass_fields__ if name not in ("sizes", "num_frames")]
    return Settings(
        sizes=_sizes(options.sizes) if options.sizes else ((options.height, options.width),),
        num_frames=tuple(sorted({_whole("num_frames", part) for part in options.num_frames.split(",")})),
        **{name: getattr(options, name) for name in names},
    )


def _listing(kind: str, options: Namespace, notes: Notes) -> Callable[[], Listing]:
    source = options.source
    if kind in ("videos", "images"):
        return partial(list_folder, source, "video" if kind == "videos" else "image", options.captions)
    if kind == "webdataset":
        return partial(list_webdataset, source)
    return partial(list_tables, source, notes.fetched, split=options.split, caption_column=options.caption_column)


def _plain(encoding) -> dict[str, object]:
    return {name: getattr(encoding, name) for name in encoding.__dataclass_fields__}


def _stages(options: Namespace) -> list[str]:
    if options.stages is None:
        return ["encode", "index"] if options.redo else list(stages.STAGES)
    names = options.stages.split(",")
    return [choose_one(name, stages.STAGES, f"--stages: unknown stage {name!r}") for name in names]


def _range(text: str | None) -> range | None:
    if text is None:
        return None
    first, colon, last = text.partition(":")
    start = _whole("redo", first)
    return range(start, _whole("redo", last) if colon else start + 1)


def _sizes(text: str) -> tuple[tuple[int, int], ...]:
    sizes = []
    for part in text.split(","):
        height, x, width = part.partition("x")
        if not x:
            raise UserError(f"--sizes: {part!r} is no size; write heights and widths such as 256x256,192x320")
        sizes.append((_whole("sizes", height), _whole("sizes", width)))
    return tuple(sorted(set(sizes)))


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"--{name}: {text!r} is not a whole number") from None
