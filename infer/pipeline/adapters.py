"""Adapters while sampling: loaded when a prompt first names them, and evicted from an LRU cache."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from megadit.infer.runtimes.distributed import DistributedDenoiser
from megadit.infer.runtimes.exported import ExportedDenoiser
from megadit.infer.runtimes.load import TORCH, ExpertDenoiser, adapter_inputs, experts_of
from megadit.infer.runtimes.torch import AdaptableDenoiser
from megadit.infer.sampling.guidance import Denoiser
from megadit.models.bundle import Bundle
from megadit.models.convert.adapters.adapter import asked_defaults
from megadit.models.convert.adapters.files import open_adapter, read_adapter_of, tensor_file
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.lora.inputs import AdapterInputs
from megadit.models.lora.named import split_expert
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import MAX_MEDIA_BYTES, sha256_of

Scales = Mapping[str, float]
"""Path of an adapter -> its scale: 1 as it was trained, 0 without effect."""
NO_ADAPTERS: Scales = MappingProxyType({})
MAX_ADAPTERS, CACHE_BYTES = 8, 2 << 30
"""Limits of the adapters that stay in memory while no generation uses them: their number, and their total bytes."""
MERGE_FIRST = "merge it into its base first: megadit bundle BASE OUT --merge ADAPTER"
NO_ADAPTER_INPUTS = f"exported without inputs for adapters: export again with --adapter_rank N, or {MERGE_FIRST}"
"""Error of an exported network without inputs for adapters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledAdapter:
    """Adapter, and its scale for a video."""

    path: str
    scale: float
    sha256: str
    """SHA-256 of its file of tensors."""


def scaled_adapters(scales: Scales) -> tuple[ScaledAdapter, ...]:
    """Return adapters as records list them: resolved path, scale and checksum of each.

    Raises:
        UserError: for a path that is not an adapter.
    """
    found = []
    for asked, scale in scales.items():
        expert, path = split_expert(asked)
        whole = f"{expert}=" if expert else ""
        whole += str(Path(path).resolve())
        found.append(ScaledAdapter(path=whole, scale=scale, sha256=_checksum(tensor_file(Path(path)))))
    return tuple(found)


def adapted_defaults(defaults: SamplingSettings, adapters: Scales | Sequence[Scales]) -> SamplingSettings:
    """Return a bundle's defaults, overridden by those of its adapters, such as a student's few steps. For several
    videos, only values on which all adapters agree.

    Raises:
        UserError: as `asked_defaults`.
    """

    def asked(scales: Scales) -> SamplingSettings:
        used = [path for path, scale in scales.items() if scale]
        return asked_defaults(defaults, [(path, open_adapter(split_expert(path)[1]).defaults) for path in used])

    found = {asked(scales) for scales in ([adapters] if isinstance(adapters, Mapping) else adapters)}
    return found.pop() if len(found) == 1 else defaults


def _checksum(file: Path) -> str:
    """Return the SHA-256 of a file, computed again only when the file has changed."""
    written = file.stat()
    return _read_checksum(file, written.st_mtime_ns, written.st_size)


@lru_cache(maxsize=64)
def _read_checksum(file: Path, *written: int) -> str:
    return sha256_of(file, MAX_MEDIA_BYTES)


