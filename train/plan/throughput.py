"""Estimates of a step's time and number of samples, before the first one has been measured."""

from dataclasses import replace
from math import prod
from statistics import mean

from megadit.models.shared.errors import UserError
from megadit.models.shared.progress import duration
from megadit.models.shared.resources import threads_of_a_rank
from megadit.train.config.schema import RunConfig
from megadit.train.dataset.dataset_info import DatasetInfo
from megadit.train.plan.hardware import Gpu
from megadit.train.plan.imbalance import expected_imbalance
from megadit.train.plan.layout import Layout
from megadit.train.plan.memory import with_recompute
from megadit.train.plan.search import assess
from megadit.train.plan.work import count_trained, work_of

ELEMENTWISE_RATE = 1.5e9
"""Bytes per second of one CPU core in the small operations of a block (norms, gates, rotations, activations), including
the overhead of calls. Fitted to `digits` (.6 s of processor time a step), the same 192 wide (1.15 s) and `shapes` (.57
s), on one core of an Intel Xeon, family 6, model 167, and to the demo on two of an AMD EPYC, with `small_speed` 1."""
MUON_FLOPS = 23
"""Flops of `muon.orthogonalize` per element of a matrix and unit of its shorter side: 5 (4 + 2/3)."""


def step_seconds(config: RunConfig, ranks: int, gpu: Gpu) -> float:
    """Estimated seconds of a step on `ranks` ranks with a `gpu` each."""
    layout = Layout.of(with_recompute(config, ranks, gpu.memory), ranks)
    if not gpu.is_cpu:
        return assess(config, layout, gpu).time.total
    work = work_of(config, layout)
    elementwise = work.elementwise_bytes / (ELEMENTWISE_RATE * gpu.small_speed * threads_of_a_rank(ranks))
    products = expected_imbalance(config, layout.data) * work.flops / gpu.bf16_flops
    of_packs = layout.num_micro_batches * (products + elementwise)
    return of_packs + _muon_flops(config) / gpu.bf16_flops


def _muon_flops(config: RunConfig) -> float:
    """Flops of orthogonalising the matrices of the blocks (their shorter side is mostly the width)."""
    if config.optimizer.optimizer != "muon":
        return 0.0
    return MUON_FLOPS * config.model.hidden_size * count_trained(config).split


def time_in_words(config: RunConfig, seconds: float) -> str:
    """Describe the time of all steps of a run, each of which takes `seconds`."""
    steps = config.train.train_iters
    return f"about {duration(steps * seconds)} for {steps:,} steps of {seconds:.2g} s"


def samples_of_a_step(config: RunConfig) -> int:
    """Approximate number of samples of `data.mock_latent_shapes` in a step."""
    tokens = mean(prod(config.model.sample_grid(*shape)) for shape in config.data.mock_latent_shapes)
    return config.data.global_batch_size * max(1, int(config.data.seq_length / tokens))


def with_shapes_of(info: DatasetInfo | None, config: RunConfig) -> RunConfig:
    """`config` with `data.mock_latent_shapes` replaced by the shapes of its data set, if known."""
    shapes = () if info is None else info.latent_shapes
    fitting = tuple(shape for shape in shapes if _fits(shape, config))
    return replace(config, data=replace(config.data, mock_latent_shapes=fitting)) if fitting else config


def _fits(shape: tuple[int, int, int], config: RunConfig) -> bool:
    try:
        return prod(config.model.sample_grid(*shape)) <= config.data.seq_length
    except UserError:
        return False
