"""Webhooks to a real address: signed as openai's client checks it, sent again until taken, told once."""

import contextlib
import json
import os
import socket
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megadit.models.shared.addresses import is_link_local, tls_context
from megadit.models.shared.cli import verbs
from megadit.models.shared.errors import UserError
from megadit.serve.contract import VideoRequest
from megadit.serve.gateway.jobs import webhooks
from megadit.serve.gateway.jobs.webhooks import Webhooks, signature
from megadit.serve.gateway.store.jobs import NewJob, Result
from megadit.serve.gateway.store.keys import KeyLimits
from megadit.serve.gateway.store.store import JobStore

MODELS = frozenset({"text_to_video"})
RESULT = Result(name="a.mp4", media_type="video/mp4", num_bytes=3, sha256="0" * 64)


@pytest.fixture
def receiver():
    """An address that refuses the first two calls; what it was sent is in `received`."""
    received, responds = [], iter([500, 302])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((dict(self.headers), body))
            self.send_response(next(responds, 204))
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.received, server.responds = received, responds
    server.url = f"http://127.0.0.1:{server.server_port}/hook"
    thread = threading.Thread(target=server.serve_forever, args=[0.02])
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def ended(gateway):
    """A new key and its jobs: every other one is completed, the rest have failed."""

    def make(url: str, num_jobs: int = 2) -> list:
        _, key = gateway.keys.add("alice", limits=KeyLimits(), webhook_url=url)
        request = VideoRequest(prompt="a", num_steps=4, num_frames=5, height=8, width=8, fps=8)
        for _ in range(num_jobs):
            gateway.store.create(key, NewJob(model="text_to_video", request=request))
        jobs = [gateway.store.claim(MODELS) for _ in range(num_jobs)]
        for good, bad in zip(jobs[::2], jobs[1::2], strict=True):
            gateway.store.complete(good, RESULT, seconds_to_live=10)
            gateway.store.fail(bad, "timed_out", "x")
        return [key, *jobs]

    return make


def test_the_end_of_a_video_is_told_until_it_is_taken(gateway, receiver, ended, eventually, monkeypatch):
    monkeypatch.setattr(webhooks, "_PAUSES", (0.01,) * 9)
    monkeypatch.setattr(webhooks, "_SECONDS_BETWEEN_LOOKS", 0.01)
    openai = pytest.importorskip("openai")
    key, good, bad = ended(receiver.url)
    sender = Webhooks(gateway.store, gateway.keys, gateway.metrics)
    sender.start()
    eventually(lambda: not gateway.store.keys_to_call())
    sender.stop()
    told = {json.loads(body)["id"]: (headers, body) for headers, body in receiver.received}
    assert set(told) == {f"evt_{good.id}", f"evt_{bad.id}"} and len(receiver.received) == 4
    client = openai.OpenAI(api_key="-", webhook_secret=key.webhook_secret)
    events = [client.webhooks.unwrap(body.decode(), headers) for headers, body in told.values()]
    assert {(event.type, event.data.id) for event in events} == {("video.completed", good.id), ("video.failed", bad.id)}
    headers, body = told[f"evt_{good.id}"]
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(body.decode() + " ", headers)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/hook", "http://xn--a.de/hook"])
def test_an_address_that_never_answers_is_given_up(gateway, ended, eventually, monkeypatch, url):
    """The name of the second cannot be read, which httpx does not say in an error of its own."""
    monkeypatch.setattr(webhooks, "_PAUSES", (0.0,) * 9)
    monkeypatch.setattr(webhooks, "_SECONDS_BETWEEN_LOOKS", 0.01)
    ended(url)
    sender = Webhooks(gateway.store, gateway.keys, gateway.metrics)
    sender.start()
    eventually(lambda: not gateway.store.keys_to_call(), seconds=60)
    sender.stop()
    assert gateway.metrics.webhooks.labels("given_up")._value.get() == 2
    assert gateway.metrics.webhook_attempts.labels("unreachable")._value.get() == 20


