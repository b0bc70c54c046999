"""The scenes of `make demo-shapes`, on a CPU."""

from megadit.models.configs.named import NAMED_CONFIGS
from megadit.train.config.schema import RunConfig
from megadit.train.recipes.digits import digits, digits_dreambooth
from megadit.train.recipes.registry import recipe, variant


@recipe
def shapes() -> RunConfig:
    """The run of `make demo-shapes`: captioned scenes of moving things, some from their first frame.

    Command: torchrun --nproc-per-node 2 -m megadit.train --recipe shapes data.path=FOLDER train.output_dir=FOLDER
    Hardware: 2 CPU cores, 2 GB of memory; any GPU.
    Tokens: 3,840 a step in two packs (an image is 16, a clip of 9 frames 48).
    Memory: 0.11 GiB a rank, plus Python and torch.
    """
    return variant(
        digits(),
        model=NAMED_CONFIGS["shapes"],
        data=dict(text_seq_length=768, conditioning=("first_frame:0.15",)),
        train=dict(train_iters=1200),
        validation=dict(
            interval=600,
            # at 4 fewer clips are right, of one thing as of two
            sampling=dict(guidance=2.0),
        ),
    )


@recipe
def shapes_dreambooth() -> RunConfig:
    """An adapter of rank 4 of the network of `make demo-shapes`, for a subject of ten clips: a minute on a CPU.

    Command: torchrun --nproc-per-node 2 -m megadit.train --recipe shapes_dreambooth data.path=BLEND
        checkpoint.init_from=BUNDLE
    Hardware: 2 CPU cores.
    Tokens: 1,536 a step in two packs, 307 thousand in all.
    Memory: 0.038 GiB a rank, plus Python and torch.
    """
    return variant(digits_dreambooth(), model=NAMED_CONFIGS["shapes"], data=dict(text_seq_length=320, prior_weight=1.0))
