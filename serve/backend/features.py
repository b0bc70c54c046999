"""Embedding and classification models for Triton: features of pictures and texts, classes of pictures.

Each is a row of `MODELS`. Nothing here depends on Triton (`features_model.py` does): values of requests in, rows of
numbers out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from megadit.infer.commands.classify import Classifier
from megadit.infer.evaluate.videos import Clip
from megadit.infer.evaluate.window import Window, cut
from megadit.infer.matching import Matcher
from megadit.infer.media.reader import MediaReader
from megadit.infer.runtimes.torch import use_device
from megadit.models.bundle import Bundle, Kind
from megadit.models.configs.config import DiTConfig
from megadit.models.diffusion.conditioning_settings import plain_bytes
from megadit.models.shared.errors import UserError
from megadit.serve.service_info import Limits

Read = Callable[[bytes], Any]
Compute = Callable[[Sequence[Any]], torch.Tensor]
FeatureNetwork = Matcher | Classifier


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureModel:
    """A Triton model that returns a row of numbers for each picture or text."""

    input: Literal["image", "text"]
    """Type of the input: the bytes of a file (or a data URL of them), or a text in UTF-8."""
    output: str
    network: type[FeatureNetwork]
    compute: Callable[[FeatureNetwork], Compute]
    width: Callable[[DiTConfig], int | None]
    """Width of a row; None if the network was not trained for this output."""
    labels: Callable[[Bundle], Sequence[str]] = lambda bundle: ()
    """Label of each number of a row, if any."""


_of_clip = partial(
    FeatureModel, output="features", network=Matcher, width=lambda config: config.text_tower.embedding_size
)
MODELS: dict[Kind, dict[str, FeatureModel]] = {
    "clip": {
        "image_to_features": _of_clip(input="image", compute=lambda matcher: matcher.pictures),
        "text_to_features": _of_clip(input="text", compute=lambda matcher: matcher.texts),
    },
    "classifier": {
        "image_to_classes": FeatureModel(
            input="image",
            output="probabilities",
            network=Classifier,
            compute=lambda classifier: classifier,
            width=lambda config: config.num_classes,
            labels=lambda bundle: bundle.load_text_encoder().names,
        )
    },
}
"""Kind of a bundle -> its models by name."""


class Features:
    """One of `MODELS` with its network loaded."""

    def __init__(self, name: str, bundle: Bundle, *, runtime: str, device: str, limits: Limits) -> None:
        """Loads the network. Raises UserError for a bundle without such a model, or not exported for `runtime`."""
        self.model = MODELS[bundle.kind][name]
        use_device(device)
        network = self.model.network(bundle, runtime=runtime, device=device)
        self._compute, self._most = self.model.compute(network), network.most
        self._media = MediaReader(limits)
        readers: dict[str, Read] = {"image": _read_image(self._media, network.window), "text": _read_text(limits)}
        self._read = readers[self.model.input]

    def answer(self, requests: Sequence[Sequence[bytes]]) -> list[np.ndarray | Exception]:
        """Return a float32 row for each value of each request, computed in one batch; or the error of a request."""
        read = [self._read_all(values) for values in requests]
        every = [value for values in read if not isinstance(values, Exception) for value in values]
        step = self._most or max(len(every), 1)
        parts = [self._compute(every[first : first + step]) for first in range(0, len(every), step)]
        rows = iter(torch.cat(parts).numpy() if parts else ())
        return [values if isinstance(values, Exception) else np.stack([next(rows) for _ in values]) for values in read]

    def close(self) -> None:
        """Ends the processes that read files."""
        self._media.close()

    def _read_all(self, values: Sequence[bytes]) -> list[Any] | Exception:
        try:
            return [self._read(value) for value in values]
        except (UserError, TimeoutError) as error:
            return error


def _read_image(media: MediaReader, window: Window) -> Read:
    """Reader of pictures and videos, which crops and resizes them at once to save memory."""

    def read(data: bytes) -> Clip:
        name = "the file"
        seen_THWC = cut(Clip(media.read(plain_bytes(data)), 0.0, name), name, window)
        return Clip(seen_THWC.numpy(), 0.0, name)

    return read


def _read_text(limits: Limits) -> Read:
    def read(data: bytes) -> str:
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise UserError(f"the text is not UTF-8: {error.reason} at byte {error.start}") from None
        limits.check_text("text", text)
        return text

    return read
