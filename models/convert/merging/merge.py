"""Merges adapters into the weights of a bundle; the result is a bundle like any other."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from megadit.models.bundle import Bundle
from megadit.models.convert.adapters.adapter import Adapter, asked_defaults
from megadit.models.convert.adapters.files import networks_of, read_adapter_of
from megadit.models.convert.merging.rewritten import check_other, write_rewritten
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.lora.adapters import load_adapter, merge, set_scale
from megadit.models.storage.components import load_network


def merge_bundle(bundle: Bundle, adapters: Mapping[str, float], out: Path) -> dict[str, str]:
    """Writes the bundle with these adapters, each times its scale, merged into its weights, whole or not at all.

    Returns the report of each adapter (`Adapter.reading`).

    Raises:
        UserError: for an adapter that does not fit, and if `out` is the bundle itself or holds something else.
    """
    check_other(bundle, out)
    read = {path: read_adapter_of(path, bundle) for path in adapters}
    first, *second = [_merged(bundle, network, read, adapters) for network in bundle.networks]
    training = bundle.manifest.get("training") or {}
    merged = [{"scale": scale, **read[path].training} for path, scale in adapters.items()]
    training = {**training, "merged": [*training.get("merged", ()), *merged]}
    write_rewritten(bundle, out, first, *second, defaults=_defaults(bundle, read, adapters), training=training)
    return {path: adapter.reading for path, adapter in read.items()}


def _merged(
    bundle: Bundle, network: str, read: Mapping[str, Adapter], scales: Mapping[str, float]
) -> dict[str, Tensor]:
    """The weights of one of a bundle's networks with the adapters that are for it."""
    dit = load_network(bundle.path / network)
    for number, (path, scale) in enumerate(scales.items()):
        if network in networks_of(path, bundle):
            load_adapter(dit, *read[path].to_state(), f"adapter_{number}")
            set_scale(dit, scale, f"adapter_{number}")
    merge(dit)
    return dit.state_dict()


def _defaults(bundle: Bundle, read: Mapping[str, Adapter], scales: Mapping[str, float]) -> SamplingSettings:
    return asked_defaults(bundle.defaults, [(path, read[path].defaults) for path, scale in scales.items() if scale])
