"""Building blocks of a run's rules: shared forms, longer messages, and checks by trial."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from megadit.models.diffusion.settings import SamplingSettings, check_guidance, resolve
from megadit.models.megatron.parallel_sizes import Division, refusal
from megadit.models.shared.errors import Rule, always, nearest_multiples
from megadit.models.shared.shards import partly_copied
from megadit.train.config.facts import Run, agree

SINGLE_IMAGE = SamplingSettings(num_steps=1, guidance=1.0, num_frames=1, height=1, width=1, fps=1.0)
"""Placeholder for the sizes that `validation.sampling` takes from the data set."""
FP8_MULTIPLE = {"tensorwise": 16, "blockwise": 16, "mxfp8": 32}
"""`train.fp8_recipe` -> required multiple of the rows and columns of every matrix on each rank."""
MOST_MODE = 1.75
"""Largest scale s of `mode`: beyond 2 / (pi - 2) = 1.7519, t no longer decreases with u (arXiv 2403.03206, eq. 20)."""
WEIGHTS_IN = ("megadit.json", "checkpoints", "state.json")
"""Files of which a bundle, the folder of a run, and a checkpoint each have one."""

Condition = Callable[[Run], Any]


# ------------------------------------------------------------------------------------------------ forms of rules


def multiple_of(
    name: str, of: Condition, words: Condition, *, value: Condition | None = None, when: Condition = always
) -> Rule[Run]:
    """Rule that `value(run)` (default: the setting `name`) is a multiple of `of(run)`, which `words(run)` describes."""
    value = value or attrgetter(name)
    return Rule(
        when=when,
        needs=lambda run: value(run) % of(run) == 0,
        remedy=lambda run: (
            f"{name}={value(run)} is not a multiple of {words(run)}; use {nearest_multiples(value(run), of(run))}"
        ),
    )


def of_layout(rule: Rule[Division]) -> Rule[Run]:
    """Convert a rule of a `Division` of ranks to a rule of a run."""
    return Rule(
        when=lambda run: rule.when(run.division),
        needs=lambda run: rule.needs(run.division),
        remedy=lambda run: refusal(rule, run.division),
    )


def of_embedding(needs: Condition, remedy: str) -> Rule[Run]:
    """Rule for networks that do not denoise (classifiers, CLIP)."""
    return Rule(when=lambda run: not run.model.denoises, needs=needs, remedy=remedy)


def of_fp8(needs: Condition, words: str) -> Rule[Run]:
    return Rule(when=attrgetter("is_fp8"), needs=needs, remedy="{train.fp8=} " + words)


def of_int8_base(needs: Condition, words: str) -> Rule[Run]:
    return Rule(
        when=lambda run: run.train.base_precision == "int8", needs=needs, remedy="{train.base_precision=} " + words
    )


def of_fp16(needs: Condition, words: str) -> Rule[Run]:
    """Rule for fp16, whose loss scaler (Megatron's) needs a single AdamW for all parameters."""
    return Rule(
        when=lambda run: run.train.precision == "fp16",
        needs=needs,
        remedy="train.precision=fp16 needs a loss scale, " + words,
    )


def fp8_multiple(
    name: str, ranks: Condition = lambda run: 1, *, value: Condition | None = None, when: Condition = always
) -> Rule[Run]:
    """Rule that a matrix dimension of the blocks, or a token count, divided over `ranks(run)`, suits FP8 kernels."""

    def factor(run: Run) -> int:
        return FP8_MULTIPLE[run.train.fp8_recipe] * ranks(run)

    return multiple_of(
        name,
        factor,
        lambda run: (
            f"{factor(run)}, which train.fp8={run.train.fp8} with train.fp8_recipe={run.train.fp8_recipe} needs on "
            f"{run.sizes.model_parallel_size} rank(s)"
        ),
        value=value,
        when=lambda run: run.is_fp8 and when(run),
    )


def without_sampling(name: str, reason: str) -> Rule[Run]:
    """Rule against a setting of `validation.sampling`."""
    return Rule(
        needs=lambda run: not getattr(run.validation.sampling, name),
        remedy="{validation.sampling." + name + "=} " + reason,
    )


def of_graphs(needs: Condition, hindrance: str) -> Rule[Run]:
    """Rule for CUDA graphs, whose replayed blocks must be the same in every step."""
    return Rule(
        when=lambda run: run.parallel.cuda_graph_max_segments is not None,
        needs=needs,
        remedy="{parallel.cuda_graph_max_segments=} does not go with " + hindrance + "; or leave it out",
    )


def fits_dataset(setting: str, fact: str) -> Rule[Run]:
    return Rule(
        when=lambda run: run.dataset is not None,
        needs=lambda run: agree(getattr(run.model, setting), getattr(run.dataset, fact)),
        remedy="{model." + setting + "=} does not fit {dataset.root}, whose value is {dataset." + fact + "}; set it to "
        "that",
    )


# ------------------------------------------------------------------------------------------------ longer messages


def packs_in_words(run: Run) -> str:
    ranks = f"{run.data_parallel_size} data-parallel ranks"
    if run.sizes.virtual_pipeline > 1:
        ranks += f" x {run.sizes.pipeline} interleaved pipeline stages"
    return f"{run.packs_at_a_time} (data.micro_batch_size={run.data.micro_batch_size} x {ranks})"


def long_mock_in_words(run: Run) -> str:
    shape, tokens = run.longest_mock
    return (
        f"data.mock_latent_shapes={list(shape)} has {tokens} tokens, more than data.seq_length={run.data.seq_length}; "
        "raise that or use smaller shapes"
    )


def encoding_in_words(run: Run) -> str:
    kind = "pixels" if run.dataset.store == "raw" else "latents"
    return (
        f"data.encode={run.data.encode} does not fit {run.dataset.root}, which holds {kind}; set it to {run.encoding}"
    )


def damage_in_words(run: Run) -> str:
    folder, damaged = next(iter(run.damaged_shards.items()))
    return f"data.path={run.data.path}: {partly_copied(folder, damaged)}"


def too_long_in_words(run: Run) -> str:
    found = run.too_long
    return (
        f"data.seq_length={run.data.seq_length} is too small for {found.share:.0%} of the samples of "
        f"{run.dataset.root} ({found.looked_at:,} checked), which have up to {found.most:,} tokens: set "
        f"data.seq_length={found.most}, or data.max_frames to cut clips, or health.max_refused_share=1 to train on the "
        "rest"
    )


def check_copy_url(run: Run) -> None:
    from megadit.train.checkpoints.mirror import check_url

    check_url(run.checkpoint.copy_to)


def check_continues(run: Run) -> None:
    from megadit.train.checkpoints import fixed_settings as kept

    kept.check_continues(run.config)


def check_targets(run: Run) -> None:
    """Raises UserError for a pattern of `train.adapter.targets` that matches no linear of the network."""
    from megadit.models.lora.adapters import chosen_targets

    chosen_targets(run.model, run.train.adapter.targets)


def check_kinds(run: Run) -> None:
    """Raises UserError for an unknown mode of `data.conditioning`, or invalid fractions."""
    from megadit.train.data.packs.conditioning import parse_kinds

    parse_kinds(run.data.conditioning)


def check_sampling(run: Run) -> None:
    """Raises UserError for an unknown sampler or schedule, settings that exclude each other, or guidance outside the
    network's range."""
    check_guidance(resolve(SINGLE_IMAGE, **run.set_sampling), run.model.guidance_embedding_range)


def check_schedule(run: Run) -> None:
    """Raises UserError for invalid noise levels of sampling."""
    from megadit.infer.sampling.schedules import settings_sigmas

    settings_sigmas(resolve(SINGLE_IMAGE, **run.set_sampling))


def check_student_sigmas(run: Run) -> None:
    """Raises UserError for `train.distill.sigmas` that do not decrease."""
    from megadit.infer.sampling.schedules import explicit_sigmas

    if run.train.distill.sigmas:
        explicit_sigmas(run.train.distill.sigmas)
