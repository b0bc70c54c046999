"""How good the weights and each of their averages are: losses at fixed noise levels, and videos to look at."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megadit.infer.pipeline import GeneratedVideo, TextToVideo
from megadit.infer.runtimes.torch import TorchDenoiser
from megadit.infer.settings import latent_size
from megadit.infer.video_io import write_video
from megadit.models.support import UserError
from megadit.models.text_encoders import load_text_encoder
from megadit.models.tokenizers import load_tokenizer
from megadit.train.batches import validation_batches
from megadit.train.data.batch import PackedBatch
from megadit.train.data.loader import check_dataset, validation_captions
from megadit.train.loss import edm_loss, token_noise
from megadit.train.sampling_defaults import sampling_defaults
from megadit.train.setup import Training

NUM_PROMPTS = 4
"""Captions of the validation split that are sampled where `validation.prompts` is empty."""
RAW = "none"
"""Stands for the weights themselves among the names of averages."""


def profile_name(sigma_rel: float | None) -> str:
    return RAW if sigma_rel is None else f"{sigma_rel:g}"


class SampledVideo(NamedTuple):
    """A video that validation made."""

    caption: str
    path: Path
    """mp4, or png where it has one frame."""


def validate(training: Training, step: int) -> tuple[dict[str, Any], list[SampledVideo]]:
    """Measures the weights and every average on held-out samples, and samples videos with the best of them.

    Returns:
        {"step", "best", "losses": {name: {"mean", and one for each sigma}}}: `loss.edm_loss`'s weighted loss; a name is
        a sigma_rel, or "none". And the videos of all ranks.
    """
    batches = list(validation_batches(training.config, training.groups))
    losses = {}
    for sigma_rel in (None, *training.config.ema.sigma_rels):
        with training.averages.swapped_in(sigma_rel, training.network):
            losses[profile_name(sigma_rel)] = _losses(training, batches)
    best = min(losses, key=lambda name: losses[name]["mean"])
    videos = _sample_videos(training, step, None if best == RAW else float(best))
    return {"step": step, "best": best, "losses": losses}, videos


@torch.no_grad()
def _losses(training: Training, batches: Iterable[PackedBatch]) -> dict[str, float]:
    """The weighted loss at each of `validation.sigmas`, a mean over all tokens of all ranks, and the mean of these."""
    sigmas = training.config.validation.sigmas
    sums = torch.zeros(len(sigmas) + 1, dtype=torch.float64, device=training.groups.device)
    for batch in batches:
        noise_S1P = token_noise(batch)
        for index, sigma in enumerate(sigmas):
            sigma_G = torch.full_like(batch.fps_G, sigma)
            sums[index] += edm_loss(training.network.dit, batch, sigma_G, noise_S1P).weighted
        sums[-1] += batch.num_tokens
    dist.all_reduce(sums, group=training.groups.data)
    means = (sums[:-1] / sums[-1]).tolist()
    named = {f"{sigma:g}": mean for sigma, mean in zip(sigmas, means, strict=True)}
    return {"mean": sum(means) / len(means), **named}


def _sample_videos(training: Training, step: int, sigma_rel: float | None) -> list[SampledVideo]:
    """Writes samples/step_0000100/00_a_red_seven.mp4 and so on; the prompts are dealt to the data-parallel ranks."""
    config, groups = training.config, training.groups
    if config.data.mock:
        return []  # nothing to encode prompts or decode latents with
    prompts = list(config.validation.prompts) or validation_captions(config, NUM_PROMPTS)
    mine = list(enumerate(prompts))[groups.data.rank() :: groups.data.size()]
    with training.averages.swapped_in(sigma_rel, training.network):
        try:
            videos = _generate(training, mine)
        except UserError as error:  # a run of days does not end over a video
            print(f"no videos of step {step}: {error}", flush=True)
            videos = []
    training.network.train()
    written = []
    if groups.tensor.rank() == 0:
        for (number, prompt), video in zip(mine, videos, strict=False):
            written.append(_write(Path(config.train.output_dir), step, number, prompt, video))
    everyones: list[list[SampledVideo]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, written)
    return sorted((video for part in everyones for video in part), key=lambda video: video.path)


def _generate(training: Training, prompts: list[tuple[int, str]]) -> list[GeneratedVideo]:
    """A video for each (seed, prompt) of this rank.

    Raises:
        UserError: if videos of this size cannot be made, or have values that are no numbers.
    """
    if not prompts:
        return []
    pipeline = _pipeline(training)
    _check_split(pipeline, training)
    return pipeline.generate([prompt for _, prompt in prompts], seeds=[number for number, _ in prompts])


def _pipeline(training: Training) -> TextToVideo:
    """Sampling with the network in training, split over ranks as it is."""
    config, network = training.config, training.network
    info = check_dataset(config)
    tokenizer = load_tokenizer(config.validation.tokenizer_folder or info.tokenizer_folder)
    return TextToVideo(
        denoiser=TorchDenoiser(network.dit, device=training.groups.device, dtype=network.dit.dtype),
        tokenizer=tokenizer,
        text_encoder=load_text_encoder(info.text_encoder_folder),
        config=config.model,
        defaults=sampling_defaults(config, info),
        device=training.groups.device,
    )


def _check_split(pipeline: TextToVideo, training: Training) -> None:
    """Raises UserError where sequence parallelism cannot cut a video into equal parts, as it can training packs."""
    _, (_, *sizes) = latent_size(pipeline.defaults, pipeline.config, pipeline.tokenizer)
    num_tokens, ranks = math.prod(pipeline.config.token_grid(*sizes)), training.groups.tensor.size()
    if training.config.parallel.sequence_parallel and num_tokens % ranks:
        raise UserError(f"their {num_tokens} tokens cannot be cut over {ranks} sequence-parallel ranks")


def _write(folder: Path, step: int, number: int, prompt: str, video: GeneratedVideo) -> SampledVideo:
    words = "".join(letter if letter.isalnum() else "_" for letter in prompt.lower())[:60]
    suffix = ".png" if len(video.video) == 1 else ".mp4"
    path = folder / "samples" / f"step_{step:07d}" / f"{number:02d}_{words}{suffix}"
    write_video(path, video.video, video.settings.fps)
    return SampledVideo(prompt, path)
