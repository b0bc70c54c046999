"""Proposal of a run for a folder of videos or images and a machine: sizes, network, batch and steps, with reasons.

These are rules of thumb; the YAML that `megadit new` writes can be edited.
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megadit.models.configs.named import NAMED_CONFIGS
from megadit.models.shared.errors import UserError
from megadit.models.shared.progress import duration
from megadit.models.shared.words import split_words
from megadit.train.config.load import resolve_config
from megadit.train.config.schema import RunConfig
from megadit.train.data.ingest.clips.probe import MOST_SECONDS, FolderSummary, Seen
from megadit.train.plan.hardware import Gpu
from megadit.train.plan.memory import needed_memory, with_recompute
from megadit.train.plan.throughput import step_seconds

SPATIAL, TEMPORAL = 8, 4
"""Spatial and temporal compression of the built-in tokenizer."""
LENGTHS = (49, 33, 25, 17, 13, 9, 5)
"""Candidate lengths of clips in frames: 1 plus a multiple of `TEMPORAL`."""
SHAPES = (1.0, 3 / 4, 9 / 16, 4 / 3, 16 / 9)
"""Candidate aspect ratios (height / width) of buckets."""
COMMON = 0.15
"""Minimum fraction of sources for a shape to get its own bucket."""
FILLING = 0.9
"""Fraction of the sources of a shape that must fill its bucket without upscaling."""
USUAL_RATES = (30.0, 60.0)
"""Higher frame rates to try, slowest first, if videos are too short at the scale's rate."""
LONG_ENOUGH = 0.75
"""Fraction of the videos that must be as long as a clip."""
FEW = 20
"""Number of sources below which none are held out for validation."""
MEMORY_SHARE = 0.8
LEAST_STEPS = 100
MOST_PASSES = 4000
"""Maximum number of epochs; beyond, the network has memorized the sources."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Size of a network, and the number of sources from which it is used."""

    sources: int
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    channels: int
    """Latent channels of the tokenizer; a token holds at most half as many numbers as the network is wide."""


def _named(name: str, *, sources: int, channels: int) -> Network:
    config, copied = NAMED_CONFIGS[name], ("num_layers", "hidden_size", "num_attention_heads")
    return Network(sources=sources, channels=channels, **{field: getattr(config, field) for field in copied})


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Sizes of clips, batches and networks that suit one kind of machine."""

    recipe: str
    side: int
    """Side in pixels of a square with the maximum area of a frame."""
    num_frames: int
    fps: float
    patch: int
    """Latent pixels along a side of a token."""
    pack: int
    """Approximate number of tokens of a pack."""
    samples: int
    """Minimum number of samples per step."""
    minutes: float
    networks: tuple[Network, ...]
    """Candidate networks, smallest first."""
    settings: tuple[tuple[str, Any, str], ...]
    """Other keys, values and reasons."""


CPU = Scale(
    recipe="digits",
    side=64,
    num_frames=17,
    fps=8.0,
    patch=1,
    pack=1920,
    samples=8,
    minutes=20,
    networks=(
        Network(sources=0, num_layers=6, hidden_size=128, num_attention_heads=4, channels=48),
        Network(sources=200, num_layers=6, hidden_size=192, num_attention_heads=6, channels=64),
    ),
    settings=(
        ("validation.sampling.sampler", "euler", "with eta=1: new noise in every step"),
        ("validation.sampling.eta", 1.0, ""),
        ("validation.sampling.num_steps", 16, ""),
        ("validation.sampling.sigmas", [], "those of the schedule, not the recipe's four"),
    ),
)
GPU = Scale(
    recipe="dit_pretrain",
    side=256,
    num_frames=33,
    fps=16.0,
    patch=2,
    pack=16_384,
    samples=32,
    minutes=240,
    networks=(
        _named("dit_s", sources=0, channels=48),
        _named("dit_b", sources=2000, channels=64),
        _named("dit_l", sources=20_000, channels=64),
        _named("dit_xl", sources=200_000, channels=64),
    ),
    settings=(
        ("data.num_workers", 4, "reader processes of each GPU"),
        ("optimizer.lr", 2e-4, "the recipe's is for larger batches"),
        ("optimizer.min_lr", 2e-5, ""),
        ("parallel.recompute_granularity", "auto", "blocks are computed again where memory demands it"),
        ("validation.num_batches", 8, ""),
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Hardware for which the run is proposed."""

    gpu: Gpu
    ranks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """A proposed run and the preparation of its data."""

    kind: str
    sizes: tuple[tuple[int, int], ...]
    num_frames: int
    fps: float
    channels: int
    has_validation: bool
    rows: tuple[tuple[str, Any, str], ...]
    """Key of the configuration, value, reason."""
    recipe: str
    seconds: float
    """Estimated seconds of a step."""
    config: RunConfig

    @property
    def overrides(self) -> list[str]:
        return _overrides(self.rows)


