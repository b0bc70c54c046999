"""`megadit prepare edits` and `megadit prepare preferences`: pairs of clips or images with a text.

    megadit prepare edits pairs.csv data/edits --size 256 --tokenizer FOLDER --text_encoder FOLDER
    megadit prepare edits clip-filtered-dataset data/edits --size 256 ...      # InstructPix2Pix as published
    megadit prepare preferences liked.csv data/liked --size 256 --tokenizer FOLDER --text_encoder FOLDER

A table (CSV, JSONL, Parquet) has both files and the text in each row. Edits: the clip before and after, and the
instruction; InstructPix2Pix's folders (arXiv 2211.09800) hold `prompt.json` and pairs `SEED_0.jpg`, `SEED_1.jpg`. Train
on them with `data.conditioning=[edit:1.0]`. Preferences: the chosen and the rejected clip, or both and the choice; and
their prompt. Train on them with `train.distill.objective=dpo`.

Both clips are cropped alike and cut to equal lengths. Under torchrun the shards are divided among the ranks. After an
interruption the same command continues, and writes the same bytes.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange

from megadit.infer.decoding.rules import UnusableSourceError
from megadit.models.shared.cli.options import read_options
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import inner_path, read_json
from megadit.models.shared.progress import Progress
from megadit.models.text_encoders import TextEncoder, load_text_encoder
from megadit.models.tokenizers import VideoTokenizer, load_tokenizer
from megadit.train.data.ingest.clips.decode import fit_image, read_frames, read_image, read_timeline
from megadit.train.data.ingest.plan import Kind, Settings, Source
from megadit.train.data.ingest.sources.rows import read_table
from megadit.train.data.ingest.workers import Shard, Workers, join_workers
from megadit.train.data.prepare.requests import begin, count_samples, missing_shards
from megadit.train.data.writer import describe_dataset, is_prepared, sample_members, write_encoders, write_members

SHARD_SIZE = 64
"""Pairs per shard, which is the unit of work and of progress."""
IMAGES = (".jpg", ".jpeg", ".png", ".webp")


@dataclass(frozen=True, kw_only=True, slots=True)
class PairKind:
    """Meaning of the two clips of a pair."""

    name: str
    description: str
    columns: dict[str, tuple[str, ...]]
    """"other", "latent" and "text": possible names of the column; the first that exists is read."""
    other: str
    """Tensor of the other clip's latents in a sample."""
    equal: str
    """Reason to leave out a pair of equal clips."""
    next: str
    has_folders: bool = False
    """Whether folders in InstructPix2Pix's layout hold them, too."""
    has_choice: bool = False
    """Whether a row may name both clips (`CHOICES`) and the choice."""


KINDS = {
    "edits": PairKind(
        name="edit",
        description="Clips or images before and after edits, with the instruction that leads from one to the other.",
        columns={
            "other": ("before", "source", "input_image", "original_image", "input"),
            "latent": ("after", "target", "edited_image", "output_image", "output"),
            "text": ("instruction", "edit", "edit_prompt", "edit_instruction"),
        },
        other="reference",
        equal="nothing was edited",
        next="train on it with data.conditioning=[edit:1.0] and model.conditioning_sigma=0.02",
        has_folders=True,
    ),
    "preferences": PairKind(
        name="preference",
        description="Pairs of clips or images of one prompt, of which one was liked better.",
        columns={
            "other": ("rejected", "loser", "video_lose"),
            "latent": ("chosen", "winner", "video_win"),
            "text": ("prompt", "caption", "text"),
        },
        other="rejected",
        equal="both are equal",
        next="train on it with train.distill.objective=dpo and train.distill.teacher=BUNDLE",
        has_choice=True,
    ),
}
"""Source of `megadit prepare` -> kind of pairs."""
CHOICES = ("video_a", "video_b")
"""Columns of two clips, one of which the column `choice` names: a or b."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairsOptions:
    source: Path = setting(
        help="table of pairs; for edits also a folder in InstructPix2Pix's layout", positional=True, metavar="SOURCE"
    )
    out: Path = setting(help="folder to write", positional=True, metavar="OUT")
    tokenizer: Path = setting(help="folder of the video tokenizer, or a bundle's tokenizer/", metavar="PATH")
    text_encoder: Path = setting(help="folder of the text encoder, or a bundle's text_encoder/", metavar="PATH")
    size: tuple[int, int] = setting((256, 256), "height and width in pixels (default: {default})", nargs=2)
    num_frames: int = setting(
        33, "most frames of a clip; clips are cut to lengths that the tokenizer accepts (default: {default})", low=1
    )
    fps: float = setting(24.0, "frames per second of clips (default: {default})", above=0)
    val_share: float = setting(0.02, "share of the pairs held out for validation (default: {default})", low=0, below=1)
    overwrite: bool = setting(False, "replace a finished folder")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two clips, or images, and their text."""

    key: str
    other: Path
    latent: Path
    text: str

    @property
    def media(self) -> Kind:
        return "image" if self.latent.suffix.lower() in IMAGES else "video"


