"""The optimizer alone, of as many numbers as the 7B network has, or as the memory holds: milliseconds of AdamW with
bfloat16 moments, which writes the weights too, and of the norm of the gradients."""

import torch
from rows import DEVICE, DTYPE, HAS_GPU, attempt, normal, seconds, size, tell

from megadit.models.machine import free_memory
from megadit.train.optim.adamw import HalfMomentAdamW

ALL_NUMBERS = 7.59e9
"""Of the 7B network."""
NUMBERS = size(2**28, 2**16)
"""Of one parameter: fewer than int32 counts."""
HELD_BYTES = 4 + 4 + 2 + 2 + 2
"""Of a number: master copy, gradient, two moments, weight."""
MOVED_BYTES = 4 + 8 + 8 + 2
SPARE = 0.85
"""Share of the free memory that is taken."""


def num_parameters() -> int:
    most = -(-int(ALL_NUMBERS) // NUMBERS)
    return max(1, min(most, int(SPARE * free_memory(DEVICE) / (HELD_BYTES * NUMBERS)))) if HAS_GPU else 3


def optimizer() -> None:
    parameters = [torch.nn.Parameter(normal(NUMBERS, dtype=torch.float32)) for _ in range(num_parameters())]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    adamw = HalfMomentAdamW([{"params": parameters}], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    adamw.rounded = {parameter: torch.empty_like(parameter, dtype=DTYPE) for parameter in parameters}
    taken, count = seconds(adamw.step), len(parameters) * NUMBERS
    rate = count * MOVED_BYTES / taken / 1e9
    same = all(torch.equal(weight, master.detach().to(DTYPE)) for master, weight in adamw.rounded.items())
    whole = taken * ALL_NUMBERS / count
    told = f"{count / 1e9:.2f} billion numbers in {taken * 1e3:.1f} ms, {rate:,.0f} GB/s; {whole * 1e3:.0f} ms for 7.59"
    tell("AdamW", told, failed=not same, ms=taken * 1e3, gb_per_s=rate, numbers=count)
    gradients = [parameter.grad for parameter in parameters]
    taken = seconds(lambda: torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
    tell("norm of the gradients", f"{taken * 1e3:.1f} ms, {4 * count / taken / 1e9:,.0f} GB/s", ms=taken * 1e3)


if __name__ == "__main__":
    torch.manual_seed(0)
    attempt("AdamW", optimizer)
