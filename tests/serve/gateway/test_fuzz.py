"""Whatever is sent, the answer is one that clients can read, and nothing is written where it should not be.

`--cases N` sends N requests to each operation, each way, and N requests of random tensors to Triton.
"""

import contextlib
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from megadit.serve.client import VideoClient
from megadit.serve.contract import INPUTS, VideoRequest
from megadit.serve.gateway.app import create_app

schemathesis = pytest.importorskip("schemathesis")
grpcclient = pytest.importorskip("tritonclient.grpc")


@pytest.fixture
def fuzzed(request):
    """Settings of hypothesis: as many cases as asked for, each as slow as it is."""
    cases = request.config.getoption("--cases") or 15
    return settings(max_examples=cases, database=None, deadline=None, suppress_health_check=list(HealthCheck))


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.slow
@pytest.mark.timeout(6000)
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_no_request_is_answered_with_a_fault_of_ours(gateway, new_key, visit, tmp_path, fuzzed, mode):
    """Every operation of the OpenAPI description, with what it allows and with what it does not."""
    text, _ = new_key(max_active=10**9, videos_per_day=10**9)
    client, bearer = visit(text), {"authorization": f"Bearer {text}"}
    schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(gateway), headers=bearer)
    sent = 0

    def check(case, is_known: bool) -> None:
        nonlocal sent
        if is_known and "video_id" in (case.path_parameters or {}):
            case.path_parameters["video_id"] = client.post("/v1/videos", json={"prompt": "a"}).json()["id"]
        if case.path.endswith("/events"):
            gateway.runner._draining.set()  # a stream ends at once; nothing here would ever end its job
        case.headers = {name: value for name, value in (case.headers or {}).items() if name.lower() != "authorization"}
        answer = case.call(headers=bearer)
        gateway.runner._draining.clear()
        sent += 1
        is_health = case.path.startswith("/health")
        assert answer.status_code < 500 or is_health, answer.text
        if answer.status_code >= 400 and not is_health:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert len(answer.headers["x-request-id"]) == 1 and "set-cookie" not in answer.headers

    for operation in schema.get_all_operations():
        strategy = operation.ok().as_strategy(generation_mode=schemathesis.GenerationMode(mode))
        with contextlib.suppress(Unsatisfiable):  # where nothing is asked for, nothing can be asked wrongly
            fuzzed(given(case=strategy, is_known=st.booleans())(check))()
    print(f"{sent} requests ({mode})")
    assert sent > fuzzed.max_examples, "more than one operation was tried"
    assert files_of(tmp_path) <= {"jobs.sqlite", "jobs.sqlite-wal", "jobs.sqlite-shm", "videos"}


DTYPES = {"BYTES": np.object_, "INT32": np.int32, "INT64": np.int64, "FP32": np.float32, "BOOL": np.bool_}
VALUES = {
    "BYTES": st.binary(max_size=40) | st.text(max_size=20).map(str.encode) | st.just(b"x" * 3000),
    "INT32": st.sampled_from([0, 1, 2, 4, -1, 17, 2**31 - 1, -(2**31)]),
    "INT64": st.integers(-(2**63), 2**63 - 1),
    "FP32": st.floats(width=32, allow_nan=True, allow_infinity=True),
    "BOOL": st.booleans(),
}
RIGHT = {each.name: {"STRING": "BYTES"}.get(kind := each.data_type.removeprefix("TYPE_"), kind) for each in INPUTS}


@st.composite
def tensors(draw):
    """Name -> (type, shape, values): mostly of the declared type and shape, with any values."""
    names = {"prompt"} | draw(st.sets(st.sampled_from([*RIGHT, "no_such_input"]), max_size=4))
    inputs = {}
    for name in sorted(names):
        kind = RIGHT.get(name, "INT32")
        if draw(st.integers(0, 15)) == 0:
            kind = draw(st.sampled_from(sorted(DTYPES)))
        shape = draw(st.sampled_from([(1, 1)] * 12 + [(1,), (1, 2), (2, 1), (1, 0), (1, 1, 1)]))
        inputs[name] = (kind, shape, draw(st.lists(VALUES[kind], min_size=4, max_size=4)))
    return inputs


@pytest.mark.slow
@pytest.mark.timeout(6000)
def test_no_tensors_bring_triton_down(server, fuzzed):
    """Each request is answered with videos or an error, and after all of them the service makes the same video."""
    client = VideoClient(f"grpc://{server.grpc_url}")
    request = VideoRequest(prompt="a red seven", seed=3)
    before = client.generate(request)[0].data
    refused = []

    def check(inputs: dict) -> None:
        answers, ended = [], threading.Event()

        def note(result, error) -> None:
            answers.append(error)
            if error is not None or result.get_response().parameters["triton_final_response"].bool_param:
                ended.set()

        with grpcclient.InferenceServerClient(server.grpc_url) as raw:
            raw.start_stream(note, stream_timeout=300)
            raw.async_stream_infer(
                "text_to_video",
                [_tensor(name, *each) for name, each in inputs.items()],
                enable_empty_final_response=True,
            )
            assert ended.wait(300)
            raw.stop_stream(cancel_requests=True)
        refused.append(answers[-1] is not None)
        assert answers[-1] is None or "Deadline" not in str(answers[-1])

    fuzzed(given(inputs=tensors())(check))()
    print(f"{len(refused)} requests, {sum(refused)} refused")
    assert server.is_alive() and client.generate(request)[0].data == before


def _tensor(name: str, kind: str, shape: tuple[int, ...], values: list) -> "grpcclient.InferInput":
    count = int(np.prod(shape))
    tensor = grpcclient.InferInput(name, list(shape), kind)
    tensor.set_data_from_numpy(np.array(values[:count], dtype=DTYPES[kind]).reshape(shape))
    return tensor
