"""Image-text similarity by the bundle of a CLIP model; the same interface for every runtime.

Shapes: N pictures, J texts, K labels, L tokens, E width of embeddings.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megadit.infer.evaluate.videos import Clip
from megadit.infer.pictures import Sight
from megadit.infer.runtimes.load import EXPORTED, TORCH, open_exported
from megadit.models.bundle import Bundle

USUAL_PROMPTS = ("{}", "a picture of {}")
"""Default prompt templates around a label."""


class Matcher:
    """Maps pictures and texts to unit vectors, whose product is their similarity."""

    def __init__(self, bundle: Bundle, *, runtime: str = TORCH, device: torch.device | str = "cpu") -> None:
        """Loads the network.

        Raises:
            UserError: for a bundle of another kind, or not exported for `runtime`.
        """
        self._device = torch.device(device)
        self.most: int | None = None
        """Most pictures, or texts, in one call; None: any number."""
        # with an exported network only the scale is read: the other weights stay in the file
        clip = bundle.load_clip(self._device if runtime == TORCH else "cpu")
        self.scale = clip.scale.item()
        """Logit scale of the similarities in training."""
        self._see, self._words = Sight(bundle, self._device), bundle.load_text_encoder()
        self.window = self._see.window
        self._image_tower, self._text_tower = clip.embed_images, clip.embed_texts
        if runtime != TORCH:
            exported = open_exported(bundle, runtime)
            self.most = exported.network("image_tower").axes["batch"].max
            networks, width = EXPORTED[runtime].open(exported, self._device), bundle.config.text_tower.embedding_size

            def run(name: str, **inputs: Tensor) -> Tensor:
                return networks[name](inputs, (len(next(iter(inputs.values()))), width))

            self._image_tower = lambda x: run("image_tower", x=x)
            self._text_tower = lambda token, length: run("text_tower", tokens=token, length=length)

    @torch.no_grad()
    def pictures(self, clips: Sequence[Clip]) -> Tensor:
        """Embeddings of pictures, [N, E], float32 on the CPU; raises as `Sight`."""
        return self._image_tower(self._see(clips)).float().cpu()

    @torch.no_grad()
    def texts(self, texts: Sequence[str]) -> Tensor:
        """Embeddings of texts, [J, E], float32 on the CPU."""
        size = self.most or max(len(texts), 1)
        parts = [texts[first : first + size] for first in range(0, len(texts), size)]
        tokens = [[x.to(self._device) for x in self._words.tokens(part)] for part in parts]
        return torch.cat([self._text_tower(*pair).float().cpu() for pair in tokens])

    def labels(self, labels: Sequence[str], prompts: Sequence[str] = USUAL_PROMPTS) -> Tensor:
        """Embeddings of labels, [K, E]: the mean over prompts with the label for {} (arXiv 2103.00020, 3.1.4)."""
        texts_JE = self.texts([prompt.replace("{}", label) for label in labels for prompt in prompts])
        return F.normalize(texts_JE.unflatten(0, (len(labels), len(prompts))).mean(1), dim=-1)


def recall(similarity_NJ: Tensor, own_NJ: Tensor, counts: Sequence[int]) -> dict[str, tuple[float, float]]:
    """Recall, {"recall@k": (pictures, texts)}: the fraction that has a match (`own_NJ`, bool) among the k nearest."""
    found = {}
    for count in counts:
        shares = []
        for score, own in ((similarity_NJ, own_NJ), (similarity_NJ.T, own_NJ.T)):
            nearest = score.topk(min(count, score.shape[1])).indices
            shares.append(own.gather(1, nearest).any(1).float().mean().item())
        found[f"recall@{count}"] = (shares[0], shares[1])
    return found
