"""MovieGen's networks (arXiv 2410.13720) under the names and with the settings of NeMo's `ditllama` factories.

Their text passes the MLP only (`model.compat=nemo` builds that); here it is added to the tokens, as the paper has it.
"""

from dataclasses import replace

from megadit.models.configs.named import NAMED_CONFIGS
from megadit.train.config.schema import (
    CheckpointConfig,
    DataConfig,
    EmaConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
    ValidationConfig,
)
from megadit.train.recipes.pretrain import TP2, pretrain_7b
from megadit.train.recipes.registry import recipe, variant

_FSDP = ParallelConfig(data_parallel="fsdp")


@recipe
def mock_ditllama5b_8k() -> RunConfig:
    """Fifteen steps of MovieGen-5B on mock clips of 8,192 tokens, with the settings of NeMo's `mock_ditllama5b_8k`.

    Command: torchrun --nnodes 2 --nproc-per-node 8 -m megadit.train --recipe mock_ditllama5b_8k
    Hardware: 16 GPUs with 80 GB.
    Tokens: 262,144 a step (32 packs of 8,192).
    Memory: 25 GiB a rank.
    """
    return RunConfig(
        recipe="mock_ditllama5b_8k",
        model=NAMED_CONFIGS["moviegen_5b"],
        data=DataConfig(
            mock=True, seq_length=8192, text_seq_length=512, global_batch_size=32, mock_latent_shapes=((32, 32, 32),)
        ),
        train=TrainConfig(train_iters=15, log_interval=1),
        optimizer=OptimizerConfig(lr=1e-4, lr_decay_style="constant"),
        parallel=replace(TP2, data_parallel="fsdp"),
        ema=EmaConfig(sigma_rels=()),
        checkpoint=CheckpointConfig(save_interval=1_000_000),
        validation=ValidationConfig(interval=0),
    )


@recipe
def train_mock() -> RunConfig:
    """MovieGen-5B of 16 layers on mock images, with the settings of NeMo's `train_mock`: one latent frame at most.

    Command: torchrun --nproc-per-node 8 -m megadit.train --recipe train_mock
    Hardware: one node of 8 GPUs with 80 GB.
    Tokens: 73,728 a step (one pack of 72 images).
    Memory: 32 GiB a rank.
    """
    return variant(
        mock_ditllama5b_8k(),
        model=dict(num_layers=16, learned_positions=(1, 120, 120), head_dim=None),
        data=dict(seq_length=73_728, text_seq_length=4096, global_batch_size=1, mock_latent_shapes=((1, 64, 64),)),
        train=dict(train_iters=1000),
        parallel=replace(_FSDP, tensor_model_parallel_size=4, sequence_parallel=True, context_parallel_size=2),
    )


@recipe
def pretrain_ditllama5b() -> RunConfig:
    """MovieGen-5B on single images of 256 x 256, with the settings of NeMo's `pretrain_ditllama5b`.

    Command: torchrun --nnodes 16 --nproc-per-node 8 -m megadit.train --recipe pretrain_ditllama5b data.path=FOLDER
    Hardware: 128 GPUs with 80 GB; three micro-batches of 12 images for each.
    Tokens: 1.2 million a step (4,608 packs of 260, one image each).
    Memory: 52 GiB a rank.
    """
    return variant(pretrain_7b(), model=NAMED_CONFIGS["moviegen_5b"], data=dict(micro_batch_size=12))


@recipe
def pretrain_ditllama3b() -> RunConfig:
    """MovieGen-3B on single images of 256 x 256, with the settings of NeMo's `pretrain_ditllama3b`.

    Command: torchrun --nnodes 4 --nproc-per-node 8 -m megadit.train --recipe pretrain_ditllama3b data.path=FOLDER
    Hardware: 32 GPUs with 80 GB; half of the blocks are recomputed.
    Tokens: 393,216 a step (1,536 packs of 256, one image each).
    Memory: 64 GiB a rank.
    """
    return variant(
        pretrain_ditllama1b(),
        model=NAMED_CONFIGS["moviegen_3b"],
        data=dict(micro_batch_size=48),
        parallel=dict(recompute_granularity="full", recompute_num_layers=14),
    )