def command(source: str, argv: list[str]) -> int:
    """Runs `megadit prepare` for one of `KINDS`."""
    kind = KINDS[source]
    options = read_options(
        PairsOptions,
        argv,
        prog=f"megadit prepare {source}",
        description=kind.description,
    )
    tokenizer, text_encoder = load_tokenizer(options.tokenizer), load_text_encoder(options.text_encoder)
    tokenizer.latent_shape(1, *options.size)  # raises for an unsupported size before anything is written
    pairs = list(list_pairs(options.source, kind))
    if not pairs:
        columns = ", ".join(each[0] for each in kind.columns.values())
        raise UserError(f"{options.source} holds no pair: a table needs columns {columns}")
    splits = {"val": [], "train": []}
    for pair in sorted(pairs, key=lambda pair: pair.key):
        splits["val" if int(pair.key, 16) / 2**64 < options.val_share else "train"].append(pair)
    if not splits["train"]:
        splits = {"train": splits["val"], "val": []}
    with join_workers(Shard()) as workers:
        if workers.is_first:
            request = _request(options, pairs, tokenizer, text_encoder)
            begin(options.out, f"{source}.json", request, overwrite=options.overwrite)
        workers.wait()
        if not is_prepared(options.out):
            refused = _write(options, kind, splits, tokenizer, text_encoder, workers)
            workers.wait()
            for reason, count in refused.most_common():
                print(f"left out {count} pairs: {reason}")
            if workers.is_first:
                counts = {split: count_samples(options.out, split) for split in ("train", "val")}
                if not counts["train"]:
                    raise UserError(f"{options.source}: no pair can be used; see above")
                write_encoders(options.out, tokenizer, text_encoder)
                describe_dataset(options.out, tokenizer, text_encoder, counts)
        if workers.is_first:
            print(f"{options.out}: {kind.next}")
    return 0


def _request(
    options: PairsOptions, pairs: list[Pair], tokenizer: VideoTokenizer, text_encoder: TextEncoder
) -> dict[str, Any]:
    named = "\n".join(sorted(f"{pair.key} {pair.text}" for pair in pairs))
    return {
        "pairs": hashlib.sha256(named.encode()).hexdigest(),
        "tokenizer": tokenizer.fingerprint(),
        "text_encoder": text_encoder.fingerprint(),
        "size": list(options.size),
        "num_frames": options.num_frames,
        "fps": options.fps,
        "val_share": options.val_share,
    }


# ------------------------------------------------------------------------------------------------------------- pairs


def list_pairs(source: Path, kind: PairKind) -> Iterator[Pair]:
    """List the pairs of a table, or of a folder in InstructPix2Pix's layout.

    Raises:
        UserError: if it is neither, a row lacks a column, or a path is outside the folder.
    """
    if source.is_dir() and kind.has_folders:
        yield from _published(source)
        return
    if not source.is_file():
        raise UserError(f"{source} is not there: give a table of pairs" + ", or a folder" * kind.has_folders)
    for number, row in enumerate(read_table(str(source)), start=1):
        where = f"row {number} of {source}"
        row = _with_choice(row, where) if kind.has_choice else row
        found = {name: next((row[column] for column in columns if row.get(column)), None)
                 for name, columns in kind.columns.items()}  # fmt: skip
        if missing := [kind.columns[name] for name, value in found.items() if not isinstance(value, str)]:
            raise UserError(f"{where} has no {missing[0][0]}: name the column one of {', '.join(missing[0])}")
        paths = [inner_path(source.parent, found[name], follow_links=True) for name in ("other", "latent")]
        yield _pair(source.parent, *paths, found["text"])


def _with_choice(row: dict[str, Any], where: str) -> dict[str, Any]:
    """A row with `chosen` and `rejected` in place of two clips and the choice.

    Raises:
        UserError: for a choice that is neither.
    """
    if not all(row.get(name) for name in CHOICES):
        return row
    names = {name[-1]: name for name in CHOICES}
    chosen = names.get(str(row.get("choice")).lower().removeprefix("video_"))
    if chosen is None:
        raise UserError(f"{where}: choice={row.get('choice')!r} is neither a nor b")
    rejected = next(name for name in CHOICES if name != chosen)
    return row | {"chosen": row[chosen], "rejected": row[rejected]}


