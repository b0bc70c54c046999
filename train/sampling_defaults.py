"""How videos are sampled unless somebody says otherwise: in the size of the samples that were trained on."""

from itertools import islice

from megadit.models.bundle import SamplingDefaults
from megadit.train.config import RunConfig
from megadit.train.data.dataset_info import DatasetInfo, iter_descriptions

_SAMPLES_LOOKED_AT = 256


def sampling_defaults(config: RunConfig, info: DatasetInfo) -> SamplingDefaults:
    """What the run's validation samples with; the size of the longest of its first training samples."""
    samples = islice(iter_descriptions(info.root, "train"), _SAMPLES_LOOKED_AT)
    longest = max(samples, key=lambda sample: (sample["num_frames"], sample["height"] * sample["width"]))
    return SamplingDefaults(
        sampler=config.validation.sampler,
        num_steps=config.validation.num_steps,
        guidance=config.validation.guidance,
        eta=config.validation.eta,
        num_frames=longest["num_frames"],
        height=longest["height"],
        width=longest["width"],
        fps=longest["fps"],
    )
