"""The conditioning of a batch: text, image and class features, conditioning latents, frame rate, guidance scale.

Shapes: B batch, C latent channels, T/H/W latent frames/height/width, L text tokens, E feature width, P width of a
pooled feature, I image tokens, M mask channels.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from einops import reduce
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from megadit.models.configs.config import DiTConfig
from megadit.models.host_to_device import sent_as_one, sent_together
from megadit.models.packing.segments import Segment


@dataclass(frozen=True, slots=True, eq=False)
class CleanLatents:
    """Conditioning latents of a batch: clean latents among the noisy ones, at the same positions in all videos."""

    latents_BCTHW: Tensor
    """float32: latents of the video, then of extra conditioning frames; read only where `is_clean_THW` is True."""
    is_clean_THW: Tensor
    """bool: True where the latents are conditioning."""
    extra_times: tuple[float, ...] = ()
    """Times of the extra conditioning frames, in latent frames of the video."""
    marks_MTHW: Tensor | None = None
    """bool: which of a latent's M pixel frames are conditioning; None: all or none, as `is_clean_THW` says."""

    @property
    def size(self) -> tuple[int, int, int]:
        """(T, H, W) of the video with its extra conditioning frames."""
        return tuple(self.is_clean_THW.shape)

    def among(self, x_BCTHW: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        """Put the conditioning latents, times `scale` (a number or [1 or B, 1, 1, 1, 1]), into `x_BCTHW`, and extra
        frames after it."""
        extra = self.size[0] - x_BCTHW.shape[2]
        return torch.where(self.is_clean_THW, scale * self.latents_BCTHW, F.pad(x_BCTHW, (0, 0, 0, 0, 0, extra)))

    def channels(self, config: DiTConfig) -> Tensor:
        """Return the extra channels, float32 [B, M or M + C, T, H, W]: mask, then latents unless these are tokens."""
        marks_MTHW = self.is_clean_THW[None] if self.marks_MTHW is None else self.marks_MTHW
        size = (self.latents_BCTHW.shape[0], config.conditioning.marks, *self.size)
        marks_BMTHW = marks_MTHW.to(self.latents_BCTHW).expand(size)
        return marks_BMTHW if config.conditioning.is_among else torch.cat([marks_BMTHW, self.latents_BCTHW], dim=1)

    def of_whole_tokens(self, config: DiTConfig) -> "CleanLatents":
        """The same without latents of tokens that are conditioning in part: in training, all of such a token is noisy.

        Raises:
            UserError: if the latents are not a whole number of patches.
        """
        grid, is_clean_THW = config.token_grid(*self.size), on_host(self.is_clean_THW)
        is_whole_THW = conditioning_tokens(is_clean_THW, config).bool().view(grid)
        for axis, (size, count) in enumerate(zip(self.size, grid, strict=True)):
            is_whole_THW = is_whole_THW.repeat_interleave(size // count, axis)
        if torch.equal(is_whole_THW, is_clean_THW):
            return self
        [there_THW] = sent_together([is_whole_THW], self.is_clean_THW.device)
        return replace(self, is_clean_THW=there_THW)

    def to(self, device: torch.device | str) -> "CleanLatents":
        tensors = {name: getattr(self, name) for name in ("latents_BCTHW", "is_clean_THW", "marks_MTHW")}
        return replace(self, **sent_as_one(tensors, device))

    @property
    def places(self) -> Hashable:
        """A key that is equal for two conditionings exactly if they have the same mask and the same times."""
        masks = (mask for mask in (self.is_clean_THW, self.marks_MTHW) if mask is not None)
        return self.extra_times, *((tuple(mask.shape), on_host(mask).numpy().tobytes()) for mask in masks)

    def segment(self, config: DiTConfig, text_length: int = 0) -> Segment:
        """A sample with these conditioning latents; a token is conditioning if all of its latents are, and has the time
        of the first.

        Raises:
            UserError: if the latents are not a whole number of patches.
        """
        grid, extra_times = config.token_grid(*self.size), self.extra_times
        times = (*map(float, range(self.size[0] - len(extra_times))), *extra_times) if extra_times else ()
        edges = F.pad(conditioning_tokens(on_host(self.is_clean_THW), config), (1, 1)).diff().nonzero()[:, 0].tolist()
        clean, patch = tuple(zip(edges[::2], edges[1::2], strict=True)), config.patch_temporal
        return Segment(grid, text_length, clean=clean, times=tuple(time / patch for time in times[::patch]))

    @classmethod
    def nothing(cls, x_BCTHW: Tensor) -> "CleanLatents":
        """An all-False mask for videos like `x_BCTHW`."""
        return cls(torch.zeros_like(x_BCTHW), torch.zeros(x_BCTHW.shape[2:], dtype=torch.bool, device=x_BCTHW.device))

    @staticmethod
    def concatenate(parts: "list[CleanLatents | None]") -> "CleanLatents | None":
        """Concatenate batches that have the same `places`, or no conditioning latents."""
        first, *_ = parts
        return first and replace(first, latents_BCTHW=torch.cat([part.latents_BCTHW for part in parts]))


_ON_HOST = WeakTensorKeyDictionary()


def on_host(mask: Tensor) -> Tensor:
    """A mask of any shape on the CPU; the host waits for its device once."""
    if mask.is_cpu or torch.compiler.is_compiling():
        return mask.cpu()
    if mask not in _ON_HOST:
        _ON_HOST[mask] = mask.cpu()
    return _ON_HOST[mask]


def conditioning_tokens(is_clean_THW: Tensor, config: DiTConfig) -> Tensor:
    """int32 [S]: 1 for each token whose latents are all conditioning (bool THW), else 0."""
    patch = {"pt": config.patch_temporal, "ph": config.patch_spatial, "pw": config.patch_spatial}
    return reduce(is_clean_THW.int(), "(T pt) (H ph) (W pw) -> (T H W)", "min", **patch)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Conditioning:
    """The conditioning of a batch of videos, compared by identity."""

    text_BLE: Tensor
    """Text features, L >= 1; rows beyond each length are ignored."""
    text_length_B: Tensor
    """int64, 0..L. 0 means no text: one learned null token stands in."""
    fps_B: Tensor
    """float32, frames per second of the decoded video; 0 for images."""
    adapter_scale_B: Mapping[str, Tensor] = field(default_factory=dict)
    """Adapter name -> scale for each video, float32; other adapters have scale 0."""
    clean: CleanLatents | None = None
    """Conditioning latents; None: none."""
    image_BIE: Tensor | None = None
    """Features of a conditioning image (I tokens, E wide), for networks that attend to them."""
    pooled_BP: Tensor | None = None
    """Pooled text features, for networks that read them."""
    guidance_B: Tensor | None = None
    """float32: the guidance scale (guidance embedding of guidance-distilled networks); None for others."""

    def __len__(self) -> int:
        return self.text_BLE.shape[0]

    @property
    def text_mask_BL(self) -> Tensor:
        """bool: True where a text token may be attended; always the first, which the null token replaces without
        text."""
        slot_L = torch.arange(self.text_BLE.shape[1], device=self.text_BLE.device)
        return slot_L < self.text_length_B.clamp(min=1)[:, None]

    def segment(self, config: DiTConfig, size: tuple[int, int, int]) -> Segment:
        """Return one sample with latents of this size (T, H, W) and its conditioning latents, without its text.

        Raises:
            UserError: if the latents are not a whole number of patches.
        """
        if self.clean is None or not config.conditioning.is_among:
            return Segment(config.token_grid(*size), 0)
        return self.clean.segment(config)

    def null(self) -> "Conditioning":
        """The same videos without their text."""
        pooled_BP = None if self.pooled_BP is None else torch.zeros_like(self.pooled_BP)
        return replace(self, text_length_B=torch.zeros_like(self.text_length_B), pooled_BP=pooled_BP)

    def at(self, places: list[int]) -> "Conditioning":
        """Return the conditioning of the videos at `places`."""
        clean = self.clean and replace(self.clean, latents_BCTHW=self.clean.latents_BCTHW[places])
        return Conditioning(**tree_map_only(Tensor, lambda x_B: x_B[places], self._batched), clean=clean)

    @property
    def _batched(self) -> dict[str, Any]:
        """All fields but the conditioning latents."""
        kept = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "clean"}
        return kept | {"adapter_scale_B": dict(self.adapter_scale_B)}

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Conditioning":
        """Copy to another device without waiting; `dtype` is that of text and image features."""
        text, image, pooled = (
            x if x is None or dtype is None else x.to(dtype) for x in (self.text_BLE, self.image_BIE, self.pooled_BP)
        )
        parts = self._batched | {"text_BLE": text, "image_BIE": image, "pooled_BP": pooled}
        return Conditioning(**sent_as_one(parts, device), clean=self.clean and self.clean.to(device))

    @staticmethod
    def concatenate(parts: "list[Conditioning]") -> "Conditioning":
        """One batch from several with the same adapters and conditioning positions, whose texts may differ in
        length."""
        longest = max(part.text_BLE.shape[1] for part in parts)
        padded = [F.pad(part.text_BLE, (0, 0, 0, longest - part.text_BLE.shape[1])) for part in parts]
        each = [part._batched | {"text_BLE": text_BLE} for part, text_BLE in zip(parts, padded, strict=True)]
        joined = tree_map(lambda *x_B: None if x_B[0] is None else torch.cat(x_B), *each)
        return Conditioning(**joined, clean=CleanLatents.concatenate([part.clean for part in parts]))
