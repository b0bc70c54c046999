"""Rules of data, conditioning, noise levels, optimizer, kinds of networks, adapters and distillation."""

from operator import attrgetter

from megadit.models.shared.errors import Rule, accepted_by
from megadit.train.config.distill import AT_ALL_LEVELS
from megadit.train.config.facts import Run
from megadit.train.config.rule_forms import (
    MOST_MODE,
    check_kinds,
    check_student_sigmas,
    check_targets,
    long_mock_in_words,
    multiple_of,
    of_embedding,
    of_int8_base,
)

LEARNING: tuple[Rule[Run], ...] = (
    # data
    multiple_of(
        "data.global_batch_size",
        attrgetter("data.micro_batch_size"),
        lambda run: f"data.micro_batch_size={run.data.micro_batch_size}",
    ),
    Rule(
        needs=lambda run: (
            run.data.mock_latent_shapes and all(side >= 1 for shape in run.data.mock_latent_shapes for side in shape)
        ),
        remedy="{data.mock_latent_shapes=} needs at least one (T, H, W), each side 1 or more",
    ),
    Rule(
        when=attrgetter("data.mock"),
        needs=lambda run: run.longest_mock[1] <= run.data.seq_length,
        remedy=long_mock_in_words,
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
        remedy="{ema.sigma_rels=} lists one profile twice",
    ),
    # noise levels
    Rule(
        when=lambda run: run.diffusion.noise_levels == "mode",
        needs=lambda run: run.diffusion.p_std <= MOST_MODE,
        remedy="{diffusion.p_std=} is the scale of diffusion.noise_levels=mode, at most "
        + str(MOST_MODE)
        + ": beyond it, two draws would give the same noise level",
    ),
    # conditioning
    accepted_by(check_kinds, when=lambda run: bool(run.data.conditioning)),
    Rule(
        when=lambda run: bool(run.data.conditioning),
        needs=lambda run: run.model.conditioning_sigma is not None,
        remedy="data.conditioning needs model.conditioning_sigma, its noise level; digits did best at 0.02",
    ),
    Rule(
        needs=lambda run: run.model.conditioning.is_among and run.model.image_size is None,
        remedy="{model.conditioning_mode=} {model.image_size=} cannot be trained here: data sets hold no conditioning "
        "latents as extra channels and no image features; such networks can be converted and sampled",
    ),
    Rule(
        needs=lambda run: min(run.data.conditioning_dropout) >= 0 and sum(run.data.conditioning_dropout) < 1,
        remedy="{data.conditioning_dropout=} must be three fractions of samples (without conditioning, without text, "
        "without both), each 0 or more, and together less than 1",
    ),
    # networks that do not denoise
    Rule(
        when=lambda run: run.model.task != "classify",
        needs=lambda run: run.train.label_smoothing == 0,
        remedy="{train.label_smoothing=} is for classifiers, such as model.family=vit; leave it out",
    ),
    Rule(
        when=lambda run: run.model.task != "classify",
        needs=lambda run: run.data.mixup == 0,
        remedy="{data.mixup=} is for classifiers such as model.family=vit: it mixes samples and classes; leave it out",
    ),
    Rule(
        when=lambda run: run.model.task == "classify",
        needs=lambda run: run.model.num_classes is not None,
        remedy="{model.family=} learns classes: give model.num_classes",
    ),
    of_embedding(
        lambda run: run.data.text_dropout == 0,
        "{data.text_dropout=} drops labels or texts that {model.family} must learn; use data.text_dropout=0",
    ),
    of_embedding(
        lambda run: run.sizes.context == 1,
        "{parallel.context_parallel_size=} would divide a sample's tokens from its class token; use tensor, sequence "
        "or pipeline parallelism, or fsdp",
    ),
    of_embedding(
        lambda run: not (run.is_student or run.has_adapter or run.diffusion.learned_uncertainty),
        "train.distill, train.adapter and diffusion.learned_uncertainty are for networks that denoise; leave them out",
    ),
    of_embedding(
        lambda run: run.validation.evaluate_interval == 0,
        "{validation.evaluate_interval=} evaluates videos, which {model.family} does not generate; leave it out",
    ),
    # two towers
    multiple_of(
        "model.text_tower.num_attention_heads",
        attrgetter("sizes.tensor"),
        lambda run: f"parallel.tensor_model_parallel_size={run.sizes.tensor}",
        when=lambda run: run.model.task == "match",
    ),
    multiple_of(
        "data.text_seq_length",
        attrgetter("sizes.sequence_multiple"),
        lambda run: f"{run.sizes.sequence_multiple}: parallel.sequence_parallel divides the tokens of the text tower",
        when=lambda run: run.model.task == "match",
    ),
    Rule(
        when=lambda run: run.train.contrast_rows is not None,
        needs=lambda run: run.model.task == "match" and not run.model.text_tower.pairwise,
        remedy="{train.contrast_rows=} is for a softmax over all pairs of images and texts (model.family=clip without "
        "model.text_tower.pairwise); leave it out",
    ),
    # adapter
    accepted_by(check_targets, where="train.adapter.targets: ", when=attrgetter("has_adapter")),
    Rule(
        when=attrgetter("has_adapter"),
        needs=lambda run: not run.parallel.gradient_accumulation_fusion,
        remedy="parallel.gradient_accumulation_fusion=true sums gradients of matrices that train.adapter freezes; "
        "leave it out",
    ),
    Rule(
        when=lambda run: run.has_adapter and run.sizes.num_chunks > 1,
        needs=lambda run: all(run.adapted_chunks),
        remedy="{train.adapter.targets=} leaves nothing to train in one of the {sizes.num_chunks} model chunks of the "
        "pipeline stages; name linears of blocks in each, or use fewer stages",
    ),
    of_int8_base(attrgetter("has_adapter"), "is for the frozen base of an adapter; give train.adapter.rank, too"),
    of_int8_base(
        lambda run: run.parallel.data_parallel != "fsdp",
        "does not work with parallel.data_parallel=fsdp, which shards the base; use distributed_optimizer",
    ),
    of_int8_base(
        lambda run: not run.has_engine and not run.is_fp8,
        "has linears of its own; leave parallel.transformer_impl at local, and train.fp8 out",
    ),
    # distillation
    Rule(
        when=attrgetter("is_student"),
        needs=lambda run: run.sizes.num_chunks == 1 or run.train.distill.passes_through_stages(run.model),
        remedy="{train.distill.objective=} does not support pipeline parallelism, as diffusion_nft, flow_grpo, dpo and "
        "regression do without guidance of the teacher; use parallel.pipeline_model_parallel_size=1, and tensor or "
        "context parallelism or fsdp",
    ),
    Rule(
        when=attrgetter("is_student"),
        needs=lambda run: run.sizes.virtual_pipeline == 1,
        remedy="train.distill needs whole pipeline stages: parallel.virtual_pipeline_model_parallel_size=1",
    ),
    Rule(
        when=lambda run: run.is_student and run.train.distill.objective != "continuous_consistency",
        needs=lambda run: not run.diffusion.learned_uncertainty,
        remedy="diffusion.learned_uncertainty=true weights the denoising loss, which train.distill does not use "
        "(except objective=continuous_consistency); leave it out",
    ),
    Rule(
        when=lambda run: run.is_student and run.train.distill.needs_tangent,
        needs=lambda run: not run.has_engine and not run.is_fp8 and run.train.base_precision == "same",
        remedy="{train.distill.objective=} needs forward-mode differentiation, which TransformerEngine, FP8 and int8 "
        "products do not support; leave parallel.transformer_impl, train.fp8 and train.base_precision out",
    ),
    Rule(
        when=lambda run: run.is_student and run.train.distill.teacher_adapter is not None,
        needs=lambda run: run.has_adapter and run.config.has_one_base,
        remedy="{train.distill.teacher_adapter=} initializes train.adapter, on the teacher's weights: give "
        "train.adapter and leave out checkpoint.init_from; or merge it: megadit bundle TEACHER OUT --merge ADAPTER",
    ),
    Rule(
        when=lambda run: run.is_student and run.train.distill.objective not in AT_ALL_LEVELS,
        needs=lambda run: run.train.distill.sigmas,
        remedy="{train.distill.objective=} needs the noise levels of the student's sampling steps: "
        "train.distill.sigmas=[80,6,1.3,0.3]",
    ),
    Rule(
        when=lambda run: run.is_student and run.train.distill.extras,
        needs=lambda run: not run.data.conditioning and run.data.encode != "on_the_fly",
        remedy="{train.distill.objective=} learns videos that the teacher generated from noise and text alone: leave "
        "out data.conditioning, and use latents (`megadit prepare trajectories`, `megadit prepare rollouts`)",
    ),
    Rule(
        when=lambda run: run.is_student and run.model.guidance_embedding_range is not None,
        needs=lambda run: run.train.distill.guidance == 1,
        remedy="{train.distill.guidance=} is one scale, and {model.guidance_embedding_range=} trains the student for "
        "many: leave one of them out",
    ),
    Rule(
        when=lambda run: run.is_student and run.model.guidance_embedding_range is not None,
        needs=lambda run: not run.train.distill.extras,
        remedy="{train.distill.objective=} learns from videos of one guidance scale, and "
        "{model.guidance_embedding_range=} needs many; leave that out, or choose another objective",
    ),
    Rule(
        when=lambda run: run.is_student and run.train.distill.has_adversary,
        needs=lambda run: run.train.distill.has_critic,
        remedy="{train.distill.adversarial_weight=} needs a critic, which only "
        "train.distill.objective=distribution_matching has; leave it out",
    ),
    Rule(
        when=lambda run: run.is_student and run.train.distill.has_adversary and run.has_experts,
        needs=lambda run: run.model.experts.routing == "expert_choice",
        remedy="{train.distill.adversarial_weight=} takes gradients through the critic, to which the balance loss of "
        "its experts would be added; use model.experts.routing=expert_choice, or leave it out",
    ),
    accepted_by(check_student_sigmas, where="train.distill.", when=attrgetter("is_student")),
    Rule(
        when=lambda run: run.is_student and run.train.distill.objective == "distribution_matching",
        needs=lambda run: run.health.on_not_finite == "stop" and run.health.on_spike is None,
        remedy="{train.distill.objective=} updates two networks in a step, and cannot skip the update of one: use "
        "health.on_not_finite=stop and no health.on_spike",
    ),
)
"""Rules of data, loss, adapters and distillation, in the order in which they are checked."""
