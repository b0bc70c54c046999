"""JSON as people and programs write it."""

import json
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megadit.models.shared.documents import parse_loose_json
from megadit.models.shared.errors import UserError

TEXTS = st.text(st.characters(codec="utf-8")) | st.sampled_from(["// a", "/* a */", ",]", '"},', "} {", "\\"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


def loose(value) -> str:
    """A value with comments, and commas after the last ones."""
    match value:
        case dict():
            inner = "".join(f'{json.dumps(name)} /* "*,}} */: {loose(each)}, // ]"\n' for name, each in value.items())
            return f"{{ // {{\n{inner}}}"
        case list():
            inner = "".join(f"{loose(each)} ,\n" for each in value)
            return f"[/**/{inner}]"
        case _:
            return json.dumps(value)


@given(VALUES)
@example({"a // b": ["/* ,]", "\\"]})
def test_comments_and_commas_after_the_last_value_change_nothing(value):
    assert parse_loose_json(loose(value), "it") == value


@given(st.lists(st.dictionaries(TEXTS, VALUES), min_size=2, max_size=4), st.sampled_from(["\n", "", ",\n", " // {\n"]))
def test_objects_one_after_another_are_a_list(rows, between):
    assert parse_loose_json("".join(json.dumps(row, indent=1) + between for row in rows), "it") == rows


@pytest.mark.parametrize("text", ['{"a": 1', '{"a" 1,}', "[1, 2", '{"a": "b}', "{} 1", "[1,,]"])
def test_what_is_no_value_is_named(text):
    with pytest.raises(UserError, match="it is not valid JSON"):
        parse_loose_json(text, "it")


@pytest.mark.parametrize("text", ["/*", "/", ",", ", ", '"\\', "} ", '"', "/**"])
def test_hostile_text_takes_no_quadratic_time(text):
    begin = time.process_time()
    with pytest.raises(UserError):
        parse_loose_json("x" + text * 200_000, "it")
    assert time.process_time() - begin < 10
