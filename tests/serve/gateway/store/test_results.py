"""Where videos are kept: a folder, memory and an object store behave alike, and nothing half there is served."""

import asyncio
import hashlib
import secrets
from pathlib import Path

import fsspec
import pytest

from megadit.models.shared.errors import UserError
from megadit.serve.gateway.errors import ApiError
from megadit.serve.gateway.http.content import content_of
from megadit.serve.gateway.store.results import Results

DATA = b"what a Triton made" * 1000
SIZE = len(DATA)
MODELS = frozenset({"text_to_video"})


@pytest.fixture(params=["folder", "memory", pytest.param("s3", marks=pytest.mark.slow)])
def url(request, tmp_path):
    """A place where nothing has been kept yet."""
    if request.param == "folder":
        return str(tmp_path / "kept" / "videos")
    if request.param == "memory":
        return f"memory://{secrets.token_hex(4)}/videos"
    return f"{request.getfixturevalue('s3')()}/videos"


@pytest.fixture
def completed(gateway, new_key, visit, url):
    """(client, job) of a video that is kept at the place."""
    gateway.results = Results(url)
    client = visit(new_key()[0])
    client.post("/v1/videos", json={"prompt": "a"})
    job = gateway.store.claim(MODELS)
    result = gateway.results.put(job.id, DATA, "video/mp4")
    assert result.num_bytes == len(DATA) and result.sha256 == hashlib.sha256(DATA).hexdigest()
    assert gateway.store.complete(job, result, seconds_to_live=1000)
    return client, gateway.store.get(job.key_id, job.id)


def test_a_video_is_served_from_any_place(completed):
    client, job = completed
    answer = client.get(f"/v1/videos/{job.id}/content")
    assert (answer.status_code, answer.content) == (200, DATA)
    assert answer.headers["content-type"] == "video/mp4"
    assert answer.headers["content-disposition"] == f'attachment; filename="{job.id}.mp4"'


RANGES = {
    "bytes=4-7": range(4, 8),
    "Bytes=17990-": range(17990, SIZE),
    "bytes=-5": range(SIZE - 5, SIZE),
    "bytes=-999999": range(SIZE),
    "bytes=17999-999999": range(17999, SIZE),
    "bytes= 0-0 ": range(1),
}


def test_a_range_is_served_from_any_place(completed):
    client, job = completed
    for asked, part in RANGES.items():
        answer = client.get(f"/v1/videos/{job.id}/content", headers={"range": asked})
        assert (answer.status_code, answer.content) == (206, DATA[part.start : part.stop]), asked
        assert answer.headers["content-range"] == f"bytes {part.start}-{part.stop - 1}/{SIZE}"
        assert answer.headers["content-length"] == str(len(part))


def test_what_is_no_range_of_the_video_is_ignored_or_told_as_every_error_is(visit, gateway):
    client = visit()
    client.post("/v1/videos", json={"prompt": "a"})
    job = gateway.store.claim(MODELS)
    gateway.store.complete(job, gateway.results.put(job.id, DATA, "video/mp4"), seconds_to_live=1000)

    def get(**headers):
        return client.get(
            f"/v1/videos/{job.id}/content", headers={name.replace("_", "-"): headers[name] for name in headers}
        )

    malformed = ("", "bytes", "bytes=", "bytes=-", "bytes=x-y", "bytes=7-4", "bytes=1-2,5-6", "bytes=0x1-2")
    more = ("lines=1-2", "bytes=-+1", f"bytes={9 * '9999'}-", f"bytes={5000 * '9'}-", "bytes=\u0661-2".encode())
    for text in (*malformed, *more):
        answer = get(range=text)
        assert (answer.status_code, answer.content) == (200, DATA), text
        assert answer.headers["accept-ranges"] == "bytes"
    for text in (f"bytes={SIZE}-", "bytes=-0", "bytes=999999-9999999"):
        answer = get(range=text)
        assert (answer.status_code, answer.json()["error"]["code"]) == (416, "range_not_satisfiable")
        assert answer.headers["content-range"] == f"bytes */{SIZE}"
    assert get(range="bytes=0-3", if_range=get().headers["etag"]).status_code == 206
    assert get(range="bytes=0-3", if_range='"another video"').content == DATA


def test_a_video_that_is_deleted_while_it_is_read_is_read_to_its_end(visit, gateway):
    visit().post("/v1/videos", json={"prompt": "a"})
    job = gateway.store.claim(MODELS)
    gateway.store.complete(job, gateway.results.put(job.id, DATA, "video/mp4"), seconds_to_live=1000)
    job = gateway.store.get(job.key_id, job.id)
    answer = content_of(gateway.results, job)
    gateway.results.remove(job.result_name)

    async def read() -> bytes:
        return b"".join([chunk async for chunk in answer.body_iterator])

    assert asyncio.run(read()) == DATA
    with pytest.raises(ApiError, match="not there any more"):
        content_of(gateway.results, job)


