"""What is kept running is started again however it ended, and stays ended once it is told to."""

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

import pytest

from megadit.models.shared.addresses import free_ports
from megadit.models.shared.errors import UserError
from megadit.serve.launch import up
from megadit.serve.launch.up import _renew, ask_to_renew, noted, supervise
from megadit.serve.supervise import Child, OwnedProcess, keep_running, responds


class FakeServer:
    """Ends with the given codes, one each time it is entered; an error stands for a start that fails."""

    name, ready, addresses, killed_because = "fake", "is ready", "nowhere", None

    def __init__(self, *codes):
        self.codes = list(codes)

    def __enter__(self):
        if isinstance(self.codes[0], Exception):
            raise self.codes.pop(0)
        return self

    def __exit__(self, *_):
        pass

    def wait(self):
        return self.codes.pop(0)


class Pauses:
    """Notes how long was waited, and waits not at all; told to stop in the last of so many pauses."""

    def __init__(self, count):
        self.seconds, self._count = [], count

    def wait(self, seconds):
        self.seconds.append(seconds)

    def is_set(self):
        return len(self.seconds) == self._count


def test_the_pause_before_a_restart_doubles():
    pauses, told = Pauses(8), []
    server = FakeServer(-9, UserError("port taken"), 0, OSError("no room"), *[1] * 6)
    assert keep_running(server, report=told.append, stopping=pauses) == 0
    assert pauses.seconds == [1, 2, 4, 8, 16, 32, 60, 60]
    assert "port taken" in "".join(told) and "no room" in "".join(told)
    assert len(server.codes) == 2


def test_a_pause_is_short_again_after_a_time_of_service():
    pauses = Pauses(3)
    assert keep_running(FakeServer(1, 1, 1), report=lambda _: None, stopping=pauses, stable_seconds=-1) == 0
    assert pauses.seconds == [1, 1, 1]


def test_a_server_that_is_told_to_stop_in_a_pause_does_not_start_again():
    stopping, server = threading.Event(), FakeServer(-9, 0)
    report = {"starting it again in 1 s": stopping.set}
    keep_running(server, report=lambda message: report.get(message.rpartition("; ")[2], bool)(), stopping=stopping)
    assert server.codes == [0]


def test_a_first_start_that_fails_is_told_at_once():
    with pytest.raises(UserError, match="port taken"):
        keep_running(FakeServer(UserError("port taken")), report=lambda _: None)


@pytest.fixture
def signals(monkeypatch):
    """Looked for often; puts back what handled them."""
    monkeypatch.setattr(up, "_SECONDS_BETWEEN_LOOKS", 0.02)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_server_that_starts_when_it_is_told_to_stop_is_stopped(signals, number):
    """The signal comes between the last look at it and the start of the process."""

    def prepare():
        os.kill(os.getpid(), number)
        time.sleep(0.5)  # long enough for the first attempt to stop what is not there yet

    sleeper = OwnedProcess(
        command=["sleep", "600"], name="sleeper", addresses="nowhere", is_ready=lambda: True, ailment=lambda: None,
        start_seconds=60, stop_seconds=60, prepare=prepare,
    )  # fmt: skip
    assert supervise([sleeper]) == 0
    assert not sleeper.is_alive()


