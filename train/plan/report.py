"""Reports of the planner: the size of one run, or the best layouts for it."""

import math

import numpy as np
from rich.console import Console
from rich.table import Table

from megadit.models.shared.errors import UserError
from megadit.models.shared.resources import GIB, memory_in_words
from megadit.train.config.rules import check_dataset
from megadit.train.config.schema import RunConfig
from megadit.train.dataset.dataset_info import DatasetInfo
from megadit.train.plan.budget import budget
from megadit.train.plan.estimate import tokens_per_second
from megadit.train.plan.hardware import Gpu, this_device, this_machines_memory
from megadit.train.plan.imbalance import expected_imbalance
from megadit.train.plan.layout import Layout
from megadit.train.plan.memory import Memory, choice_in_words, memory_of, with_recompute
from megadit.train.plan.search import Choice, assess, rank_layouts, usable_memory
from megadit.train.plan.throughput import samples_of_a_step, step_seconds, time_in_words, with_shapes_of
from megadit.train.plan.warnings import warnings_of
from megadit.train.plan.work import count_parameters, count_trained, typical_pack, upstream_flops, work_of

NUM_SHOWN = 12


def dry_run(config: RunConfig, gpus: int, gpu: Gpu | None) -> list[str]:
    """Lines with groups, parameters, memory, flops, traffic and warnings of a run. Memory is compared with that of
    `gpu`, or of this machine. Raises UserError if the run does not fit into the memory of `gpu`, or its data set cannot
    be used."""
    info = _dataset(config)
    config = with_shapes_of(info, config)
    decided = config if gpu is None else with_recompute(config, gpus, gpu.memory)
    layout = Layout.of(decided, gpus)
    memory = memory_of(decided, layout)
    lines = [*_size_lines(config), *_group_lines(layout), *_memory_lines(memory), *_work_lines(config, layout)]
    if gpu is not None:
        _check_fit(config, layout, gpu)
        lines += [f"recomputed: {choice_in_words(decided)} of each model chunk"] if decided is not config else []
        lines += _time_lines(config, assess(config, layout, gpu))
    free = math.inf if gpu is not None else this_machines_memory(gpus)
    if memory.total <= free < math.inf:
        lines.append(
            f"estimated on this machine: {time_in_words(config, step_seconds(config, gpus, this_device(gpus)))}"
        )
    if info is None and not config.data.mock:
        shapes = ", ".join("x".join(map(str, shape)) for shape in config.data.mock_latent_shapes[:3])
        lines.append(
            f"note: samples are counted as latents of {shapes}; data.path=FOLDER counts those of your data set"
        )
    lines += [
        f"note: {doubt}" for doubt in warnings_of(config, info, needed=memory.total, free=free, readers=layout.data)
    ]
    return lines


def plan(config: RunConfig, gpus: int, gpu: Gpu) -> None:
    """Print the best layouts, and compare the first with others. Raises UserError if no layout fits."""
    config = with_shapes_of(_dataset(config), config)
    choices = rank_layouts(config, gpus, gpu)
    if not choices:
        raise UserError(f"no layout of {gpus} GPUs divides data.global_batch_size={config.data.global_batch_size}")
    fitting = [choice for choice in choices if choice.fits]
    if not fitting:
        least = choices[0]
        raise UserError(
            f"no layout of {config.recipe} on {gpus} x {gpu.name} fits: the smallest, {least.layout}, needs "
            f"{least.memory.total / GIB:.0f} GiB of {usable_memory(gpu) / GIB:.0f}; take more GPUs"
        )
    console = Console(width=140)
    console.print(
        f"{config.recipe} on {gpus} x {gpu.name}: {len(choices)} layouts, {len(fitting)} fit in "
        f"{usable_memory(gpu) / GIB:.0f} GiB ({gpu.memory / GIB:.0f} less a reserve)"
    )
    console.print(_own_layout(config, gpus, gpu))
    console.print(_table(config, fitting[:NUM_SHOWN]))
    for line in _explanation(fitting[0], choices):
        console.print(line)


