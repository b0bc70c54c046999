"""Every rule that settings of a run must keep together: when it applies, what it needs, what mends a breach.

Bounds of single values stand with their fields (`schema.py`, `upkeep.py`). Rules of a layout stand with
`ParallelSizes`, because sampling on several ranks keeps them, too; they are part of `RULES`.
"""

from operator import attrgetter
from pathlib import Path
from typing import Any

from megadit.models.megatron import parallel_sizes
from megadit.models.shared.rules import Rule, accepted_by, enforce
from megadit.train.config.facts import OF_DATASET, Run
from megadit.train.config.rule_forms import (
    MOST_MODE,
    WEIGHTS_IN,
    check_copy_url,
    check_sampling,
    check_schedule,
    check_student_sigmas,
    check_targets,
    check_uses,
    encoding_in_words,
    fits_dataset,
    fp8_multiple,
    long_mock_in_words,
    multiple_of,
    of_classifier,
    of_fp8,
    of_fp16,
    of_graphs,
    of_int8_base,
    of_layout,
    packs_in_words,
)


def check_config(config: Any) -> None:
    """Raises UserError for the first rule that a `RunConfig` breaks by itself."""
    enforce(RULES, Run(config=config))


def check_layout(config: Any, world_size: int) -> int:
    """The data-parallel size of a world of `world_size` ranks.

    Raises:
        UserError: if the ranks cannot be divided among the copies of the model, or the batch among the copies.
    """
    run = Run(config=config, world_size=world_size)
    enforce(RULES, run)
    return run.data_parallel_size


