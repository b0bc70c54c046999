"""Estimated time of one optimizer step: a roofline of computation plus exposed communication.

    micro-batch = products + attention + elementwise + waiting for the host + tensor-parallel collectives
                + exposed context exchange + exchange of tokens with experts + exposed offloading
    step        = micro-batch x (micro-batches + (p - 1) / v)  +  exposed gradients and weights  +  update

Two constants are fitted to published throughputs: the fractions of the data sheet's rate that matrix products and
attention reach. The others are set by hand here.
"""

from dataclasses import dataclass

from megadit.train.config.schema import RunConfig
from megadit.train.plan.hardware import Gpu
from megadit.train.plan.imbalance import expected_imbalance
from megadit.train.plan.layout import Layout
from megadit.train.plan.memory import offloaded_bytes, spreads_optimizer
from megadit.train.plan.work import Work, count_trained, work_of

HALF_RATE_WIDTH = 1024
"""Width D / t at which matrix products reach half of their best rate."""
LINK_EFFICIENCY = 0.7
"""Fraction of a link's bandwidth reached by large collectives."""
MEMORY_EFFICIENCY = 0.8
RING_ATTENTION = 0.6
"""Rate of attention around a ring, by FlashAttention-2, relative to that of whole samples, by cuDNN on a Hopper GPU."""
HOST_SECONDS_PER_LAYER = 1e-2
"""Minimum time of a layer's forward and backward, which Python launches. The hosts of the H100 and the H200 in
`train/BENCHMARKS.md` took .0095 and .0117."""
LAUNCH_SECONDS_PER_LAYER = 1e-3
"""The same for blocks that are replayed: about 200 kernels of 5 us each."""
COLLECTIVE_SECONDS = 20e-6
"""Minimum time of a collective."""
UPDATE_BYTES = 28
"""Bytes read and written per parameter by AdamW in float32: gradient, master copy, two moments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Fractions of the data sheet's bf16 rate."""

    matmul: float
    """Fraction reached by products much wider than `HALF_RATE_WIDTH`."""
    attention: float


H100_CALIBRATION = Calibration(matmul=0.818, attention=0.409)
"""Fitted to the two published throughputs of the 7B model; see `tests/train/plan/test_calibration.py`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one step on the busiest rank, by category."""

    products: float
    attention: float
    elementwise: float
    launching: float
    """Waiting for the host, which launches kernels."""
    tensor: float
    """Collectives of tensor and sequence parallelism, not overlapped."""
    context: float
    experts: float
    """Exchange of tokens with experts, not overlapped."""
    offloading: float
    """Copies of activations to host memory and back that forward and backward do not overlap."""
    pipeline: float
    """Pipeline bubble, and sending of activations."""
    data: float
    """Collectives of gradients and weights that backward and forward do not overlap."""
    update: float
    waiting: float
    """Waiting of the other ranks for the one whose packs take most work."""

    @property
    def total(self) -> float:
        return sum(getattr(self, name) for name in self.__slots__)


def estimate_step(config: RunConfig, layout: Layout, gpu: Gpu, calibration: Calibration = H100_CALIBRATION) -> StepTime:
    """Time of one step of a run on `layout.gpus` of these GPUs."""
    work = work_of(config, layout)
    products, attention, elementwise = _compute_seconds(config, layout, work, gpu, calibration)
    layers = config.model.num_layers / layout.pipeline
    launching = max(0.0, seconds_to_launch(config, layout) - products - attention - elementwise)
    compute = products + attention + elementwise + launching
    tensor = _collectives(work.tensor_bytes, _bandwidth(gpu, layout.tensor), 15 * layers if layout.tensor > 1 else 0)
    context = _context_seconds(work, layout, gpu, layers, attention)
    passing = _collectives(work.pipeline_bytes, _bandwidth(gpu, layout.gpus), 2 if layout.pipeline > 1 else 0)
    experts = _expert_seconds(work, layout, gpu, layers)
    offloading = _exposed_offloading(config, layout, gpu, compute)
    micro, m = compute + tensor + context + experts + offloading + passing, layout.num_micro_batches
    return StepTime(
        products=products * m,
        attention=attention * m,
        elementwise=elementwise * m,
        launching=launching * m,
        tensor=tensor * m,
        context=context * m,
        experts=experts * m,
        offloading=offloading * m,
        pipeline=micro * (layout.pipeline - 1) / layout.virtual_pipeline + passing * m,
        data=_exposed_data(work, layout, gpu, micro),
        update=_update_seconds(config, layout, gpu),
        waiting=(expected_imbalance(config, layout.data) - 1) * (products + attention) * m,
    )