def explain(config: RunConfig, gpus: int, gpu: Gpu) -> None:
    """Print the time budget of a step in the configured layout, by operation. Raises UserError if the layout is not
    possible on `gpus` GPUs."""
    decided = with_recompute(with_shapes_of(_dataset(config), config), gpus, gpu.memory)
    layout = Layout.of(decided, gpus)
    parts = budget(decided, layout, gpu)
    total = sum(part.seconds for part in parts)
    table = Table(box=None)
    for name, justify in {"part": "left", "TFLOP": "right", "GB": "right", "ms": "right", "at least": "right"}.items():
        table.add_column(name, justify=justify)
    for part in parts:
        table.add_row(part.name, *map(_short, (part.flops / 1e12, part.bytes / 1e9)), *_ms(part.seconds, part.least))
    table.add_row("sum", "", "", *_ms(total, sum(part.least for part in parts)))
    console = Console(width=140)
    console.print(f"one step of {config.recipe} on {gpus} x {gpu.name} ({layout})")
    console.print(table)
    needed, available = memory_of(decided, layout).total, usable_memory(gpu)
    fit = "" if needed <= available else ": it does not fit (without --explain, layouts that do)"
    speed = f"{tokens_per_second(decided, layout, total):,.0f} tokens/s/GPU"
    for line in (
        f"{memory_in_words(needed)} on each GPU, of {memory_in_words(available)} usable{fit}",
        f"{speed}; estimates: `make gpu-check` measures them",
    ):
        console.print(line, highlight=False)


def _dataset(config: RunConfig) -> DatasetInfo | None:
    """The data set of a run, if it has one."""
    return None if config.data.mock or config.data.path is None else check_dataset(config)


def _ms(*seconds: float) -> list[str]:
    return [_short(1e3 * value) or "0" for value in seconds]


