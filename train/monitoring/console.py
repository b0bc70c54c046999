"""Messages of a run for its user: at its start, after validation and at its end.

Nothing here synchronizes with a device or another rank.
"""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadit.infer.runtimes.torch import find_dtype
from megadit.models.configs.families import Task
from megadit.models.machine import cost_in_words, free_memory
from megadit.models.shared.errors import UserError
from megadit.models.shared.progress import duration
from megadit.models.shared.resources import memory_in_words
from megadit.train.config.facts import OF_DATASET, agree
from megadit.train.config.rules import check_dataset
from megadit.train.config.schema import RunConfig
from megadit.train.dataset.dataset_info import DatasetInfo
from megadit.train.monitoring.curves import CURVES_FILE
from megadit.train.plan.hardware import this_device
from megadit.train.plan.memory import needed_memory, with_recompute
from megadit.train.plan.throughput import samples_of_a_step, step_seconds, time_in_words, with_shapes_of
from megadit.train.plan.warnings import warnings_of
from megadit.train.plan.work import count_parameters, count_trained
from megadit.train.recipes import RECIPES

if TYPE_CHECKING:
    import torch

    from megadit.train.checkpoints.checkpoint import RunState
    from megadit.train.engine.validation import SampledVideo


def expected_seconds(config: RunConfig, ranks: int) -> float:
    """Expected seconds of a step on this machine, whose speed is measured here."""
    info = None if config.data.mock else check_dataset(config)
    return step_seconds(with_shapes_of(info, config), ranks, this_device(ranks))


def beginning(config: RunConfig, ranks: int, device: "torch.device", seconds: float) -> list[str]:
    """Describe the run, its data and its hardware before the first step; `seconds` is the expected time of a step."""
    data, info = config.data, None if config.data.mock else check_dataset(config)
    adapter = f" and {count_trained(config).total:,} of the adapter, which alone learn" if config.train.adapter else ""
    samples = "random samples" if info is None else f"{info.num_samples.get('train', 0):,} samples of {data.path}"
    tokens = data.global_batch_size * data.seq_length
    free, counted = free_memory(device), with_shapes_of(info, config)
    readers = ranks // config.parallel.sizes.model_parallel_size
    needed = needed_memory(with_recompute(counted, ranks, free), ranks)
    return [
        f"{config.recipe}: {count_parameters(config.model).total:,} parameters{adapter}, on {ranks} rank(s)",
        f"data: {samples}, about {samples_of_a_step(counted):,} a step: at most {tokens:,} video tokens, in "
        f"{data.global_batch_size} packs of {data.seq_length:,}",
        f"memory of a rank: about {memory_in_words(needed)}, plus Python and torch; {memory_in_words(free)} are free",
        *_taken_from(info, config),
        f"folder: {config.train.output_dir}",
        f"estimated time: {time_in_words(config, seconds)}",
        *(f"note: {doubt}" for doubt in warnings_of(config, info, needed=needed, free=free, readers=readers)),
        *_slow_precision(config, device),
    ]


def _slow_precision(config: RunConfig, device: "torch.device") -> list[str]:
    """Note that the processor has no native arithmetic for `train.precision`, if so."""
    cost = cost_in_words(device, find_dtype(config.train.precision))
    return [] if cost is None else [f"note: {cost}: train.precision=fp32 avoids that"]


def _taken_from(info: DatasetInfo | None, config: RunConfig) -> list[str]:
    """Note of settings that come from the data set and differ from the recipe."""
    if info is None or config.recipe not in RECIPES:
        return []
    recipe = RECIPES[config.recipe]().model
    ours = {name: (getattr(config.model, name), getattr(recipe, name)) for name in OF_DATASET}
    other = [
        f"model.{name}={value:g} (recipe: {was:g})" for name, (value, was) in ours.items() if not agree(value, was)
    ]
    return [f"from the data set: {', '.join(other)}"] if other else []