def tokens_per_second(config: RunConfig, layout: Layout, seconds: float) -> float:
    """Video tokens per second and GPU."""
    return config.data.global_batch_size * config.data.seq_length / layout.gpus / seconds


def _compute_seconds(
    config: RunConfig, layout: Layout, work: Work, gpu: Gpu, calibration: Calibration
) -> tuple[float, float, float]:
    """Seconds of one micro-batch in matrix products, attention and elementwise work."""
    again = 1 + work.recompute / 3  # forward and backward cost three forwards
    products_again = 1 + work.recompute * work.linear_share
    width = config.model.hidden_size / layout.tensor
    rate = gpu.bf16_flops * (1 if config.train.is_half else 0.5)
    products = products_again * work.linear_flops / (rate * calibration.matmul * width / (width + HALF_RATE_WIDTH))
    attention_rate = rate * calibration.attention * (RING_ATTENTION if layout.ring > 1 else 1)
    if not gpu.is_cpu:
        attention_rate *= work.attention_efficiency
    attention = (1 + work.recompute_attention / 3) * work.attention_flops / attention_rate
    elementwise = again * work.elementwise_bytes / (gpu.memory_bandwidth * MEMORY_EFFICIENCY)
    return products, attention, elementwise


def seconds_to_launch(config: RunConfig, layout: Layout) -> float:
    """Seconds to launch the layers of a rank, forward and backward, for one micro-batch."""
    is_replayed = config.parallel.cuda_graph_max_segments is not None
    of_layer = LAUNCH_SECONDS_PER_LAYER if is_replayed else HOST_SECONDS_PER_LAYER
    return of_layer * config.model.num_layers / layout.pipeline


def _bandwidth(gpu: Gpu, ranks: int) -> float:
    """Bandwidth between neighbours of a group that spans `ranks` consecutive ranks."""
    return gpu.link_bandwidth if ranks <= gpu.per_node else gpu.network_bandwidth


def _collectives(num_bytes: float, bandwidth: float, count: float) -> float:
    return num_bytes / (bandwidth * LINK_EFFICIENCY) + count * COLLECTIVE_SECONDS


def _context_seconds(work: Work, layout: Layout, gpu: Gpu, layers: float, attention: float) -> float:
    """Exposed seconds of context parallelism: the exchange of heads, and the ring beyond the time of attention."""
    if layout.context == 1:
        return 0.0
    bandwidth = _bandwidth(gpu, layout.tensor * layout.context)
    exchange = _collectives(work.exchange_bytes, bandwidth, 8 * layers if layout.head_exchange > 1 else 0)
    ring = _collectives(work.ring_bytes, bandwidth, 3 * (layout.ring - 1) * layers)
    return exchange + max(0.0, ring - attention)


def _expert_seconds(work: Work, layout: Layout, gpu: Gpu, layers: float) -> float:
    shared = layout.expert * layout.expert_tensor
    return _collectives(work.expert_bytes, _bandwidth(gpu, shared), 4 * layers) if shared > 1 else 0.0


def _exposed_offloading(config: RunConfig, layout: Layout, gpu: Gpu, compute: float) -> float:
    """Seconds by which copies of a micro-batch's activations exceed its forward, and its backward."""
    copied = offloaded_bytes(config, layout) / (gpu.host_bandwidth * LINK_EFFICIENCY)
    return max(0.0, copied - compute / 3) + max(0.0, copied - compute * 2 / 3)


def _exposed_data(work: Work, layout: Layout, gpu: Gpu, micro: float) -> float:
    """Exposed seconds of data parallelism: collectives of gradients and weights beyond the last backward and the first
    forward."""
    members = max(1, gpu.per_node // layout.tensor)  # of one group in a node: a ring uses the ports of all of them
    bandwidth = gpu.link_bandwidth
    if layout.gpus > gpu.per_node:
        bandwidth = min(bandwidth, members * gpu.network_bandwidth)
    reduce, gather = (b / (bandwidth * LINK_EFFICIENCY) for b in (work.data_reduce_bytes, work.data_gather_bytes))
    if layout.data_parallel == "fsdp":
        return max(0.0, reduce + gather - micro * layout.num_micro_batches)
    if layout.data_parallel == "ddp":
        return max(0.0, reduce + gather - micro * 2 / 3)
    return max(0.0, reduce - micro * 2 / 3) + max(0.0, gather - micro / 3)


def _update_seconds(config: RunConfig, layout: Layout, gpu: Gpu) -> float:
    count = count_trained(config)
    owned = count.share(layout)
    updated = owned if spreads_optimizer(config, layout) else count.of_rank(layout) + count.experts_of_rank(layout)
    return (UPDATE_BYTES * updated + 12 * len(config.ema.sigma_rels) * owned) / gpu.memory_bandwidth
