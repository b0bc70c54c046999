"""Rules between settings: to which subjects a rule applies, what it needs, and a remedy."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from megadit.models.shared.errors import UserError

Subject = TypeVar("Subject")

_KEY = re.compile(r"\{([\w.]+)(=?)\}")


def always(subject: Any) -> bool:
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule(Generic[Subject]):
    """A subject for which `when` is true must satisfy `needs`; otherwise `remedy` is its `UserError`.

    A text names settings by their dotted paths from the subject: `{a.b}` is the value, `{a.b=}` is `a.b=value`.
    """

    when: Callable[[Subject], bool] = always
    needs: Callable[[Subject], bool]
    remedy: str | Callable[[Subject], str]

    def is_broken(self, subject: Subject) -> bool:
        return bool(self.when(subject)) and not self.needs(subject)

    def message(self, subject: Subject) -> str:
        if callable(self.remedy):
            return self.remedy(subject)
        return _KEY.sub(lambda key: (f"{key[1]}=" if key[2] else "") + _shown(subject, key[1]), self.remedy)


def first_broken(rules: Iterable[Rule[Subject]], subject: Subject) -> Rule[Subject] | None:
    """The first broken rule, or None. Later rules may rely on earlier ones: checking stops at the first broken one."""
    return next((rule for rule in rules if rule.is_broken(subject)), None)


def enforce(rules: Iterable[Rule[Subject]], subject: Subject) -> None:
    """Raises UserError with the message of the first rule that `subject` breaks."""
    broken = first_broken(rules, subject)
    if broken is not None:
        raise UserError(broken.message(subject))


def accepted_by(
    check: Callable[[Subject], Any], *, when: Callable[[Subject], bool] = always, where: str = ""
) -> Rule[Subject]:
    """The rule that `check` raises no UserError; the remedy is `where` and the error's message."""

    def complaint(subject: Subject) -> str:
        try:
            check(subject)
        except UserError as error:
            return f"{where}{error}"
        return ""

    return Rule(when=when, needs=lambda subject: not complaint(subject), remedy=complaint)


def _shown(subject: Any, path: str) -> str:
    """The value at a dotted path, in YAML notation."""
    value = subject
    for name in path.split("."):
        value = getattr(value, name)
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value) if isinstance(value, tuple) else value)
