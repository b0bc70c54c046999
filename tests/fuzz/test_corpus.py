"""Parsers of outside bytes: what once ended one, and changes of what is right, are refused in a line, or read."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .parsers import CORPUS, PARSERS, check


@st.composite
def changed(draw, seeds):
    """A seed with some of its bytes replaced, cut out or repeated."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 4))):
        place, size = draw(st.integers(0, len(data))), draw(st.integers(0, 16))
        data[place : place + size] = draw(st.binary(max_size=16))
    return bytes(data)


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_refuses_or_reads_whatever_comes(name, request):
    for path in sorted((CORPUS / name).glob("*")):
        check(name, path.read_bytes())
    for seed in PARSERS[name].seeds:
        check(name, seed)
    cases = request.config.getoption("--cases") or 25
    health = list(HealthCheck)

    @settings(max_examples=cases, database=None, deadline=None, derandomize=True, suppress_health_check=health)
    @given(changed(PARSERS[name].seeds) | st.binary(max_size=64))
    def tries(data: bytes) -> None:
        check(name, data)

    tries()
