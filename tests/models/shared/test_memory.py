"""Memory is written as people write it, and a plan far beyond it is refused."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadit.models.shared.errors import UserError
from megadit.models.shared.memory import GIB, TOO_MUCH, check_memory_fits, memory_in_words

UNITS = {"MiB": GIB / 1024, "GiB": GIB}


@given(st.floats(1, 1e9))
def test_a_size_is_written_without_an_exponent_and_within_a_twentieth(num_bytes):
    num_bytes *= 1e6
    text = memory_in_words(num_bytes)
    value, unit = re.fullmatch(r"([\d,]+(?:\.\d+)?) (MiB|GiB)", text).groups()
    assert float(value.replace(",", "")) * UNITS[unit] == pytest.approx(num_bytes, rel=0.05), text


def test_sizes_in_words():
    sizes = {190: "190 GiB", 18.4: "18 GiB", 2.52: "2.5 GiB", 0.11: "0.11 GiB", 1 / 32: "32 MiB", 1024.0: "1,000 GiB"}
    assert {size: memory_in_words(size * GIB) for size in sizes} == sizes


@given(needed=st.floats(0, 1e15), free=st.floats(0, 1e15))
def test_a_plan_is_refused_where_it_is_far_too_large(needed, free):
    try:
        check_memory_fits(needed, free, "this", "make it smaller")
    except UserError as error:
        assert needed >= TOO_MUCH * free and "this needs about" in str(error) and "make it smaller" in str(error)
    else:
        assert needed < TOO_MUCH * free
