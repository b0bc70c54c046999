"""CLIP of captioned images (arXiv 2103.00020): pixels and tokens (`megadit prepare images --tokenizer pixels
--text_encoder tokens`), no noise.

The numbers are those of its table 18 for the ViTs. Each image is compared with the texts of `data.micro_batch_size`
packs on every rank: here with those of the whole batch.
"""

from megadit.models.configs.named import NAMED_CONFIGS
from megadit.train.config.schema import OptimizerConfig, RunConfig
from megadit.train.recipes.registry import recipe, variant
from megadit.train.recipes.vit import vit_b_16, vit_digits


@recipe
def clip_b_32() -> RunConfig:
    """CLIP ViT-B/32 of images of 224 x 224: 32 passes over 400 million pairs, 32,768 in a batch.

    Command: torchrun --nnodes 8 --nproc-per-node 8 -m megadit.train --recipe clip_b_32 data.path=FOLDER
    Hardware: eight nodes of 8 GPUs with 24 GB.
    Tokens: 1,638,400 a step (32,768 images of 50 in 128 packs).
    Memory: 11 GiB a rank.
    """
    return variant(
        vit_b_16(),
        model=NAMED_CONFIGS["clip_b_32"],
        data=dict(
            seq_length=256 * 50,
            text_seq_length=256 * 24,
            micro_batch_size=2,
            global_batch_size=128,
            packing_buffer_size=1024,
        ),
        train=dict(train_iters=390_000, label_smoothing=0.0, contrast_rows=256),
        optimizer=OptimizerConfig(lr=5e-4, weight_decay=0.2, adam_beta2=0.98, adam_eps=1e-6, lr_warmup_iters=2000),
        validation=dict(num_batches=128),
    )


def _of_size(name: str, *, images: int, packs: int, tokens: int, at_once: int, rate: float) -> RunConfig:
    return variant(
        clip_b_32(),
        model=NAMED_CONFIGS[name],
        data=dict(
            seq_length=images * tokens, text_seq_length=images * 24, micro_batch_size=at_once, global_batch_size=packs
        ),
        optimizer=dict(lr=rate, adam_beta2=0.98),
    )


@recipe
def clip_l_14() -> RunConfig:
    """CLIP ViT-L/14, otherwise as `clip_b_32`.

    Command: torchrun --nnodes 32 --nproc-per-node 8 -m megadit.train --recipe clip_l_14 data.path=FOLDER
    Hardware: 32 nodes of 8 GPUs with 40 GB.
    Tokens: 8,421,376 a step (32,768 images of 257 in 512 packs).
    Memory: 30 GiB a rank.
    """
    return _of_size("clip_l_14", images=64, packs=512, tokens=257, at_once=2, rate=4e-4)


@recipe
def clip_h_14() -> RunConfig:
    """CLIP ViT-H/14 in LAION's form, otherwise as `clip_b_32`.

    Command: torchrun --nnodes 64 --nproc-per-node 8 -m megadit.train --recipe clip_h_14 data.path=FOLDER
    Hardware: 64 nodes of 8 GPUs with 40 GB.
    Tokens: 8,421,376 a step (32,768 images of 257 in 512 packs).
    Memory: 28 GiB a rank.
    """
    return _of_size("clip_h_14", images=64, packs=512, tokens=257, at_once=1, rate=5e-4)


@recipe
def clip_digits() -> RunConfig:
    """Matches coloured handwritten digits with captions (`megadit prepare digit_captions`): minutes on two CPU cores.

    Command: torchrun --nproc-per-node 2 -m megadit.train --recipe clip_digits data.path=FOLDER
    Hardware: 2 CPU cores.
    Tokens: 16,640 a step in two packs (an image of 32 x 32 is 65).
    Memory: 0.32 GiB a rank, plus Python and torch.
    """
    return variant(
        vit_digits(),
        model=NAMED_CONFIGS["clip_digits"],
        data=dict(seq_length=128 * 65, text_seq_length=128 * 12, mixup=0.0),
        train=dict(train_iters=400, label_smoothing=0.0),
        optimizer=dict(lr=4e-3),
        checkpoint=dict(save_interval=200),
        validation=dict(interval=200, num_batches=2),
    )
