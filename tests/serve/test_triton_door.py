"""Who may make a real tritonserver do more than make videos: nobody, or who knows the secret."""

import base64
import contextlib
import json
import os
import socket
import stat
from pathlib import Path

import httpx
import pytest

from megadit.serve.client import VideoClient
from megadit.serve.contract import VideoRequest
from megadit.serve.launch.local_server import SECRET_HEADER, SHARED_MEMORY, LocalServer

grpcclient = pytest.importorskip("tritonclient.grpc")

EVIL_CONFIG = {
    "name": "evil",
    "backend": "python",
    "max_batch_size": 0,
    "input": [{"name": "a", "data_type": "TYPE_INT32", "dims": [1]}],
    "output": [{"name": "b", "data_type": "TYPE_INT32", "dims": [1]}],
    "instance_group": [{"kind": "KIND_CPU"}],
}
SECRET = "0123456789abcdef" * 2


def evil_load(trace) -> dict:
    """A request to load a model whose code comes with it, and leaves a file where it ran."""
    code = f"""
from pathlib import Path
class TritonPythonModel:
    def initialize(self, args):
        Path({str(trace)!r}).touch()
"""
    files = {"file:1/model.py": base64.b64encode(code.encode()).decode()}
    return {"parameters": {"config": json.dumps(EVIL_CONFIG)} | files}


def send_load(server: LocalServer, trace, headers: dict[str, str]) -> httpx.Response:
    """As a page of another site can have a browser send it: text, for which browsers ask nobody beforehand."""
    url = f"http://{server.http_url}/v2/repository/models/evil/load"
    headers = {"content-type": "text/plain", "origin": "https://evil.example", **headers}
    return httpx.post(url, content=json.dumps(evil_load(trace)), headers=headers, timeout=60)


RESTRICTED = [
    ("POST", "repository/index"),
    ("POST", "repository/models/text_to_video/load"),
    ("POST", "repository/models/text_to_video/unload"),
    ("POST", "systemsharedmemory/region/any/register"),
    ("GET", "systemsharedmemory/status"),
    ("POST", "cudasharedmemory/region/any/register"),
    ("GET", "trace/setting"),
    ("POST", "trace/setting"),
    ("GET", "logging"),
    ("POST", "logging"),
]


def test_what_makes_no_video_is_refused_to_everybody(server, tmp_path):
    trace = tmp_path / "ran"
    for headers in ({}, {SECRET_HEADER: ""}, {SECRET_HEADER: SECRET}):
        assert send_load(server, trace, headers).status_code == 403
        with httpx.Client(base_url=f"http://{server.http_url}/v2", headers=headers) as client:
            for method, path in RESTRICTED:
                answer = client.request(method, path, content=b"{}")
                assert answer.status_code == 403, (path, answer.text)
    assert not trace.exists()
    assert len(VideoClient(f"http://{server.http_url}").generate(VideoRequest(prompt="a"))) == 1, "and videos are made"


def test_what_makes_no_video_is_refused_over_grpc_too(server, tmp_path):
    load = evil_load(tmp_path / "ran")["parameters"]
    files = {"file:1/model.py": base64.b64decode(load["file:1/model.py"])}
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        for ask in (
            lambda: client.load_model("evil", config=load["config"], files=files),
            lambda: client.unload_model("text_to_video"),
            client.get_model_repository_index,
            lambda: client.register_system_shared_memory("any", "/any", 8),
            client.get_system_shared_memory_status,
            lambda: client.update_trace_settings(settings={"trace_file": str(tmp_path / "trace")}),
            lambda: client.update_log_settings(settings={"log_file": str(tmp_path / "log")}),
        ):
            with pytest.raises(grpcclient.InferenceServerException, match="restricted"):
                ask()
    assert not list(tmp_path.iterdir())
    assert len(VideoClient(f"grpc://{server.grpc_url}").generate(VideoRequest(prompt="a"))) == 1


