"""AdamW (arXiv 1711.05101) with bfloat16 moments: half the state and memory traffic.

Most changes of a moment are below bfloat16's resolution, so round-to-nearest would lose them: moments are rounded
stochastically instead (arXiv 2010.06192). The random numbers are a hash of (step, position in the tensor), so steps are
reproducible.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megadit.models.host_to_device import sent_together
from megadit.models.ops.fusion import fused

MOMENTS = ("exp_avg", "exp_avg_sq")
MOST_RECORDINGS = 3
"""Recordings of an update whose tensors move, each of which takes longer than many steps."""
_LOW_BITS = 0xFFFF  # bits of float32 that bfloat16 lacks


class HalfMomentAdamW(torch.optim.Optimizer):
    """AdamW for float32 parameters (master copies) and float32 gradients. `step` is counted once per group.

    Args:
        params: parameter groups as Megatron's optimizers expect them.
    """

    def __init__(
        self, params: Iterable[dict], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.gradient_factor: Tensor | None = None
        """Factor of all gradients, applied as they are read; a scalar on their device. None: 1."""
        self.rounded: dict[Tensor, Tensor] = {}
        """Parameter -> tensor of the same shape to which its new values are written too, in that tensor's precision."""
        self._updates = [Recorded() for _ in self.param_groups]

    @torch.no_grad()
    def step(self, closure=None) -> None:
        assert closure is None
        for group, recorded in zip(self.param_groups, self._updates, strict=True):
            group["step"] = group.get("step", 0) + 1
            updated = {place: self._tensors(p) for place, p in enumerate(group["params"]) if p.grad is not None}
            updated = {place: tensors for place, tensors in updated.items() if len(tensors[0])}
            if not updated:
                continue

            def update(factors, seeds, updated=updated, numbers=(*group["betas"], group["eps"])):
                for place, tensors in updated.items():
                    fused(_adamw_, *tensors, factors, seeds[place], *numbers)

            changed = [tensor for tensors in updated.values() for tensor in tensors if tensor is not None]
            recorded(update, changed, self._factors(group, changed[0].device))

    def _factors(self, group: dict, device: torch.device) -> tuple[Tensor, Tensor]:
        """Decay, rate, correction and gradient factor, and the seed of each parameter.

        They change with every step, so they are tensors: numbers would be compiled in. They are copied to the device
        once per group, because a copy per parameter would take longer than its update.
        """
        step, (beta1, beta2) = group["step"], group["betas"]
        numbers = [1 - group["lr"] * group["weight_decay"], group["lr"] / (1 - beta1**step), 1 / (1 - beta2**step), 1.0]
        [factors] = sent_together([torch.tensor(numbers, dtype=torch.float32)], device)
        if self.gradient_factor is not None:
            factors = torch.cat([factors[:3], self.gradient_factor.float().view(1)])
        place = torch.arange(len(group["params"]), device=device)
        return factors, ((step * 7919 + place) & 0x7FFFFFFF).int()

    def _tensors(self, parameter: Tensor) -> list[Tensor | None]:
        """Parameter, gradient, moments and rounded values (or None), flat."""
        state = self.state[parameter]
        if not state:
            state.update({name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in MOMENTS})
        tensors = (parameter, parameter.grad, *(state[name] for name in MOMENTS))
        rounded = self.rounded.get(parameter)
        return [*(_local(x).view(-1) for x in tensors), None if rounded is None else rounded.view(-1)]


Compute = Callable[..., None]
Record = Callable[[Compute, Sequence[Tensor]], Callable[[], None]]
"""Returns a function that repeats a call with the same input tensors."""


def record_cuda_graph(compute: Compute, inputs: Sequence[Tensor]) -> Callable[[], None]:
    """Records `compute(*inputs)` of tensors of any shape, which must have run before, on the current GPU; the result
    repeats it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may use the GPU meanwhile
        compute(*inputs)
    return graph.replay


class Recorded:
    """Calls a function that changes tensors; on a GPU by a CUDA graph from the second call with the same tensors: its
    kernels, one for each parameter, take a host longer to launch than a GPU to compute."""

    def __init__(self, record: Record | None = None) -> None:
        """`record` for any device; None: `record_cuda_graph`, on GPUs."""
        self._record = record
        self._num_recordings = 0
        self._places: tuple[int, ...] = ()
        self._inputs: list[Tensor] = []
        self._replay: Callable[[], None] | None = None

    def __call__(self, compute: Compute, changed: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """compute(*inputs), which changes `changed`; of the inputs, only values may differ between calls."""
        record = self._record or (record_cuda_graph if changed[0].is_cuda else None)
        may_record = record is not None and (self._replay or self._num_recordings < MOST_RECORDINGS)
        places = tuple(tensor.data_ptr() for tensor in changed) if may_record else ()
        if not places or places != self._places:
            self._places, self._replay = places, None
            compute(*inputs)
            return
        if self._replay is None:
            self._num_recordings += 1
            self._inputs = [tensor.clone() for tensor in inputs]
            self._replay = self._recording(record, compute)
        torch._foreach_copy_(self._inputs, list(inputs))
        self._replay()

    def _recording(self, record: Record, compute: Compute) -> Callable[[], None]:
        try:
            return record(compute, self._inputs)
        except RuntimeError as error:  # nothing has been computed
            reason = str(error).splitlines()[0]
            warnings.warn(f"the update is not recorded as a CUDA graph, which is slower ({reason})", stacklevel=2)
            return partial(compute, *self._inputs)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _adamw_(p, grad, exp_avg, exp_avg_sq, rounded, factors, seed, beta1, beta2, eps):
    """One step of flat tensors, in place; the update uses the moments before rounding."""
    decay, rate, correction, of_grad = factors.unbind()
    grad = grad.float() * of_grad
    m = torch.lerp(grad, exp_avg.float(), beta1)
    v = torch.lerp(grad.square(), exp_avg_sq.float(), beta2)
    p.copy_(decay * p - rate * m / ((v * correction).sqrt() + eps))
    if rounded is not None:
        rounded.copy_(p)
    bits = _hash(torch.arange(p.numel(), device=p.device, dtype=torch.int32), seed)
    exp_avg.copy_(round_at_random(m, bits))
    exp_avg_sq.copy_(round_at_random(v, bits >> 16))


def round_at_random(x: Tensor, bits: Tensor) -> Tensor:
    """Stochastic rounding to bfloat16: up with the probability of the fraction cut off.

    `x` is float32 of any shape; the low 16 bits of `bits` (int32, of the same shape) are uniformly random.
    """
    cut = ((x.view(torch.int32) + (bits & _LOW_BITS)) & ~_LOW_BITS).view(torch.float32)
    return torch.where(x.isfinite(), cut, x).to(torch.bfloat16)


def _hash(position: Tensor, seed: Tensor) -> Tensor:
    """Pseudo-random int32 numbers (the finaliser of MurmurHash3, on each position)."""
    x = position * -1640531527 + seed * 69069  # 2^32 / the golden ratio; products wrap
    x = (x ^ _shift(x, 16)) * -2048144789
    x = (x ^ _shift(x, 13)) * -1028477387
    return x ^ _shift(x, 16)


def _shift(x: Tensor, count: int) -> Tensor:
    """Logical right shift of int32."""
    return (x >> count) & ((1 << (32 - count)) - 1)