def _short(value: float) -> str:
    """Three digits; empty for 0."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}" if value else ""


def _size_lines(config: RunConfig) -> list[str]:
    tokens, distill = config.data.global_batch_size * config.data.seq_length, config.train.distill
    adapter = [f"parameters of the adapter, which alone are trained: {count_trained(config).total:,}"]
    others = "teacher" + (" and critic" if distill is not None and distill.has_critic else "")
    form = ", adapters on the same weights" if config.has_one_base else ""
    return [
        f"parameters: {count_parameters(config.model).total:,}",
        *(adapter if config.train.adapter is not None else []),
        *([] if distill is None else [f"networks in addition to the student: {others}{form}"]),
        f"video tokens: {tokens:,} a step, {tokens * config.train.train_iters:,} in all (including padding); "
        f"about {samples_of_a_step(config):,} samples a step",
    ]


def _group_lines(layout: Layout) -> list[str]:
    lines = [f"layout on {layout.gpus} ranks: {layout} micro-batches"]
    for name, groups in layout.groups().items():
        if groups.shape[1] > 1:
            shown = [_members(group) for group in groups[:2]] + (["..."] if len(groups) > 3 else [])
            shown += [_members(group) for group in groups[2:][-1:]]
            lines.append(f"  {name} groups: {len(groups)} of {groups.shape[1]}: {' '.join(shown)}")
    return lines


def _members(ranks: np.ndarray) -> str:
    shown = list(map(str, ranks)) if len(ranks) <= 8 else [*map(str, ranks[:3]), "...", str(ranks[-1])]
    return f"[{' '.join(shown)}]"


def _memory_lines(memory: Memory) -> list[str]:
    parts = {name: memory_in_words(getattr(memory, name)) for name in memory.__slots__}
    offloaded = parts.pop("offloaded")
    line = f"memory of a rank: {memory_in_words(memory.total)}: " + ", ".join(map(" ".join, parts.items()))
    return [line, *([f"  and of its host: {offloaded} of activations, pinned"] if memory.offloaded else [])]


def _work_lines(config: RunConfig, layout: Layout) -> list[str]:
    work, m = work_of(config, layout), layout.num_micro_batches
    step = work.flops * m * layout.gpus
    traffic = {
        "tensor": work.tensor_bytes * m,
        "context": (work.exchange_bytes + work.ring_bytes) * m,
        "experts": work.expert_bytes * m,
        "pipeline": work.pipeline_bytes * m,
        "gradients": work.data_reduce_bytes,
        "weights": work.data_gather_bytes,
    }
    shown = ", ".join(f"{name} {memory_in_words(value)}" for name, value in traffic.items() if value) or "none"
    pack = typical_pack(config)
    return [
        f"FLOPs of a step: {step:.4g} ({step / layout.gpus:.4g} a rank); by the formula of published throughputs "
        f"(6 x parameters + attention) {upstream_flops(config):.4g}",
        f"  counted for packs of {len(pack.segments)} segments, {pack.num_tokens:,} of {pack.capacity:,} tokens filled",
        f"sent by a rank in a step: {shown}",
        *_imbalance_lines(config, layout),
    ]


def _imbalance_lines(config: RunConfig, layout: Layout) -> list[str]:
    imbalance = expected_imbalance(config, layout.data)
    if imbalance == 1:
        return []
    return [
        f"work of the busiest of {layout.data} data-parallel ranks: about {imbalance:.2f} of the mean "
        f"(data.balance={config.data.balance})"
    ]


def _time_lines(config: RunConfig, choice: Choice) -> list[str]:
    seconds = choice.time.total
    tokens = tokens_per_second(config, choice.layout, seconds)
    return [f"estimated on {choice.gpu.name}: {seconds:.3g} s a step, {tokens:,.0f} tokens/s/GPU: {_shares(choice)}"]


def _shares(choice: Choice) -> str:
    parts = {name: getattr(choice.time, name) / choice.time.total for name in choice.time.__slots__}
    return ", ".join(f"{name} {share:.0%}" for name, share in parts.items() if share >= 0.005)


def _check_fit(config: RunConfig, layout: Layout, gpu: Gpu) -> None:
    memory = memory_of(config, layout)
    if memory.total > usable_memory(gpu):
        raise UserError(
            f"{config.recipe} as {layout} needs {memory.total / GIB:.0f} GiB on each GPU and {gpu.name} has "
            f"{usable_memory(gpu) / GIB:.0f} usable; "
            f"`--plan --gpus {layout.gpus} --gpu {gpu.name}` finds layouts that fit"
        )


def _own_layout(config: RunConfig, gpus: int, gpu: Gpu) -> str:
    """Describe the cost of the configured layout, or why it is refused."""
    try:
        own = assess(config, Layout.of(with_recompute(config, gpus, gpu.memory), gpus), gpu)
    except UserError as error:
        return f"as configured: refused: {error}"
    if not own.fits:
        return f"as configured ({own.layout}): refused: it needs {memory_in_words(own.memory.total)} on each GPU"
    return f"as configured ({own.layout}): {own.time.total:.3g} s a step, {memory_in_words(own.memory.total)}"


def _table(config: RunConfig, choices: list[Choice]) -> Table:
    table = Table(box=None)
    for name in ("", "layout (micro-batches x packs)", "s/step", "tokens/s/GPU", "GiB", "where the time goes"):
        table.add_column(name, justify="right" if name in ("", "s/step", "tokens/s/GPU", "GiB") else "left")
    for number, choice in enumerate(choices, start=1):
        seconds = choice.time.total
        table.add_row(
            str(number),
            str(choice.layout),
            f"{seconds:.3g}",
            f"{tokens_per_second(config, choice.layout, seconds):,.0f}",
            f"{choice.memory.total / GIB:.0f}",
            _shares(choice),
        )
    return table


def _explanation(best: Choice, choices: list[Choice]) -> list[str]:
    """Compare the best layout with others that differ in one setting."""
    lines = [f"best: {best.layout}", *(f"    {override}" for override in best.layout.overrides())]
    for name in ("tensor", "pipeline", "context", "data_parallel", "recompute", "micro_batch_size"):
        chosen = getattr(best.layout, name)
        others = sorted({getattr(one.layout, name) for one in choices} - {chosen}, key=_order)
        comparisons = [f"{other}: {_compare(best, name, other, choices)}" for other in others]
        lines += [f"why {name}={chosen}:"] if comparisons else []
        lines += [f"    {line}" for line in comparisons]
    return lines


def _order(value: int | str) -> tuple:
    return (math.inf, value) if isinstance(value, str) else (value, "")


def _compare(best: Choice, name: str, value: int | str, choices: list[Choice]) -> str:
    """Compare with the best layout that has another value of a setting (`choices` are sorted)."""
    other = next(one for one in choices if getattr(one.layout, name) == value)
    if not other.fits:
        return f"at least {memory_in_words(other.memory.total)}, does not fit"
    return f"{other.time.total / best.time.total - 1:+.1%} time, {memory_in_words(other.memory.total)} ({other.layout})"
