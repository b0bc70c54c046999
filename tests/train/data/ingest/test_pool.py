"""Work in several processes: in order, and past items that take their process with them."""

import os

from megadit.train.data.ingest.pool import Pool


def work(item: int) -> str:
    if item in (3, 11):
        os._exit(1)  # as a decoder that crashes
    return f"did {item}"


def crashed(item: int) -> str:
    return f"lost {item}"


def test_results_come_in_order_and_crashes_cost_one_item_each():
    with Pool(2) as pool:
        results = list(pool.map(work, range(14), crashed))
    assert results == [f"lost {item}" if item in (3, 11) else f"did {item}" for item in range(14)]


def test_without_processes_the_caller_does_the_work():
    with Pool(0) as pool:
        assert list(pool.map(str, range(3), crashed)) == ["0", "1", "2"]
