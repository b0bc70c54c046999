"""Validation of the weights and all EMA weights: losses at fixed noise levels, sampled videos, evaluation metrics."""

import math
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megadit.infer.evaluate.evaluation import Candidate, Evaluation
from megadit.infer.evaluate.extractors import Extractor, open_extractors
from megadit.infer.evaluate.features import FeatureStore
from megadit.infer.evaluate.metrics.motion import MotionClips
from megadit.infer.evaluate.report.report import interval_of
from megadit.infer.evaluate.videos import VideoSet, open_videos, videos_in_memory
from megadit.infer.evaluate.window import window_of
from megadit.infer.media.video_io import write_video
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.pipeline.results import GeneratedVideo
from megadit.infer.runtimes.ranks import ALONE
from megadit.models.host_to_device import levels_on
from megadit.models.machine import is_out_of_memory, memory_message
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.dense_packs import gather_tokens, pack_dense, pad_segments, unpack_dense
from megadit.models.shared.errors import UserError
from megadit.models.text_encoders import load_text_encoder
from megadit.models.text_encoders.base import TextFeaturesCache
from megadit.models.tokenizers import VideoTokenizer, load_tokenizer
from megadit.train.checkpoints.sampling_defaults import sampling_defaults
from megadit.train.config.rules import check_dataset
from megadit.train.data.distribute import validation_batches
from megadit.train.data.loader import validation_captions
from megadit.train.data.packs.packed_batch import PackedBatch
from megadit.train.engine.schedule import evaluate, evaluation, from_last_stage
from megadit.train.engine.setup import Training
from megadit.train.objectives.denoise import denoise_at
from megadit.train.objectives.losses import LossSums
from megadit.train.objectives.networks import Networks, denoiser_of

NUM_PROMPTS = 4
"""Number of captions of the validation split that are sampled if `validation.prompts` is empty."""
RAW = "none"
"""Name of the weights without EMA, among the names of EMA weights."""


def profile_name(sigma_rel: float | None) -> str:
    return RAW if sigma_rel is None else f"{sigma_rel:g}"


class SampledVideo(NamedTuple):
    """A video sampled by validation."""

    caption: str
    path: Path
    """mp4, or png if it has one frame."""


def validate(training: Training, step: int) -> tuple[dict[str, Any], list[SampledVideo]]:
    """Measure the weights and all EMA weights on held-out samples, and sample videos with the best of them.

    Returns:
        {"step", "best", "losses": {name: {"mean", and one for each sigma}}}: the weighted loss of `denoise.edm_loss`; a
        name is a sigma_rel, or "none". And the videos of all ranks, none for classifiers.
    """
    batches, num_own = _validation_batches(training)
    losses = {}
    with evaluation(training):
        for sigma_rel in (None, *training.config.ema.sigma_rels):
            with training.ema_weights.swapped_in(sigma_rel, training.parameters()):
                losses[profile_name(sigma_rel)] = _losses(training, batches, num_own)
        best = lowest(losses)
        videos = _sample_videos(training, step, None if best == RAW else float(best))
    return {"step": step, "best": best, "losses": losses}, videos


def lowest(losses: dict[str, dict[str, float]]) -> str:
    """The name of the lowest mean loss; one that is no number is not the lowest."""
    return min(losses, key=lambda name: (math.isnan(losses[name]["mean"]), losses[name]["mean"]))


def lowest_so_far(before: dict[str, float], found: dict[str, Any]) -> dict[str, float]:
    """Update `before`, the step and mean loss of the best validation and the number `since` of later ones, by `found`,
    the result of `validate`."""
    loss = found["losses"][found["best"]]["mean"]
    if before and not (loss < before["loss"] or math.isnan(before["loss"])):
        return before | {"since": before["since"] + 1}
    return {"step": found["step"], "loss": loss, "since": 0}


