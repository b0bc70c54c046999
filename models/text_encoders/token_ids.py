"""Token ids in place of text features, for networks that learn their own embeddings.

Shapes: B batch, L text tokens, E = 2 digits of a token id (`embeddings.class_digits`).
"""

import hashlib
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megadit.models.configs.config import MOST_WORDS
from megadit.models.networks.embeddings import CLASS_BASE
from megadit.models.shared.errors import UserError
from megadit.models.storage import components as parts
from megadit.models.storage.pretrained import require
from megadit.models.storage.tokenizer_file import check_tokenizer
from megadit.models.text_encoders.base import TextFeatures
from megadit.models.text_encoders.published import PublishedText

WORDS_FILE = "tokenizer.json"
MOST_BYTES = 1 << 25
"""Maximum bytes of that file: ten times CLIP's."""
START, END = "<|startoftext|>", "<|endoftext|>"
_PUBLISHED = PublishedText("CLIP's words", vocabularies=(WORDS_FILE, "vocab.json"))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenIds:
    """Maps texts to token ids with the library `tokenizers`; each text has a start and an end token.

    Raises:
        UserError: for a vocabulary that the library cannot read, or that is too large.
    """

    words: str = field(repr=False)
    """The contents of a tokenizer.json."""
    max_length: int = 77
    """Maximum tokens of a text; longer texts are truncated with a warning, and keep the end token."""
    _loaded: dict[str, Any] = field(default_factory=dict, repr=False)

    dim: ClassVar[int] = 2
    pooled_dim: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self.max_length < 3:
            raise UserError(f"max_length={self.max_length} must be at least 3: a beginning, a word and an end")
        if not 0 < self.num_words <= MOST_WORDS:
            raise UserError(f"{self.num_words} tokens are not between 1 and {MOST_WORDS:,}")

    @property
    def num_words(self) -> int:
        """Vocabulary size."""
        return self._tokenizer().get_vocab_size()

    def tokens(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids int64 [B, L], padded with zeros, and lengths [B]; an empty text has a start and an end token."""
        rows = [encoding.ids for encoding in self._tokenizer().encode_batch([text.strip() for text in texts])]
        if (longest := max([1, *map(len, rows)])) > self.max_length:
            warnings.warn(f"a text of {longest} tokens is cut to its first {self.max_length}", stacklevel=3)
            rows = [row if len(row) <= self.max_length else [*row[: self.max_length - 1], row[-1]] for row in rows]
        length_B = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        token_BL = torch.zeros(len(rows), max([1, *map(len, rows)]), dtype=torch.int64)
        for token_L, row in zip(token_BL, rows, strict=True):
            token_L[: len(row)] = torch.tensor(row)
        return token_BL, length_B

    def encode(self, texts: list[str]) -> TextFeatures:
        """Two digits of each token id."""
        token_BL, length_B = self.tokens(texts)
        digits_BL2 = torch.stack([token_BL // CLASS_BASE, token_BL % CLASS_BASE], dim=-1)
        return TextFeatures(digits_BL2.float(), length_B)

    def save(self, directory: str | os.PathLike) -> None:
        parts.write_component(directory, {"type": "token_ids", "max_length": self.max_length}, {})
        (Path(directory) / WORDS_FILE).write_text(self.words, encoding="utf-8")

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "TokenIds":
        """The inverse of `save`.

        Raises:
            UserError: if a file is missing or damaged.
        """
        settings = parts.read_settings(directory, ["max_length"])
        return cls(words=_read(Path(directory) / WORDS_FILE), **settings)

    def fingerprint(self) -> str:
        words = hashlib.sha256(self.words.encode()).hexdigest()
        return parts.fingerprint({"type": "token_ids", "max_length": self.max_length, "words": words}, {})

    def _tokenizer(self) -> Any:
        if "tokenizer" not in self._loaded:
            check_tokenizer(self.words, WORDS_FILE)
            try:
                tokenizer = _library().Tokenizer.from_str(self.words)
            except Exception as error:  # the library raises plain Exception
                raise UserError(f"{WORDS_FILE} cannot be read: {str(error)[:80]}") from None
            tokenizer.no_padding()
            tokenizer.no_truncation()
            self._loaded["tokenizer"] = tokenizer
        return self._loaded["tokenizer"]


def published_words(model: str, max_length: int) -> TokenIds:
    """The vocabulary of a published CLIP: a directory in `transformers`' format, or a name on the hub.

    Raises:
        UserError: if they are missing or damaged.
    """
    _, folder = _PUBLISHED.folders(model)
    if (folder / WORDS_FILE).is_file():
        return TokenIds(words=_read(folder / WORDS_FILE), max_length=max_length)
    return TokenIds(words=_PUBLISHED.load_tokenizer(folder).backend_tokenizer.to_str(), max_length=max_length)


def learned_words(texts: Iterable[str], *, num_words: int, max_length: int = 77) -> TokenIds:
    """Byte-pair encoding trained on these texts, in lower case, with at most `num_words` tokens; encodes any text."""
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.normalizer = library.normalizers.Sequence([library.normalizers.NFC(), library.normalizers.Lowercase()])
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = library.trainers.BpeTrainer(
        vocab_size=num_words,
        special_tokens=[START, END],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    ends = [(name, tokenizer.token_to_id(name)) for name in (START, END)]
    tokenizer.post_processor = library.processors.TemplateProcessing(single=f"{START} $A {END}", special_tokens=ends)
    return TokenIds(words=tokenizer.to_str(), max_length=max_length)


def _library() -> Any:
    """Import `tokenizers`.

    Raises:
        UserError: if it is not installed.
    """
    require("tokenizers", "reading texts as tokens")
    import tokenizers

    return tokenizers


def _read(path: Path) -> str:
    """The vocabulary in a file.

    Raises:
        UserError: for one that is missing, or larger than any.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UserError(f"{path} has more than {MOST_BYTES:,} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
