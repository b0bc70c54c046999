"""The encoder of a published T5 (arXiv 1910.10683), by `transformers`; also the umT5 of Wan's original release
(`models_t5_umt5-xxl-enc-bf16.pth`), whose sizes are derived from the tensors.

Shapes: B batch, L text tokens, E text feature width.
"""

import dataclasses
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from megadit.models.machine import free_memory
from megadit.models.shared.errors import UserError, choose_one
from megadit.models.shared.files import read_object
from megadit.models.storage import components as parts
from megadit.models.storage.pretrained import Encoder, require, transformers_library
from megadit.models.storage.tensor_source import TensorSource, renamed_by
from megadit.models.text_encoders.base import RunTokens, TextFeatures, TokenInput
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

TextPadding = Literal["none", "zeros"]
DevicePlacement = Literal["auto", "cpu", "8bit", "offload"]
NETWORKS = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}
"""Model type -> class of its encoder in `transformers`."""
_LAST_NORM = "encoder.final_layer_norm.weight"
RELEASED_FILES = "models_t5_*.pth"
RELEASED_WORDS = Path("google") / "umt5-xxl"
"""The file of Wan's umT5, and the folder of its vocabulary, in the released folder."""
_MARK = "blocks.0.ffn.gate.0.weight"
_NAMES = (
    (r"^token_embedding\.", "shared."),
    (r"^norm\.", "encoder.final_layer_norm."),
    (r"^blocks\.(\d+)\.", r"encoder.block.\1."),
    (r"\.norm1\.", ".layer.0.layer_norm."),
    (r"\.norm2\.", ".layer.1.layer_norm."),
    (r"\.attn\.([qkvo])\.", r".layer.0.SelfAttention.\1."),
    (r"\.pos_embedding\.embedding\.", ".layer.0.SelfAttention.relative_attention_bias."),
    (r"\.ffn\.gate\.0\.", ".layer.1.DenseReluDense.wi_0."),
    (r"\.ffn\.fc1\.", ".layer.1.DenseReluDense.wi_1."),
    (r"\.ffn\.fc2\.", ".layer.1.DenseReluDense.wo."),
)
_BLOCK, _ATTENTION = "encoder.block.{}.layer", "encoder.block.{}.layer.0.SelfAttention"


def from_released(source: TensorSource) -> TensorSource:
    """The tensors of Wan's umT5 under transformers' names; those of other files are unchanged."""
    if _MARK not in source.stored:
        return source
    names = {renamed_by(_NAMES, name): name for name in source.stored}
    stored = {ours: source.stored[theirs] for ours, theirs in names.items()}
    return TensorSource(source.label, stored, lambda ours: source.read(names[ours]), source.metadata)


