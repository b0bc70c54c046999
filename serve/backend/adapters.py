"""Adapters of a request: paths, default settings and cost; errors contain their names instead of paths."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from megadit.infer.pipeline.adapters import Scales, adapted_defaults
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.models.convert.adapters.files import adapter_size
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.lora.named import SUFFIX, find_adapter, of_expert, split_expert
from megadit.models.shared.errors import UserError
from megadit.serve.contract import VideoRequest
from megadit.serve.service_info import Limits, ServiceInfo, work_with

Request = TypeVar("Request")


def asked_adapters(request: VideoRequest, info: ServiceInfo, folder: Path | None) -> Scales:
    """The adapters of a request, by their paths in a service's folder. Raises UserError for too many adapters, missing
    ones, and invalid names."""
    scales = {split_expert(name): scale for name, scale in info.check_adapters(request).items()}
    return {
        of_expert(expert, str(find_adapter(folder, name, info.limits.max_adapter_bytes))): scale
        for (expert, name), scale in scales.items()
    }


def defaults_with(defaults: SamplingSettings, adapters: Scales) -> SamplingSettings:
    """Return the default settings of a request with these adapters. Raises UserError for adapters that cannot be read,
    or have conflicting settings."""
    with _by_name(adapters):
        return adapted_defaults(defaults, adapters)


def shares_of_work(adapters: Scales, limits: Limits, num_parameters: int) -> dict[str, float]:
    """Return each adapter's number of parameters divided by the network's: the fraction of work that it adds. Raises
    UserError for an adapter of too high a rank, or too many bytes in memory."""
    shares = {}
    for path in adapters:
        with _by_name([path]):
            rank, size = adapter_size(split_expert(path)[1])
            limits.check_adapter(rank, size * torch.float32.itemsize)
            shares[path] = size / num_parameters
    return shares


def batches_of(
    requests: Iterable[Request], shares: Callable[[Request], Mapping[str, float]], num_videos: Callable[[Request], int]
) -> list[list[Request]]:
    """Group requests of equal settings into batches that take no more work than their requests in sequence.

    A batch computes each of its adapters for all of its videos: without this rule, one user's large adapter would slow
    others down, and several large ones would be in memory at once. Requests with small adapters come first.
    """

    def alone(request: Request) -> float:
        return work_with(sum(shares(request).values()))

    batches: list[list[Request]] = []
    for request in sorted(requests, key=alone):
        for batch in batches:
            joined = [*batch, request]
            held = {path: share for each in joined for path, share in shares(each).items()}
            apart = sum(num_videos(each) * alone(each) for each in joined)
            if sum(map(num_videos, joined)) * work_with(sum(held.values())) <= apart + 1e-9:
                batch.append(request)
                break
        else:
            batches.append([request])
    return batches


def admit(pipeline: TextToVideo, adapters: Scales) -> None:
    """Load adapters once, so that invalid ones are reported before anything is generated. Raises UserError for adapters
    that cannot be read, or do not fit the network or each other."""
    for path in adapters:  # one by one, to keep only one in memory
        with _by_name([path]):
            pipeline.admit_adapters({path: 1.0})
    if len(adapters) > 1:  # an exported network limits their ranks together
        pipeline.admit_adapters(adapters)


@contextmanager
def _by_name(paths: Iterable[str]) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        places = [split_expert(path)[1] for path in paths]
        names = {path: Path(path).name.removesuffix(SUFFIX) for path in places}
        message = str(error)
        for path, name in names.items():
            message = message.replace(path, name)
        asked = ", ".join(map(repr, names.values()))
        raise UserError(f"the adapter {asked} cannot be used: {message}") from None
