"""`megadit prepare nemo|bridge|automodel SRC OUT`: encoded samples of other programs, without executing their pickles.

    nemo, bridge   tar files of NeMo, DFM and Megatron-Bridge: `<key>.pth` (latent, [C, T, H, W] or [1, C, T, H, W]),
                   `<key>.pickle` (text features, [L, E], [1, L, E] or a list of one) and `<key>.json`
    automodel      AutoModel's caches, a file `<hash>.meta` or `.pt` for each sample: a dictionary with `video_latents`
                   ([1, C, T, H, W]), `text_embeddings` ([1, L, E]) and `prompt`, of `torch.save` or, as
                   Megatron-Bridge writes them for AutoModel, pickled

Pickles are programs; the readers here accept only the few names that tensors and arrays need.

Shapes: C latent channels, T/H/W latent frames, height, width, L text tokens, E text feature width.
"""

import io
import logging
import pickle
import tarfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megadit.models.shared.captions import captions_in
from megadit.models.shared.cli.options import read_options
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.documents import check_pickle, parse_json
from megadit.models.shared.errors import UserError
from megadit.models.shared.outside import files_under
from megadit.models.shared.progress import Progress
from megadit.models.shared.tar_files import UntrustedTarFile
from megadit.models.storage.tensor_source import load_pickled
from megadit.models.text_encoders import load_text_encoder
from megadit.models.tokenizers import load_tokenizer
from megadit.train.data.writer import DatasetWriter, is_done

logger = logging.getLogger(__name__)

SUFFIXES = ("pth", "pickle", "json")
CACHES = (".meta", ".pt")
MAX_MEMBER_BYTES = 1 << 31
IMAGE_FPS = 0.0
USUAL_FPS = 24.0
FPS_OF_LATENTS = {("wan", 8): 16.0}
"""(Kind, spatial compression) of an autoencoder -> frame rate of the networks that are trained on it, if not the usual
one: Wan 2.1's, which Wan 2.2 14B and Cosmos Predict2 share."""


class UnreadableTensorError(ValueError):
    """A member that holds something else than tensors, or nothing that can be read."""


def _array_of(content: Any, dtype: np.dtype, shape: tuple[int, ...], order: str) -> np.ndarray:
    return np.frombuffer(content, dtype=dtype).reshape(shape, order=order)


class _EmptyArray(np.ndarray):
    """Empty array, before its pickled state sets shape and data; numpy's own would allocate any shape."""

    def __new__(cls, *_: Any) -> "_EmptyArray":
        return super().__new__(cls, (0,), np.uint8)


