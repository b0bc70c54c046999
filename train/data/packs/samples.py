"""Decoding of Energon's crude samples, and counting of their occurrences.

Shapes: C latent channels, T/H/W latent frames, height, width, L text tokens, E text feature width.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import safetensors.torch
from megatron.energon import Sample, WorkerConfig, edataclass
from megatron.energon.flavors import SavableDataset
from megatron.energon.flavors.base_dataset import add_sample_restore_key
from megatron.energon.wrappers.base import BaseWrapperDataset
from torch import Tensor

from megadit.infer.sampling.samplers import NoisyStep
from megadit.models.shared.documents import check_tensor_header
from megadit.train.data.packs.packed_batch import PackedBatch
from megadit.train.data.packs.training_sample import Frames, State, TrainingSample, another, drawn_index
from megadit.train.dataset.description import MAX_HEADER_BYTES, Description, UnreadableSampleError, read_description

OCCURRENCE = "__occurrence__"
"""Field of a crude sample: the epoch in which it was read."""


@edataclass
class LatentSample(Sample):
    """One sample with Energon's keys."""

    content: TrainingSample


@edataclass
class LatentPack(Sample):
    """One pack with Energon's keys."""

    content: PackedBatch


def decode(crude: dict[str, Any]) -> TrainingSample:
    """Decode a sample from the raw bytes of its members (see `writer`): JSON and safetensors, never pickles.

    Raises:
        UnreadableSampleError: naming what is wrong.
    """
    description = read_description(member(crude, "json"))
    try:
        content = member(crude, "safetensors")
        check_tensor_header(content, "its safetensors", max_bytes=MAX_HEADER_BYTES)
        tensors = safetensors.torch.load(content)
    except UnreadableSampleError:
        raise
    except Exception as error:  # safetensors and torch raise many kinds
        raise UnreadableSampleError(f"its safetensors cannot be read: {type(error).__name__} {error}") from None
    latent_CTHW, text_LE = tensors.get("latent"), _drawn_text(tensors, description, crude)
    if latent_CTHW is None:
        raise UnreadableSampleError("its safetensors holds no latent")
    if latent_CTHW.ndim != 4 or (text_LE is not None and text_LE.ndim != 2):
        raise UnreadableSampleError("the latent has not four dimensions, or the text not two")
    sample = training_sample(
        crude, description, latent_CTHW, text_LE if text_LE is not None else latent_CTHW.new_empty(0, 0)
    )
    image_text_LE = tensors.get("image_text")
    if image_text_LE is not None and image_text_LE.ndim != 2:
        raise UnreadableSampleError("its image_text has not two dimensions")
    rejected_CTHW = _rejected(tensors)
    return replace(
        sample,
        rejected_CTHW=rejected_CTHW,
        preference=None if rejected_CTHW is None else 1.0,
        state=_state(tensors, description, crude),
        reference_CTHW=_reference(tensors),
        image_text_LE=image_text_LE,
        frames=_frames(tensors, description),
    )


def _drawn_text(tensors: dict[str, Tensor], description: Description, crude: dict[str, Any]) -> Tensor | None:
    """Text features of the caption that is drawn for this epoch."""
    count = len(description.captions)
    if count < 2:
        return tensors.get("text")
    return tensors.get(another("text", drawn_index("caption", crude["__key__"], crude[OCCURRENCE], count)))


def _rejected(tensors: dict[str, Tensor]) -> Tensor | None:
    """Latents of the rejected video of a pair."""
    rejected_CTHW = tensors.get("rejected")
    if rejected_CTHW is not None and rejected_CTHW.shape != tensors["latent"].shape:
        raise UnreadableSampleError("its rejected video is not of the latent's shape")
    return rejected_CTHW


def _state(tensors: dict[str, Tensor], description: Description, crude: dict[str, Any]) -> State | None:
    """The state that is drawn for this epoch."""
    states_KCTHW, count = tensors.get("states"), len(description.states)
    if states_KCTHW is None and not count:
        return None
    if states_KCTHW is None or states_KCTHW.shape != (count, *tensors["latent"].shape):
        raise UnreadableSampleError("its states are not as many as it describes, of the latent's shape")
    number = drawn_index("state", crude["__key__"], crude[OCCURRENCE], count)
    return State(states_KCTHW[number], NoisyStep(*description.states[number]))


