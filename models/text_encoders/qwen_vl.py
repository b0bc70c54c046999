"""Text features of a published Qwen2.5-VL for Cosmos-Predict2.5, by `transformers` (arXiv 2502.13923).

The states of all layers, each normalised to mean 0 and deviation 1 over its channels, are concatenated: for the 7B 28 x
3584 = 100,352 numbers a token. The first linear of Predict2.5's network, which reads them, is independent of the noise
level, so it belongs to this encoder: features have its width, 1024, are computed once for a video, and can be cached.

Shapes: B batch, L text tokens, E text feature width, D width of all layers' states.
"""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megadit.models.shared.errors import UserError, choose_one
from megadit.models.shared.files import read_object
from megadit.models.storage import components as parts
from megadit.models.storage.pretrained import Encoder
from megadit.models.text_encoders.base import TextFeatures
from megadit.models.text_encoders.published import (
    DTYPES,
    FeatureFiles,
    PublishedNetwork,
    PublishedText,
    TextTensors,
    cached_or_computed,
    check_tokens,
    device_of,
    load_settings,
    loading_dtype,
    save_settings,
)

MODEL_TYPE = "qwen2_5_vl"
SYSTEM = "You are a helpful assistant who will provide prompts to an image generator."
"""System prompt that Predict2.5 was trained with."""
_LAST_NORMS = ("language_model.model.norm.weight", "model.language_model.norm.weight", "model.norm.weight")
"""Names of the tensor in different versions of `transformers`."""
_PUBLISHED = PublishedText(
    "a Qwen2.5-VL text encoder",
    vocabularies=("tokenizer.json",),
    encoder=Encoder(marks=_LAST_NORMS, others=r"^lm_head\.|(^|\.)visual\."),
)
_CLASS = "Qwen2_5_VLForConditionalGeneration"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QwenVLTextEncoder:
    """Features of `max_length` tokens, padding included, as the network was trained with; an empty text has as many.

    Raises:
        UserError: for settings that do not exist, and when files are missing: what to download, and where to put it.
    """

    model: str = "nvidia/Cosmos-Reason1-7B"
    """A directory, or the name of a downloaded model on the hub; a pipeline or the network itself."""
    max_length: int = 512
    """Maximum tokens, the system prompt included; longer texts are truncated with a warning."""
    dtype: str = "bfloat16"
    """Dtype of the weights; states are normalised and projected in float32."""
    feature_cache: str | None = None
    """Directory of cached features; None: no cache."""
    projection: dict[str, Tensor] = field(default_factory=dict, repr=False)
    """`weight` ED and `bias` E of the linear before GELU; {}: the features are the states."""
    _loaded: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        choose_one(self.dtype, DTYPES, f"dtype={self.dtype!r} is unknown")
        if self.max_length < 1:
            raise UserError(f"max_length={self.max_length} must be at least 1")
        shapes = {name: tuple(tensor.shape) for name, tensor in self.projection.items()}
        if shapes and not (shapes.keys() == {"weight", "bias"} and shapes["weight"][:1] == shapes["bias"]):
            raise UserError(f"the projection of a Qwen2.5-VL's features has a weight ED and a bias E, not {shapes}")

    @property
    def directories(self) -> tuple[Path, ...]:
        return (self._folders[0],)

    @property
    def dim(self) -> int:
        if self.projection:
            return len(self.projection["bias"])
        architecture = self._architecture()
        return architecture["num_hidden_layers"] * architecture["hidden_size"]

    @property
    def pooled_dim(self) -> None:
        """None: it has no pooled feature."""

    def encode(self, texts: list[str]) -> TextFeatures:
        """Features on the CPU, float32."""
        files = None if self.feature_cache is None else FeatureFiles(self.feature_cache, self.fingerprint())
        features = cached_or_computed(texts, self._compute_all, files)
        features_BLE = torch.stack([features[text]["features"] for text in texts])
        return TextFeatures(features_BLE, torch.full((len(texts),), self.max_length, dtype=torch.int64))

    def _compute_all(self, texts: Sequence[str]) -> list[TextTensors]:
        return [{"features": self._compute(text)} for text in texts]  # one by one: a text's states take 200 MB

    @torch.no_grad()
    def _compute(self, text: str) -> Tensor:
        network = self.load_network()
        tokens_1L = self._tokens(text).to(network.device)
        states = network(input_ids=tokens_1L, output_hidden_states=True).hidden_states[1:]
        normal = [(x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-8) for x in map(Tensor.float, states)]
        features_LD = torch.cat(normal, dim=-1)[0].cpu()
        if not self.projection:
            return features_LD
        return F.gelu(F.linear(features_LD, self.projection["weight"].float(), self.projection["bias"].float()))

    def _tokens(self, text: str) -> Tensor:
        """Token ids 1L of a text in Qwen's chat format; a template in the tokenizer's folder, a program, is not run."""
        tokenizer = self._load_tokenizer()
        said = {"system": SYSTEM, "user": text}
        turns = (f"<|im_start|>{role}\n{words}<|im_end|>\n" for role, words in said.items())
        tokens = tokenizer("".join(turns), add_special_tokens=False)["input_ids"]
        if len(tokens) > self.max_length:
            message = f"a text of {len(tokens)} tokens is cut to its first {self.max_length}"
            warnings.warn(message, stacklevel=4)
        cut = {"input_ids": [tokens[: self.max_length]]}
        padded = tokenizer.pad(cut, padding="max_length", max_length=self.max_length, return_tensors="pt")["input_ids"]
        check_tokens(tokenizer, padded, self._architecture()["vocab_size"])
        return padded

    # ------------------------------------------------------------------------------------------------- loading

    @property
    def _folders(self) -> tuple[Path, Path]:
        """(network, vocabulary) folders."""
        return _PUBLISHED.folders(self.model)

    @property
    def published(self) -> tuple[PublishedNetwork, ...]:
        """The encoder's files."""
        place, words = self._folders
        load = partial(_PUBLISHED.load_network, place, _CLASS)
        return (PublishedNetwork(_CLASS, place, load, partial(_PUBLISHED.load_tokenizer, words)),)

    def _load_tokenizer(self):
        if "tokenizer" not in self._loaded:
            self._loaded["tokenizer"] = _PUBLISHED.load_tokenizer(self._folders[1], self._architecture()["vocab_size"])
        return self._loaded["tokenizer"]

    def to(self, device: torch.device) -> "QwenVLTextEncoder":
        """This encoder, whose network computes on `device` once it is loaded."""
        self._loaded["device"] = device
        return self

    def load_network(self) -> Any:
        """The network of `transformers` without its last linear, loaded at its first use.

        Raises:
            UserError: if its files are missing or damaged.
        """
        if "network" not in self._loaded:
            self._architecture()
            folder, device = self._folders[0], device_of(self._loaded)
            network = _PUBLISHED.load_network(folder, _CLASS, dtype=loading_dtype(self.dtype, folder, device)).model
            self._loaded["network"] = network.to(device)
        return self._loaded["network"]

    # ------------------------------------------------------------------------------------------------ on disk

    def save(self, directory: str | os.PathLike) -> None:
        """Writes the settings, with the name of the model (its weights are not copied), and the projection."""
        save_settings(self, directory, "qwen_vl", self.projection)

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "QwenVLTextEncoder":
        """The inverse of `save`.

        Raises:
            UserError: if config.json is missing or has other settings.
        """
        has_tensors = (Path(directory) / parts.TENSOR_FILE).is_file()
        projection = parts.read_tensors(directory) if has_tensors else {}
        return load_settings(cls, directory, projection=projection)

    def fingerprint(self) -> str:
        """Hash of everything that determines the features: architecture, vocabulary, a sample of the weights, length,
        projection.

        For a loaded encoder it is the saved one: the model's files may not be on this machine.
        """
        if "fingerprint" not in self._loaded:
            network, words = self._folders
            size = self._architecture()["vocab_size"]
            settings = {"max_length": self.max_length, "words": _PUBLISHED.vocabulary_hash(words, size)}
            _PUBLISHED.check_network(network, _CLASS)
            norm = _PUBLISHED.read_tensor(network, *_LAST_NORMS).bfloat16()
            tensors = {"norm": norm, **self.projection}
            self._loaded["fingerprint"] = parts.fingerprint({**settings, **self._architecture()}, tensors)
        return self._loaded["fingerprint"]

    def _architecture(self) -> dict[str, int]:
        """Depth, width and vocabulary size of the language model, also where config.json nests them."""
        if "architecture" not in self._loaded:
            directory = self._folders[0]
            values = read_object(directory / "config.json")
            if values.get("model_type") != MODEL_TYPE:
                kind = values.get("model_type")
                raise UserError(f"{directory} is a model of type {kind!r}, not {MODEL_TYPE}")
            values |= values.get("text_config") or {}
            names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
            if missing := [name for name in names if not isinstance(values.get(name), int)]:
                raise UserError(f"{directory / 'config.json'} has no number {missing[0]}")
            self._loaded["architecture"] = {name: values[name] for name in names}
        return self._loaded["architecture"]
