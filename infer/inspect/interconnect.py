"""`megadit doctor --distributed`: tests that all ranks of a job compute correctly, and that all pairs communicate
equally fast; the first rank prints the results.

Each rank checks its device. Then pairs run all-reduces: pairs of ranks within each node, then pairs of nodes with all
their ranks, in rounds in which each has one partner (a round-robin tournament), so that n nodes take n - 1 rounds.
Each pair has its own process group, and results go through the store: a rank that hangs or dies affects only its own
pairs, and is reported.
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megadit.models.machine import synchronize
from megadit.models.megatron.interfaces import name_gloos_interface
from megadit.models.megatron.launch import launch

GB, TERA = 10**9, 10**12
MAX_SHOWN = 120
"""Most links in a table, those of 16 ranks; for more, the range is printed."""
PATIENCE = timedelta(seconds=30)
"""Timeout of a partner."""
SLOW = 0.6
"""A device or link slower than this fraction of the median of its kind is reported."""
REPEATS = 5
Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A rank, and the test of its device."""

    rank: int
    node: int
    host: str
    device: str
    flops: float
    """FLOP/s of a float32 matrix product."""
    fault: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """An all-reduce of two ranks of a node, or of all ranks of two nodes."""

    kind: str
    """`rank` or `node`."""
    ends: Pair
    bandwidth: float
    """Bus bandwidth of each rank, bytes per second: 2 (n - 1) / n of the data; 0 if it failed."""
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Messages about problems, the worst first."""

    broken: tuple[str, ...]
    slow: tuple[str, ...]


def examine_rank() -> tuple[list[Place], list[Link]] | None:
    """Runs one rank's tests, under torchrun; returns the results of all ranks on the first rank, None on others."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, device = _open_store(rank), _device()
    store.set(f"place/{rank}", json.dumps(asdict(try_device(rank, device))))
    places = _answering(store, rank, world_size)
    rounds = list(_rounds(places))
    for number, groups in enumerate(rounds):
        for kind, ends, ranks in groups:
            if rank in ranks:
                link = measure(kind, ends, ranks, rank, dist.PrefixStore(f"round{number}/{kind}{ends}", store), device)
                store.set(f"link/{number}/{ends}/{rank}", json.dumps(asdict(link)))
        _meet(store, f"met/{number}", len(places))
    found = (places + _silent(places, world_size), _collect(store, rounds)) if rank == 0 else None
    _meet(store, "done", len(places))  # the first rank hosts the store, so it leaves last
    return found


