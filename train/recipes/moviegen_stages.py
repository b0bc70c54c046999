"""MovieGen-5B and 30B (arXiv 2410.13720) on real data in three stages, of 256, 8,192 and 73,728 tokens: images, then
clips, then more pixels. The packs are those of DiT-7B's stages, the layouts of the 30B those of NeMo's mock runs.

The second and third stage start from the weights of the run before, which checkpoint.init_from=RUN names.
"""

from dataclasses import replace

from megadit.models.configs.named import NAMED_CONFIGS
from megadit.train.config.schema import ParallelConfig, RunConfig
from megadit.train.recipes.pretrain import stage1_7b_256, stage2_7b_8k, stage3_7b_74k
from megadit.train.recipes.registry import recipe, variant

FSDP = ParallelConfig(data_parallel="fsdp")
FSDP_TP2 = replace(FSDP, tensor_model_parallel_size=2, sequence_parallel=True)


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
    return variant(stage1_7b_256(), model=NAMED_CONFIGS["moviegen_30b"], parallel=FSDP)


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
        stage2_7b_8k(), model=NAMED_CONFIGS["moviegen_30b"], parallel=replace(FSDP_TP2, context_parallel_size=4)
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
    parallel = replace(FSDP_TP2, context_parallel_size=8)
    return variant(stage3_7b_74k(), model=NAMED_CONFIGS["moviegen_30b"], parallel=parallel)
