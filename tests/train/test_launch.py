"""Several ranks from one command, and what comes back from them."""

import signal
import subprocess
import sys
import tempfile
import time

import pytest

from megadit.models.megatron.launch import launch, rank_arguments
from megadit.models.shared.errors import UserError
from megadit.models.shared.resources import available_cores
from megadit.train.__main__ import _warn_of_shared_store

RANK_PROGRAM = """
import os, pathlib, signal, sys, time
folder, behaviour = pathlib.Path(sys.argv[1]), sys.argv[2]
rank = os.environ["RANK"]
def leave(*_):
    (folder / f"told{rank}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
(folder / f"threads{rank}").write_text(os.environ["OMP_NUM_THREADS"])
(folder / f"rank{rank}").write_text(os.environ["WORLD_SIZE"])
while behaviour == "fail" and rank == "1":
    if (folder / "rank0").exists():
        sys.exit(2)
    time.sleep(0.01)
if behaviour in ("fail", "wait"):
    time.sleep(60)
"""


LISTENING_PROGRAM = """
import os, pathlib, sys
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
mine = {os.readlink(path) for path in pathlib.Path("/proc/self/fd").iterdir() if os.path.islink(path)}
found = []
for table in ("tcp", "tcp6"):
    for line in pathlib.Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
        local, state, inode = (line.split()[column] for column in (1, 3, 9))
        if state == "0A" and f"socket:[{inode}]" in mine:
            found.append(local.partition(":")[0])
(pathlib.Path(sys.argv[1]) / f"rank{os.environ['RANK']}").write_text(" ".join(found))
dist.barrier()
"""
LOOPBACK = {"0100007F", "0" * 24 + "01000000"}
"""As the kernel writes 127.0.0.1 and ::1."""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "rank_program.py").write_text(RANK_PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "rank_program"


@pytest.mark.slow
def test_every_rank_runs(module, tmp_path, monkeypatch):
    """Each with its share of the cores; nothing stays behind."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert launch(module, [str(tmp_path), "succeed"], num_processes=2) == 0
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["2", "2"]
    assert not list((tmp_path / "temporary").iterdir())
    share = max(1, available_cores() // 2)
    assert [int((tmp_path / f"threads{rank}").read_text()) for rank in range(2)] == [share, share]


@pytest.mark.slow
def test_ranks_of_one_machine_listen_to_it_alone(tmp_path, monkeypatch):
    (tmp_path / "listening_program.py").write_text(LISTENING_PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert launch("listening_program", [str(tmp_path)], num_processes=2) == 0
    listening = [set((tmp_path / f"rank{rank}").read_text().split()) for rank in range(2)]
    assert listening[1] and listening[1] <= LOOPBACK  # rank 0 may hold the store as well, which torch opens to all


@pytest.mark.slow
def test_the_exit_code_of_a_failed_rank_comes_back_and_nothing_else_is_said(module, tmp_path, capfd):
    assert launch(module, [str(tmp_path), "fail"], num_processes=2) == 2
    assert (tmp_path / "told0").exists()  # the other rank was ended
    assert not capfd.readouterr().err


@pytest.mark.slow
def test_sigterm_reaches_every_rank(module, tmp_path):
    call = f"launch({module!r}, [{str(tmp_path)!r}, 'wait'], num_processes=2)"
    program = f"from megadit.models.megatron.launch import launch; raise SystemExit({call})"
    parent = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while not all((tmp_path / f"rank{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.1)
    parent.send_signal(signal.SIGTERM)
    _, said = parent.communicate(timeout=240)
    assert (parent.returncode, said) == (128 + signal.SIGTERM, "")
    assert all((tmp_path / f"told{rank}").exists() for rank in range(2))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--nproc", "2", "--recipe", "digits"], ["--recipe", "digits"]),
        (["--recipe", "digits", "--nproc=2", "a.b=c"], ["--recipe", "digits", "a.b=c"]),
        (["--recipe", "digits"], ["--recipe", "digits"]),
    ],
)
def test_ranks_get_the_command_line_without_nproc(argv, expected, monkeypatch):
    assert rank_arguments(argv, debug=False) == expected
    assert rank_arguments(argv, debug=True) == [*expected, "--debug"]
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="leave it out under torchrun"):
        rank_arguments(argv, debug=False)


@pytest.mark.parametrize(
    ("shared", "restarts", "nodes", "is_reported"),
    [("True", 3, 2, True), ("False", 3, 2, False)] + [("True", 0, 2, False), ("True", 3, 1, False)],
)
def test_restarts_on_several_nodes_are_told_what_they_need(shared, restarts, nodes, is_reported, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(restarts))
    monkeypatch.setenv("GROUP_WORLD_SIZE", str(nodes))
    _warn_of_shared_store()
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in capsys.readouterr().err) == is_reported