class AdapterCache:
    """Adapters attached to a denoiser's network."""

    def __init__(
        self,
        denoiser: AdaptableDenoiser | ExportedDenoiser | DistributedDenoiser | ExpertDenoiser,
        bundle: Bundle,
        cached_bytes: int = CACHE_BYTES,
        slots: AdapterInputs | None = None,
    ) -> None:
        """`slots`: inputs that an exported denoiser has for the adapters of one video."""
        self._denoiser = denoiser
        self._bundle = bundle
        self._cached_bytes = cached_bytes
        self._inputs = slots
        self._names: OrderedDict[tuple[str | None, str, int], str] = OrderedDict()
        """(expert or None, path, time of its last change) -> name at the network; the most recently used come last."""
        self._num_bytes: dict[str, int] = {}
        self._num_users: Counter[str] = Counter()
        self._next_number = 0

    @contextmanager
    def held(self, paths: Sequence[str]) -> Iterator[dict[str, str]]:
        """Context in which these adapters are attached to the network; gives {path: name at the network}.

        Raises:
            UserError: for one that cannot be read, or does not fit the bundle.
        """
        names = {path: self._loaded(path) for path in dict.fromkeys(paths)}
        self._num_users.update(names.values())
        try:
            self._drop()
            yield names
        finally:
            self._num_users.subtract(names.values())
            self._drop()

    def check_together(self, names: Iterable[str]) -> None:
        """Raises UserError if one video has more adapters (by their names) than its denoiser supports."""
        if self._inputs is None:
            return
        names = list(names)
        for network in experts_of(self._denoiser):
            self._inputs.check_together([network.adapters[name].ranks for name in names if name in network.adapters])

    def _loaded(self, path: str) -> str:
        expert, place = split_expert(path)
        key = expert, str(Path(place).resolve()), tensor_file(Path(place)).stat().st_mtime_ns
        if key not in self._names:
            name, self._next_number = f"adapter_{self._next_number}", self._next_number + 1
            state, adapter = read_adapter_of(path, self._bundle).to_state()
            of_one = {} if expert is None else {"expert": expert}
            self._denoiser.load_adapter(name, state, adapter, **of_one)
            self._num_bytes[name] = sum(value.numel() for value in state.values()) * self._denoiser.dtype.itemsize
            self._names[key] = name
        self._names.move_to_end(key)
        return self._names[key]

    def _drop(self) -> None:
        """Drop unused adapters, least recently used first, down to `MAX_ADAPTERS` and the limit of bytes."""
        unused = [key for key, name in self._names.items() if not self._num_users[name]]
        num_bytes = sum(self._num_bytes[self._names[key]] for key in unused)
        for place, key in enumerate(unused):
            if len(unused) - place <= MAX_ADAPTERS and num_bytes <= self._cached_bytes:
                return
            name = self._names.pop(key)
            del self._num_users[name]
            num_bytes -= self._num_bytes.pop(name)
            self._denoiser.remove_adapter(name)


def adapter_cache(
    denoiser: Denoiser, bundle: Bundle, runtime: str, cached_bytes: int, *, has_plain_blocks: bool, is_distributed: bool
) -> AdapterCache | None:
    """The adapter cache of a bundle's denoiser; None if the denoiser supports no adapters.

    `has_plain_blocks`: all of torch's blocks are in memory, uncompiled; `is_distributed`: other processes hold them.

    Raises:
        UserError: if it was not exported for `runtime`.
    """
    if runtime == TORCH:
        parts = experts_of(denoiser)
        can_adapt = has_plain_blocks and all(
            isinstance(part, (AdaptableDenoiser, DistributedDenoiser)) for part in parts
        )
        return AdapterCache(denoiser, bundle, cached_bytes) if can_adapt else None
    slots = None if is_distributed else adapter_inputs(bundle, runtime)
    return None if slots is None else AdapterCache(denoiser, bundle, cached_bytes, slots)


@contextmanager
def hold_adapters(adapter_cache: AdapterCache | None, adapters: Sequence[Scales]) -> Iterator[dict[str, str]]:
    """`AdapterCache.held` for the adapters of several prompts; without adapters, no cache is needed.

    Raises:
        UserError: if there are adapters but no cache, or more for one prompt than the denoiser supports.
    """
    paths = [path for scales in adapters for path in scales]
    if not paths:
        yield {}
    elif adapter_cache is None:
        raise UserError(
            "adapters need the torch runtime with all blocks, neither compiled nor recorded, or networks "
            f"exported with --adapter_rank; {MERGE_FIRST}"
        )
    else:
        with adapter_cache.held(paths) as names:
            for scales in adapters:
                adapter_cache.check_together(names[path] for path, scale in scales.items() if scale)
            yield names
