"""Captions in any encoding, under any of the usual column names, one or several for a clip."""

import ast
import math
import re
import string
import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from megadit.models.shared.documents import parse_json
from megadit.models.shared.errors import choose_one
from megadit.models.shared.text_encoding import decoded

CAPTION_COLUMNS = (
    *("caption", "text", "prompt", "captions", "texts", "prompts", "description", "conversations", "messages"),
    "output",  # of alpaca
    *("caption_json", "temporal_caption", "t2w_windows"),  # of cosmos-framework
)
FILE_COLUMNS = ("file_name", "path", "file", "video", "image", "video_path", "image_path", "vision_path")
ASSISTANT_ROLES = ("gpt", "assistant", "model")
"""Roles in conversations whose turns hold the caption."""
_MEDIA_CONTENT = ("image", "video", "image_url")
"""Types of the parts of a message that are no text."""
MAX_CAPTION_BYTES = 1 << 20
_CAMEL = re.compile(r"[\s-]+|(?<=[a-z])(?=[A-Z])")
"""Boundaries of words in the name of a column, besides underscores: `Image Name`, `imageName`."""
_BLANK = f"{string.whitespace}\u00a0\u200b\ufeff"
_LITERAL = re.compile(r"""'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+\"""", re.DOTALL)
_BETWEEN = re.compile(r"\[[\s,]*\]")
_UNSEEN = frozenset("Cc Cf Zs Zl Zp".split())
"""Unicode's categories of characters that are not seen."""
_SAYS_CAPTION = frozenset(
    "caption captions text texts prompt prompts description descriptions cap recaption sentence sentences comment "
    "response content".split()
)
_QUALIFIES_CAPTION = frozenset(
    "long short brief summary detailed dense full refined rewritten final generated merged clean en english video "
    "image clip scene llm vlm blip blip2 cogvlm llava qwen gpt gemini alt raw".split()
)
_SAYS_FILE = frozenset(
    "file filename filepath path video image media img clip videoid vid filenames files videos images clips".split()
)
_QUALIFIES_FILE = frozenset("name names id relative rel absolute abs local".split())
_SAYS_START = frozenset("start begin".split())
_QUALIFIES_START = frozenset("time timestamp frame sec second seconds s ms clip video".split())
_SAYS_SPAN = frozenset("timestamp timestamps times segment segments span spans interval intervals".split())
_SAYS_SCORE = frozenset("aesthetic aesthetics aes".split())
_SPAN = re.compile(r"[\[({][^\[\](){}]+[\])}]")
"""Beginning and end of a part of a clip, as a table stores them."""


# --- names --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def caption_columns(columns: tuple[str, ...]) -> tuple[str, ...]:
    """Return at most one caption column of a row: the first of the usual names, else one composed of their words
    (`caption_long`, `video_description`), not `caption_score` or `negative_prompt`, else the title or WebVid's `name`.
    """
    found = _all_caption_columns(columns)
    is_webvid = len(_chosen(columns, ("videoid", "page_dir"))) == 2
    return (found or _chosen(columns, ("title", "name") if is_webvid else ("title",)))[:1]


@lru_cache(maxsize=4096)
def _all_caption_columns(columns: tuple[str, ...]) -> tuple[str, ...]:
    return _chosen(columns, CAPTION_COLUMNS, _SAYS_CAPTION, _QUALIFIES_CAPTION)


@lru_cache(maxsize=4096)
def _other_forms(columns: tuple[str, ...], column: str) -> tuple[str, ...]:
    """The columns that share a word with the one of captions: `long_caption` with `caption`, not `prompt`."""
    says = {word.rstrip("s") for word in _plain(column).split("_")} & _SAYS_CAPTION
    others = ((each, {word.rstrip("s") for word in _plain(each).split("_")}) for each in _all_caption_columns(columns))
    return tuple(each for each, words in others if each != column and words & says)


