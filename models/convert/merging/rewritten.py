"""Writes a bundle again with other weights of the same networks."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megadit.models.bundle import NOTICES, Bundle, check_kind
from megadit.models.bundle_writer import write_bundle
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import check_replaceable
from megadit.models.storage.license import License
from megadit.models.storage.tensor_source import from_state_dict


def check_other(bundle: Bundle, out: Path) -> None:
    """Raises UserError if `out` is the bundle itself or holds something else, or if the bundle makes no videos."""
    check_replaceable(out)
    if out.exists() and out.resolve() == bundle.path.resolve():
        raise UserError(f"{out} is the bundle itself: give another directory for the result")
    check_kind(bundle, "video")


def write_rewritten(
    bundle: Bundle,
    out: Path,
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor] | None = None,
    *,
    defaults: SamplingSettings,
    training: Mapping[str, Any],
    licensed: Bundle | None = None,
) -> None:
    """Writes `out` with these weights of the bundle's network, or of its two, whole or not at all; its license is that
    of the bundle `licensed` (default: `bundle`)."""
    write_bundle(
        out,
        config=bundle.config,
        state_dict=first,
        low_noise=from_state_dict(second) if second else None,
        boundary=bundle.manifest.get("boundary"),
        tokenizer=bundle.load_tokenizer(),
        text_encoder=bundle.load_text_encoder(),
        image_encoder=bundle.load_image_encoder(),
        defaults=defaults,
        training=training,
        license=_license(licensed or bundle),
    )


def _license(bundle: Bundle) -> License | None:
    """License of a bundle, with its files, which are copied."""
    notices = bundle.path / NOTICES
    files = tuple(sorted(notices.iterdir())) if notices.is_dir() else ()
    return None if bundle.license is None else replace(bundle.license, files=files)
