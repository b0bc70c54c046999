"""Variants of the model that a visitor can choose: the service's own, its students and student adapters."""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from megadit.serve.client import VideoClient
from megadit.serve.contract import VideoRequest
from megadit.serve.events import ServiceError
from megadit.serve.gateway.client import GatewayClient
from megadit.serve.service_info import ServiceInfo, calls_in_words, calls_of

BEST = "best"
"""Name of the variant without a fixed number of calls."""
MOST_GUIDANCE = 10.0
"""Highest guidance scale on the page, unless the network is guidance-distilled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A model of the service, or an adapter of it, with the settings that it was trained for."""

    name: str
    client: VideoClient | GatewayClient = field(repr=False)
    info: ServiceInfo = field(repr=False)
    defaults: Mapping[str, Any] = field(repr=False)
    adapter: str | None = None

    @property
    def scales(self) -> tuple[float, ...]:
        """The lowest and the highest guidance scale on the page."""
        return self.info.guidance_embedding_range or (1.0, max(MOST_GUIDANCE, 2 * self.defaults["guidance"]))

    def work(self, request: VideoRequest) -> int:
        """Pixels times network calls: guidance takes two a step, unless the network is guidance-distilled."""
        calls = request.num_steps * (1 if self.info.has_guidance_embedding or request.guidance == 1 else 2)
        return request.num_frames * request.height * request.width * calls

    def request(self, request: VideoRequest) -> VideoRequest:
        """The request with the variant's adapter added, and nothing left out."""
        if self.adapter is not None and self.adapter not in request.adapter_scales():
            request = replace(request, adapters=(*(request.adapters or ()), self.adapter))
        return self.info.filled(request)


def variants_of(client: VideoClient | GatewayClient) -> dict[str, Variant]:
    """Name -> variant of a service, its own first; without students that a gateway does not serve.

    Raises:
        ServiceError: if the service does not respond.
    """
    info = client.info()
    found = [_variant(client, info)]
    for other in map(client.with_model, info.students):
        with suppress(ServiceError):
            found.append(_variant(other, other.info()))
    for adapter, asked in (info.adapters.defaults if info.adapters is not None else {}).items():
        found.append(_variant(client, info, info.defaults | asked, adapter))
    several = {name for name, count in Counter(variant.name for variant in found).items() if count > 1}
    return {variant.name: variant for variant in (_distinguished(variant, several) for variant in found)}


def _variant(
    client: VideoClient | GatewayClient,
    info: ServiceInfo,
    defaults: Mapping[str, Any] | None = None,
    adapter: str | None = None,
) -> Variant:
    defaults = info.defaults if defaults is None else defaults
    calls = calls_of(defaults, has_guidance_embedding=info.has_guidance_embedding)
    name = BEST if calls is None else calls_in_words(calls)
    return Variant(name=name, client=client, info=info, defaults=defaults, adapter=adapter)


def _distinguished(variant: Variant, several: set[str]) -> Variant:
    """Adds the adapter to the name of a variant whose calls are not unique."""
    return (
        replace(variant, name=f"{variant.name}, {variant.adapter}")
        if variant.adapter and variant.name in several
        else variant
    )
