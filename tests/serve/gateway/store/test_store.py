"""The job store: turns, attempts, clocks, and stores of other releases."""

import contextlib
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy.exc import SQLAlchemyError

from megadit.models.shared.cli import verbs
from megadit.models.shared.errors import UserError
from megadit.serve.contract import VideoRequest
from megadit.serve.gateway import service
from megadit.serve.gateway.store import clock, patience, store
from megadit.serve.gateway.store import database as databases
from megadit.serve.gateway.store.clock import Heart
from megadit.serve.gateway.store.database import Database
from megadit.serve.gateway.store.jobs import NewJob, Result
from megadit.serve.gateway.store.keys import KeyRing
from megadit.serve.gateway.store.store import JobStore

MODELS = frozenset({"text_to_video"})
NEW = NewJob(
    model="text_to_video", request=VideoRequest(prompt="a", num_steps=4, num_frames=5, height=8, width=8, fps=8)
)
RESULT = Result(name="a.mp4", media_type="video/mp4", num_bytes=3, sha256="0" * 64)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def database(request, tmp_path):
    """SQLite, and a PostgreSQL that is empty."""
    url = str(tmp_path / "jobs.sqlite") if request.param == "sqlite" else request.getfixturevalue("postgres")
    with contextlib.closing(Database(url)) as database:
        yield database


@pytest.fixture
def jobs(database):
    return JobStore(database, owner="here")


@pytest.fixture
def keys(database):
    return [KeyRing(database).add(name)[1] for name in ("a", "b", "c")]


def submit(jobs, key, **changes):
    return jobs.create(key, replace(NEW, **changes))[0]


def test_keys_take_turns_and_priority_orders_a_key_s_own_jobs(jobs, keys):
    """A key that asked for twenty before the others came gets no more than its turn."""
    for _ in range(20):
        submit(jobs, keys[0])
    urgent = submit(jobs, keys[0], priority=1)
    for key in keys[1:]:
        for _ in range(3):
            submit(jobs, key, priority=3)
    taken = []
    for _ in range(9):
        job = jobs.claim(MODELS)
        taken.append(job)
        assert jobs.complete(job, RESULT, seconds_to_live=10)
    assert next(job for job in taken if job.key_id == keys[0].id).id == urgent.id
    order = [[key.id for key in keys].index(job.key_id) for job in taken]
    assert all(sorted(order[start : start + 3]) == [0, 1, 2] for start in (0, 3, 6)), order


def test_the_key_with_the_fewest_running_jobs_is_next(jobs, keys):
    for _ in range(4):
        submit(jobs, keys[0])
    assert [jobs.claim(MODELS).key_id for _ in range(2)] == [keys[0].id] * 2
    submit(jobs, keys[1])
    submit(jobs, keys[1])
    assert [jobs.claim(MODELS).key_id for _ in range(3)] == [keys[1].id, keys[1].id, keys[0].id]


def test_a_job_is_claimed_once_however_many_ask(database, keys):
    stores = [JobStore(database, owner=f"gateway {index}") for index in range(4)]
    ids = {submit(stores[0], keys[index % 3]).id for index in range(24)}
    with ThreadPoolExecutor(8) as threads:
        claimed = list(threads.map(lambda index: stores[index % 4].claim(MODELS), range(40)))
    found = [job.id for job in claimed if job is not None]
    while (job := stores[0].claim(MODELS)) is not None:  # a claim that lost a race found nothing
        found.append(job.id)
    assert sorted(found) == sorted(ids)


def test_models_that_no_server_has_wait(jobs, keys):
    submit(jobs, keys[0], model="text_to_image")
    mine = submit(jobs, keys[0])
    assert jobs.claim(MODELS).id == mine.id
    assert jobs.claim(MODELS) is None


def test_an_interrupted_job_is_queued_once_more_and_then_ends(jobs, keys):
    submit(jobs, keys[0])
    first = jobs.claim(MODELS)
    assert jobs.note_step(first, 3) and jobs.interrupt(first, suspicion="server_failed")
    second = jobs.claim(MODELS)
    assert (second.id, second.attempts, second.step) == (first.id, 2, 0)
    assert jobs.interrupt(second)
    ended = jobs.get(keys[0].id, first.id)
    assert (ended.status, ended.error_code) == ("failed", "server_failed") and "twice" in ended.error_message


