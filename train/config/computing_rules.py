"""Rules of how a step is computed: layouts, precision, CUDA graphs, and Muon."""

from operator import attrgetter

from megadit.models.megatron import parallel_sizes
from megadit.models.shared.errors import Rule
from megadit.train.config.facts import Run
from megadit.train.config.rule_forms import (
    fp8_multiple,
    multiple_of,
    of_fp8,
    of_fp16,
    of_graphs,
    of_layout,
    packs_in_words,
)

COMPUTING: tuple[Rule[Run], ...] = (
    # layout
    Rule(
        when=lambda run: run.parallel.gradient_accumulation_fusion,
        needs=lambda run: run.parallel.data_parallel != "fsdp",
        remedy="parallel.gradient_accumulation_fusion=true needs gradient buffers, which parallel.data_parallel=fsdp "
        "does not have; use ddp or distributed_optimizer, or leave it out",
    ),
    Rule(
        when=lambda run: run.parallel.recompute_num_layers is not None,
        needs=lambda run: run.parallel.recompute_granularity == "full",
        remedy="{parallel.recompute_num_layers=} needs parallel.recompute_granularity=full",
    ),
    Rule(
        when=lambda run: run.parallel.cpu_offloading_num_layers > 0,
        needs=lambda run: run.parallel.recompute_granularity != "full" or run.parallel.recompute_num_layers is not None,
        remedy="{parallel.cpu_offloading_num_layers=} offloads blocks that are not recomputed, and "
        "parallel.recompute_granularity=full recomputes all; set parallel.recompute_num_layers, or leave one out",
    ),
    *map(of_layout, parallel_sizes.RULES),
    multiple_of(
        "data.seq_length",
        attrgetter("sizes.sequence_multiple"),
        lambda run: (
            f"{run.sizes.sequence_multiple}: it is divided over {run.sizes.sequence_multiple} ranks by "
            "parallel.context_parallel_size and parallel.sequence_parallel"
        ),
    ),
    multiple_of(
        "data.global_batch_size",
        attrgetter("packs_at_a_time"),
        packs_in_words,
        when=lambda run: run.world_size is not None,
    ),
    # FP8
    of_fp8(
        lambda run: run.train.fp8_recipe == "tensorwise" or run.has_engine,
        "with {train.fp8_recipe=} needs parallel.transformer_impl=transformer_engine; give that, or "
        "train.fp8_recipe=tensorwise",
    ),
    of_fp8(lambda run: run.train.precision == "bf16", "needs train.precision=bf16, not {train.precision}; set that"),
    of_fp8(
        lambda run: run.parallel.data_parallel != "fsdp" or not run.has_engine,
        "by TransformerEngine does not work with parallel.data_parallel=fsdp; use distributed_optimizer, or "
        "parallel.transformer_impl=local",
    ),
    of_fp8(
        lambda run: run.has_engine or not run.parallel.gradient_accumulation_fusion,
        "needs TransformerEngine for parallel.gradient_accumulation_fusion; leave that out",
    ),
    of_fp8(lambda run: not run.has_experts, "does not support experts; leave it out"),
    of_fp8(
        lambda run: run.model.structure.block != "st_dit" or run.sizes.sequence_multiple == 1,
        "needs the same number of tokens on each of {sizes.sequence_multiple} ranks, which st_dit's attentions change",
    ),
    Rule(
        when=lambda run: run.train.fp8_weight_cache,
        needs=lambda run: run.is_fp8 and not run.has_engine and run.parallel.data_parallel != "fsdp",
        remedy="train.fp8_weight_cache=true needs train.fp8 by torch, and weights that fsdp does not shard; set "
        "train.fp8=hybrid, parallel.transformer_impl=local and data_parallel=distributed_optimizer, or leave it out",
    ),
    fp8_multiple("model.hidden_size"),
    fp8_multiple("model.ffn_hidden_size", attrgetter("sizes.tensor"), value=attrgetter("model.mlp_size")),
    fp8_multiple(
        "model.num_attention_heads x model.head_dim",
        attrgetter("sizes.tensor"),
        value=attrgetter("model.attention_size"),
    ),
    fp8_multiple("rows of queries, keys and values", attrgetter("sizes.tensor"), value=attrgetter("projection_rows")),
    fp8_multiple("data.seq_length", attrgetter("sizes.sequence_multiple")),
    fp8_multiple(
        "model.crossattn_emb_size",
        value=attrgetter("model.text_size"),
        when=attrgetter("model.structure.cross_attention"),
    ),
    fp8_multiple("data.text_seq_length", when=attrgetter("model.structure.cross_attention")),
    # fp16
    of_fp16(
        lambda run: run.parallel.data_parallel != "fsdp",
        "which parallel.data_parallel=fsdp does not support; use distributed_optimizer",
    ),
    of_fp16(
        lambda run: run.optimizer.optimizer != "muon",
        "which optimizer.optimizer=muon does not support; use adamw, or train.precision=bf16",
    ),
    of_fp16(
        lambda run: not run.has_experts,
        "and that of experts may differ from that of other parameters; use train.precision=bf16",
    ),
    of_fp16(
        lambda run: not (run.is_student and run.train.distill.has_critic),
        "which skips steps at overflows, and train.distill.objective=distribution_matching cannot skip those of one of "
        "its two networks; use train.precision=bf16",
    ),
    # CUDA graphs
    of_graphs(lambda run: run.sizes.model_parallel_size == 1, "model parallelism: use data parallelism alone"),
    of_graphs(lambda run: run.parallel.data_parallel != "fsdp", "parallel.data_parallel=fsdp: use ddp"),
    of_graphs(
        lambda run: run.parallel.data_parallel != "distributed_optimizer" or not run.parallel.overlap_param_gather,
        "overlapped weight gathers: parallel.overlap_param_gather=false",
    ),
    of_graphs(lambda run: not run.has_engine, "TransformerEngine: parallel.transformer_impl=local"),
    of_graphs(lambda run: not run.is_fp8, "{train.fp8=}: leave that out"),
    of_graphs(
        lambda run: not run.parallel.gradient_accumulation_fusion, "gradient_accumulation_fusion: leave that out"
    ),
    of_graphs(
        lambda run: run.parallel.recompute_granularity == "none", "recomputation: parallel.recompute_granularity=none"
    ),
    of_graphs(
        lambda run: not run.parallel.cpu_offloading_num_layers, "{parallel.cpu_offloading_num_layers=}: leave that out"
    ),
    of_graphs(lambda run: not run.has_adapter, "train.adapter: leave that out"),
    of_graphs(lambda run: not run.is_student, "train.distill: leave that out"),
    of_graphs(lambda run: not run.has_experts, "experts, whose token counts vary"),
    of_graphs(lambda run: run.model.structure.block != "st_dit", "attention along one axis (st_dit)"),
    of_graphs(lambda run: run.model.denoises, "networks that do not denoise"),
    of_graphs(lambda run: run.train.precision == "bf16", "{train.precision=}: train.precision=bf16"),
    of_graphs(
        lambda run: run.model.dim_per_head % 8 == 0 and run.model.dim_per_head <= 256,
        "this head size: use a model.head_dim that is a multiple of 8 and at most 256",
    ),
    # Muon
    Rule(
        when=lambda run: run.optimizer.optimizer == "muon",
        needs=lambda run: run.parallel.data_parallel != "fsdp",
        remedy="optimizer.optimizer=muon needs whole matrices, which parallel.data_parallel=fsdp shards; use "
        "parallel.data_parallel=distributed_optimizer, or optimizer.optimizer=adamw",
    ),
    Rule(
        when=lambda run: run.optimizer.optimizer == "muon",
        needs=lambda run: not run.has_experts,
        remedy="optimizer.optimizer=muon does not support experts; use optimizer.optimizer=adamw",
    ),
)
"""Rules of precision, parallelism and kernels, in the order in which they are checked."""
