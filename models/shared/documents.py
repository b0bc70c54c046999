"""Parsing of untrusted JSON, YAML, pickles, archives and headers, within limits of size and depth.

Parsers recurse, and use many times the memory of their input: without limits, a file of a megabyte ends a process.
"""

import json
import math
import pickletools
import re
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import IO, Any

import yaml

from megadit.models.shared.errors import UserError

MAX_BYTES = 1 << 24
"""Default maximum bytes of a document; parsed, it takes up to thirty times as much memory."""
MAX_TOML_BYTES = 1 << 20
"""Maximum bytes of a TOML document: its reader is slow."""
MAX_DEPTH = 100
"""Maximum nesting of lists and objects."""

PLACEHOLDERS = {
    b"version ": "a pointer of Git LFS, not the file itself; get it by git lfs pull",
    b"<": "a web page, not the file itself; download it again",
}
"""First bytes of what often lies in a file's place -> what it is."""
_NO_TEXTS = {
    b"version https://git-lfs": PLACEHOLDERS[b"version "],
    b"<!doctype html": PLACEHOLDERS[b"<"],
    b"<html": PLACEHOLDERS[b"<"],
    b"{\\rtf": "a document of a word processor (RTF); save it as plain text",
}
"""Beginning of a text, in small letters -> what it is in the place of plain text."""
OTHER_FILES = PLACEHOLDERS | {
    b"GGUF": "a quantised GGUF file; give the original safetensors",
    b"PK\3\4": "a zip file, as torch.save writes, no safetensors file; name it .pt",
    b"\x80": "a pickle, as torch.save writes, no safetensors file; name it .pt",
}
"""First bytes of a file that is no safetensors file -> what it is."""
_BRACKETS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[][{}]', re.DOTALL)
"""Brackets, and strings, which may contain brackets; possessive, so that no text takes quadratic time."""
_STRING = r'(?P<string>"[^"\\]*+(?:\\.[^"\\]*+)*+"?)'
_COMMENT = re.compile(rf"{_STRING}|//[^\r\n]*+|/\*(?:[^*]|\*(?!/))*+(?:\*/)?", re.DOTALL)
_LAST_COMMA = re.compile(rf"{_STRING}|,(?=\s*+(?:[]}}]|\Z))", re.DOTALL)
_END_OF_OBJECT = re.compile(rf"{_STRING}|\}}(?=\s*+\{{)", re.DOTALL)
_LONG_KEY = re.compile(rf"""(?<![\w"'-])(?:[\w"'-]++[ \t]*+\.[ \t]*+){{{MAX_DEPTH}}}""")
"""A dotted key of TOML that is deeper than the limit."""
OLD_NUMBERS = re.compile(r"[-+]?(?:0[0-7_]+|[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?)")
"""Octal and base 60, which YAML 1.1 reads without quotes, and YAML 1.2 does not: 010 is 8, 4:00:00 is 14400."""
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1}


def parse_json(
    text: str | bytes, where: str, *, max_bytes: int = MAX_BYTES, is_finite: bool = True, is_by_hand: bool = False
) -> Any:
    """The value of an untrusted JSON document; `where` begins error messages: "the body".

    With `is_finite` every number fits a float64: neither NaN nor Infinity, which are not JSON, nor 1e999. In a document
    that was written by hand no object may have a name twice: the last one would count, in silence.

    Raises:
        UserError: if it is not valid JSON (half a surrogate pair in a string, which nothing can store as UTF-8,
            included), or is longer or deeper than the limits.
    """
    check_size(len(text), where, max_bytes)
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        _check_depth((_STEPS.get(found[0], 0) for found in _BRACKETS.finditer(text)), where)
        if not is_finite:
            return json.loads(text)
        numbers = {"parse_constant": _refused, "parse_float": _finite_float, "parse_int": _finite_int}
        value = json.loads(text, object_pairs_hook=_without_doubles if is_by_hand else None, **numbers)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON: {_in_short(error)}") from None