def validated(step: int, found: dict[str, Any], videos: Sequence["SampledVideo"]) -> str:
    """Describe the result of a validation, with the folder of its videos."""
    best, losses = found["best"], found["losses"]
    line = f"validation at step {step:,}: loss {losses[best]['mean']:.4g} with {average_in_words(best)}"
    if (wrong := losses[best].get("wrong")) is not None:
        line += f", {1 - wrong:.2%} of the samples right"
    others = [f"{each['mean']:.4g} with {average_in_words(name)}" for name, each in losses.items() if name != best]
    if others:
        line += f", the lowest; {', '.join(others)}"
    return f"{line}; {len(videos)} video(s) in {videos[0].path.parent}" if videos else line


def average_in_words(name: str) -> str:
    """Describe weights by their name in validation: "none", or a sigma_rel."""
    return "the weights" if name == "none" else f"EMA {name} (sigma_rel)"


def evaluated(step: int, metric_values: dict[str, dict[str, float]]) -> str:
    named = ", ".join(f"{name} {value['value']:.4g}" for name, value in metric_values.items())
    return f"evaluation at step {step}: {named or 'no metrics'}"


def ending(config: RunConfig, state: "RunState", *, steps: int, seconds: float, caption: str | None) -> list[str]:
    """Describe the result of a run, where to find it, and the next commands.

    Args:
        state: progress of the run.
        steps: number of steps of this process, which took `seconds`.
        caption: prompt for the suggested commands.
    """
    out, validation = Path(config.train.output_dir), state.validation
    best = f"; validation loss {validation['losses'][validation['best']]['mean']:.4g}" if validation else ""
    if state.iteration < config.train.train_iters:
        best += f", and {state.lowest['loss']:.4g} at step {state.lowest['step']}, the lowest (validation.patience)"
    picture = f"{out / CURVES_FILE}, " if (out / CURVES_FILE).is_file() else ""
    return [
        f"done: {state.iteration:,} of {config.train.train_iters:,} steps, {steps:,} of them in the last "
        f"{duration(seconds)}{best}",
        f"look at: {picture}`megadit info {shlex.quote(str(out))} --html {shlex.quote(f'{out}.html')}`",
        *_passes(config, state),
        *_refused(state),
        *_next(config, out, caption, state.lowest.get("step")),
    ]


def _passes(config: RunConfig, state: "RunState") -> list[str]:
    """Describe how many epochs of the data were seen; empty for mock data, blends, and data that no longer exist."""
    with suppress(UserError):
        if not config.data.mock and (count := check_dataset(config).num_samples.get("train")):
            return [
                f"seen: {state.consumed_samples:,} samples, {state.consumed_samples / count:.3g} epochs of the "
                f"{count:,} of the training split"
            ]
    return []


def _refused(state: "RunState") -> list[str]:
    """Describe the fraction of rejected samples."""
    refused = sum(state.refused_samples.values())
    if not refused:
        return []
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(state.refused_samples.items()))
    return [f"rejected: {refused / (refused + state.consumed_samples):.1%} of the samples read ({reasons})"]


_USED_BY: dict[Task, str] = {"classify": "classify {} PICTURE", "match": "similarity {} PICTURE TEXT TEXT"}
"""Task -> command that applies such a network to images; {} is replaced by its bundle."""


def _next(config: RunConfig, out: Path, caption: str | None, step: int | None) -> list[str]:
    """Commands that use the trained network; none if there is no text encoder for a prompt, or another command
    follows."""
    if config.data.mock or config.train.distill is not None:
        return []
    run, prompt = shlex.quote(str(out)), shlex.quote(caption or "PROMPT")
    made = shlex.quote(str(out / ("bundle" if config.train.adapter is None else "adapter")))
    with_it = f"--checkpoint_path {made}"
    bundled = f"next: megadit bundle {run} {made}{'' if step is None else f' --step {step}'}"
    if config.model.task in _USED_BY:
        return [bundled, f"      megadit {_USED_BY[config.model.task].format(made)}"]
    if config.train.adapter is not None:
        with_it = f"--checkpoint_path {shlex.quote(config.checkpoint.init_from)} --adapter {made}"
    return [
        bundled,
        f"      megadit generate {with_it} --prompt {prompt} --video_save_path {shlex.quote(f'{out}.mp4')}",
    ]
