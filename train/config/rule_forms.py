"""Building blocks of a run's rules: shared forms, longer messages, and checks by trial."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from megadit.models.diffusion.settings import SamplingSettings, check_guidance, resolve
from megadit.models.megatron.parallel_sizes import Division, refusal
from megadit.models.shared.cli.rules import Rule, always
from megadit.models.shared.errors import nearest_multiples
from megadit.models.shared.shards import partly_copied
from megadit.train.config.facts import Run, agree

SINGLE_IMAGE = SamplingSettings(num_steps=1, guidance=1.0, num_frames=1, height=1, width=1, fps=1.0)
"""Stands for the sizes that `validation.sampling` leaves to the data set."""
FP8_MULTIPLE = {"tensorwise": 16, "blockwise": 16, "mxfp8": 32}
"""`train.fp8_recipe` -> what rows and columns of every matrix are a multiple of, on each rank."""
MOST_MODE = 1.75
"""2 / (pi - 2) = 1.7519 is where t stops to fall with u (arXiv 2403.03206, eq. 20)."""
WEIGHTS_IN = ("megadit.json", "checkpoints", "state.json")
"""One of these lies in a bundle, the folder of a run, and a checkpoint."""

Condition = Callable[[Run], Any]


# ------------------------------------------------------------------------------------------------ forms of rules


def multiple_of(name: str, value: Condition, of: Condition, words: Condition, when: Condition = always) -> Rule[Run]:
    """`value(run)`, which messages call `name`, is a multiple of `of(run)`; `words(run)` says of what, and why."""
    return Rule(
        when=when,
        needs=lambda run: value(run) % of(run) == 0,
        remedy=lambda run: (
            f"{name}={value(run)} is not a multiple of {words(run)}; use {nearest_multiples(value(run), of(run))}"
        ),
    )


def of_layout(rule: Rule[Division]) -> Rule[Run]:
    """A rule of a division of ranks, as a rule of a run."""
    return Rule(
        when=lambda run: rule.when(run.division),
        needs=lambda run: rule.needs(run.division),
        remedy=lambda run: refusal(rule, run.division),
    )


def of_embedding(needs: Condition, remedy: str) -> Rule[Run]:
    """Rule for networks without denoising."""
    return Rule(when=lambda run: not run.model.denoises, needs=needs, remedy=remedy)


def of_fp8(needs: Condition, words: str) -> Rule[Run]:
    return Rule(when=attrgetter("is_fp8"), needs=needs, remedy="{train.fp8=} " + words)


def of_int8_base(needs: Condition, words: str) -> Rule[Run]:
    return Rule(
        when=lambda run: run.train.base_precision == "int8", needs=needs, remedy="{train.base_precision=} " + words
    )


def of_fp16(needs: Condition, words: str) -> Rule[Run]:
    """Megatron's loss scaler, without which fp16 loses small gradients, is beside one AdamW for all parameters."""
    return Rule(
        when=lambda run: run.train.precision == "fp16",
        needs=needs,
        remedy="train.precision=fp16 needs a loss scale, " + words,
    )


def fp8_multiple(name: str, value: Condition, ranks: Condition, when: Condition = always) -> Rule[Run]:
    """A side of a matrix of the blocks, or the tokens it meets: divided over `ranks(run)`, kernels can take it."""

    def factor(run: Run) -> int:
        return FP8_MULTIPLE[run.train.fp8_recipe] * ranks(run)

    return multiple_of(
        name,
        value,
        factor,
        lambda run: (
            f"{factor(run)}, which train.fp8={run.train.fp8} with train.fp8_recipe={run.train.fp8_recipe} needs on "
            f"{run.sizes.model_parallel_size} rank(s)"
        ),
        when=lambda run: run.is_fp8 and when(run),
    )


def of_graphs(needs: Condition, hindrance: str) -> Rule[Run]:
    """CUDA graphs replay blocks, which must be the same in every step."""
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
        ranks += f" x {run.sizes.pipeline} stages, which take parts in turn"
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
        f"data.seq_length={run.data.seq_length} has no room for {found.share:.0%} of the samples of {run.dataset.root} "
        f"({found.looked_at:,} looked at), which have up to {found.most:,} tokens: set data.seq_length={found.most}, "
        "or data.max_frames to cut clips, or health.max_refused_share=1 to train on the rest"
    )


def check_copy_url(run: Run) -> None:
    from megadit.train.checkpoints.mirror import check_url

    check_url(run.checkpoint.copy_to)


def check_continues(run: Run) -> None:
    from megadit.train.checkpoints import fixed_settings as kept

    kept.check_continues(run.config)


def check_targets(run: Run) -> None:
    """Raises UserError for a pattern of `train.adapter.targets` that names no linear of the network."""
    from megadit.models.lora.adapters import chosen_targets

    chosen_targets(run.model, run.train.adapter.targets)


def check_kinds(run: Run) -> None:
    """Raises UserError for a use of `data.conditioning` that does not exist, or shares that cannot be."""
    from megadit.train.data.packs.conditioning import parse_kinds

    parse_kinds(run.data.conditioning)


def check_sampling(run: Run) -> None:
    """Raises UserError for a sampler or schedule that does not exist, settings that exclude each other, or guidance
    outside the network's range."""
    check_guidance(resolve(SINGLE_IMAGE, **run.set_sampling), run.model.guidance_embedding_range)


def check_schedule(run: Run) -> None:
    """Raises UserError for noise levels that no sampler can take."""
    from megadit.infer.sampling.schedules import settings_sigmas

    settings_sigmas(resolve(SINGLE_IMAGE, **run.set_sampling))


def check_student_sigmas(run: Run) -> None:
    """Raises UserError for `train.distill.sigmas` that do not decrease."""
    from megadit.infer.sampling.schedules import explicit_sigmas

    if run.train.distill.sigmas:
        explicit_sigmas(run.train.distill.sigmas)
