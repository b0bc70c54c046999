"""A bundle with adapters merged into its weights: what every runtime, export and service takes as any other bundle."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megadit.models.adapters import load_adapter, merge, set_scale
from megadit.models.bundle.bundle import NOTICES, Bundle, write_bundle
from megadit.models.bundle.licence import Licence
from megadit.models.bundle.manifest import check_replaceable
from megadit.models.convert.adapter import Adapter, asked_defaults
from megadit.models.convert.adapter_files import read_adapter_of
from megadit.models.settings import SamplingSettings
from megadit.models.shared.errors import UserError


def merge_bundle(bundle: Bundle, adapters: Mapping[str, float], out: Path) -> dict[str, str]:
    """Writes the bundle with these adapters, each times its scale, in its weights: whole or not at all. Returns how
    each was read (`Adapter.reading`).

    Raises:
        UserError: for an adapter that does not fit, and if `out` is the bundle itself or holds something else.
    """
    check_replaceable(out)
    if out.exists() and out.resolve() == bundle.path.resolve():
        raise UserError(f"{out} is the bundle to merge into: give another directory for the result")
    read = {path: read_adapter_of(path, bundle) for path in adapters}
    dit = bundle.load_network()
    for number, (path, scale) in enumerate(adapters.items()):
        name = f"adapter_{number}"
        load_adapter(dit, *read[path].to_state(), name)
        set_scale(dit, scale, name)
    merge(dit)
    training = bundle.manifest.get("training") or {}
    merged = [{"scale": scale, **read[path].training} for path, scale in adapters.items()]
    write_bundle(
        out,
        config=bundle.config,
        state_dict=dit.state_dict(),
        tokenizer=bundle.load_tokenizer(),
        text_encoder=bundle.load_text_encoder(),
        image_encoder=bundle.load_image_encoder(),
        defaults=_defaults(bundle, read, adapters),
        training={**training, "merged": [*training.get("merged", ()), *merged]},
        licence=_licence(bundle),
    )
    return {path: adapter.reading for path, adapter in read.items()}


def _defaults(bundle: Bundle, read: Mapping[str, Adapter], scales: Mapping[str, float]) -> SamplingSettings:
    return asked_defaults(bundle.defaults, [(path, read[path].defaults) for path, scale in scales.items() if scale])


def _licence(bundle: Bundle) -> Licence | None:
    """With its files, which travel along."""
    notices = bundle.path / NOTICES
    files = tuple(sorted(notices.iterdir())) if notices.is_dir() else ()
    return None if bundle.licence is None else replace(bundle.licence, files=files)
