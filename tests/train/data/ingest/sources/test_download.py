"""Downloads from servers that answer well, badly, slowly and not at all; what several jobs fetch, one would fetch."""

import io
import json
import random
import socket
import threading
import time
from collections import Counter
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image

from megadit.train.data.ingest import plan, tables
from megadit.train.data.ingest.sources import download
from megadit.train.data.ingest.sources import http_retries as exchanges
from megadit.train.data.ingest.sources.download import Downloads, download_all, is_public
from megadit.train.data.prepare import command as prepare

pyarrow = pytest.importorskip("pyarrow")
AT_ONCE = 16
PREPARE = (
    "--sizes",
    "64x64",
    "--num_frames",
    "1",
    "--num_workers",
    "0",
    "--tokenizer",
    "pixels",
    "--private_addresses",
)


class AnnotationCache(BaseHTTPRequestHandler):
    """What the path says: /404, /busy (twice, then well), /cut, /drip, /hang, /large, /circle, /to/URL, /ftp,
    /together (once `AT_ONCE` ask), or a picture."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        name = self.path.strip("/").partition("/")[0].partition(".")[0]
        self.server.asked[self.path] += 1
        getattr(self, f"answer_{name}", self.answer_well)()

    def answer(self, code: int, body: bytes = b"", length: int | None = None, **headers: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        for header, value in headers.items():
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(body)

    def answer_well(self) -> None:
        time.sleep(self.server.delay)
        lost = self.path in self.server.lost
        self.answer(404) if lost else self.answer(200, picture(self.path))

    def answer_404(self) -> None:
        self.answer(404)

    def answer_busy(self) -> None:
        self.answer(503 if self.server.asked[self.path] < 3 else 200, b"at last", **{"Retry-After": "0"})

    def answer_together(self) -> None:
        try:
            self.server.together.wait(120)
        except threading.BrokenBarrierError:
            return self.answer(500)
        self.answer(200, b"together")

    def answer_cut(self) -> None:
        self.answer(200, b"begin", length=1000)
        self.close_connection = True

    def answer_drip(self) -> None:
        self.answer(200, length=1000)
        try:
            while not self.server.stopped.wait(0.02):
                self.wfile.write(b"x")
        except OSError:
            self.close_connection = True

    def answer_hang(self) -> None:
        self.server.stopped.wait(120)
        self.close_connection = True

    def answer_large(self) -> None:
        self.answer(200, b"begin", length=300 << 20)
        self.close_connection = True

    def answer_circle(self) -> None:
        self.answer(302, Location="/circle")

    def answer_to(self) -> None:
        self.answer(302, Location=self.path.removeprefix("/to/"))

    def answer_ftp(self) -> None:
        self.answer(302, Location="ftp://example.org/file")

    def log_message(self, *_: object) -> None:
        pass


def picture(seed: str) -> bytes:
    buffer = io.BytesIO()
    noise = np.random.default_rng(list(seed.encode())).integers(0, 256, (6, 6, 3), np.uint8)
    Image.fromarray(noise).resize((96, 96)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def started():
    server = ThreadingHTTPServer(("127.0.0.1", 0), AnnotationCache)
    server.request_queue_size = 128
    server.daemon_threads = True
    renew(server)
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def renew(server) -> None:
    server.asked, server.lost, server.stopped, server.delay = Counter(), set(), threading.Event(), 0
    server.together = threading.Barrier(AT_ONCE)


@pytest.fixture
def server(started):
    renew(started)
    yield started
    started.stopped.set()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(exchanges, "FIRST_PAUSE", 0.01)
    return Downloads(private_addresses=True)


def test_as_many_are_under_way_as_asked_for(server, tmp_path):
    """The server answers none before all have asked: one after another, they would never come."""
    wanted = {tmp_path / str(number): f"{server.url}/together/{number}" for number in range(AT_ONCE)}
    many = Downloads(requests=AT_ONCE, private_addresses=True)
    assert download_all(wanted, many) == {}
    assert all(path.read_bytes() == b"together" for path in wanted)


@pytest.mark.parametrize(
    ("path", "reason", "attempts"),
    [
        ("/404", "http 404", 1),
        ("/cut", "cut short", 3),
        ("/hang", "timed out", 3),
        ("/drip", "timed out", 1),
        ("/large", "too large", 1),
        ("/circle", "redirected in circles", 6),
        ("/ftp", "not an address", 1),
    ],
)
def test_what_cannot_be_had_has_its_reason_and_leaves_nothing(
    server, tmp_path, quick, path, reason, attempts, monkeypatch
):
    if path == "/hang":
        monkeypatch.setattr(download, "SILENCE", 0.5)
    if path == "/drip":
        quick = replace(quick, seconds=1.0)
    assert download_all({tmp_path / "file": server.url + path}, quick) == {tmp_path / "file": reason}
    assert server.asked[path] == attempts and not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://", "http://[::1", "nonsense", "http://a b/", ""])
def test_what_is_no_address_is_not_opened(tmp_path, quick, url):
    assert list(download_all({tmp_path / "file": url}, quick).values()) in (["not an address"], ["no connection"])


def test_an_answer_that_is_no_http_and_a_port_where_nobody_listens(tmp_path, quick):
    with socket.create_server(("127.0.0.1", 0)) as nonsense:
        address = f"http://127.0.0.1:{nonsense.getsockname()[1]}/"

        def answer() -> None:
            for _ in range(3):
                connection, _ = nonsense.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"nonsense\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert download_all({tmp_path / "file": address}, quick) == {tmp_path / "file": "not http"}
        thread.join()
    assert download_all({tmp_path / "file": address}, quick) == {tmp_path / "file": "no connection"}


def test_a_busy_server_is_asked_again(server, tmp_path, quick):
    assert download_all({tmp_path / "file": server.url + "/busy"}, quick) == {}
    assert (tmp_path / "file").read_bytes() == b"at last" and server.asked["/busy"] == 3


def test_a_private_address_is_refused_before_it_is_asked_anything(server, tmp_path, quick, monkeypatch):
    """Also after a redirect from one that is public."""
    shy = Downloads()
    file = tmp_path / "file"
    monkeypatch.setenv("no_proxy", "other.example")  # names no proxy that this could be left to
    assert download_all({file: server.url + "/picture"}, shy) == {file: "private address"}
    monkeypatch.setattr(download, "is_public", lambda address: address == "127.0.0.1")
    other_server = ThreadingHTTPServer(("127.0.0.2", 0), AnnotationCache)
    other_server.asked, other_server.lost, other_server.delay = Counter(), set(), 0
    threading.Thread(target=other_server.serve_forever, daemon=True).start()
    other = f"http://127.0.0.2:{other_server.server_port}/picture"
    assert download_all({file: f"{server.url}/to/{other}"}, shy) == {file: "private address"}
    assert not server.asked["/picture"] and not other_server.asked and not file.exists()
    assert download_all({file: f"{server.url}/to/{other}"}, quick) == {}  # where it is allowed
    other_server.shutdown()
    other_server.server_close()


PRIVATE = """
127.0.0.1 10.1.2.3 192.168.0.1 169.254.169.254 ::1 fe80::1%eth0 ::ffff:10.0.0.1 64:ff9b::a00:1 2002:7f00:1:: ::7f00:1
224.0.0.1 ff02::1 fec0::1 fd00:ec2::254 0.0.0.0 100.64.0.1
"""


def test_addresses_of_a_network_of_one_s_own_are_private():
    assert not [address for address in PRIVATE.split() if is_public(address)]


def test_addresses_of_the_internet_are_public():
    assert is_public("93.184.215.14") and is_public("2606:2800:21f:cb07:6820:80da:af6b:8b2c")
    assert is_public("64:ff9b::5db8:d70e")


# --- tables -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(started, tmp_path_factory):
    """Twenty rows in two Parquet files, three units of eight rows and less."""
    from pyarrow import parquet

    folder = tmp_path_factory.mktemp("table")
    for part, numbers in enumerate((range(13), range(13, 20))):
        rows = {"url": [f"{started.url}/{number}.jpg" for number in numbers], "text": [f"row {n}" for n in numbers]}
        parquet.write_table(pyarrow.table(rows), folder / f"train-{part}.parquet", row_group_size=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "ROWS_OF_A_UNIT", 8)
        yield folder


@pytest.fixture(scope="module")
def whole(table, tmp_path_factory):
    """What one process makes of the table."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert prepare_hf(table, out) == 0
    return out


