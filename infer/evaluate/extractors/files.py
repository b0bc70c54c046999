"""Loads extractors from disk. Weights are safetensors: no code runs, nothing is downloaded.

| path                                                                  | extractors                         |
|-----------------------------------------------------------------------|------------------------------------|
| a .safetensors file of `megadit evaluate convert`, or the demo's      | the row of `KINDS` that it names   |
| a folder as transformers saves it (config.json, model.safetensors)     | CLIP; VideoMAE                     |
| a bundle (megadit.json)                                                | CLIP; ViT of pictures, or of clips |
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from megadit.infer.evaluate.extractors.base import Extractor, Sight, resized
from megadit.infer.evaluate.extractors.digits import DigitClips, DigitPictures, DigitReader
from megadit.infer.evaluate.extractors.i3d import I3D, I3DClips
from megadit.infer.evaluate.extractors.inception import Inception, InceptionPictures
from megadit.infer.evaluate.extractors.published import open_published
from megadit.models.bundle import USED_BY, Bundle, Kind
from megadit.models.shared.documents import check_tensor_header, parse_json
from megadit.models.shared.errors import UserError, choose_one
from megadit.models.shared.files import MANIFEST_FILE, sha256_of

KIND = "extractor"
"""Key of a file's metadata that names its row in `KINDS`."""
ARGUMENTS = "arguments"
"""Key of a file's metadata with the arguments of its network, as JSON."""


class Row:
    """A network, and its extractors: (network, fingerprint, device) -> extractor."""

    def __init__(self, network: type[nn.Module], *extractors: Callable[..., Extractor]) -> None:
        self.network, self.extractors = network, extractors


KINDS: dict[str, Row] = {
    "digits": Row(DigitReader, DigitPictures, DigitClips),
    "inception": Row(Inception, InceptionPictures),
    "i3d": Row(I3D, I3DClips),
}


def open_extractors(path: Path, device: torch.device) -> list[Extractor]:
    """Open the extractors of a file or folder of weights. Raises UserError if the path holds no extractor, or its
    tensors do not fit the network."""
    if (path / MANIFEST_FILE).is_file():
        return [open_bundle_extractor(path, device)]
    if path.is_dir():
        return open_published(path, device)
    kind, arguments, tensors = _read(path)
    row = KINDS[choose_one(kind, KINDS, f"{path} is an extractor of the unknown kind {kind!r}")]
    try:
        network = row.network(**arguments)
        network.load_state_dict(tensors)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{path} does not hold the weights of {kind}: {str(error).splitlines()[0]}") from None
    network = network.to(device).eval().requires_grad_(False)
    return [make(network, sha256_of(path)[:12]) for make in row.extractors]


def _read(path: Path) -> tuple[str, Mapping[str, int], dict[str, Tensor]]:
    if not path.is_file():
        raise UserError(
            f"there are no weights at {path}: give a file of `megadit evaluate convert`, a folder of CLIP or VideoMAE "
            "as transformers saves it, the bundle of a CLIP or a ViT, or classifier.safetensors of `megadit demo`"
        )
    try:
        with open(path, "rb") as file:
            check_tensor_header(file.read(8), str(path))
        with safe_open(path, framework="pt") as stored:
            about = stored.metadata() or {}
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}
        return about.get(KIND, ""), parse_json(about.get(ARGUMENTS, "{}"), str(path)), tensors
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}") from None


# Features by bundles of classifiers and CLIP models, of pictures or, if they were trained on clips, of clips.


def open_bundle_extractor(path: Path, device: torch.device) -> Extractor:
    """Open the extractor of a classifier or a CLIP model; raises UserError for a bundle of another kind."""
    bundle = Bundle.open(path)
    if bundle.kind not in OF_KIND:
        raise UserError(f"{path} {USED_BY[bundle.kind]}")
    return OF_KIND[bundle.kind](bundle, device)


class _EmbeddingNetwork:
    """Preprocessing that both extractors share: pictures are prepared as in training."""

    def __init__(self, bundle: Bundle, device: torch.device, *, width: int, identity: str) -> None:
        """`identity` describes the features in the protocol."""
        self._tokenizer, self._device, self._size = bundle.load_tokenizer(), device, bundle.defaults
        self.fewest_frames = bundle.defaults.num_frames
        self.sees: Sight = "clips" if self.fewest_frames > 1 else "pictures"
        self.width = width
        self.fingerprint = sha256_of(bundle.path / "transformer" / "model.safetensors")[:12]
        frames = f"{self.fewest_frames} frames from the middle, " if self.fewest_frames > 1 else ""
        self.protocol = f"{frames}bicubic with antialias to {self._size.height}x{self._size.width}, {identity}"

    def _latents(self, video_BTHWC: Tensor) -> Tensor:
        """Return the latents that the network reads."""
        first = (video_BTHWC.shape[1] - self.fewest_frames) // 2
        seen_BTHWC = video_BTHWC[:, first : first + self.fewest_frames].to(self._device)
        return self._tokenizer.encode(resized(seen_BTHWC, self._size.height, self._size.width) / 127.5 - 1)


class ClassifierFeatures(_EmbeddingNetwork):
    """The normalised class token of a ViT (arXiv 2010.11929, equation 4)."""

    name = "vit"

    def __init__(self, bundle: Bundle, device: torch.device) -> None:
        self._network = bundle.load_classifier(device).eval().requires_grad_(False)
        self._network.head.linear = None
        super().__init__(bundle, device, width=bundle.config.hidden_size, identity="class token")

    @torch.inference_mode()
    def __call__(self, video_BTHWC: Tensor) -> Tensor:
        return self._network(self._latents(video_BTHWC)).float()


class ClipFeatures(_EmbeddingNetwork):
    """CLIP's embeddings of pictures and of texts (arXiv 2103.00020), not normalised."""

    name = "clip"

    def __init__(self, bundle: Bundle, device: torch.device) -> None:
        self._network = bundle.load_clip(device).eval().requires_grad_(False)
        self._words = bundle.load_text_encoder()
        super().__init__(bundle, device, width=bundle.config.text_tower.embedding_size, identity="embedding")

    @torch.inference_mode()
    def __call__(self, video_BTHWC: Tensor) -> Tensor:
        return self._network.image_tower(self._latents(video_BTHWC)).float()

    @torch.inference_mode()
    def of_texts(self, texts: Sequence[str]) -> Tensor:
        """Features of texts, float32 [B, D]; texts are truncated to the tokens of the text encoder."""
        return self._network.text_tower(*(x.to(self._device) for x in self._words.tokens(list(texts)))).float()


OF_KIND: Mapping[Kind, Callable[[Bundle, torch.device], Extractor]] = {
    "classifier": ClassifierFeatures,
    "clip": ClipFeatures,
}
