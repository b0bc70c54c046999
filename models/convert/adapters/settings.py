"""PEFT's settings of an adapter, `LoraConfig`: reading and writing."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megadit.models.convert.adapters.adapter import Change
from megadit.models.shared.errors import UserError

_WITHOUT_EFFECT = {
    "peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version",
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "init_lora_weights", "bias", "loftq_config",
    "eva_config", "lora_bias", "corda_config", "lora_ga_config", "runtime_config", "megatron_core", "qalora_group_size",
    "ensure_weight_tying",
}  # fmt: skip
"""Settings of PEFT that are read here, or that the tensors determine; any other would change what is computed."""
_PLAIN = re.compile(r"\^?(?:[^\\*+?()\[\]{}|^$]|\\\.)*\$?")
"""Pattern of names in which PEFT's regular expressions have a fixed length; a dot stands for any character."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of `init_lora_weights` with which PEFT changed the base's own weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """Ranks and alphas from PEFT's settings, with exceptions for single linears."""

    rank: float | None = None
    alpha: float | None = None
    ranks: Mapping[re.Pattern, float] = field(default_factory=dict)
    alphas: Mapping[re.Pattern, float] = field(default_factory=dict)
    is_rank_stabilised: bool = False
    """alpha / sqrt(rank) scales (arXiv 2312.03732)."""
    is_dora: bool = False
    """Each linear has a magnitude (arXiv 2402.09353), without which it would compute something else."""
    said_by: str = ""
    """Source of these settings, for messages."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], path: Path, said_by: str) -> "LoraSettings":
        """Read PEFT's `LoraConfig` of the adapter at `path`.

        Raises:
            UserError: for settings of other methods, and for unsupported settings that would change what is computed.
        """
        if values.get("peft_type", "LORA") != "LORA":
            raise UserError(f"{path} is a {values['peft_type']}: only LoRA and DoRA are read")
        for key, value in values.items():
            if (value and key not in _WITHOUT_EFFECT) or (key == "bias" and value not in (None, "none")):
                raise UserError(f"{path} has {key}={value!r}, which is not supported: only changes of linears are")
        if str(values.get("init_lora_weights")).lower().startswith(_CHANGES_BASE):
            raise UserError(
                f"{path} has init_lora_weights={values['init_lora_weights']!r}, which changed its base: save it as a "
                "plain LoRA with PEFT's path_initial_model_for_weight_conversion"
            )
        return cls(
            rank=_number(path, "r", values.get("r")),
            alpha=_number(path, "lora_alpha", values.get("lora_alpha"), least=0),
            ranks=_numbers(path, "rank_pattern", values.get("rank_pattern")),
            alphas=_numbers(path, "alpha_pattern", values.get("alpha_pattern"), least=0),
            is_rank_stabilised=bool(values.get("use_rslora")),
            is_dora=bool(values.get("use_dora")),
            said_by=said_by,
        )

    def rank_of(self, linear: str) -> float | None:
        return _matched(self.ranks, linear, self.rank)

    def alpha_of(self, linear: str, rank: int) -> float | None:
        """Numerator of the scale alpha / rank; None if not set."""
        alpha = _matched(self.alphas, linear, self.alpha)
        return alpha * math.sqrt(rank) if alpha is not None and self.is_rank_stabilised else alpha


def _number(path: Path, name: str, value: Any, *, least: float | None = None) -> float | None:
    """None, or a number of at least `least` (without `least`: greater than 0)."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and (value == least or 0 < value < math.inf)):
        bound = "greater than 0" if least is None else f"of at least {least:g}"
        raise UserError(f"{path} has {name}={value!r}, which must be a number {bound}")
    return value


def _numbers(path: Path, name: str, values: Any, *, least: float | None = None) -> dict[re.Pattern, float]:
    """Patterns of names, as PEFT matches them: the name, or its end after a dot, which ^ excludes."""
    if not isinstance(values or {}, dict):
        raise UserError(f"{path} has {name}={values!r}, which must be an object")
    found = {}
    for key, value in (values or {}).items():
        if not _PLAIN.fullmatch(key):
            raise UserError(f"{path} has {name} for {key!r}: only names are supported, no regular expressions")
        if _number(path, f"{name}[{key!r}]", value, least=least) is not None:
            found[re.compile(rf"(?:.*\.)?(?:{key})")] = value
    return found


def _matched(patterns: Mapping[re.Pattern, float], linear: str, default: float | None) -> float | None:
    """The value of the first pattern that matches the linear's name."""
    return next((value for pattern, value in patterns.items() if pattern.fullmatch(linear)), default)


def lora_config(changes: Mapping[str, Change], *, is_dora: bool, base_model: str | None) -> dict[str, Any]:
    """PEFT's `LoraConfig` of changes by linear: the most frequent rank and alpha, and the exceptions."""
    ranks = {name: change.rank for name, change in changes.items()}
    alphas = {name: _whole(change.alpha) for name, change in changes.items()}
    (rank, _), (alpha, _) = Counter(ranks.values()).most_common(1)[0], Counter(alphas.values()).most_common(1)[0]
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {name: value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
        "target_modules": sorted(changes),
        "lora_dropout": 0.0,
        "bias": "none",
        **({"lora_bias": True} if any(change.bias_O is not None for change in changes.values()) else {}),
        "use_dora": is_dora,
        "use_rslora": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }


def _whole(value: float) -> float:
    """PEFT's alphas as integers where possible."""
    return int(value) if float(value).is_integer() else value