class _TensorUnpickler(pickle.Unpickler):
    """Builds tensors and arrays, and lists, tuples, dictionaries and numbers around them."""

    _ALLOWED = {
        ("collections", "OrderedDict"): OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
        ("numpy", "ndarray"): _EmptyArray,
        ("numpy", "dtype"): np.dtype,
        **{(f"numpy.{core}.numeric", "_frombuffer"): _array_of for core in ("core", "_core")},
        ("_codecs", "encode"): lambda text, encoding: text.encode("latin1"),
        **{(f"numpy.{core}.multiarray", "_reconstruct"): _EmptyArray for core in ("core", "_core")},
        **{
            ("torch", name): getattr(torch, name)
            for name in ("float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool")
        },
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return read_pth
        if (module, name) not in self._ALLOWED:
            raise UnreadableTensorError(f"it would call {module}.{name}")
        return self._ALLOWED[module, name]


def read_pickle(content: bytes) -> Any:
    """Return the tensors and arrays of a pickle.

    Raises:
        UnreadableTensorError: for any other pickle; nothing that it names was imported or called.
    """
    try:
        check_pickle(content, "it")
        return _TensorUnpickler(io.BytesIO(content)).load()
    except UnreadableTensorError:
        raise
    except Exception as error:  # a pickle is a program, and fails like one
        raise UnreadableTensorError(f"{type(error).__name__}: {error}") from None


def read_pth(content: bytes) -> Any:
    """Return the contents of a file of `torch.save`, tensors only.

    Raises:
        UnreadableTensorError: for anything else.
    """
    try:
        return load_pickled(io.BytesIO(content), "it")
    except UserError as error:
        raise UnreadableTensorError(str(error)) from None


def as_tensor(value: Any, num_dimensions: int) -> Tensor:
    """The tensor in `value`, of any shape, leading dimensions of one element removed.

    Raises:
        UnreadableTensorError: if it is none, or has another number of dimensions.
    """
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiu":
        value = torch.from_numpy(value.copy())
    if isinstance(value, Tensor) and value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise UnreadableTensorError(f"its shape is {list(value.shape)}, larger than its data")
    if not isinstance(value, Tensor):
        raise UnreadableTensorError(f"it holds a {type(value).__name__}, not a tensor")
    while value.ndim > num_dimensions and value.shape[0] == 1:
        value = value[0]
    if value.ndim != num_dimensions:
        raise UnreadableTensorError(f"its shape is {list(value.shape)}, not one of {num_dimensions} dimensions")
    return value


def read_sample(members: dict[str, bytes]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """(latent CTHW, text LE without the rows of zeros at its end, description) of a sample.

    Raises:
        UnreadableTensorError: naming the member.
    """
    try:
        description = parse_json(members["json"], "json")
        if not isinstance(description, dict):
            raise UnreadableTensorError("json: not a dictionary")
        latent_CTHW = as_tensor(read_pth(members["pth"]), 4)
        text_LE = as_tensor(read_pickle(members["pickle"]), 2)
    except KeyError as error:
        raise UnreadableTensorError(f"no {error}") from None
    except ValueError as error:
        raise UnreadableTensorError(str(error)) from None
    return latent_CTHW, _without_padding(text_LE), description


def read_cache(members: dict[str, bytes]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """(latent CTHW, text LE without the rows of zeros at its end, description) of a file of AutoModel's cache.

    Raises:
        UnreadableTensorError: naming what it lacks.
    """
    content = members["cache"]
    found = read_pth(content) if content.startswith(b"PK") else read_pickle(content)
    if not isinstance(found, dict):
        raise UnreadableTensorError("not a dictionary")
    missing = [name for name in ("video_latents", "text_embeddings") if found.get(name) is None]
    if missing:
        raise UnreadableTensorError(f"no {' and no '.join(missing)}")
    latent_CTHW, text_LE = as_tensor(found["video_latents"], 4), as_tensor(found["text_embeddings"], 2)
    metadata = found.get("metadata") if isinstance(found.get("metadata"), dict) else {}
    described = {**metadata, "prompt": found["prompt"]} if "prompt" in found else metadata
    plain = {name: value for name, value in described.items() if isinstance(value, str | int | float)}
    return latent_CTHW, _without_padding(text_LE), plain


def _without_padding(text_LE: Tensor) -> Tensor:
    """Texts are padded with zeros (DFM's to 512, AutoModel's to 226) and have no lengths; no token's are all zeros."""
    used = text_LE.abs().amax(dim=1).nonzero().flatten()
    return text_LE[: int(used[-1]) + 1] if len(used) else text_LE[:0]


def iter_samples(root: Path, refuse: Any) -> Iterator[tuple[str, dict[str, bytes]]]:
    """(shard and key, members) of all samples; `refuse` is called with other members."""
    shards = [path for path in files_under(root) if path.suffix == ".tar"]
    if not shards:
        raise UserError(f"{root} holds no tar files")
    for shard in shards:
        current, members = None, {}
        place = shard.relative_to(root).with_suffix("").as_posix()  # folders may hold shards of the same name
        try:
            with UntrustedTarFile.open(shard, "r:") as tar:
                for member in tar:
                    key, _, suffix = member.name.rpartition(".")
                    key = key.rstrip(".")  # NeMo's keys end in a dot
                    if not member.isfile() or suffix not in SUFFIXES or member.size > MAX_MEMBER_BYTES:
                        refuse(f"{shard.name}/{member.name}", "not a member of a sample")
                        continue
                    if key != current and members:
                        yield f"{place}/{current}", members
                        members = {}
                    current = key
                    members[suffix] = tar.extractfile(member).read()
        except (tarfile.TarError, OSError, EOFError) as error:
            refuse(shard.name, f"broken tar file: {error}")
        if members:
            yield f"{place}/{current}", members


def iter_caches(root: Path, refuse: Any) -> Iterator[tuple[str, dict[str, bytes]]]:
    """(path without suffix, its bytes) of each file of AutoModel's cache, which says all that `metadata.json` does."""
    caches = [path for path in files_under(root) if path.suffix in CACHES]
    if not caches:
        raise UserError(f"{root} holds no files {' or '.join(CACHES)}")
    for path in caches:
        name = path.relative_to(root).with_suffix("").as_posix()
        if path.stat().st_size > MAX_MEMBER_BYTES:
            refuse(name, "too large")
        else:
            yield name, {"cache": path.read_bytes()}


FORMATS = {
    "nemo": (iter_samples, read_sample),
    "bridge": (iter_samples, read_sample),
    "automodel": (iter_caches, read_cache),
}
"""Source of `megadit prepare` -> how to list its samples, and to read one."""


def usual_fps(tokenizer: Any) -> float:
    """The frame rate of the videos that networks of this tokenizer's latents are trained on."""
    kind = getattr(tokenizer, "kind", None)
    return FPS_OF_LATENTS.get((getattr(kind, "name", None), tokenizer.spatial_compression), USUAL_FPS)


def _as_attended(text_LE: Tensor, text_encoder: Any) -> Tensor:
    """The text with the padding of zeros that a network attends to, if the encoder pads (Wan)."""
    if getattr(text_encoder, "text_padding", "none") != "zeros":
        return text_LE
    return F.pad(text_LE[: text_encoder.max_length], (0, 0, 0, max(0, text_encoder.max_length - len(text_LE))))


def convert(
    source: str,
    root: Path,
    out: Path,
    *,
    tokenizer: Any,
    text_encoder: Any,
    fps: float,
    val_every: int,
    shard_size: int,
) -> dict[str, int]:
    """Writes the data set and returns the counts of what was left out, by reason."""
    refused: Counter[str] = Counter()
    list_samples, read = FORMATS[source]

    def refuse(name: str, reason: str) -> None:
        refused[reason] += 1
        logger.warning("left out %s: %s", name, reason)

    with DatasetWriter(out, tokenizer=tokenizer, text_encoder=text_encoder, shard_size=shard_size) as writer:
        with Progress(0, "converting") as bar:
            for number, (name, members) in enumerate(list_samples(root, refuse)):
                bar.total = number + 1
                bar.advance()
                try:
                    latent_CTHW, text_LE, description = read(members)
                    frames, height, width = latent_CTHW.shape[1:]
                    writer.add(
                        "val" if val_every and number % val_every == val_every - 1 else "train",
                        name.replace("/", "-").replace(".", "-").replace("__", "-"),
                        latent_CTHW=latent_CTHW.half(),
                        text_LE=_as_attended(text_LE, text_encoder).half(),
                        caption=next(iter(captions_in(description) or ()), ""),
                        num_frames=1 + (frames - 1) * tokenizer.temporal_compression,
                        height=height * tokenizer.spatial_compression,
                        width=width * tokenizer.spatial_compression,
                        fps=_fps(description, fps) if frames > 1 else IMAGE_FPS,
                        aesthetic_score=_number(description.get("aesthetic_score")),
                    )
                except UserError as error:  # of another size or width than the encoders', or NaN
                    refuse(name, "unfit: " + str(error).replace(name, "it"))
                except ValueError as error:  # no tensor, or a caption that is no text
                    refuse(name, str(error))
    return dict(refused)


def _fps(description: dict[str, Any], otherwise: float) -> float:
    return _number(description.get("framerate", description.get("fps"))) or otherwise


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportOptions:
    source: Path = setting(
        help="folder of tar files of NeMo, DFM or Megatron-Bridge, or of AutoModel's .meta files",
        positional=True,
        metavar="SRC",
    )
    out: Path = setting(help="folder to write", positional=True, metavar="OUT")
    tokenizer: str = setting(help="folder of the tokenizer that made the latents")
    text_encoder: str = setting(help="folder of the text encoder that made the features")
    fps: float | None = setting(
        None, "frame rate of videos whose description has none (default: 24; with Wan 2.1's autoencoder 16)", above=0
    )
    val_every: int = setting(50, "hold out every N-th sample; 0: none")
    shard_size: int = setting(1000, "samples per shard (default: {default})")
    overwrite: bool = setting(False, "replace a finished folder")


def command(source: str, argv: list[str]) -> int:
    """Runs `megadit prepare` for one of `FORMATS`."""
    options = read_options(ImportOptions, argv, prog=f"megadit prepare {source}", description=__doc__.splitlines()[0])
    if not options.source.is_dir():
        raise UserError(f"{options.source} is not a folder")
    if is_done(options.out, overwrite=options.overwrite):
        return 0
    tokenizer = load_tokenizer(options.tokenizer)
    refused = convert(
        source,
        options.source,
        options.out,
        tokenizer=tokenizer,
        text_encoder=load_text_encoder(options.text_encoder),
        fps=options.fps or usual_fps(tokenizer),
        val_every=options.val_every,
        shard_size=options.shard_size,
    )
    for reason, count in sorted(refused.items(), key=lambda item: -item[1]):
        print(f"left out: {count:,} x {reason}")
    return 0
