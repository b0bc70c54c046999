"""An adapter without its network: the change of each linear, unsharded, as in files.

Shapes: R rank, I and O input and output features.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megadit.models.configs.adapter import AdapterConfig, AdapterKind
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.diffusion.settings import SamplingSettings, check_asked, resolve
from megadit.models.shared.errors import UserError

DOWN, UP, MAGNITUDE, BIAS = "down", "up", "magnitude", "bias"
ALPHA, SCALE, UP_BIAS, DIFFERENCE = "alpha", "scale", "up_bias", "difference"
"""Tensors of a linear in adapter files. Alternatives: `scale` is alpha / R; `up_bias` times the scale is a bias;
`difference` is the whole change of the matrix."""


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """An adapter's change of one linear: (alpha / R) up down, or DoRA's form of it."""

    down_RI: Tensor
    up_OR: Tensor
    alpha: float
    magnitude_O: Tensor | None = None
    bias_O: Tensor | None = None
    """Change of the linear's bias."""

    @property
    def rank(self) -> int:
        return len(self.down_RI)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Adapter:
    """An unsharded adapter in float32, as in a file."""

    config: NetworkConfig
    """Configuration of its base network."""
    kind: AdapterKind
    changes: Mapping[str, Change]
    """Target (as `targets_of` lists them) -> change."""
    base: str | None = None
    """`fingerprint` of the base weights that it was trained on; None: the file does not say."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Provenance, such as recipe and step."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Recommended sampling settings, which override the bundle's; {}: the bundle's."""
    reading: str = ""
    """Report for the user: which tensors of its file are used, and its scales."""

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.to_state()[0].values())

    def to_state(self) -> tuple[dict[str, Tensor], AdapterConfig]:
        """The adapter state, and the configuration for `load_adapter`, with the most frequent scaling of the targets.

        A target with another scaling has the ratio folded into its `up`.
        """
        scalings = {name: change.alpha / change.rank for name, change in self.changes.items()}
        usual, _ = Counter(scalings.values()).most_common(1)[0]
        rank = max(change.rank for change in self.changes.values())
        state = {}
        for name, change in self.changes.items():
            ratio = scalings[name] / usual
            state[f"{name}.{DOWN}"] = change.down_RI
            state[f"{name}.{UP}"] = change.up_OR if ratio == 1 else change.up_OR * ratio
            if change.magnitude_O is not None:
                state[f"{name}.{MAGNITUDE}"] = change.magnitude_O
            if change.bias_O is not None:
                state[f"{name}.{BIAS}"] = change.bias_O
        return state, AdapterConfig(rank=rank, alpha=usual * rank, targets=tuple(self.changes), kind=self.kind)

    @classmethod
    def from_state(
        cls,
        state: Mapping[str, Tensor],
        adapter: AdapterConfig,
        config: NetworkConfig,
        *,
        base: str | None = None,
        training: Mapping[str, Any] | None = None,
    ) -> "Adapter":
        """Build from an adapter state, as `adapter_state` returns it."""
        changes = {}
        for name in sorted({key.rpartition(".")[0] for key in state}):
            down_RI, up_OR = (state[f"{name}.{kind}"].detach().float().cpu() for kind in (DOWN, UP))
            others = [state.get(f"{name}.{kind}") for kind in (MAGNITUDE, BIAS)]
            magnitude_O, bias_O = (None if other is None else other.detach().float().cpu() for other in others)
            changes[name] = Change(down_RI, up_OR, adapter.scaling * len(down_RI), magnitude_O, bias_O)
        return cls(config=config, kind=adapter.kind, changes=changes, base=base, training=dict(training or {}))


def asked_defaults(defaults: SamplingSettings, asked: Iterable[tuple[str, Mapping[str, Any]]]) -> SamplingSettings:
    """The defaults, overridden by the settings of adapters: pairs of path and `Adapter.defaults`.

    Raises:
        UserError: for invalid settings, and where two adapters contradict each other.
    """
    found = {path: check_asked(values, f"{path}: ") for path, values in asked if values}
    if not found:
        return defaults
    (first, values), *others = found.items()
    for path, other in others:
        if other != values:
            raise UserError(f"{first} and {path} need different sampling settings: use one of them")
    return resolve(defaults, **values)
