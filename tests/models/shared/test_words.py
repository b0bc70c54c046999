"""Words of the training captions in a bundle: what a prompt says beside them is warned of."""

import json
import random
import string

import pytest

from megadit.models.shared.errors import UserError
from megadit.models.shared.words import (
    MOST_WORDS,
    WORDS_FILE,
    far_longer,
    read_words,
    unseen_words,
    words_of,
    write_words,
)


def test_words_of_captions_are_kept_and_compared(tmp_path):
    assert unseen_words(["a cat"], tmp_path) is None, "a bundle that keeps none says nothing"
    write_words(tmp_path, words_of(["A red ball, moving left!", "a blue box"]))
    assert json.loads((tmp_path / WORDS_FILE).read_text()) == ["a", "ball", "blue", "box", "left", "moving", "red"]
    assert unseen_words(["A RED box", "a ball"], tmp_path) is None
    said = unseen_words(["a red bal", "a cat on a ball", "a cat"], tmp_path)
    assert said.startswith("no caption of the training data says 'bal' (but 'ball'), 'cat', 'on': ")
    assert f"{tmp_path / WORDS_FILE} has its words" in said
    assert "'k' and 2 more:" in unseen_words(["d e f g h i j k l m"], tmp_path)
    assert far_longer(["a " * 12], 6) is far_longer(["a " * 8], 1) is far_longer(["a " * 99], None) is None
    assert far_longer(["a", "a " * 13], 6).startswith(
        "a prompt has 13 words, and no caption of the training data more than 6"
    )


def test_there_is_an_end_to_words(tmp_path):
    assert len(words_of(f"word{number}" for number in range(MOST_WORDS))) == MOST_WORDS
    assert words_of(f"word{number}" for number in range(10 * MOST_WORDS)) is None
    clauses = ["".join(random.Random(number).choices("日月火水木金土", k=40)) for number in range(MOST_WORDS)]
    assert words_of(clauses) is None, "their file would be too long to be read"
    write_words(tmp_path, words_of(clauses[: MOST_WORDS // 2]))
    assert len(read_words(tmp_path)) == MOST_WORDS // 2
    longest = random.Random(0).choices(string.ascii_lowercase, k=12)
    write_words(tmp_path, (f"{''.join(longest)}{number}" for number in range(MOST_WORDS)))
    assert len(read_words(tmp_path)) == MOST_WORDS


@pytest.mark.parametrize("text", ["{}", "[1]", '["a", null]', "[", " " * (5 << 20)])
def test_what_is_no_list_of_words_is_refused_in_a_line(tmp_path, text):
    (tmp_path / WORDS_FILE).write_text(text)
    with pytest.raises(UserError, match=WORDS_FILE):
        read_words(tmp_path)
