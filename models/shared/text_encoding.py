"""The encoding of texts that any editor may have written: read where it is certain, named where it is likely."""

import codecs
import re
import unicodedata

from megadit.models.shared.errors import UserError

HEAD_BYTES = 1 << 16
"""Bytes by which an encoding is chosen."""
MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
"""Byte order mark -> encoding; the marks of UTF-32 begin with those of UTF-16."""
_LIKELY = ("cp932", "cp949", "gb18030", "big5", "cp1252", "cp1251", "utf-16-le", "utf-16-be")
"""Encodings that a text is tried with; of equals the first one: UTF-16, which makes ideographs of anything, is last."""
_COMMON = {"gb2312": (0xB0, 0xD7), "euc_jp": (0xB0, 0xCF), "big5": (0xA4, 0xC6)}
"""Encoding -> first bytes of its common ideographs, apart from which each has as many rare ones."""
_MOST_ODD = 0.1
"""Share of odd characters from which a text is in another encoding."""
_CONTROL = re.compile(rb"[\0-\x08\x0b\x0c\x0e-\x1f]")
_ODD = re.compile(
    "[\u00c0-\u024f]{2}"  # accented letters in a row, and words of two scripts
    "|[A-Za-z\u00c0-\u024f](?=[\u0370-\u052f\u3040-\ud7af])|[\u0370-\u052f\u3040-\ud7af](?=[A-Za-z\u00c0-\u024f])"
    "|[0-9](?=[\u00a1-\u052f])|[\u00a1-\u052f](?=[0-9])"
    "|[\u3040-\u30ff\u4e00-\u9fff](?=[\uac00-\ud7af])|[\uac00-\ud7af](?=[\u3040-\u30ff\u4e00-\u9fff])"
    "|[\u0100-\u036f\u0530-\u058f\u0700-\u0dff\u1000-\u1fff\u2000-\u200a\u2c00-\u2fff\u3400-\u4dbf\uff61-\uff9f]"
)
_IDEOGRAPH = re.compile("[\u4e00-\u9fff]")
"""Korean is read and written without."""


def encoding_of(head: bytes, encoding: str | None = None) -> str:
    """The encoding of a text with this beginning: by its byte order mark; the named one, if UTF-8 is less likely;
    UTF-16 if nothing else is as likely; else UTF-8."""
    for mark, name in MARKS.items():
        if head.startswith(mark):
            return name
    if encoding is not None:
        return encoding if head.isascii() or _odd_share(head, "utf-8") > _odd_share(head, encoding) else "utf-8"
    if _CONTROL.search(head) is None and _text_of(head, "utf-8") is not None:
        return "utf-8"
    found = likely_encoding(head) if _odd_share(head, "utf-8") > _MOST_ODD else None
    return found if found and found.startswith("utf-16") else "utf-8"


def likely_encoding(head: bytes) -> str | None:
    """The encoding in which a text with this beginning, which is not UTF-8, has the fewest odd characters."""
    share, _, name = min((_odd_share(head, name), order, name) for order, name in enumerate(_LIKELY))
    return name if share <= _MOST_ODD else None


def remedy(content: bytes, option: str = "") -> str:
    """How to read a text that is not UTF-8: by the option, or converted before."""
    name = likely_encoding(content[:HEAD_BYTES])
    if name is None:
        return f"; it is no text, or in an encoding to give to {option or 'iconv -f'}"
    reads = f"{option} {name} reads it" if option else f"iconv -f {name.upper()} -t UTF-8 converts it"
    return f", but likely {name.upper()}; {reads}"


def check_encoding(name: str | None) -> None:
    """Raises UserError for an encoding that Python does not know, or that is none of texts, such as base64."""
    try:
        "a".encode(name or "utf-8")
    except (LookupError, ValueError):
        raise UserError(f"--caption_encoding: unknown encoding {name!r}; cp1252 and gb18030 are two") from None


def decoded(content: bytes, encoding: str | None = None, option: str = "") -> str:
    """The text of a file, without its byte order mark; `option` gives its encoding, if there is one.

    Raises:
        ValueError: if it is not in that encoding.
    """
    name = encoding_of(content[:HEAD_BYTES], encoding)
    try:
        return content.decode(name).lstrip("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not {name.upper()}{remedy(content, option)}") from None


def _text_of(head: bytes, encoding: str) -> str | None:
    try:
        return codecs.getincrementaldecoder(encoding)().decode(head, len(head) < HEAD_BYTES)
    except UnicodeDecodeError:
        return None


def _odd_share(head: bytes, encoding: str) -> float:
    """Share of the characters that no ordinary text has, or beside others; 2: it is not in this encoding."""
    text = _text_of(head, encoding)
    if text is None:
        return 2.0
    odd = len(_ODD.findall(text)) + sum(map(_is_odd, text)) + (encoding == "cp949" and len(_IDEOGRAPH.findall(text)))
    return odd / max(1, len(text) - text.count(" "))


def _is_odd(character: str) -> bool:
    if character.isascii():
        return not character.isprintable() and character not in "\t\r\n"
    if "\u4e00" <= character <= "\u9fff":
        return not any(first <= _encoded(character, name)[0] <= last for name, (first, last) in _COMMON.items())
    if "\uac00" <= character <= "\ud7af":
        return len(_encoded(character, "euc_kr")) != 2
    return unicodedata.category(character) in ("Cc", "Cn", "Co", "Cs", "Lm", "Sk")


def _encoded(character: str, encoding: str) -> bytes:
    return character.encode(encoding, "replace")
