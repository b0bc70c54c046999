"""Initial weights that do not depend on how the network is split.

Every tensor is drawn whole from its own generator, seeded by (seed, name), and then cut to the shard of a rank: any
layout starts from the same network.
"""

import hashlib
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from megadit.models.shared.resources import available_cores

Fill = Callable[[nn.Parameter, Tensor], object]
FullShape = Callable[[nn.Parameter], torch.Size]
CONSTANTS = {"log_scale": math.log(1 / 0.07), "score_offset": -10.0}
"""Initial scale and offset of CLIP's scores (arXiv 2103.00020, section 2.5; 2303.15343, section 3.2)."""

MOST_THREADS = 8
"""Threads that compute initial values; each holds one whole float32 tensor in addition to the network."""

ZERO = (
    *("final_layer.linear.", "head.linear.", "shared_modulation."),
    *("shared_embedder.linear_2.", "guidance_embedder.linear_2."),
)
"""Name prefixes of parameters that start at zero."""


def is_zero_initialised(name: str) -> bool:
    """adaLN-Zero (arXiv 2212.09748, section 3.2): modulation and output start at zero, so that every block is the
    identity.

    The guidance embedding starts at zero, too, so that a student starts equal to its teacher.
    """
    if name.endswith("modulation.down.weight"):  # the other matrix of the product is zero
        return False
    return "modulation." in name or name.startswith(ZERO) or name.endswith("bias")


def initial_value(name: str, shape: torch.Size, seed: int) -> Tensor:
    """The whole float32 tensor `name`, of this `shape`: a constant, zeros, ones for norms, or normal of variance
    1 / fan_in."""
    if name in CONSTANTS:
        return torch.full(shape, CONSTANTS[name])
    if is_zero_initialised(name):
        return torch.zeros(shape)
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    return normal_values(name, shape, seed)


def normal_values(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Normal float32 values of this shape and variance 1 / fan_in."""
    return torch.randn(shape, generator=generator_of(name, seed), device="cpu") / math.sqrt(shape[-1])


def generator_of(name: str, seed: int) -> torch.Generator:
    """A generator on the CPU, seeded by name and seed."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little"))


@torch.no_grad()
def initialize_(
    model: nn.Module,
    seed: int,
    *,
    full_shape: FullShape = lambda parameter: parameter.shape,
    fill: Fill = Tensor.copy_,
    read: Callable[[str], Tensor] | None = None,
    selects: Callable[[str], bool] = lambda name: True,
) -> nn.Module:
    """Fills the parameters of a network in place.

    Args:
            model: a plain network; its parameters' names are the canonical ones.
            seed: the same seed gives the same network in any layout.
            full_shape: the shape of a parameter before it was split over ranks.
            fill: copies this rank's shard of the whole tensor into a parameter.
            read: returns the whole tensor of a name, where weights exist; `seed` then changes nothing.
            selects: whether the parameter of a name is filled; the others are left unchanged.
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if selects(name)}

    def value(name: str) -> Tensor:
        return initial_value(name, full_shape(parameters[name]), seed) if read is None else read(name)

    for name, whole in zip(parameters, computed_ahead(value, parameters), strict=True):
        fill(parameters[name], whole)
    return model


def computed_ahead(value: Callable[[str], Tensor], names: Iterable[str]) -> Iterator[Tensor]:
    """value(name), of any shape, for each name in order, computed by threads that are at most one tensor each ahead.

    A generator uses one thread, however large its tensor: the 4.5e9 normals of a 7B network take one core half a minute
    or more. As each name has its own generator, any number of threads gives the same bits.
    """
    num_threads = min(MOST_THREADS, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if num_threads < 2:
        yield from map(value, names)
        return
    with ThreadPoolExecutor(num_threads, initializer=torch.set_grad_enabled, initargs=(False,)) as pool:
        ahead: deque[Future[Tensor]] = deque()
        for name in names:
            ahead.append(pool.submit(value, name))
            if len(ahead) > num_threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