def test_the_end_of_its_gateway_is_never_counted_against_a_job(jobs, keys):
    submit(jobs, keys[0])
    for attempt in range(1, 5):
        job = jobs.claim(MODELS)
        assert (job.attempts, job.is_suspected) == (attempt, False)
        assert [each.id for each in jobs.interrupt_all("here")] == [job.id]
    assert jobs.interrupt(jobs.claim(MODELS), suspicion="server_failed")
    for _ in range(3):
        assert jobs.claim(MODELS).is_suspected and jobs.interrupt_all("here"), "nor does it clear a suspicion"
    job = jobs.claim(MODELS)
    assert jobs.interrupt(job, suspicion="server_failed") and jobs.get(keys[0].id, job.id).has_ended


def test_an_error_of_any_text_is_kept(jobs, keys):
    submit(jobs, keys[0])
    job = jobs.claim(MODELS)
    assert jobs.fail(job, "invalid_request", "not \0 and \ud800: " + "x" * 5000)
    message = jobs.get(keys[0].id, job.id).error_message
    assert message.startswith("not   and ?: xxx") and len(message) == 1000


@pytest.mark.slow
def test_a_gateway_that_stands_still_in_a_transaction_holds_nobody_up(postgres, monkeypatch):
    """As one that was stopped does, or whose machine sleeps, while it takes a job."""
    monkeypatch.setattr(databases, "_SECONDS_TO_STAND_STILL", 0.5)
    with contextlib.closing(Database(postgres)) as still, contextlib.closing(Database(postgres)) as database:
        jobs = JobStore(database, owner="another")
        mine = submit(jobs, KeyRing(database).add("a")[1])
        with pytest.raises(SQLAlchemyError), still.writing() as connection:
            still.alone(connection, databases.CLAIMING)
            assert jobs.claim(MODELS).id == mine.id


