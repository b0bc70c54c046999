"""The denoiser in torch, on the CPU or a GPU."""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megadit.models.conditioning import Conditioning
from megadit.models.denoiser import EDMDenoiser
from megadit.models.dit import DiT
from megadit.models.layout import DenseLayout, Kept
from megadit.models.shared.errors import UserError, choose_one

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
Prepared = tuple[Conditioning, DenseLayout | None]
"""Conditions where and in what precision the network takes them; the layout that keeps what is computed of them."""


KEPT_BYTES = 2**28
"""Memory for what is computed once for all noise levels of a batch: most of it are keys and values of the text."""


class TorchDenoiser:
    """D(x; sigma) by torch: the network in `dtype`, without autocast; its preconditioning in float32.

    Takes `dit` over: it is moved and cast in place. `compile` compiles it (torch.compile) at the first call, with sizes
    left open, so that another batch or video size takes no second compilation. What depends on conditions and sizes
    alone is kept as long as the `Conditioning` lives (not where it is compiled: the graph computes it).
    """

    def __init__(
        self,
        dit: DiT,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        compile: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self._denoiser = EDMDenoiser(dit).to(self.device, dtype).eval()
        self._is_compiled = compile
        self._seen: WeakKeyDictionary[Conditioning, dict[torch.Size, Prepared]] = WeakKeyDictionary()
        if compile:
            self._denoiser.compile(dynamic=True)

    @torch.no_grad()  # not inference_mode: what the network caches for a layout must stay usable in training
    def __call__(self, x_BCTHW: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Clean latents x0 (float32, on `device`); the inputs may lie anywhere."""
        here, layout = self._prepared(conditioning, x_BCTHW.shape[2:])
        return self._denoiser(x_BCTHW.to(self.device), sigma_B.to(self.device), here, layout)

    def _prepared(self, conditioning: Conditioning, size: torch.Size) -> Prepared:
        if self._is_compiled:
            return conditioning.to(self.device, self.dtype), None
        by_size = self._seen.setdefault(conditioning, {})
        if size not in by_size:
            here = conditioning.to(self.device, self.dtype)
            layout = self._denoiser.dit.dense_layout(here, size, self.device, Kept(KEPT_BYTES))
            by_size[size] = here, layout
        return by_size[size]


def find_device(name: str) -> torch.device:
    """The device of this name; `auto` is the GPU where there is one, else the CPU.

    Raises:
        UserError: for an unknown name, or a GPU that is not there.
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


def find_dtype(name: str) -> torch.dtype:
    """The floating-point type of this name.

    Raises:
        UserError: for an unknown name.
    """
    return DTYPES[choose_one(name, DTYPES, f"dtype {name!r} is unknown")]