def fetched(out) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((out / "prepare" / "fetched").rglob("*"))}


def prepare_hf(source, out, *options: str) -> int:
    return prepare.main(["hf", str(source), str(out), *PREPARE, *options])


def test_parts_in_any_order_leave_what_one_process_leaves(table, server, whole, tmp_path):
    """Fewer parts than there are units, and more."""
    parts = tmp_path / "parts"
    for stages, count in (("fetch", 2), ("scan", 4), ("select", 0), ("encode", 2), ("index", 0)):
        shares = [("--shard", f"{number}/{count}") for number in reversed(range(count))] or [()]
        for share in shares:
            assert prepare_hf(table, parts, "--stages", stages, *share) == 0
    assert fetched(parts) == fetched(whole) and len(fetched(parts)) == 6
    assert (parts / "train-000000.tar").read_bytes() == (whole / "train-000000.tar").read_bytes()
    assert (parts / "megadit.json").is_file()


def test_parts_may_begin_at_once(table, server, tmp_path, monkeypatch):
    """While one looks whether the new folder is empty, another begins in it."""
    out, is_whole_file = tmp_path / "parts", plan._is_whole_file
    (out / "prepare").mkdir(parents=True)
    others = ["not yet"]

    def look(path):
        if others == ["not yet"]:
            others.clear()
            others.append(prepare_hf(table, out, "--stages", "fetch", "--shard", "1/2"))
        return is_whole_file(path)

    monkeypatch.setattr(plan, "_is_whole_file", look)
    assert prepare_hf(table, out, "--stages", "fetch", "--shard", "0/2") == 0 and others == [0]


