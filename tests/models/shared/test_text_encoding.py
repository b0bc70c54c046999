"""Texts of every encoding: each is read as it was written, or named with what reads it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megadit.infer.generate.specs import prompt_lines
from megadit.models.shared.errors import UserError
from megadit.models.shared.text_encoding import check_encoding, decoded, encoding_of, likely_encoding

UTF_16 = ("utf-16-le", "utf-16-be")
TEXTS = {
    "一只红色的猫在草地上奔跑，背景是蓝天白云，镜头慢慢向左移动。": ("gb18030", *UTF_16),
    "一隻紅色的貓在草地上奔跑，背景是藍天白雲，鏡頭慢慢向左移動。": ("big5", *UTF_16),
    "赤い猫が草原を走っている。カメラはゆっくり左へ動く。": ("cp932", *UTF_16),
    "빨간 고양이가 풀밭을 달린다. 하늘은 파랗고 구름이 있다.": ("cp949", *UTF_16),
    "Рыжая кошка бежит по траве, небо голубое, облака белые.": ("cp1251", *UTF_16),
    "Un café très animé à côté de l’église, où l’on rêve… déjà.": ("cp1252", *UTF_16),
}
CASES = [(text, encoding) for text, encodings in TEXTS.items() for encoding in encodings]


@settings(max_examples=150)
@given(st.sampled_from(CASES), st.integers(10, 60), st.integers(0, 15))
def test_a_text_is_read_or_its_encoding_is_named(case, length, start):
    text, encoding = case
    part = text[start : start + length]
    content = part.encode(encoding)
    assert part.isascii() or decoded(part.encode()) == part
    if encoding in UTF_16:
        assert decoded(content) == part
    elif not part.isascii():
        assert content.decode(likely_encoding(content)) == part
        with pytest.raises(ValueError, match=r"^byte \d+ is not UTF-8, but likely [A-Z]"):
            decoded(content)
        assert decoded(content, encoding) == part
    assert decoded(part.encode(), encoding) == part, "the named one is of texts that are not UTF-8"


@pytest.mark.parametrize("encoding", ["cp1252", "gb18030", "cp932"])
@given(st.binary(max_size=64))
def test_any_bytes_have_an_encoding_or_a_reason(encoding, content):
    for named in (None, encoding):
        assert encoding_of(content, named)
        try:
            decoded(content, named)
        except ValueError as error:
            assert "iconv -f" in str(error) and "\n" not in str(error)


@pytest.mark.parametrize("name", ["latin-99", "rot13", "base64", "undefined", "a\0b"])
def test_what_is_no_encoding_of_texts_is_refused(name):
    with pytest.raises(UserError, match=r"--caption_encoding: unknown encoding .*; cp1252 and gb18030 are two"):
        check_encoding(name)
    check_encoding(None)


def test_prompts_in_another_encoding_say_what_converts_them(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("赤い猫が草原を走っている。\n".encode("cp932"))
    with pytest.raises(UserError, match="not UTF-8, but likely CP932; iconv -f CP932 -t UTF-8 converts it"):
        prompt_lines(str(path))
