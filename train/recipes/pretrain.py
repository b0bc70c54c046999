"""Published recipes with the names and numbers of NeMo and DFM.

Token counts are for texts of 512 tokens and an 8x spatial tokenizer, so that a 256 x 256 image is 256 tokens.
"""

from dataclasses import replace

from megadit.models.configs.adapter import AdapterConfig
from megadit.models.configs.named import NAMED_CONFIGS
from megadit.train.config.schema import OptimizerConfig, ParallelConfig, RunConfig
from megadit.train.recipes.registry import recipe, run_of, variant

TP2 = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, data_parallel="distributed_optimizer")
"""Layout of NeMo's joint image and video runs."""


@recipe
def pretrain_xl() -> RunConfig:
    """DiT-XL from random weights, with the settings of NeMo's `pretrain_xl`.

    Command: torchrun --nproc-per-node 8 -m megadit.train --recipe pretrain_xl data.path=FOLDER
    Hardware: one node of 8 GPUs with 80 GB.
    Tokens: 65,536 a step (32 packs of 2,048). The original names no last step; 500,000 is ours.
    Memory: 20 GiB a rank.
    """
    return run_of(
        model=NAMED_CONFIGS["dit_xl"],
        data=dict(seq_length=2048, text_seq_length=4096, global_batch_size=32, num_workers=8, text_dropout=0.2),
        train=dict(train_iters=500_000, log_interval=1),
        optimizer=dict(lr=1e-4, adam_beta2=0.999, lr_decay_style="constant"),
        checkpoint=dict(save_interval=1000, keep_last=3),
        # NeMo writes cond + 7 (cond - uncond), which is a guidance of 8 here.
        validation=dict(interval=1000, num_batches=1, sampling=dict(guidance=8.0)),
    )


@recipe
def pretrain_l() -> RunConfig:
    """DiT-L from random weights, with the settings of NeMo's `pretrain_l`.

    Command: torchrun --nproc-per-node 8 -m megadit.train --recipe pretrain_l data.path=FOLDER
    Hardware: one node of 8 GPUs with 40 GB.
    Tokens: 65,536 a step (32 packs of 2,048).
    Memory: 14 GiB a rank.
    """
    return variant(pretrain_xl(), model=NAMED_CONFIGS["dit_l"])


@recipe
def pretrain_7b() -> RunConfig:
    """DiT-7B on single images of 256 x 256, with the settings of NeMo's `pretrain_7b`.

    Command: torchrun --nnodes 32 --nproc-per-node 8 -m megadit.train --recipe pretrain_7b data.path=FOLDER
    Hardware: 256 GPUs with 80 GB. A global batch of 4,608 packs in micro-batches of 9 divides among 256 ranks twice.
    Tokens: 1.2 million a step (4,608 packs of 260, one image each).
    Memory: 54 GiB a rank.
    """
    return variant(
        pretrain_xl(),
        model=NAMED_CONFIGS["dit_7b"],
        data=dict(
            seq_length=260,
            text_seq_length=512,
            micro_batch_size=9,
            global_batch_size=4608,
            num_workers=15,
            use_train_split_for_val=True,
            mock_latent_shapes=((1, 32, 32),),
        ),
        optimizer=dict(weight_decay=0.1, adam_beta2=0.95, lr_warmup_iters=100),
        parallel=dict(data_parallel="distributed_optimizer"),
    )


@recipe
def pretrain_7b_pack() -> RunConfig:
    """`pretrain_7b` with about nine images to a pack, as NeMo's `pretrain_7b_pack`.

    Command: torchrun --nnodes 32 --nproc-per-node 8 -m megadit.train --recipe pretrain_7b_pack data.path=FOLDER
    Hardware: 256 GPUs with 80 GB; two micro-batches of one pack for each.
    Tokens: 1.2 million a step (512 packs of 2,304).
    Memory: 54 GiB a rank.
    """
    return variant(
        pretrain_7b(),
        data=dict(
            seq_length=2304,
            text_seq_length=4608,
            micro_batch_size=1,
            global_batch_size=512,
            packing_buffer_size=1000,
            mock_latent_shapes=((1, 32, 32), (4, 32, 32)),
        ),
    )


@recipe
def pretrain_7b_256p_joint() -> RunConfig:
    """DiT-7B on single clips or images of 256 pixels, with the settings of NeMo's `pretrain_7b_256p_joint`.

    Command: torchrun --nnodes 32 --nproc-per-node 8 -m megadit.train --recipe pretrain_7b_256p_joint data.path=FOLDER
    Hardware: 256 GPUs with 80 GB.
    Tokens: 2.1 million a step (256 packs of 8,192: one clip of 32 latent frames fills a pack).
    Memory: 45 GiB a rank.
    """
    return variant(
        pretrain_7b(),
        data=dict(
            seq_length=8192,
            micro_batch_size=1,
            global_batch_size=256,
            packing_buffer_size=1,
            mock_latent_shapes=((32, 32, 32),),
        ),
        optimizer=dict(lr=6e-5),
        parallel=TP2,
    )


