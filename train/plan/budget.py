"""Time budget of one optimizer step, by operation: flops, bytes, expected seconds, and minimum seconds.

`estimate` has a few constants, fitted to published runs, and ranks layouts by them. Here every operation has a rate of
its own, so that each can be compared with a measurement (`make gpu-check`). Rates are those of one H100 in
`train/BENCHMARKS.md`, or else published for single kernels.

Letters: D width, A width of all heads, M hidden values of a token in the MLP (of both factors of SwiGLU).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megadit.models.ops.attention import has_few_long_groups
from megadit.train.config.schema import RunConfig
from megadit.train.plan.estimate import estimate_step, seconds_to_launch
from megadit.train.plan.hardware import Gpu
from megadit.train.plan.layout import Layout
from megadit.train.plan.memory import fp8_weights, spreads_optimizer
from megadit.train.plan.work import count_trained, num_self_attentions, num_sublayers, typical_pack, work_of

PRODUCTS = 0.71
"""Fraction of the data sheet's rate reached by products of some thousand rows and columns."""
EIGHT_BITS = 1.15
"""Speedup of FP8 products over bf16, including casts of activations (their peak rate is twice as high). With the casts
of weights, which are counted apart, it is 1.1 for 8,192 tokens at a time."""
ATTENTION = {"dense": 0.484, "varlen": 0.290}
"""Fraction of the data sheet's rate that attention to long samples approaches (`attention_efficiency`), forward and
backward: cuDNN's kernel for dense batches, FlashAttention-2's for packs."""
TEXT_ATTENTION = 0.28
"""The same for cross-attention to a few hundred text tokens."""
STREAM = 0.8
"""Fraction of the memory bandwidth in long streaming passes: optimizer, gradients."""
CHAIN = 0.55
"""Fraction of the memory bandwidth in fused chains, which look up rows and reduce."""
SMALL_KERNELS = 90
"""Kernels of a micro-batch around its layers, noise and noise levels included."""
LAUNCH = 5e-6
"""Seconds from one small kernel to the next."""


_WAITS = ("tensor", "context", "experts", "offloading", "pipeline", "data", "waiting")
"""Categories of `StepTime` in which the rank does not compute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Cost of one operation in a rank's step."""

    name: str
    flops: float = 0.0
    bytes: float = 0.0
    """Bytes read from and written to device memory."""
    seconds: float
    least: float
    """Minimum seconds, at the rates of the data sheet."""


def budget(config: RunConfig, layout: Layout, gpu: Gpu) -> list[Cost]:
    """Costs of one step on one rank, in order; the last is the wait for the host."""
    operations = (_products, _casts, _chains, _per_parameter)
    parts = [part for costs in operations for part in costs(config, layout, gpu)]
    parts.append(_constant("noise and launches", SMALL_KERNELS * LAUNCH * layout.num_micro_batches))
    time = estimate_step(config, layout, gpu)
    sent = {name: getattr(time, name) for name in _WAITS}
    parts += [_constant(f"sent and waited for: {name}", seconds) for name, seconds in sent.items() if seconds > 0]
    computed = sum(part.seconds for part in parts)
    launched = seconds_to_launch(config, layout) * layout.num_micro_batches
    parts.append(_constant("waiting for the host", max(0.0, launched - computed)))
    return parts


def _constant(name: str, seconds: float) -> Cost:
    return Cost(name=name, seconds=seconds, least=0.0)


def _products(config: RunConfig, layout: Layout, gpu: Gpu) -> Iterator[Cost]:
    """Linears and attention."""
    work, pack, m = work_of(config, layout), typical_pack(config), layout.num_micro_batches
    is_half = config.train.is_half
    rate = gpu.bf16_flops * (1 if is_half else 0.5)

    def part(name: str, flops: float, share: float) -> Cost:
        return Cost(name=name, flops=flops, seconds=flops / (rate * share), least=flops / rate)

    gain = EIGHT_BITS if config.train.fp8 != "none" else 1.0
    linears = work.linear_flops * m * (1 + work.recompute * work.linear_share)
    yield part("linears", linears, PRODUCTS * gain)
    video = sum(s.num_tokens**2 for s in pack.segments if not s.is_padding) * num_self_attentions(config.model)
    text = sum(s.num_tokens * s.text_places for s in pack.segments if not s.is_padding)
    text *= config.model.structure.cross_attention
    # ranks that only exchange heads attend to whole samples; a ring uses the kernel for packs
    kernel = "dense" if has_few_long_groups(pack) and layout.ring == 1 else "varlen"
    attention = work.attention_flops * m * (1 + work.recompute_attention / 3)
    share = ATTENTION[kernel] * work.attention_efficiency
    yield part(f"self-attention ({kernel})", attention * video / (video + text), share)
    if text:
        yield part("cross-attention", attention * text / (video + text), TEXT_ATTENTION)


