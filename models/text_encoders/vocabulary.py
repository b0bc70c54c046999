"""The words of a network's training captions, kept in its bundle (`vocabulary.json`).

A text encoder that learned from no text (hashed words) gives a word nobody trained with a vector like any other, and
the network knows nothing of it: prompts can be compared with what it was told. Published encoders bring words of their
own, and so many words that no sample would be left to say are not kept.
"""

import difflib
from collections.abc import Iterable
from pathlib import Path

from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json, write_json
from megadit.models.text_encoders.hashed_words import split_words

WORDS_FILE = "vocabulary.json"
MOST_WORDS = 50_000
MOST_CAPTIONS = 100_000
"""Maximum number of captions to collect words from; takes some ten seconds."""
_MOST_BYTES = 4 << 20
"""Maximum bytes of all words together; their file has a few more."""
_MOST_SAID = 8
FAR_LONGER = 2
"""Times the longest caption."""
_SHORT = 4
"""Words of a caption that count at least."""


def words_of(captions: Iterable[str]) -> set[str] | None:
    """Return all words of the captions; None if there are more than `MOST_WORDS`, or more bytes than their file may
    have (words of a script without spaces are whole clauses)."""
    found: set[str] = set()
    for caption in captions:
        found.update(split_words(caption))
        if len(found) > MOST_WORDS:
            return None
    return found if sum(len(word.encode()) for word in found) <= _MOST_BYTES else None


def write_words(directory: Path, words: Iterable[str]) -> None:
    write_json(directory / WORDS_FILE, sorted(words))


def read_words(directory: Path) -> frozenset[str] | None:
    """Read the words of a bundle; None where it keeps none.

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
    """A warning of words in prompts that no caption had in training, with the nearest that one had; else None."""
    known = read_words(directory)
    if known is None:
        return None
    unseen = list(dict.fromkeys(word for prompt in prompts for word in split_words(prompt) if word not in known))
    if not unseen:
        return None
    said = [_with_nearest(word, known) for word in unseen[:_MOST_SAID]]
    more = f" and {len(unseen) - _MOST_SAID} more" if len(unseen) > _MOST_SAID else ""
    return (
        f"no caption of the training data says {', '.join(said)}{more}: to this model that means nothing; "
        f"{directory / WORDS_FILE} has its words"
    )


def far_longer(prompts: Iterable[str], longest: int | None) -> str | None:
    """A warning of a prompt far longer than the longest caption of training, in words; else None."""
    most = max((len(split_words(prompt)) for prompt in prompts), default=0)
    if longest is None or most <= FAR_LONGER * max(longest, _SHORT):
        return None
    return (
        f"a prompt has {most} words, and no caption of the training data more than {longest}: this model may not do "
        "what the later ones say"
    )


def _with_nearest(word: str, known: frozenset[str]) -> str:
    nearest = difflib.get_close_matches(word, known, n=1)
    return f"{word!r} (but {nearest[0]!r})" if nearest else repr(word)