@recipe
def pretrain_7b_256p_joint_pack() -> RunConfig:
    """Images and clips of 256 pixels packed together, with the settings of NeMo's `pretrain_7b_256p_joint_pack`.

    Command: torchrun --nnodes 32 --nproc-per-node 8 -m megadit.train --recipe pretrain_7b_256p_joint_pack data.path=...
    Hardware: 256 GPUs with 80 GB.
    Tokens: 1.3 million a step (128 packs of 10,240).
    Memory: 50 GiB a rank.
    """
    return variant(
        pretrain_7b_256p_joint(),
        data=dict(
            seq_length=10_240,
            text_seq_length=5120,
            global_batch_size=128,
            packing_buffer_size=1000,
            mock_latent_shapes=((1, 32, 32), (8, 32, 32), (16, 32, 32)),
        ),
    )


@recipe
def stage1_7b_256() -> RunConfig:
    """The first of three stages of a video model: DiT-7B on images of 256 pixels, 256 tokens each.

    The stages are those of NeMo's table (256, 8k and 74k tokens). The second and third start from the weights of the
    run before, which checkpoint.init_from=RUN names: other packs make another run, with steps of its own.

    Command: torchrun --nnodes 32 --nproc-per-node 8 -m megadit.train --recipe stage1_7b_256 data.path=FOLDER
    Hardware: 256 GPUs with 80 GB.
    Tokens: 1.2 million a step (512 packs of 2,304).
    Memory: 54 GiB a rank.
    """
    return variant(pretrain_7b_pack(), data=dict(mock_latent_shapes=((1, 32, 32),)), train=dict(train_iters=100_000))


@recipe
def stage2_7b_8k() -> RunConfig:
    """The second stage: images and clips of 256 pixels, up to 32 latent frames (8,192 tokens).

    Command: torchrun --nnodes 32 --nproc-per-node 8 -m megadit.train --recipe stage2_7b_8k data.path=FOLDER
        checkpoint.init_from=RUN
    Hardware: 256 GPUs with 80 GB.
    Tokens: 1.3 million a step (128 packs of 10,240).
    Memory: 50 GiB a rank.
    """
    return variant(
        pretrain_7b_256p_joint_pack(),
        data=dict(mock_latent_shapes=((1, 32, 32), (4, 32, 32), (32, 32, 32))),
        train=dict(train_iters=100_000),
    )


@recipe
def stage3_7b_74k() -> RunConfig:
    """The third stage: images and clips of 768 pixels, up to 32 latent frames (73,728 tokens).

    Command: torchrun --nnodes 32 --nproc-per-node 8 -m megadit.train --recipe stage3_7b_74k data.path=FOLDER
        checkpoint.init_from=RUN
    Hardware: 256 GPUs with 80 GB; four context-parallel ranks share a pack.
    Tokens: 4.7 million a step (64 packs of 73,728).
    Memory: 65 GiB a rank.
    """
    return variant(
        stage2_7b_8k(),
        data=dict(
            seq_length=73_728,
            text_seq_length=8192,
            global_batch_size=64,
            mock_latent_shapes=((32, 96, 96), (1, 96, 96), (8, 96, 96)),
        ),
        train=dict(train_iters=50_000),
        parallel=replace(TP2, context_parallel_size=4),
    )


@recipe
def dreambooth() -> RunConfig:
    """A trained DiT-S taught one subject by an adapter, in packs as NeMo's `dreambooth` has them.

    NeMo trains all weights; so does train.adapter=null optimizer.lr=1e-6, its learning rate. It asks for eight
    tensor-parallel ranks, which cannot share the six heads of DiT-S; two do. BLEND mixes clips of the subject with a
    prior (`megadit prepare prior`); train/conf/dreambooth.yaml shows all of it.

    Command: torchrun --nproc-per-node 8 -m megadit.train --recipe dreambooth data.path=BLEND
        checkpoint.init_from=RUN
    Hardware: one node of 8 GPUs with 24 GB.
    Tokens: 65,536 a step (32 packs of 2,048), 1,000 steps.
    Memory: 0.35 GiB a rank.
    """
    return variant(
        pretrain_xl(),
        model=NAMED_CONFIGS["dit_s"],
        # without its words the subject would be what every prompt is led away from
        data=dict(text_dropout=0.0, prior_text_dropout=0.1),
        train=dict(train_iters=1000, adapter=AdapterConfig(rank=16)),
        parallel=TP2,
    )


@recipe
def dit_pretrain() -> RunConfig:
    """DiT-XL on packed images and clips, with the settings of DFM's `pretrain_config` and `conf/dit_pretrain.yaml`.

    Command: torchrun --nproc-per-node 8 -m megadit.train --recipe dit_pretrain data.path=FOLDER
    Hardware: one node of 8 GPUs with 80 GB.
    Tokens: 122,880 a step (8 packs of 15,360), 1.2 billion in all.
    Memory: 37 GiB a rank.
    """
    return variant(
        pretrain_xl(),
        data=dict(
            seq_length=15_360, text_seq_length=15_360, global_batch_size=8, num_workers=20, packing_buffer_size=100
        ),
        train=dict(train_iters=10_000, log_interval=10),
        optimizer=OptimizerConfig(lr=9e-5, min_lr=9e-6, weight_decay=0.1, lr_warmup_iters=2000),
        validation=dict(num_batches=32),
    )
