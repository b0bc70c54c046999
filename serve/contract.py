"""Contract between clients and the service: the inputs of a request.

Nothing here imports torch: a client machine does not need it.
"""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import Any

from megadit.models.diffusion.conditioning_settings import (
    CONDITIONING,
    MEDIA,
    MediaLimits,
    check_combination,
    plain_bytes,
    split_keyframe,
)
from megadit.models.diffusion.settings import SERVED, ServedSettings, switched_off
from megadit.models.lora.named import check_name, of_expert, parse_adapters, shown_name, split_expert
from megadit.models.shared.cli.setting import check_value, other_names, setting, settings_of, under_own_names
from megadit.models.shared.errors import UserError, did_you_mean

MODEL = "text_to_video"
IMAGE_MODEL = "text_to_image"


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """One input tensor of the Triton model: next to the batch axis a single value, or a list of values."""

    name: str
    data_type: str
    """Name of the data type in Triton's configuration."""
    is_required: bool = False
    is_media: bool = False
    """Whether its values are files: their bytes, or a data URL; an empty value means none."""
    is_list: bool = False


def _conditioning_field(name: str) -> tuple[str, Any, Any]:
    """Dataclass field of a conditioning option: the bytes of a file instead of its path."""
    about = CONDITIONING[name]
    if name not in MEDIA:
        return name, about.type | None, field(default=None)
    return name, (bytes if about.count is None else tuple[bytes, ...]) | None, field(default=None, repr=False)


_PartialSettings = make_dataclass(
    "_PartialSettings",
    map(_conditioning_field, CONDITIONING),
    bases=(ServedSettings,),
    frozen=True,
    kw_only=True,
    slots=True,
)
_NOTHING = {bytes: b"", str: "", int: 0, float: 0.0}


