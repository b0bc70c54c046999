"""Averages the weights of bundles of one network; the result is a bundle like any other.

Trainings that began with the same weights lie in one basin: their mean is at least as good as each (model soups,
arXiv 2203.05482), and a mean with the weights they began with gives back diversity that rewards cost (WARP, arXiv
2406.16768).
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from megadit.models.bundle import Bundle
from megadit.models.convert.merging.rewritten import check_other, write_rewritten
from megadit.models.shared.errors import UserError
from megadit.models.storage.components import load_network


def average_bundles(bundle: Bundle, others: Mapping[str, float], out: Path) -> None:
    """Writes the bundle with the mean of its weights, which count 1, and of those of other bundles (path -> weight),
    whole or not at all.

    Raises:
        UserError: for a bundle of another network, tokenizer, text encoder or license, a weight that is not above 0,
            and if `out` is the bundle itself or holds something else.
    """
    check_other(bundle, out)
    opened = {path: Bundle.open(path) for path in others}
    for path, other in opened.items():
        _check_same(bundle, path, other)
        if not 0 < others[path] < float("inf"):
            raise UserError(f"--average {path}:{others[path]:g}: a weight is above 0; the bundle's own is 1")
    first, *second = [_mean(network, bundle, opened, others) for network in bundle.networks]
    training = bundle.manifest.get("training") or {}
    averaged = [{"weight": others[path], **(other.manifest.get("training") or {})} for path, other in opened.items()]
    training = {**training, "averaged_with": [*training.get("averaged_with", ()), *averaged]}
    licensed = next((each for each in (bundle, *opened.values()) if each.license is not None), bundle)
    write_rewritten(bundle, out, first, *second, defaults=bundle.defaults, training=training, licensed=licensed)


def _check_same(bundle: Bundle, path: str, other: Bundle) -> None:
    parts = {"network": other.config == bundle.config and other.networks == bundle.networks}
    parts |= {
        part.replace("_", " "): other.manifest["fingerprints"].get(part) == fingerprint
        for part, fingerprint in bundle.manifest["fingerprints"].items()
    }
    licenses = {each.license.name for each in (bundle, other) if each.license is not None}
    parts["license"] = len(licenses) < 2
    for part, is_same in parts.items():
        if not is_same:
            raise UserError(f"--average {path}: its {part} is not that of {bundle.path}; average what has one origin")


def _mean(
    network: str, bundle: Bundle, others: Mapping[str, Bundle], weights: Mapping[str, float]
) -> dict[str, Tensor]:
    """float32 sums, one other network in memory at a time."""
    own = load_network(bundle.path / network).state_dict()
    total, sums = 1 + sum(weights.values()), {name: tensor.float() for name, tensor in own.items()}
    for path, other in others.items():
        for name, tensor in load_network(other.path / network).state_dict().items():
            sums[name] = sums[name].add(tensor.float(), alpha=weights[path])
    return {name: (sums[name] / total).to(tensor.dtype) for name, tensor in own.items()}
