"""A cache of bounded size for values that are computed once, and its keys."""

from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor


def memo_key(function: Callable[..., Any], args: tuple[Hashable, ...]) -> Hashable:
    """(function, args, types of args), a key that is different for different values.

    Raises:
        TypeError: for a function that may capture variables, and for arguments that are not hashable or
            compared by identity.
    """
    name = getattr(function, "__qualname__", "<unnamed>")
    if "<" in name:
        raise TypeError(f"{name} cannot be a key: give a function of the module or class, and its arguments")
    if any(isinstance(arg, Tensor) for arg in args):
        raise TypeError(f"a tensor cannot be a key of {name}: tensors are compared by identity")
    hash(args)
    return function, args, tuple(map(type, args))  # 1 == 1.0 == True


class TensorCache:
    """Cache of tensors computed for a dense batch, up to a size in bytes."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` limits the size of all cached tensors together."""
        self._values: dict[Hashable, Any] = {}
        self._free_bytes = max_bytes

    def cached(self, key: Hashable, compute: Callable[..., Any], *args: Any) -> Any:
        """compute(*args), a tensor, a tuple of them or None: computed once if it fits, else at each call."""
        if key in self._values:
            return self._values[key]
        value = compute(*args)
        parts = value if isinstance(value, tuple) else (value,)
        size = sum(part.untyped_storage().nbytes() for part in parts if part is not None)
        if size <= self._free_bytes:
            self._free_bytes -= size
            self._values[key] = value
        return value


class ObjectCache(WeakKeyDictionary):
    """Cache of values computed for an object, which live as long as the object; a copy or a pickle starts empty."""

    def __reduce__(self) -> tuple[type, tuple]:
        return type(self), ()

    def __deepcopy__(self, memo: dict) -> "ObjectCache":
        return type(self)()
