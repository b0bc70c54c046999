"""Description of a service for its clients, and the limits of a request."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megadit.models.diffusion.conditioning_settings import CONDITIONING, MEDIA, MediaLimits
from megadit.models.diffusion.settings import check_embedded_guidance
from megadit.models.lora.named import EXPERTS, of_expert, split_expert
from megadit.models.shared.cli.setting import setting, settings_of
from megadit.models.shared.errors import UserError
from megadit.models.shared.words import far_longer
from megadit.serve.contract import VideoRequest

MIN_FPS, MAX_FPS = 1, 240
_FREE_SHARE = 0.25
"""Size of a request's adapters below which they do not count as work, as a fraction of the network's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits(MediaLimits):
    """Limits of one request; requests beyond them are refused before any work."""

    max_prompt_characters: int = setting(2000, "characters of a prompt (default: {default})", low=1, metavar="N")
    max_text_tokens: int = setting(512, "tokens that a prompt may become (default: {default})", low=1, metavar="N")
    """The cost depends on tokens, not on characters."""
    max_adapters: int = setting(4, "adapters of a request (default: {default})", low=0, metavar="N")
    max_adapter_bytes: int = setting(1 << 30, "bytes of an adapter's files (default: 1 GiB)", low=1, metavar="N")
    max_adapter_rank: int = setting(512, "rank of an adapter (default: {default})", low=1, metavar="N")
    max_videos: int = setting(4, "videos of a request (default: {default})", low=1, metavar="N")
    max_frames: int = setting(help="frames of a video", low=1, metavar="N")
    max_pixels: int = setting(help="frames x height x width of a video", low=1, metavar="N")
    """Bounds the memory."""
    max_work: int = setting(help="frames x height x width x steps of all its videos", low=1, metavar="N")
    """Bounds the time."""

    def check_texts(self, request: VideoRequest) -> None:
        """Raises UserError if a text of the request is too long or holds control characters."""
        for name, about in (settings_of(VideoRequest) | CONDITIONING).items():
            if about.type is str and about.count is None and name not in MEDIA:
                self.check_text(name, getattr(request, name) or "")

    def check_adapters(self, scales: Mapping[str, float]) -> None:
        """Raises UserError if a request has too many adapters."""
        if len(scales) > self.max_adapters:
            raise UserError(f"{len(scales)} adapters; this service supports up to {self.max_adapters} a request")

    def check_adapter(self, rank: int, num_bytes: int) -> None:
        """Raises UserError for an adapter of too high a rank, or of too many bytes in memory."""
        if rank > self.max_adapter_rank:
            raise UserError(f"it has rank {rank}; this service supports up to {self.max_adapter_rank}")
        if num_bytes > self.max_adapter_bytes:
            raise UserError(f"it takes {num_bytes:,} bytes of memory; this service allows {self.max_adapter_bytes:,}")

    def check_text(self, name: str, text: str) -> None:
        """Raises UserError if a text is too long or holds control characters."""
        if len(text) > self.max_prompt_characters:
            raise UserError(f"{name} has {len(text):,} characters; this service takes {self.max_prompt_characters:,}")
        control = next((character for character in text if ord(character) < 32 and character not in "\t\n\r"), None)
        if control is not None:
            raise UserError(f"{name} holds the control character U+{ord(control):04X}; leave it out")

    def check_tokens(self, num_tokens: int) -> None:
        """Raises UserError if a text of a request has too many tokens."""
        if num_tokens > self.max_text_tokens:
            raise UserError(
                f"a text of this request has {num_tokens:,} tokens; shorten it to the {self.max_text_tokens:,} that "
                "this service takes"
            )

    def check_size(
        self,
        *,
        num_videos: int,
        num_frames: int,
        height: int,
        width: int,
        fps: float,
        num_steps: int,
        adapter_share: float = 0.0,
    ) -> None:
        """`adapter_share`: parameters of the request's adapters divided by the network's; a few are free. Raises
        UserError if the request exceeds a limit."""
        if num_frames > 1 and not MIN_FPS <= fps <= MAX_FPS:
            raise UserError(f"fps={fps:g} is not between {MIN_FPS} and {MAX_FPS}")
        if not 1 <= num_videos <= self.max_videos:
            raise UserError(f"num_videos={num_videos} is not between 1 and {self.max_videos}")
        if num_frames > self.max_frames:
            raise UserError(f"num_frames={num_frames}; this service makes up to {self.max_frames} frames")
        pixels = num_frames * height * width
        if pixels > self.max_pixels:
            raise UserError(
                f"{num_frames} frames of {height}x{width} are {pixels:,} pixels; this service makes videos of up to "
                f"{self.max_pixels:,}: ask for fewer frames or a smaller size"
            )
        work = round(pixels * num_steps * num_videos * work_with(adapter_share))
        if work > self.max_work:
            raise UserError(
                f"{num_videos} x {num_frames} frames of {height}x{width} in {num_steps} steps are {work:,} pixel "
                f"steps{' with these adapters' if adapter_share > _FREE_SHARE else ''}; this service does up to "
                f"{self.max_work:,} a request: ask for fewer steps, frames or videos"
            )


