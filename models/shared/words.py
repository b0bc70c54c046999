"""Words of texts, and those of a network's training captions, saved in its bundle (`vocabulary.json`).

With hashed words, a word that no training caption contained has a vector like any other, and the network has not
learned it: prompts can be compared with the training vocabulary. Published encoders have their own vocabulary, and
vocabularies that contain nearly every word are not saved.
"""

import difflib
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json, write_json

WORDS_FILE = "vocabulary.json"
MOST_WORDS = 50_000
MOST_CAPTIONS = 100_000
"""Maximum number of captions to collect words from; takes some ten seconds."""
_MOST_BYTES = 4 << 20
"""Maximum bytes of all words together; their file has a few more."""
_MOST_SAID = 8
FAR_LONGER = 2
"""Ratio to the longest training caption from which a prompt is far longer."""
_SHORT = 4
"""Minimum for the longest caption's words, for this ratio."""
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")


def split_words(text: str) -> list[str]:
    """Lower-case words: runs of letters and digits, with inner apostrophes."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


def words_of(captions: Iterable[str]) -> set[str] | None:
    """Return all words of the captions; None if there are more than `MOST_WORDS`, or too many bytes (in scripts without
    spaces, words are whole clauses)."""
    found: set[str] = set()
    for caption in captions:
        found.update(split_words(caption))
        if len(found) > MOST_WORDS:
            return None
    return found if sum(len(word.encode()) for word in found) <= _MOST_BYTES else None


def write_words(directory: Path, words: Iterable[str]) -> None:
    write_json(directory / WORDS_FILE, sorted(words))


def read_words(directory: Path) -> frozenset[str] | None:
    """Read the vocabulary of a bundle; None if it has none.

    Raises:
        UserError: if its file holds something else.
    """
    path = directory / WORDS_FILE
    if not path.is_file():
        return None
    words = read_json(path, max_bytes=2 * _MOST_BYTES)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UserError(f"{path} is not a list of words; `megadit bundle` writes it")
    return frozenset(words)


def unseen_words(prompts: Iterable[str], directory: Path) -> str | None:
    """A warning of words in prompts that no training caption contained, with similar ones that do occur; else None."""
    known = read_words(directory)
    if known is None:
        return None
    unseen = list(dict.fromkeys(word for prompt in prompts for word in split_words(prompt) if word not in known))
    if not unseen:
        return None
    said = [_with_nearest(word, known) for word in unseen[:_MOST_SAID]]
    more = f" and {len(unseen) - _MOST_SAID} more" if len(unseen) > _MOST_SAID else ""
    return (
        f"no caption of the training data says {', '.join(said)}{more}: this model does not know them; "
        f"{directory / WORDS_FILE} has its words"
    )


def _with_nearest(word: str, known: frozenset[str]) -> str:
    nearest = difflib.get_close_matches(word, known, n=1)
    return f"{word!r} (but {nearest[0]!r})" if nearest else repr(word)


def far_longer(prompts: Iterable[str], longest: int | None) -> str | None:
    """A warning of a prompt far longer than the longest training caption, in words; else None."""
    most = max((len(split_words(prompt)) for prompt in prompts), default=0)
    if longest is None or most <= FAR_LONGER * max(longest, _SHORT):
        return None
    return (
        f"a prompt has {most} words, and no caption of the training data more than {longest}: this model may ignore "
        "the later ones"
    )
