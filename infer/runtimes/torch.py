"""torch on the CPU or a GPU: the denoiser, devices and dtypes, and items computed with float32 for tensors that are
created without a dtype, whatever torch's default is (`torch.set_default_dtype`), or in a thread of their own."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megadit.models.configs.adapter import AdapterConfig
from megadit.models.diffusion.parameterization import EDMDenoiser
from megadit.models.host_to_device import levels_on
from megadit.models.lora.adapters import load_adapter, remove, set_scale
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.registry import SavedNetwork
from megadit.models.ops.crossover import tune_for_cpu
from megadit.models.packing.dense_layout import DenseLayout, TensorCache
from megadit.models.shared.errors import UserError, choose_one

Item = TypeVar("Item")
Result = TypeVar("Result")
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
CACHE_BYTES = 2**28
"""Memory for values computed once for all noise levels of a batch, mostly keys and values of the text."""
_lock = threading.Lock()
_within: list[torch.dtype] = []
"""The previous defaults, one for each active context: the default is one of the process, not of a thread."""


class AdaptableDenoiser:
    """Denoiser in torch with adapters that are attached and detached; conditions hold their scales for each video."""

    def __init__(self, dit: SavedNetwork, load: Callable[..., None] = load_adapter) -> None:
        """`load` is `lora.adapters.load_adapter`, or the same for a network that ranks share."""
        self.dit = dit
        self._load = load
        self._adapters: list[str] = []

    def load_adapter(self, name: str, state: Mapping[str, Tensor], adapter: AdapterConfig) -> None:
        """Attach an adapter to the network.

        Raises:
            UserError: for one that does not fit the network.
        """
        self._load(self.dit, state, adapter, name)
        self._adapters.append(name)

    def remove_adapter(self, name: str) -> None:
        """Detach an adapter."""
        remove(self.dit, name)
        self._adapters.remove(name)

    def _scale_adapters(self, scales: Mapping[str, float | Tensor]) -> None:
        """Set the scale of each adapter (`set_scale`); 0 for those not named."""
        for name in self._adapters:
            set_scale(self.dit, scales.get(name, 0.0), name)


class Prepared(NamedTuple):
    """Conditions, ready for the network."""

    conditioning: Conditioning
    """Conditioning on the network's device, in its precision."""
    layout: DenseLayout | None
    """Layout, which caches values computed from the conditions."""
    scales: dict[str, float | Tensor]
    """Scales of its adapters, for `set_scale`."""


class ObjectCache(WeakKeyDictionary):
    """Cache of values computed for an object, which live as long as the object; a copy or a pickle starts empty."""

    def __reduce__(self) -> tuple[type, tuple]:
        return type(self), ()

    def __deepcopy__(self, memo: dict) -> "ObjectCache":
        return type(self)()


