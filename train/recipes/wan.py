"""Fine-tuning of Wan text-to-video, whose weights `megadit convert` brings (arXiv 2503.20314)."""

import math

from megadit.models.configs.adapter import AdapterConfig
from megadit.models.configs.named import NAMED_CONFIGS
from megadit.train.config.schema import ParallelConfig, RunConfig
from megadit.train.recipes.registry import recipe, run_of, variant

SHIFT = 3.0
"""Shift of the noise levels for clips of 480 x 832, as Wan samples them."""
_UNIFORM = dict(noise_levels="uniform", p_mean=math.log(SHIFT), p_std=1.0)


@recipe
def wan_1_3b() -> RunConfig:
    """Full fine-tuning of Wan 2.1 1.3B on clips of 81 frames of 480 x 832, 32,760 tokens each.

    Command: torchrun --nproc-per-node 8 -m megadit.train --recipe wan_1_3b data.path=FOLDER checkpoint.init_from=BUNDLE
    Hardware: one node of 8 GPUs with 40 GB; blocks are recomputed.
    Tokens: 524,288 a step (16 packs of 32,768), 1.0 billion in all.
    Memory: 16 GiB a rank.
    """
    return run_of(
        model=NAMED_CONFIGS["wan_1_3b"],
        data=dict(
            seq_length=32_768,
            text_seq_length=4096,
            global_batch_size=16,
            packing_buffer_size=100,
            mock_latent_shapes=((21, 60, 104), (1, 60, 104)),
        ),
        train=dict(train_iters=2000),
        diffusion=dict(p_mean=math.log(SHIFT), p_std=1.0),
        optimizer=dict(lr=1e-5, adam_beta2=0.95, weight_decay=0.01, lr_warmup_iters=100),
        ema=dict(sigma_rels=(0.05,)),
        parallel=dict(data_parallel="distributed_optimizer", recompute_granularity="full"),
        checkpoint=dict(save_interval=500, keep_last=2),
        validation=dict(
            interval=500,
            num_batches=8,
            sampling=dict(sampler="unipc", schedule="flow", sigma_max=999.0, shift=SHIFT, num_steps=50, guidance=5.0),
        ),
    )


@recipe
def wan_14b_lora() -> RunConfig:
    """An adapter of Wan 2.1 14B on the same clips, with TP 2 and CP 2.

    Command: torchrun --nproc-per-node 8 -m megadit.train --recipe wan_14b_lora data.path=FOLDER
        checkpoint.init_from=BUNDLE
    Hardware: one node of 8 GPUs with 80 GB.
    Tokens: 262,144 a step (8 packs of 32,768), 131 million in all.
    Memory: 21 GiB a rank.
    """
    return variant(
        wan_1_3b(),
        model=NAMED_CONFIGS["wan_14b"],
        data=dict(global_batch_size=8),
        train=dict(train_iters=500, adapter=AdapterConfig(rank=32)),
        optimizer=dict(lr=1e-4, weight_decay=0.0),
        ema=dict(sigma_rels=()),
        parallel=ParallelConfig(
            tensor_model_parallel_size=2, sequence_parallel=True, context_parallel_size=2, recompute_granularity="full"
        ),
    )


@recipe
def wan_1_3b_pretrain_config() -> RunConfig:
    """Wan 2.1 1.3B from random weights, with the name and numbers of Megatron-Bridge; packs are those of `wan_1_3b`.

    Command: torchrun --nproc-per-node 8 -m megadit.train --recipe wan_1_3b_pretrain_config data.path=FOLDER
    Hardware: one node of 8 GPUs with 80 GB.
    Tokens: 65,536 a step (2 packs of 32,768), 655 million in all.
    Memory: 19 GiB a rank.
    """
    return variant(
        wan_1_3b(),
        data=dict(global_batch_size=2),
        train=dict(train_iters=10_000),
        diffusion=dict(p_mean=math.log(2.5), p_std=1.5),
        optimizer=dict(lr=0.9e-4, min_lr=0.9e-5, weight_decay=0.1, lr_warmup_iters=2000),
        parallel=dict(context_parallel_size=8, context_parallel_comm="both", recompute_granularity="none"),
        checkpoint=dict(save_interval=2000),
        validation=dict(interval=2000, num_batches=32),
    )


@recipe
def wan_14b_pretrain_config() -> RunConfig:
    """Wan 2.1 14B from random weights, with the name and numbers of Megatron-Bridge.

    Command: torchrun --nproc-per-node 8 -m megadit.train --recipe wan_14b_pretrain_config data.path=FOLDER
    Hardware: one node of 8 GPUs with 80 GB.
    Tokens: 32,768 a step (1 pack), 328 million in all.
    Memory: 71 GiB a rank.
    """
    return variant(
        wan_1_3b_pretrain_config(),
        model=NAMED_CONFIGS["wan_14b"],
        data=dict(global_batch_size=1),
        parallel=dict(
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            context_parallel_size=4,
            context_parallel_comm="ulysses",
            recompute_granularity="full",
        ),
    )


@recipe
def wan_1_3b_sft_config() -> RunConfig:
    """Fine-tuning as Megatron-Bridge does it: uniform t, shifted by 3.

    Command: torchrun --nproc-per-node 8 -m megadit.train --recipe wan_1_3b_sft_config data.path=FOLDER
        checkpoint.init_from=BUNDLE
    Hardware: one node of 8 GPUs with 80 GB.
    Tokens: 65,536 a step (2 packs of 32,768), 655 million in all.
    Memory: 19 GiB a rank.
    """
    return variant(wan_1_3b_pretrain_config(), diffusion=_UNIFORM)


@recipe
def wan_14b_sft_config() -> RunConfig:
    """Fine-tuning of the 14B as Megatron-Bridge does it.

    Command: torchrun --nproc-per-node 8 -m megadit.train --recipe wan_14b_sft_config data.path=FOLDER
        checkpoint.init_from=BUNDLE
    Hardware: one node of 8 GPUs with 80 GB.
    Tokens: 32,768 a step (1 pack), 328 million in all.
    Memory: 71 GiB a rank.
    """
    return variant(wan_14b_pretrain_config(), diffusion=_UNIFORM)
