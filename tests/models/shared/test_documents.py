"""Documents from outside end nobody's process: limits of size and depth, numbers and strings that can be kept."""

import json

import pytest

from megadit.models.shared import documents
from megadit.models.shared.documents import MAX_DEPTH, check_tensor_header, parse_json, parse_yaml
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json

HOSTILE_JSON = {
    "deep": ("[" * 100_000, f"more than {MAX_DEPTH} lists and objects"),
    "deep objects": ('{"a":' * 100_000, f"more than {MAX_DEPTH} lists and objects"),
    "infinite": ('{"height": Infinity}', "the number Infinity"),
    "not a number": ("[NaN]", "the number NaN"),
    "beyond a float": ("1e999", "the number 1e999"),
    "400 digits": ("1" * 400, "the number 11111111111111111111..."),
    "5,000 digits": ("1" * 5000, "the number 11111111111111111111..."),
    "half a surrogate pair": (r'{"caption": "\uD800"}', "surrogates not allowed"),
    "not UTF-8": (b"\xff\xfe", "can't decode byte"),
    "long": (" " * 1001, "longer than 1,000 bytes"),
    "empty": ("", "Expecting value"),
}
HOSTILE_YAML = {
    "deep": ("[" * 100_000, f"more than {MAX_DEPTH} lists and objects"),
    "deep lines": ("- " * 100_000, f"more than {MAX_DEPTH} lists and objects"),
    "aliases": ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", r"aliases \(\*name\)"),
    "objects": ("!!python/object/apply:os.getcwd []", "could not determine a constructor"),
    "several": ("a: 1\n---\nb: 2\n", "expected a single document"),
    "5,000 digits": ("1" * 5000, "not valid YAML"),
    "no date": ("2026-99-99", "not valid YAML"),
    "long": (" " * 1001, "longer than 1,000 bytes"),
}


@pytest.mark.parametrize(("text", "complaint"), HOSTILE_JSON.values(), ids=HOSTILE_JSON)
def test_hostile_json_is_refused_in_one_line(text, complaint):
    max_bytes = 1000 if "bytes" in complaint and len(text) == 1001 else documents.MAX_BYTES
    with pytest.raises(UserError, match=f"^the body .*{complaint}") as told:
        parse_json(text, "the body", max_bytes=max_bytes)
    assert "\n" not in str(told.value) and len(str(told.value)) < 300


@pytest.mark.parametrize(("text", "complaint"), HOSTILE_YAML.values(), ids=HOSTILE_YAML)
def test_hostile_yaml_is_refused_in_one_line(text, complaint):
    with pytest.raises(UserError, match=f"^a.yaml .*{complaint}") as told:
        parse_yaml(text, "a.yaml", max_bytes=1000 if len(text) == 1001 else documents.MAX_BYTES)
    assert "\n" not in str(told.value) and len(str(told.value)) < 300


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, -1e300, 2**63, None, True, '\\[{"}]'], "b": {"c": "ü 😀 \n"}},
        "[" * 200 + "\\" * 7,
        1,
    ],
)
@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_honest_json_is_read_as_it_is(value, ensure_ascii):
    text = json.dumps(value, ensure_ascii=ensure_ascii)
    assert parse_json(text, "it") == parse_json(text.encode(), "it") == value


def test_depth_is_counted_exactly():
    deepest = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    wide = "[" + "[]," * 10 * MAX_DEPTH + "[]]"
    for parse in (parse_json, parse_yaml):
        assert parse(deepest, "it") is not None
        assert len(parse(wide, "it")) == 10 * MAX_DEPTH + 1
        with pytest.raises(UserError, match="lists and objects within one another"):
            parse(f"[{deepest}]", "it")


def test_numbers_of_our_own_files_may_be_infinite():
    assert parse_json('{"loss": Infinity}', "it", is_finite=False) == {"loss": float("inf")}


def test_honest_yaml_is_read_as_it_is():
    assert parse_yaml("a: [1, {b: 2.5}]\nc: null\n", "it") == {"a": [1, {"b": 2.5}], "c": None}


def test_headers_of_tensors_have_a_limit():
    check_tensor_header((100).to_bytes(8, "little") + b"{", "a.safetensors")
    with pytest.raises(UserError, match="^the header of a.safetensors is longer than"):
        check_tensor_header((10**8).to_bytes(8, "little"), "a.safetensors")


def test_files_are_read_up_to_the_limit(tmp_path):
    endless = tmp_path / "endless.json"
    endless.symlink_to("/dev/zero")
    with pytest.raises(UserError, match="longer than"):
        read_json(endless)


@pytest.mark.parametrize("text", ['"\\' * 500_000, '"' * 1_000_001, "\\" * 1_000_000, '"' + "\\\\" * 500_000])
def test_no_text_takes_quadratic_time(text):
    """A megabyte takes some milliseconds; quadratic, it would take hours."""
    with pytest.raises(UserError, match="it is not valid JSON"):
        parse_json(text, "it")