def _casts(config: RunConfig, layout: Layout, gpu: Gpu) -> Iterator[Cost]:
    """Casts of weights to FP8: 2 bytes are read for each scale; 2 read and 1 written for codes, or for those of the
    transpose, 2 read and 2 written for both at once."""
    again = layout.recompute_share if layout.recompute == "full" else 0.0
    of_codes = 4 if config.train.fp8_weight_cache else (3 * (1 + again) + 3) * layout.num_micro_batches
    if weights := fp8_weights(config, layout):
        yield _stream("casts of weights", (2 + of_codes) * weights, gpu, STREAM)


def _chains(config: RunConfig, layout: Layout, gpu: Gpu) -> Iterator[Cost]:
    """Elementwise work between products: memory accesses per value in forward, recomputation and backward."""
    model, t = config.model, layout.tensor
    sublayers, own = num_sublayers(model), num_self_attentions(model)
    D = model.hidden_size / (t if layout.sequence_parallel else 1)
    A, M = model.attention_size / t, model.mlp_rows / t
    tokens = layout.micro_batch_size * config.data.seq_length / layout.context
    numbers = tokens * model.num_layers / layout.pipeline * layout.num_micro_batches
    again = 1 + (layout.recompute_share if layout.recompute == "full" else 0.0)
    for name, forward, backward in (
        # read and written; computed again for the backward of the linear behind; gradients, and their sums over rows
        ("norms and their modulation", 2 * sublayers * D, (2 + 3 + 4) * sublayers * D),
        ("gates", 3 * sublayers * D, 5 * sublayers * D),
        ("norm and rotation of queries and keys", (4 * own + 2) * A, (6 * own + 3) * A),
        ("activation of the MLP", 2 * M, 5 * M),
    ):
        size = (2 if config.train.is_half else 4) * numbers * (again * forward + backward)
        yield _stream(name, size, gpu, CHAIN)


def _per_parameter(config: RunConfig, layout: Layout, gpu: Gpu) -> Iterator[Cost]:
    """Passes over all gradients, weights and optimizer state."""
    count = count_trained(config)
    held, owned = count.of_rank(layout) + count.experts_of_rank(layout), count.share(layout)
    updated = owned if spreads_optimizer(config, layout) else held
    is_half = config.train.is_half
    size = 2 if is_half else 4
    is_muon, bf16_moments = config.optimizer.optimizer == "muon", config.optimizer.moments == "bf16"
    # `engine/device_update.py`: AdamW reads gradients once, and writes the weights too, which under FSDP are float32
    folds = bf16_moments and not is_muon
    writes = folds and is_half and layout.data_parallel != "fsdp"
    fuses = config.parallel.gradient_accumulation_fusion
    # `models/megatron/linears/gradient_sums.py`: a step's first product overwrites a sum, which nothing has zeroed
    overwrites = fuses and config.parallel.transformer_impl == "local"
    added = (8 if fuses else 8 + size) * layout.num_micro_batches
    moments = 4 if is_muon else 2 * 2 * (2 if bf16_moments else 4)
    passes = {
        "zeroing of gradients": 0 if overwrites else 4 * held,
        "adding of gradients": (added - 4 if overwrites else added) * held,
        "division of gradients": 0 if folds else 8 * held,
        "norm of the gradient": 4 * updated,
        "clipping": 0 if folds else 8 * updated,
        "update": (4 + 8 + moments + (size if writes else 0)) * updated,
        "copies of weights": 6 * updated if is_half and not writes else 0,
        "EMA weights": 12 * len(config.ema.sigma_rels) * owned,
    }
    yield from (_stream(name, moved, gpu, STREAM) for name, moved in passes.items() if moved)


def _stream(name: str, moved: float, gpu: Gpu, share: float) -> Cost:
    rate = gpu.memory_bandwidth
    return Cost(name=name, bytes=moved, seconds=moved / (rate * share), least=moved / rate)
