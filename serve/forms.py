"""Encoding of the texts in untrusted forms."""

from python_multipart.multipart import parse_options_header

MULTIPART = b"multipart/form-data"
IN_A_LINE = b"application/x-www-form-urlencoded"


def kind_of_form(content_type: str | None) -> tuple[bytes, bool]:
    """(media type, whether its texts are UTF-8) of a Content-Type header; without charset, texts are UTF-8.

    Other charsets must be refused: form parsers use the charset of the header, and Python takes 15 seconds for a
    megabyte of punycode, and four times as long for two.
    """
    kind, options = parse_options_header(content_type)
    return kind, options.get(b"charset", b"utf-8").lower() in (b"utf-8", b"utf8")
