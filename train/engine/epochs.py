"""Conversion of epochs to steps."""

from contextlib import suppress
from dataclasses import replace
from itertools import islice
from math import ceil, prod

from megadit.models.shared.errors import UserError
from megadit.train.config.schema import RunConfig

LOOKED_AT = 1000
"""Number of samples whose sizes decide the estimate of samples per pack."""


def with_epochs(config: RunConfig) -> RunConfig:
    """`config` with `train.max_epochs`, if set, replaced by the corresponding `train.train_iters`.

    An epoch is as many samples as the training split has. Samples per step are estimated by packing the first
    `LOOKED_AT` by their video tokens; if texts fill packs first, the run sees fewer samples.

    Raises:
        UserError: if the number of samples is not known, or none of them has a valid size.
    """
    epochs = config.train.max_epochs
    if epochs is None:
        return config
    _require_a_size(config)
    from megadit.train.dataset.dataset_info import DatasetInfo  # torch comes with it

    info = DatasetInfo.read(config.data.path)
    samples = info.num_samples.get("train", 0)
    steps = ceil(epochs * samples / (config.data.global_batch_size * _samples_of_a_pack(config, info)))
    return replace(config, train=replace(config.train, train_iters=max(1, steps), max_epochs=None))


def _require_a_size(config: RunConfig) -> None:
    path = config.data.path
    why = None
    if config.data.mock:
        why = "data.mock=true has no end"
    elif path is None:
        why = "data.path is not set"
    elif str(path).endswith((".yaml", ".yml")):
        why = f"{path} blends data sets, whose epochs end at different times"
    if why is not None:
        raise UserError(f"train.max_epochs={config.train.max_epochs:g} needs a data set of known size, and {why}; "
                        "give train.train_iters (trainer.max_steps)")  # fmt: skip


def _samples_of_a_pack(config: RunConfig, info) -> float:
    from megadit.models.tokenizers import load_tokenizer
    from megadit.train.data.packs.bin_packing import best_fit
    from megadit.train.dataset.dataset_info import iter_descriptions

    tokenizer, capacity = load_tokenizer(info.tokenizer_folder), config.data.seq_length
    lengths = []
    for sample in islice(iter_descriptions(info.root, "train"), LOOKED_AT):
        with suppress(UserError):  # invalid size: readers leave it out, too
            frames, *sides = tokenizer.latent_shape(sample.num_frames, sample.height, sample.width)[-3:]
            tokens = prod(config.model.sample_grid(min(frames, config.data.max_frames or frames), *sides))
            lengths += [(tokens, 1)] if tokens <= capacity else []
    if not lengths:
        raise UserError(f"{info.root}: no sample of known size fits into data.seq_length={capacity}; raise that")
    return len(lengths) / len(best_fit(lengths, (capacity, config.data.text_seq_length)))
