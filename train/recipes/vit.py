"""ViT of labelled images, or clips: pixels (`megadit prepare ... --tokenizer pixels --text_encoder labels`), no noise.

The numbers are those of arXiv 2205.01580 for ImageNet-1k from scratch, but for its random changes of pictures, which no
reader here makes, and for label smoothing in the place of its mixup, which is `data.mixup=0.2`.
"""

from megadit.models.configs.named import NAMED_CONFIGS
from megadit.train.config.schema import OptimizerConfig, ParallelConfig, RunConfig
from megadit.train.recipes.registry import recipe, run_of, variant


@recipe
def vit_b_16() -> RunConfig:
    """ViT-B/16 of images of 224 x 224 in 1,000 classes: 90 passes over ImageNet-1k.

    Command: torchrun --nproc-per-node 8 -m megadit.train --recipe vit_b_16 data.path=FOLDER
    Hardware: one node of 8 GPUs with 24 GB.
    Tokens: 201,728 a step (1,024 images of 197 in 16 packs).
    Memory: 4.7 GiB a rank.
    """
    return run_of(
        model=NAMED_CONFIGS["vit_b_16"],
        data=dict(
            seq_length=64 * 197,
            text_seq_length=64,
            global_batch_size=16,
            num_workers=12,
            packing_buffer_size=128,
            shuffle_buffer_size=10_000,
            text_dropout=0.0,
            encode="on_the_fly",
            mock_latent_shapes=((1, 224, 224),),
        ),
        train=dict(train_iters=112_600, label_smoothing=0.1),
        optimizer=dict(lr=1e-3, weight_decay=0.1, adam_beta2=0.999, lr_warmup_iters=10_000),
        ema=dict(sigma_rels=(0.05,)),
        parallel=dict(data_parallel="distributed_optimizer"),
        checkpoint=dict(save_interval=2500),
        validation=dict(interval=2500, num_batches=782),
    )


def _of_size(name: str, *, images: int, packs: int, tokens: int, rate: float) -> RunConfig:
    return variant(
        vit_b_16(),
        model=NAMED_CONFIGS[name],
        data=dict(seq_length=images * tokens, text_seq_length=images, global_batch_size=packs),
        optimizer=dict(lr=rate),
    )


@recipe
def vit_l_16() -> RunConfig:
    """ViT-L/16, otherwise as `vit_b_16`.

    Command: torchrun --nproc-per-node 16 -m megadit.train --recipe vit_l_16 data.path=FOLDER
    Hardware: two nodes of 8 GPUs with 24 GB.
    Tokens: 201,728 a step (1,024 images of 197 in 32 packs).
    Memory: 7.2 GiB a rank.
    """
    return _of_size("vit_l_16", images=32, packs=32, tokens=197, rate=6e-4)


@recipe
def vit_h_14() -> RunConfig:
    """ViT-H/14, otherwise as `vit_b_16`.

    Command: torchrun --nproc-per-node 32 -m megadit.train --recipe vit_h_14 data.path=FOLDER
    Hardware: four nodes of 8 GPUs with 40 GB.
    Tokens: 263,168 a step (1,024 images of 257 in 32 packs).
    Memory: 15 GiB a rank.
    """
    return _of_size("vit_h_14", images=32, packs=32, tokens=257, rate=4e-4)


@recipe
def vit_g_14() -> RunConfig:
    """ViT-g/14, otherwise as `vit_b_16`.

    Command: torchrun --nproc-per-node 32 -m megadit.train --recipe vit_g_14 data.path=FOLDER
    Hardware: four nodes of 8 GPUs with 40 GB.
    Tokens: 263,168 a step (1,024 images of 257 in 64 packs).
    Memory: 14 GiB a rank.
    """
    return _of_size("vit_g_14", images=16, packs=64, tokens=257, rate=3e-4)


@recipe
def vit_G_14() -> RunConfig:
    """ViT-G/14, otherwise as `vit_b_16`.

    Command: torchrun --nproc-per-node 64 -m megadit.train --recipe vit_G_14 data.path=FOLDER
    Hardware: eight nodes of 8 GPUs with 40 GB.
    Tokens: 263,168 a step (1,024 images of 257 in 64 packs).
    Memory: 22 GiB a rank.
    """
    return _of_size("vit_G_14", images=16, packs=64, tokens=257, rate=2e-4)


@recipe
def vit_digits() -> RunConfig:
    """Classifies handwritten digits (`megadit prepare digit_classes`): a minute on two CPU cores.

    Command: torchrun --nproc-per-node 2 -m megadit.train --recipe vit_digits data.path=FOLDER
    Hardware: 2 CPU cores.
    Tokens: 8,320 a step in two packs (an image of 32 x 32 is 65).
    Memory: 0.11 GiB a rank, plus Python and torch.
    """
    return variant(
        vit_b_16(),
        model=NAMED_CONFIGS["vit_digits"],
        data=dict(
            seq_length=64 * 65,
            global_batch_size=2,
            num_workers=0,
            packing_buffer_size=256,
            shuffle_buffer_size=4096,
            encode="precached",
            mixup=0.2,
            mock_latent_shapes=((1, 32, 32),),
        ),
        train=dict(train_iters=500, precision="fp32", matmul_precision="bf16", log_interval=25),
        optimizer=OptimizerConfig(optimizer="muon", lr=5e-3, adam_beta2=0.99, lr_warmup_iters=30),
        parallel=ParallelConfig(),
        checkpoint=dict(save_interval=250),
        validation=dict(interval=250, num_batches=6),
    )


@recipe
def vit_digits_clips() -> RunConfig:
    """Classifies moving digits by colour, name and direction (`megadit prepare digit_clips`): minutes on two CPU cores.

    Command: torchrun --nproc-per-node 2 -m megadit.train --recipe vit_digits_clips data.path=FOLDER
    Hardware: 2 CPU cores.
    Tokens: 12,544 a step in two packs (a clip of 9 frames of 32 x 32 is 49).
    Memory: 0.3 GiB a rank, plus Python and torch.
    """
    return variant(
        vit_digits(),
        model=NAMED_CONFIGS["vit_digits_clips"],
        data=dict(seq_length=128 * 49, text_seq_length=128, mixup=0.0, mock_latent_shapes=((9, 32, 32),)),
        train=dict(train_iters=450),
        checkpoint=dict(save_interval=150),
        validation=dict(interval=150, num_batches=2),
    )
