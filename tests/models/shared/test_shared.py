import argparse
import contextlib
import errno
import fcntl
import io
import os
import pty
import pwd
import re
import resource
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megadit.models.shared.cli import command
from megadit.models.shared.cli.command import cleaning_up, run_command
from megadit.models.shared.cli.options import CommandParser
from megadit.models.shared.errors import UserError, choose_one, did_you_mean, nearest, nearest_multiples
from megadit.models.shared.files import (
    atomic_directory,
    atomic_path,
    cache_folder,
    can_be_folder,
    held_alone,
    inner_path,
    read_json,
    read_key,
    write_json,
)
from megadit.models.shared.folder_lock import FolderLock
from megadit.models.shared.progress import Progress, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nearest_names_a_similar_choice_or_none():
    assert nearest("hidden_sise", ["hidden_size", "num_layers"]) == "hidden_size"
    assert nearest("zzz", ["hidden_size", "num_layers"]) is None


def test_did_you_mean_ends_a_complaint():
    assert did_you_mean("hidden_sise", ["hidden_size", "num_layers"]) == "; did you mean 'hidden_size'?"
    assert did_you_mean("zzz", ["hidden_size"]) == ""
    assert did_you_mean("zzz", ["hidden_size"], "give its name") == "; give its name"


def test_one_of_the_choices_or_all_of_them():
    assert choose_one("heun", ("heun", "euler"), "sampler 'heun'") == "heun"
    with pytest.raises(UserError, match=r"^--sampler=hein is unknown; did you mean 'heun'\? choose one of heun,"):
        choose_one("hein", ("heun", "euler"), "--sampler=hein is unknown")
    with pytest.raises(UserError, match=r"^--sampler=x is unknown; choose one of heun, euler$"):
        choose_one("x", ("heun", "euler"), "--sampler=x is unknown")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../a", "a/../../b", "a/..", "/etc/passwd", "a\0b", "link/a", "out", 256 * "a"]
)
def test_names_from_outside_do_not_lead_out_of_their_folder(tmp_path, name):
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path)
    (tmp_path / "root" / "out").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="is not the name of a file in .*root: it leads elsewhere"):
        inner_path(tmp_path / "root", name)


@pytest.mark.parametrize("name", ["a", "a/b.c", "./a", "a..b/..c", "within/a", "~", "a b\n"])
def test_names_within_a_folder_are_paths_in_it(tmp_path, name):
    (tmp_path / "within").symlink_to(tmp_path / "elsewhere_within")
    assert inner_path(tmp_path, name) == tmp_path / name


