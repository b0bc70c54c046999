"""How videos are sampled unless somebody says otherwise: in the size of the samples that were trained on."""

from itertools import islice

from megadit.models.settings import SamplingSettings
from megadit.models.tokenizers import load_tokenizer
from megadit.train.config.schema import RunConfig
from megadit.train.data.dataset_info import DatasetInfo, iter_descriptions

_SAMPLES_LOOKED_AT = 256


def sampling_defaults(config: RunConfig, info: DatasetInfo) -> SamplingSettings:
    """What the run's validation samples with; the size of the longest of its first training samples, as cropped."""
    samples = islice(iter_descriptions(info.root, "train"), _SAMPLES_LOOKED_AT)
    longest = max(samples, key=lambda sample: (sample["num_frames"], sample["height"] * sample["width"]))
    num_frames = longest["num_frames"]
    if config.data.max_frames is not None:
        latent_frames = config.data.max_frames - 1
        num_frames = min(num_frames, 1 + latent_frames * load_tokenizer(info.tokenizer_folder).temporal_compression)
    return SamplingSettings(
        sampler=config.validation.sampler,
        num_steps=config.validation.num_steps,
        guidance=config.validation.guidance,
        eta=config.validation.eta,
        num_frames=num_frames,
        height=longest["height"],
        width=longest["width"],
        fps=longest["fps"],
    )
