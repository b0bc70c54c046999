"""MovieGen's networks (arXiv 2410.13720) under the names and with the settings of NeMo's `ditllama` factories.

Their text passes the MLP only (`model.compat=nemo` builds that); here it is added to the tokens, as the paper has it.
Stages, at the end, are on real data, of 256, 8,192 and 73,728 tokens: images, then clips, then more pixels. Their packs
are those of DiT-7B's stages; the second and third start from the weights of the run before (checkpoint.init_from=RUN).
"""

from dataclasses import replace

from megadit.models.configs.block import ExpertConfig
from megadit.models.configs.named import NAMED_CONFIGS
from megadit.train.config.schema import ParallelConfig, RunConfig
from megadit.train.recipes.performance import mock_dit7b_8k
from megadit.train.recipes.pretrain import TP2, pretrain_7b, stage1_7b_256, stage2_7b_8k, stage3_7b_74k
from megadit.train.recipes.registry import recipe, variant

_FSDP = ParallelConfig(data_parallel="fsdp")
_FSDP_TP2 = replace(_FSDP, tensor_model_parallel_size=2, sequence_parallel=True)


@recipe
def mock_ditllama5b_8k() -> RunConfig:
    """Fifteen steps of MovieGen-5B on mock clips of 8,192 tokens, with the settings of NeMo's `mock_ditllama5b_8k`.

    Command: torchrun --nnodes 2 --nproc-per-node 8 -m megadit.train --recipe mock_ditllama5b_8k
    Hardware: 16 GPUs with 80 GB.
    Tokens: 262,144 a step (32 packs of 8,192).
    Memory: 25 GiB a rank.
    """
    return variant(mock_dit7b_8k(), model=NAMED_CONFIGS["moviegen_5b"])


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


@recipe
def pretrain_ecditllama1b() -> RunConfig:
    """MovieGen-1B with 64 experts that choose their tokens (EC-DiT, arXiv 2410.02098), on single images of 256 pixels.

    The numbers are those of NeMo's `pretrain_ecditllama1b`: each expert is an eighth as wide as the MLP it stands for,
    and a token has eight on average. What ranks share is ours: NeMo's needs a Megatron of its own.

    Command: torchrun --nnodes 4 --nproc-per-node 8 -m megadit.train --recipe pretrain_ecditllama1b data.path=FOLDER
    Hardware: 32 GPUs with 80 GB; the experts are spread over the eight of a node.
    Tokens: 589,824 a step (2,304 packs of 256, one image each).
    Memory: 60 GiB a rank.
    """
    experts = ExpertConfig(num_experts=64, routing="expert_choice", capacity_factor=8.0, ffn_hidden_size=1024)
    return variant(
        pretrain_ditllama1b(),
        model=dict(experts=experts),
        data=dict(micro_batch_size=72, global_batch_size=2304, min_aesthetic_score=5.0),
        parallel=ParallelConfig(data_parallel="fsdp", expert_model_parallel_size=8),
    )


# --- stages on real data ----------------------------------------------------------------------------------------


@recipe
def stage1_5b_256() -> RunConfig:
    """The first of three stages of MovieGen-5B: images of 256 pixels, 256 tokens each.

    Command: torchrun --nnodes 32 --nproc-per-node 8 -m megadit.train --recipe stage1_5b_256 data.path=FOLDER
    Hardware: 256 GPUs with 80 GB.
    Tokens: 1.2 million a step (512 packs of 2,304).
    Memory: 47 GiB a rank.
    """
    return variant(stage1_7b_256(), model=NAMED_CONFIGS["moviegen_5b"])


@recipe
def stage2_5b_8k() -> RunConfig:
    """The second stage: images and clips of 256 pixels, up to 32 latent frames (8,192 tokens).

    Command: torchrun --nnodes 32 --nproc-per-node 8 -m megadit.train --recipe stage2_5b_8k data.path=FOLDER
        checkpoint.init_from=RUN
    Hardware: 256 GPUs with 80 GB.
    Tokens: 1.3 million a step (128 packs of 10,240).
    Memory: 45 GiB a rank.
    """
    return variant(stage2_7b_8k(), model=NAMED_CONFIGS["moviegen_5b"])


@recipe
def stage3_5b_74k() -> RunConfig:
    """The third stage: images and clips of 768 pixels, up to 32 latent frames (73,728 tokens).

    Command: torchrun --nnodes 32 --nproc-per-node 8 -m megadit.train --recipe stage3_5b_74k data.path=FOLDER
        checkpoint.init_from=RUN
    Hardware: 256 GPUs with 80 GB; four context-parallel ranks share a pack.
    Tokens: 4.7 million a step (64 packs of 73,728).
    Memory: 61 GiB a rank.
    """
    return variant(stage3_7b_74k(), model=NAMED_CONFIGS["moviegen_5b"])


@recipe
def stage1_30b_256() -> RunConfig:
    """The first of three stages of MovieGen-30B: images of 256 pixels, 256 tokens each.

    Command: torchrun --nnodes 32 --nproc-per-node 8 -m megadit.train --recipe stage1_30b_256 data.path=FOLDER
    Hardware: 256 GPUs with 80 GB.
    Tokens: 1.2 million a step (512 packs of 2,304).
    Memory: 43 GiB a rank.
    """
    return variant(stage1_7b_256(), model=NAMED_CONFIGS["moviegen_30b"], parallel=_FSDP)


@recipe
def stage2_30b_8k() -> RunConfig:
    """The second stage: images and clips of 256 pixels, up to 32 latent frames (8,192 tokens).

    Command: torchrun --nnodes 32 --nproc-per-node 8 -m megadit.train --recipe stage2_30b_8k data.path=FOLDER
        checkpoint.init_from=RUN
    Hardware: 256 GPUs with 80 GB.
    Tokens: 1.3 million a step (128 packs of 10,240).
    Memory: 27 GiB a rank.
    """
    return variant(
        stage2_7b_8k(), model=NAMED_CONFIGS["moviegen_30b"], parallel=replace(_FSDP_TP2, context_parallel_size=4)
    )


@recipe
def stage3_30b_74k() -> RunConfig:
    """The third stage: images and clips of 768 pixels, up to 32 latent frames (73,728 tokens).

    Command: torchrun --nnodes 32 --nproc-per-node 8 -m megadit.train --recipe stage3_30b_74k data.path=FOLDER
        checkpoint.init_from=RUN
    Hardware: 256 GPUs with 80 GB; eight context-parallel ranks share a pack.
    Tokens: 4.7 million a step (64 packs of 73,728).
    Memory: 68 GiB a rank.
    """
    parallel = replace(_FSDP_TP2, context_parallel_size=8)
    return variant(stage3_7b_74k(), model=NAMED_CONFIGS["moviegen_30b"], parallel=parallel)
