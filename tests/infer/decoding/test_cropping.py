"""Crops of containers in files that are damaged: nothing is cropped, and nothing ends a command."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadit.infer.decoding.cropping import NO_CROP, crops_of

from .clips import CROP, cropped


@pytest.fixture(scope="module")
def contents(tmp_path_factory) -> dict[str, bytes]:
    paths = {suffix: tmp_path_factory.mktemp("crops") / f"a.{suffix}" for suffix in ("mp4", "mkv")}
    for path in paths.values():
        cropped(path)
    return {suffix: path.read_bytes() for suffix, path in paths.items()}


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_each_track_has_its_crop(suffix, contents):
    file = io.BytesIO(contents[suffix])
    assert crops_of(file) == [CROP] and file.tell() == 0


@given(st.sampled_from(["mp4", "mkv"]), st.floats(0, 1), st.integers(0, 255), st.booleans())
def test_a_damaged_byte_raises_nothing(contents, suffix, share, byte, is_cut):
    content = bytearray(contents[suffix])
    place = int(share * (len(content) - 1))
    content[place] = byte
    for crop in crops_of(io.BytesIO(content[:place] if is_cut else content)):
        assert crop == NO_CROP or min(crop) >= 0


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything(content):
    for head in (b"", b"\x1a\x45\xdf\xa3", b"\0\0\0\x08ftyp"):
        crops_of(io.BytesIO(head + content))
