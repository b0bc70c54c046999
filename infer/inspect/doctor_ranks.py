"""`megadit doctor --distributed`: starts ranks, or is one under torchrun; the first rank prints the results."""

import os

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megadit.infer.inspect.interconnect import Link, Place, examine_rank, verdict_of
from megadit.models.megatron.launch import launch

GB, TERA = 10**9, 10**12
MAX_SHOWN = 120
"""Most links in a table, those of 16 ranks; for more, the range is printed."""


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
