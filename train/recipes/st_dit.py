"""The spatio-temporal DiT under the names that NeMo gave it; its largest is shown with the hybrid of layouts it is for.

Attention over all tokens passes keys and values round a ring; attention along time and along space sends nothing, as
the tokens themselves move so that each rank has whole columns and frames (`models/networks/axial.py`,
`train/LAYOUTS.md`).
"""

from dataclasses import replace

from megadit.models.configs.named import NAMED_CONFIGS
from megadit.train.config.schema import RunConfig
from megadit.train.recipes.performance import performance_7b_8k
from megadit.train.recipes.pretrain import pretrain_7b_256p_joint_pack, pretrain_xl
from megadit.train.recipes.registry import recipe, variant


@recipe
def pretrain_stdit_xl() -> RunConfig:
    """ST-DiT-XL on packed images and clips of 256 pixels.

    Command: torchrun --nnodes 2 --nproc-per-node 8 -m megadit.train --recipe pretrain_stdit_xl data.path=FOLDER
    Hardware: 16 GPUs with 80 GB.
    Tokens: 1.3 million a step (128 packs of 10,240).
    Memory: 30 GiB a rank.
    """
    return variant(
        pretrain_7b_256p_joint_pack(),
        model=NAMED_CONFIGS["st_dit_xl"],
        optimizer=dict(lr=1e-4),
        parallel=replace(pretrain_xl().parallel, data_parallel="distributed_optimizer"),
    )


@recipe
def pretrain_stdit_3b() -> RunConfig:
    """ST-DiT-3B on images and clips of 768 pixels, up to 32 latent frames (73,728 tokens), four ranks to a pack.

    Command: torchrun --nnodes 8 --nproc-per-node 8 -m megadit.train --recipe pretrain_stdit_3b data.path=FOLDER
    Hardware: 64 GPUs with 80 GB.
    Tokens: 2.4 million a step (32 packs of 73,728).
    Memory: 41 GiB a rank.
    """
    return variant(
        pretrain_stdit_xl(),
        model=NAMED_CONFIGS["st_dit_3b"],
        data=dict(
            seq_length=73_728,
            text_seq_length=8192,
            global_batch_size=32,
            mock_latent_shapes=((32, 96, 96), (1, 96, 96), (8, 96, 96)),
        ),
        parallel=dict(tensor_model_parallel_size=2, sequence_parallel=True, context_parallel_size=4),
    )


@recipe
def pretrain_stdit3B_mock_data() -> RunConfig:
    """Fifteen steps of ST-DiT-3B on mock clips of four frames, with the settings of `pretrain_stdit3B_mock_data`.

    Command: torchrun --nproc-per-node 8 -m megadit.train --recipe pretrain_stdit3B_mock_data
    Hardware: one node of 8 GPUs with 40 GB.
    Tokens: 8,192 a step (8 packs of 1,024).
    Memory: 13 GiB a rank.
    """
    return variant(
        performance_7b_8k(),
        model=NAMED_CONFIGS["st_dit_3b"],
        data=dict(seq_length=1024, global_batch_size=8, mock_latent_shapes=((4, 32, 32),)),
        train=dict(train_iters=15),
        parallel=dict(tensor_model_parallel_size=4),
    )
