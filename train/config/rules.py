"""Rules across the settings of a run: a condition, a requirement, and a remedy if it is not met.

`learning_rules.py` has the rules of data and objectives; this file has the others, of a run and of how a step is
computed, and the functions that check them all. Bounds of single values are declared with their fields
(`schema.py`, `upkeep.py`). Rules of parallel layouts are declared with `ParallelSizes`: sampling needs them too.
"""

from operator import attrgetter
from pathlib import Path
from typing import Any

from megadit.models.megatron import parallel_sizes
from megadit.models.shared.cli.rules import Rule, accepted_by, enforce
from megadit.models.shared.files import can_be_folder
from megadit.train.config.facts import OF_DATASET, Run
from megadit.train.config.learning_rules import LEARNING
from megadit.train.config.rule_forms import (
    WEIGHTS_IN,
    check_continues,
    check_copy_url,
    check_sampling,
    check_schedule,
    damage_in_words,
    encoding_in_words,
    fits_dataset,
    fp8_multiple,
    multiple_of,
    of_fp8,
    of_fp16,
    of_graphs,
    of_layout,
    packs_in_words,
    too_long_in_words,
)

# --- Rules of how a step is computed: layouts, precision, CUDA graphs, and Muon ---------------------------------------

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
        attrgetter("data.seq_length"),
        attrgetter("sizes.sequence_multiple"),
        lambda run: (
            f"{run.sizes.sequence_multiple}: it is divided over {run.sizes.sequence_multiple} ranks by "
            "parallel.context_parallel_size and parallel.sequence_parallel"
        ),
    ),
    multiple_of(
        "data.global_batch_size",
        attrgetter("data.global_batch_size"),
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
    of_fp8(
        lambda run: run.train.precision == "bf16",
        "needs train.precision=bf16, not {train.precision}; set that",
    ),
    of_fp8(
        lambda run: run.parallel.data_parallel != "fsdp" or not run.has_engine,
        "by TransformerEngine does not work with parallel.data_parallel=fsdp; use distributed_optimizer, or "
        "parallel.transformer_impl=local",
    ),
    of_fp8(
        lambda run: run.has_engine or not run.parallel.gradient_accumulation_fusion,
        "needs TransformerEngine for parallel.gradient_accumulation_fusion; leave that out",
    ),
    of_fp8(
        lambda run: not run.has_experts,
        "does not support experts; leave it out",
    ),
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
    fp8_multiple("model.hidden_size", attrgetter("model.hidden_size"), lambda run: 1),
    fp8_multiple("model.ffn_hidden_size", attrgetter("model.mlp_size"), attrgetter("sizes.tensor")),
    fp8_multiple(
        "model.num_attention_heads x model.head_dim", attrgetter("model.attention_size"), attrgetter("sizes.tensor")
    ),
    fp8_multiple("rows of queries, keys and values", attrgetter("projection_rows"), attrgetter("sizes.tensor")),
    fp8_multiple("data.seq_length", attrgetter("data.seq_length"), attrgetter("sizes.sequence_multiple")),
    fp8_multiple(
        "model.crossattn_emb_size",
        attrgetter("model.text_size"),
        lambda run: 1,
        when=attrgetter("model.structure.cross_attention"),
    ),
    fp8_multiple(
        "data.text_seq_length",
        attrgetter("data.text_seq_length"),
        lambda run: 1,
        when=attrgetter("model.structure.cross_attention"),
    ),
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
    of_graphs(
        lambda run: run.sizes.model_parallel_size == 1,
        "model parallelism: use data parallelism alone",
    ),
    of_graphs(lambda run: run.parallel.data_parallel != "fsdp", "parallel.data_parallel=fsdp: use ddp"),
    of_graphs(
        lambda run: run.parallel.data_parallel != "distributed_optimizer" or not run.parallel.overlap_param_gather,
        "overlapped weight gathers: parallel.overlap_param_gather=false",
    ),
    of_graphs(lambda run: not run.has_engine, "TransformerEngine: parallel.transformer_impl=local"),
    of_graphs(lambda run: not run.is_fp8, "{train.fp8=}: leave that out"),
    of_graphs(
        lambda run: not run.parallel.gradient_accumulation_fusion,
        "gradient_accumulation_fusion: leave that out",
    ),
    of_graphs(
        lambda run: run.parallel.recompute_granularity == "none",
        "recomputation: parallel.recompute_granularity=none",
    ),
    of_graphs(
        lambda run: not run.parallel.cpu_offloading_num_layers,
        "{parallel.cpu_offloading_num_layers=}: leave that out",
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


def check_config(config: Any) -> None:
    """Raises UserError for the first rule that a `RunConfig` breaks by itself."""
    enforce(RULES, Run(config=config))


def check_layout(config: Any, world_size: int) -> int:
    """The data-parallel size of a world of `world_size` ranks.

    Raises:
        UserError: if the ranks cannot be divided among model replicas, or the batch among the replicas.
    """
    run = Run(config=config, world_size=world_size)
    enforce(RULES, run)
    return run.data_parallel_size


def check_inputs(config: Any) -> None:
    """Raises UserError if this machine lacks required kernels, or if the samples, the run's folder, or the sampler or
    tokenizer of its videos cannot be used.
    """
    enforce(RULES, Run(config=config, starts_here=True, reads_data=not config.data.mock))
    if not config.data.mock:
        enforce(RULES, Run(config=config, starts_here=True, dataset=_read_dataset(config)))


def check_dataset(config: Any) -> Any:
    """The `DatasetInfo` of a run, checked against its network without reading a sample.

    Raises:
        UserError: if there is no data set at `data.path`, or its latents or texts are not what the network expects.
    """
    enforce(RULES, Run(config=config, reads_data=True))
    info = _read_dataset(config)
    enforce(RULES, Run(config=config, dataset=info))
    return info


def _read_dataset(config: Any) -> Any:
    from megadit.train.dataset.dataset_info import DatasetInfo

    return DatasetInfo.read(config.data.path)


# ------------------------------------------------------------------------------------------------ the rules

RULES: tuple[Rule[Run], ...] = (
    *LEARNING,
    *COMPUTING,
    # validation
    Rule(
        needs=lambda run: run.validation.sigmas,
        remedy="{validation.sigmas=} leaves nothing to measure; validation.interval=0 switches validation off",
    ),
    Rule(
        when=lambda run: run.validation.patience is not None,
        needs=lambda run: run.validation.interval > 0,
        remedy="{validation.patience=} counts validations: set validation.interval, the steps between them",
    ),
    accepted_by(check_sampling, where="validation.sampling: "),
    Rule(
        needs=lambda run: not run.validation.sampling.autoguidance,
        remedy="{validation.sampling.autoguidance=} needs a second network, which a run does not hold; give it to "
        "`megadit generate`",
    ),
    Rule(
        needs=lambda run: not run.validation.sampling.adapter_interval,
        remedy="{validation.sampling.adapter_interval=} needs a bundle and a separate adapter; give it to "
        "`megadit generate`",
    ),
    Rule(
        needs=lambda run: run.validation.sampling.image_guidance in (None, 1.0),
        remedy="{validation.sampling.image_guidance=} needs conditioning, and validation makes videos of prompts "
        "alone; give it to `megadit generate`",
    ),
    Rule(
        needs=lambda run: not run.validation.sampling.low_guidance,
        remedy="{validation.sampling.low_guidance=} is for bundles with a high-noise and a low-noise expert; a run "
        "trains one network",
    ),
    Rule(
        needs=lambda run: not run.validation.sampling.cache_budget,
        remedy="{validation.sampling.cache_budget=} needs a bundle and `megadit calibrate-cache`; give it to "
        "`megadit generate`",
    ),
    Rule(
        when=lambda run: run.validation.evaluate_interval > 0,
        needs=lambda run: (
            not run.data.mock and "://" not in str(run.data.path) and not str(run.data.path).endswith((".yaml", ".yml"))
        ),
        remedy="{validation.evaluate_interval=} compares with the videos of a data set in a folder; a blend, a store "
        "and mock samples have none: leave it out, or evaluate the bundle with `megadit evaluate`",
    ),
    Rule(
        when=lambda run: run.starts_here and run.validation.evaluate_interval > 0,
        needs=lambda run: all(Path(path).exists() for path in run.validation.extractors),
        remedy="{validation.extractors=} names weights that do not exist; see `megadit evaluate --help`",
    ),
    # this machine
    Rule(
        when=lambda run: run.starts_here and run.has_engine,
        needs=lambda run: run.extensions.has_transformer_engine(),
        remedy="parallel.transformer_impl=transformer_engine needs a GPU and TransformerEngine (megadit[te]); "
        "parallel.transformer_impl=local uses Megatron's linears",
    ),
    Rule(
        when=lambda run: run.starts_here and run.is_fp8 and not run.has_engine,
        needs=lambda run: run.extensions.has_eight_bit_products(),
        remedy="{train.fp8=} needs a torch with FP8 matrix products, and a CPU or a GPU that has them (Ada, Hopper or "
        "newer); leave it out",
    ),
    Rule(
        when=lambda run: run.starts_here and run.parallel.gradient_accumulation_fusion and not run.has_engine,
        needs=lambda run: run.extensions.has_gradient_accumulation_fusion(),
        remedy="parallel.gradient_accumulation_fusion=true needs a GPU, and torch 2.8 or the module "
        "fused_weight_gradient_mlp_cuda of NVIDIA's apex, or transformer_impl=transformer_engine; leave it out",
    ),
    Rule(
        when=lambda run: run.starts_here and run.parallel.cuda_graph_max_segments is not None,
        needs=lambda run: run.extensions.has_cuda_graphs(),
        remedy="parallel.cuda_graph_max_segments needs a GPU (Ampere or newer) and torch 2.10 with variable-length "
        "attention; leave it out",
    ),
    Rule(
        when=lambda run: run.starts_here and run.has_adapter and not run.is_student,
        needs=lambda run: run.checkpoint.init_from is not None,
        remedy="train.adapter needs the weights of a base; give checkpoint.init_from=BUNDLE, or a run",
    ),
    Rule(
        when=lambda run: run.starts_here and run.model.guidance_embedding_range is not None,
        needs=attrgetter("is_student"),
        remedy="{model.guidance_embedding_range=} is learnt from a guided teacher; training on samples has no guidance "
        "scale: give train.distill.teacher",
    ),
    Rule(
        when=lambda run: run.starts_here and run.is_student,
        needs=lambda run: Path(run.train.distill.teacher).exists(),
        remedy="{train.distill.teacher=} does not exist; give a bundle, or the folder of a run",
    ),
    Rule(
        when=lambda run: run.starts_here and run.is_student and run.train.distill.teacher_adapter is not None,
        needs=lambda run: Path(run.train.distill.teacher_adapter).exists(),
        remedy="{train.distill.teacher_adapter=} does not exist; give the folder or file of an adapter",
    ),
    Rule(
        when=lambda run: run.starts_here and run.checkpoint.init_from is not None,
        needs=lambda run: any(Path(run.checkpoint.init_from, name).exists() for name in WEIGHTS_IN),
        remedy="{checkpoint.init_from=} holds no weights; give a bundle, a run, or one of its checkpoints",
    ),
    Rule(
        when=lambda run: run.starts_here and run.checkpoint.load is not None,
        needs=lambda run: not Path(run.checkpoint.load, "megadit.json").is_file(),
        remedy="{checkpoint.load=} has no checkpoint; a bundle has weights alone: "
        "checkpoint.init_from={checkpoint.load} starts from them",
    ),
    Rule(
        when=lambda run: run.starts_here and run.train.output_dir is not None,
        needs=lambda run: can_be_folder(run.train.output_dir),
        remedy="{train.output_dir=} cannot be a folder: there is a file of that name; give another",
    ),
    accepted_by(check_schedule, where="validation.sampling: ", when=attrgetter("starts_here")),
    accepted_by(check_copy_url, when=attrgetter("starts_here")),
    Rule(
        when=attrgetter("starts_here"),
        needs=lambda run: run.train.output_dir is not None,
        remedy="train.output_dir is not set; give train.output_dir=FOLDER",
    ),
    accepted_by(check_continues, when=attrgetter("starts_here")),
    # the data set
    Rule(
        when=attrgetter("reads_data"),
        needs=lambda run: run.data.path is not None,
        remedy="data.path is not set; give data.path=FOLDER (see `megadit prepare`), or --mock",
    ),
    *(fits_dataset(setting, fact) for setting, fact in OF_DATASET.items()),
    Rule(
        when=lambda run: run.model.task == "classify" and run.dataset is not None,
        needs=lambda run: run.num_labels == run.model.num_classes,
        remedy="{dataset.root} has {num_labels} classes (0: texts), but {model.num_classes=}",
    ),
    Rule(
        when=lambda run: run.model.task == "match" and run.dataset is not None,
        needs=lambda run: 0 < run.num_words <= run.model.text_tower.num_words,
        remedy="{dataset.root} has a vocabulary of {num_words} tokens (0: it holds text features), which must be at "
        "most {model.text_tower.num_words=}; prepare it with --text_encoder tokens",
    ),
    Rule(
        when=lambda run: run.model.task == "match" and run.dataset is not None,
        needs=lambda run: run.longest_text <= run.model.text_tower.max_length,
        remedy="{dataset.root} has texts of up to {longest_text} tokens, more than {model.text_tower.max_length=}; "
        "raise that",
    ),
    Rule(
        when=lambda run: run.dataset is not None and run.dataset.store is not None,
        needs=lambda run: run.data.encode == run.encoding,
        remedy=encoding_in_words,
    ),
    Rule(
        when=lambda run: run.dataset is not None and run.frame_conditionings and not run.is_blend,
        needs=attrgetter("dataset.has_keyframes"),
        remedy="{data.conditioning=} needs frames encoded as images, and {dataset.root} has none: prepare it with "
        "--keyframes 1 or more, or leave out {frame_conditionings}",
    ),
    Rule(
        when=lambda run: run.starts_here and run.dataset is not None,
        needs=lambda run: not run.damaged_shards,
        remedy=damage_in_words,
    ),
    Rule(
        when=lambda run: run.starts_here and run.dataset is not None,
        needs=lambda run: run.too_long.share <= run.health.max_refused_share,
        remedy=too_long_in_words,
    ),
    Rule(
        when=lambda run: run.starts_here and run.dataset is not None and run.validation.tokenizer_folder is not None,
        needs=attrgetter("has_tokenizer_of_dataset"),
        remedy="{validation.tokenizer_folder=} is not the data set's tokenizer; leave it out",
    ),
)
"""Rules of a run, in the order in which they are checked."""
