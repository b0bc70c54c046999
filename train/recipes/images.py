"""Images from words by our DiT, in two stages of resolution, on latents of an AutoencoderKL (SDXL's VAE) and features
of CLIP (`megadit prepare images --sizes 256x256 --tokenizer VAE --text_encoder CLIP`).

Batches and steps are those by which NeMo's launcher trains Stable Diffusion: 680 million images of 256 pixels, then
409 million of 512, which start from the weights of the run before (checkpoint.init_from=RUN). The same picture then
has four times as many tokens, whose positions lie half as far apart (`model.rope_interpolation`) and whose noise is
twice as strong (`diffusion.shift_tokens`).
"""

from megadit.models.configs.named import NAMED_CONFIGS
from megadit.train.config.schema import RunConfig
from megadit.train.recipes.digits import digits
from megadit.train.recipes.registry import recipe, run_of, variant

LONGEST_TEXT = 77
"""Tokens of CLIP."""
TWICE_AS_DENSE = (1.0, 2.0, 2.0)
"""Tokens along time, height and width of the second stage."""


@recipe
def image_xl_256() -> RunConfig:
    """The first of two stages of DiT-XL on images of 256 pixels, 256 tokens each, with the text of CLIP L/14.

    Command: torchrun --nnodes 8 --nproc-per-node 8 -m megadit.train --recipe image_xl_256 data.path=FOLDER
    Hardware: 64 GPUs with 24 GB.
    Tokens: 2.1 million a step (8,192 images in 256 packs of 8,192).
    Memory: 15 GiB a rank.
    """
    return run_of(
        model=NAMED_CONFIGS["image_xl"],
        data=dict(
            seq_length=32 * 256,
            text_seq_length=32 * LONGEST_TEXT,
            global_batch_size=256,
            num_workers=8,
            packing_buffer_size=256,
            text_dropout=0.1,
            mock_latent_shapes=((1, 32, 32),),
        ),
        train=dict(train_iters=83_000),
        diffusion=dict(shift_tokens=256),
        optimizer=dict(lr=1e-4, weight_decay=0.01, adam_beta2=0.999, lr_warmup_iters=10_000, lr_decay_style="constant"),
        parallel=dict(data_parallel="distributed_optimizer"),
        checkpoint=dict(save_interval=1000, keep_last=3),
        validation=dict(interval=1000, num_batches=8, sampling=dict(guidance=7.5)),
    )


@recipe
def image_xl_512() -> RunConfig:
    """The second stage: images of 512 pixels, 1,024 tokens each.

    Command: torchrun --nnodes 8 --nproc-per-node 8 -m megadit.train --recipe image_xl_512 data.path=FOLDER
        checkpoint.init_from=RUN
    Hardware: 64 GPUs with 24 GB.
    Tokens: 8.4 million a step (8,192 images in 1,024 packs of 8,192).
    Memory: 15 GiB a rank.
    """
    return variant(
        image_xl_256(),
        model=dict(rope_interpolation=TWICE_AS_DENSE),
        data=dict(text_seq_length=8 * LONGEST_TEXT, global_batch_size=1024, mock_latent_shapes=((1, 64, 64),)),
        train=dict(train_iters=50_000),
    )


@recipe
def image_digits() -> RunConfig:
    """Both stages in small, the first: coloured digits of 32 pixels (`megadit prepare digit_images`), 16 tokens each.

    Command: torchrun --nproc-per-node 2 -m megadit.train --recipe image_digits data.path=FOLDER
    Hardware: 2 CPU cores, 2 GB of memory; any GPU.
    Tokens: 3,840 a step in two packs (240 images).
    Memory: 0.11 GiB a rank, plus Python and torch.
    """
    return variant(
        digits(),
        # rotary positions alone, as in `image_xl`: a second stage divides them, and would have to learn others anew
        model=dict(learned_positions=None),
        data=dict(text_seq_length=960, mock_latent_shapes=((1, 4, 4),)),
        train=dict(train_iters=900),
        diffusion=dict(p_mean=1.0, shift_tokens=16),
        checkpoint=dict(save_interval=450),
        validation=dict(interval=450),
    )


@recipe
def image_digits_64() -> RunConfig:
    """The second: the same pictures in 64 pixels (`megadit prepare digit_images_64`), 64 tokens each.

    Command: torchrun --nproc-per-node 2 -m megadit.train --recipe image_digits_64 data.path=FOLDER
        checkpoint.init_from=RUN
    Hardware: 2 CPU cores, 2 GB of memory; any GPU.
    Tokens: 3,840 a step in two packs (60 images).
    Memory: 0.11 GiB a rank, plus Python and torch.
    """
    return variant(
        image_digits(),
        model=dict(rope_interpolation=TWICE_AS_DENSE),
        data=dict(text_seq_length=240, mock_latent_shapes=((1, 8, 8),)),
        train=dict(train_iters=450),
        optimizer=dict(lr=6e-3),
    )