@pytest.mark.parametrize(
    ("value", "factor", "plus", "text"),
    [
        (100, 16, 0, "96 or 112"),
        (7, 16, 0, "16"),
        (0, 16, 0, "16"),
        (-3, 4, 0, "4"),
        (10, 8, 1, "9 or 17"),
        (0, 8, 1, "1"),
    ],
)
def test_nearest_multiples(value, factor, plus, text):
    assert nearest_multiples(value, factor, plus=plus) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.6, "1 min 0 s"),
        (192, "3 min 12 s"),
        (7500, "2 h 5 min"),
        (1_000_000, "11 days 13 h"),
        (4e11, "13,000 years"),
        (-1, "0 s"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_atomic_path_appears_only_when_complete(tmp_path):
    target = tmp_path / "new" / "clip.mp4"
    with atomic_path(target) as temporary:
        assert temporary.suffix == ".mp4"
        temporary.write_text("whole")
        assert not target.exists()
    assert target.read_text() == "whole"
    assert list(target.parent.iterdir()) == [target]


def test_atomic_path_keeps_the_old_file_on_error(tmp_path):
    target = tmp_path / "file"
    target.write_text("old")
    with pytest.raises(RuntimeError), atomic_path(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_atomic_directory_replaces_the_old_one_only_when_complete(tmp_path):
    target = tmp_path / "out"
    for name in ("first", "second"):
        with atomic_directory(target) as temporary:
            (temporary / name).touch()
    assert [path.name for path in target.iterdir()] == ["second"]
    with pytest.raises(RuntimeError), atomic_directory(target) as temporary:
        (temporary / "third").touch()
        raise RuntimeError
    assert [path.name for path in target.iterdir()] == ["second"]
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("is_first", [True, False])
def test_of_two_writers_of_one_directory_the_last_one_stays(tmp_path, monkeypatch, is_first):
    """The other one's takes the place after the old one was moved away (or, at first, looked for)."""
    target, replace, seen = tmp_path / "made", os.replace, []
    if not is_first:
        target.mkdir()
        (target / "old").touch()

    def replaced(source, path):
        if path == target and not seen.append(path) and len(seen) == 1:
            target.mkdir()
            (target / "other").touch()
        replace(source, path)

    monkeypatch.setattr(os, "replace", replaced)
    with atomic_directory(target) as temporary:
        (temporary / "ours").touch()
    assert [path.name for path in target.iterdir()] == ["ours"] and os.listdir(tmp_path) == ["made"]


@pytest.mark.parametrize("url", ["s3://bucket/name", "gs://bucket/name.mp4", "hf://owner/name", "file:///tmp/name"])
def test_nothing_is_written_under_the_name_of_a_url(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for write in (atomic_path, atomic_directory, lambda place: FolderLock(place, "trains")):
        for place in (url, Path(url)):  # which has one slash
            with pytest.raises(UserError, match=" is a URL: write to a folder of this machine"), write(place):
                pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("write", [atomic_path, atomic_directory])
def test_a_signal_to_end_leaves_nothing_half_written(tmp_path, write, number):
    program = f"""
import os, signal, sys
from pathlib import Path
from megadit.models.shared.files import {write.__name__}
try:
    with {write.__name__}(Path({str(tmp_path / "made")!r})) as temporary:
        (temporary / "file" if temporary.is_dir() else temporary).touch()
        if not (forked := os.fork()):
            signal.raise_signal({number})  # a worker ends as it did
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(forked, 0)[1]) == {number}
        signal.raise_signal({number})
finally:
    assert signal.getsignal({number}) == signal.SIG_DFL
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 128 + number and not list(tmp_path.iterdir()), ended.stderr


def test_a_terminal_that_hangs_up_several_times_does_so_once():
    cleaned = []
    with pytest.raises(SystemExit), cleaning_up():
        try:
            signal.raise_signal(signal.SIGHUP)
        finally:
            signal.raise_signal(signal.SIGHUP)
            cleaned.append(True)
    assert cleaned


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_that_interrupts_a_finalizer_comes_again(tmp_path, number):
    program = f"""
import signal, time
from megadit.models.shared.files import atomic_path

class Left:
    def __del__(self):
        signal.raise_signal({number})  # Python ignores what a finalizer raises

with atomic_path({str(tmp_path / "made")!r}) as temporary:
    temporary.touch()
    Left()
    time.sleep(60)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stderr) == (128 + number, "") and not list(tmp_path.iterdir())


def test_atomic_directory_refuses_to_replace_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"), atomic_directory(tmp_path / "file"):
        pass


def test_one_process_holds_a_file_and_lets_go_when_it_is_killed(tmp_path):
    path = tmp_path / "new" / "lock"
    program = (
        "import sys, time; from megadit.models.shared.files import held_alone\n"
        "with held_alone(sys.argv[1]): print('held', flush=True); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "held\n"
        with path.open("r+") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        child.kill()
        child.wait()
    with held_alone(path), held_alone(tmp_path / "another"):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"), held_alone(tmp_path / "file" / "lock"):
        pass


def test_json_round_trip_and_errors(tmp_path):
    write_json(tmp_path / "a.json", {"name": "sieben", "x": [1.5, None]})
    assert read_json(tmp_path / "a.json") == {"name": "sieben", "x": [1.5, None]}
    (tmp_path / "broken.json").write_text('{"a": ')
    with pytest.raises(UserError, match="broken.json is not valid JSON"):
        read_json(tmp_path / "broken.json")
    with pytest.raises(UserError, match="missing.json does not exist"):
        read_json(tmp_path / "missing.json")


@pytest.fixture
def standing_clock(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)


def test_progress_prints_lines_where_there_is_no_terminal(standing_clock):
    stream = io.StringIO()
    with Progress(4, "training", plain_interval=0.0, stream=stream, completed=1) as bar:
        bar.advance(1, loss=0.123456, lr=8e-3)
        bar.advance(2, loss=0.1)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("training: 2/4  loss 0.1235  lr 0.008  0 s elapsed, 0 s left")
    assert lines[-1].startswith("training: 4/4  loss 0.1  lr 0.008  0 s elapsed")


def test_progress_prints_no_more_often_than_asked(standing_clock):
    stream = io.StringIO()
    with Progress(1000, "reading", plain_interval=3600, stream=stream) as bar:
        for _ in range(1000):
            bar.advance()
    assert stream.getvalue().splitlines() == ["reading: 1000/1000  0 s elapsed"]


def test_progress_shows_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    with Progress(2, "training", stream=stream) as bar:
        bar.advance(2, loss=0.25)
    assert "training" in stream.getvalue() and "2/2" in stream.getvalue() and "loss 0.25" in stream.getvalue()


def redraws(columns, values, encoding="utf-8"):
    """What a pseudo-terminal of so many columns is shown of a task half done, one entry for each time it is drawn."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    with open(theirs, "w", encoding=encoding) as stream, Progress(1050, "training", stream=stream) as bar:
        for _ in range(525):
            bar.advance(1, **values)
    shown = b""
    with suppress(OSError):  # what reading ends with where the other side is closed
        while part := os.read(ours, 1 << 16):
            shown += part
    os.close(ours)
    shown = shown.decode()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    return [line for line in re.split(r"[\r\n]+", plain) if line.strip()]


@pytest.mark.parametrize("columns", [40, 80, 100, 160])
def test_progress_fits_the_terminal_and_shows_what_matters(columns, monkeypatch):
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    values = {"loss": 0.123456, "s/step": 0.2314, "lr": 0.012, "grad_norm": 1.2345, "samples_per_s": 173.5}
    line = redraws(columns, values)[-1]
    assert len(line) <= columns and re.match(r"training 525/1050  ETA \d+ s  loss 0\.1235", line)
    assert ("s/step 0.2314" in line) == (columns >= 80) and ("grad_norm" in line) == (columns > 80)
    assert ("━" in line and "─" in line) == (columns > 40)


def test_progress_draws_its_bar_of_what_the_terminal_can_write(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert "#" in redraws(80, {}, encoding="ascii")[-1]


def test_time_left_leaves_the_first_step_out(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[-1])
    with Progress(12, "training", enabled=False) as bar:
        assert bar.seconds_left is None
        for second in (100.0, 101.0, 102.0):
            clock.append(second)
            bar.advance()
        assert bar.seconds_left == pytest.approx(9.0)
        clock.append(102.5)
        assert bar.seconds_left == pytest.approx(8.5)
        bar.advance(-3)
        assert bar.seconds_left is None


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_progress_is_silent_when_disabled(stream):
    with Progress(2, "training", enabled=False, plain_interval=0.0, stream=stream) as bar:
        bar.advance(2)
    assert bar.completed == 2
    assert stream.getvalue() == ""


def fail_as_user(argv):
    raise UserError(f"bad value {argv}")


def interrupt(argv):
    raise KeyboardInterrupt


def limited_to(num_bytes, write):
    """Writes where no file may be larger."""
    before, signalled = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, signalled)


def out_of_files(file):
    """Opens a file where no more may be open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        file.open()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


CLOSED = """
import os, sys
from megadit.models.shared.cli.command import run_command
def write(argv):
    with open("file", "w") as file:
        print("said")
        print("warned", file=sys.stderr)
        os.write(1, b"said by a library")
        print("kept", file=file)
raise SystemExit(run_command(write, [], is_run=len(sys.argv) > 1))
"""


def test_a_library_that_closes_its_stream_at_exit_closes_none_of_the_process(capsys):
    taken = []
    assert run_command(lambda argv: taken.extend([sys.stdout, sys.stderr]), []) == 0
    for stream in taken:
        stream.close()
    print("still here")
    print("here, too", file=sys.stderr)
    assert tuple(capsys.readouterr()) == ("still here\n", "here, too\n")


@pytest.mark.parametrize("arguments", [[], ["is_run"]])
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_streams_are_no_fault_and_take_nothing_of_a_file(closed, arguments, tmp_path):
    words = shlex.join([sys.executable, "-c", CLOSED, *arguments])
    assert subprocess.run(["sh", "-c", f"{words} {closed}"], cwd=tmp_path, capture_output=True).returncode == 0
    assert (tmp_path / "file").read_text() == "kept\n"


@pytest.mark.parametrize("arguments", [[], ["is_run"]])
@pytest.mark.parametrize("full", [">", "2>"])
def test_a_full_disk_of_messages_ends_no_work_and_one_of_results_is_told(full, arguments, tmp_path):
    words = shlex.join([sys.executable, "-c", CLOSED.replace('os.write(1, b"said by a library")', ""), *arguments])
    ended = subprocess.run(["sh", "-c", f"{words} {full}/dev/full"], cwd=tmp_path, capture_output=True, text=True)
    if full == ">" and not arguments:
        told = "error: standard output cannot be written: No space left on device; give it another file\n"
        assert (ended.returncode, ended.stderr.removeprefix("warned\n")) == (2, told)
    else:
        assert (ended.returncode, (tmp_path / "file").read_text()) == (0, "kept\n")


def test_a_folder_that_is_gone_is_no_place_to_be_in(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert run_command(lambda argv: None, []) == 2
    assert capsys.readouterr().err.startswith("error: the current folder was removed; change to another")


def test_run_command_gives_exit_codes_and_one_line(capsys):
    assert run_command(lambda argv: None, []) == 0
    assert run_command(lambda argv: 3, []) == 3
    assert run_command(fail_as_user, ["x"]) == 2
    assert run_command(interrupt, []) == 130
    assert capsys.readouterr().err.splitlines() == ["error: bad value ['x']", "interrupted"]


@given(st.text())
@example("a\nb\x1b[31m\x07\u202egnp.exe\ud800")
def test_an_error_is_one_line_that_commands_no_terminal(text):
    def fail(argv):
        raise UserError(text)

    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert run_command(fail, []) == 2
    line = said.getvalue().removesuffix("\n")
    assert line.startswith("error: ") and line.isprintable()


def test_commands_leave_no_gaps_in_a_gpu_s_memory(monkeypatch):
    """Torch reads it at its first allocation; what the user says stands."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    run_command(lambda argv: None, [])
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:128"
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    run_command(lambda argv: None, [])
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_run_command_debug_shows_the_traceback_and_is_taken_out():
    with pytest.raises(UserError, match=r"bad value \['x'\]"):
        run_command(fail_as_user, ["--debug", "x"])


def test_run_command_never_hides_a_fault_of_ours():
    with pytest.raises(ZeroDivisionError):
        run_command(lambda argv: 1 // 0, [])


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda file: (file / "a").mkdir(), "file/a cannot be used: Not a directory; give another path"),
        (lambda file: file.mkdir(), "file cannot be used: File exists; give another path"),
        (lambda file: file.parent.open("w"), "cannot be used: Is a directory; give another path"),
        (lambda file: limited_to(1, lambda: file.write_bytes(bytes(2))), "File too large; raise the limit"),
        (lambda file: out_of_files(file), "file cannot be used: Too many open files; raise the limit"),
        (lambda file: open("/dev/full", "w", buffering=1).write("a\n"), " left on the disk of "),
    ],
)
def test_what_cannot_be_made_at_a_path_is_told_in_a_line(tmp_path, capsys, make, told):
    file = tmp_path / "file"
    file.touch()
    assert run_command(lambda argv: make(file), []) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and told in error and error.count("\n") == 1
    with pytest.raises(OSError, match="Errno"):
        run_command(lambda argv: make(file), ["--debug"])


def test_other_faults_of_the_system_are_ours():
    with pytest.raises(FileNotFoundError):
        run_command(lambda argv: open("nowhere/at/all"), [])


def test_a_folder_needs_a_place_without_files(tmp_path):
    (tmp_path / "file").touch()
    found = [can_be_folder(tmp_path / name) for name in ("", "new/a", "file", "file/a/b")]
    assert found == [True, True, False, False]


@pytest.mark.parametrize("show", ["print", "Console().print"])
def test_a_reader_that_leaves_ends_a_command_in_silence(show):
    """As in `command | head -1`, with standard output buffered or not."""
    program = (
        "import sys; from megadit.models.shared.cli.command import run_command; from rich.console import Console;"
        "sys.stdin.readline();"  # until the reader has left
        f"sys.exit(run_command(lambda argv: {show}('text'), []))"
    )
    for unbuffered in ("", "1"):
        command = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )
        command.stdout.close()
        command.stdout = None
        _, stderr = command.communicate(b"\n")
        assert (command.returncode, stderr) == (141, b"")


def test_a_broken_pipe_of_another_kind_is_a_fault_of_ours():
    program = (
        "from megadit.models.shared.cli.command import run_command\n"
        "def fail(argv): raise BrokenPipeError('worker')\n"
        "run_command(fail, [])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1 and "BrokenPipeError: worker" in result.stderr


def parse(*arguments: str) -> argparse.Namespace:
    parser = CommandParser(prog="megadit verb")
    parser.add_argument("--num_steps", type=int)
    parser.add_argument("--prompt", nargs="+")
    return parser.parse_args(arguments)


def test_arguments_may_be_spelt_with_dashes_and_keep_their_values():
    assert parse("--num-steps=3", "--prompt", "--like this", "well-known").num_steps == 3
    assert parse("--num-steps", "3", "--prompt", "well-known").prompt == ["well-known"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num_stepz", "3"], r"unknown argument '--num_stepz'; did you mean '--num_steps'\? see `megadit verb --h"),
        (["--num_step", "3"], "unknown argument '--num_step'"),
        (["stray"], "unknown argument 'stray'; see"),
        (["--num_steps", "x"], "invalid int value: 'x'"),
    ],
)
def test_wrong_arguments_are_user_errors(arguments, message):
    with pytest.raises(UserError, match=message):
        parse(*arguments)


def test_support_needs_no_torch():
    """`megadit --help` imports this module, and must be quick."""
    imports = "from megadit.models.shared import errors, files\nfrom megadit.models.shared.cli import command, verbs"
    code = f"import sys\n{imports}\nsys.exit('torch' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_full_disk_is_told_with_its_path_and_what_is_left(tmp_path, capsys):
    """A failed write does not say of which file it was."""

    def write(argv):
        with atomic_path(tmp_path / "new" / "video.mp4"):
            raise OSError(errno.ENOSPC, "No space left on device")

    assert run_command(write, []) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path}/new/video.mp4 cannot be used: No space left on device (")
    assert f"iB left on the disk of {tmp_path}/new); free some space" in error and error.count("\n") == 1
    with pytest.raises(OSError) as told, atomic_directory(tmp_path / "folder"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert told.value.filename == str(tmp_path / "folder")


@pytest.mark.parametrize("number, remedy", {errno.EFBIG: "(ulimit -f)", errno.EIO: "check its disk"}.items())
def test_a_failed_write_names_its_file(tmp_path, capsys, number, remedy):
    def write(argv):
        with atomic_path(tmp_path / "video.mp4"):
            raise OSError(number, os.strerror(number))

    assert run_command(write, []) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path}/video.mp4 cannot be used: {os.strerror(number)}; ") and remedy in error


def test_a_user_without_a_home_is_told_what_to_set(capsys, monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert run_command(lambda _: cache_folder(), []) == 2
    assert capsys.readouterr().err.endswith("no home folder; set HOME to one that may be written to\n")


@pytest.mark.parametrize("path, remedy", {"a" * 300: "give a shorter path", "loop/b": "give another path"}.items())
def test_a_path_that_cannot_be_is_one_line(tmp_path, capsys, path, remedy):
    (tmp_path / "loop").symlink_to("loop")
    assert run_command(lambda _: Path(tmp_path / path).write_text(""), []) == 2
    error = capsys.readouterr().err
    assert f"{path} cannot be used: " in error and error.endswith(f"; {remedy}\n")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.ENOSPC, "No space left on device", "/dev/shm/pym-1-abc"),
        RuntimeError("unable to write to file </torch_1_2_3>: No space left on device (28)"),
        RuntimeError("DataLoader worker (pid 1) is killed by signal: Bus error. It is possible that ..."),
    ],
    ids=["a lock", "a buffer", "a tensor", "a reader"],
)
def test_full_shared_memory_is_told_by_its_name(error, capsys, monkeypatch):
    def fail(argv):
        raise error

    monkeypatch.setattr(command.shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    assert run_command(fail, []) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in ("/dev/shm", "--shm-size", "data.num_workers=0")) and told.count("\n") == 1


PROCESSES = """
import multiprocessing, sys
from megadit.models.shared.cli.command import run_command
sys.exit(run_command(lambda argv: getattr(multiprocessing, argv[0])(*argv[1:], 0) and None, sys.argv[1:]))
"""


@pytest.mark.parametrize("made", ["Semaphore", "Array d"])
@pytest.mark.parametrize("mount", ["-o ro tmpfs /dev/shm", "-o size=4k tmpfs /dev/shm", "tmpfs /dev"])
def test_shared_memory_that_cannot_be_used_is_told_by_its_name(mount, made):
    """As in containers: read-only, without room, missing."""
    words = shlex.join([sys.executable, "-c", PROCESSES, *made.split()])
    fill = "head -c 4096 /dev/zero >/dev/shm/fill 2>&1" if "size" in mount else "true"
    shell = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs {mount} && {{ {fill}; {words}; }}"]
    if os.geteuid() or subprocess.run([*shell[:-1], "mount -t tmpfs tmpfs /mnt"], capture_output=True).returncode:
        pytest.skip("mounts need root")
    ended = subprocess.run(shell, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and ended.stderr.startswith("error: /dev/shm is full or cannot be written"), ended


KEY = "mdk_0a1b2c3d4e5f_" + "x" * 43


@pytest.mark.parametrize("content", [f"{KEY}\r\n".encode(), f"\ufeff{KEY}\n".encode(), KEY.encode("utf-16")])
def test_a_key_is_read_as_each_shell_wrote_it(content, tmp_path):
    (tmp_path / "key").write_bytes(content)
    assert read_key(tmp_path / "key") == KEY


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "holds no key"),
        (f"{KEY}\n{KEY}\n".encode(), "holds no key"),
        (f"Bearer {KEY}".encode(), "holds no key"),
        (f"{KEY}é".encode(), "holds no key"),
        (f"{KEY}é".encode("latin-1"), "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_file_without_a_key_is_told(content, reason, tmp_path):
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    with pytest.raises(UserError, match=f"key {reason}.*`megadit serve keys add NAME"):
        read_key(tmp_path / "key")
    with pytest.raises(UserError, match="/dev/zero cannot be read"):
        read_key("/dev/zero")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
@pytest.mark.parametrize("value", ["", "x", "-1", "1.0"])
def test_a_rank_that_is_none_is_told_whatever_the_command(name, value, capsys, monkeypatch):
    monkeypatch.setenv(name, value)
    assert run_command(lambda argv: 0, []) == 2
    assert capsys.readouterr().err.startswith(f"error: {name}={value!r} in the environment is no whole number")
