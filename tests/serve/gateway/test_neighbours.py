"""What one key sends, and what it costs the others: nothing that they would notice."""

import base64
import contextlib
import itertools
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import anyio
import httpx
import pytest
from anyio import to_thread
from starlette.concurrency import run_in_threadpool

from megadit.serve.gateway.http.middleware import Surroundings, key_text
from megadit.serve.gateway.http.streams import Streams
from megadit.serve.gateway.metrics import Metrics
from megadit.serve.gateway.turns import Turns
from megadit.serve.tracing import Tracing

from ..media import PNG

LINE = "application/x-www-form-urlencoded"


def post(client, content, kind: str, route: str = "/v1/videos"):
    return client.post(route, content=content, headers={"content-type": kind})


def test_a_form_of_one_line_is_read_only_where_it_has_few_fields(visit):
    """A megabyte of `&` takes a second to parse, of which the event loop once spent all."""
    client = visit()
    for text in (b"&" * (1 << 20), b"a=1&" * 65, b"prompt=a" + b"&a" * 64):
        for kind in (LINE, "Application/X-WWW-Form-Urlencoded; charset=utf-8"):
            answer = post(client, text, kind)
            assert answer.status_code == 400 and "Max number of fields exceeded" in answer.text, text[:20]
            assert post(client, text, kind, "/v1/adapters").status_code == 415


def test_a_field_of_a_form_is_given_once(visit):
    """Which of two prompts is made, is not the gateway's to choose."""
    client = visit()
    for fields in ("prompt prompt", "prompt seed prompt", "prompt keyframe[3] keyframe[3]"):
        names = fields.split()
        parts = [(name, (None, str(number))) for number, name in enumerate(names)]
        line = "&".join(f"{name}={number}" for number, name in enumerate(names))
        for answer in (client.post("/v1/videos", files=parts), post(client, line, LINE)):
            told = f"{names[-1]!r} is given twice; give it once"
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, told)


def test_a_form_of_one_line_is_utf8(visit):
    client = visit()
    for text in (b"prompt=\xff", b"prompt=%ff", b"prompt=caf%E9", b"prompt=a%C3"):
        assert post(client, text, LINE).status_code == 400, text
    assert post(client, b"prompt=caf%C3%A9", LINE).json()["prompt"] == "café"


def test_a_form_in_parts_is_read_in_utf8_alone(visit):
    """Ninety kilobytes of punycode take .2 s of the event loop, ten times as many a hundred times as long."""
    client = visit()
    part = b'--x\r\nContent-Disposition: form-data; name="name"\r\n\r\na-' + b"9" * 90_000 + b"\r\n--x--"
    with mock.patch("starlette.formparsers._user_safe_decode", side_effect=AssertionError):
        for charset in ("punycode", '"IDNA"', "utf-7", "utf-8; charset=zip", "utf-16"):
            for route in ("/v1/videos", "/v1/adapters"):
                kind = f"Multipart/form-data; charset={charset}; boundary=x"
                assert post(client, part, kind, route).status_code == 415, charset


def test_a_validator_complains_of_few_values(visit):
    """Each of a hundred thousand wrong ones of a body costs pydantic more than to read it, and all others wait."""
    client = visit()
    for value in ("{}", '{"%d": 1}', '{"name": "a", "%d": 1}', "[]", '"1:"', "1"):
        values = f"[{','.join(value.replace('%d', str(number)) for number in range(1100))}]"
        nested = '{"name": "a", "more": ' + values + "}"
        with mock.patch("megadit.serve.gateway.http.schemas.CreateVideo.model_validate") as validated:
            texts = (f'{{"prompt": "a", "adapters": {values}}}', f'{{"prompt": "a", "keyframe": [{nested}]}}', values)
            answers = [post(client, text, "application/json") for text in texts]
        assert not validated.called, value
        body = {"prompt": "a", "adapters": values}
        answers += [client.post("/v1/videos", **{form: body}) for form in ("data", "json")]
        assert all(each.status_code == 400 and "more than 1,000 values" in each.text for each in answers), value


def test_a_body_of_very_many_values_is_refused_unread(visit, monkeypatch):
    monkeypatch.setattr("megadit.serve.gateway.http.schemas.from_json", None)
    client = visit()
    for text in (b"[" + b"[]," * 300_000 + b"1]", b'{"prompt":' + b"{" * 600_000, b'["' + b'","' * 200_000 + b'"]'):
        answer = post(client, text, "application/json")
        assert answer.status_code == 400 and "too many values" in answer.text