_PUBLISHED = PublishedText(
    "a T5 text encoder",
    vocabularies=("tokenizer.json", "spiece.model"),
    padding="<pad>",
    ending="</s>",
    released=(RELEASED_FILES, RELEASED_WORDS),
    encoder=Encoder(
        marks=(_LAST_NORM, _MARK),
        others=r"^(decoder|lm_head)\.|^spiece_model$",
        rename=from_released,
    ),
)
_ARCHITECTURE = ("model_type", "d_model", "d_kv", "d_ff", "num_layers", "num_heads", "vocab_size", "feed_forward_proj")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class T5TextEncoder:
    """Features of the last layer, one for each token; the end-of-text token is one of them.

    Raises:
        UserError: for settings that do not exist, and when files are missing: what to download, and where to put it.
    """

    model: str = "google-t5/t5-11b"
    """A directory, or the name of a downloaded model on the hub."""
    max_length: int = 512
    """Maximum tokens; longer texts are truncated with a warning."""
    text_padding: TextPadding = "none"
    """`zeros`: features are padded with zeros to `max_length`, and all of them are attended to, for networks trained so
    (Cosmos, NeMo, DFM). An empty text has length 0 in any case."""
    dtype: str = "bfloat16"
    """Dtype of the weights and the features."""
    placement: DevicePlacement = "auto"
    """`auto`: on a GPU if there is one; `8bit`: there, in 8-bit integers (bitsandbytes); `offload`: as much on the GPU
    as fits, the rest in host memory (accelerate)."""
    feature_cache: str | None = None
    """Directory of cached features; None: no cache."""
    _loaded: dict[str, Any] = field(default_factory=dict, repr=False)

    pooled_dim: ClassVar[None] = None

    def __post_init__(self) -> None:
        for name, choices in (
            ("text_padding", get_args(TextPadding)),
            ("dtype", DTYPES),
            ("placement", get_args(DevicePlacement)),
        ):
            choose_one(getattr(self, name), choices, f"{name}={getattr(self, name)!r} is unknown")
        if self.max_length < 1:
            raise UserError(f"max_length={self.max_length} must be at least 1")

    @property
    def dim(self) -> int:
        return self._architecture()["d_model"]

    @property
    def vocabulary_size(self) -> int:
        return self._architecture()["vocab_size"]

    # -------------------------------------------------------------------------------------------------- export

    @property
    def directories(self) -> tuple[Path, ...]:
        return (self._folders[0],)

    @property
    def token_inputs(self) -> tuple[TokenInput, ...]:
        """Token ids, and a mask that is 1 for the text's tokens."""
        return TokenInput(self.vocabulary_size), TokenInput(2)

    def graph(self) -> nn.Module:
        """(tokens BL, mask BL) -> features BLE."""
        return _Graph(dataclasses.replace(self.in_float32(), placement="cpu", _loaded={}).load_network())

    def with_graph(self, run: RunTokens, device: torch.device) -> "T5TextEncoder":
        return dataclasses.replace(self, _loaded={**self._loaded, "network": _Exported(run, self.dim, device)})

    def in_float32(self) -> "T5TextEncoder":
        return dataclasses.replace(self, dtype="float32")

    # ------------------------------------------------------------------------------------------------ features

    def encode(self, texts: list[str]) -> TextFeatures:
        """Features on the CPU, float32; an empty text has none."""
        files = None if self.feature_cache is None else FeatureFiles(self.feature_cache, self.fingerprint())
        found = cached_or_computed(filter(None, texts), self._compute, files)
        return self._assemble([found[text]["features"] if text else None for text in texts])

    def _assemble(self, features: list[Tensor | None]) -> TextFeatures:
        lengths = [0 if feature is None else len(feature) for feature in features]
        if self.text_padding == "zeros":
            lengths = [self.max_length if length else 0 for length in lengths]
        features_BLE = torch.zeros(len(features), max([1, *lengths]), self.dim)
        for row_LE, feature in zip(features_BLE, features, strict=True):
            if feature is not None:
                row_LE[: len(feature)] = feature
        return TextFeatures(features_BLE, torch.tensor(lengths, dtype=torch.int64))

    @torch.no_grad()
    def _compute(self, texts: Sequence[str]) -> list[TextTensors]:
        """`features` [L, E] of each text, without padding."""
        if not texts:
            return []
        tokenizer, network = self._load_tokenizer(), self.load_network()
        as_rows = {"padding": "longest", "padding_side": "right", "return_tensors": "pt"}
        tokens = tokenizer(texts, **as_rows)
        longest = int(tokens.attention_mask.sum(1).max())
        if longest > self.max_length:
            warnings.warn(f"a text of {longest} tokens is cut to its first {self.max_length}", stacklevel=4)
            tokens = tokenizer(texts, truncation=True, max_length=self.max_length, **as_rows)
        check_tokens(tokenizer, tokens.input_ids, self.vocabulary_size)
        mask_BL = tokens.attention_mask.to(network.device)
        hidden_BLE = network(tokens.input_ids.to(network.device), attention_mask=mask_BL).last_hidden_state
        lengths = mask_BL.sum(1).tolist()
        rows = zip(hidden_BLE, lengths, strict=True)
        return [{"features": row_LE[:length].float().cpu()} for row_LE, length in rows]

    # ------------------------------------------------------------------------------------------------- loading

    @property
    def _folders(self) -> tuple[Path, Path]:
        """(network, vocabulary) folders."""
        return _PUBLISHED.folders(self.model)

    @property
    def published(self) -> tuple[PublishedNetwork, ...]:
        """The encoder's files."""
        (name, config), (place, words) = self._network_class(), self._folders
        load = partial(_PUBLISHED.load_network, place, name, **config)
        return (PublishedNetwork(name, place, load, partial(_PUBLISHED.load_tokenizer, words)),)

    def _load_tokenizer(self):
        if "tokenizer" not in self._loaded:
            self._loaded["tokenizer"] = _PUBLISHED.load_tokenizer(self._folders[1], self.vocabulary_size)
        return self._loaded["tokenizer"]

    def to(self, device: torch.device) -> "T5TextEncoder":
        """This encoder, whose network computes on `device` once it is loaded."""
        self._loaded["device"] = device
        return self

    def load_network(self) -> Any:
        """The encoder of `transformers`, loaded at its first use.

        Raises:
            UserError: if its files are missing or damaged.
        """
        if "network" not in self._loaded:
            (name, config), folder = self._network_class(), self._folders[0]
            device = device_of(self._loaded, self.placement)
            options = {"dtype": loading_dtype(self.dtype, folder, device), **config, **self._placing(device)}
            network = _PUBLISHED.load_network(folder, name, **options)
            self._loaded["network"] = network if "device_map" in options else network.to(device)
        return self._loaded["network"]

    def _network_class(self) -> tuple[str, dict[str, Any]]:
        """Name of the class in `transformers`, and its configuration if there is no file of it."""
        values = self._architecture()
        name = NETWORKS[values["model_type"]]
        if self._folders[0].is_dir():
            return name, {}
        network_class = getattr(transformers_library("a T5 text encoder"), name)
        return name, {"config": network_class.config_class(**values)}

    def _placing(self, device: torch.device) -> dict[str, Any]:
        """Arguments of `from_pretrained` that place the weights: on this GPU alone, and in the host's memory."""
        if self.placement == "offload":
            require("accelerate", "placement=offload")
            memory = {"cpu": free_memory(torch.device("cpu"))}
            if device.type == "cuda":
                memory[torch.cuda.current_device() if device.index is None else device.index] = free_memory(device)
            return {"device_map": "auto", "max_memory": memory}
        if self.placement == "8bit":
            require("bitsandbytes", "placement=8bit")
            if not torch.cuda.is_available():
                raise UserError("placement=8bit needs a GPU; use placement=cpu")
            library = transformers_library("a T5 text encoder")
            return {"quantization_config": library.BitsAndBytesConfig(load_in_8bit=True), "device_map": {"": device}}
        return {}

    # ------------------------------------------------------------------------------------------------ on disk

    def save(self, directory: str | os.PathLike) -> None:
        """Writes the settings, with the name of the model; its weights are not copied."""
        save_settings(self, directory, "t5")

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "T5TextEncoder":
        """The inverse of `save`.

        Raises:
            UserError: if config.json is missing or has other settings.
        """
        return load_settings(cls, directory)

    def fingerprint(self) -> str:
        """Hash of everything that determines the features: architecture, vocabulary, a sample of the weights, length,
        padding.

        For a loaded encoder it is the saved one: the model's files may not be on this machine.
        """
        if "fingerprint" not in self._loaded:
            words = _PUBLISHED.vocabulary_hash(self._folders[1], self.vocabulary_size)
            settings = {"max_length": self.max_length, "text_padding": self.text_padding, "words": words}
            architecture = {name: self._architecture().get(name) for name in _ARCHITECTURE}
            name, config = self._network_class()
            _PUBLISHED.check_network(self._folders[0], name, **config)
            norm = _PUBLISHED.read_tensor(self._folders[0], _LAST_NORM).bfloat16()
            self._loaded["fingerprint"] = parts.fingerprint({**settings, **architecture}, {"norm": norm})
        return self._loaded["fingerprint"]

    def _architecture(self) -> dict[str, Any]:
        if "architecture" not in self._loaded:
            directory = self._folders[0]
            values = read_object(directory / "config.json") if directory.is_dir() else self._sizes(directory)
            if values.get("model_type") not in NETWORKS:
                raise UserError(
                    f"{directory} is a model of type {values.get('model_type')!r}, not one of {', '.join(NETWORKS)}"
                )
            self._loaded["architecture"] = values
        return self._loaded["architecture"]

    def _sizes(self, file: Path) -> dict[str, Any]:
        try:
            return config_from_tensors(_PUBLISHED.tensors(file))
        except KeyError as missing:
            raise UserError(f"{file} is no T5: it has no tensor {missing}") from None


