"""Whatever is sent, the answer is one that clients can read, and nothing is written where it should not be.

`--cases N` sends N requests to each operation, each way, N of raw paths and headers, and N of random tensors to Triton.
"""

import asyncio
import contextlib
import json
import mmap
import os
import re
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from megadit.serve.client import VideoClient
from megadit.serve.contract import INPUTS, VideoRequest
from megadit.serve.gateway.http.app import create_app
from tests.memory import within_memory

from ..media import MASK, MP4, PNG

grpcclient = pytest.importorskip("tritonclient.grpc")

MODELS = frozenset({"text_to_video"})
STORE = {"jobs.sqlite", "jobs.sqlite-wal", "jobs.sqlite-shm", "videos"}
VIDEO_FILE = re.compile(
    r"videos/(video_[0-9a-f]{32}\.[0-9a-f]{16}|\.video_[0-9a-f]{32}(\.[0-9a-f]+){2})\.(mp4|png|given)"
)
"""Finished, or being written."""


@pytest.fixture
def fuzzed(request):
    """Settings of hypothesis: as many new cases as asked for, or the same few; each as slow as it is."""
    asked = request.config.getoption("--cases")
    options = {"max_examples": asked or 15, "derandomize": asked is None, "deadline": None, "database": None}
    return settings(**options, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="session")
def watching():
    """`with watching() as paths`: what this process opens for writing, makes, moves or removes in the meantime."""
    changes = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
    watched: list[list[str]] = []

    def note(event: str, arguments: tuple) -> None:
        if not watched or event not in changes | {"open"}:
            return
        if event == "open":
            is_read = not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            arguments = () if is_read else arguments[:1]
        watched[0] += [
            os.path.realpath(os.fsdecode(each)) for each in arguments if isinstance(each, (str, bytes, os.PathLike))
        ]

    sys.addaudithook(note)  # which cannot be removed again

    @contextlib.contextmanager
    def watch():
        watched.append([])
        try:
            yield watched[0]
        finally:
            watched.clear()

    return watch


@pytest.fixture
def guarded(gateway, watching, tmp_path):
    """`with guarded()`: whatever is written inside is a video, under a name of the gateway's choice, or its store."""

    @contextlib.contextmanager
    def guard():
        with watching() as paths:
            yield
        for path in (path for path in paths if "__pycache__" not in path and path != os.devnull):
            name = os.path.relpath(path, tmp_path)
            assert name in STORE or VIDEO_FILE.fullmatch(name), f"{path} was written"

    return guard


@pytest.fixture
def make_all(gateway):
    """Makes every video that waits, as a Triton would."""

    def make() -> None:
        while (job := gateway.store.claim(MODELS)) is not None:
            result = gateway.results.put(job.id, b"what a Triton made", "video/mp4")
            assert gateway.store.complete(job, result, seconds_to_live=10**6)

    return make


