"""Inputs and outputs of an exported network: graphs, engines and runtimes are checked against this description.

It is written next to the files (`settings.json`), so that a copied folder is complete.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json

SETTINGS_FILE = "settings.json"
SETTINGS_VERSION = 3
CONDITIONING_INPUTS = ("clean", "is_clean", "times")
"""Inputs of denoisers that were trained with conditioning tokens among the latents; others have none of them."""
CHANNEL_INPUTS = ("clean", "is_clean", "image")
"""Inputs of denoisers with conditioning in extra channels; `image` only where they read features of images."""
DENOISERS = ("denoiser", "low_noise_denoiser")
"""The network of a bundle (or its high-noise expert), and the low-noise expert (`Bundle.networks`)."""
TOWERS = ("image_tower", "text_tower")
"""Networks of a CLIP model."""
INPUTS: dict[str, tuple[str, ...]] = {
    "text_encoder": ("tokens", "mask"),
    **dict.fromkeys(
        DENOISERS, ("x", "sigma", "text", "text_length", "fps", "guidance", "pooled", *CONDITIONING_INPUTS, "image")
    ),
    "video_decoder": ("latents",),
    "video_encoder": ("video",),
    "classifier": ("x",),
    "image_tower": ("x",),
    "text_tower": ("tokens", "length"),
}
"""Names of the inputs of each exported network, in order; a network has those of its `NetworkSpec`. Adapter inputs come
after them (`models/lora/inputs.py`)."""
OUTPUTS = {
    "text_encoder": "features",
    **dict.fromkeys(DENOISERS, "x0"),
    "video_decoder": "video",
    "video_encoder": "latents",
    "classifier": "logits",
    **dict.fromkeys(TOWERS, "features"),
}
Extreme = Literal["min", "opt", "max"]
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """Dynamic axis: min <= size <= max, and size = offset + a multiple of step."""

    name: str
    min: int
    opt: int
    """The size to optimize for."""
    max: int
    step: int = 1
    offset: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.opt <= self.max:
            raise UserError(f"{self.name}: {self.min} <= {self.opt} <= {self.max} must hold for min, opt and max")
        for size in (self.min, self.opt, self.max):
            if (size - self.offset) % self.step:
                rule = f"{self.offset} + a multiple of {self.step}" if self.offset else f"a multiple of {self.step}"
                raise UserError(f"{self.name}: {size} must be {rule}")

    @property
    def is_fixed(self) -> bool:
        """Whether it has one size, for which a graph is then made."""
        return self.min == self.max

    def nearest(self, size: int) -> int:
        """The nearest size that `admits`."""
        return min(max(size, self.min), self.max)

    def admits(self, size: int) -> bool:
        return self.min <= size <= self.max and (size - self.offset) % self.step == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    name: str
    dtype: str
    """Name of the dtype in torch and numpy."""
    axes: tuple[Axis | int, ...]
    """Dynamic axes, and the sizes of fixed ones."""
    below: int | None = None
    """Number of valid values, for indices."""

    def shape(self, sizes: Mapping[str, int]) -> Shape:
        """Return the shape with these sizes of the dynamic axes."""
        return tuple(axis if isinstance(axis, int) else sizes[axis.name] for axis in self.axes)

    def shape_at(self, extreme: Extreme) -> Shape:
        return tuple(axis if isinstance(axis, int) else getattr(axis, extreme) for axis in self.axes)


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkSpec:
    name: str
    inputs: tuple[TensorSpec, ...]
    output: str

    @property
    def is_denoiser(self) -> bool:
        return self.name in DENOISERS

    @property
    def axes(self) -> dict[str, Axis]:
        """The dynamic axes of all inputs, by name."""
        return {axis.name: axis for tensor in self.inputs for axis in tensor.axes if isinstance(axis, Axis)}

    def check(self, shapes: Mapping[str, Shape], rebuild: str) -> None:
        """Refuses sizes that were not exported; `rebuild` is the remedy in the message.

        Raises:
            UserError: the message names the tensor and the axis.
        """
        for tensor in self.inputs:
            for place, (axis, size) in enumerate(zip(tensor.axes, shapes[tensor.name], strict=True)):
                if isinstance(axis, int) and axis != size:
                    raise UserError(f"{self.name}: axis {place} of {tensor.name} is {size}, not {axis}")
                if isinstance(axis, Axis) and not axis.admits(size):
                    raise UserError(
                        f"{self.name}: {axis.name} is {size} in {tensor.name}, but was exported for {axis.min} to "
                        f"{axis.max}" + (f" in steps of {axis.step}" if axis.step > 1 else "") + f"; {rebuild}"
                    )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "NetworkSpec":
        inputs = tuple(
            TensorSpec(
                name=tensor["name"],
                dtype=tensor["dtype"],
                axes=tuple(axis if isinstance(axis, int) else Axis(**axis) for axis in tensor["axes"]),
                below=tensor.get("below"),
            )
            for tensor in values["inputs"]
        )
        return cls(name=values["name"], inputs=inputs, output=values["output"])


@dataclass(frozen=True, slots=True)
class ExportedNetworks:
    """The folder `onnx/` or `plan/` of a bundle."""

    directory: Path
    settings: dict[str, Any]
    """The contents of settings.json."""

    @classmethod
    def open(cls, directory: Path, source: str, command: str) -> "ExportedNetworks":
        """Reads the folder's settings; `source` is the checksum of the weights that it must have been made from,
        `command` what makes it.

        Raises:
            UserError: if there is no such folder, a newer version wrote it, or it was made from other weights.
        """
        bundle = directory.parent
        if not (directory / SETTINGS_FILE).is_file():
            raise UserError(f"{bundle} has no {directory.name}/: make a bundle that has it with {command}")
        settings = read_json(directory / SETTINGS_FILE)
        if settings.get("format_version", 0) > SETTINGS_VERSION:
            raise UserError(f"{directory} was written by a newer version of megadit: upgrade, or run {command}")
        if settings["source"] != source:
            raise UserError(f"{directory} was made from other weights than {bundle / 'transformer'}: run {command}")
        return cls(directory, settings)

    def network(self, name: str) -> NetworkSpec:
        return NetworkSpec.from_dict(self.settings["networks"][name])

    @property
    def rebuild(self) -> str:
        """Remedy for a size that was not exported."""
        return f"export again with --profile ({self.directory.parent})"
