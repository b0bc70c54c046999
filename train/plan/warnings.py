"""Warnings about settings that are allowed but seldom intended, before a run and in `--dry-run`."""

import math
from pathlib import Path
from typing import Any

from megadit.models.bundle import Bundle
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import is_bundle, read_json
from megadit.models.shared.resources import memory_in_words
from megadit.train.config.schema import RunConfig
from megadit.train.data.ingest.plan import Notes
from megadit.train.data.ingest.report import more_channels_in_words
from megadit.train.dataset.dataset_info import DatasetInfo
from megadit.train.plan.imbalance import HIGH, expected_imbalance, uneven_packs
from megadit.train.plan.throughput import with_shapes_of
from megadit.train.recipes import RECIPES

FAITHFUL_PSNR = 28.0
"""PSNR in decibels of a tokenizer below which its losses are clearly visible in generated videos."""
SIZES = ("num_layers", "hidden_size", "in_channels")
"""Settings of a network; if they differ from the recipe's, its sampling settings may not suit."""


def warnings_of(
    config: RunConfig, info: DatasetInfo | None, *, needed: float = 0.0, free: float = math.inf, readers: int = 1
) -> list[str]:
    """Warnings about a run; `info` is its data set, None if unknown.

    Args:
        needed: estimated bytes of a rank; `free`: those that this machine has for it.
        readers: number of data-parallel ranks.
    """
    model, found = config.model, []
    if 2 * model.patch_dim > model.hidden_size:
        found.append(
            f"a token holds {model.patch_dim} numbers ({model.in_channels} channels x {model.patch_temporal} x "
            f"{model.patch_spatial} x {model.patch_spatial}), more than half of model.hidden_size="
            f"{model.hidden_size}: a wider network, fewer channels or a smaller model.patch_spatial learn better"
        )
    if needed > free:
        found.append(
            f"a rank needs about {memory_in_words(needed)}, and this machine has {memory_in_words(free)} for it: "
            "--gpu NAME compares with another machine, data.micro_batch_size and data.seq_length reduce it"
        )
    found += _imbalance(with_shapes_of(info, config), readers)
    found += _inherited_guidance(config)
    psnr = None if info is None else reconstruction_psnr(info)
    if psnr is not None and psnr < FAITHFUL_PSNR:
        found.append(
            f"the tokenizer of {info.root} reconstructs videos at {psnr:.1f} dB only ({info.latent_channels} "
            f"channels): prepare with more --channels, or another --tokenizer, for sharper ones{_more_channels(info)}"
        )
    return found


def _imbalance(config: RunConfig, readers: int) -> list[str]:
    """Warn if ranks would wait for the one with the longest clips, or the stages of a pipeline."""
    data, ratio = config.data, expected_imbalance(config, readers)
    if ratio > HIGH:
        larger = f"more than data.packing_buffer_size={data.packing_buffer_size}"
        remedy = "data.balance=work" if data.balance == "tokens" else larger
        return [
            f"the busiest rank has about {ratio:.2f} of the mean work of a step, and the others wait: {remedy} helps"
        ]
    if config.parallel.sizes.pipeline == 1 or data.balance != "work":
        return []
    ratio = uneven_packs(config, readers)
    stages_wait = (
        f"the heaviest micro-batch of a step has about {ratio:.2f} of the mean work, and the stages of the pipeline "
        "wait for it: data.balance=step makes them equal"
    )
    return [stages_wait] if ratio > HIGH else []


def _inherited_guidance(config: RunConfig) -> list[str]:
    """Warn if videos are sampled with the recipe's defaults, but the network is of another size."""
    model, sampling = config.model, config.validation.sampling
    recipe = RECIPES[config.recipe]() if config.recipe in RECIPES else None
    if recipe is None or sampling != recipe.validation.sampling or not model.denoises:
        return []
    if all(getattr(model, name) == getattr(recipe.model, name) for name in SIZES):
        return []
    base = config.checkpoint.init_from
    of_base = f" (that of {base}: {Bundle.open(base).defaults.guidance:g})" if base and is_bundle(base) else ""
    return [
        f"videos will be made with guidance={sampling.guidance:g}{of_base} and {sampling.num_steps} steps, which "
        f"recipe {config.recipe} has for a network of another size: set validation.sampling.guidance, 3 to begin with, "
        "or let `megadit tune-sampler` find it"
    ]


def reconstruction_psnr(info: DatasetInfo) -> float | None:
    """PSNR in decibels that the tokenizer recorded for the data it was fitted to; None if unknown."""
    if not isinstance(info.root, Path):
        return None  # nothing is downloaded for a warning
    value = _noted(info.root / "tokenizer" / "config.json").get("reconstruction_psnr")
    return float(value) if isinstance(value, int | float) else None


def _more_channels(info: DatasetInfo) -> str:
    """Describe the gain of more channels, as `megadit prepare` recorded it."""
    noted = _noted(Notes(root=info.root).channels).items()
    known = {int(name): psnr for name, psnr in noted if name.isdecimal() and isinstance(psnr, int | float)}
    return more_channels_in_words(known, than=info.latent_channels)


def _noted(path: Path) -> dict[str, Any]:
    """Contents of a JSON file; empty if it cannot be read."""
    try:
        values = read_json(path)
    except UserError:
        return {}
    return values if isinstance(values, dict) else {}