def propose(seen: FolderSummary, machine: Machine, *, data: str, out: str, minutes: float | None = None) -> Proposal:
    """Propose a run in the folder `out` on the data set `data`, which is yet to be prepared.

    Args:
        minutes: maximum time of training; None: the default of the scale.

    Raises:
        UserError: for videos too short to train on, or a machine too small for the smallest run.
    """
    scale = CPU if machine.gpu.is_cpu else GPU
    sizes = choose_sizes(seen.seen, scale)
    num_frames, fps = (1, 0.0) if seen.kind == "image" else choose_length(seen.seen, scale)
    latent_frames = 1 + (num_frames - 1) // TEMPORAL
    latents = [[latent_frames, height // SPATIAL, width // SPATIAL] for height, width in sizes]
    for network in [one for one in reversed(scale.networks) if one.sources <= seen.count] + [scale.networks[0]]:
        rows = _rows(seen, machine, scale, network, latents)
        rows += [("data.path", data, ""), ("train.output_dir", out, "")]
        config = resolve_config(scale.recipe, overrides=_overrides(rows))
        if _fits(config, machine):
            break
    else:
        raise UserError(f"{machine.gpu.name} has too little memory for the smallest run on this folder")
    rows, config = _replayed(rows, config, machine, scale, latents)
    seconds = step_seconds(config, machine.ranks, machine.gpu)
    samples = config.data.global_batch_size * config.data.seq_length // _most_tokens(latents, scale)
    most = MOST_PASSES * seen.count / samples
    steps = _round(max(LEAST_STEPS, min(most, 60 * (minutes or scale.minutes) / seconds)))
    rows += [
        ("train.train_iters", steps, f"about {duration(steps * seconds)} at {seconds:.2g} s a step"),
        ("train.log_interval", max(1, steps // 100), ""),
        ("optimizer.lr_warmup_iters", max(1, steps // 20), ""),
        ("validation.interval", max(1, steps // 4), "steps between losses, and samples, in train/samples"),
        ("checkpoint.save_interval", max(1, steps // 4), ""),
    ]
    return Proposal(
        kind=seen.kind,
        sizes=sizes,
        num_frames=num_frames,
        fps=fps,
        channels=network.channels,
        has_validation=seen.count >= FEW,
        rows=tuple(rows),
        recipe=scale.recipe,
        seconds=seconds,
        config=resolve_config(scale.recipe, overrides=_overrides(rows)),
    )


def choose_sizes(seen: Sequence[Seen], scale: Scale) -> tuple[tuple[int, int], ...]:
    """(height, width) of a bucket for each common shape, as large as the scale allows and most sources fill. Raises
    UserError for sources smaller than one token."""
    shapes = Counter(_shape(one, SHAPES) for one in seen)
    common = [shape for shape, count in shapes.items() if count >= COMMON * len(seen)] or [shapes.most_common(1)[0][0]]
    sizes = set()
    for shape in common:
        own = [one for one in seen if _shape(one, common) == shape]
        candidates = (_size(side, shape, scale) for side in range(scale.side, 0, -SPATIAL * scale.patch))
        filled = (
            size
            for size in candidates
            if sum(one.height >= size[0] and one.width >= size[1] for one in own) >= FILLING * len(own)
        )
        if (size := next(filled, None)) is not None:
            sizes.add(size)
    if not sizes:
        raise UserError(
            f"most are smaller than {SPATIAL * scale.patch} x {SPATIAL * scale.patch} pixels, what one token shows; "
            "enlarge them first"
        )
    return tuple(sorted(sizes))


def _shape(one: Seen, shapes: Sequence[float]) -> float:
    return min(shapes, key=lambda shape: abs(math.log(one.height / one.width / shape)))


def _size(side: int, shape: float, scale: Scale) -> tuple[int, int]:
    """About side x side pixels of this shape, in whole tokens."""
    multiple = SPATIAL * scale.patch
    height, width = side * math.sqrt(shape), side / math.sqrt(shape)
    return tuple(max(1, round(length / multiple)) * multiple for length in (height, width))


def choose_length(seen: Sequence[Seen], scale: Scale) -> tuple[int, float]:
    """(frames, frames per second) of clips: the longest that most videos have at the scale's rate, else at a higher one
    up to their own. Raises UserError for videos of fewer frames than the shortest clip."""
    own_rate = statistics.median(one.fps for one in seen)
    for fps in sorted({min(rate, own_rate) for rate in (scale.fps, *USUAL_RATES, own_rate)}):
        available = [int(one.frames * min(fps, one.fps) / one.fps) for one in seen]
        for length in (one for one in LENGTHS if one <= scale.num_frames):
            if length >= 9 or fps == own_rate:
                if sum(count >= length for count in available) >= LONG_ENOUGH * len(seen):
                    return length, _least_wasteful(seen, length, fps)
    raise UserError(
        f"most videos have fewer than {LENGTHS[-1]} frames, which one clip needs; longer ones, or a folder of images "
        "alone, can be trained on"
    )


def _least_wasteful(seen: Sequence[Seen], length: int, fps: float) -> float:
    """The rate at which a clip is as long as most videos, where these are shorter than two: fewer frames a second than
    `fps`, and none past the clip's end."""
    durations = sorted((one.frames / one.fps for one in seen), reverse=True)
    most = durations[math.ceil(LONG_ENOUGH * len(seen)) - 1]
    is_whole = most < MOST_SECONDS  # else no more of it was decoded
    fitted = math.ceil(1000 * length / most - 1e-6) / 1000
    return fitted if is_whole and length <= fps * most < 2 * length and fitted < fps else round(fps, 3)


def _most_tokens(latents: list[list[int]], scale: Scale) -> int:
    """Number of tokens of the largest clip."""
    return max(math.prod(shape) for shape in latents) // scale.patch**2


def _rows(
    seen: FolderSummary, machine: Machine, scale: Scale, network: Network, latents: list[list[int]]
) -> list[tuple[str, Any, str]]:
    """Keys, values and reasons; `latents` are the [T, H, W] of the clips."""
    tokens = _most_tokens(latents, scale)
    samples = max(1, scale.pack // tokens)
    words = max([1, *(len(split_words(caption)) for caption in seen.captions)])
    packs = math.ceil(scale.samples / samples / machine.ranks) * machine.ranks
    is_few, is_captioned = seen.count < FEW, bool(seen.captions)
    numbers = network.channels * scale.patch**2
    return [
        ("model.num_layers", network.num_layers, f"for {seen.count:,} {seen.kind}s; more are worth more layers"),
        ("model.hidden_size", network.hidden_size, f"at least twice the {numbers} numbers of a token"),
        ("model.num_attention_heads", network.num_attention_heads, "must divide hidden_size"),
        ("model.in_channels", network.channels, "of the tokenizer: --channels of `megadit prepare`"),
        ("model.patch_spatial", scale.patch, "latent pixels along a side of a token"),
        ("model.crossattn_emb_size", 64, "of the built-in text encoder"),
        ("model.sigma_data", 1.0, "of the fitted tokenizer"),
        ("data.seq_length", samples * tokens, f"video tokens of a pack: {samples} of the largest clips, {tokens} each"),
        ("data.text_seq_length", max(64, samples * (words + 1)), f"words of a pack: captions have up to {words}"),
        ("data.global_batch_size", packs, "packs of a step, over all ranks"),
        ("data.text_dropout", 0.1 if is_captioned else 0.0, "share trained without text; guidance needs some"),
        ("data.use_train_split_for_val", is_few, "too few to hold some out" if is_few else "some are held out"),
        ("data.mock_latent_shapes", latents, "what --dry-run counts with"),
        ("validation.sampling.guidance", 3.0 if is_captioned else 1.0, "" if is_captioned else "without captions"),
        *scale.settings,
    ]


def _fits(config: RunConfig, machine: Machine) -> bool:
    available = MEMORY_SHARE * machine.gpu.memory
    return needed_memory(with_recompute(config, machine.ranks, available), machine.ranks) <= available


def _replayed(
    rows: list[tuple[str, Any, str]], config: RunConfig, machine: Machine, scale: Scale, latents: list[list[int]]
) -> tuple[list[tuple[str, Any, str]], RunConfig]:
    """Rows and their configuration with blocks that are replayed, where a GPU would wait for its host and has memory
    for them; else as they are."""
    if machine.gpu.is_cpu:
        return rows, config
    segments = config.data.seq_length // (min(map(math.prod, latents)) // scale.patch**2) + 1
    changed = (
        ("parallel.recompute_granularity", "none", "there is memory for all, which replayed blocks need"),
        ("parallel.cuda_graph_max_segments", segments, "blocks are replayed: Python launches them too slowly"),
    )
    keys = {key for key, _, _ in changed}
    replayed = [*(row for row in rows if row[0] not in keys), *changed]
    found = resolve_config(scale.recipe, overrides=_overrides(replayed))
    faster = step_seconds(found, machine.ranks, machine.gpu) < step_seconds(config, machine.ranks, machine.gpu)
    fits = needed_memory(found, machine.ranks) <= MEMORY_SHARE * machine.gpu.memory
    return (replayed, found) if faster and fits else (rows, config)


def _round(value: float) -> int:
    """Round down to two digits."""
    digits = 10 ** max(0, math.floor(math.log10(value)) - 1)
    return int(value // digits * digits)


def _overrides(rows: Sequence[tuple[str, Any, str]]) -> list[str]:
    return [f"{key}={yaml_of(value)}" for key, value, _ in rows]


def yaml_of(value: Any) -> str:
    """A value as it stands in YAML and in an override."""
    return json.dumps(value, ensure_ascii=False)