class TorchDenoiser(AdaptableDenoiser):
    """D(x; sigma) by torch: the network in `dtype`, without autocast; its parameterization in float32.

    `dit` is moved and cast in place. `compile` compiles it (torch.compile) at the first call, with dynamic sizes, so
    that another batch or video size needs no second compilation. Values that depend only on conditions and sizes are
    cached as long as the `Conditioning` lives (not in a compiled network, whose graph computes them).
    """

    def __init__(
        self,
        dit: SavedNetwork,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        compile: bool = False,
        load: Callable[..., None] = load_adapter,
    ) -> None:
        super().__init__(dit, load)
        self.device = torch.device(device)
        self.dtype = dtype
        self._denoiser = EDMDenoiser(dit).to(self.device, dtype).eval()
        self._is_compiled = compile
        self._seen: ObjectCache[Conditioning, dict[torch.Size, Prepared]] = ObjectCache()
        if compile:
            self._denoiser.compile(dynamic=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is compiled again."""
        self.__dict__.update(state)
        if self._is_compiled:
            self._denoiser.compile(dynamic=True)

    @torch.no_grad()  # not inference_mode: what the network caches for a layout must stay usable in training
    def __call__(self, x_BCTHW: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Clean latents x0 (float32, on `device`); inputs may be on any device."""
        here, layout, scales = self._prepared(conditioning, x_BCTHW.shape[2:])
        self._scale_adapters(scales)
        return self._denoiser(x_BCTHW.to(self.device), levels_on(sigma_B, self.device), here, layout)

    def _prepared(self, conditioning: Conditioning, size: torch.Size) -> Prepared:
        if self._is_compiled:
            return Prepared(conditioning.to(self.device, self.dtype), None, {})
        by_size = self._seen.setdefault(conditioning, {})
        if size not in by_size:
            here = conditioning.to(self.device, self.dtype)
            layout = self.dit.dense_layout(here, size, self.device, TensorCache(CACHE_BYTES))
            scales = {name: _scale(scale_B) for name, scale_B in here.adapter_scale_B.items()}
            by_size[size] = Prepared(here, layout, scales)
        return by_size[size]


def _scale(scale_B: Tensor) -> float | Tensor:
    """A number if all videos of a batch have the same scale: with 0, the result is the base's to the last bit."""
    return scale_B[0].item() if (scale_B == scale_B[0]).all() else scale_B


def find_device(name: str) -> torch.device:
    """The device of this name; `auto` is the GPU if there is one, else the CPU.

    Raises:
        UserError: for an unknown name, or a missing GPU.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):  # others lack the sampler's float64
        raise UserError(f"device {name!r} cannot be used; choose auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name!r} is not there: torch sees {torch.cuda.device_count()} GPUs; use auto or cpu")
    return device


def use_device(name: str) -> torch.device:
    """`find_device`, which becomes the current GPU of this thread: a command's kernels, streams and tensors on "cuda"
    are its, and nothing is allocated on GPU 0 beside it. On a CPU, variants are those that were faster there.

    Raises:
        UserError: as `find_device`.
    """
    device = find_device(name)
    if device.type == "cpu":
        tune_for_cpu()
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def find_dtype(name: str) -> torch.dtype:
    """The floating-point type of this name.

    Raises:
        UserError: for an unknown name.
    """
    return DTYPES[choose_one(name, DTYPES, f"dtype {name!r} is unknown")]


def one_behind(
    function: Callable[[Item], Iterable[Result]], items: Iterable[Item], device: torch.device
) -> Iterator[list[Result]]:
    """All results of function(item), in order: a thread computes them while the next item is made.

    On a GPU the thread uses a separate stream, so items must be complete. An error while making an item is raised after
    the results of the items before it.
    """
    items = iter(items)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def compute(item: Item) -> list[Result]:
        with torch.cuda.stream(stream), float32_by_default():
            return list(function(item))

    with ThreadPoolExecutor(max_workers=1) as thread:
        last = None
        while True:
            try:
                item = next(items)
            except StopIteration:
                break
            except Exception:
                if last is not None:
                    yield last.result()
                raise
            found, last = last, thread.submit(compute, item)
            if found is not None:
                yield found.result()
        if last is not None:
            yield last.result()


@contextmanager
def float32_by_default() -> Iterator[None]:
    """Context in which torch's default is float32; the last one to end restores what was before the first."""
    with _lock:
        _within.append(_within[0] if _within else torch.get_default_dtype())
        if torch.get_default_dtype() != torch.float32:
            torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        with _lock:
            before = _within.pop()
            if not _within and before != torch.float32:
                torch.set_default_dtype(before)


def each_in_float32(generator: Callable[..., Iterator[Item]]) -> Callable[..., Iterator[Item]]:
    """Decorates a generator whose items are each computed within `float32_by_default`; between items, the caller's
    default applies."""

    @wraps(generator)
    def made(*args: Any, **named: Any) -> Iterator[Item]:
        return _each(generator(*args, **named))

    return made


def _each(items: Iterator[Item]) -> Iterator[Item]:
    try:
        while True:
            with float32_by_default():
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item
    finally:
        items.close()