@pytest.mark.parametrize("lock", ["BEGIN EXCLUSIVE", "PRAGMA locking_mode=EXCLUSIVE; BEGIN EXCLUSIVE"])
def test_a_store_that_somebody_else_holds_is_told_of_soon(gateway, visit, monkeypatch, lock):
    """As a backup does, or an operator's own client: one deadline for all that a request asks of the store."""
    gateway.servers.all[0].silent_since, gateway.servers.all[0].is_proven = None, True
    client, anybody = visit(), visit(anonymous=True)
    made = client.post("/v1/videos", json={"prompt": "a"}).json()["id"]
    assert anybody.get("/health/ready").status_code == 200
    gateway.rates._held.clear()
    gateway.database._engine.dispose()  # who holds it alone has to be alone
    with contextlib.closing(sqlite3.connect(gateway.settings.store, isolation_level=None)) as other:
        for statement in lock.split("; "):
            other.execute(statement).fetchall()
        with monkeypatch.context() as patch:
            patch.setattr(patience, "SECONDS", 0.5)
            patch.setattr(service, "_SECONDS_FOR_READINESS", 0.2)
            patch.setattr(databases, "_SECONDS_TO_WAIT_FOR_A_LOCK", 10**6)  # where there is no such deadline
            answer = client.post("/v1/videos", json={"prompt": "a"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
            assert int(answer.headers["retry-after"]) >= 1
            assert anybody.get("/health/ready").status_code == 503
    gateway._asked.exception(60)
    assert client.get(f"/v1/videos/{made}").status_code == 200 and anybody.get("/health/ready").status_code == 200


def test_a_damaged_store_is_told_of_in_a_line(tmp_path, capsys):
    path = tmp_path / "jobs.sqlite"
    assert verbs.main(["serve", "keys", "add", "a", "--store", str(path)]) == 0
    data = bytearray(path.read_bytes())
    page = int.from_bytes(data[16:18], "big")
    for damaged in range(1, len(data) // page):
        path.write_bytes(data[: damaged * page] + b"\xa5" * page + data[(damaged + 1) * page :])
        code = verbs.main(["serve", "keys", "list", "--store", str(path)])
        told = capsys.readouterr().err
        assert code in (0, 2) and "SELECT" not in told and "Traceback" not in told and told.count("\n") <= 1, told
        if code:
            assert "the job store" in told


@pytest.mark.parametrize("content", ["a", "a note", "SQLite format 4" + 600 * "."])
def test_a_file_that_is_no_store_is_left_as_it_is(content, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(UserError, match="notes.txt' is not a job store; give a file of its own"):
        Database(str(path))
    assert path.read_text() == content


def test_who_lost_a_job_changes_nothing(database, jobs, keys):
    """A gateway that was taken for dead comes back while another runs its job."""
    submit(jobs, keys[0])
    stale = jobs.claim(MODELS)
    other = JobStore(database, owner="there")
    assert [job.id for job in other.interrupt_all("here")] == [stale.id]
    taken = other.claim(MODELS)
    assert not jobs.note_step(stale, 2) and not jobs.complete(stale, RESULT, seconds_to_live=9)
    assert not jobs.fail(stale, "x", "y") and not jobs.interrupt(stale) and not jobs.give_back(stale)
    assert other.complete(taken, RESULT, seconds_to_live=9)


def test_a_preview_is_there_while_its_job_runs(jobs, keys):
    for key, end in zip(
        keys,
        (
            lambda job: jobs.complete(job, RESULT, seconds_to_live=9),
            lambda job: jobs.interrupt(job),
            lambda job: jobs.delete(job.key_id, job.id),
        ),
        strict=True,
    ):
        submit(jobs, key)
        job = jobs.claim(MODELS)
        assert jobs.preview(job, but=0) is None
        assert jobs.note_step(job, 1, b"first") and jobs.note_step(job, 2)
        assert jobs.preview(job, but=0) == (1, b"first") and jobs.preview(job, but=1) is None
        assert jobs.note_step(job, 3, b"second")
        assert jobs.preview(job, but=1) == (3, b"second")
        assert end(job)
        assert jobs.preview(job, but=0) is None
        assert not jobs.note_step(job, 4, b"too late") and jobs.preview(job, but=0) is None


def test_a_drained_job_lost_no_attempt(jobs, keys):
    submit(jobs, keys[0])
    for _ in range(5):
        assert jobs.give_back(jobs.claim(MODELS))
    assert jobs.claim(MODELS).attempts == 1


def test_a_deleted_job_is_neither_run_nor_finished(jobs, keys):
    waiting, running = submit(jobs, keys[0]), submit(jobs, keys[1])
    jobs.delete(keys[0].id, waiting.id)
    claimed = jobs.claim(MODELS)
    assert claimed.id == running.id
    assert jobs.delete(keys[0].id, running.id) is None, "it is another key's"
    jobs.delete(keys[1].id, running.id)
    assert not jobs.complete(claimed, RESULT, seconds_to_live=9)
    assert jobs.claim(MODELS) is None


class Monotonic:
    """A clock that moves when it is told to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def time_passes(monkeypatch):
    monotonic = Monotonic()
    monkeypatch.setattr(clock.time, "monotonic", monotonic)

    def pass_(seconds: float) -> None:
        monotonic.now += seconds

    return pass_


def test_results_expire_by_the_time_that_passed_and_not_by_the_wall_clock(
    database, jobs, keys, time_passes, monkeypatch
):
    heart = Heart(database, "here")
    heart.beat()
    submit(jobs, keys[0])
    done = jobs.claim(MODELS)
    jobs.complete(done, RESULT, seconds_to_live=100)
    for jump in (10**9, -(10**9)):
        monkeypatch.setattr(store.time, "time", lambda jump=jump: 1.7e9 + jump)
        time_passes(40)
        heart.beat()
        assert jobs.expired() == []
    time_passes(40)
    heart.beat()
    assert [job.id for job in jobs.expired()] == [done.id]
    jobs.forget_result(done)
    assert jobs.expired() == [] and not jobs.has_result(done.id, RESULT.name)
    time_passes(1000)
    heart.beat()
    assert jobs.purge(500) == 0, "it still counts for its key"
    time_passes(86_400)
    heart.beat()
    assert jobs.purge(10**6) == 0 and jobs.purge(500) == 1 and jobs.get(keys[0].id, done.id) is None


def test_a_name_is_refused_while_its_beats_come_and_free_when_they_stop(database, monkeypatch):
    monkeypatch.setattr(clock, "SECONDS_TO_CLAIM", 0.4)
    living, other = Heart(database, "vm:8080"), Heart(database, "vm:8080")
    living.claim()
    with monkeypatch.context() as meanwhile, pytest.raises(UserError, match="vm:8080 is running.*--name"):
        # not time.sleep itself, which threads of other tests may call
        beating = SimpleNamespace(sleep=lambda _: living.beat(), monotonic=time.monotonic)
        meanwhile.setattr(clock, "time", beating)
        other.claim()
    other.claim()  # it died
    other.leave()
    monkeypatch.setattr(clock, "SECONDS_TO_CLAIM", 1e6)
    living.claim()  # nobody has it, so that nobody is waited for


def test_two_gateways_move_the_clock_no_faster_than_one(database, time_passes):
    hearts = [Heart(database, name) for name in ("a", "b")]
    for _ in range(51):
        for heart in hearts:
            heart.beat()
        time_passes(1)
    with database.reading() as connection:
        assert clock.store_seconds(connection) == pytest.approx(50, abs=1)


def test_a_gateway_is_dead_when_it_stops_beating_and_is_buried_once(database, time_passes):
    dying, *others = [Heart(database, name, patience=10) for name in ("dying", "b", "c")]
    dead = []
    for second in range(30):
        if second < 5:
            dying.beat()
        for heart in others:
            dead += [(second, name) for name in heart.beat() if heart.bury(name)]
        time_passes(1)
    assert dead == [(15, "dying")]


def test_an_accepted_job_survives_a_kill(tmp_path):
    """What was committed is there though the process never closed anything."""
    program = f"""
import os, signal
from megadit.serve.gateway.store.database import Database
from megadit.serve.gateway.store.keys import KeyRing
from megadit.serve.gateway.store.jobs import NewJob
from megadit.serve.gateway.store.store import JobStore
from megadit.serve.contract import VideoRequest
database = Database({str(tmp_path / "jobs.sqlite")!r})
key = KeyRing(database).add("a")[1]
request = VideoRequest(prompt="a", num_steps=4, num_frames=5, height=8, width=8, fps=8)
print(key.id, JobStore(database, owner="x").create(key, NewJob(model="m", request=request))[0].id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    output = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True).stdout
    key_id, job_id = output.split()
    with contextlib.closing(Database(str(tmp_path / "jobs.sqlite"))) as database:
        assert JobStore(database, owner="y").get(key_id, job_id).status == "queued"


# ------------------------------------------------------------------------------------------------ other releases


def schema(path: Path) -> dict[str, set]:
    """Table -> its columns and indexes, however they came about."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {
            table: {tuple(row[1:4]) for row in connection.execute(f"PRAGMA table_info({table})")}
            | {row[1] for row in connection.execute(f"PRAGMA index_list({table})")}
            for table in tables
        }


def test_a_store_of_a_newer_release_is_refused(tmp_path):
    path = tmp_path / "jobs.sqlite"
    Database(str(path)).close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE schema_version SET version = 999")
        connection.commit()
    with pytest.raises(UserError, match="has schema 999"):
        Database(str(path))


def test_a_store_s_file_is_its_owner_s_alone(tmp_path):
    """It holds what webhooks are signed with."""
    with contextlib.closing(Database(str(tmp_path / "jobs.sqlite"))) as database:
        KeyRing(database).add("a", webhook_url="https://a.example")
        assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
            name: 0o600 for name in ("jobs.sqlite", "jobs.sqlite-wal", "jobs.sqlite-shm")
        }


@pytest.mark.parametrize(
    "url", ["nonsense://x", "sqlite://", "postgresql+psycopg://user:secret@127.0.0.1:1/x", "/proc/nothing/x"]
)
def test_a_store_that_cannot_be_opened_is_told_without_its_password(url):
    with pytest.raises(UserError) as told:
        Database(url)
    assert "secret" not in str(told.value)


def test_two_gateways_may_open_a_new_store_at_once(tmp_path):
    ready, errors = threading.Barrier(4), []

    def open_it():
        ready.wait()
        try:
            Database(str(tmp_path / "jobs.sqlite")).close()
        except UserError as error:
            errors.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