def _nothing(name: str) -> Any:
    """Value of a conditioning option, or of adapters, that is left out."""
    if name == "adapters":
        return ("",)
    if name not in MEDIA:
        return _NOTHING[CONDITIONING[name].type]
    return b"" if CONDITIONING[name].count is None else (b"",)


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoRequest(_PartialSettings):
    """Request of a client: prompt, settings, conditioning (`ConditioningOptions`, files as bytes); None means the
    service's default, from the bundle."""

    prompt: str = setting("", help="text that describes the video", positional=True, metavar="PROMPT")
    seed: int | None = setting(None, "seed of the first video; further ones count up from it (default: 0)")
    num_videos: int | None = setting(None, "number of videos to generate from the prompt (default: 1)")
    preview_every: int | None = None
    """A preview with the first step and then every `preview_every` steps; None or 0: never."""
    evaluate: bool = setting(False, "also return scores of each video (needs a service with a scorer, --scorer_dir)")
    adapters: tuple[str, ...] | None = setting(
        None,
        "an adapter of the service and its scale (default: 1); repeat for several; high=NAME or low=NAME: for the "
        "high-noise or low-noise expert alone",
        names=("--adapter",),
        repeated=True,
        metavar="NAME:SCALE",
    )

    @classmethod
    def from_inputs(cls, inputs: Mapping[str, Any]) -> "VideoRequest":
        """The request of these input tensors, one value each. Raises UserError for an unknown or missing input, or an
        input under two of its names."""
        known = {each.name: each for each in INPUTS}
        for name in inputs:
            if name not in known:
                raise UserError(f"unknown input {name!r}{did_you_mean(name, known)}")
        values = under_own_names(inputs, SERVED)
        for name in values.keys() & set(MEDIA):
            files = values[name] if known[name].is_list else (values[name],)
            files = tuple(map(_keyframe_of if name == "keyframe" else plain_bytes, files))
            values[name] = files if known[name].is_list else files[0]
        if "prompt" not in values:
            raise UserError("the input 'prompt' is missing")
        return cls(**values)

    def filled(self, defaults: Mapping[str, Any], eta_samplers: Collection[str] = ()) -> "VideoRequest":
        """The same request with nothing left out, by a service's sampling defaults.

        `eta_samplers` are the service's samplers that can add noise: others run without the default eta.
        """
        sent, settings = self.to_inputs(), {name: defaults[name] for name in SERVED if name in defaults}
        off = switched_off(defaults, sent, eta_samplers)
        settings |= {name: value for name, value in off.items() if name in settings}
        settings |= {name: _nothing(name) for name in (*CONDITIONING, "adapters")}
        return VideoRequest(**settings | {"seed": 0, "num_videos": 1, "preview_every": 0} | sent)

    def to_inputs(self) -> dict[str, Any]:
        """The inputs to send: those that are not None."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    @property
    def text(self) -> str:
        """Text that the network sees: the prompt, or the instruction that replaces it."""
        return self.prompt or self.instruction or ""

    def sent(self) -> dict[str, Any]:
        """Conditioning of the video: the values of `ConditioningOptions`, None where one is left out."""
        values = {name: getattr(self, name) for name in CONDITIONING}
        return {name: None if value in (None, _nothing(name), ()) else value for name, value in values.items()}

    def adapter_scales(self) -> dict[str, float]:
        """Name -> scale of the adapters; `high=NAME` or `low=NAME` is for one of two experts. Raises UserError for an
        invalid name, a scale that is not finite, and an adapter that is given twice."""
        scales = parse_adapters(list(filter(None, self.adapters or ())))
        for name in scales:
            check_name(split_expert(name)[1])
        return scales

    def shown_adapters(self) -> dict[str, Any]:
        """`adapters` in the form of results; {} if there are none."""
        scales = {split_expert(name): scale for name, scale in self.adapter_scales().items()}
        adapters = [{"name": of_expert(of, shown_name(name)), "scale": scale} for (of, name), scale in scales.items()]
        return {"adapters": adapters} if adapters else {}

    def without_media(self) -> "VideoRequest":
        """The same request without its files."""
        return dataclasses.replace(self, **dict.fromkeys(MEDIA))

    def media(self) -> dict[str, Any]:
        """Name -> file of the request; `keyframe` has several."""
        return {name: value for name, value in self.sent().items() if name in MEDIA and value is not None}

    def check_conditioning(self, conditionings: Collection[str], limits: MediaLimits) -> None:
        """Check the conditioning before any file is read.

        `conditionings` are those that the network was trained with.

        Raises:
            UserError: for conditioning that excludes each other, is not supported, or is too large.
        """
        sent = self.sent()
        for name, value in sent.items():
            if name not in MEDIA and value is not None:
                check_value(CONDITIONING[name], name, value)
        for keyframe in sent["keyframe"] or ():
            split_keyframe(keyframe)
        check_combination(sent, self.prompt, conditionings)
        files = ((value,) if isinstance(value, bytes) else value for value in self.media().values())
        size = sum(len(file) for several in files for file in several)
        if size > limits.max_media_bytes:
            raise UserError(f"the files have {size:,} bytes; this service takes {limits.max_media_bytes:,}")


def _keyframe_of(value: bytes) -> bytes:
    """NUMBER:FILE with the file's bytes; empty stays empty."""
    if not value:
        return value
    number, file = split_keyframe(value)
    return b"%d:%b" % (number, plain_bytes(file))


_DATA_TYPES = {str: "TYPE_STRING", int: "TYPE_INT32", float: "TYPE_FP32", bool: "TYPE_BOOL"}


def _inputs() -> tuple[Input, ...]:
    """Inputs of the model: one for each field of a request, and one for each alias."""
    types = {"prompt": "TYPE_STRING"}
    types |= {name: _DATA_TYPES[about.type] for name, about in settings_of(VideoRequest).items()}
    types |= {"preview_every": "TYPE_INT32", "seed": "TYPE_INT64"}
    types |= {name: _DATA_TYPES[about.type] for name, about in CONDITIONING.items()}
    lists = {name for name, about in (settings_of(VideoRequest) | CONDITIONING).items() if about.count is not None}
    plain = [
        Input(name=name, data_type=kind, is_required=name == "prompt", is_media=name in MEDIA, is_list=name in lists)
        for name, kind in types.items()
    ]
    others = [Input(name=name, data_type=types[own]) for name, own in other_names(SERVED).items()]
    return (*plain, *others)


INPUTS = _inputs()
