"""The handwritten digits of `make demo`, on a CPU."""

from megadit.models.configs.adapter import AdapterConfig
from megadit.models.configs.named import NAMED_CONFIGS
from megadit.train.config.schema import RunConfig
from megadit.train.recipes.registry import recipe, run_of, variant


@recipe
def digits() -> RunConfig:
    """The run of `make demo`: captioned clips and images of handwritten digits, about four minutes on two CPU cores.

    Command: torchrun --nproc-per-node 2 -m megadit.train --recipe digits data.path=FOLDER train.output_dir=FOLDER
    Hardware: 2 CPU cores, 2 GB of memory; any GPU.
    Tokens: 3,840 a step in two packs (an image is 16, a clip of 9 frames 48), 3.7 million in all.
    Memory: 0.11 GiB a rank, plus Python and torch.
    """
    return run_of(
        model=NAMED_CONFIGS["digits"],
        data=dict(
            seq_length=1920,
            text_seq_length=384,
            global_batch_size=2,
            num_workers=0,
            packing_buffer_size=256,
            shuffle_buffer_size=4096,
            text_dropout=0.1,
            mock_latent_shapes=((1, 4, 4), (3, 4, 4)),
        ),
        train=dict(train_iters=960, precision="fp32", matmul_precision="bf16", log_interval=25),
        diffusion=dict(p_mean=0.6, p_std=1.4, learned_uncertainty=True),
        optimizer=dict(optimizer="muon", lr=1.2e-2, adam_beta2=0.99, lr_warmup_iters=50, lr_decay_style="linear"),
        ema=dict(sigma_rels=(0.05, 0.10)),
        checkpoint=dict(save_interval=480, keep_last=2),
        # few large steps, each with new noise: at this size second-order or deterministic solvers draw digits that
        # change more in motion (found by `megadit tune-sampler`: infer/BENCHMARKS.md)
        validation=dict(
            interval=480,
            num_batches=4,
            sampling=dict(sampler="consistency", num_steps=5, sigmas=(80.0, 6.0, 2.0, 0.8, 0.3), guidance=3.0),
        ),
    )


@recipe
def digits_flow() -> RunConfig:
    """`digits` trained as a rectified flow: the same network, samples, steps and sampler.

    Its noise levels are narrower and higher than EDM's 0.6 and 1.4 (`train/README.md` has a table): a logit-normal t of
    mean 1, which is (0, 1) of arXiv 2403.03206 with a shift of e.

    Command: torchrun --nproc-per-node 2 -m megadit.train --recipe digits_flow data.path=FOLDER train.output_dir=FOLDER
    Hardware: 2 CPU cores, 2 GB of memory; any GPU.
    Tokens: 3,840 a step in two packs (an image is 16, a clip of 9 frames 48), 3.7 million in all.
    Memory: 0.11 GiB a rank, plus Python and torch.
    """
    return variant(digits(), model=dict(parameterization="flow"), diffusion=dict(p_mean=1.0, p_std=1.0))


@recipe
def digits_dreambooth() -> RunConfig:
    """An adapter of rank 4 on the demo's network, for a subject of ten clips: a minute on two CPU cores.

    Command: torchrun --nproc-per-node 2 -m megadit.train --recipe digits_dreambooth data.path=BLEND
        checkpoint.init_from=BUNDLE
    Hardware: 2 CPU cores.
    Tokens: 1,536 a step in two packs (32 clips), 307 thousand in all.
    Memory: 0.038 GiB a rank, plus Python and torch.
    """
    return variant(
        digits(),
        data=dict(
            seq_length=768,
            text_seq_length=256,
            packing_buffer_size=64,
            shuffle_buffer_size=64,
            text_dropout=0.0,  # with dropout, guidance would lead every prompt away from the subject
            prior_text_dropout=0.1,
            prior_weight=2.0,
        ),
        train=dict(train_iters=200, adapter=AdapterConfig(rank=4)),
        diffusion=dict(learned_uncertainty=False),
        optimizer=dict(optimizer="adamw", lr=7e-3, weight_decay=0.0, lr_warmup_iters=10),
        ema=dict(sigma_rels=()),
        checkpoint=dict(save_interval=100),
        validation=dict(interval=0),
    )


@recipe
def digits_conditioned() -> RunConfig:
    """Fine-tunes the demo's network for conditioning: frames, masks and clips to edit; six minutes on two CPU cores.

    Command: torchrun --nproc-per-node 2 -m megadit.train --recipe digits_conditioned data.path=FOLDER
        checkpoint.init_from=BUNDLE
    Hardware: 2 CPU cores, 2 GB of memory; any GPU.
    Tokens: 3,840 a step in two packs (a clip is 48, with a frame encoded as an image 64, with a clip to edit 96).
    Memory: 0.11 GiB a rank, plus Python and torch.
    """
    return variant(
        digits(),
        model=dict(conditioning_sigma=0.02),
        data=dict(
            conditioning=(
                "first_frame:0.3",
                "last_frame:0.25",
                "keyframes:0.03",
                "prefix:0.03",
                "suffix:0.03",
                "inpaint:0.06",
                "edit:1.0",
            )
        ),
        train=dict(train_iters=1300),
        optimizer=dict(lr=6e-3),
        ema=dict(sigma_rels=(0.05,)),
        validation=dict(interval=650, sampling=dict(num_steps=6, sigmas=(80.0, 8.0, 3.0, 1.0, 0.5, 0.2), guidance=2.0)),
    )


@recipe
def digits_tiny() -> RunConfig:
    """A few seconds of `digits` with a smaller network: for tests, and for a first look at a run's folder.

    Command: megadit train --recipe digits_tiny --mock
    Hardware: 1 CPU core.
    Tokens: 192 a step in two packs, 10 steps.
    Memory: 0.0043 GiB a rank, plus Python and torch.
    """
    return variant(
        digits(),
        model=dict(num_layers=2, hidden_size=48, num_attention_heads=2, learned_positions=None),
        data=dict(seq_length=96, text_seq_length=64, packing_buffer_size=8, shuffle_buffer_size=16),
        train=dict(train_iters=10, matmul_precision="ieee", log_interval=1),
        optimizer=dict(lr=8e-3, lr_warmup_iters=2),
        checkpoint=dict(save_interval=5),
        logger=dict(curves=False),
        validation=dict(
            interval=5, num_batches=1, sampling=dict(sampler="euler", num_steps=2, sigmas=(), eta=1.0, guidance=4.0)
        ),
    )