def _published(folder: Path) -> Iterator[Pair]:
    for prompt_file in sorted(folder.glob("*/prompt.json")):
        prompt = read_json(prompt_file)
        instruction = prompt.get("edit") if isinstance(prompt, dict) else None
        if not isinstance(instruction, str):
            raise UserError(f'{prompt_file} has no "edit"')
        for before in sorted(prompt_file.parent.glob("*_0.*")):
            after = before.with_name(before.name.replace("_0.", "_1."))
            if after.is_file():
                yield _pair(folder, before, after, instruction)


def _pair(root: Path, other: Path, latent: Path, text: str) -> Pair:
    name = "\n".join(path.relative_to(root).as_posix() for path in (other, latent)) + f"\n{text}"
    key = hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).hexdigest()
    return Pair(key=key, other=other, latent=latent, text=text)


# ----------------------------------------------------------------------------------------------------------- writing


def _write(
    options: PairsOptions,
    kind: PairKind,
    splits: dict[str, list[Pair]],
    tokenizer: VideoTokenizer,
    text_encoder: TextEncoder,
    workers: Workers,
) -> Counter[str]:
    """Write this rank's missing shards; return the reasons for which pairs were left out."""
    refused: Counter[str] = Counter()
    todo = {
        path: [pairs[number] for number in numbers]
        for split, pairs in splits.items()
        for path, numbers in missing_shards(options.out, split, len(pairs), SHARD_SIZE, workers).items()
    }
    with Progress(sum(map(len, todo.values())), "encoding pairs", enabled=workers.is_first) as bar:
        for path, pairs in todo.items():
            write_members(path, _members(pairs, options, kind, tokenizer, text_encoder, refused, bar))
    return refused


def _members(
    pairs: Iterable[Pair],
    options: PairsOptions,
    kind: PairKind,
    tokenizer: VideoTokenizer,
    text_encoder: TextEncoder,
    refused: Counter[str],
    bar: Progress,
) -> Iterator[tuple[str, bytes]]:
    for pair in pairs:
        try:
            other, latent, fps = _decode(pair, options, tokenizer)
            if np.array_equal(other, latent):  # a network would learn to ignore the text, or nothing
                raise UnusableSourceError(kind.equal, pair.text)
        except UnusableSourceError as error:
            refused[error.reason] += 1
        else:
            text = text_encoder.encode([pair.text])
            tensors = {
                "latent": _encode(latent, tokenizer),
                kind.other: _encode(other, tokenizer),
                "text": text.features_BLE[0, : text.length_B[0]].cpu().half(),
            }
            sizes = dict(zip(("num_frames", "height", "width"), latent.shape, strict=False))
            yield from sample_members(f"{kind.name}-{pair.key}", {"caption": pair.text, **sizes, "fps": fps}, tensors)
        bar.advance()


def _decode(pair: Pair, options: PairsOptions, tokenizer: VideoTokenizer) -> tuple[np.ndarray, np.ndarray, float]:
    """Both clips, uint8 THWC, equally long, and their frames per second (0 for images)."""
    settings = replace(Settings(), fps=options.fps)
    files = [Source(name=path.name, kind=pair.media, path=str(path)) for path in (pair.other, pair.latent)]
    if pair.media == "image":
        other, latent = (fit_image(read_image(file, settings), *options.size)[None] for file in files)
        return other, latent, 0.0
    lines = [read_timeline(file, settings) for file in files]
    asked = min(options.num_frames, *(len(line.pts) for line in lines))
    count = tokenizer.frames_covering(asked)
    while count > asked:
        count -= tokenizer.temporal_compression
    if count < 1:
        raise UnusableSourceError("too short", f"{asked} frames")
    other, latent = (
        read_frames(file, settings, tuple(line.pts[:count]), *options.size, is_regular=line.is_regular)
        for file, line in zip(files, lines, strict=True)
    )
    return other, latent, min(line.fps for line in lines)


@torch.no_grad()
def _encode(frames_THWC: np.ndarray, tokenizer: VideoTokenizer) -> torch.Tensor:
    video = torch.from_numpy(frames_THWC).float() / 127.5 - 1
    return tokenizer.encode(rearrange(video, "T H W c -> 1 c T H W"))[0].cpu().half()