def test_what_was_given_up_is_listed_and_sent_again(gateway, receiver, ended, capsys, monkeypatch):
    """The address refuses the first two calls."""
    _, good, bad = ended(receiver.url)
    gateway.store.note_called(good, "given_up")
    store = f"--store={gateway.settings.store}"

    def run(*words: str) -> tuple[int, str]:
        code = verbs.main(["serve", "webhooks", *words, store])
        return code, "".join(capsys.readouterr())

    shown = run("list")[1]
    assert f"{good.id}  given up  completed" in shown and f"{bad.id}  wanted  failed" in shown and receiver.url in shown
    assert run("resend") == (1, f"{good.id}  500\n")
    assert run("resend", bad.id) == (1, f"{bad.id}  302\n")
    assert run("resend") == (0, f"{good.id}  204\n") and run("resend", bad.id)[0] == 0
    assert run("list") == (0, "") and run("resend") == (0, "")
    assert run("resend", "video_0") == (
        2,
        "error: video_0 is not an ended video of a key with a webhook; `megadit serve webhooks list`\n",
    )
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", receiver.server_port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    _, inner, _ = ended(f"http://hook.example:{receiver.server_port}/hook")
    assert run("resend", inner.id) == (1, f"{inner.id}  private address\n")
    assert run("resend", inner.id, "--private_webhooks") == (0, f"{inner.id}  204\n")


def test_what_a_dead_gateway_had_to_tell_is_told_by_who_buries_it(gateway, ended):
    key, *_ = ended("http://127.0.0.1:1/hook")
    other = JobStore(gateway.database, owner="other")
    assert other.keys_to_call() == [] and other.undelivered(key.id) == []
    other.interrupt_all(gateway.store.owner)
    assert len(other.undelivered(key.id)) == 2 and gateway.store.undelivered(key.id) == []
    assert (other.keys_to_call(), gateway.store.keys_to_call()) == ([key.id], [])


def test_an_address_that_never_answers_or_never_stops_holds_nothing_up(gateway, ended, eventually, monkeypatch):
    """One takes calls and says nothing, the other says that a gigabyte follows, of which nobody waits for the end."""
    monkeypatch.setattr(webhooks, "_SECONDS_TO_ANSWER", 10**6)
    monkeypatch.setattr(webhooks, "_AT_ONCE", 2)
    sender = Webhooks(gateway.store, gateway.keys, gateway.metrics)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as endless:
        deaf, *_ = ended(f"http://127.0.0.1:{silent.getsockname()[1]}/", num_jobs=10)
        ended(f"http://127.0.0.1:{endless.getsockname()[1]}/")
        sender.start()
        for _ in range(2):
            connection = endless.accept()[0]
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        eventually(lambda: gateway.store.keys_to_call() == [deaf.id])
        assert len(gateway.store.undelivered(deaf.id)) == 10
        silent.accept()[0].close()
    sender.stop()
    assert gateway.metrics.webhooks.labels("delivered")._value.get() == 2


