"""Features of a conditioning image by a published CLIP (arXiv 2103.00020), through `transformers`, for Wan 2.1.

Shapes: I image tokens, E feature width.
"""

import math
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megadit.models.shared.errors import UserError, library_errors
from megadit.models.shared.files import read_json
from megadit.models.storage import components as parts
from megadit.models.storage import hub
from megadit.models.storage.pretrained import (
    PRETRAINED,
    Encoder,
    check_encoder,
    encoder_tensors,
    load_encoder,
    transformers_library,
)
from megadit.models.storage.tensor_source import Stored, TensorSource, renamed_by
from megadit.models.text_encoders.published import PublishedNetwork

RELEASED = "models_clip_*.pth"
"""Pattern of the file in Wan's original release."""
_FILES = "config.json, model.safetensors and preprocessor_config.json"
_NAMES = (
    (r"^cls_embedding$", "embeddings.class_embedding"),
    (r"^pos_embedding$", "embeddings.position_embedding.weight"),
    (r"^patch_embedding\.", "embeddings.patch_embedding."),
    (r"^pre_norm\.", "pre_layrnorm."),
    (r"^post_norm\.", "post_layernorm."),
    (r"^transformer\.", "encoder.layers."),
    (r"\.norm([12])\.", r".layer_norm\1."),
    (r"\.attn\.proj\.", ".self_attn.out_proj."),
    (r"\.mlp\.0\.", ".mlp.fc1."),
    (r"\.mlp\.2\.", ".mlp.fc2."),
)
"""Mapping of the released tensors' names to those of transformers."""
_USUAL = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
          "num_channels": 3, "image_size": 224, "patch_size": 32}  # fmt: skip
_LARGEST = 2**16
"""Largest plausible value of a size."""
_HEAD_SIZE = 80
"""Head width of ViT-H, which the tensors do not determine."""


