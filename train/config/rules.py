"""Rules across the settings of a run: a condition, a requirement, and a remedy if it is not met.

`computing_rules.py` has the rules of how a step is computed, `learning_rules.py` those of data and objectives; this
file has the others, of a run, and the functions that check them all. Bounds of single values are declared with their
fields (`schema.py`, `upkeep.py`). Rules of parallel layouts are declared with `ParallelSizes`: sampling needs them too.
"""

from operator import attrgetter
from pathlib import Path
from typing import Any

from megadit.models.shared.errors import Rule, accepted_by, enforce
from megadit.models.shared.files import can_be_folder, is_within_bundle
from megadit.train.config.computing_rules import COMPUTING
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
    too_long_in_words,
    without_sampling,
)


def check_config(config: Any) -> None:
    """Raises UserError for the first rule that a `RunConfig` breaks by itself."""
    enforce(RULES, Run(config=config))


def check_layout(config: Any, world_size: int) -> int:
    """The data-parallel size of a world of `world_size` ranks. Raises UserError if the ranks cannot be divided among
    model replicas, or the batch among the replicas."""
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
    """The `DatasetInfo` of a run, checked against its network without reading a sample. Raises UserError if there is no
    data set at `data.path`, or its latents or texts are not what the network expects."""
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
    without_sampling(
        "autoguidance", "needs a second network, which a run does not hold; give it to `megadit generate`"
    ),
    without_sampling("adapter_interval", "needs a bundle and a separate adapter; give it to `megadit generate`"),
    Rule(
        needs=lambda run: run.validation.sampling.image_guidance in (None, 1.0),
        remedy="{validation.sampling.image_guidance=} needs conditioning, and validation makes videos of prompts "
        "alone; give it to `megadit generate`",
    ),
    without_sampling(
        "low_guidance", "is for bundles with a high-noise and a low-noise expert; a run trains one network"
    ),
    without_sampling("cache_budget", "needs a bundle and `megadit calibrate-cache`; give it to `megadit generate`"),
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
    Rule(
        when=lambda run: run.starts_here and run.train.output_dir is not None,
        needs=lambda run: not is_within_bundle(run.train.output_dir),
        remedy="{train.output_dir=} is a bundle, or lies in one; give another folder",
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