def test_a_body_of_tiny_chunks_is_refused_and_one_of_small_chunks_read(listen, new_key):
    port, text = listen(100), new_key()[0]
    head = {"Host": "x", "Authorization": f"Bearer {text}", "Content-Type": "application/json"}
    head |= {"Connection": "close", "Transfer-Encoding": "chunked"}
    lines = ["POST /v1/videos HTTP/1.1", *map(": ".join, head.items()), "", ""]
    body = json.dumps({"prompt": "a" * 200_000}).encode()

    def answered(size: int) -> bytes:
        chunks = (body[at : at + size] for at in range(0, len(body), size))
        with socket.create_connection(("127.0.0.1", port)) as connection:
            with contextlib.suppress(OSError):  # it may be closed before all is sent, and the answer lost with it
                connection.sendall("\r\n".join(lines).encode())
                connection.sendall(b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n")
                return connection.makefile("rb").read()
        return b""

    assert b"100000 characters" in answered(500), "read, and refused for what it says"
    lines.insert(1, f"Content-Length: {len(body)}")
    assert answered(500)[9:12] in (b"400", b"") and b"characters" not in answered(500), "of two lengths"
    lines.pop(1)
    assert b"100000 characters" not in (refused := answered(1)) and refused[9:12] in (b"400", b"")
    assert httpx.get(f"http://127.0.0.1:{port}/health/live", timeout=60).status_code == 200


def test_a_small_body_may_come_in_any_number_of_packets(listen, new_key):
    """As httpx sends forms: each line of each field for itself."""
    body = json.dumps({"prompt": "a" * 100, "seed": "x"}).encode()
    head = f"POST /v1/videos HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {new_key()[0]}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", listen(100))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(head.encode())
        for byte in body:
            connection.sendall(bytes([byte]))
            time.sleep(0.001)  # each is read for itself
        answer = connection.makefile("rb").read()
    assert b"seed" in answer, "read, and refused for what it says"


def test_files_that_take_long_to_read_hold_nobody_else_up(listen, gateway, new_key, monkeypatch):
    """Sixty requests of one key wait to be decoded: others are answered, and have their own files read before most."""
    order, going_on = [], threading.Event()

    def check(request, limits):
        order.append(request.prompt)
        assert going_on.wait(60)

    monkeypatch.setattr(gateway, "check_media", check)
    url, image = f"http://127.0.0.1:{listen(200)}", base64.b64encode(PNG).decode()

    def ask(key: str, prompt: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return client.post(f"{url}/v1/videos", json={"prompt": prompt, "image": image}, headers=headers)

    theirs, mine = new_key()[0], new_key()[0]
    with (
        httpx.Client(timeout=60, limits=httpx.Limits(max_connections=None)) as client,
        ThreadPoolExecutor(80) as threads,
    ):
        floods = [threads.submit(ask, theirs, "theirs") for _ in range(70)]
        while sum(each.done() for each in floods) < 6 or not order:
            time.sleep(0.01)
        headers = {"authorization": f"Bearer {mine}"}
        assert client.get(f"{url}/v1/videos", headers=headers).status_code == 200
        own = threads.submit(ask, mine, "mine")
        while "mine" not in order:
            time.sleep(0.01)
        assert order == ["theirs", "mine"], "a key has one file read at a time"
        going_on.set()
        assert own.result().status_code == 200
        assert sorted(each.result().status_code for each in floods) == [200] * 64 + [429] * 6


def spellings(key: str) -> Iterator[bytes]:
    """Ways to write a key into a header: all are one key's."""
    for number in itertools.count():
        yield f"{random.choice(('bearer', 'Bearer', 'BEARER'))}{' ' * random.randint(1, 9)}{key}".encode()
        yield b"Basic " + base64.b64encode(f"{number}:{key}".encode())


@pytest.mark.parametrize(
    ("method", "path", "most"), [("GET", "/v1/videos", 2), ("DELETE", "/v1/x", 2), ("GET", "/v1/videos/1/content", 30)]
)
def test_a_caller_s_requests_are_looked_into_two_at_a_time(method, path, most):
    """However its key is written, and until their answers begin: streams are open beside one another, and a picture
    that is made holds nothing up."""
    looking, seen, streaming = Counter(), Counter(), Counter()

    async def app(scope, receive, send):
        caller = key_text(dict(scope["headers"])[b"authorization"].decode())
        looking[caller] += 1
        seen[caller] = max(seen[caller], looking[caller])
        while seen[caller] < most:
            await anyio.sleep(0.001)
        await anyio.sleep(0.01)  # more of them would come, if they might
        looking[caller] -= 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        streaming[caller] += 1
        while streaming[caller] < 30:
            await anyio.sleep(0.001)
        await send({"type": "http.response.body"})

    async def ask(surroundings, header):
        scope = {"type": "http", "method": method, "path": path, "headers": [(b"authorization", header)]}
        await surroundings(scope, anyio.sleep_forever, mock.AsyncMock())

    async def main():
        surroundings = Surroundings(app, metrics=Metrics(), tracing=Tracing(), max_body_bytes=1)
        async with anyio.create_task_group() as group:
            for header in (header for key in ("one", "two") for header in itertools.islice(spellings(key), 30)):
                group.start_soon(ask, surroundings, header)

    anyio.run(main)
    assert seen == {"one": most, "two": most} and streaming == {"one": 30, "two": 30}


def test_keys_that_are_made_up_wait_for_each_other_alone(url, gateway, new_key, monkeypatch, eventually):
    """Who has shown a valid key before does not wait behind them."""
    check, going_on, looking = gateway.keys.check, threading.Event(), []

    def slow(text):
        if text.startswith("nobody"):
            looking.append(text)
            assert going_on.wait(60)
        return check(text)

    paths = ("/v1/videos", "/v1/videos/video_1/content", "/v1/models", "/docs", "/v1/adapters")
    limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=url, timeout=60, limits=limits) as client, ThreadPoolExecutor(50) as threads:

        def ask(number, key=None):
            headers = {"authorization": f"Bearer {key or f'nobody{number}'}"}
            return client.get(paths[number % len(paths)], headers=headers).status_code

        own = new_key()[0]
        assert ask(0, own) == 200
        monkeypatch.setattr(gateway.keys, "check", slow)
        others = threads.map(ask, range(30))
        eventually(lambda: len(looking) >= 2)
        answers, at_once = [ask(number, own) for number in (0, 2, 3, 0)], len(looking)
        going_on.set()
        assert set(others) == {401}
    assert answers == [200] * 4 and at_once == 2