def _reference(tensors: dict[str, Tensor]) -> Tensor | None:
    """Latents of the source clip of an edit."""
    reference_CTHW = tensors.get("reference")
    if reference_CTHW is not None and _sides(reference_CTHW) != _sides(tensors["latent"]):
        raise UnreadableSampleError("its reference is not of the latent's channels, height and width")
    return reference_CTHW


def _frames(tensors: dict[str, Tensor], description: Description) -> Frames | None:
    """Latents of the frames encoded as images."""
    latents_CTHW, times = tensors.get("frames"), description.frame_times
    if latents_CTHW is None and not times:
        return None
    like_CTHW = tensors["latent"]
    if latents_CTHW is None or _sides(latents_CTHW) != _sides(like_CTHW) or latents_CTHW.shape[1] != len(times):
        raise UnreadableSampleError("its frames are not as many as frame_times, of the latent's sides")
    if not times or max(times) >= like_CTHW.shape[1]:
        raise UnreadableSampleError(f"its frame_times {list(times)[:5]} are not within its latent's frames")
    return Frames(latents_CTHW, times)


def _sides(latent_CTHW: Tensor) -> tuple[int, ...]:
    """Channels, height and width; () if it is not a latent."""
    return () if latent_CTHW.ndim != 4 else (latent_CTHW.shape[0], *latent_CTHW.shape[2:])


def training_sample(
    crude: dict[str, Any], description: Description, latent_CTHW: Tensor, text_LE: Tensor
) -> TrainingSample:
    """Build a sample from tensors and the metadata in `crude`."""
    return TrainingSample(
        sample_id=crude["__key__"],
        occurrence=crude[OCCURRENCE],
        latent_CTHW=latent_CTHW,
        text_LE=text_LE,
        fps=description.fps,
        height=description.height,
        width=description.width,
        aesthetic_score=description.aesthetic_score,
        is_prior=description.is_prior,
        seed=description.seed,
        reward=description.reward,
    )


def member(crude: dict[str, Any], suffix: str) -> bytes:
    """Bytes of one member.

    Raises:
        UnreadableSampleError: if there is none.
    """
    if suffix not in crude:
        raise UnreadableSampleError(f"no {suffix!r}")
    return crude[suffix]


class PassCounter(BaseWrapperDataset[dict, dict]):
    """Adds to each crude sample its occurrence: the number of the epoch in which it is read.

    Noise, sigma and text dropout are keyed by (seed, sample id, occurrence), so the occurrence must be the same after
    any resume. Energon's reader counts its epochs, but does not expose the number. This wrapper is directly on the
    reader, below repetition, shuffling and packing, and is iterated once per epoch, in which each sample is read once.
    The number is part of the saved state and of each sample's restore key: samples that were in a shuffle or packing
    buffer when saved are restored with the epoch in which they were read.
    """

    _savable_fields = ("_pass",)

    def __init__(
        self,
        dataset: SavableDataset[dict],
        *,
        worker_config: WorkerConfig,
        first_pass: int = 0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` is called before each sample, and may raise to end reading."""
        super().__init__(dataset, worker_config=worker_config)
        self._first_pass, self._check = first_pass, check
        self.reset_state_own()

    def reset_state_own(self) -> None:
        self._pass = self._first_pass

    def len_worker(self, worker_idx: int | None = None) -> int:
        return self.dataset.len_worker(worker_idx)

    def __iter__(self) -> Iterator[dict]:
        for crude in self.dataset:
            self._check()
            yield self._mark(crude, self._pass)
        self._pass += 1

    def restore_sample(self, restore_key: tuple) -> dict:
        name, number, *inner_key = restore_key
        assert name == type(self).__name__
        return self._mark(self.dataset.restore_sample(tuple(inner_key)), number)

    def _mark(self, crude: dict, number: int) -> dict:
        crude[OCCURRENCE] = number
        return add_sample_restore_key(crude, number, src=self)

    def config(self) -> dict[str, Any]:
        return {"type": type(self).__qualname__, "dataset": self.dataset.config()}
