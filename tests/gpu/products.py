"""The machine: versions, memory, copies, and products of random numbers at the shapes of the 7B network."""

import torch
from rows import DEVICE, DTYPE, HAS_GPU, attempt, normal, seconds, size, tell

from megadit.models.machine import datasheet_flops, describe, describe_in_words, free_memory

TOKENS, WIDTH = size(8192, 128), size(3072, 64)
SHAPES = {"qkv": (WIDTH, 3 * WIDTH), "proj": (WIDTH, WIDTH), "fc1": (WIDTH, 4 * WIDTH), "fc2": (4 * WIDTH, WIDTH)}
"""(inputs, outputs) of the linears of a block."""


def told(name: str, flops: float, taken: float) -> None:
    sheet = datasheet_flops(DEVICE, DTYPE)
    share = "" if sheet is None else f", {flops / taken / sheet:.0%} of the data sheet"
    tell(name, f"{flops / taken / 1e12:,.1f} TFLOP/s{share}", tflops=flops / taken / 1e12, ms=taken * 1e3)


def products() -> None:
    for name, (inputs, outputs) in SHAPES.items():
        x, w, g = normal(TOKENS, inputs), normal(outputs, inputs), normal(TOKENS, outputs)
        flops = 2 * TOKENS * inputs * outputs
        told(f"{name}: x W^T", flops, seconds(lambda x=x, w=w: x @ w.t()))
        told(f"{name}: gradient of x", flops, seconds(lambda g=g, w=w: g @ w))
        told(f"{name}: gradient of W", flops, seconds(lambda g=g, x=x: g.t() @ x))
        if HAS_GPU:
            total = torch.zeros(outputs, inputs, device=DEVICE)
            add = lambda: torch.addmm(total, g.t(), x, out_dtype=torch.float32, out=total)  # noqa: E731, B023
            attempt(f"{name}: added to its sum", lambda: told(f"{name}: added to its sum", flops, seconds(add)))  # noqa: B023


def memory() -> None:
    block = torch.empty(size(2**32, 2**22), dtype=torch.uint8, device=DEVICE)
    other = torch.empty_like(block)
    taken = seconds(lambda: other.copy_(block))
    tell("copies within memory", f"{2 * block.nbytes / taken / 1e9:,.0f} GB/s", gb_per_s=2 * block.nbytes / taken / 1e9)


if __name__ == "__main__":
    tell("machine", describe_in_words(describe(DEVICE)))
    cudnn = torch.backends.cudnn.version() if HAS_GPU else None
    tell("free memory", f"{free_memory(DEVICE) / 2**30:,.0f} GiB, cuDNN {cudnn}")
    attempt("copies within memory", memory)
    attempt("products", products)
