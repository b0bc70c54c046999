"""Adapters while sampling: read when a prompt first asks for them, and dropped when others are wanted."""

import math
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import MappingProxyType

from megadit.infer.runtimes.torch import TorchDenoiser
from megadit.models.bundle.bundle import Bundle
from megadit.models.convert.adapter_files import read_adapter_of, tensor_file
from megadit.models.shared.errors import UserError

Scales = Mapping[str, float]
"""Path of an adapter -> how much of it is added: 1 as it was trained, 0 nothing."""
NO_ADAPTERS: Scales = MappingProxyType({})
KEPT = 8
"""Adapters that stay in memory while no generation asks for them."""
MERGE_FIRST = "merge it into its base first: megadit bundle BASE OUT --merge ADAPTER"


def parse_adapter(text: str) -> tuple[str, float]:
    """(path, scale) of `PATH:SCALE`, or of `PATH`, whose scale is 1.

    Raises:
        UserError: for a scale that is not finite.
    """
    path, colon, tail = text.rpartition(":")
    try:
        scale = float(tail) if colon and path else None
    except ValueError:
        scale = None
    if scale is not None and not math.isfinite(scale):
        raise UserError(f"adapter {text}: the scale must be a finite number")
    return (text, 1.0) if scale is None else (path, scale)


def parse_adapters(texts: Sequence[str]) -> dict[str, float]:
    """Path -> scale of several.

    Raises:
        UserError: as `parse_adapter`, and for a path that is given twice.
    """
    scales = dict(map(parse_adapter, texts))
    if len(scales) < len(texts):
        raise UserError(f"an adapter is given twice in {', '.join(texts)}; give it once, with one scale")
    return scales


class AdapterShelf:
    """The adapters beside a denoiser's network."""

    def __init__(self, denoiser: TorchDenoiser, bundle: Bundle) -> None:
        self._denoiser = denoiser
        self._bundle = bundle
        self._names: OrderedDict[tuple[str, int], str] = OrderedDict()
        """(path, time of its last change) -> name beside the network; those asked for last come last."""
        self._num_users: Counter[str] = Counter()
        self._numbers = count()

    @contextmanager
    def held(self, paths: Sequence[str]) -> Iterator[dict[str, str]]:
        """Within the block these adapters are beside the network: the name of each there.

        Raises:
            UserError: for one that cannot be read, or does not fit the bundle.
        """
        names = {path: self._loaded(path) for path in dict.fromkeys(paths)}
        self._num_users.update(names.values())
        self._drop()
        try:
            yield names
        finally:
            self._num_users.subtract(names.values())
            self._drop()

    def _loaded(self, path: str) -> str:
        key = str(Path(path).resolve()), tensor_file(Path(path)).stat().st_mtime_ns
        if key not in self._names:
            name = f"adapter_{next(self._numbers)}"
            self._denoiser.load_adapter(name, *read_adapter_of(path, self._bundle).to_state())
            self._names[key] = name
        self._names.move_to_end(key)
        return self._names[key]

    def _drop(self) -> None:
        """Those that nobody uses, but for the `KEPT` that were asked for last."""
        unused = [key for key, name in self._names.items() if not self._num_users[name]]
        for key in unused[: max(0, len(unused) - KEPT)]:
            name = self._names.pop(key)
            del self._num_users[name]
            self._denoiser.remove_adapter(name)


@contextmanager
def hold_adapters(shelf: AdapterShelf | None, adapters: Sequence[Scales]) -> Iterator[dict[str, str]]:
    """`AdapterShelf.held` for the adapters of several prompts; without any, no shelf is needed.

    Raises:
        UserError: where a denoiser that has no shelf is asked for some.
    """
    paths = [path for scales in adapters for path in scales]
    if not paths:
        yield {}
    elif shelf is None:
        raise UserError(f"adapters need the torch runtime on one rank, neither compiled nor recorded; {MERGE_FIRST}")
    else:
        with shelf.held(paths) as names:
            yield names