@contextlib.contextmanager
def meanwhile(do):
    """Does it again and again beside the block: a synchronous request waits for its video."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(0.02):
            do()

    with ThreadPoolExecutor(1) as thread:
        repeated = thread.submit(repeat)
        try:
            yield
        finally:
            is_over.set()
    repeated.result()


def test_a_process_that_takes_much_memory_is_noticed():
    """The negative control of the tests below."""
    with within_memory(limit=1 << 26):
        pass
    with pytest.raises(AssertionError), within_memory(limit=1 << 26):
        mmap.mmap(-1, 1 << 27).write(bytes(1 << 27))  # an array may find its place in what the process had before


def test_a_write_elsewhere_is_noticed(watching, guarded, tmp_path):
    """The negative control of the tests below."""
    with watching() as paths:
        (tmp_path / "x").write_text("x")
        (tmp_path / "x").rename(tmp_path / "y")
    assert [Path(path).name for path in paths] == ["x", "x", "y"]
    for path in (tmp_path / "z", tmp_path.parent / "jobs.sqlite", tmp_path / "videos" / "video_0.mp4"):
        with pytest.raises(AssertionError, match="was written"), guarded():
            path.touch()


@pytest.mark.slow
@pytest.mark.timeout(6000)
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_no_request_is_answered_with_a_fault_of_ours(gateway, new_key, visit, guarded, make_all, fuzzed, mode):
    """Every operation of the OpenAPI description, with what it allows and with what it does not, by three callers."""
    schemathesis = pytest.importorskip("schemathesis")
    limits = {"max_active": 10**9, "videos_per_day": 10**9}
    owner, other = new_key(**limits)[0], new_key(**limits)[0]
    client = visit(owner)
    schema = schemathesis.openapi.from_asgi(
        "/openapi.json", create_app(gateway), headers={"authorization": f"Bearer {owner}"}
    )
    if mode == "negative":  # schemathesis cannot change a body with files
        for operation in (each for path in schema.raw_schema["paths"].values() for each in path.values()):
            operation.get("requestBody", {"content": {}})["content"].pop("multipart/form-data", None)
    sent: dict[str, int] = {}

    def check(case, is_unchanged: bool, caller: str) -> None:
        is_unchanged = is_unchanged and "video_id" in (case.path_parameters or {})
        if is_unchanged:
            known = client.post("/v1/videos", json={"prompt": "a"}).json()["id"]
            case.path_parameters["video_id"] = known
        make_all()
        case.headers = {name: value for name, value in (case.headers or {}).items() if name.lower() != "authorization"}
        bearer = {} if caller == "" else {"authorization": f"Bearer {caller}"}
        with guarded(), meanwhile(make_all):
            answer = case.call(headers=bearer)
        sent[case.path] = sent.get(case.path, 0) + 1
        is_health = case.path.startswith("/health")
        assert answer.status_code < 500 or is_health, answer.text
        assert is_health or caller in (owner, other) or answer.status_code == 401
        if is_unchanged and caller == other:
            assert answer.status_code >= 400
            assert client.get(f"/v1/videos/{known}").status_code == 200, "it is still there"
        if answer.status_code >= 400 and not is_health:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        if caller == other and answer.status_code == 200 and case.path == "/v1/videos" and case.method == "GET":
            owned = client.get("/v1/videos", params={"limit": 100}).json()["data"]
            assert not {video["id"] for video in answer.json()["data"]} & {video["id"] for video in owned}
        assert len(answer.headers["x-request-id"]) == 1 and "set-cookie" not in answer.headers

    callers = st.sampled_from([owner] * 6 + [other] * 3 + ["", "x", owner[:-1], f"{owner}x"])
    with within_memory():
        for operation in schema.get_all_operations():
            strategy = operation.ok().as_strategy(generation_mode=schemathesis.GenerationMode(mode))
            with contextlib.suppress(Unsatisfiable):  # where nothing is asked for, nothing can be asked wrongly
                fuzzed(given(case=strategy, is_unchanged=st.booleans(), caller=callers)(check))()
    print(f"{sum(sent.values())} requests ({mode}): {sent}")
    assert len(sent) > 2, "more than one operation was tried"


PIECES = st.sampled_from(
    ["..", "%2e%2e", "%2f", "/", "\\", "\0", "%00", "\r\nset-cookie: a=b", "etc/passwd", "content", "events", "KNOWN"]
    + ["video_", "0" * 32, "~", " ", "ä", "?", "#", ";"]
) | st.text(max_size=4)
NAMES = st.sampled_from(
    [b"range", b"if-range", b"x-request-id", b"idempotency-key", b"content-type", b"host", b"cookie", b"accept"]
    + [b"x-forwarded-for", b"if-modified-since", b"transfer-encoding", b"authorization"]
)
HEADER_VALUES = st.binary(max_size=40) | st.sampled_from(
    [b"bytes=0-3", b"bytes=-1", b"bytes=99999999999-", b"bytes=5-2, 0-1", b"bytes=0-0,2-3,1-9", b"Bearer \xff"]
    + [b"a\r\nset-cookie: a=b", b"multipart/form-data; boundary=\r\n", b"application/json", b"../../etc/passwd", b"\0"]
)


@pytest.mark.slow
@pytest.mark.timeout(6000)
def test_no_path_and_no_header_is_more_than_text(gateway, new_key, visit, guarded, make_all, fuzzed):
    """As a web server hands them over that checks nothing: paths that climb, headers that hold lines."""
    text, _ = new_key(max_active=10**9, videos_per_day=10**9)
    app, client = create_app(gateway), visit(text)
    known = client.post("/v1/videos", json={"prompt": "a"}).json()["id"]
    make_all()
    codes: list[int] = []

    def check(method: str, segments: list[str], headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        path = "/v1/videos" + "".join(f"/{segment}" for segment in segments).replace("KNOWN", known)
        if (method, path) == ("DELETE", f"/v1/videos/{known}"):
            return
        with guarded():
            status, answered, content = asyncio.run(
                ask(app, method, path, [(b"authorization", f"Bearer {text}".encode()), *headers], body)
            )
            make_all()
        codes.append(status)
        assert status < 500, content
        if status >= 400 and method != "HEAD":  # which has no body
            assert json.loads(content)["error"]["code"], "one shape for every error"
        assert not [each for header in answered for each in header if re.search(rb"[\r\n\0]", each)]
        assert not {b"set-cookie", b"location"} & {name.lower() for name, _ in answered}
        assert b"root:" not in content

    methods = st.sampled_from(["GET"] * 4 + ["POST", "DELETE", "HEAD", "PUT", "OPTIONS"])
    headers = st.lists(st.tuples(NAMES, HEADER_VALUES), max_size=4)
    paths = st.lists(PIECES, max_size=5) | st.just(["KNOWN", "content"])
    with within_memory():
        fuzzed(given(method=methods, segments=paths, headers=headers, body=st.binary(max_size=60))(check))()
    print(
        f"{len(codes)} requests of raw paths and headers: { {code: codes.count(code) for code in sorted(set(codes))} }"
    )
    assert client.get(f"/v1/videos/{known}/content").content == b"what a Triton made"


async def ask(app, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes):
    """(status, headers, body) of one request, with nothing between it and the application."""
    told, received = [], iter([{"type": "http.request", "body": body}])

    async def receive() -> dict:
        message = next(received, None)
        return message or await asyncio.Future()  # whoever asks stays connected

    async def send(message: dict) -> None:
        told.append(message)

    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(errors="replace")}
    scope |= {"query_string": b"", "headers": headers, "http_version": "1.1", "scheme": "http", "root_path": ""}
    await app(scope | {"server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1)}, receive, send)
    content = b"".join(message.get("body", b"") for message in told[1:])
    return told[0]["status"], told[0]["headers"], content


DTYPES = {"BYTES": np.object_, "INT32": np.int32, "INT64": np.int64, "FP32": np.float32, "BOOL": np.bool_}
VALUES = {
    "BYTES": st.binary(max_size=40) | st.text(max_size=20).map(str.encode) | st.just(b"x" * 3000),
    "INT32": st.sampled_from([0, 1, 2, 4, -1, 17, 2**31 - 1, -(2**31)]),
    "INT64": st.integers(-(2**63), 2**63 - 1),
    "FP32": st.floats(width=32, allow_nan=True, allow_infinity=True),
    "BOOL": st.booleans(),
}
PLAUSIBLE = {
    "prompt": [b"a red seven", "\u00e4\u2603".encode(), b""],
    "negative_prompt": [b"", b"blue"],
    "sampler": [b"euler", b"heun"],
    "guidance": [0.0, 1.0, 3.5],
    "unconditional_guidance_scale": [2.0],
    "num_steps": [1, 2, 4],
    "inference_steps": [3],
    "num_frames": [1, 5],
    "height": [8, 16],
    "width": [8, 24],
    "fps": [8.0, 24.0],
    "num_videos": [1, 2],
    "preview_every": [0, 1],
    "eta": [0.0, 0.5],
    "image": [PNG, b"", PNG[:50]],
    "continue_video": [MP4, b""],
    "video": [MP4],
    "mask": [MASK],
    "instruction": [b"make it red", b""],
    "keyframe": [b"0:" + PNG, b""],
}
"""What the service can make."""
RIGHT = {each.name: {"STRING": "BYTES"}.get(kind := each.data_type.removeprefix("TYPE_"), kind) for each in INPUTS}


@st.composite
def tensors(draw):
    """Name -> (type, shape, values): mostly of the declared type and shape, with plausible values or any."""
    names = {"prompt"} | draw(st.sets(st.sampled_from([*RIGHT, "no_such_input"]), max_size=4))
    inputs = {}
    for name in sorted(names):
        kind = RIGHT.get(name, "INT32")
        values = VALUES[kind]
        if name in PLAUSIBLE and draw(st.integers(0, 5)):
            values = st.sampled_from(PLAUSIBLE[name])
        elif draw(st.integers(0, 15)) == 0:
            kind = draw(st.sampled_from(sorted(DTYPES)))
            values = VALUES[kind]
        shape = draw(st.sampled_from([(1, 1)] * 95 + [(1,), (1, 2), (2, 1), (1, 0), (1, 1, 1)]))
        inputs[name] = (kind, shape, draw(st.lists(values, min_size=4, max_size=4)))
    return inputs


@pytest.mark.slow
@pytest.mark.timeout(6000)
def test_no_tensors_bring_triton_down(server, in_group, fuzzed):
    """Each request is answered with videos or an error, and after all of them the service makes the same video."""
    client = VideoClient(f"grpc://{server.grpc_url}")
    request = VideoRequest(prompt="a red seven", seed=3)
    before, pid = client.generate(request)[0].data, server.process.pid
    refusals: list[str] = []

    def check(inputs: dict) -> None:
        responds, ended = [], threading.Event()

        def note(result, error) -> None:
            responds.append(error)
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
            error = responds[-1]  # before the end of the stream, which is another one
            raw.stop_stream(cancel_requests=True)
        refusals.append("" if error is None else re.split(r"['\d-]", error.message())[0][:50])
        assert error is None or not re.search("deadline|cancelled", str(error), re.IGNORECASE), error

    with within_memory(*in_group(pid)):
        fuzzed(given(inputs=tensors())(check))()
    counted = Counter(refusals)
    print(f"{len(refusals)} requests, {counted['']} with a video; refusals: {counted}")
    assert 0 < counted[""] < len(refusals), "some were made, some refused"
    assert server.process.is_alive() and server.process.pid == pid, "it died and was started again"
    assert client.generate(request)[0].data == before


def _tensor(name: str, kind: str, shape: tuple[int, ...], values: list) -> "grpcclient.InferInput":
    count = int(np.prod(shape))
    tensor = grpcclient.InferInput(name, list(shape), kind)
    tensor.set_data_from_numpy(np.array(values[:count], dtype=DTYPES[kind]).reshape(shape))
    return tensor
