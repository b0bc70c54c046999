"""Merges adapters into the weights of a bundle; the result is a bundle like any other."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from megadit.models.bundle import NOTICES, Bundle, check_kind, write_bundle
from megadit.models.convert.adapters.adapter import Adapter, asked_defaults
from megadit.models.convert.adapters.files import networks_of, read_adapter_of
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.lora.adapters import load_adapter, merge, set_scale
from megadit.models.shared.errors import UserError
from megadit.models.storage.license import License
from megadit.models.storage.manifest import check_replaceable
from megadit.models.storage.tensor_source import from_state_dict
from megadit.models.storage.weights import load_network


def merge_bundle(bundle: Bundle, adapters: Mapping[str, float], out: Path) -> dict[str, str]:
    """Writes the bundle with these adapters, each times its scale, merged into its weights, whole or not at all.

    Returns the report of each adapter (`Adapter.reading`).

    Raises:
        UserError: for an adapter that does not fit, and if `out` is the bundle itself or holds something else.
    """
    check_replaceable(out)
    if out.exists() and out.resolve() == bundle.path.resolve():
        raise UserError(f"{out} is the bundle to merge into: give another directory for the result")
    read = {path: read_adapter_of(path, bundle) for path in adapters}
    check_kind(bundle, "video")
    first, *second = [_merged(bundle, network, read, adapters) for network in bundle.networks]
    training = bundle.manifest.get("training") or {}
    merged = [{"scale": scale, **read[path].training} for path, scale in adapters.items()]
    write_bundle(
        out,
        config=bundle.config,
        state_dict=first,
        low_noise=from_state_dict(second[0]) if second else None,
        boundary=bundle.manifest.get("boundary"),
        tokenizer=bundle.load_tokenizer(),
        text_encoder=bundle.load_text_encoder(),
        image_encoder=bundle.load_image_encoder(),
        defaults=_defaults(bundle, read, adapters),
        training={**training, "merged": [*training.get("merged", ()), *merged]},
        license=_license(bundle),
    )
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


def _license(bundle: Bundle) -> License | None:
    """License of a bundle, with its files, which are copied to the merged one."""
    notices = bundle.path / NOTICES
    files = tuple(sorted(notices.iterdir())) if notices.is_dir() else ()
    return None if bundle.license is None else replace(bundle.license, files=files)
