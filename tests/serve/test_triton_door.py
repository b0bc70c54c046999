"""Who may make a real tritonserver do more than make videos: nobody, or who knows the secret."""

import base64
import json

import httpx
import pytest

from megadit.serve.client import VideoClient
from megadit.serve.contract import VideoRequest
from megadit.serve.local_server import SECRET_HEADER, LocalServer

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
        for method, path in RESTRICTED:
            answer = httpx.request(method, f"http://{server.http_url}/v2/{path}", headers=headers, content=b"{}")
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


@pytest.mark.slow
def test_a_server_that_loads_nothing_runs_no_code_even_for_who_knows_the_secret(tritonserver, repository, tmp_path):
    """Its secret stands in the process list of the machine; and the control: a server that loads runs what is sent."""
    trace = tmp_path / "ran"
    with LocalServer(repository, models=("text_to_image",), log=tmp_path / "none.log", stop_seconds=3) as server:
        arguments = dict(each.rpartition("=")[::2] for each in server.process.command if "restricted" in each)
        assert len(set(arguments.values())) == 1
        headers = {SECRET_HEADER: next(iter(arguments.values()))}
        answer = send_load(server, trace, headers)
        assert answer.is_error and "not allowed" in answer.text and not trace.exists()
        assert not VideoClient(f"grpc://{server.grpc_url}").is_ready(), "the other model is not there"
    settings = {"models": ("text_to_image",), "control_secret": SECRET, "log": tmp_path / "some.log"}
    with LocalServer(repository, **settings, stop_seconds=3) as server:
        assert send_load(server, trace, {}).status_code == 403 and not trace.exists()
        assert send_load(server, trace, {SECRET_HEADER: SECRET}).status_code == 200 and trace.exists()
