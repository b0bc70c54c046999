"""Runs of fixed shapes and mock data with published throughputs: NeMo's table for 32 nodes of 8 H100, and its mock run.

`train/LAYOUTS.md` compares the published throughputs (tokens/s/GPU) with the planner's. They do not state the global
batch size; 256 packs, as in their example command, are assumed. There are no EMA weights. The networks are NeMo's
(`model.family=nemo`: 7.17 and 28.26 billion parameters): their size gives published TFLOP/s.
"""

from dataclasses import replace

from megadit.models.configs.named import NAMED_CONFIGS
from megadit.train.config.schema import ParallelConfig, RunConfig
from megadit.train.recipes.pretrain import TP2
from megadit.train.recipes.registry import recipe, run_of, variant


@recipe
def performance_7b_8k_baseline() -> RunConfig:
    """DiT-7B on 256 frames of 256 pixels without any optimization: published as out of memory, refused by --gpu.

    Command: torchrun --nnodes 32 --nproc-per-node 8 -m megadit.train --recipe performance_7b_8k_baseline
    Hardware: 256 GPUs with more memory than 80 GB.
    Tokens: 2.1 million a step (256 packs of 8,192).
    Memory: 150 GiB a rank.
    """
    return run_of(
        model=replace(NAMED_CONFIGS["dit_7b"], family="nemo"),
        data=dict(
            mock=True, seq_length=8192, text_seq_length=512, global_batch_size=256, mock_latent_shapes=((32, 32, 32),)
        ),
        train=dict(train_iters=20, log_interval=1),
        optimizer=dict(lr=1e-4, lr_decay_style="constant"),
        ema=dict(sigma_rels=()),
        checkpoint=dict(save_interval=1_000_000),
        validation=dict(interval=0),
    )


@recipe
def performance_7b_8k() -> RunConfig:
    """DiT-7B on 256 frames of 256 pixels: published at 10,052 tokens/s/GPU.

    Command: torchrun --nnodes 32 --nproc-per-node 8 -m megadit.train --recipe performance_7b_8k
    Hardware: 256 GPUs with 80 GB.
    Tokens: 2.1 million a step (256 packs of 8,192).
    Memory: 43 GiB a rank.
    """
    return variant(performance_7b_8k_baseline(), parallel=TP2)


@recipe
def performance_7b_74k() -> RunConfig:
    """DiT-7B on 256 frames of 768 pixels: published at 3,409 tokens/s/GPU.

    Command: torchrun --nnodes 32 --nproc-per-node 8 -m megadit.train --recipe performance_7b_74k
    Hardware: 256 GPUs with 80 GB.
    Tokens: 18.9 million a step (256 packs of 73,728).
    Memory: 61 GiB a rank.
    """
    return variant(
        performance_7b_8k(),
        data=dict(seq_length=73_728, mock_latent_shapes=((32, 96, 96),)),
        parallel=dict(context_parallel_size=4),
    )


@recipe
def performance_28b_8k() -> RunConfig:
    """DiT-28B on 256 frames of 256 pixels: published at 2,510 tokens/s/GPU.

    Command: torchrun --nnodes 32 --nproc-per-node 8 -m megadit.train --recipe performance_28b_8k
    Hardware: 256 GPUs with 80 GB.
    Tokens: 2.1 million a step (256 packs of 8,192).
    Memory: 39 GiB a rank.
    """
    return variant(
        performance_7b_8k(),
        model=replace(NAMED_CONFIGS["dit_28b"], family="nemo"),
        parallel=dict(tensor_model_parallel_size=4, pipeline_model_parallel_size=4),
    )


@recipe
def performance_28b_64k() -> RunConfig:
    """DiT-28B on 65,536 tokens with FSDP and recomputed blocks: published at 1,386 tokens/s/GPU.

    Published as "256 frames of 1024px video", which would be 131,072 tokens of the other rows' tokenizer; 16 latent
    frames of 1024 pixels are 65,536.

    Command: torchrun --nnodes 32 --nproc-per-node 8 -m megadit.train --recipe performance_28b_64k
    Hardware: 256 GPUs with 80 GB.
    Tokens: 16.8 million a step (256 packs of 65,536).
    Memory: 54 GiB a rank.
    """
    return variant(
        performance_28b_8k(),
        data=dict(seq_length=65_536, mock_latent_shapes=((16, 128, 128),)),
        parallel=ParallelConfig(data_parallel="fsdp", recompute_granularity="full"),
    )


@recipe
def mock_dit7b_8k() -> RunConfig:
    """Fifteen steps of DiT-7B on mock clips of 8,192 tokens, with the settings of NeMo's `mock_dit7b_8k`.

    Command: torchrun --nnodes 2 --nproc-per-node 8 -m megadit.train --recipe mock_dit7b_8k
    Hardware: 16 GPUs with 80 GB.
    Tokens: 262,144 a step (32 packs of 8,192).
    Memory: 26 GiB a rank.
    """
    return variant(
        performance_7b_8k(),
        data=dict(global_batch_size=32),
        train=dict(train_iters=15),
        parallel=dict(data_parallel="fsdp"),
    )
