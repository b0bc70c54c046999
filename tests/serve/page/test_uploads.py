"""What visitors send to the page is bounded, its own user's alone, and gone with it."""

import os
import stat
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from megadit.serve.client import VideoClient
from megadit.serve.page import uploads
from megadit.serve.page.studio import Studio
from megadit.serve.page.uploads import UploadQuota

LARGEST = 1 << 20
UPLOAD = "/gradio_api/upload"


@pytest.fixture
def visit(tmp_path, monkeypatch):
    """visit(address): a visitor of a page that writes nothing down."""

    async def read(request):
        return PlainTextResponse(str(len(await request.body())))

    routes = [
        Route(path, read, methods=["GET", "POST"]) for path in (UPLOAD, "/other", "/gradio_api/process_recording")
    ]
    monkeypatch.setattr(uploads, "_OTHER_BYTES", 1 << 16)
    app = Starlette(routes=routes, middleware=[Middleware(UploadQuota, folder=tmp_path, largest=LARGEST)])
    return lambda address: TestClient(app, client=(address, 1), raise_server_exceptions=False)


def sent(client, size: int, path: str = UPLOAD) -> int:
    return client.post(path, content=iter([bytes(size // 2), bytes(size - size // 2)])).status_code


def test_a_visitor_sends_so_much_and_all_of_them_do(visit, monkeypatch):
    one = visit("10.0.0.1")
    assert [sent(one, LARGEST) for _ in range(10)] == [200] * 8 + [413] * 2
    assert one.get("/other").status_code == 200 and sent(one, 1000, "/other") == 200
    others = [sent(visit(f"10.0.0.{2 + number // 8}"), LARGEST) for number in range(40)]
    assert others.count(200) == 32 - 8 - 2, "what was refused counts too: it was written down in part"
    began = time.monotonic()
    monkeypatch.setattr(uploads.time, "monotonic", lambda: began + 4000)
    assert sent(one, LARGEST) == 200, "the rest is gone by then"


def test_one_request_is_no_larger_than_a_file(visit):
    assert sent(visit("a"), 2 * LARGEST) == 413 and sent(visit("b"), 2 * LARGEST, "/other") == 413
    assert sent(visit("b"), (1 << 16) + 1, "/other") == 413
    assert sent(visit("b"), 9, "/gradio_api/process_recording") == 404


def test_forms_are_read_for_uploads_and_in_utf8_alone(visit):
    """200 kB of punycode took four seconds of all visitors', which a parser of gradio's spent."""
    client = visit("a")
    for path, kind, status in (
        (UPLOAD, "multipart/form-data; boundary=x", 200),
        (UPLOAD, "multipart/form-data; charset=UTF-8; boundary=x", 200),
        (UPLOAD, 'Multipart/Form-Data; boundary=x; charset="Punycode"', 415),
        (UPLOAD, "application/x-www-form-urlencoded", 415),
        ("/other", "multipart/form-data; boundary=x", 415),
        ("/other", "application/x-www-form-urlencoded; charset=utf-8", 415),
        ("/other", "application/json", 200),
    ):
        answer = client.post(path, content=b"a", headers={"content-type": kind})
        assert answer.status_code == status, (path, kind)


def test_what_was_cut_off_is_swept_away(visit, tmp_path):
    (tmp_path / "a").mkdir()
    old, new = tmp_path / "a" / "old", tmp_path / "a" / "new"
    old.touch()
    new.touch()
    os.utime(old, (1, 1))
    assert sent(visit("a"), 9) == 200 and not old.exists() and new.exists()


@pytest.mark.slow
def test_a_page_keeps_uploads_in_a_folder_of_its_own_which_goes_with_it(server, monkeypatch):
    pytest.importorskip("gradio")
    from megadit.serve.page.layout import build_page, launch

    studio, most = Studio(VideoClient(f"grpc://{server.grpc_url}")), 1 << 20
    studio.info = replace(studio.info, limits=replace(studio.info.limits, max_media_bytes=most))
    before = set(Path(tempfile.gettempdir(), "gradio").rglob("*"))
    page = build_page(studio)
    address = launch(page, studio, host="127.0.0.1", port=None)
    codes = [
        httpx.post(
            f"{address}gradio_api/upload", files={"files": ("a.mp4", os.urandom(8) + bytes(most - 1000))}, timeout=60
        )
        for _ in range(10)
    ]
    assert [answer.status_code for answer in codes][-1] == 413 and codes[0].status_code == 200
    kept = [path for path in studio.uploads.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in kept) <= 9 * most and str(studio.uploads) in codes[0].text
    assert stat.S_IMODE(studio.folder.stat().st_mode) == 0o700
    assert set(Path(tempfile.gettempdir(), "gradio").rglob("*")) == before
    page.close()
    studio._folder.cleanup()
    assert not studio.uploads.exists()
