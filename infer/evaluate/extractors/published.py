"""CLIP and VideoMAE by transformers, from a saved folder; nothing is downloaded, and no remote code runs.

Shapes: B videos or pictures, T/H/W frames, height, width, C colour channels, D width of the features.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megadit.infer.evaluate.extractors.base import Extractor, resized
from megadit.models.shared.errors import UserError, choose_one
from megadit.models.shared.files import read_json, sha256_of
from megadit.models.storage.pretrained import PRETRAINED
from megadit.models.storage.tokenizer_file import load_tokenizer

OPENAI_MEAN, OPENAI_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Mean and standard deviation of colours in 0..1, as CLIP was trained; a preprocessor_config.json may differ."""
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def open_published(folder: Path, device: torch.device) -> list[Extractor]:
    """The extractor of a folder. Raises UserError if the model is not supported, or transformers is not installed."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json: give the folder of CLIP or VideoMAE as transformers saves it")
    config = read_json(folder / "config.json")
    kind = config.get("model_type") if isinstance(config, dict) else None
    opens = KINDS[choose_one(kind, KINDS, f"{folder} holds a model of the unsupported type {kind!r}")]
    if not (folder / "model.safetensors").is_file():
        raise UserError(f"{folder} has no model.safetensors: pickled weights are not read; save it as safetensors")
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"{folder} needs transformers: pip install 'megadit[evaluate]'") from error
    try:
        return [opens(transformers, folder, device)]
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise UserError(f"{folder} cannot be loaded: {str(error).splitlines()[0]}") from None


class _Normalised:
    """Preprocessing that both extractors share: a square size, a mean and a standard deviation of colours."""

    fewest_frames = 1

    def __init__(self, network: nn.Module, folder: Path, device: torch.device, size: int, mean, std) -> None:
        self._network = network.to(device).eval().requires_grad_(False)
        self._device, self._size = device, size
        file = folder / "preprocessor_config.json"
        about: Mapping[str, Any] = read_json(file) if file.is_file() else {}
        self._mean, self._std = about.get("image_mean", mean), about.get("image_std", std)
        self.fingerprint = sha256_of(folder / "model.safetensors")[:12]
        self.protocol = f"bicubic with antialias to {size}x{size}, mean {list(self._mean)}, std {list(self._std)}"

    def _pixels(self, video_BTHWC: Tensor) -> Tensor:
        """Preprocessed pixels, BCTHW."""
        video_BCTHW = resized(video_BTHWC.to(self._device), self._size, self._size) / 255
        mean, std = (torch.tensor(each, device=self._device)[:, None, None, None] for each in (self._mean, self._std))
        return (video_BCTHW - mean) / std


class ClipPictures(_Normalised):
    """CLIP's embeddings of frames and of texts (arXiv 2103.00020)."""

    name, sees = "clip", "pictures"

    def __init__(self, transformers, folder: Path, device: torch.device) -> None:
        network = transformers.CLIPModel.from_pretrained(folder, use_safetensors=True, **PRETRAINED)
        config = network.config
        super().__init__(network, folder, device, config.vision_config.image_size, OPENAI_MEAN, OPENAI_STD)
        self._tokenizer = load_tokenizer(folder)
        self._most_tokens = config.text_config.max_position_embeddings
        self.width = config.projection_dim

    @torch.inference_mode()
    def __call__(self, video_BTHWC: Tensor) -> Tensor:
        seen = self._network.vision_model(pixel_values=self._pixels(video_BTHWC)[:, :, 0])
        return self._network.visual_projection(seen.pooler_output)

    @torch.inference_mode()
    def of_texts(self, texts: Sequence[str]) -> Tensor:
        """Features of texts, float32 [B, D]; texts are truncated to CLIP's 77 tokens."""
        tokens = self._tokenizer(
            list(texts), return_tensors="pt", padding=True, truncation=True, max_length=self._most_tokens
        ).to(self._device)
        read = self._network.text_model(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)
        return self._network.text_projection(read.pooler_output)


class VideoMAEClips(_Normalised):
    """The mean over VideoMAE's last tokens (arXiv 2203.12602; for Fréchet distances: arXiv 2404.12391)."""

    name, sees = "videomae", "clips"

    def __init__(self, transformers, folder: Path, device: torch.device) -> None:
        network = transformers.VideoMAEModel.from_pretrained(folder, use_safetensors=True, **PRETRAINED)
        config = network.config
        super().__init__(network, folder, device, config.image_size, IMAGENET_MEAN, IMAGENET_STD)
        self.width, self.fewest_frames = config.hidden_size, config.num_frames

    @torch.inference_mode()
    def __call__(self, video_BTHWC: Tensor) -> Tensor:
        pixels_BTCHW = self._pixels(video_BTHWC[:, : self.fewest_frames]).transpose(1, 2)
        return self._network(pixel_values=pixels_BTCHW).last_hidden_state.mean(1)


KINDS: dict[str, Callable[..., Extractor]] = {"clip": ClipPictures, "videomae": VideoMAEClips}
