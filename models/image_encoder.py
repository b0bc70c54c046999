"""Features of a conditioning image by a published CLIP (arXiv 2103.00020), through `transformers`, for Wan 2.1.

Shapes: I tokens, E feature width.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megadit.models.bundle import components as parts
from megadit.models.bundle import hub
from megadit.models.bundle.pretrained import PRETRAINED, Encoder, check_encoder, load_encoder, transformers_library
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json

_FILES = "config.json, model.safetensors and preprocessor_config.json"
_ENCODER = Encoder(
    marks=("vision_model.post_layernorm.weight", "post_layernorm.weight"),
    others=r"^(text_model|text_projection|visual_projection|logit_scale)\b|position_ids$",
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImageEncoder:
    """Features of the layer before the last, one for each patch and one for the whole."""

    model: str
    """Directory, or name in the hub's cache, of a CLIP; of a pipeline, whose `image_encoder/` and `image_processor/`
    these are."""
    _loaded: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def dim(self) -> int:
        """Width E of the features.

        Raises:
            UserError: if the directory is no CLIP of images.
        """
        return self._settings()["hidden_size"]

    @property
    def num_tokens(self) -> int:
        """Their number I; raises as `dim`."""
        values = self._settings()
        return 1 + (values["image_size"] // values["patch_size"]) ** 2

    @torch.no_grad()
    def encode(self, image_HWC: np.ndarray) -> Tensor:
        """float32 [1, I, E] on the CPU, of an image of any size (uint8 HWC)."""
        prepare, network = self._networks()
        pixels = prepare(images=image_HWC, return_tensors="pt").pixel_values.to(network.device, network.dtype)
        return network(pixels, output_hidden_states=True).hidden_states[-2].float().cpu()

    def to(self, device: torch.device) -> "ImageEncoder":
        """This encoder, whose network computes on `device` when it is loaded."""
        self._loaded["device"] = device
        return self

    def check(self) -> None:
        """Raises UserError for files of weights that are not those of a CLIP of images, by name."""
        network_class = transformers_library("an image encoder").CLIPVisionModel
        check_encoder(network_class, self._directory("image_encoder"), _ENCODER, _FILES)

    def save(self, directory: str | os.PathLike) -> None:
        """Writes the name of the model: its weights stay where they are."""
        parts.write_part(directory, {"type": "clip", "model": self.model}, {})

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "ImageEncoder":
        """The inverse of `save`.

        Raises:
            UserError: if config.json is missing or has other settings.
        """
        parts.part_type(directory, "image encoder", ["clip"])
        return cls(**parts.read_settings(directory, ["model"]))

    def _settings(self) -> dict[str, Any]:
        values = read_json(self._directory("image_encoder") / parts.CONFIG_FILE)
        if values.get("model_type") != "clip_vision_model":
            raise UserError(f"{self.model} is a model of type {values.get('model_type')!r}, not clip_vision_model")
        return values

    def _directory(self, part: str) -> Path:
        root = hub.local_directory(self.model, "image encoder", _FILES)
        return root / part if (root / part).is_dir() else root

    def _networks(self) -> tuple[Any, Any]:
        """Return the image processor and the network; both are loaded once."""
        if "network" not in self._loaded:
            library, directory = transformers_library("an image encoder"), self._directory("image_encoder")
            try:
                prepared_by = self._directory("image_processor")
                prepare = library.CLIPImageProcessor.from_pretrained(prepared_by, **PRETRAINED)
                network = load_encoder(library.CLIPVisionModel, directory, _ENCODER, _FILES)
                place = self._loaded.get("device", torch.device("cpu"))
                self._loaded.update(prepare=prepare, network=network.float().to(place))
            except (OSError, ValueError) as error:
                reason = str(error).split("\n")[0]
                raise UserError(f"{directory} cannot be loaded ({reason}); needs {_FILES}") from error
        return self._loaded["prepare"], self._loaded["network"]