@pytest.mark.parametrize("name", ["Authorization", "Content-Type", "Idempotency-Key", "content-encoding"])
def test_a_header_that_others_may_read_otherwise_is_given_once(visit, new_key, name):
    """Which of two keys a proxy has counted, or which of two requests is repeated, is not the gateway's to choose."""
    text, (other, _) = new_key()[0], new_key()
    values = {"Authorization": f"Bearer {other}", "Content-Type": "application/json"}
    headers = {"Authorization": f"Bearer {text}", "Content-Type": LINE}
    twice = [*headers.items(), (name, values.get(name, "a")), *([(name, "b")] if name not in headers else [])]
    answer = visit(anonymous=True).post("/v1/videos", content=b"prompt=a", headers=twice)
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        400,
        f"{name.lower()!r} is given twice; give it once",
    )


def test_a_key_rests_after_work_that_holds_the_interpreter():
    """While another's piece is done at once."""
    began = {}

    async def work(turns, key, name):
        async with turns.of(key):
            began[name] = time.monotonic()
            await anyio.sleep(0.02)

    async def main():
        turns = Turns(1, rest=3.0)
        async with anyio.create_task_group() as group:
            for key, name in (("one", "first"), ("one", "second"), ("two", "other")):
                group.start_soon(work, turns, key, name)

    anyio.run(main)
    assert began["first"] < began["other"] < began["second"] - 0.02 and began["second"] - began["first"] >= 0.079


def test_streams_that_wait_for_the_store_leave_threads_to_others(gateway):
    """Two hundred streams look two at a time, while another request has a thread of the pool at once."""
    streams, begun, goes_on = Streams(gateway), threading.Semaphore(0), threading.Event()

    def slow():
        begun.release()
        goes_on.wait(60)

    async def everything():
        async with anyio.create_task_group() as group:
            for _ in range(200):
                group.start_soon(streams.look, slow)
            assert await run_in_threadpool(begun.acquire, timeout=60), "others have their turn"
            waiting = to_thread.current_default_thread_limiter().statistics().borrowed_tokens
            goes_on.set()
        return waiting

    assert anyio.run(everything) == 0