@lru_cache(maxsize=4096)
def file_columns(columns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns that may hold the file name of a row, the likeliest first; `id` only where there is none, and
    a caption: licenses and categories have numbers, too."""
    found = _chosen(columns, FILE_COLUMNS, _SAYS_FILE, _QUALIFIES_FILE)
    return found or (_chosen(columns, ("id",)) if caption_columns(columns) else ())


@lru_cache(maxsize=4096)
def _time_columns(columns: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Columns of where a part of a clip begins, and of beginning and end in one."""
    return _chosen(columns, (), _SAYS_START, _QUALIFIES_START), _chosen(columns, (), _SAYS_SPAN)


@lru_cache(maxsize=4096)
def _score_columns(columns: tuple[str, ...]) -> tuple[str, ...]:
    return _chosen(columns, ("aesthetic_score",), _SAYS_SCORE, frozenset({"score"}))


def _chosen(
    columns: tuple[str, ...],
    usual: Sequence[str],
    say: frozenset[str] = frozenset(),
    qualify: frozenset[str] = frozenset(),
) -> tuple[str, ...]:
    plain = {column: _plain(column) for column in columns if column is not None}
    exact = [column for name in usual for column, other in plain.items() if other == name]
    words = {column: {word for word in name.split("_") if not word.isdecimal()} for column, name in plain.items()}
    made = [column for column, of in words.items() if of & say and of <= say | qualify and column not in exact]
    return (*exact, *made)


def _plain(column: str) -> str:
    return _CAMEL.sub("_", str(column).strip(_BLANK)).lower()


# --- values -------------------------------------------------------------------------------------------------------


def captions_in(row: dict[str, Any], asked: Sequence[str] = ()) -> tuple[str, ...] | None:
    """The captions of a row or a description, without duplicates, in the columns `asked` for or in the usual one, and
    where that is empty in another form of it (`long_caption`); () if they are empty or each describes another
    part of the clip, None if no column has any.

    Raises:
        ValueError: for half a surrogate pair, which UTF-8 cannot encode.
    """
    columns = asked or caption_columns(tuple(row))
    if not columns:
        return None
    texts = [text for column in columns for text in texts_of(row.get(column))]
    if not texts and not asked:
        others = map(texts_of, map(row.get, _other_forms(tuple(row), columns[0])))
        texts = next(filter(None, others), [])
    spans = () if asked or len(texts) < 2 else _time_columns(tuple(row))[1]
    if any(len(_SPAN.findall(str(row[column]))) == len(texts) for column in spans):
        return ()
    found = dict.fromkeys(texts)
    for text in found:
        if not text.isascii():
            text.encode()
    return tuple(found)


def span_of(row: dict[str, Any]) -> str:
    """The part of its clip that a row is about, for comparison with other rows; "" if it does not say."""
    starts, spans = _time_columns(tuple(row))
    begins = [str(row[column]) for column in starts if row[column] is not None]
    return " ".join(begins + [span for column in spans for span in _SPAN.findall(str(row[column]))])


def check_columns(asked: Iterable[str], columns: Iterable[str], where: str) -> None:
    """Raises UserError if one of `--caption_columns` does not exist."""
    columns = list(columns)
    for column in asked:
        choose_one(column, columns, f"{where} no column {column!r}")


def texts_of(value: Any) -> list[str]:
    """The captions in a value: a text, a list, responses in a conversation, or texts by language or length."""
    match value:
        case None | bool():
            return []
        case str():
            return _texts_of_string(value.strip())
        case bytes():
            return _texts_of_string(decoded(value).strip())
        case float() if math.isnan(value):
            return []
        case dict() if value.get("type") in _MEDIA_CONTENT:
            return []
        case dict():
            if columns := caption_columns(tuple(value)):
                return texts_of(value[columns[0]])
            if "en" in value:
                return texts_of(value["en"])
            said = (each for name, each in value.items() if set(str(name).lower().split("_")) <= _QUALIFIES_CAPTION)
            return [text for each in said if isinstance(each, str) for text in texts_of(each)]
        case list() | tuple():
            if value and all(isinstance(each, dict) and ("from" in each or "role" in each) for each in value):
                return _answer(value)
            if len(value) > 1 and all(isinstance(each, dict) and _time_columns(tuple(each))[0] for each in value):
                return []  # each describes another part of the clip
            if value and all(isinstance(each, dict) and {"idx", "content"} <= each.keys() for each in value):
                # of ShareGPT4Video: of one frame each, and of the whole clip
                return [text for each in value if str(each["idx"]) == "-1" for text in texts_of(each["content"])]
            return [text for each in value for text in texts_of(each)]
        case _:
            return [str(value)]


def with_files(row: dict[str, Any]) -> dict[str, Any]:
    """A row with a column `files` if its files are in its messages, as Qwen's and OpenAI's, or named by InternVid's
    columns."""
    if file_columns(tuple(row)):
        return row
    internvid = [row.get(name) for name in ("YoutubeID", "Start_timestamp", "End_timestamp")]
    if all(internvid):
        return row | {"files": "_".join(map(str, internvid))}
    turns = row.get("messages") or row.get("conversations")
    found = [
        part["image_url"].get("url")
        if isinstance(part.get("image_url"), dict)
        else part.get("image", part.get("video"))
        for turn in (turns if isinstance(turns, list) else [])
        for part in (turn.get("content") if isinstance(turn, dict) and isinstance(turn.get("content"), list) else [])
        if isinstance(part, dict) and part.get("type") in _MEDIA_CONTENT
    ]
    return row | {"files": found} if found else row


def files_of(value: Any) -> list[str]:
    """The names of files in a value: a text, a list, or an object that has one, as `{"bytes": null, "path": NAME}`."""
    match value:
        case dict():
            return [name for column in file_columns(tuple(value))[:1] for name in files_of(value[column])]
        case list() | tuple():
            return [name for each in value for name in files_of(each)]
        case _:
            return texts_of(value)


def _texts_of_string(text: str) -> list[str]:
    """The text itself, or the texts of a list that a table stores as text."""
    if text[:2] in ('["', "['") and text.endswith("]"):
        for read in (parse_json_list, _printed_list):
            try:
                values = read(text)
            except (ValueError, SyntaxError):
                continue
            if isinstance(values, list) and all(isinstance(each, str) for each in values):
                return [each.strip() for each in values if not is_blank(each)]
    return [] if is_blank(text) else [text]


def is_blank(text: str) -> bool:
    """Whether nothing of a text can be seen: blanks, control characters and those without a width."""
    return all(unicodedata.category(each) in _UNSEEN for each in text)


def parse_json_list(text: str) -> Any:
    return parse_json(text, "it", is_finite=False)


def _printed_list(text: str) -> list[str]:
    """The texts of a list as Python prints it, or NumPy, without commas, which Python would read as one text.

    Raises:
        ValueError: if there is anything else in it.
    """
    if _BETWEEN.fullmatch(_LITERAL.sub("", text)) is None:
        raise ValueError("it is no list of texts")
    return [ast.literal_eval(each) for each in _LITERAL.findall(text)]


def _answer(turns: list[dict[str, Any]]) -> list[str]:
    for turn in turns:
        if str(turn.get("from") or turn.get("role")).lower() in ASSISTANT_ROLES:
            return texts_of(turn.get("value") or turn.get("content"))
    return []


def score_in(row: dict[str, Any]) -> float | None:
    """The aesthetic score of a row or a description; None if it is no finite number."""
    columns = _score_columns(tuple(row))
    try:
        score = float(row[columns[0]])
    except (IndexError, TypeError, ValueError, OverflowError):
        return None
    return score if math.isfinite(score) else None


def shortened(text: str, words: int) -> str:
    """The first words of a text, with at most 8 characters a word."""
    if len(text) > 8 * words:
        text = text[: 8 * words].rpartition(" ")[0] or text[: 8 * words]
    parts = text.split(maxsplit=words)
    return text if len(parts) <= words else text[: len(text) - len(parts[-1])].rstrip()