@recipe
def pretrain_ditllama1b() -> RunConfig:
    """MovieGen-1B on single images of 256 x 256, with the settings of NeMo's `pretrain_ditllama1b`.

    Command: torchrun --nnodes 2 --nproc-per-node 8 -m megadit.train --recipe pretrain_ditllama1b data.path=FOLDER
    Hardware: 16 GPUs with 80 GB; one micro-batch of 96 images for each.
    Tokens: 393,216 a step (1,536 packs of 256, one image each).
    Memory: 57 GiB a rank.
    """
    return variant(
        pretrain_ditllama5b(),
        model=NAMED_CONFIGS["moviegen_1b"],
        data=dict(seq_length=256, micro_batch_size=96, global_batch_size=1536, min_aesthetic_score=4.0),
        checkpoint=dict(save_interval=3000),
        validation=dict(interval=3000),
    )


@recipe
def pretrain_ditllama30b() -> RunConfig:
    """MovieGen-30B on single images of 256 x 256, with the settings of NeMo's `pretrain_ditllama30b`.

    Command: torchrun --nnodes 32 --nproc-per-node 8 -m megadit.train --recipe pretrain_ditllama30b data.path=FOLDER
    Hardware: 256 GPUs with 80 GB; six micro-batches of 6 images for each.
    Tokens: 2.4 million a step (9,216 packs of 256, one image each).
    Memory: 32 GiB a rank.
    """
    return variant(
        pretrain_ditllama5b(),
        model=NAMED_CONFIGS["moviegen_30b"],
        data=dict(seq_length=256, micro_batch_size=6, global_batch_size=9216, min_aesthetic_score=4.0),
        parallel=_FSDP,
    )


@recipe
def pretrain_ditllama30b_stage2_mock() -> RunConfig:
    """MovieGen-30B on mock clips of 8,192 tokens, with the settings of NeMo's `pretrain_ditllama30b_stage2_mock`.

    Command: torchrun --nnodes 32 --nproc-per-node 8 -m megadit.train --recipe pretrain_ditllama30b_stage2_mock
    Hardware: 256 GPUs with 80 GB.
    Tokens: 2.1 million a step (256 packs of 8,192).
    Memory: 19 GiB a rank.
    """
    return variant(
        mock_ditllama5b_8k(),
        model=NAMED_CONFIGS["moviegen_30b"],
        data=dict(global_batch_size=256),
        train=dict(train_iters=1000),
        parallel=dict(context_parallel_size=4),
    )


@recipe
def pretrain_ditllama30b_stage3_mock() -> RunConfig:
    """MovieGen-30B on mock clips of 73,728 tokens, with the settings of NeMo's `pretrain_ditllama30b_stage3_mock`.

    Command: torchrun --nnodes 32 --nproc-per-node 8 -m megadit.train --recipe pretrain_ditllama30b_stage3_mock
    Hardware: 256 GPUs with 80 GB.
    Tokens: 18.9 million a step (256 packs of 73,728).
    Memory: 60 GiB a rank.
    """
    return variant(
        pretrain_ditllama30b_stage2_mock(),
        data=dict(seq_length=73_728, mock_latent_shapes=((32, 96, 96),)),
        parallel=dict(context_parallel_size=8),
    )


@recipe
def pretrain_ditllama5b_stage3_mock_with_pp() -> RunConfig:
    """MovieGen-5B in two pipeline stages, a mock clip of 8,192 tokens: `pretrain_ditllama5b_stage3_mock_with_pp`.

    Command: torchrun --nproc-per-node 8 -m megadit.train --recipe pretrain_ditllama5b_stage3_mock_with_pp
    Hardware: one node of 8 GPUs with 80 GB.
    Tokens: 8,192 a step (one pack).
    Memory: 27 GiB a rank.
    """
    return variant(
        mock_ditllama5b_8k(),
        data=dict(global_batch_size=1),
        train=dict(train_iters=1000),
        parallel=replace(TP2, pipeline_model_parallel_size=2, context_parallel_size=2),
    )


@recipe
def pretrain_ditllama30b_stage3_mock_with_pp() -> RunConfig:
    """MovieGen-30B in four pipeline stages, mock clips of 73,728 tokens: `pretrain_ditllama30b_stage3_mock_with_pp`.

    Command: torchrun --nnodes 32 --nproc-per-node 8 -m megadit.train --recipe pretrain_ditllama30b_stage3_mock_with_pp
    Hardware: 256 GPUs with 80 GB.
    Tokens: 18.9 million a step (256 packs of 73,728).
    Memory: 55 GiB a rank.
    """
    return variant(
        pretrain_ditllama30b_stage3_mock(),
        parallel=replace(
            TP2,
            tensor_model_parallel_size=4,
            pipeline_model_parallel_size=4,
            context_parallel_size=8,
            context_parallel_comm="ring",
        ),
    )