@pytest.mark.parametrize(
    ("host", "leads_to", "result"),
    [
        ("hook.example", "127.0.0.1", "private address"),  # also where it led elsewhere when the key was made
        ("hook.example", "::1", "private address"),
        ("2130706433", "127.0.0.1", "private address"),  # what some systems take for an address
        ("localhost", "127.0.0.1", "204"),
        ("127.0.0.1", "127.0.0.1", "204"),
        ("[::ffff:127.0.0.1]", "::ffff:127.0.0.1", "204"),
    ],
)
def test_a_name_leads_to_the_internet_or_nowhere(gateway, receiver, ended, monkeypatch, host, leads_to, result):
    """Who owns a name leads it anywhere at any time: where the connection ends counts, before a byte is sent."""
    family = socket.AF_INET6 if ":" in leads_to else socket.AF_INET
    if leads_to == "::1":
        receiver.server_close()
        receiver.socket = socket.create_server(("::1", receiver.server_port), family=family)
    found = [(family, socket.SOCK_STREAM, 6, "", (leads_to, receiver.server_port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    key, job, _ = ended(f"http://{host}:{receiver.server_port}/hook")
    received = receiver.received
    next(receiver.responds), next(receiver.responds)
    assert webhooks.send(key, job, may_be_private=False) == result
    assert bool(received) == (result == "204")
    assert webhooks.send(key, job, may_be_private=True) == "204"


PROXIES = [
    (f"{kind}_proxy", is_named) for kind in ("http", "https", "all", "ftp", "some") for is_named in (True, False)
]


@pytest.mark.parametrize(("kind", "is_excepted"), PROXIES)
def test_a_proxy_is_trusted_with_what_it_is_asked_alone(gateway, receiver, ended, monkeypatch, kind, is_excepted):
    """Not with what an environment that names one, or one for other addresses, or none at all, has called directly."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(kind, f"http://127.0.0.1:{receiver.server_port}")
    monkeypatch.setenv("no_proxy", "hook.example" if is_excepted else "other.example")
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", receiver.server_port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    next(receiver.responds), next(receiver.responds)
    key, job, _ = ended(f"http://hook.example:{receiver.server_port}/hook")
    goes_through = kind in ("http_proxy", "all_proxy") and not is_excepted
    assert webhooks.send(key, job, may_be_private=False) == ("204" if goes_through else "private address")
    assert len(receiver.received) == goes_through


def test_what_a_cloud_tells_a_machine_is_no_webhook(gateway, ended, monkeypatch):
    own = ("169.254.169.254", "[fe80::1]", "[::ffff:169.254.169.254]", "[::ffff:a9fe:a9fe]", "[64:ff9b::a9fe:a9fe]")
    for bad in (
        *(f"http://{each}/latest/meta-data" for each in own),
        "http://x/\r\nHost: y",
        "http://",
        "http://[::1",
        "https://x:99999/",
        "https://x:0/",
        "https://x:y/",
        "gopher://x/",
        "file:///etc/passwd",
    ):
        with pytest.raises(UserError, match="is not an address for a webhook"):
            gateway.keys.add("alice", webhook_url=bad)
    with socket.create_server(("127.0.0.1", 0)) as server:  # as which it is seen from here
        key, job, _ = ended(f"http://metadata.example:{server.getsockname()[1]}/")
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", server.getsockname())]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        monkeypatch.setattr(webhooks, "is_link_local", lambda _: is_link_local("169.254.169.254"))
        assert webhooks.send(key, job, may_be_private=True) == "private address"


def test_an_answer_without_end_is_over_in_time(gateway, ended, monkeypatch):
    """Of news that never ends, and of a head that does not."""
    monkeypatch.setattr(webhooks, "_SECONDS_TO_ANSWER", 0.2)
    for line in (b"HTTP/1.1 103 Early Hints\r\n\r\n", b"X: " + b"x" * 1000):
        with socket.create_server(("127.0.0.1", 0)) as server:
            key, job, _ = ended(f"http://127.0.0.1:{server.getsockname()[1]}/")

            def flood(server=server, line=line) -> None:
                connection = server.accept()[0]
                with connection, contextlib.suppress(OSError):
                    connection.sendall(line if line[:1] != b"X" else b"HTTP/1.1 200 OK\r\n")
                    while True:
                        connection.sendall(line)

            thread = threading.Thread(target=flood)
            thread.start()
            assert webhooks.send(key, job, may_be_private=False) in ("timeout", "unreachable")
            thread.join()


def test_certificates_are_read_once_for_all_calls(gateway, receiver, ended, monkeypatch):
    """They take longer than a call; a receiver that speaks TLS is known by them all the same."""
    key, job, _ = ended(receiver.url)
    assert webhooks.send(key, job, may_be_private=False) == "500"
    monkeypatch.setattr("ssl.create_default_context", None)
    assert webhooks.send(key, job, may_be_private=False) == "302"
    assert tls_context().verify_mode == ssl.CERT_REQUIRED and tls_context().get_ca_certs()


def test_a_signature_covers_id_time_and_body():
    secret = "whsec_c2VjcmV0"
    first = signature(secret, "evt_1", b"{}")
    others = [
        signature(secret, "evt_2", b"{}"),
        signature(secret, "evt_1", b"{ }"),
        signature("whsec_eA==", "evt_1", b"{}"),
    ]
    assert abs(int(first["webhook-timestamp"]) - time.time()) < 3600
    assert first["webhook-signature"] not in {each["webhook-signature"] for each in others}