def work_with(adapter_share: float) -> float:
    """Return the relative time of a video with adapters of this fraction of the network's parameters."""
    return max(1.0, 1.0 + adapter_share - _FREE_SHARE)


def calls_of(defaults: Mapping[str, Any], *, has_guidance_embedding: bool) -> int | None:
    """Network calls of a student for a video, by its sampling defaults: its own sigmas, without guidance or
    guidance-distilled; None if it is not a student."""
    is_student = defaults["sigmas"] and (has_guidance_embedding or defaults["guidance"] == 1)
    return defaults["num_steps"] if is_student else None


def calls_in_words(calls: int) -> str:
    """Return "4 calls" for 4; with underscores it is part of the name of a student's model."""
    return f"{calls} call{'s' * (calls > 1)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterInfo:
    """Adapters that a service supports."""

    names: tuple[str, ...]
    """Names when the service was built; others may be added later."""
    base: str
    """Fingerprint of the weights that an adapter must have been trained on, if it has one; for two experts both,
    separated by a space."""
    network: dict[str, Any]
    """The network's configuration, which an adapter must fit."""
    slots: dict[str, Any] | None = None
    """Adapter inputs that the network was exported with (`models/lora/inputs.py`); None: torch, any adapters."""
    max_rank: int | None = None
    """Highest rank of an adapter; None: no limit."""
    defaults: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name -> sampling settings that an adapter (a student) was trained for; other adapters have none."""

    @property
    def forms(self) -> tuple[str, ...]:
        """Prefixes of a name, which select one of two experts."""
        return ("", *(of_expert(expert, "") for expert in EXPERTS)) if " " in self.base else ("",)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceInfo:
    """Description of a service for its clients, written into the model's configuration."""

    defaults: dict[str, Any]
    """Sampling defaults of the bundle; with one frame if the model serves only images."""
    limits: Limits
    samplers: tuple[str, ...]
    size_multiple: int
    """Height and width must be multiples of it."""
    examples: tuple[str, ...] = ()
    """Prompts that show what the model can do."""
    eta_samplers: tuple[str, ...] = ()
    """Samplers, under all of their names, that can add noise between steps."""
    conditionings: tuple[str, ...] = ()
    """Conditionings that the network was trained with; some others can be imposed during sampling."""
    adapters: AdapterInfo | None = None
    """Adapters of the service; None: it supports none."""
    has_scorer: bool = False
    """Whether requests may ask for scores."""
    students: tuple[str, ...] = ()
    """Models of the same server that are students of this one."""
    guidance_embedding_range: tuple[float, ...] = ()
    """The lowest and the highest scale of a guidance-distilled network; (): guidance takes two passes."""
    longest_caption: int | None = None
    """Number of words in the longest training caption, where known."""

    def warning(self, request: VideoRequest) -> str | None:
        """Return what may be wrong with a valid request; adapters do not say how long their captions were."""
        return None if request.adapter_scales() else far_longer([request.text], self.longest_caption)

    @property
    def has_guidance_embedding(self) -> bool:
        return bool(self.guidance_embedding_range)

    def filled(self, request: VideoRequest) -> VideoRequest:
        """The request with nothing left out: by its adapters' settings, then the service's defaults."""
        known = {} if self.adapters is None else self.adapters.defaults
        scales = {split_expert(name)[1]: scale for name, scale in request.adapter_scales().items() if scale}
        asked = [known[name] for name in scales if name in known]
        return request.filled(self.defaults | (asked[0] if asked else {}), self.eta_samplers)

    def check_evaluate(self, request: VideoRequest) -> None:
        """Raises UserError if the request asks for scores and the service has no scorer."""
        if request.evaluate and not self.has_scorer:
            raise UserError("this service has no scorer, and gives no scores: it was built without --scorer_dir")

    def check_guidance(self, request: VideoRequest) -> None:
        """Raises UserError for a guidance scale outside of a guidance-distilled network's range."""
        if self.has_guidance_embedding:
            check_embedded_guidance(request.guidance, self.guidance_embedding_range)

    def check_adapters(self, request: VideoRequest) -> dict[str, float]:
        """Name -> scale of the adapters of a request. Raises UserError for invalid names and scales, and for more
        adapters than this service supports."""
        scales = request.adapter_scales()
        if scales and self.adapters is None:
            raise UserError("this service supports no adapters: it was built without --adapters")
        if of_one := [name for name in scales if split_expert(name)[0] and len(self.adapters.forms) == 1]:
            name = split_expert(of_one[0])[1]
            raise UserError(f"adapter {of_one[0]}: this service has one network for all noise levels: use {name}")
        self.limits.check_adapters(scales)
        return scales

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> "ServiceInfo":
        values = json.loads(text)
        names = ("samplers", "examples", "eta_samplers", "conditionings", "students", "guidance_embedding_range")
        lists = {name: tuple(values.get(name, ())) for name in names}
        if (adapters := values.get("adapters")) is not None:
            adapters = AdapterInfo(**adapters | {"names": tuple(adapters["names"])})
        return cls(**values | lists | {"limits": Limits(**values["limits"]), "adapters": adapters})
