"""An op is one computation of the network: a reference that defines it (`reference.py`), and faster variants.

Every call goes through `Op.choose`; no other code selects an implementation by device, precision or size.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megadit.models.ops.ledger import note
from megadit.models.shared.errors import choose_one

OPS: dict[str, "Op"] = {}
"""Every op by its name."""
FORCED: dict[str, str] = {}
"""Op -> the variant that is forced to compute every call; see `force_variants`."""


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """An implementation of an op."""

    name: str
    compute: Callable[..., Tensor]
    suits: Callable[..., bool]
    """Whether it supports the inputs, and is faster for them than later variants."""


class Op:
    """A computation that selects a variant by its inputs.

    Variants are tried in the order of registration; the reference is used if none of them suits.
    """

    def __init__(self, reference: Callable[..., Tensor], *, cheap: bool = False) -> None:
        """Decorate the definition, for any inputs and devices, whose name is that in `OPS` and `force_variants`; the
        value of a `cheap` one is recomputed in backward instead of saved (`ledger.py`)."""
        self.name, self.cheap = reference.__name__, cheap
        self.__module__ = reference.__module__
        self.reference = self.traceable = Variant("reference", reference, lambda *_: True)
        self.variants: dict[str, Variant] = {}
        """All variants except the reference, the most specific first."""
        self.calls: Counter[str] = Counter()
        """How often each variant ran in this process."""
        OPS[self.name] = self

    def __reduce__(self) -> str:
        """Copy and pickle by name, so that copies of a network share the module's op."""
        return self.name

    def variant(
        self, name: str, *, suits: Callable[..., bool], traceable: bool = False
    ) -> Callable[[Callable], Callable]:
        """Registers the decorated function; `traceable` makes compilers and exporters use it."""

        def register(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
            self.variants[name] = Variant(name, compute, suits)
            if traceable:
                self.traceable = self.variants[name]
            return compute

        return register

    def choose(self, *inputs) -> Variant:
        """The variant for these inputs: the only rule of selection."""
        return self.traceable if torch.compiler.is_compiling() else self._choose_eager(*inputs)

    def _choose_eager(self, *inputs) -> Variant:
        if (forced := FORCED.get(self.name)) is not None:
            return self.variants.get(forced, self.reference)
        for variant in self.variants.values():
            if variant.suits(*inputs):
                return variant
        return self.reference

    def __call__(self, *inputs) -> Tensor:
        if torch.compiler.is_compiling():  # checked once: calls cost time in small networks
            return self.traceable.compute(*inputs)
        variant = self._choose_eager(*inputs)
        value = variant.compute(*inputs)
        self.calls[variant.name] += 1
        if self.cheap:
            note(value, variant.compute, inputs)
        return value


def force_variants(choices: Iterable[str]) -> None:
    """Forces single variants to compute every call of their ops, as in ["attention=reference"]; [] forces none.

    Compilers and exporters are not affected.

    Raises:
        UserError: if there is no such op or variant.
    """
    forced = {}
    for choice in choices:
        name, _, variant = choice.partition("=")
        op = OPS[choose_one(name, OPS, f"there is no op {name!r}")]
        forced[name] = choose_one(variant, ("reference", *op.variants), f"{name} has no variant {variant!r}")
    FORCED.clear()
    FORCED.update(forced)


@contextmanager
def by_reference() -> Iterator[None]:
    """Context in which references compute, which can be differentiated any number of times; `attention` runs sample by
    sample, with the memory of the longest one."""
    before = dict(FORCED)
    FORCED.update({name: "reference" for name in OPS} | {"attention": "by_length_group"})
    try:
        yield
    finally:
        FORCED.clear()
        FORCED.update(before)


def variants_run() -> dict[str, dict[str, int]]:
    """Op -> variant -> number of calls in this process."""
    return {name: dict(op.calls) for name, op in OPS.items() if op.calls}


def describe_variants(calls: dict[str, dict[str, int]]) -> str:
    """`variants_run` in a line: the variants of each op, the most frequent first."""
    return "; ".join(f"{op} {', '.join(sorted(by, key=by.get, reverse=True))}" for op, by in calls.items())