def parse_loose_json(text: str, where: str, *, max_bytes: int = MAX_BYTES, is_finite: bool = True) -> Any:
    """Like `parse_json`, but ignores comments (`//`, `/* */`) and trailing commas;
    consecutive objects are a list, and no value is an empty one.

    Raises:
        UserError: as `parse_json`, about the document as it is.
    """
    check_size(len(text), where, max_bytes)  # is not tried again
    try:
        return parse_json(text, where, max_bytes=max_bytes, is_finite=is_finite)
    except UserError as error:
        plain = _LAST_COMMA.sub(_string_or_blank, _COMMENT.sub(_string_or_blank, text))
        joined = _END_OF_OBJECT.sub(lambda found: found["string"] or "},", plain)
        for candidate in (plain, f"[{joined}]"):
            with suppress(UserError):
                return parse_json(candidate, where, max_bytes=max_bytes, is_finite=is_finite)
        raise error


def _string_or_blank(found: re.Match[str]) -> str:
    return found["string"] or " "


def parse_yaml(text: str | bytes, where: str, *, max_bytes: int = MAX_BYTES, is_text: bool = False) -> Any:
    """The value of an untrusted YAML document, with plain values only; with `is_text` these are texts as they are
    written, or None (a clip may be called 0001, and `no` may be its caption), and several documents are a list.

    Aliases (`*name`) are rejected: a few lines of them can expand to more values than memory holds.

    Raises:
        UserError: if it is not valid YAML, or is longer or deeper than the limits.
    """
    check_size(len(text), where, max_bytes)
    try:
        _check_depth((_step(event, where) for event in yaml.parse(text, Loader=_LOADER)), where)
        if not is_text:
            return yaml.load(text, Loader=_Loader)
        documents = [each for each in yaml.load_all(text, Loader=_TextLoader) if each is not None]
        return documents[0] if len(documents) == 1 else documents
    except UserError:
        raise
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{where} is not valid YAML: {_in_short(error)}") from None


def parse_toml(text: str, where: str, *, max_bytes: int = MAX_TOML_BYTES) -> dict[str, Any]:
    """The value of an untrusted TOML document.

    Raises:
        UserError: if it is not valid TOML, or is longer or deeper than the limits.
    """
    check_size(len(text), where, max_bytes)
    try:
        if _LONG_KEY.search(text):  # which takes quadratic time
            raise RecursionError
        document = tomllib.loads(text)
        level, depth = [document], 0
        while level:
            level, depth = [inner for each in level for inner in _inner(each)], depth + 1
            if depth > MAX_DEPTH:
                raise RecursionError
        return document
    except RecursionError:
        raise UserError(f"{where} has more than {MAX_DEPTH} lists and tables within one another") from None
    except ValueError as error:
        raise UserError(f"{where} is not valid TOML: {_in_short(error)}") from None