def test_what_stands_in_the_process_list_opens_nothing(server, tmp_path):
    """Any user of the machine reads a process' arguments: what they say can be sent neither over HTTP nor over gRPC."""
    arguments = Path(f"/proc/{server.process.pid}/cmdline").read_bytes().split(b"\0")
    assert os.readlink(f"/proc/{server.process.pid}/cwd") == "/", "whence its stubs import first"
    shown = {each.partition(b":")[2] for each in arguments if b"restricted" in each}
    ((key, _, value),) = (each.partition(b"=") for each in shown)
    host, _, port = server.http_url.partition(":")
    for forms in (
        (key, value),
        (key.strip(), value.strip()),
        (key.replace(b"\n", b"\n "), value.replace(b"\n", b"\n ")),
    ):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            lines = b"GET /v2/logging HTTP/1.1", b"Host: x", b"Connection: close", b": ".join(forms)
            connection.sendall(b"\r\n".join((*lines, b"", b"")))
            answer = connection.recv(1 << 16)
        assert answer[9:12] in (b"400", b"403", b""), answer
    told = over_http2(server.grpc_url, b"/inference.GRPCInferenceService/SystemSharedMemoryStatus", {})
    assert b"restricted" in told and b"grpc-status" in told, "the control: so it is asked"
    headers = {b"triton-grpc-protocol-" + key: value}
    told = over_http2(server.grpc_url, b"/inference.GRPCInferenceService/SystemSharedMemoryStatus", headers)
    assert b"grpc-status\x010" not in told and told


def over_http2(address: str, path: bytes, headers: dict[bytes, bytes]) -> bytes:
    """What a server answers to frames that no client of gRPC's would send."""

    def frame(kind: int, flags: int, stream: int, data: bytes) -> bytes:
        return len(data).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + data

    plain = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"x", b"te": b"trailers"}
    plain |= {b"content-type": b"application/grpc"} | headers
    block = b"".join(b"\0" + b"".join(bytes([len(part)]) + part for part in each) for each in plain.items())
    host, _, port = address.partition(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=60) as connection, contextlib.suppress(TimeoutError):
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
        connection.sendall(frame(1, 4, 1, block) + frame(0, 1, 1, bytes(5)))
        while b"grpc-message" not in answer and (data := connection.recv(1 << 16)):
            answer += data
    return answer


def test_other_users_read_nothing_of_what_a_server_shares_with_its_stubs(server):
    regions = list(SHARED_MEMORY.glob(f"megadit_{os.getpid()}_*"))
    assert regions and all(stat.S_IMODE(region.stat().st_mode) == 0o600 for region in regions)


@pytest.mark.slow
def test_a_private_server_is_its_user_s_alone(tritonserver, repository, tmp_path):
    """It listens on no port but that of its metrics, and makes the same videos."""
    with LocalServer(repository, is_private=True, log=tmp_path / "log", stop_seconds=3) as server:
        folder = Path(server.grpc_url.removeprefix("unix:")).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and [each.name for each in folder.iterdir()] == ["grpc:1"]
        assert len(VideoClient(server.grpc_url).generate(VideoRequest(prompt="a"))) == 1
        for port in (server.ports.http, server.ports.grpc):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
    assert not folder.exists()


@pytest.mark.slow
def test_a_server_that_loads_nothing_loads_nothing(tritonserver, repository, tmp_path):
    """And the control: a server that loads runs what is sent with the secret."""
    trace = tmp_path / "ran"
    with LocalServer(repository, models=("text_to_image",), log=tmp_path / "none.log", stop_seconds=3) as server:
        assert "--model-control-mode=none" in server.process.command
        assert not VideoClient(f"grpc://{server.grpc_url}").is_ready(), "the other model is not there"
    settings = {"models": ("text_to_image",), "control_secret": SECRET, "log": tmp_path / "some.log"}
    with LocalServer(repository, **settings, stop_seconds=3) as server:
        assert send_load(server, trace, {}).status_code == 403 and not trace.exists()
        assert send_load(server, trace, {SECRET_HEADER: SECRET}).status_code == 200 and trace.exists()
