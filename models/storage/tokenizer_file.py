"""Checks `tokenizer.json`, which describes a program of the library `tokenizers`: replacements, regular expressions and
padding, by which a file of a few hundred bytes could turn a word into terabytes or take hours for it.
"""

import base64
import re
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

from megadit.models.shared.documents import parse_json
from megadit.models.shared.errors import UserError, library_errors
from megadit.models.shared.files import read_limited
from megadit.models.storage.pretrained import PRETRAINED, transformers_library

NAME = "tokenizer.json"
_MOST_BYTES = 1 << 26
"""Four times those of umT5's 256,000 words."""
_MOST_GROWTH = 1000
"""Maximum length of what a character is replaced by; T5's normalizer has 33 bytes for one."""
_MOST_ADDED = 1 << 16
"""Maximum tokens that are added to a text: padding, its beginning and end."""
_NESTED = re.compile(r"(?<!\\)\((?:\\.|[^()\\])*(?<!\\)[+*}](?:\\.|[^()\\])*\)[+*{]")
"""A repetition that is repeated, `(a+)+`, which takes exponential time; no published tokenizer has one."""


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of `transformers` in a folder.

    Raises:
        UserError: as `check_tokenizer`, and if the library cannot read it.
    """
    described = {}
    if is_described := (folder / NAME).is_file():
        described = check_tokenizer(read_limited(folder / NAME, _MOST_BYTES), str(folder / NAME))
    with library_errors(lambda reason: f"{folder} has no readable tokenizer ({reason})"):
        library = transformers_library("a tokenizer")
        if not is_described:
            _describe_sentencepiece()
        tokenizer = library.AutoTokenizer.from_pretrained(folder, **PRETRAINED)
        if not is_described:
            check_tokenizer(tokenizer.backend_tokenizer.to_str(), str(folder))
        tokenizer("a")  # one without words is read all the same
        made = type(tokenizer.backend_tokenizer.model).__name__
        if (kind := described.get("model", {}).get("type", made)) != made:
            raise UserError(f"{folder / NAME} is a {kind}, and its tokenizer_class makes a {made} of it: give its own")
        return tokenizer


def _describe_sentencepiece() -> None:
    """Let transformers read spiece.model by its own description of the format, where sentencepiece's needs a newer
    protobuf than is installed."""
    name = "sentencepiece.sentencepiece_model_pb2"
    with suppress(ImportError):
        try:
            import_module(name)
        except Exception:  # protobuf's own
            sys.modules[name] = import_module("transformers.utils.sentencepiece_model_pb2_new")


def check_tokenizer(text: str | bytes, where: str) -> dict[str, Any]:
    """The contents of a tokenizer.json.

    Raises:
        UserError: if it could take memory or time without end for a short text.
    """
    values = parse_json(text, where, max_bytes=_MOST_BYTES, is_finite=False)
    if not isinstance(values, dict):
        raise UserError(f"{where} is no tokenizer")
    steps = [values.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")]
    for pattern in (each["Regex"] for each in _objects(steps) if isinstance(each.get("Regex"), str)):
        if _NESTED.search(pattern):
            raise UserError(f"{where} has the pattern {pattern[:80]!a}, which takes exponential time")
    if (growth := prod(max(1, each) for each in _growths(values.get("normalizer"), where))) > _MOST_GROWTH:
        raise UserError(f"{where} replaces a character by up to {growth:,}; at most {_MOST_GROWTH:,}")
    if (added := max(_added(values), default=0)) > _MOST_ADDED:
        raise UserError(f"{where} adds {added:,} tokens to a text; at most {_MOST_ADDED:,}")
    return values


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """The objects in a JSON value, at any depth."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(each)


def _growths(normalizer: Any, where: str) -> Iterator[int]:
    """Yield how many bytes each step of a normalizer may put in place of one character."""
    for step in _objects(normalizer):
        if isinstance(content := step.get("content"), str):
            yield len(content)
        if isinstance(charsmap := step.get("precompiled_charsmap"), str):
            with library_errors(lambda reason: f"the charsmap of {where} cannot be read ({reason})"):
                table = base64.b64decode(charsmap)
                size = struct.unpack_from("<I", table)[0] if table else 0
            yield max(map(len, table[4 + size :].split(b"\0")))


def _added(values: dict[str, Any]) -> Iterator[int]:
    """Tokens that are added to a text, by its padding and by each template."""
    for padding in _objects(values.get("padding")):
        yield from (each for each in (padding.get("Fixed"), padding.get("pad_to_multiple_of")) if isinstance(each, int))
    for step in _objects(values.get("post_processor")):
        if isinstance(special := step.get("special_tokens"), dict):
            longest = max(
                (len(ids) for each in _objects(special) if isinstance(ids := each.get("ids"), list)), default=0
            )
            templates = [step.get(name) for name in ("single", "pair")]
            yield longest * max(len(each) if isinstance(each, list) else 0 for each in templates)