def try_device(rank: int, device: torch.device) -> Place:
    """Times a matrix product of integers, and checks its exact result."""
    name, fault, flops = "CPU", "", 0.0
    try:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else name
        size = 4096 if device.type == "cuda" else 512
        a = torch.full((size, size), 3.0, device=device)
        seconds = min(_seconds(lambda: a @ a, device) for _ in range(REPEATS))
        flops = 2 * size**3 / seconds
        if not bool(((a @ a) == 9.0 * size).all()):
            fault = "computes a wrong product"
    except RuntimeError as error:
        fault = _first_line(error)
    node = int(os.environ.get("GROUP_RANK", rank // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    return Place(rank=rank, node=node, host=os.uname().nodename, device=name, flops=flops, fault=fault)


def measure(kind: str, ends: Pair, ranks: Sequence[int], rank: int, store: dist.Store, device: torch.device) -> Link:
    """Measures the bandwidth of an all-reduce among `ranks`, and checks its sum."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    num_bytes = (256 if device.type == "cuda" else 8) * 2**20
    try:
        dist.init_process_group(backend, store=store, rank=ranks.index(rank), world_size=len(ranks), timeout=PATIENCE)
        values = torch.ones(num_bytes // 4, device=device)
        dist.all_reduce(values)
        fault = "" if bool((values == len(ranks)).all()) else "adds up wrongly"
        seconds = min(_seconds(lambda: dist.all_reduce(values), device) for _ in range(REPEATS))
        return Link(
            kind=kind, ends=ends, bandwidth=2 * (len(ranks) - 1) / len(ranks) * num_bytes / seconds, fault=fault
        )
    except RuntimeError as error:  # a partner did not come, or left
        return Link(kind=kind, ends=ends, bandwidth=0.0, fault=_first_line(error))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def verdict_of(places: list[Place], links: list[Link]) -> Verdict:
    """Reports failures and slow links; a rank or node with mostly bad links is reported instead of them."""
    broken = [f"{_rank_words(place)}: {place.fault}" for place in places if place.fault]
    usual = median([place.flops for place in places if not place.fault] or [0.0])
    slow = [
        f"{_rank_words(place)} computes at {place.flops / usual:.0%} of the usual rate"
        for place in places
        if not place.fault and place.flops < SLOW * usual
    ]
    named = {place.rank for place in places if place.fault}
    for kind in ("rank", "node"):
        of_kind = [link for link in links if link.kind == kind]
        broken += _blame(kind, of_kind, [link for link in of_kind if link.fault], places, named)
        good = [link for link in of_kind if not link.fault]
        limit = SLOW * median([link.bandwidth for link in good] or [0.0])
        slow += _blame(kind, good, [link for link in good if link.bandwidth < limit], places, set())
    return Verdict(tuple(broken), tuple(slow))


def _blame(kind: str, links: list[Link], bad: list[Link], places: list[Place], named: set[int]) -> list[str]:
    """Ends most of whose links are bad, if they have several; then the bad links that they do not explain."""
    total, faulty = defaultdict(int), defaultdict(int)
    for link in links:
        for end in link.ends:
            total[end] += 1
            faulty[end] += link in bad
    guilty = {end for end in faulty if total[end] > 1 and faulty[end] > total[end] / 2}
    if guilty == set(total):  # all are bad: no one in particular
        guilty = set()
    lines = [
        f"{_end_words(kind, end, places)}: {_how(link, links)} with {faulty[end]} of {total[end]} partners"
        for end in sorted(guilty)
        if not (kind == "rank" and end in named)
        for link in [next(link for link in bad if end in link.ends)]
    ]
    return lines + [
        f"{_end_words(kind, link.ends[0], places)} with {_end_words(kind, link.ends[1], places)}: {_how(link, links)}"
        for link in bad
        if not guilty.intersection(link.ends) and not (kind == "rank" and named.intersection(link.ends))
    ]


def _how(link: Link, links: list[Link]) -> str:
    if link.fault:
        return link.fault
    return f"{link.bandwidth / median(other.bandwidth for other in links):.0%} of the usual bandwidth"


def _rank_words(place: Place) -> str:
    return f"rank {place.rank} on {place.host} (node {place.node}, {place.device})"


def _end_words(kind: str, end: int, places: list[Place]) -> str:
    if kind == "rank":
        return _rank_words(next(place for place in places if place.rank == end))
    return f"node {end} ({next(place.host for place in places if place.node == end)})"


def tournament(members: Sequence[int]) -> Iterator[list[Pair]]:
    """Rounds in which every pair meets once, and each member has one partner per round (the circle method)."""
    circle: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if None not in pair]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def _rounds(places: list[Place]) -> Iterator[list[tuple[str, Pair, tuple[int, ...]]]]:
    """(kind, ends, ranks) of the groups of each round."""
    nodes = defaultdict(list)
    for place in places:
        nodes[place.node].append(place.rank)
    within = [list(tournament(ranks)) for ranks in nodes.values()]
    for number in range(max(map(len, within))):
        yield [("rank", pair, pair) for rounds in within if number < len(rounds) for pair in rounds[number]]
    if len(nodes) > 1:
        for pairs in tournament(sorted(nodes)):
            yield [("node", pair, (*nodes[pair[0]], *nodes[pair[1]])) for pair in pairs]


def _open_store(rank: int) -> dist.Store:
    """Open the ranks' shared store: torchrun's own, or one that the first rank hosts; does not wait for it."""
    name_gloos_interface()
    is_torchrun_s = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not is_torchrun_s,
        wait_for_workers=False,
        timeout=PATIENCE,
    )
    return dist.PrefixStore("doctor", store)


def _answering(store: dist.Store, rank: int, world_size: int) -> list[Place]:
    """The ranks that respond in time; the first rank decides, so that all agree."""
    if rank == 0:
        deadline = time.monotonic() + PATIENCE.total_seconds()
        keys = [f"place/{other}" for other in range(world_size)]
        while not store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)
        present = [key for key in keys if store.check([key])]
        store.set("places", json.dumps([json.loads(store.get(key)) for key in present]))
    store.wait(["places"], 2 * PATIENCE)
    return [Place(**values) for values in json.loads(store.get("places"))]


def _silent(places: list[Place], world_size: int) -> list[Place]:
    missing = sorted(set(range(world_size)) - {place.rank for place in places})
    return [
        Place(rank=rank, node=-1, host="an unknown host", device="?", flops=0.0, fault="does not answer")
        for rank in missing
    ]


def _meet(store: dist.Store, key: str, count: int) -> None:
    """Waits for all ranks, so that rounds do not overlap; up to the timeout of a partner."""
    store.add(key, 1)
    deadline = time.monotonic() + 2 * PATIENCE.total_seconds()
    while store.add(key, 0) < count and time.monotonic() < deadline:
        time.sleep(0.02)


def _collect(store: dist.Store, rounds: list[list[tuple[str, Pair, tuple[int, ...]]]]) -> list[Link]:
    """One link for each pair: the slowest rank's measurement, or a fault of any rank."""
    links = []
    for number, groups in enumerate(rounds):
        for kind, ends, ranks in groups:
            keys = [f"link/{number}/{ends}/{rank}" for rank in ranks]
            seen = [json.loads(store.get(key)) for key in keys if store.check([key])]
            views = [Link(**{**values, "ends": tuple(values["ends"])}) for values in seen]
            if len(views) < len(ranks):
                views.append(Link(kind=kind, ends=ends, bandwidth=0.0, fault="does not answer"))
            links.append(min(views, key=lambda link: (not link.fault, link.bandwidth)))
    return links


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a lost partner is an error, not an abort
    return device


def _seconds(function, device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:160]


def examine(num_processes: int | None) -> int:
    """Returns exit code 1 if something is broken, else 0; slow devices and links are only reported."""
    if "RANK" not in os.environ:
        count = num_processes or torch.cuda.device_count() or 2
        return launch("megadit.infer.inspect.doctor", ["--distributed"], num_processes=count)
    found = examine_rank()
    return 0 if found is None else _report(*found)


def _report(places: list[Place], links: list[Link]) -> int:
    console = Console()
    console.print(_places_table(places))
    for kind in ("rank", "node"):
        of_kind = [link for link in links if link.kind == kind]
        if of_kind:
            console.print(_links_table(kind, of_kind) if len(of_kind) <= MAX_SHOWN else _links_summary(kind, of_kind))
    verdict = verdict_of(places, links)
    for words in verdict.broken:
        console.print(f"[red]broken:[/] {escape(words)}", soft_wrap=True)
    for words in verdict.slow:
        console.print(f"[yellow]slow:[/] {escape(words)}", soft_wrap=True)
    if not (verdict.broken or verdict.slow):
        console.print(f"[green]all {len(places)} ranks compute and communicate alike[/]")
    return int(bool(verdict.broken))


def _places_table(places: list[Place]) -> Table:
    table = Table(title="ranks", title_justify="left", title_style="bold", box=None)
    for name in ("rank", "node", "host", "device", "TFLOP/s float32", ""):
        table.add_column(name, justify="right" if name in ("rank", "node", "TFLOP/s float32") else "left")
    for place in places:
        speed = f"{place.flops / TERA:.3g}"
        table.add_row(str(place.rank), str(place.node), place.host, place.device, speed, escape(place.fault))
    return table


def _links_table(kind: str, links: list[Link]) -> Table:
    """Bandwidths in GB/s of all pairs."""
    title = f"all-reduce between pairs of {kind}s, GB/s"
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    ends = sorted({end for link in links for end in link.ends})
    figures = {link.ends: "failed" if link.fault else f"{link.bandwidth / GB:.3g}" for link in links}
    table.add_column(kind, justify="right")
    for end in ends:
        table.add_column(str(end), justify="right")
    for end in ends:
        table.add_row(str(end), *(figures.get((min(end, other), max(end, other)), "") for other in ends))
    return table


def _links_summary(kind: str, links: list[Link]) -> str:
    good = sorted(link.bandwidth / GB for link in links if not link.fault)
    spread = f"{good[0]:.3g} to {good[-1]:.3g}, median {good[len(good) // 2]:.3g}" if good else "none"
    return f"all-reduce between {len(links)} pairs of {kind}s, GB/s: {spread}; {len(links) - len(good)} failed"