def test_a_part_divides_only_what_can_be_divided(table, tmp_path, capsys):
    assert prepare_hf(table, tmp_path / "out", "--shard", "0/2") == 2
    assert "--shard divides fetch, scan, encode; give --stages without select" in capsys.readouterr().err
    for text in ("2/2", "1", "a/b"):
        assert prepare_hf(table, tmp_path / "out", "--shard", text) == 2
        assert "from 0/100 to 99/100" in capsys.readouterr().err


def test_an_interrupted_unit_asks_for_no_file_twice(table, whole, server, tmp_path, monkeypatch):
    pack = tables._pack
    monkeypatch.setattr(tables, "_pack", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    rows = tables.Tables(
        root=str(table), fetched=tmp_path / "out/prepare/fetched", downloads=Downloads(private_addresses=True)
    )
    with pytest.raises(KeyboardInterrupt):
        rows.fetch(tables.Workers())
    assert sum(server.asked.values()) == 8
    monkeypatch.setattr(tables, "_pack", pack)
    rows.fetch(tables.Workers())
    assert set(server.asked.values()) == {1} and len(server.asked) == 20
    assert fetched(tmp_path / "out") == fetched(whole)


def test_what_failed_is_fetched_when_it_is_asked_for_again(table, whole, server, tmp_path):
    """The data set is then the one that a server in good health gives; nothing else is downloaded again."""
    server.lost = {"/3.jpg", "/19.jpg"}
    out = tmp_path / "out"
    assert prepare_hf(table, out) == 0
    assert json.loads((out / "report.json").read_text())["skips"] == {"not fetched: http 404": 2}
    assert prepare_hf(table, out, "--redo", "failed") == 0  # they still are
    assert server.asked["/3.jpg"] == 2
    server.lost = set()
    assert prepare_hf(table, out, "--redo", "failed") == 0
    assert sum(server.asked.values()) == 20 + 4
    for name in ("train-000000.tar", "report.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()


def test_each_way_to_fail_is_counted_by_its_reason(server, tmp_path, quick, monkeypatch):
    """Those that cannot be had beside nine that can, in one report."""
    from pyarrow import parquet

    monkeypatch.setattr(download, "SILENCE", 2.0)
    monkeypatch.setattr(download, "is_public", lambda address: address == "127.0.0.1")
    elsewhere = f"http://127.0.0.2:{server.server_port}/1.jpg"
    paths = ["404", "gone/404.jpg", "hang", "cut", "large", "circle", f"to/{elsewhere}"]
    server.lost = {"/gone/404.jpg"}
    rows = {"url": [f"{server.url}/{path}" for path in [*paths, *(f"{number}.jpg" for number in range(9))]]}
    (tmp_path / "table").mkdir()
    parquet.write_table(pyarrow.table(rows), tmp_path / "table" / "train.parquet")
    out = tmp_path / "out"
    options = ("--val_share", "0")
    with ThreadingHTTPServer(("127.0.0.2", server.server_port), AnnotationCache) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        assert prepare.main(["hf", str(tmp_path / "table"), str(out), *PREPARE[:-1], *options]) == 0
        other.shutdown()
    report = json.loads((out / "report.json").read_text())
    assert report["samples"]["train"] == 9 and report["skips"] == {
        "not fetched: http 404": 2,
        "not fetched: timed out": 1,
        "not fetched: cut short": 1,
        "not fetched: too large": 1,
        "not fetched: redirected in circles": 1,
        "not fetched: private address": 1,
    }


SMALL_UNITS = """
import sys
from megadit.train.data.prepare import command as prepare
from megadit.train.data.ingest import tables
tables.ROWS_OF_A_UNIT = 8
sys.exit(prepare.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "tasks"), [(1, 1), (2, 1), (1, 4)])
def test_killed_anywhere_it_leaves_the_same_bytes(table, whole, server, start_ranks, wait_for, tmp_path, ranks, tasks):
    """Ranks of torchrun, or tasks of an array, killed twice in each stage that they share, then let go to its end."""
    server.delay = 0.1
    out, program, moments = tmp_path / "out", tmp_path / "small.py", random.Random(ranks + 10 * tasks)
    program.write_text(SMALL_UNITS)

    def start(stage: str) -> list:
        parts = tasks if stage in ("fetch", "scan", "encode") else 1
        words = [program, "hf", table, out, *PREPARE, "--downloads", "2", "--stages", stage]
        return [rank for part in range(parts) for rank in start_ranks(ranks, *words, "--shard", f"{part}/{parts}")]

    num_killed = 0
    for stage in ("fetch", "scan", "select", "encode", "index"):
        for _ in range(2 if stage in ("fetch", "encode") else 0):
            before, started = len(list(out.rglob("*"))), start(stage)
            while len(list(out.rglob("*"))) == before and any(rank.poll() is None for rank in started):
                time.sleep(0.01)
            time.sleep(moments.uniform(0, 0.15))
            num_killed += sum(rank.poll() is None for rank in started)
            for rank in started:
                rank.kill()
                rank.wait()
        wait_for(start(stage), code=0)
    assert num_killed >= 2, "some were killed in the middle"
    assert fetched(out) == fetched(whole)
    for name in ("train-000000.tar", "report.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()


def test_downloads_obey_their_options(server, tmp_path, capsys):
    from pyarrow import parquet

    table = tmp_path / "table"
    table.mkdir()
    parquet.write_table(
        pyarrow.table({"url": [f"{server.url}/{number}.jpg" for number in range(2)]}), table / "a.parquet"
    )
    assert prepare_hf(table, tmp_path / "slow", "--download_seconds", "0.000001", "--stages", "fetch,scan,select") == 2
    assert "2 x not fetched: timed out" in capsys.readouterr().err
    command = ["hf", str(table), str(tmp_path / "shy"), *PREPARE[:-1], "--stages", "fetch,scan,select"]
    assert prepare.main(command) == 2
    assert "2 x not fetched: private address" in capsys.readouterr().err
    assert prepare_hf(table, tmp_path / "one", "--downloads", "0") == 2
    assert "--downloads" in capsys.readouterr().err


def test_a_table_may_hold_videos_and_animations(tmp_path, make_clip, make_pan):
    from pyarrow import parquet

    frames = make_pan("china.jpg", 12, 96, 128)
    video = make_clip(tmp_path / "clip.webm", frames, codec="libvpx-vp9").read_bytes()
    moving = io.BytesIO()
    pictures = [Image.fromarray(frame) for frame in frames[:, ::-1]]
    pictures[0].save(moving, "WEBP", save_all=True, append_images=pictures[1:], duration=50, lossless=True)
    (tmp_path / "table").mkdir()
    rows = {"video": [video, moving.getvalue()], "text": ["a video", "an animation"]}
    parquet.write_table(pyarrow.table(rows), tmp_path / "table" / "train.parquet")
    out = tmp_path / "out"
    options = ("--num_frames", "9", "--val_share", "0", "--stages", "fetch,scan,select")
    assert prepare.main(["hf", str(tmp_path / "table"), str(out), *PREPARE, *options]) == 0
    clips = [json.loads(line) for line in (out / "prepare/train.jsonl").read_text().splitlines()]
    assert {(clip["source"]["caption"], clip["fps"]) for clip in clips} == {("a video", 24.0), ("an animation", 20.0)}


COLUMNS = {
    "a list of one": ("images", lambda content, url: [{"bytes": content, "path": None}]),
    "of WebDataset": ("webp", lambda content, url: {"bytes": content, "path": "a.webp"}),
    "addresses": ("image", lambda content, url: url),
    "a list of one address": ("videos", lambda content, url: [url]),
}


@pytest.mark.parametrize(("column", "cell"), COLUMNS.values(), ids=COLUMNS)
def test_columns_of_pictures_as_others_have_them(column, cell, server, tmp_path):
    from pyarrow import parquet

    (tmp_path / "table").mkdir()
    content = picture("/0.jpg")
    rows = {column: [cell(content, f"{server.url}/0.jpg")], "text": ["a cat"]}
    parquet.write_table(pyarrow.table(rows), tmp_path / "table" / "train.parquet")
    downloads = Downloads(private_addresses=True)
    found = tables.Tables(root=str(tmp_path / "table"), fetched=tmp_path / "fetched", downloads=downloads)
    found.fetch(tables.Workers())
    (source,) = found.listing().sources
    assert source.caption == "a cat" and source.size == len(content)


def test_a_row_of_several_pictures_is_left_out(tmp_path):
    from pyarrow import parquet

    (tmp_path / "table").mkdir()
    cells = [[{"bytes": picture(f"/{number}.jpg")} for number in range(count)] for count in (1, 2)]
    parquet.write_table(pyarrow.table({"images": cells}), tmp_path / "table" / "train.parquet")
    found = tables.Tables(root=str(tmp_path / "table"), fetched=tmp_path / "fetched")
    found.fetch(tables.Workers())
    assert [skip.reason for skip in found.listing().skips] == ["row of several pictures"]
