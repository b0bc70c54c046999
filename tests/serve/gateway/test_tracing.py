"""One trace of each request: from a caller's own span over the gateway to the steps of the denoiser."""

import contextlib
import json
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from megadit.models.bundle import Bundle
from megadit.models.shared.addresses import free_ports
from megadit.models.shared.errors import UserError
from megadit.serve.backend.engine import Engine, OpenRequest
from megadit.serve.client import Generation
from megadit.serve.events import ServiceError, VideoResult
from megadit.serve.gateway.http.app import create_app
from megadit.serve.gateway.service import Gateway, GatewaySettings
from megadit.serve.gateway.store.keys import KeyLimits
from megadit.serve.repository.build import service_info
from megadit.serve.tracing import Tracing

from ..collector import collecting

MODEL = "text_to_video"
VIDEO = {"prompt": "a secret seven", "seed": 11, "num_steps": 5}
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE, CALLERS_SPAN = CALLER.split("-")[1:3]
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture
def collector(monkeypatch):
    with collecting() as collector:
        monkeypatch.setenv(ENDPOINT, collector.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield collector


class EngineAsServer:
    """What a gateway knows of a server, with the engine of the Triton model behind it in this process."""

    def __init__(self, engine: Engine, tracing: Tracing, *, fails: bool = False) -> None:
        self.url, self.models, self.slots, self.fails = "grpc://here:1", (MODEL,), 1, fails
        self.infos, self.free = {MODEL: engine.info}, threading.Semaphore(0)
        self.engine, self.tracing, self.traceparents = engine, tracing, []

    def probe(self) -> bool:
        return True

    is_responding = probe

    def suspect(self) -> None:
        pass

    def client(self, model: str) -> SimpleNamespace:
        return SimpleNamespace(stream=self.stream)

    def stream(self, request, *, timeout, traceparent) -> Generation:
        self.traceparents.append(traceparent)

        def events(cancelled):
            if self.fails:
                raise ServiceError("it quotes a secret seven")
            told, span = [], self.tracing.begin(MODEL, traceparent, kind="server")
            self.engine.run(
                [OpenRequest(request=request, send=told.append, end=span.end, is_cancelled=cancelled.is_set, span=span)]
            )
            yield from told

        return Generation(events)


@pytest.fixture
def serve(tmp_path, pipeline, bundle_dir):
    """serve(): a gateway with settings from the environment, a client of its HTTP application, and its server."""
    bundle = Bundle.open(bundle_dir)
    engine = Engine(pipeline, service_info(bundle, bundle.defaults, None))
    with contextlib.ExitStack() as stack:

        def start(name: str = "one", **server):
            store, results = str(tmp_path / "jobs.sqlite"), str(tmp_path / "videos")
            here = {"servers": ("grpc://127.0.0.1:1",), "store": store, "results": results}
            gateway = Gateway(GatewaySettings(**here, min_free_bytes=0, name=name))
            stack.callback(gateway.database.close)
            stack.callback(gateway.tracing.close)
            gateway.servers.all[0].infos[MODEL] = engine.info
            key, _ = gateway.keys.add("somebody", limits=KeyLimits(requests_per_minute=10**6))
            headers = {"authorization": f"Bearer {key}"}
            client = TestClient(create_app(gateway), headers=headers, raise_server_exceptions=False)
            tracing = Tracing.of_environment("megadit-triton")
            stack.callback(tracing.close)
            return gateway, client, EngineAsServer(engine, tracing, **server)

        yield start
    for thread in threading.enumerate():  # else it logs its failures while other tests run
        if thread.name.startswith("Otel"):
            thread.join(120)
            assert not thread.is_alive()


def run_next(gateway, server) -> None:
    """Has the gateway run the job that is next to its end."""
    assert gateway.runner._begin_next(server)
    assert server.free.acquire(timeout=120), "the run gives its slot back"


def by_name(spans) -> dict:
    return {span.name: span for span in spans}


def test_a_request_is_one_trace_down_to_its_steps(serve, collector):
    gateway, client, server = serve()
    video = client.post("/v1/videos", json=VIDEO, headers={"traceparent": CALLER}).json()
    run_next(gateway, server)
    assert client.get(f"/v1/videos/{video['id']}").json()["status"] == "completed"
    collector.wait(lambda: {"attempt", MODEL} <= by_name(collector.trace(TRACE)).keys())
    check_trace(collector.trace(TRACE), {TRACE: CALLERS_SPAN}, num_steps=5)
    assert {span.trace for span in collector.all()} == {TRACE}, "a request that looks, untraced by its caller, is none"
    told = b"".join(collector.bodies)
    for secret in (b"secret", b"Bearer", client.headers["authorization"].split()[1].encode()):
        assert secret not in told


def check_trace(spans, callers, *, num_steps) -> None:
    """One trace whose spans are each within what made them."""
    parts = by_name(spans)
    assert len(parts) == len(spans), "each part once"
    parents = {
        "POST /v1/videos": callers.get(spans[0].trace, ""),
        "queue": parts["POST /v1/videos"].id,
        "attempt": parts["POST /v1/videos"].id,
        "triton": parts["attempt"].id,
        "store": parts["attempt"].id,
        MODEL: parts["triton"].id,
        "check": parts[MODEL].id,
        "encode text": parts["check"].id,
        "denoise": parts[MODEL].id,
        "decode": parts[MODEL].id,
        "write": parts[MODEL].id,
    }
    assert {name: span.parent for name, span in parts.items()} == parents
    assert not any(span.is_error for span in spans)
    assert parts["denoise"].steps == list(range(1, num_steps + 1))
    assert parts["POST /v1/videos"].attributes["http.response.status_code"] == 200
    assert parts["attempt"].attributes["megadit.attempt"] == 1


def test_without_a_caller_each_request_has_a_trace_of_its_own(serve, collector):
    gateway, client, server = serve()
    for _ in range(2):
        client.post("/v1/videos", json=VIDEO)
        run_next(gateway, server)
    collector.wait(lambda: sum(span.name in ("attempt", MODEL) for span in collector.all()) == 4)
    traces = {span.trace for span in collector.all()}
    assert len(traces) == 2
    for trace in traces:
        check_trace(collector.trace(trace), {}, num_steps=5)


def test_another_gateway_s_attempt_is_of_the_same_trace(serve, collector):
    """The first one's server fails; what it said, which may quote a prompt, is in no span."""
    gateway, client, failing = serve(fails=True)
    client.post("/v1/videos", json=VIDEO, headers={"traceparent": CALLER})
    run_next(gateway, failing)
    other, _, server = serve("other")
    run_next(other, server)
    collector.wait(lambda: sum(span.name in ("attempt", MODEL) for span in collector.trace(TRACE)) == 3)
    spans = collector.trace(TRACE)
    attempts = [span for span in spans if span.name == "attempt"]
    assert [(span.attributes["megadit.attempt"], span.is_error) for span in attempts] == [(1, True), (2, False)]
    assert [span.attributes["megadit.gateway"] for span in attempts] == ["one", "other"]
    assert {span.parent for span in attempts} == {by_name(spans)["POST /v1/videos"].id}
    queues = [span for span in spans if span.name == "queue"]
    ends = attempts[0].message.end_time_unix_nano
    assert queues[1].message.start_time_unix_nano >= ends - 10**9 and all(span.seconds >= 0 for span in queues)
    assert b"secret" not in b"".join(collector.bodies)


def test_requests_of_one_batch_have_a_trace_each_and_know_of_each_other(pipeline, bundle_dir, collector):
    bundle, tracing = Bundle.open(bundle_dir), Tracing.of_environment("megadit-triton")
    engine = Engine(pipeline, service_info(bundle, bundle.defaults, None))
    parents = {f"{number:032x}": f"{number:016x}" for number in (1, 2)}
    spans = [tracing.begin(MODEL, f"00-{trace}-{span}-01", kind="server") for trace, span in parents.items()]
    told = [[], []]
    from megadit.serve.contract import VideoRequest

    engine.run(
        [
            OpenRequest(
                request=VideoRequest(prompt="a", seed=place, num_videos=place + 1),
                send=told[place].append,
                end=span.end,
                is_cancelled=lambda: False,
                span=span,
            )
            for place, span in enumerate(spans)
        ]
    )
    tracing.close()
    assert {video.batch_size for each in told for video in each if isinstance(video, VideoResult)} == {3}
    first, second = (collector.trace(trace) for trace in parents)
    assert [by_name(spans)["denoise"].steps for spans in (first, second)] == [[1, 2, 3, 4]] * 2
    assert by_name(first)["denoise"].links == {by_name(second)[MODEL].id}
    assert by_name(second)["denoise"].links == {by_name(first)[MODEL].id}
    assert [span.name for span in second].count("decode") == 2 and [span.name for span in first].count("decode") == 1
    assert {span.trace for span in collector.all()} == set(parents)


def test_a_collector_that_is_down_costs_no_request_anything(serve, monkeypatch):
    """Its queue is full at once, and the process ends within its seconds."""
    monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{free_ports(1)[0]}")
    for name, value in {"BSP_MAX_QUEUE_SIZE": 4, "BSP_MAX_EXPORT_BATCH_SIZE": 4, "EXPORTER_OTLP_TIMEOUT": 1}.items():
        monkeypatch.setenv(f"OTEL_{name}", str(value))
    gateway, client, server = serve()
    ids = [client.post("/v1/videos", json=VIDEO).json()["id"] for _ in range(5)]
    for video_id in ids:
        run_next(gateway, server)
        assert client.get(f"/v1/videos/{video_id}").json()["status"] == "completed"
    closing = threading.Thread(target=gateway.tracing.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive(), "it waits for the collector no longer than it must"


def test_off_unless_asked_for(serve, monkeypatch):
    """No span, nothing kept with the job, nothing told to Triton, whatever a caller sends."""
    monkeypatch.delenv(ENDPOINT, raising=False)
    gateway, client, server = serve()
    client.post("/v1/videos", json=VIDEO, headers={"traceparent": CALLER})
    run_next(gateway, server)
    assert server.traceparents == [None]
    program = """import sys
from megadit.serve.tracing import Tracing
print(Tracing.of_environment("a").begin("a", None, may_be_root=True).traceparent)
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))])"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["None", "[]"]
    for name, value in {"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "none"}.items():
        with monkeypatch.context() as patch:
            patch.setenv(ENDPOINT, "http://127.0.0.1:4318")
            patch.setenv(name, value)
            assert Tracing.of_environment("a").begin("a", CALLER).traceparent is None


@pytest.mark.parametrize(
    "variables, message",
    [
        ({ENDPOINT: "collector:4318"}, r"ENDPOINT is not the address of a collector; use http://HOST:4318"),
        ({ENDPOINT: "http://u:hidden@[x"}, r"ENDPOINT is not the address"),
        ({ENDPOINT: "http://a:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, r"PROTOCOL=grpc: .* port 4318"),
    ],
)
def test_what_cannot_be_sent_is_told_at_the_start(monkeypatch, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message) as told:
        Tracing.of_environment("a")
    assert "hidden" not in str(told.value)


def test_without_the_extra_it_says_what_is_missing(monkeypatch):
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(UserError, match=r"pip install 'megadit\[otel\]'"):
        Tracing.of_environment("a")


def test_a_malformed_traceparent_begins_a_trace_of_its_own(serve, collector):
    _, client, _ = serve()
    malformed = ("", "00-0-0-01", "no", f"00-{32 * '0'}-b7ad6b7169203331-01", "x" * 5000)
    for header in malformed:
        assert client.post("/v1/videos", json=VIDEO, headers={"traceparent": header}).status_code == 200, header
    collector.wait(lambda: len(collector.all()) == len(malformed))
    assert {span.parent for span in collector.all()} == {""}
    assert len({span.trace for span in collector.all()} - {TRACE}) == len(malformed)


@pytest.mark.slow
def test_through_a_real_triton(start_gateway, server, traces, eventually, monkeypatch):
    """Of requests that Triton makes in one batch, too."""
    monkeypatch.setenv(ENDPOINT, traces.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    gateway = start_gateway(f"grpc://{server.grpc_url}")
    client = gateway.client()

    def ask(number: int, **body) -> tuple[str, str]:
        parent = {"traceparent": f"00-{number:032x}-{number:016x}-01"}
        return f"{number:032x}", client.post("/v1/videos", json=VIDEO | body, headers=parent).json()["id"]

    def status(video_id: str) -> str:
        return client.get(f"/v1/videos/{video_id}").json()["status"]

    for attempt in range(5):  # until two have waited together for a third that keeps the model busy
        busy = ask(0xA0 + 8 * attempt, num_steps=1200)
        eventually(lambda busy=busy: client.get(f"/v1/videos/{busy[1]}").json()["step"] > 0)
        pair = [ask(0xA0 + 8 * attempt + number, seed=number) for number in (1, 2)]
        for _, video_id in (busy, *pair):
            eventually(lambda video_id=video_id: status(video_id) == "completed")
        for trace, _ in (busy, *pair):
            traces.wait(lambda trace=trace: {"attempt", MODEL} <= by_name(traces.trace(trace)).keys())
        for trace, _ in pair:
            check_trace(traces.trace(trace), {trace: trace[16:]}, num_steps=5)
        second, third = (by_name(traces.trace(trace)) for trace, _ in pair)
        if second["denoise"].links:
            break
    assert second["denoise"].links == {third[MODEL].id} and third["denoise"].links == {second[MODEL].id}
    parts = by_name(traces.trace(busy[0]))
    assert (parts["attempt"].service, parts["denoise"].service) == ("megadit-gateway", "megadit-triton")
    assert (len(parts["denoise"].steps), parts["denoise"].message.dropped_events_count) == (1000, 200), "bounded"
    assert all(json.loads(line) for line in gateway.log.read_text().splitlines()), "its log is JSON still"
    assert b"secret" not in b"".join(traces.bodies)