def _inner(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def check_yaml(text: str | bytes, where: str) -> None:
    """Raises UserError for a YAML document deeper than the limit, or with `OLD_NUMBERS`; its reader reports other
    errors, and aliases."""
    try:
        _check_depth((_level_without_old_numbers(event, where) for event in yaml.parse(text, Loader=_LOADER)), where)
    except UserError:
        raise
    except (ValueError, yaml.YAMLError):
        return  # which its reader reports


def check_tensor_header(head: bytes, where: str, *, max_bytes: int = MAX_BYTES) -> None:
    """Raises UserError if a safetensors file, which begins with `head`, has a longer JSON header, or is none at all."""
    if (length := int.from_bytes(head[:8], "little")) > max_bytes:
        if found := next((kind for magic, kind in OTHER_FILES.items() if head.startswith(magic)), None):
            raise UserError(f"{where} is {found}")
        check_size(length, f"the header of {where}", max_bytes)


def placeholder(head: bytes) -> str | None:
    """Describe a file that begins so if it is empty, or one of `PLACEHOLDERS`."""
    if not head:
        return "an empty file"
    return next((what for magic, what in PLACEHOLDERS.items() if head.startswith(magic)), None)


def check_plain_text(content: bytes) -> None:
    """Raises ValueError for what is text, but not the one that belongs there."""
    head = content[:64].lstrip().lower()
    if found := next((what for magic, what in _NO_TEXTS.items() if head.startswith(magic)), None):
        raise ValueError(f"it is {found}")


def check_pickle(content: bytes, where: str) -> None:
    """Raises UserError for a pickle with large memo indices, for which Python allocates memory.

    It does not check the objects and functions in the pickle.
    """
    try:
        for number, (code, argument, _) in enumerate(pickletools.genops(content)):
            if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and not 0 <= argument <= number + 1:
                raise UserError(f"{where} is hostile: its value {number} is numbered {argument}")
    except UserError:
        raise
    except Exception as error:  # a broken pickle can raise any error
        raise UserError(f"{where} is not a pickle: {_in_short(error)}") from None


def check_archive(file: IO[bytes], where: str) -> None:
    """Raises UserError for a zip file that is larger when unpacked than the file; torch never writes such files.

    Other files pass: their readers will reject them. The file is at its beginning afterwards.
    """
    size = file.seek(0, 2)
    try:
        members = zipfile.ZipFile(file).infolist() if zipfile.is_zipfile(file) else []
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise UserError(f"{where} is not a zip file: {_in_short(error)}") from None
    if sum(member.file_size for member in members) > size:
        raise UserError(f"{where} is hostile: unpacked, it is larger than its {size:,} bytes; torch compresses nothing")
    file.seek(0)


def check_size(num_bytes: int, where: str, max_bytes: int) -> None:
    """Raises UserError if `num_bytes` exceeds `max_bytes`."""
    if num_bytes > max_bytes:
        raise UserError(f"{where} is longer than {max_bytes:,} bytes, the most that is read")


_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_LOADER):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found = super().construct_mapping(node, deep)
        if len(found) < len(node.value):
            raise ValueError(f"line {node.start_mark.line + 1}: an object has a name twice; give it once")
        return found


class _TextLoader(_Loader):
    yaml_implicit_resolvers = {  # noqa: RUF012  (PyYAML's name)
        first: [(tag, form) for tag, form in found if tag.endswith(":null")]
        for first, found in _LOADER.yaml_implicit_resolvers.items()
    }


def _check_depth(steps: Iterable[int], where: str) -> None:
    depth = 0
    for step in steps:
        depth += step
        if depth > MAX_DEPTH:
            raise UserError(f"{where} has more than {MAX_DEPTH} lists and objects within one another")


def _step(event: yaml.Event, where: str) -> int:
    if isinstance(event, yaml.AliasEvent):
        raise UserError(f"{where} has aliases (*name); write the values out")
    return _level(event)


def _level_without_old_numbers(event: yaml.Event, where: str) -> int:
    is_plain = isinstance(event, yaml.ScalarEvent) and event.implicit[0]
    if is_plain and OLD_NUMBERS.fullmatch(event.value):
        line, number = event.start_mark.line + 1, yaml.load(event.value, Loader=_LOADER)
        raise UserError(f'{where}, line {line}: {event.value} is {number} to YAML; write it in quotes: "{event.value}"')
    return _level(event)


def _level(event: yaml.Event) -> int:
    return isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)


def _finite_float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refused(text)


def _finite_int(text: str) -> int:
    _finite_float(text)
    return int(text)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object without a name that it has twice; raises ValueError."""
    found = dict(pairs)
    if len(found) < len(pairs):
        double = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"an object has {double[:40]!r} twice; give it once")
    return found


def _refused(text: str) -> Any:
    raise ValueError(f"the number {text[:20]}{'...' if len(text) > 20 else ''} does not fit float64")


def _in_short(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