class _Graph(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens_BL: Tensor, mask_BL: Tensor) -> Tensor:
        return self.network(tokens_BL, attention_mask=mask_BL).last_hidden_state


@dataclass(frozen=True, slots=True)
class _Exported:
    """Called like the encoder class of `transformers`."""

    run: RunTokens
    dim: int
    device: torch.device

    def __call__(self, tokens_BL: Tensor, *, attention_mask: Tensor) -> SimpleNamespace:
        features_BLE = self.run((tokens_BL, attention_mask), (*tokens_BL.shape, self.dim))
        return SimpleNamespace(last_hidden_state=features_BLE)


def config_from_tensors(tensors: TensorSource) -> dict[str, Any]:
    """transformers' settings of the encoder with these tensors: a umT5 (every block has positions) or a T5.

    Raises:
        KeyError: if a tensor of every such encoder is missing.
    """
    shapes = tensors.shapes
    vocabulary, width = shapes["shared.weight" if "shared.weight" in shapes else "encoder.embed_tokens.weight"]
    layers = 1 + max((int(name.split(".")[2]) for name in shapes if name.startswith("encoder.block.")), default=-1)
    buckets, heads = shapes[f"{_ATTENTION.format(0)}.relative_attention_bias.weight"]
    is_gated = f"{_BLOCK.format(0)}.1.DenseReluDense.wi_0.weight" in shapes
    has_all_positions = f"{_ATTENTION.format(1)}.relative_attention_bias.weight" in shapes
    return {
        "model_type": "umt5" if has_all_positions else "t5",
        "vocab_size": vocabulary,
        "d_model": width,
        "d_kv": shapes[f"{_ATTENTION.format(0)}.q.weight"][0] // heads,
        "d_ff": shapes[f"{_BLOCK.format(0)}.1.DenseReluDense.wi{'_0' if is_gated else ''}.weight"][0],
        "num_layers": layers,
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
        "feed_forward_proj": "gated-gelu" if is_gated else "relu",
    }
