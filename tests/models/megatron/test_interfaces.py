"""Ranks on two nodes find each other though a node's own name resolves to loopback: two network namespaces."""

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megadit.models.megatron import interfaces
from megadit.models.megatron.interfaces import interface_towards, join_ranks, name_gloos_interface
from megadit.models.shared.addresses import free_ports
from megadit.models.shared.cli.command import StopRequest
from megadit.models.shared.errors import UserError

PROGRAM = """
import os, sys
if sys.argv[1] == "named":
    from megadit.models.megatron.interfaces import name_gloos_interface
    name_gloos_interface()
import datetime, torch
import torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
total = torch.ones(1)
dist.all_reduce(total)
print(os.environ.get("GLOO_SOCKET_IFNAME"), int(total), flush=True)
"""
RANK = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
NAMES = ("megadit-node-0", "megadit-node-1")


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def nodes():
    """Two namespaces joined by a cable, 10.77.0.1 and 10.77.0.2."""
    if shutil.which("ip") is None or os.geteuid():
        pytest.skip("network namespaces need root and iproute2")
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", "cable0", "netns", NAMES[0], "type", "veth", "peer", "name", "cable1", "netns", NAMES[1])
        for rank, name in enumerate(NAMES):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", f"cable{rank}")
            ip("-n", name, "link", "set", f"cable{rank}", "up")
        yield NAMES
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
def test_ranks_of_two_nodes_meet(nodes, tmp_path):
    hosts = tmp_path / "hosts"  # as many images have it: the node's own name is loopback
    hosts.write_text(f"127.0.0.1 localhost {os.uname().nodename}\n")
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    ranks = []
    for rank, name in enumerate(nodes):
        of_rank = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        environment = {**os.environ, **of_rank, "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29511", "PYTHONPATH": path}
        environment.pop("GLOO_SOCKET_IFNAME", None)
        shell = f"mount --bind {hosts} /etc/hosts 2>/dev/null; exec {sys.executable} -c '{PROGRAM}' named"
        command = ["ip", "netns", "exec", name, "sh", "-c", shell]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        found = [process.communicate(timeout=120)[0].split() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert found == [["cable0", "2"], ["cable1", "2"]]


def test_what_the_user_named_stays_and_one_node_needs_no_name(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    name_gloos_interface()
    assert "GLOO_SOCKET_IFNAME" not in os.environ, "one node"
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    name_gloos_interface()
    assert "GLOO_SOCKET_IFNAME" not in os.environ, "the first node's address is loopback's"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    name_gloos_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert interface_towards("no.such.host.invalid") is None


def test_whoever_joins_ranks_names_the_interface(monkeypatch):
    """Training, preparing, sampling: gloo reads it when the process group is made."""
    for name, value in (RANK | {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "first"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that what is set below is taken back
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(interfaces, "interface_towards", lambda host: f"towards {host}")
    found = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend: found.append(os.environ["GLOO_SOCKET_IFNAME"]))
    join_ranks("gloo")
    assert found == ["towards first"]


def test_a_port_that_is_taken_is_told_in_one_line(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=f"MASTER_PORT={port}: the port is in use .* set another") as told:
            join_ranks("gloo")
    assert "\n" not in str(told.value)


def test_ranks_may_open_as_many_connections_as_the_machine_allows(monkeypatch):
    """256 ranks hold 1,785 each for Megatron's groups; a shell's usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda *_, **__: seen.append(resource.getrlimit(resource.RLIMIT_NOFILE))
    )
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard - 1), hard))
    try:
        join_ranks("gloo")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert seen == [(hard, hard)]


NO_RANKS = {
    "RANK alone": ({"WORLD_SIZE": "", "MASTER_ADDR": "", "MASTER_PORT": ""}, "WORLD_SIZE of a rank is not set"),
    "no address": ({"MASTER_ADDR": ""}, "MASTER_ADDR of a rank is not set"),
    "no port": ({"MASTER_PORT": ""}, "MASTER_PORT of a rank is not set"),
    "one too many": ({"RANK": "2"}, "RANK=2 is none of the ranks below WORLD_SIZE=2"),
    "a word as port": ({"MASTER_PORT": "http"}, "MASTER_PORT='http' in the environment is no port"),
    "too large a port": ({"MASTER_PORT": "65536"}, "MASTER_PORT='65536' in the environment is no port"),
}


@pytest.mark.parametrize(("changed", "said"), NO_RANKS.values(), ids=NO_RANKS)
def test_an_environment_that_describes_no_rank_is_told_at_once(changed, said, monkeypatch):
    """Such as one that another program left."""
    for name, value in (RANK | changed).items():
        monkeypatch.setenv(name, value)
        if not value:
            monkeypatch.delenv(name)
    monkeypatch.setattr(dist, "init_process_group", pytest.fail)
    with pytest.raises(UserError, match=f"{said}.*unset RANK"):
        join_ranks("gloo")


def test_ranks_that_do_not_come_are_told_in_one_line(monkeypatch):
    (port,) = free_ports(1)
    for name, value in (RANK | {"RANK": "0", "MASTER_PORT": str(port)}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"cannot meet at MASTER_ADDR=127.0.0.1 MASTER_PORT={port}: .*1/2 clients"):
        join_ranks("gloo", timeout=timedelta(seconds=1))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_rank_that_waits_for_others(number, monkeypatch):
    """Though the command handles it: no handler runs while torch waits for them."""
    (port,) = free_ports(1)
    for name, value in (RANK | {"RANK": "0", "MASTER_PORT": str(port)}).items():
        monkeypatch.setenv(name, value)
    if not (rank := os.fork()):
        try:
            with StopRequest():
                join_ranks("gloo", timeout=timedelta(seconds=20))
        finally:
            os._exit(0)
    is_waiting = False
    while not is_waiting:
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            is_waiting = True
    os.kill(rank, number)
    assert os.waitpid(rank, 0)[1] == number