def test_what_is_lost_or_half_there_is_not_served(completed, url):
    client, job = completed
    files, root = fsspec.core.url_to_fs(url)
    files.pipe_file(f"{root}/{job.result_name}", DATA[:-1])
    assert client.get(f"/v1/videos/{job.id}/content").json()["error"]["code"] == "lost"
    files.rm_file(f"{root}/{job.result_name}")
    assert client.get(f"/v1/videos/{job.id}/content").json()["error"]["code"] == "lost"


def test_a_deleted_video_leaves_nothing(completed, url):
    client, job = completed
    files, root = fsspec.core.url_to_fs(url)
    assert files.exists(f"{root}/{job.result_name}")
    assert client.delete(f"/v1/videos/{job.id}").status_code == 200
    files.invalidate_cache()
    assert not files.exists(f"{root}/{job.result_name}")


def test_a_sweep_removes_what_nobody_wants_and_nothing_else(url):
    results = Results(url)
    assert results.sweep(lambda *_: False) == 0, "where nothing was kept yet, there is nothing to sweep"
    wanted, unwanted, of_others = (f"video_{digit * 32}" for digit in "012")
    kept, *_ = [results.put(job_id, DATA, "video/mp4").name for job_id in (wanted, wanted, unwanted)]
    files, root = fsspec.core.url_to_fs(url)
    files.pipe_file(f"{root}/.{unwanted}.0123abcd.mp4", DATA)
    files.pipe_file(f"{root}/of_{of_others}.mp4", DATA)
    assert results.sweep(lambda job_id, name: (job_id, name) == (wanted, kept)) == 3
    files.invalidate_cache()
    left = {path.rpartition("/")[2] for path in files.ls(root, detail=False)}
    assert left == {kept, f"of_{of_others}.mp4"}


def test_any_place_belongs_to_one_store(url):
    for _ in range(2):
        Results(url).claim("a" * 32, lambda _: False)
    with pytest.raises(UserError, match="another job store"):
        Results(url).claim("b" * 32, lambda _: True)
    assert Results(url).sweep(lambda *_: False) == 0, "who owns it is no video"


def test_a_video_whose_time_is_over_is_removed_and_no_other(visit, gateway, eventually):
    client = visit()
    jobs = []
    for seconds in (-1, 1000):
        client.post("/v1/videos", json={"prompt": "a"})
        jobs.append(gateway.store.claim(MODELS))
        result = gateway.results.put(jobs[-1].id, DATA, "video/mp4")
        gateway.store.complete(jobs[-1], result, seconds_to_live=seconds)
    urls = [f"/v1/videos/{job.id}" for job in jobs]
    assert client.get(f"{urls[0]}/content").status_code == 200, "until somebody keeps house"
    gateway._housekeeper.start()
    eventually(lambda: client.get(f"{urls[0]}/content").status_code == 404)
    gateway._stopping.set()
    gateway._housekeeper.join()
    assert client.get(f"{urls[0]}/content").json()["error"]["code"] == "expired"
    videos = [client.get(url).json() for url in urls]
    assert [video["status"] for video in videos] == ["completed"] * 2
    assert videos[0]["expires_at"] is None and videos[1]["expires_at"] > videos[1]["completed_at"]
    left = gateway.store.get(jobs[1].key_id, jobs[1].id).result_name
    assert [file.name for file in Path(gateway.settings.results).glob("video_*")] == [left]
    assert client.get(f"{urls[1]}/content").content == DATA


@pytest.mark.parametrize("place", ["nonsense://x", "/proc/nothing/x"])
def test_a_place_that_cannot_be_used_is_told(place):
    with pytest.raises(UserError, match="results cannot be kept"):
        Results(place)


def test_a_place_that_does_not_answer_is_told_and_loses_nothing(gateway, visit, monkeypatch):
    client = visit()
    client.post("/v1/videos", json={"prompt": "a"})
    job = gateway.store.claim(MODELS)
    gateway.store.complete(job, gateway.results.put(job.id, DATA, "video/mp4"), seconds_to_live=1000)

    def no_answer(*_):
        raise ConnectionError("secret internals")

    with monkeypatch.context() as broken:
        broken.setattr(gateway.results, "open", no_answer)
        answer = client.get(f"/v1/videos/{job.id}/content")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_unavailable")
        assert "secret" not in answer.text
    assert client.get(f"/v1/videos/{job.id}/content").content == DATA
    with monkeypatch.context() as broken:
        broken.setattr(gateway.results, "remove", no_answer)
        assert client.delete(f"/v1/videos/{job.id}").status_code == 200
    assert client.get(f"/v1/videos/{job.id}").status_code == 404
    assert gateway.results.sweep(gateway.store.has_result) == 1
