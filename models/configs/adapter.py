"""The configuration of an adapter: which linears it changes, and how."""

from dataclasses import dataclass
from typing import Literal

from megadit.models.shared.cli.setting import check_settings, setting

AdapterKind = Literal["lora", "dora"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    """A low-rank change of a network's linears, y = W x + (alpha / rank) up down x (LoRA, arXiv 2106.09685, eq. 3).

    `dora` also learns the norm of every row of the changed matrix (DoRA, arXiv 2402.09353, eq. 5).
    """

    rank: int = setting(above=0)
    """Rows of `down`, columns of `up`."""
    alpha: float | None = setting(None, above=0)
    """Numerator of the scale alpha / rank; None means `rank`, for a scale of 1."""
    targets: tuple[str, ...] = ("blocks.*_attention.*", "blocks.*.fc[12]")
    """Patterns of targets' names (`adapters.targets_of` lists them), in which * matches anything; queries, keys and
    values are separate targets: `blocks.*.self_attention.[qkv]`."""
    dropout: float = setting(0.0, low=0, below=1)
    """Dropout probability of a target's input features before `down`; drawn in each step, the same for all tokens."""
    kind: AdapterKind = setting("lora")

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))  # hashable, as a cache key
        check_settings(self, "train.adapter.")

    @property
    def scaling(self) -> float:
        """alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank
