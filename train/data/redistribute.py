"""Conversion of reader states to another number of data-parallel ranks.

Reader k of `ranks x workers` reads the same on any rank (see `loader`). If that product stays the same, the readers are
divided among the new ranks and no sample is repeated or lost. Otherwise new readers start a new epoch: samples of the
interrupted epoch are repeated or left out, but never with noise that they had before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

RANK, RANKS, WORKERS = "data-parallel rank", "data-parallel size", "data.num_workers"
"""Entries of a reader state's `order` that may differ."""


@dataclass(frozen=True, slots=True)
class Redistributed:
    """State from which one rank continues."""

    state: dict[str, Any]
    """State for `TrainLoader`; its `reader` is None if a new epoch begins."""
    said: str | None = None
    """Note for the user on what differs from an uninterrupted run; None if nothing does."""


def redistribute(
    saved: Sequence[dict[str, Any]], *, rank: int, world_size: int, num_workers: int, micro_batches: int
) -> Redistributed:
    """The state for data-parallel rank `rank` of `world_size` with `num_workers` workers.

    Args:
        saved: states of all ranks of the saved run.
        micro_batches: number in one step, over all ranks.
    """
    order = saved[0].get("order")
    if order is None:  # mock data: the state is a number of packs
        return Redistributed(saved[0])
    if (len(saved), order[WORKERS]) == (world_size, num_workers):
        return Redistributed(saved[rank])
    place = {RANK: rank, RANKS: world_size, WORKERS: num_workers}
    before, now = len(saved) * max(1, order[WORKERS]), world_size * max(1, num_workers)
    was = f"{len(saved)} ranks x data.num_workers={order[WORKERS]}"
    if before == now and order[WORKERS] and num_workers:
        said = None
        if micro_batches % now or any(_fields(state)["next_worker_id"] for state in saved):
            said = f"the same samples, packed into other steps than with {was}; none is lost or repeated"
        return Redistributed({**saved[0], "order": order | place, "reader": _dealt(saved, rank, num_workers)}, said)
    first_pass = 1 + max(_largest_pass(state) for state in saved)
    said = f"a new epoch: {was} were {before} readers, and now there are {now}"
    return Redistributed({"order": order | place, "reader": None, "first_pass": first_pass}, said)


def _fields(state: dict[str, Any]) -> dict[str, Any]:
    """Fields of Energon's SavableDataLoaderState in plain form."""
    return state["reader"]["fields"]


def _dealt(saved: Sequence[dict[str, Any]], rank: int, num_workers: int) -> dict[str, Any]:
    workers = [worker for state in saved for worker in _fields(state)["worker_states"]]
    mine = workers[rank * num_workers : (rank + 1) * num_workers]
    return {**saved[0]["reader"], "fields": _fields(saved[0]) | {"worker_states": mine, "next_worker_id": 0}}


def _largest_pass(state: dict[str, Any]) -> int:
    """Upper bound of the epochs of this rank's readers; each epoch yields a batch or more."""
    numbers = _values("_pass", state["reader"]) or [state.get("first_pass", 0)]
    return max(numbers) + max(_values("offset", state["reader"]), default=0)


def _values(name: str, plain: Any) -> list[int]:
    """All numbers of this name, at any depth."""
    if isinstance(plain, dict):
        own = [plain[name]] if isinstance(plain.get(name), int) else []
        return own + [number for item in plain.values() for number in _values(name, item)]
    return [number for item in plain for number in _values(name, item)] if isinstance(plain, list) else []
