"""Checks of single values of a configuration; each tells the value and what to do."""

import math
from collections.abc import Iterable

from megadit.models.shared.errors import UserError, nearest


def require_positive(section: str, config: object, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(config, name)
        if not 0 < value < math.inf:
            raise UserError(f"{section}.{name}={value} must be greater than 0")


def require_not_negative(section: str, config: object, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(config, name)
        if not 0 <= value < math.inf:
            raise UserError(f"{section}.{name}={value} must not be negative")


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        near = nearest(value, choices)
        hint = f"did you mean {near!r}? " if near else ""
        raise UserError(f"{name}={value!r} is unknown; {hint}choose one of {', '.join(choices)}")


def nearest_multiples(value: int, factor: int) -> str:
    below, above = value // factor * factor, -(-value // factor) * factor
    return f"{below} or {above}" if below else f"{above}"
