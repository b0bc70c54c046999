"""The text encoder of a published CLIP (arXiv 2103.00020), or two concatenated as in SDXL (arXiv 2307.01952).

Shapes: B batch, K encoders, L = 77 text tokens, E width of all encoders together, P width of the pooled feature.
"""

import dataclasses
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadit.models.shared.errors import UserError, choose_one
from megadit.models.shared.files import read_json
from megadit.models.storage import components as parts
from megadit.models.storage.pretrained import Encoder
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

Layer = Literal["last", "penultimate"]
TextPadding = Literal["none", "tokens"]
EmptyText = Literal["none", "encoded", "zeros"]
DevicePlacement = Literal["auto", "cpu"]
NETWORKS = ("clip_text_model", "clip")
"""Model types with such an encoder: a text encoder, or a whole CLIP."""
WITHOUT_PROJECTION, WITH_PROJECTION = "CLIPTextModel", "CLIPTextModelWithProjection"
"""Classes of the encoder in `transformers`."""
FOLDERS = (("text_encoder", "tokenizer"), ("text_encoder_2", "tokenizer_2"))
"""Folders of network and vocabulary of each encoder, in a pipeline."""
_NORM = "final_layer_norm.weight"
_PUBLISHED = PublishedText(
    "a CLIP text encoder",
    vocabularies=("tokenizer.json", "vocab.json"),
    beginning="<|startoftext|>",
    ending="<|endoftext|>",
    encoder=Encoder(
        marks=(f"text_model.{_NORM}", _NORM),
        others=r"^(vision_model|visual_projection|logit_scale)\b|position_ids$",
    ),
)
_LAST, _LAST_OF_OLD = 49407, 2
"""`eos_token_id`: transformers' default, and that of files from before it was read: then the largest token is taken."""
_ARCHITECTURE = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "vocab_size": 49408,
    "hidden_act": "quick_gelu",
    "projection_dim": 512,
}
"""Settings that determine a network, with `transformers`' defaults."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CLIPTextEncoder:
    """Features of each token, concatenated over two encoders, and the pooled feature of the last encoder.

    Raises:
        UserError: for settings that do not exist, and when files are missing: what to download, and where to put it.
    """

    model: str
    """A directory, or the name of a downloaded model on the hub; also a pipeline, with its `text_encoder/` and, if
    there is one, `text_encoder_2/`."""
    layer: Layer = "last"
    """Layer of the features: `last`, after its norm, or `penultimate`, without norm (SDXL). The pooled feature is
    always that of the last layer."""
    text_padding: TextPadding = "none"
    """`tokens`: texts are padded to 77 tokens, and all of them are attended to (Stable Diffusion)."""
    empty_text: EmptyText = "none"
    """Features of an empty text: none (length 0), those of its tokens, or zeros."""
    dtype: str = "float32"
    """Dtype of the weights and the features."""
    placement: DevicePlacement = "auto"
    """`auto`: on a GPU if there is one."""
    feature_cache: str | None = None
    """Directory of cached features; None: no cache."""
    _loaded: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name, choices in (
            ("layer", get_args(Layer)),
            ("text_padding", get_args(TextPadding)),
            ("empty_text", get_args(EmptyText)),
            ("dtype", DTYPES),
            ("placement", get_args(DevicePlacement)),
        ):
            choose_one(getattr(self, name), choices, f"{name}={getattr(self, name)!r} is unknown")

    @property
    def directories(self) -> tuple[Path, ...]:
        return tuple(network for network, _ in self._folders)

    @property
    def dim(self) -> int:
        return sum(values["hidden_size"] for values in self._architectures())

    @property
    def pooled_dim(self) -> int:
        values = self._architectures()[-1]
        return values["projection_dim"] if values["has_projection"] else values["hidden_size"]

    @property
    def max_length(self) -> int:
        """Maximum tokens of a text, start and end tokens included; longer texts are truncated with a warning."""
        return min(values["max_position_embeddings"] for values in self._architectures())

    # ------------------------------------------------------------------------------------------------ features

    def encode(self, texts: list[str]) -> TextFeatures:
        """Features on the CPU, float32."""
        files = None if self.feature_cache is None else FeatureFiles(self.feature_cache, self.fingerprint())
        asked = [text for text in texts if text or self.empty_text == "encoded"]
        found = cached_or_computed(asked, self._compute, files)
        rows = [found[text] if text in found else self._of_empty_text() for text in texts]
        lengths = [len(row["features"]) for row in rows]
        features_BLE = torch.zeros(len(rows), max([1, *lengths]), self.dim)
        for row_LE, row in zip(features_BLE, rows, strict=True):
            row_LE[: len(row["features"])] = row["features"]
        pooled_BP = torch.stack([row["pooled"] for row in rows]) if rows else torch.zeros(0, self.pooled_dim)
        return TextFeatures(features_BLE, torch.tensor(lengths, dtype=torch.int64), pooled_BP)

    def _of_empty_text(self) -> TextTensors:
        length = self.max_length if self.empty_text == "zeros" else 0
        return {"features": torch.zeros(length, self.dim), "pooled": torch.zeros(self.pooled_dim)}

    @torch.no_grad()
    def _compute(self, texts: Sequence[str]) -> list[TextTensors]:
        """`features` [L, E] and `pooled` [P] of each text."""
        if not texts:
            return []
        network = self._network()  # first: it is what its settings say, the length of texts included
        tokens_BKL, lengths = self._tokens(list(texts))
        features_BLE, pooled_BP = unpacked(network(tokens_BKL).float().cpu(), self.dim, self.pooled_dim)
        kept = lengths if self.text_padding == "none" else [self.max_length] * len(texts)
        rows = zip(features_BLE, pooled_BP, kept, strict=True)
        return [{"features": row_LE[:length].clone(), "pooled": row_P.clone()} for row_LE, row_P, length in rows]

    def _tokens(self, texts: list[str]) -> tuple[Tensor, list[int]]:
        """Token ids for each encoder, padded, and the number of tokens of each text."""
        of_encoders, most = [], self.max_length
        for tokenizer, sizes in zip(self._tokenizers(), self._architectures(), strict=True):
            longest = max(map(len, tokenizer(texts, verbose=False).input_ids))
            if longest > most:
                warnings.warn(f"a text of {longest} tokens is cut to its first {most}", stacklevel=5)
            filled = {"padding": "max_length", "padding_side": "right", "truncation": True, "max_length": most}
            of_encoders.append(tokenizer(texts, return_tensors="pt", **filled))
            check_tokens(tokenizer, of_encoders[-1].input_ids, sizes["vocab_size"])
        tokens_BKL = torch.stack([tokens.input_ids for tokens in of_encoders], dim=1)
        return tokens_BKL, of_encoders[0].attention_mask.sum(1).tolist()

    # -------------------------------------------------------------------------------------------------- export

    @property
    def token_inputs(self) -> tuple[TokenInput, ...]:
        """Token ids for each encoder."""
        vocabulary = min(values["vocab_size"] for values in self._architectures())
        return (TokenInput(vocabulary, (len(self._folders), self.max_length)),)

    def graph(self) -> nn.Module:
        """See `SideBySide`."""
        return dataclasses.replace(self.in_float32(), placement="cpu", _loaded={}).load_network()

    def with_graph(self, run: RunTokens, device: torch.device) -> "CLIPTextEncoder":
        width = max(self.dim, self.pooled_dim)

        def network(tokens_BKL: Tensor) -> Tensor:
            return run((tokens_BKL,), (len(tokens_BKL), self.max_length + 1, width))

        return dataclasses.replace(self, _loaded={**self._loaded, "network": network})

    def in_float32(self) -> "CLIPTextEncoder":
        return dataclasses.replace(self, dtype="float32")

    # ------------------------------------------------------------------------------------------------- loading

    def to(self, device: torch.device) -> "CLIPTextEncoder":
        """This encoder, whose network computes on `device` once it is loaded."""
        self._loaded["device"] = device
        return self

    def load_network(self) -> "SideBySide":
        """The encoders of `transformers`.

        Raises:
            UserError: if their files are missing or damaged.
        """
        networks, device = [], device_of(self._loaded, self.placement)
        for directory, name in self._classes():
            dtype = loading_dtype(self.dtype, directory, device)
            networks.append(_PUBLISHED.load_network(directory, name, dtype=dtype))
        return SideBySide(networks, self.layer).eval().to(device)

    def _classes(self) -> list[tuple[Path, str]]:
        """Folder and class of `transformers` of each encoder."""
        of_folder = zip(self.directories, self._architectures(), strict=True)
        return [
            (folder, WITH_PROJECTION if values["has_projection"] else WITHOUT_PROJECTION)
            for folder, values in of_folder
        ]

    @property
    def published(self) -> tuple[PublishedNetwork, ...]:
        """The files of each encoder."""
        return tuple(
            PublishedNetwork(
                name,
                place,
                partial(_PUBLISHED.load_network, place, name),
                partial(_PUBLISHED.load_tokenizer, words),
            )
            for (place, name), (_, words) in zip(self._classes(), self._folders, strict=True)
        )

    def _network(self) -> Any:
        """The network, called with tokens [B, K, L]; loaded at its first use."""
        if "network" not in self._loaded:
            self._loaded["network"] = self.load_network()
        return self._loaded["network"]

    def _tokenizers(self) -> list[Any]:
        if "tokenizers" not in self._loaded:
            self._loaded["tokenizers"] = [self._tokenizer_of(place) for place in range(len(self._folders))]
        return self._loaded["tokenizers"]

    def _tokenizer_of(self, place: int) -> Any:
        """Tokenizer of an encoder, whose network must take the pooled feature of the token that ends texts."""
        (network, words), sizes = self._folders[place], self._architectures()[place]
        tokenizer, last = (
            _PUBLISHED.load_tokenizer(words, sizes["vocab_size"]),
            _settings(network).get("eos_token_id", _LAST),
        )
        if last not in (_LAST_OF_OLD, end := tokenizer("").input_ids[-1]):
            raise UserError(
                f"{network / parts.CONFIG_FILE}: eos_token_id={last!r:.40} must be {end}, as in its tokenizer"
            )
        return tokenizer

    @property
    def _folders(self) -> tuple[tuple[Path, Path], ...]:
        """(network, vocabulary) folders of each encoder."""
        root = _PUBLISHED.root(self.model)
        found = tuple((root / network, root / words) for network, words in FOLDERS if (root / network).is_dir())
        return found or ((root, root),)

    def _architectures(self) -> list[dict[str, Any]]:
        if "architectures" not in self._loaded:
            self._loaded["architectures"] = [_architecture(directory) for directory in self.directories]
        return self._loaded["architectures"]

    # ------------------------------------------------------------------------------------------------ on disk

    def save(self, directory: str | os.PathLike) -> None:
        """Writes the settings, with the name of the model; its weights are not copied."""
        save_settings(self, directory, "clip")

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "CLIPTextEncoder":
        """The inverse of `save`.

        Raises:
            UserError: if config.json is missing or has other settings.
        """
        return load_settings(cls, directory)

    def fingerprint(self) -> str:
        """Hash of everything that determines the features: architectures, vocabulary, a sample of the weights,
        settings.

        For a loaded encoder it is the saved one: the model's files may not be on this machine.
        """
        if "fingerprint" not in self._loaded:
            self._tokenizers()
            words = [_PUBLISHED.vocabulary_hash(words) for _, words in self._folders]
            named = ("layer", "text_padding", "empty_text")
            settings = {"words": words, **{name: getattr(self, name) for name in named}}
            for folder, name in self._classes():
                _PUBLISHED.check_network(folder, name)
            norms = {
                f"norm_{place}": _PUBLISHED.read_tensor(folder, f"text_model.{_NORM}", _NORM).bfloat16()
                for place, folder in enumerate(self.directories)
            }
            settings["architectures"] = self._architectures()
            self._loaded["fingerprint"] = parts.fingerprint(settings, norms)
        return self._loaded["fingerprint"]


class SideBySide(nn.Module):
    """Token ids [B, K, L] of K encoders to features, packed as [B, L + 1, max(E, P)]: those of the tokens, then the
    pooled one; the narrower is padded with zeros."""

    def __init__(self, networks: Sequence[nn.Module], layer: Layer) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.layer = layer

    def forward(self, tokens_BKL: Tensor) -> Tensor:
        features, pooled_BP = [], None
        tokens_BKL = tokens_BKL.to(next(self.parameters()).device)
        for place, network in enumerate(self.networks):
            # no mask: the encoder is causal, and was trained with its padding
            output = network(tokens_BKL[:, place], output_hidden_states=True)
            features.append(output.last_hidden_state if self.layer == "last" else output.hidden_states[-2])
            pooled_BP = output.text_embeds if hasattr(network, "text_projection") else output.pooler_output
        features_BLE = torch.cat(features, dim=-1)
        return packed(features_BLE, pooled_BP)


def packed(features_BLE: Tensor, pooled_BP: Tensor) -> Tensor:
    """[B, L, E] and [B, P] as [B, L + 1, max(E, P)]."""
    width = max(features_BLE.shape[-1], pooled_BP.shape[-1])
    rows = (features_BLE, pooled_BP[:, None])
    return torch.cat([F.pad(row, (0, width - row.shape[-1])) for row in rows], dim=1)


def unpacked(rows: Tensor, dim: int, pooled_dim: int) -> tuple[Tensor, Tensor]:
    """The inverse of `packed`: features [B, L, E] and the pooled ones [B, P]."""
    return rows[:, :-1, :dim], rows[:, -1, :pooled_dim]


def _settings(directory: Path) -> dict[str, Any]:
    """Settings of a network, from its config.json; those of a whole CLIP are under `text_config`.

    Raises:
        UserError: for a model of another kind.
    """
    values = read_json(directory / parts.CONFIG_FILE)
    kind = values.get("model_type") if isinstance(values, dict) else None
    if kind not in NETWORKS:
        raise UserError(f"{directory} is a model of type {kind!r}, not one of {', '.join(NETWORKS)}")
    classes = values.get("architectures")
    has_projection = kind == "clip" or (isinstance(classes, list) and WITH_PROJECTION in classes)
    return {**(values.get("text_config") or values), "has_projection": has_projection}


def _architecture(directory: Path) -> dict[str, Any]:
    values = _settings(directory)
    return {name: values.get(name, usual) for name, usual in _ARCHITECTURE.items()} | {
        "has_projection": values["has_projection"]
    }
