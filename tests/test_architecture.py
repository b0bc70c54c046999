"""The way through the code is as short as docs/architecture.md says, which is what docs/count.py counts today."""

import ast

import count
import pytest


@pytest.mark.parametrize("question", count.QUESTIONS, ids=lambda question: question.asks)
def test_the_way_is_short(question):
    num_files, num_lines, lines = count.count(question)
    assert num_files <= question.most_files and num_lines <= question.most_lines, lines


def test_the_page_says_what_is_counted():
    text = count.PAGE.read_text(encoding="utf-8")
    assert count.page(text) == text, "python docs/count.py --write"


def test_no_file_imports_itself_by_a_way_round():
    assert not count.cycles()


MOST_FILES, MOST_FLOORS = 16, 11


def test_rooms_are_small():
    for folder, room in count.rooms().items():
        assert room.num_files <= MOST_FILES and room.num_floors <= MOST_FLOORS, (folder, room)
        assert not room.circles or folder == "train", (folder, room.circles)


def test_short_files_have_a_reason():
    assert set(count.short_files()) == set(count.SHORT)


def test_what_is_named_is_followed():
    """A definition in another file, through an import, and one of a module."""
    found = count.closure(count.QUESTIONS[0])
    assert {("train/objectives/losses.py", "edm_loss"), ("models/diffusion/parameterization.py", "Scalings")} <= found
    here = count.Source("a.py", 1, {}, {"b": ("b.py", "")})
    assert list(count._named(here, ast.parse("b.c(1)"))) == [("b.py", "c")]
