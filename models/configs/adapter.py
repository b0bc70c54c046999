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
    """Times 1 / rank it scales the change; None means `rank`, which scales by 1."""
    targets: tuple[str, ...] = ("blocks.*_attention.*", "blocks.*.fc[12]")
    """Patterns of targets' names (`adapters.targets_of` lists them), in which * stands for anything; queries, keys and
    values are targets of their own: `blocks.*.self_attention.[qkv]`."""
    dropout: float = setting(0.0, low=0, below=1)
    """Share of input features that a target's `down` does not see; drawn in each step, for all tokens alike."""
    kind: AdapterKind = setting("lora")

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))  # a list would not do as the key of a cache
        check_settings(self, "train.adapter.")

    @property
    def scaling(self) -> float:
        """alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank
