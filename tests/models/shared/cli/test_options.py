"""One declaration of a setting gives its option, its help, and the checks of JSON and YAML."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from megadit.models.shared.cli import options as shared_options
from megadit.models.shared.cli.options import CommandParser, made_of, options, read_options, set_options
from megadit.models.shared.cli.setting import (
    check_json,
    check_settings,
    check_value,
    group,
    partial_dataclass,
    setting,
    settings_of,
)
from megadit.models.shared.errors import UserError
from megadit.train.config.load import resolve_config


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    eta: float = setting(0.0, "share of ancestral noise (default: {default})", low=0, high=1, served=True)
    interval: tuple[float, float] | None = setting(None, "lowest and highest level", low=0)
    unsaid: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class TrimOptions:
    clip: Path = setting(help="the clip", positional=True, metavar="CLIP")
    more: Sequence[Path] = setting((), positional=True)
    seconds: float = setting(2.0, "100% of {subject} (default: {default})", above=0)
    steps: int | None = setting(None, low=1)
    shift: float | Literal["auto"] | None = setting(None)
    cut: Literal["scene", "clip"] = setting("scene")
    name: str | None = setting(None, names=("--name", "-n"))
    config_file: Path | None = setting(None, names=("--config-file",))
    prompts: Sequence[str] = setting((), names=("--prompt",), nargs="+", repeated=True)
    models: Sequence[str] = setting((), names=("--model",), repeated=True)
    seeds: tuple[int, ...] = setting(())
    labels: tuple[str, ...] = setting(("cat", "a dog"), "labels (default: {default})")
    quick: bool = setting(False)
    text: bool = setting(True)
    noise: Noise = group(Noise, "noise")


def read(*argv: str) -> TrimOptions:
    return read_options(TrimOptions, argv, prog="megadit trim")


def test_what_is_left_out_has_its_default():
    assert read("a.mp4") == TrimOptions(clip=Path("a.mp4"))


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["b", "c"], "more", (Path("b"), Path("c"))),
        (["--seconds=1"], "seconds", 1.0),
        (["--steps", "7"], "steps", 7),
        (["--shift", "auto"], "shift", "auto"),
        (["--shift", "3"], "shift", 3.0),
        (["--cut=clip"], "cut", "clip"),
        (["-n", "x"], "name", "x"),
        (["--config-file", "x"], "config_file", Path("x")),
        (["--prompt", "a", "b", "--prompt", "c"], "prompts", ("a", "b", "c")),
        (["--model", "a", "--model", "b"], "models", ("a", "b")),
        (["--seeds", "1", "2"], "seeds", (1, 2)),
        (["--quick"], "quick", True),
        (["--no-text"], "text", False),
        (["--eta", "0.5"], "noise", Noise(eta=0.5)),
        (["--interval", "1", "2"], "noise", Noise(interval=(1.0, 2.0))),
    ],
)
def test_an_option_is_read_as_its_annotation_says(words, name, value):
    given = read("a.mp4", *words)
    assert getattr(given, name) == value and type(getattr(given, name)) is type(value)
    assert given == TrimOptions(**{"clip": Path("a.mp4"), name: value})


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "the following arguments are required: CLIP"),
        (["a", "--eta=2"], "--eta=2 must lie between 0 and 1$"),
        (["a", "--eta", "nan"], "--eta=nan must be a finite number$"),
        (["a", "--interval", "1", "-1"], "--interval=-1 must not be negative$"),
        (["a", "--interval", "1"], "--interval: expected 2 arguments"),
        (["a", "--seconds=0"], "--seconds=0 must be greater than 0$"),
        (["a", "--seconds=inf"], "--seconds=inf must be a finite number$"),
        (["a", "--steps=0"], "--steps=0 must be at least 1$"),
        (["a", "--steps=x"], "--steps: invalid int value: 'x'"),
        (["a", "--shift=x"], "--shift: invalid float or auto value: 'x'"),
        (["a", "--cut=scent"], r"--cut='scent' is unknown; did you mean 'scene'\? choose one of scene, clip$"),
        (["a", "--config-file", "a\0"], "--config-file='a.x00': no path holds a null character"),
        (["a" * 231], r"CLIP: the name aaa.*\.\.\. is too long"),
        (["a", "--name", "\udc80"], r"--name='.udc80' is not valid text \(UTF-8\)"),
        (["a", "--etta=1"], r"unknown argument '--etta=1'; did you mean '--eta'\? see `megadit trim --help`"),
        (["a", "--unsaid=1"], "unknown argument '--unsaid=1'"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(words, complaint):
    with pytest.raises(UserError, match=complaint):
        read(*words)


def test_help_says_what_the_settings_say():
    parser = CommandParser(prog="megadit trim")
    options(parser, TrimOptions)
    told = " ".join(parser.format_help().split())
    for line in (
        "CLIP the clip",
        "--seconds NUMBER 100% of {subject} (default: 2.0)",
        "--steps INT",
        "labels (default: cat 'a dog')",
        "--cut {scene,clip}",
        "--config-file PATH",
        "--no_text",
        "noise: --eta NUMBER share of ancestral noise (default: 0.0)",
    ):
        assert line in told


def test_options_may_be_a_part_and_tell_what_was_given():
    parser = CommandParser(prog="megadit trim")
    options(parser, TrimOptions, only=("steps", "clip"))
    options(parser, Noise, skip=("interval",))
    found = vars(parser.parse_args(["a", "--steps=3"]))
    assert set_options(TrimOptions, found) == {"clip": Path("a"), "steps": 3}
    assert set_options(Noise, found) == {} and made_of(Noise, found) == Noise()
    with pytest.raises(UserError, match="unknown argument '--interval'"):
        parser.parse_args(["a", "--interval", "1", "2"])


def test_json_is_checked_by_the_same_settings():
    line = {"eta": 1, "interval": [1, 2.5]}
    assert check_json(line, Noise) == {"eta": 1, "interval": (1, 2.5)}
    assert check_json({"interval": None}, Noise) == {"interval": None}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ({"etta": 1}, r"line 3: 'etta' is unknown; did you mean 'eta'\?$"),
        ({"unsaid": 1}, "line 3: 'unsaid' is unknown"),
        ({"eta": 2}, "line 3: eta=2 must lie between 0 and 1$"),
        ({"eta": "1"}, "line 3: eta='1' must be a number$"),
        ({"eta": True}, "line 3: eta=True must be a number$"),
        ({"eta": None}, "line 3: eta=None must be a number$"),
        ({"interval": [1]}, r"line 3: interval=\[1\] must be a list of 2 numbers$"),
        ({"interval": [1, "2"]}, "line 3: interval='2' must be"),
        ({"interval": "12"}, "line 3: interval='12' must be a list of 2 numbers$"),
    ],
)
def test_a_wrong_line_is_told(line, complaint):
    with pytest.raises(UserError, match=complaint):
        check_json(line, Noise, where="line 3: ")


def test_a_part_of_the_settings_may_be_what_a_line_knows():
    with pytest.raises(UserError, match="'interval' is unknown"):
        check_json({"interval": [1, 2]}, Noise, only=("eta",))


def test_settings_are_records():
    eta, interval = settings_of(Noise).values()
    assert (eta.name, eta.default, eta.type, eta.served, eta.count, eta.optional) == (
        "eta",
        0.0,
        float,
        True,
        None,
        False,
    )
    assert (interval.type, interval.count, interval.optional, interval.served) == (float, 2, True, False)
    assert check_value(settings_of(TrimOptions)["clip"], "clip", "x") == Path("x")
    with pytest.raises(UserError, match="validation.sampling.eta=-1 must lie"):
        check_value(eta, "validation.sampling.eta", -1)


def test_an_annotation_that_is_no_option_is_refused():
    @dataclass(frozen=True)
    class Wrong:
        table: dict[str, int] = setting(())

    with pytest.raises(TypeError, match="no option can be made of table"):
        settings_of(Wrong)


def test_every_setting_of_a_given_class_may_be_left_out():
    given = partial_dataclass("GivenTrim", TrimOptions, only=("clip", "seconds", "shift"))
    assert given() == given(clip=None, seconds=None, shift=None)
    (seconds,) = (about for name, about in settings_of(given).items() if name == "seconds")
    assert (seconds.required, seconds.optional, seconds.above) == (False, True, 0)
    assert not settings_of(partial_dataclass("GivenClip", TrimOptions, only=("clip",)))["clip"].required


def test_json_may_give_the_settings_of_groups():
    assert check_json({"eta": 0.5, "seconds": 1}, TrimOptions) == {"eta": 0.5, "seconds": 1}
    with pytest.raises(UserError, match="did you mean 'interval'"):
        check_json({"intervall": [1, 2]}, TrimOptions)
    with pytest.raises(UserError, match="must be a finite number"):
        check_json({"eta": 10**400}, TrimOptions)


def test_a_group_may_be_a_part_of_its_settings():
    @dataclass(frozen=True, kw_only=True)
    class Quiet:
        noise: Noise = group(Noise, only=("eta",))

    assert read_options(Quiet, ["--eta=1"], prog="quiet").noise == Noise(eta=1.0)
    with pytest.raises(UserError, match="unknown argument '--interval'"):
        read_options(Quiet, ["--interval", "1", "2"], prog="quiet")


def test_what_a_dataclass_holds_is_checked():
    check_settings(Noise(eta=1))
    with pytest.raises(UserError, match=r"^noise\.eta=2 must lie between 0 and 1$"):
        check_settings(Noise(eta=2), "noise.")


@pytest.mark.parametrize(
    ("value", "complaint"), [(0, ""), (0.99, ""), (1, "must be at least 0 and below 1"), (-1, "must be at least 0")]
)
def test_an_upper_bound_may_be_out_of_reach(value, complaint):
    @dataclass(frozen=True, kw_only=True)
    class Split:
        share: float = setting(0.5, low=0, below=1)

    if complaint:
        with pytest.raises(UserError, match=complaint):
            check_settings(Split(share=value))
    else:
        check_settings(Split(share=value))


@dataclass(frozen=True, kw_only=True, slots=True)
class ManyOptions:
    clip: str = setting(help="a clip", positional=True)
    first: int = setting(1, "one")
    second: int = setting(2, "two")


@pytest.mark.parametrize(
    "groups", [{"a": ("first",)}, {"a": ("first", "second"), "b": ("second",)}, {"a": ("first", "x")}]
)
def test_an_option_without_a_group_is_a_fault_of_ours(groups):
    with pytest.raises(TypeError, match="must occur once"):
        read_options(ManyOptions, ["x"], prog="many", groups=groups)


def test_many_options_need_groups(monkeypatch):
    assert read_options(ManyOptions, ["x"], prog="many").second == 2
    monkeypatch.setattr(shared_options, "MOST_IN_ONE_LIST", 1)
    with pytest.raises(TypeError, match="must occur once"):
        read_options(ManyOptions, ["x"], prog="many")


def test_help_shows_groups_in_their_order_and_examples_at_the_end(capsys):
    with pytest.raises(SystemExit):
        read_options(
            ManyOptions,
            ["--help"],
            prog="many",
            groups={"most used": ("second",), "other": ("first",)},
            examples=("many clip --second 3",),
        )
    shown = capsys.readouterr().out
    assert shown.startswith("usage: many clip [options]\n")
    places = [
        shown.index(text) for text in ("most used:\n  --second", "other:\n  --first", "examples:\n  many clip --sec")
    ]
    assert places == sorted(places)


@dataclass(frozen=True, kw_only=True, slots=True)
class SidesOptions:
    height: int = setting(1, "pixels")
    width: int = setting(2, "pixels")


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureOptions:
    sides: SidesOptions = group(SidesOptions)
    crop: tuple[int, int] | None = setting(None, "height and width")


@pytest.mark.parametrize(
    "words", [["--size", "64x96"], ["--size=64X96"], ["--size", "64 × 96"], ["--size", "64", "96"]]
)
def test_a_size_stands_for_height_and_width(words):
    read = read_options(PictureOptions, words, prog="picture")
    assert (read.sides.height, read.sides.width) == (64, 96)


def test_any_option_of_two_sides_takes_both_forms():
    assert read_options(PictureOptions, ["--crop", "8x16"], prog="picture").crop == (8, 16)
    assert read_options(PictureOptions, ["--crop", "8", "16"], prog="picture").crop == (8, 16)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--size", "8x16", "--height", "3"], "--size sets height and width; leave out --height"),
        (["--size", "8"], "--size: expected 2 arguments"),
        (["--size", "8xa"], "--size: expected 2 arguments"),
        (["--seize", "8x16"], "did you mean '--size'"),
    ],
)
def test_a_wrong_size_is_told(words, says):
    with pytest.raises(UserError, match=says):
        read_options(PictureOptions, words, prog="picture")


@pytest.mark.parametrize("asked", ["--count", "--zoom", "--tp"])
def test_no_hint_is_better_than_a_wrong_one(asked):
    """`--count` is no misspelt `--churn`."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Others:
        churn: int = setting(1, "")
        tp_size: int = setting(1, "")

    with pytest.raises(UserError) as told:
        read_options(Others, [asked, "3"], prog="picture")
    assert "did you mean" not in str(told.value)


@pytest.mark.parametrize("path", ["~/out", "~ann/out", "$HOME/out", "${OUT}/a b"])
def test_a_path_that_the_shell_did_not_replace_is_told(path):
    """Folders of the name ~ would hold what people look for at home."""
    reason = re.escape(f"{path}: no shell has replaced {path.partition('/')[0]}; write the folder that it stands for")
    for name, words in {"CLIP": [path], "--config-file": ["a.mp4", "--config-file", path]}.items():
        with pytest.raises(UserError, match=f"^{name}={reason}"):
            read(*words)
    for key in ("train.output_dir", "data.path"):
        with pytest.raises(UserError, match=f"^{key}={reason}"):
            resolve_config("digits_tiny", overrides=[f"{key}={path}"])


@pytest.mark.parametrize("path", ["~", "~backup.mp4", "a/~/b", "$5.txt", "$5/day", "price of $1"])
def test_other_names_with_such_signs_are_names(path):
    assert read(path).clip == Path(path)
