"""Every parser of bytes that somebody else wrote: what it may answer is a value, or a `UserError`.

`make fuzz` has atheris try each (`run.py`). What has ended a parser otherwise goes to `corpus/NAME`, which
`test_corpus.py` tries again, beside changes of its own.
"""

import asyncio
import io
import json
import struct
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.itar import ITAR_SUFFIX
from megatron.energon.flavors.webdataset.structs import ShardInfo
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from megadit.infer.evaluate.videos import _members as _shard_members
from megadit.infer.inspect import dataset_sheet, files
from megadit.infer.media.untrusted import decode
from megadit.models.bundle import Bundle
from megadit.models.convert.adapters.files import open_adapter
from megadit.models.diffusion.conditioning_settings import MediaLimits
from megadit.models.diffusion.settings import check_asked
from megadit.models.shared.documents import parse_json, parse_yaml
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import MANIFEST_FILE
from megadit.models.storage.tensor_source import load_pickled, open_safetensors
from megadit.models.storage.tokenizer_file import check_tokenizer
from megadit.serve.gateway.errors import ApiError
from megadit.serve.gateway.media import values_of
from megadit.train.data.shards import SUFFIXES, ShardReader
from tests.serve.media import GIF, MP4, PNG

CORPUS = Path(__file__).parent / "corpus"
_LIMITS = MediaLimits(max_media_pixels=1 << 20, max_media_frames=64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parser:
    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    refuses: tuple[type[Exception], ...] = (UserError,)


def _tensors(header: dict) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(64)


def _of_file(read: Callable[[Path], object], name: str) -> Callable[[bytes], object]:
    """A parser of paths, of a file with these bytes."""

    def of_bytes(data: bytes) -> object:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / name).write_bytes(data)
            return read(Path(folder) / name)

    return of_bytes


def _adapter(path: Path) -> object:
    return check_asked(open_adapter(path).defaults, "it asks: ")


def _form(data: bytes) -> object:
    async def read() -> object:
        async def body():
            yield data

        headers = Headers({"content-type": "multipart/form-data; boundary=b"})
        return await values_of(await MultiPartParser(headers, body(), max_files=16, max_fields=64).parse())

    return asyncio.run(read())


def _tar(*names: str) -> bytes:
    with tarfile.open(fileobj=(file := io.BytesIO()), mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in names:
            (member := tarfile.TarInfo(name)).size = 2
            tar.addfile(member, io.BytesIO(b"{}"))
    return file.getvalue()


_SHARD = _tar("a.json", "b.json")
_INDEX = struct.pack("<3Q", 0, 1024, 2048)


def _members(path: Path) -> object:
    """Of a shard that is evaluated, described and shown."""
    described = list(files._descriptions(path.parent))
    return list(_shard_members(path, lambda key, suffix: True)), described, list(dataset_sheet._members(path))


def _samples(shard: bytes, index: bytes) -> list:
    """Of a shard that is trained on: what cannot be read is a sample that says so, `BROKEN`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.tar"
        path.write_bytes(shard)
        path.with_suffix(ITAR_SUFFIX).write_bytes(index)
        shards = [ShardInfo(name=path.name, path=EPath(str(path)), count=2)]
        reader = ShardReader(EPath(folder), shards, part_filter=SUFFIXES.__contains__)
        return [reader[number] for number in range(2)]


_LORA = {
    "__metadata__": {"megadit": json.dumps({"format_version": 1, "defaults": {"num_steps": 2}})},
    "transformer.blocks.0.attn1.to_q.lora_A.weight": {"dtype": "F32", "shape": [1, 8], "data_offsets": [0, 32]},
    "transformer.blocks.0.attn1.to_q.lora_B.weight": {"dtype": "F32", "shape": [8, 1], "data_offsets": [32, 64]},
}
_MANIFEST = {
    "format_version": 1,
    "components": {},
    "fingerprints": {},
    "defaults": {},
    "files": {"a": {"bytes": 1, "sha256": "0"}},
}
_TOKENIZER = {
    "padding": {"strategy": {"Fixed": 8}, "pad_to_multiple_of": 8},
    "normalizer": {"type": "Sequence", "normalizers": [{"content": "a"}, {"precompiled_charsmap": "AAAAAGFiAGM="}]},
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a|b)+ ?[a-c]*"}},
    "post_processor": {"single": [{}], "pair": [], "special_tokens": {"a": {"ids": [1]}}},
}
_PART = b'--b\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n' + PNG + b"\r\n--b--\r\n"

PARSERS = {
    "safetensors": Parser(read=_of_file(open_safetensors, "a.safetensors"), seeds=(_tensors(_LORA),)),
    "adapter": Parser(read=_of_file(_adapter, "a.safetensors"), seeds=(_tensors(_LORA),)),
    "json": Parser(
        read=lambda data: parse_json(data, "it"), seeds=(b'{"fps": 8.0, "caption": "a\\u00e9", "n": [1, null]}',)
    ),
    "yaml": Parser(read=lambda data: parse_yaml(data, "it"), seeds=(b"a: [1, {b: c}]\nd: 1e3\n",)),
    "tokenizer": Parser(read=lambda data: check_tokenizer(data, "it"), seeds=(json.dumps(_TOKENIZER).encode(),)),
    "multipart": Parser(read=_form, seeds=(_PART,), refuses=(UserError, ApiError, MultiPartException)),
    "media": Parser(read=lambda data: decode(data, _LIMITS), seeds=(PNG, GIF, MP4)),
    "evaluated_tar": Parser(read=_of_file(_members, "train-000000.tar"), seeds=(_SHARD,)),
    "trained_tar": Parser(read=lambda data: _samples(data, _INDEX), seeds=(_SHARD,)),
    "tar_index": Parser(read=lambda data: _samples(_SHARD, data), seeds=(_INDEX,)),
    "manifest": Parser(
        read=_of_file(lambda path: Bundle.open(path.parent), MANIFEST_FILE), seeds=(json.dumps(_MANIFEST).encode(),)
    ),
    "pickle": Parser(read=lambda data: load_pickled(io.BytesIO(data), "it"), seeds=(b"\x80\x02}q\x00.",)),
}


def check(name: str, data: bytes) -> None:
    """Raises what a parser raises that is no refusal in a line."""
    parser = PARSERS[name]
    try:
        parser.read(data)
    except parser.refuses as error:
        assert "\n" not in str(error) or len(str(error)) < 2000
