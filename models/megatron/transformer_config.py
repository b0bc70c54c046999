"""Megatron's configuration of a DiT and its parallel layout."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megadit.models.configs.config import DiTConfig
from megadit.models.megatron.parallel_sizes import ParallelSizes


def transformer_config(
    model: DiTConfig,
    layout: ParallelSizes,
    *,
    dtype: torch.dtype,
    gradient_accumulation_fusion: bool = False,
    fp8: str | None = None,
    fp8_recipe: str = "tensorwise",
) -> TransformerConfig:
    """Build Megatron's configuration of a DiT; `dtype` is that of the parameters, other arguments have Megatron's
    names."""
    is_interleaved = layout.virtual_pipeline > 1
    config = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.sent_size,
        num_attention_heads=model.num_attention_heads,
        kv_channels=model.dim_per_head,
        ffn_hidden_size=model.mlp_size,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if is_interleaved else None,
        pipeline_dtype=dtype,
        # interleaved stages send in both directions at once: with batched messages, two stages give wrong results
        overlap_p2p_comm=is_interleaved,
        batch_p2p_comm=not is_interleaved,
        context_parallel_size=layout.context,
        sequence_parallel=layout.sequence_parallel,
        add_bias_linear=False,
        qk_layernorm=model.qk_layernorm,  # finalize_model_grads sums gradients of norms of queries and keys
        layernorm_epsilon=model.layernorm_epsilon,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        use_cpu_initialization=True,  # linears are created on the device of torch's context
        perform_initialization=False,
        gradient_accumulation_fusion=gradient_accumulation_fusion,
        fp8=fp8,
        fp8_recipe=fp8_recipe,
        calculate_per_token_loss=True,
    )
    # finalize_model_grads sums the gradients of parameters marked `pipeline_parallel` only where it finds this
    config.has_cond_embedder = layout.pipeline > 1
    return config