def _validation_batches(training: Training) -> tuple[list[PackedBatch], int]:
    """Packs of this rank, and how many of them count.

    If model replicas have collectives in common (FSDP, experts), all ranks need the same number of packs: those with
    fewer repeat some, or compute another rank's.
    """
    batches = list(validation_batches(training.config, training.groups))
    num_own = len(batches)
    if not training.config.parallel.sizes.copies_work_together:
        return batches, num_own
    most = torch.tensor(num_own, device=training.groups.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if num_own < most:
        spare = batches or list(validation_batches(training.config, training.groups, of_all=True))
        batches = batches + spare[-1:] * (int(most) - num_own)
    return batches, num_own


def _losses(training: Training, batches: list[PackedBatch], num_own: int) -> dict[str, float]:
    """The weighted loss at each of `validation.sigmas`, a mean over the tokens of all ranks, and the mean over sigmas.

    For classifiers the cross-entropy and the error rate ("wrong"); for image-text matching the same, within each pack
    so that the number of ranks does not matter.
    """
    if not training.config.model.denoises:
        return _class_metrics(training, batches, num_own)
    sigmas = training.config.validation.sigmas
    sums = torch.zeros(len(sigmas) + 1, dtype=torch.float64, device=training.groups.device)
    for index, sigma in enumerate(sigmas if batches else ()):
        loss = partial(denoise_at, sigma=sigma)
        found = evaluate(training, lambda part, batch, loss=loss: part(batch, loss), batches)[:num_own]
        sums[index] = sum(value.weighted.double() for value in found)
    means = _means(training, sums, batches[:num_own])
    named = {f"{sigma:g}": mean for sigma, mean in zip(sigmas, means, strict=True)}
    return {"mean": sum(means) / len(means), **named}


def _class_metrics(training: Training, batches: list[PackedBatch], num_own: int) -> dict[str, float]:
    sums = torch.zeros(3, dtype=torch.float64, device=training.groups.device)
    if batches:
        for found in evaluate(training, lambda part, batch: part(batch, _alone), batches)[:num_own]:
            sums[:-1] += torch.stack([found.weighted, found.error]).double()
    return dict(zip(("mean", "wrong"), _means(training, sums, batches[:num_own]), strict=True))


def _alone(networks: Networks, batch: PackedBatch) -> LossSums | torch.Tensor:
    """The objective within one micro-batch."""
    return networks.model.objective(replace(networks, readers=None), batch)


def _means(training: Training, sums: torch.Tensor, batches: list[PackedBatch]) -> list[float]:
    """Means of `sums` over the tokens of all ranks' packs; the last entry of `sums` is set to their number."""
    if training.groups.is_last_stage:
        sums[-1] = sum(batch.num_tokens for batch in batches)
    dist.all_reduce(sums)  # tensor-parallel ranks contribute equally to every sum
    return (sums[:-1] / sums[-1]).tolist()


def _sample_videos(training: Training, step: int, sigma_rel: float | None) -> list[SampledVideo]:
    """Write samples/step_0000100/00_a_red_seven.mp4 and so on."""
    config = training.config
    if config.data.mock or not config.model.denoises:
        return []  # no text encoder, no tokenizer
    prompts = list(config.validation.prompts) or validation_captions(config, NUM_PROMPTS)
    made, folder = _generate(training, prompts, sigma_rel, f"no videos of step {step}"), Path(config.train.output_dir)
    written = [_write(folder, step, number, prompts[number], video) for number, video in made.items()]
    everyones: list[list[SampledVideo]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, written)
    return sorted((video for part in everyones for video in part), key=lambda video: video.path)


def evaluate_videos(training: Training, best: str) -> dict[str, dict[str, float]]:
    """Metrics of the EMA weights `best`, or of the weights: {"kid (inception)": {"value", "low", "high"}, ...}.

    All ranks generate the videos; only the first computes and returns the metrics.
    """
    config, groups = training.config, training.groups
    real = _real_videos(config.data.path, config.validation.evaluate_count, config.data.use_train_split_for_val)
    with evaluation(training):
        own = _generate(training, real.prompts, None if best == RAW else float(best), "no metrics")
    everyones: list[dict] | None = [{} for _ in range(dist.get_world_size())] if groups.is_first else None
    dist.gather_object({number: video.video for number, video in own.items()}, everyones)
    if everyones is None:
        return {}
    made = {number: video for part in everyones for number, video in part.items()}
    try:
        return _metric_values(training, [made[number] for number in range(len(real.prompts))], real)
    except (UserError, KeyError) as error:  # a failed metric does not end the run
        print(f"no metrics: {error}", flush=True)
        return {}


def _metric_values(training: Training, videos: list[np.ndarray], real: VideoSet) -> dict[str, dict[str, float]]:
    """Evaluation metrics of videos THWC generated from the captions of real ones."""
    config = training.config
    fps = float(sampling_defaults(config, check_dataset(config)).fps)
    made = videos_in_memory("in training", np.stack(videos), real.prompts, fps)
    store = FeatureStore(Path(config.train.output_dir) / "evaluation", window_of(made.parts[0].read()[0], None, None))
    evaluation = Evaluation(
        store=store, real=real, extractors=_extractors(config.validation.extractors, training.groups.device)
    )
    evaluation = replace(evaluation, metrics=evaluation.possible(made.count))
    candidates = [Candidate(model="in training", guidance=None, videos=made)]
    evaluation.compute_features(candidates, ALONE, shows_progress=False)
    metric_values = evaluation.metric_values(candidates, shows_progress=False)
    return {f"{each.metric} ({each.of})": interval_of(each.estimate) for each in metric_values}


@lru_cache(maxsize=1)
def _real_videos(path: str, count: int, from_train: bool) -> VideoSet:
    """Real videos, loaded once for all evaluations."""
    return open_videos(Path(path), count, "train" if from_train else None)


@lru_cache(maxsize=1)
def _extractors(paths: tuple[str, ...], device: torch.device) -> list[Extractor]:
    """Feature extractors, loaded once for all evaluations."""
    return [*(each for path in paths for each in open_extractors(Path(path), device)), MotionClips()]


def _generate(
    training: Training, prompts: list[str], sigma_rel: float | None, without: str
) -> dict[int, GeneratedVideo]:
    """Number of a prompt, which is its seed -> video, by the EMA weights `sigma_rel`; {} on ranks that only take part.

    Prompts are divided among the model replicas; those with common collectives (FSDP, experts) all generate the same.
    Videos that cannot be generated do not end the run: `without` and the reason are printed. Too little memory, though,
    ends a rank with others that wait for it in a collective.
    """
    groups, is_together = training.groups, training.config.parallel.sizes.copies_work_together
    numbers = range(len(prompts))
    mine = numbers if is_together else numbers[groups.readers.rank() :: groups.readers.size()]
    texts, videos = [prompts[number] for number in mine], []
    with training.ema_weights.swapped_in(sigma_rel, training.parameters()):
        try:
            videos = _pipeline(training, texts)(texts, seeds=list(mine)) if texts else []
        except UserError as error:
            print(f"{without}: {error}", flush=True)
        except (RuntimeError, MemoryError) as error:
            if is_together or groups.copy.size() > 1 or not is_out_of_memory(error):
                raise
            print(f"{without}, for want of memory: {memory_message(error)}", flush=True)
    is_reporting = groups.copy.rank() == 0 and not (is_together and groups.readers.rank())
    return dict(zip(mine, videos, strict=False)) if is_reporting else {}


def _pipeline(training: Training, prompts: list[str]) -> TextToVideo:
    """Pipeline around the network in training, in its parallel layout."""
    config = training.config
    info = check_dataset(config)
    defaults, texts = sampling_defaults(config, info), _texts(info.text_encoder_folder)
    texts.prepare([*prompts, defaults.negative_prompt, defaults.second_prompt])
    return TextToVideo(
        denoiser=ShardedDenoiser(training),
        tokenizer=_tokenizer(Path(config.validation.tokenizer_folder or info.tokenizer_folder)),
        text_encoder=texts,
        config=config.model,
        defaults=defaults,
        device=training.groups.device,
    )


@lru_cache(maxsize=1)
def _tokenizer(folder: Path) -> VideoTokenizer:
    """The video tokenizer, loaded once for all validations."""
    return load_tokenizer(folder)


@lru_cache(maxsize=1)
def _texts(folder: Path) -> TextFeaturesCache:
    """Text features of the prompts; the text encoder is released after they are encoded, once for all validations."""
    return TextFeaturesCache(load_text_encoder(folder), lambda: load_text_encoder(folder))


def _write(folder: Path, step: int, number: int, prompt: str, video: GeneratedVideo) -> SampledVideo:
    words = "".join(letter if letter.isalnum() else "_" for letter in prompt.lower())[:60]
    suffix = ".png" if len(video.video) == 1 else ".mp4"
    path = folder / "samples" / f"step_{step:07d}" / f"{number:02d}_{words}{suffix}"
    write_video(path, video.video, video.settings.fps)
    return SampledVideo(prompt, path)


# --- Sampling with the network in training, in its parallel layout ----------------------------------------------------


class ShardedDenoiser:
    """D(x; sigma) on all ranks of a model replica, which call it together and all get the result.

    The batch is packed like training data, padded so that it divides among the ranks. Call it within
    `schedule.evaluation`.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._model = training.config.model
        self.device = training.groups.device

    @torch.no_grad()
    def __call__(self, x_BCTHW: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Clean latents x0 (float32, on `device`); inputs may be on any device."""
        x_BCTHW = x_BCTHW.to(self.device, torch.float32)
        batch = self._pack(x_BCTHW, conditioning.to(self.device))
        sigma_G = pad_segments(levels_on(sigma_B.float(), self.device), batch.layout, value=1.0)
        groups = self._training.groups
        mine = batch.shard(groups.mesh)
        found = evaluate(self._training, lambda part, pack: denoiser_of(part)(pack, pack.tokens_S1P, sigma_G), [mine])
        D_S1P = from_last_stage(self._training, found[0] if found else None, like=mine.tokens_S1P)
        D_S1P = gather_tokens(D_S1P, mine.layout, groups.context.group)
        return unpack_dense(D_S1P, batch.layout, x_BCTHW, self._model)

    def _pack(self, x_BCTHW: Tensor, conditioning: Conditioning) -> PackedBatch:
        multiple = self._training.config.parallel.sizes.sequence_multiple
        pack = pack_dense(x_BCTHW, conditioning, self._model, multiple)
        return PackedBatch(
            tokens_S1P=pack.tokens_S1P,
            text_L1E=pack.text_L1E,
            layout=pack.layout,
            fps_G=pack.fps_G,
            guidance_G=pack.guidance_G,
            noise_key_G=torch.zeros_like(pack.fps_G, dtype=torch.long),
            loss_weight_G=torch.ones_like(pack.fps_G),
            sample_ids=("",) * pack.layout.num_segments,
        )
