"""What a key may ask for is counted together by all gateways of a store: each test asks at two of them in turn."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from sqlalchemy.exc import OperationalError
from starlette.testclient import TestClient

from megadit.serve.contract import VideoRequest
from megadit.serve.gateway.http.app import create_app
from megadit.serve.gateway.service import Gateway
from megadit.serve.gateway.store import clock
from megadit.serve.gateway.store.clock import Heart
from megadit.serve.gateway.store.database import Database
from megadit.serve.gateway.store.jobs import NewJob
from megadit.serve.gateway.store.keys import KeyLimits, KeyRing
from megadit.serve.gateway.store.quotas import QuotaExceededError, Rates, TooManyActiveError
from megadit.serve.gateway.store.store import JobStore

NEW = NewJob(
    model="text_to_video", request=VideoRequest(prompt="a", num_steps=4, num_frames=5, height=8, width=8, fps=8)
)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def databases(request, tmp_path):
    """Two openings of one store, as two gateways have them."""
    url = str(tmp_path / "jobs.sqlite") if request.param == "sqlite" else request.getfixturevalue("postgres")
    with contextlib.closing(Database(url)) as one, contextlib.closing(Database(url)) as two:
        yield one, two


def add_key(databases, **limits):
    return KeyRing(databases[0]).add("somebody", limits=KeyLimits(**limits))[1]


def asked(rates, key, count: int) -> int:
    """How many of so many requests are allowed, one at each gateway in turn."""
    return sum(rates[index % 2].take(key.id, key.limits.requests_per_minute) == 0 for index in range(count))


def test_two_gateways_let_a_key_ask_no_more_than_one_would(databases, tmp_path):
    rates, key = [Rates(database) for database in databases], add_key(databases, requests_per_minute=7)
    assert asked(rates, key, 20) == 7
    assert [each.take(key.id, 7) for each in rates] == [pytest.approx(60 / 7)] * 2
    other = add_key(databases, requests_per_minute=3)
    assert asked(rates, other, 20) == 3, "each key has its own"
    again = [Rates(databases[0]), Rates(databases[1])]
    assert asked(again, key, 20) == 0, "and a gateway that starts anew begins with what is left"


def test_gateways_of_two_stores_count_apart(tmp_path):
    """The negative control."""
    text = ["a.sqlite", "b.sqlite"]
    with contextlib.ExitStack() as stack:
        stores = [stack.enter_context(contextlib.closing(Database(str(tmp_path / name)))) for name in text]
        keys = [add_key([store], requests_per_minute=7) for store in stores]
        rates = [Rates(store) for store in stores]
        assert sum(each.take(key.id, 7) == 0 for each, key in zip(rates, keys, strict=True) for _ in range(20)) == 14


def test_a_fast_key_is_counted_exactly_though_not_each_request_is_written(databases, monkeypatch):
    rates, key = [Rates(database) for database in databases], add_key(databases, requests_per_minute=600)
    fetch, fetched = Rates._fetch, []

    def noted(*given):
        found = fetch(*given)
        fetched.append(found[0])
        return found

    monkeypatch.setattr(Rates, "_fetch", noted)
    with ThreadPoolExecutor(6) as threads:
        allowed = sum(threads.map(lambda _: asked(rates, key, 150), range(6)))
    assert allowed + asked(rates, key, 300) == 600
    assert sum(fetched) == 600 and sum(taken > 0 for taken in fetched) == 60


def test_a_bucket_fills_again_by_the_store_s_clock(databases, monkeypatch):
    rates, key, now = [Rates(database) for database in databases], add_key(databases, requests_per_minute=6), [1000.0]
    monkeypatch.setattr(clock.time, "monotonic", lambda: now[0])
    heart = Heart(databases[1], "two")
    heart.beat()
    assert asked(rates, key, 20) == 6
    for seconds, more in ((9, 0), (1, 1), (30, 3), (10**6, 6)):
        now[0] += seconds
        heart.beat()
        assert asked(rates, key, 20) == more, seconds


def test_requests_are_let_through_while_the_store_cannot_be_written(databases, monkeypatch):
    rates, key = Rates(databases[0]), add_key(databases, requests_per_minute=1)

    def full(*_):
        raise OperationalError("UPDATE", {}, Exception("database or disk is full"))

    with monkeypatch.context() as broken:
        broken.setattr(Rates, "_fetch", full)
        assert [rates.take(key.id, 1) for _ in range(5)] == [0.0] * 5
    assert rates.take(key.id, 1) == 0 and rates.take(key.id, 1) > 0


def create_often(databases, key, **changes) -> list:
    """Twenty-four at once, at two gateways in turn: the jobs, and the errors instead of them."""
    stores = [JobStore(database, owner=name) for database, name in zip(databases, ("one", "two"), strict=True)]

    def create(index: int):
        try:
            return stores[index % 2].create(key, replace(NEW, **changes))[0].id
        except (TooManyActiveError, QuotaExceededError) as error:
            return error

    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(create, range(24)))


def test_concurrency_and_quota_hold_over_two_gateways_at_once(databases):
    few = create_often(databases, add_key(databases, max_active=5))
    assert sum(isinstance(each, TooManyActiveError) for each in few) == 19
    day = create_often(databases, add_key(databases, videos_per_day=7))
    assert sum(isinstance(each, QuotaExceededError) for each in day) == 17
    assert len({*create_often(databases, add_key(databases))}) == 24, "the control: a key with room for all"


def test_an_idempotency_key_that_comes_to_two_gateways_at_once_makes_one_video(databases):
    assert len({*create_often(databases, add_key(databases), idempotency_key="order-1", fingerprint="f")}) == 1


def test_a_key_is_refused_at_one_gateway_for_what_it_asked_at_the_other(gateway, new_key):
    key = new_key(requests_per_minute=4)[0]
    headers = {"authorization": f"Bearer {key}"}
    other = Gateway(replace(gateway.settings, name="other"))
    with contextlib.closing(other.database):
        clients = [TestClient(create_app(each), headers=headers) for each in (gateway, other)]
        codes = [clients[index % 2].get("/v1/videos").status_code for index in range(6)]
        assert codes == [200] * 4 + [429] * 2
        assert clients[1].get("/v1/videos").json()["error"]["code"] == "rate_limit_exceeded"