def test_a_server_that_just_starts_is_renewed_once_it_is_ready(signals):
    """Asked for as soon as it can be: a first start that is ended would end the service."""
    starts, looks = count(), count()

    def prepare():
        if next(starts) == 0:
            os.kill(os.getpid(), signal.SIGUSR1)

    def renew(stopping):
        _renew(sleeper, sleeper, f"http://127.0.0.1:{idle.server_port}/health/idle", stopping)
        os.kill(os.getpid(), signal.SIGTERM)

    class Idle(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

    sleeper = OwnedProcess(
        command=["sleep", "600"], name="sleeper", addresses="nowhere", is_ready=lambda: next(looks) > 30,
        ailment=lambda: None, start_seconds=60, stop_seconds=60, prepare=prepare,
    )  # fmt: skip
    with ThreadingHTTPServer(("127.0.0.1", 0), Idle) as idle:
        threading.Thread(target=idle.serve_forever, args=[0.02], daemon=True).start()
        assert supervise([sleeper], renew) == 0
        idle.shutdown()
    assert next(starts) == 2


def test_all_ends_where_one_cannot_be_kept(signals):
    server = FakeServer(ZeroDivisionError("a fault of ours"))
    server.stop = lambda: None
    with pytest.raises(ZeroDivisionError):
        supervise([server])


COMMANDS = {
    "up": "up.ask_to_renew = lambda _: say(); up.main(['models', '--drain'])",
    "run": "run.check_memory = lambda *_: say(); run.main(['models'])",
    "gateway": "gateway.most_connections = lambda *_, **__: say(); gateway.main([])",
    "demo": "demo.check_free = lambda *_: say(); demo.main([])",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_service_goes_on_without_a_reader_of_its_log(name):
    program = (
        "import sys; from megadit.serve.launch import run, up; from megadit.serve.gateway import command as gateway; "
        "from megadit.serve.page import demo; say = lambda: (print('x' * 9, file=sys.stderr, flush=True), sys.exit(7));"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", program + COMMANDS[name]], stderr=write)
    os.close(write)
    assert done.returncode == 7


ENDED = {
    "run": "run.check_memory = run.LocalServer = MagicMock(); run.keep_running = hang_up; sys.exit(run.main(['m']))",
    "demo": "demo.check_free = MagicMock(); demo._client = hang_up; sys.exit(demo.main([]))",
}


@pytest.mark.parametrize("name, code", {"run": 0, "demo": 130}.items())
def test_a_closed_terminal_ends_a_service_as_control_c_does(name, code):
    """It hangs up several times; the later ones do not cut short what ends then."""
    program = (
        "import signal, sys; from unittest.mock import MagicMock; from megadit.serve.launch import run\n"
        "from megadit.serve.page import demo\n"
        "def hang_up(*_, **__):\n"
        "    try: signal.raise_signal(signal.SIGHUP)\n"
        "    finally: signal.raise_signal(signal.SIGHUP); print('ended')\n"
    )
    done = subprocess.run([sys.executable, "-c", program + ENDED[name]], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "ended\n"), done.stderr


def test_what_speaks_no_http_does_not_answer():
    def answer() -> None:
        with listening.accept()[0] as connection:
            connection.recv(10_000)
            connection.sendall(b"SSH-2.0-something\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer)
        thread.start()
        assert not responds(f"http://127.0.0.1:{listening.getsockname()[1]}/health/live")
        thread.join()


def test_a_service_runs_where_nothing_can_be_noted(tmp_path, monkeypatch, capsys):
    (tmp_path / "megadit").touch()  # where its folder would be
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with noted(8080) as renewed:
        renewed()
    assert "`serve up --drain` will not find this service: File exists" in capsys.readouterr().err


def test_the_second_at_a_port_leaves_the_note_of_the_first(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with noted(8080) as first, noted(8080) as second:
        first()
        second()
    assert (tmp_path / "megadit" / "up-8080").read_text().split() == [str(os.getpid()), "1"]
    assert capsys.readouterr().err.count("will not find") == 1


def test_a_service_of_another_container_is_not_signalled(tmp_path, monkeypatch):
    """Where both have the folder: a process of that number is another here, or none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    with noted(8080), pytest.raises(UserError, match="at port 8080 is not in this container"):
        (tmp_path / "megadit" / "up-8080").write_text(f"{ended.pid} 0\n")
        ask_to_renew(8080)


def test_a_child_makes_files_of_its_own_whatever_it_asks_for(tmp_path):
    """As boost does, which takes a umask back by fchmod; chmod by name stays what it is."""
    made, opened = tmp_path / "made", tmp_path / "opened"
    code = "import os, sys; f = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR, 0o666); os.fchmod(f, 0o666); "
    code += "open(sys.argv[2], 'x'); os.chmod(sys.argv[2], 0o644)"
    child = Child([sys.executable, "-c", code, str(made), str(opened)], environment=os.environ, log=None)
    assert child.wait(lambda: None) == 0
    assert [stat.S_IMODE(path.stat().st_mode) for path in (made, opened)] == [0o600, 0o644]


@pytest.mark.parametrize("words", [["tritonserver", "--metrics-port={}"], [*sorted(up._GATEWAY), "--port={}"]])
def test_servers_of_a_service_that_was_killed_are_waited_for(words, monkeypatch):
    """They still hold the ports for some seconds; those of one that lives are none of these."""
    said = []

    def end_it(message):
        said.append(message)
        orphan.kill()

    monkeypatch.setattr(up, "print_on_stderr", end_it)
    port, other = free_ports(2)
    command = [sys.executable, "-c", "print(flush=True); input()", *(word.format(port) for word in words)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as orphan:
        orphan.stdout.readline()  # a process that is just being executed has no command line yet
        assert up._orphans({port}) == [orphan.pid] and up._orphans({other}) == []
        up._wait_for_orphans({port, other})
        assert orphan.poll() is not None and len(said) == 1 and "waiting for them" in said[0]
    code = f"import subprocess; subprocess.run({command!r})"
    with subprocess.Popen([sys.executable, "-c", code, "serve", "up"], **pipes) as living:
        living.stdout.readline()
        assert up._orphans({port}) == []
        living.stdin.close()