def _from_released(source: TensorSource) -> TensorSource:
    """The tensors under transformers' names, with queries, keys and values split; those of other files are
    unchanged."""
    if "visual.cls_embedding" not in source.stored:
        return source
    stored, places = {}, {}
    for name, kept in source.stored.items():
        if not name.startswith("visual.") or name == "visual.head":
            continue
        ours = renamed_by(_NAMES, name.removeprefix("visual."))
        parts = [ours]
        if ".attn.to_qkv." in ours:
            parts = [ours.replace(".attn.to_qkv.", f".self_attn.{x}_proj.") for x in "qkv"]
        shape = kept.shape[-1:] if ours.endswith("class_embedding") else kept.shape
        shape = shape[1:] if ours.endswith("position_embedding.weight") else shape
        for place, part in enumerate(parts):
            stored[f"vision_model.{part}"] = Stored((shape[0] // len(parts), *shape[1:]), kept.dtype)
            places[f"vision_model.{part}"] = name, place

    def read(ours: str) -> Tensor:
        name, place = places[ours]
        shape = stored[ours].shape
        return source.read(name).reshape(-1, *shape)[place]

    return TensorSource(source.label, stored, read, source.metadata)


_ENCODER = Encoder(
    marks=("vision_model.post_layernorm.weight", "post_layernorm.weight"),
    others=r"^(text_model|text_projection|visual_projection|logit_scale)\b|position_ids$",
    rename=_from_released,
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImageEncoder:
    """Features of the penultimate layer, one for each patch and one for the whole image."""

    model: str
    """Directory, or name in the hub's cache, of a CLIP; also a pipeline with `image_encoder/` and `image_processor/`;
    also Wan's original release, or only its file."""
    _loaded: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def dim(self) -> int:
        """Width E of the features.

        Raises:
            UserError: if the directory holds no CLIP image encoder.
        """
        return self._settings()["hidden_size"]

    @property
    def num_tokens(self) -> int:
        """Number I of image tokens; raises as `dim`."""
        values = self._settings()
        return 1 + (values["image_size"] // values["patch_size"]) ** 2

    @torch.no_grad()
    def encode(self, image_HWC: np.ndarray) -> Tensor:
        """float32 [1, I, E] on the CPU, for an image of any size (uint8 HWC)."""
        prepare, network = self._networks()
        files = "preprocessor_config.json and config.json"
        with library_errors(lambda reason: f"{self.model} cannot encode images with its {files} ({reason})"):
            pixels = prepare(images=image_HWC, return_tensors="pt").pixel_values
            seen = network(pixels.to(network.device, network.dtype), output_hidden_states=True)
        return seen.hidden_states[-2].float().cpu()

    def to(self, device: torch.device) -> "ImageEncoder":
        """This encoder, whose network computes on `device` once it is loaded."""
        self._loaded["device"] = device
        return self

    def check(self) -> None:
        """Raises UserError for weight files with other tensors than a CLIP image encoder, by name."""
        library, _ = transformers_library("an image encoder"), self._settings()
        check_encoder(library.CLIPVisionModel, self._place, _ENCODER, _FILES, **self._config(library))

    def save(self, directory: str | os.PathLike) -> None:
        """Writes the name of the model; its weights are not copied."""
        parts.write_component(directory, {"type": "clip", "model": self.model}, {})

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "ImageEncoder":
        """The inverse of `save`.

        Raises:
            UserError: if config.json is missing or has other settings.
        """
        parts.component_type(directory, "image encoder", ["clip"])
        return cls(**parts.read_settings(directory, ["model"]))

    def _settings(self) -> dict[str, Any]:
        """Settings of the network, read once; those of a released file follow from its tensors."""
        if "settings" not in self._loaded:
            self._loaded["settings"] = self._read_settings()
        return self._loaded["settings"]

    def _read_settings(self) -> dict[str, Any]:
        if self._place.is_file():
            return _settings_of(self._place)
        values = read_json(self._place / parts.CONFIG_FILE)
        kind = values.get("model_type") if isinstance(values, dict) else None
        if kind != "clip_vision_model":
            raise UserError(f"{self.model} is a model of type {kind!r:.40}, not clip_vision_model")
        values = _USUAL | values
        for name in _USUAL:
            value = values[name]
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _LARGEST:
                raise UserError(f"{self._place / parts.CONFIG_FILE}: {name}={value!r:.40} is not valid")
        return values

    @property
    def _place(self) -> Path:
        """The folder of the network, or the only file."""
        if Path(self.model).is_file():
            return Path(self.model)
        folder = self._directory("image_encoder")
        released = sorted(folder.glob(RELEASED))
        return released[0] if released and not (folder / parts.CONFIG_FILE).is_file() else folder

    def _directory(self, part: str) -> Path:
        root = hub.local_directory(self.model, "image encoder", _FILES)
        return root / part if (root / part).is_dir() else root

    def _config(self, library: Any) -> dict[str, Any]:
        """Settings of the network where no file states them."""
        return {"config": library.CLIPVisionConfig(**self._settings())} if self._place.is_file() else {}

    def _prepare(self, library: Any) -> Any:
        """Image processor of the folder; by default CLIP's."""
        if not self._place.is_file():
            return library.CLIPImageProcessor.from_pretrained(self._directory("image_processor"), **PRETRAINED)
        side = self._settings()["image_size"]
        return library.CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})

    @property
    def published(self) -> PublishedNetwork:
        """The encoder's files."""
        library, name = transformers_library("an image encoder"), "CLIPVisionModel"
        load = partial(load_encoder, getattr(library, name), self._place, _ENCODER, _FILES, **self._config(library))
        return PublishedNetwork(name, self._place, load, partial(self._prepare, library))

    def _networks(self) -> tuple[Any, Any]:
        """Return the image processor and the network; both are loaded once."""
        if "network" not in self._loaded:
            library, directory = transformers_library("an image encoder"), self._place
            self._settings()
            with library_errors(lambda reason: f"{directory} cannot be loaded ({reason}); needs {_FILES}"):
                prepare = self._prepare(library)
                network = load_encoder(library.CLIPVisionModel, directory, _ENCODER, _FILES, **self._config(library))
            place = self._loaded.get("device", torch.device("cpu"))
            self._loaded.update(prepare=prepare, network=network.float().to(place))
        return self._loaded["prepare"], self._loaded["network"]


def _settings_of(file: Path) -> dict[str, Any]:
    """transformers' settings of the network in a released file, a ViT-H, from its tensors.

    Raises:
        UserError: if it is another network.
    """
    shapes = encoder_tensors(file, _ENCODER, _FILES).shapes
    shapes = {name.removeprefix("vision_model."): shape for name, shape in shapes.items()}
    try:
        width, _, patch, _ = shapes["embeddings.patch_embedding.weight"]
        mlp, places = (
            shapes[f"{name}.weight"][0] for name in ("encoder.layers.0.mlp.fc1", "embeddings.position_embedding")
        )
    except (KeyError, ValueError) as problem:
        raise UserError(f"{file} is no CLIP image encoder: it lacks {problem}; give the folder of one") from None
    if width % _HEAD_SIZE:
        raise UserError(f"{file} is {width} wide, not a ViT-H: give a folder written by transformers")
    return {
        "model_type": "clip_vision_model",
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": 1 + max(int(name.split(".")[2]) for name in shapes if name.startswith("encoder.layers.")),
        "num_attention_heads": width // _HEAD_SIZE,
        "image_size": patch * math.isqrt(places - 1),
        "patch_size": patch,
        "hidden_act": "gelu",
    }
