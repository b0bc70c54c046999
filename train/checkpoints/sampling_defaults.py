"""Sampling settings of a run's videos and bundles: `validation.sampling`, in the size of the training samples."""

from dataclasses import asdict
from itertools import islice

from megadit.models.diffusion.settings import AUTO_SHIFTS, SamplingSettings, fitting_shift
from megadit.models.tokenizers import load_tokenizer
from megadit.train.config.schema import RunConfig
from megadit.train.dataset.dataset_info import DatasetInfo, iter_descriptions

_SAMPLES_LOOKED_AT = 256


def sampling_defaults(config: RunConfig, info: DatasetInfo) -> SamplingSettings:
    """Settings of `validation.sampling`; sizes left open are those of the longest of the first samples, cropped."""
    samples = islice(iter_descriptions(info.root, "train"), _SAMPLES_LOOKED_AT)
    longest = max(samples, key=lambda sample: (sample.num_frames, sample.height * sample.width))
    usual = {name: getattr(longest, name) for name in ("num_frames", "height", "width", "fps")}
    if config.data.max_frames is not None:
        latent_frames = config.data.max_frames - 1
        most_frames = 1 + latent_frames * load_tokenizer(info.tokenizer_folder).temporal_compression
        usual["num_frames"] = min(usual["num_frames"], most_frames)
    chosen = {name: value for name, value in asdict(config.validation.sampling).items() if value is not None}
    settings = usual | chosen
    if settings["shift"] in AUTO_SHIFTS:
        settings["shift"] = fitting_shift(settings["shift"], settings, usual)
    return SamplingSettings(**settings)