def check_inputs(config: Any) -> None:
    """Raises UserError if this machine lacks the kernels asked for, or the samples, the run's folder, or the sampler or
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
    from megadit.train.data.dataset_info import DatasetInfo

    return DatasetInfo.read(config.data.path)


# ------------------------------------------------------------------------------------------------ the rules

RULES: tuple[Rule[Run], ...] = (
    # data
    multiple_of(
        "data.global_batch_size",
        attrgetter("data.global_batch_size"),
        attrgetter("data.micro_batch_size"),
        lambda run: f"data.micro_batch_size={run.data.micro_batch_size}",
    ),
    Rule(
        needs=lambda run: (
            run.data.mock_latent_shapes and all(side >= 1 for shape in run.data.mock_latent_shapes for side in shape)
        ),
        remedy="{data.mock_latent_shapes=} needs at least one (T, H, W), each side 1 or more",
    ),
    # optimizer and EMA
    Rule(
        when=lambda run: run.optimizer.optimizer == "muon",
        needs=lambda run: run.optimizer.moments == "fp32",
        remedy="{optimizer.moments=} is for optimizer.optimizer=adamw; leave it out with muon",
    ),
    Rule(
        needs=lambda run: run.optimizer.min_lr <= run.optimizer.lr,
        remedy="{optimizer.min_lr=} exceeds {optimizer.lr=}; lower it",
    ),
    Rule(
        when=lambda run: run.optimizer.lr_decay_iters is not None,
        needs=lambda run: run.optimizer.lr_decay_iters > run.optimizer.lr_warmup_iters,
        remedy="{optimizer.lr_decay_iters=} must exceed {optimizer.lr_warmup_iters=}",
    ),
    Rule(
        needs=lambda run: len(set(run.ema.sigma_rels)) == len(run.ema.sigma_rels),
        remedy="{ema.sigma_rels=} names one profile twice",
    ),
    # what is given
    accepted_by(check_uses, when=lambda run: bool(run.data.given)),
    Rule(
        when=lambda run: bool(run.data.given),
        needs=lambda run: run.model.given_sigma is not None,
        remedy="data.given needs model.given_sigma, the noise level that the network is told of what is given; 0.02 "
        "served digits best",
    ),
    Rule(
        needs=lambda run: run.model.given.is_among and run.model.image_size is None,
        remedy="{model.given_form=} {model.image_size=}: what such a network is given, latents of a video beside the "
        "noisy ones or features of an image, is in no data set here; it converts and samples",
    ),
    Rule(
        needs=lambda run: min(run.data.given_dropout) >= 0 and sum(run.data.given_dropout) < 1,
        remedy="{data.given_dropout=} must be three shares from 0 that leave some: what is given, the text, both",
    ),
    # a classifier
    Rule(
        when=lambda run: not run.model.structure.classifies,
        needs=lambda run: run.train.label_smoothing == 0,
        remedy="{train.label_smoothing=} is of classifiers, such as model.family=vit; leave it out",
    ),
    of_classifier(
        lambda run: run.model.num_classes is not None, "{model.family=} learns classes: give model.num_classes"
    ),
    of_classifier(
        lambda run: run.data.text_dropout == 0,
        "{data.text_dropout=} takes the labels of samples, which a classifier learns; use data.text_dropout=0",
    ),
    of_classifier(
        lambda run: run.sizes.context == 1,
        "{parallel.context_parallel_size=} would leave a sample's class token to one rank; use tensor, sequence or "
        "pipeline parallelism, or fsdp",
    ),
    of_classifier(
        lambda run: not (run.is_student or run.has_adapter or run.diffusion.learned_uncertainty),
        "train.distill, train.adapter and diffusion.learned_uncertainty are of networks that denoise; leave them out",
    ),
    of_classifier(
        lambda run: run.validation.evaluate_interval == 0,
        "{validation.evaluate_interval=} evaluates videos, of which a classifier makes none; leave it out",
    ),
    # adapter
    accepted_by(check_targets, where="train.adapter.targets: ", when=attrgetter("has_adapter")),
    Rule(
        when=attrgetter("has_adapter"),
        needs=lambda run: not run.parallel.gradient_accumulation_fusion,
        remedy="parallel.gradient_accumulation_fusion=true adds up gradients of matrices that train.adapter leaves as "
        "they are; leave it out",
    ),
    Rule(
        when=lambda run: run.has_adapter and run.sizes.num_parts > 1,
        needs=lambda run: all(run.adapted_parts),
        remedy="{train.adapter.targets=} leaves nothing to train in one of the {sizes.num_parts} parts of the network "
        "that pipeline stages hold; name linears of blocks in each, or take fewer stages",
    ),
    of_int8_base(attrgetter("has_adapter"), "is of the weights beside an adapter; give train.adapter.rank, too"),
    of_int8_base(
        lambda run: run.parallel.data_parallel != "fsdp",
        "does not go with parallel.data_parallel=fsdp, which divides the base among ranks; use distributed_optimizer",
    ),
    of_int8_base(
        lambda run: run.parallel.transformer_impl == "local",
        "holds linears of its own; leave parallel.transformer_impl at local",
    ),
    # a student
    Rule(
        when=attrgetter("is_student"),
        needs=lambda run: run.sizes.num_parts == 1,
        remedy="train.distill asks whole networks in turn, which pipeline stages hold in parts; use "
        "parallel.pipeline_model_parallel_size=1, and tensor or context parallelism or fsdp",
    ),
    Rule(
        when=attrgetter("is_student"),
        needs=lambda run: not run.diffusion.learned_uncertainty,
        remedy="diffusion.learned_uncertainty=true weights the loss of samples, of which train.distill has none; leave "
        "it out",
    ),
    Rule(
        when=lambda run: run.is_student and run.train.distill.objective != "guidance",
        needs=lambda run: run.train.distill.sigmas,
        remedy="{train.distill.objective=} needs the noise levels of the student's calls: "
        "train.distill.sigmas=[80,6,1.3,0.3]",
    ),
    Rule(
        when=lambda run: run.is_student and run.train.distill.learns_of_pairs,
        needs=lambda run: not run.data.given and run.data.encode != "on_the_fly",
        remedy="{train.distill.objective=} learns what the teacher made of noise and text alone: leave out data.given, "
        "and give latents (`megadit prepare trajectories`)",
    ),
    accepted_by(check_student_sigmas, where="train.distill.", when=attrgetter("is_student")),
    Rule(
        when=lambda run: run.is_student and run.train.distill.objective == "distribution_matching",
        needs=lambda run: run.health.on_not_finite == "stop" and run.health.on_spike is None,
        remedy="{train.distill.objective=} updates two networks in a step, and cannot leave out that of one: use "
        "health.on_not_finite=stop and no health.on_spike",
    ),
    # layout
    Rule(
        when=lambda run: run.parallel.gradient_accumulation_fusion,
        needs=lambda run: run.parallel.data_parallel != "fsdp",
        remedy="parallel.gradient_accumulation_fusion=true adds to sums that parallel.data_parallel=fsdp has not; use "
        "ddp or distributed_optimizer, or leave it out",
    ),
    Rule(
        when=lambda run: run.parallel.recompute_num_layers is not None,
        needs=lambda run: run.parallel.recompute_granularity == "full",
        remedy="{parallel.recompute_num_layers=} needs parallel.recompute_granularity=full",
    ),
    *map(of_layout, parallel_sizes.RULES),
    multiple_of(
        "data.seq_length",
        attrgetter("data.seq_length"),
        attrgetter("sizes.sequence_multiple"),
        lambda run: (
            f"{run.sizes.sequence_multiple}: it is cut over {run.sizes.sequence_multiple} ranks by "
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
    # eight bits
    of_fp8(
        lambda run: run.parallel.transformer_impl == "transformer_engine",
        "is TransformerEngine's; give parallel.transformer_impl=transformer_engine, too",
    ),
    of_fp8(
        lambda run: run.train.precision == "bf16",
        "stands beside train.precision=bf16, not {train.precision}; set that",
    ),
    of_fp8(
        lambda run: run.parallel.data_parallel != "fsdp",
        "does not go with parallel.data_parallel=fsdp; use distributed_optimizer",
    ),
    of_fp8(
        lambda run: not run.has_experts,
        "does not reach experts, which would stay in bf16; leave it out",
    ),
    of_fp8(
        lambda run: run.model.structure.block != "st_dit" or run.sizes.sequence_multiple == 1,
        "needs equally many tokens on each of {sizes.sequence_multiple} ranks, which st_dit's attentions change",
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
        "which parameters that parallel.data_parallel=fsdp cuts have none of; use distributed_optimizer",
    ),
    of_fp16(
        lambda run: run.optimizer.optimizer != "muon",
        "which optimizer.optimizer=muon has none of; use adamw, or train.precision=bf16",
    ),
    of_fp16(
        lambda run: not run.has_experts,
        "and experts would have one of their own, which may differ; use train.precision=bf16",
    ),
    of_fp16(
        lambda run: not (run.is_student and run.train.distill.has_critic),
        "and train.distill.objective=distribution_matching would leave out steps of one of two networks; use "
        "train.precision=bf16",
    ),
    # CUDA graphs
    of_graphs(
        lambda run: run.sizes.model_parallel_size == 1,
        "ranks that share a copy of the network: data parallelism alone",
    ),
    of_graphs(lambda run: run.parallel.data_parallel != "fsdp", "parallel.data_parallel=fsdp: use ddp"),
    of_graphs(
        lambda run: run.parallel.data_parallel != "distributed_optimizer" or not run.parallel.overlap_param_gather,
        "weights gathered meanwhile: parallel.overlap_param_gather=false",
    ),
    of_graphs(
        lambda run: run.parallel.transformer_impl == "local",
        "TransformerEngine: parallel.transformer_impl=local",
    ),
    of_graphs(
        lambda run: not run.parallel.gradient_accumulation_fusion,
        "gradient_accumulation_fusion: leave that out",
    ),
    of_graphs(
        lambda run: run.parallel.recompute_granularity == "none",
        "blocks computed again: parallel.recompute_granularity=none",
    ),
    of_graphs(lambda run: not run.has_adapter, "train.adapter: leave that out"),
    of_graphs(lambda run: not run.is_student, "train.distill: leave that out"),
    of_graphs(lambda run: not run.has_experts, "experts, whose tokens are others each time"),
    of_graphs(lambda run: run.model.structure.block != "st_dit", "attention along one axis (st_dit)"),
    of_graphs(lambda run: not run.model.structure.classifies, "a classifier, whose blocks were never recorded"),
    of_graphs(lambda run: run.train.precision == "bf16", "{train.precision=}: train.precision=bf16"),
    of_graphs(
        lambda run: run.model.dim_per_head % 8 == 0 and run.model.dim_per_head <= 256,
        "heads that the kernel for packs does not take: model.head_dim of 8 n <= 256",
    ),
    # Muon
    Rule(
        when=lambda run: run.optimizer.optimizer == "muon",
        needs=lambda run: run.parallel.data_parallel != "fsdp",
        remedy="optimizer.optimizer=muon needs whole matrices, which parallel.data_parallel=fsdp cuts; use "
        "parallel.data_parallel=distributed_optimizer, or optimizer.optimizer=adamw",
    ),
    Rule(
        when=lambda run: run.optimizer.optimizer == "muon",
        needs=lambda run: not run.has_experts,
        remedy="optimizer.optimizer=muon knows no experts, which are stacks of matrices on ranks of their own; use "
        "optimizer.optimizer=adamw",
    ),
    # noise levels
    Rule(
        when=lambda run: run.diffusion.noise_levels == "mode",
        needs=lambda run: run.diffusion.p_std <= MOST_MODE,
        remedy="{diffusion.p_std=} is the scale of diffusion.noise_levels=mode, at most "
        + str(MOST_MODE)
        + ": beyond, "
        "two draws would give one noise level",
    ),
    # mock samples
    Rule(
        when=attrgetter("data.mock"),
        needs=lambda run: run.longest_mock[1] <= run.data.seq_length,
        remedy=long_mock_in_words,
    ),
    # validation
    Rule(
        needs=lambda run: run.validation.sigmas,
        remedy="{validation.sigmas=} leaves nothing to measure; validation.interval=0 never validates",
    ),
    Rule(
        when=lambda run: run.validation.patience is not None,
        needs=lambda run: run.validation.interval > 0,
        remedy="{validation.patience=} counts validations: set validation.interval, the steps between them",
    ),
    accepted_by(check_sampling, where="validation.sampling: "),
    Rule(
        needs=lambda run: not run.validation.sampling.autoguidance,
        remedy="{validation.sampling.autoguidance=} is a second network, for which a run has no room; give it to "
        "`megadit generate`",
    ),
    Rule(
        needs=lambda run: not run.validation.sampling.adapter_interval,
        remedy="{validation.sampling.adapter_interval=} needs a bundle and an adapter beside it; give it to "
        "`megadit generate`",
    ),
    Rule(
        needs=lambda run: run.validation.sampling.image_guidance in (None, 1.0),
        remedy="{validation.sampling.image_guidance=} needs something given, and validation makes videos of prompts "
        "alone; give it to `megadit generate`",
    ),
    Rule(
        needs=lambda run: not run.validation.sampling.low_guidance,
        remedy="{validation.sampling.low_guidance=} is for bundles of two networks; a run trains one",
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
        when=lambda run: run.starts_here and run.parallel.transformer_impl == "transformer_engine",
        needs=lambda run: run.extensions.has_transformer_engine(),
        remedy="parallel.transformer_impl=transformer_engine needs a GPU and TransformerEngine (megadit[te]); "
        "parallel.transformer_impl=local uses Megatron's linears",
    ),
    Rule(
        when=lambda run: (
            run.starts_here
            and run.parallel.gradient_accumulation_fusion
            and run.parallel.transformer_impl != "transformer_engine"
        ),
        needs=lambda run: run.extensions.has_gradient_accumulation_fusion(),
        remedy="parallel.gradient_accumulation_fusion=true needs a GPU, and torch 2.8 or the module "
        "fused_weight_gradient_mlp_cuda of NVIDIA's apex, or transformer_impl=transformer_engine; leave it out",
    ),
    Rule(
        when=lambda run: run.starts_here and run.parallel.cuda_graph_max_segments is not None,
        needs=lambda run: run.extensions.has_cuda_graphs(),
        remedy="parallel.cuda_graph_max_segments needs a GPU (Ampere or newer) and torch 2.10 with its attention of "
        "variable length; leave it out",
    ),
    Rule(
        when=lambda run: run.starts_here and run.has_adapter,
        needs=lambda run: run.checkpoint.init_from is not None,
        remedy="train.adapter is trained beside weights that exist; give checkpoint.init_from=BUNDLE, or a run",
    ),
    Rule(
        when=lambda run: run.starts_here and run.is_student,
        needs=lambda run: Path(run.train.distill.teacher).exists(),
        remedy="{train.distill.teacher=} is not there; give a bundle, or the folder of a run",
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
        needs=lambda run: not any(path.is_file() for path in Path(run.train.output_dir, "config.yaml").parents),
        remedy="{train.output_dir=} cannot be a folder: there is a file of that name; give another",
    ),
    accepted_by(check_schedule, where="validation.sampling: ", when=attrgetter("starts_here")),
    accepted_by(check_copy_url, when=attrgetter("starts_here")),
    Rule(
        when=attrgetter("starts_here"),
        needs=lambda run: run.train.output_dir is not None,
        remedy="train.output_dir is not set; give train.output_dir=FOLDER",
    ),
    # the data set
    Rule(
        when=attrgetter("reads_data"),
        needs=lambda run: run.data.path is not None,
        remedy="data.path is not set; give data.path=FOLDER (see `megadit prepare`), or --mock",
    ),
    *(fits_dataset(setting, fact) for setting, fact in OF_DATASET.items()),
    Rule(
        when=lambda run: run.model.structure.classifies and run.dataset is not None,
        needs=lambda run: run.num_labels == run.model.num_classes,
        remedy="{dataset.root} has {num_labels} classes (0: texts), not the {model.num_classes} of model.num_classes",
    ),
    Rule(
        when=lambda run: run.dataset is not None and run.dataset.store is not None,
        needs=lambda run: run.data.encode == run.encoding,
        remedy=encoding_in_words,
    ),
    Rule(
        when=lambda run: run.dataset is not None and run.uses_of_frames and not run.is_blend,
        needs=attrgetter("dataset.has_keyframes"),
        remedy="{data.given=} needs frames encoded as images, which {dataset.root} has none of: prepare it with "
        "--keyframes 1 or more, or leave out {uses_of_frames}",
    ),
    Rule(
        when=lambda run: run.starts_here and run.dataset is not None and run.validation.tokenizer_folder is not None,
        needs=attrgetter("has_tokenizer_of_dataset"),
        remedy="{validation.tokenizer_folder=} holds another tokenizer than the data set's; leave it out",
    ),
)
"""In the order in which they are checked."""
