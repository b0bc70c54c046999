"""Training runs with names: `megadit train --recipe NAME`.

A recipe is a function without arguments that returns a complete `RunConfig`; YAML files and `a.b=c` overrides change
single values of it. Variants are `dataclasses.replace` of another recipe. The published recipes keep the numbers of the
NeMo and DFM runs whose names they bear; sizes count 512-slot texts and the latents of an 8x spatial tokenizer, so that
a 256 x 256 image is 256 tokens.
"""

from collections.abc import Callable
from dataclasses import replace

from megadit.models.config import NAMED_CONFIGS
from megadit.models.support import UserError, nearest
from megadit.train.aliases import MISSING_RECIPES
from megadit.train.config import (
    CheckpointConfig,
    DataConfig,
    DiffusionConfig,
    EmaConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    ValidationConfig,
)

RECIPES: dict[str, Callable[[], RunConfig]] = {}


def recipe(function: Callable[[], RunConfig]) -> Callable[[], RunConfig]:
    """Registers a recipe under the function's name."""
    RECIPES[function.__name__] = function
    return function


def load_recipe(name: str) -> RunConfig:
    """The run that `name` stands for.

    Raises:
        UserError: for an unknown name, with the nearest known one.
    """
    if name in MISSING_RECIPES:
        raise UserError(f"recipe {name} trains the {MISSING_RECIPES[name]} network, which this version does not have")
    if name not in RECIPES:
        near = nearest(name, RECIPES)
        hint = f"did you mean {near!r}? " if near else ""
        raise UserError(f"unknown recipe {name!r}; {hint}choose one of {', '.join(sorted(RECIPES))}")
    return RECIPES[name]()


@recipe
def digits() -> RunConfig:
    """The run of `make demo`: captioned clips and images of handwritten digits, about five minutes on two CPU cores.

    Command: torchrun --nproc-per-node 2 -m megadit.train --recipe digits data.path=FOLDER train.output_dir=FOLDER
    Hardware: 2 CPU cores, 2 GB of memory; any GPU.
    Tokens: 1,280 a step in two packs (an image is 16, a clip of 9 frames 48), 4 million in all.
    """
    return RunConfig(
        recipe="digits",
        model=NAMED_CONFIGS["digits"],
        data=DataConfig(
            seq_length=640,
            text_seq_length=192,
            global_batch_size=2,
            num_workers=0,
            packing_buffer_size=64,
            shuffle_buffer_size=4096,
            text_dropout=0.1,
            mock_latent_shapes=((1, 4, 4), (3, 4, 4)),
        ),
        train=TrainConfig(
            train_iters=3100, output_dir="runs/digits", precision="fp32", matmul_precision="bf16", log_interval=50
        ),
        diffusion=DiffusionConfig(p_mean=0.6, p_std=1.4, learned_uncertainty=True),
        optimizer=OptimizerConfig(
            optimizer="muon",
            lr=8e-3,
            adam_beta2=0.99,
            lr_warmup_iters=50,
            lr_decay_style="linear",
        ),
        ema=EmaConfig(sigma_rels=(0.05, 0.10)),
        checkpoint=CheckpointConfig(save_interval=1000, keep_last=2),
        # few large steps: at this size a second-order solver draws digits that change more in motion
        validation=ValidationConfig(interval=1550, num_batches=4, sampler="euler", num_steps=10, guidance=4.0),
    )


@recipe
def digits_tiny() -> RunConfig:
    """A few seconds of `digits` with a smaller network: for tests, and for a first look at a run's folder.

    Command: megadit train --recipe digits_tiny --mock
    Hardware: 1 CPU core.
    Tokens: 192 a step in two packs, 10 steps.
    """
    run = digits()
    return replace(
        run,
        recipe="digits_tiny",
        model=replace(run.model, num_layers=2, hidden_size=48),
        data=replace(run.data, seq_length=96, text_seq_length=64, packing_buffer_size=8, shuffle_buffer_size=16),
        train=replace(
            run.train, train_iters=10, output_dir="runs/digits_tiny", matmul_precision="ieee", log_interval=1
        ),
        optimizer=replace(run.optimizer, lr_warmup_iters=2),
        checkpoint=replace(run.checkpoint, save_interval=5),
        validation=replace(run.validation, interval=5, num_batches=1, num_steps=2),
    )


@recipe
def pretrain_xl() -> RunConfig:
    """DiT-XL from random weights, with the numbers of NeMo's `pretrain_xl`.

    Command: torchrun --nproc-per-node 8 -m megadit.train --recipe pretrain_xl data.path=FOLDER
    Hardware: one node of 8 GPUs with 80 GB.
    Tokens: 65,536 a step (32 packs of 2,048). The original names no last step; 500,000 is ours.
    """
    return RunConfig(
        recipe="pretrain_xl",
        model=NAMED_CONFIGS["dit_xl"],
        data=DataConfig(seq_length=2048, text_seq_length=4096, global_batch_size=32, num_workers=8, text_dropout=0.2),
        train=TrainConfig(train_iters=500_000, output_dir="runs/pretrain_xl", log_interval=1),
        optimizer=OptimizerConfig(lr=1e-4, adam_beta2=0.999, lr_decay_style="constant"),
        checkpoint=CheckpointConfig(save_interval=1000, keep_last=3),
        # NeMo writes cond + 7 (cond - uncond), which is a guidance of 8 here.
        validation=ValidationConfig(interval=1000, num_batches=1, guidance=8.0),
    )


@recipe
def pretrain_l() -> RunConfig:
    """DiT-L from random weights, with the numbers of NeMo's `pretrain_l`.

    Command: torchrun --nproc-per-node 8 -m megadit.train --recipe pretrain_l data.path=FOLDER
    Hardware: one node of 8 GPUs with 40 GB.
    Tokens: 65,536 a step (32 packs of 2,048).
    """
    run = pretrain_xl()
    return replace(
        run,
        recipe="pretrain_l",
        model=NAMED_CONFIGS["dit_l"],
        train=replace(run.train, output_dir="runs/pretrain_l"),
    )


@recipe
def pretrain_7b() -> RunConfig:
    """DiT-7B on single images of 256 x 256, with the numbers of NeMo's `pretrain_7b`.

    Command: torchrun --nnodes 32 --nproc-per-node 8 -m megadit.train --recipe pretrain_7b data.path=FOLDER
    Hardware: 256 GPUs with 80 GB. A global batch of 4,608 packs in micro-batches of 9 divides among 256 ranks twice.
    Tokens: 1.2 million a step (4,608 packs of 260, one image each).
    """
    run = pretrain_xl()
    return replace(
        run,
        recipe="pretrain_7b",
        model=NAMED_CONFIGS["dit_7b"],
        data=replace(
            run.data,
            seq_length=260,
            text_seq_length=512,
            micro_batch_size=9,
            global_batch_size=4608,
            num_workers=15,
            use_train_split_for_val=True,
            mock_latent_shapes=((1, 32, 32),),
        ),
        train=replace(run.train, output_dir="runs/pretrain_7b"),
        optimizer=OptimizerConfig(
            lr=1e-4, weight_decay=0.1, adam_beta2=0.95, lr_warmup_iters=100, lr_decay_style="constant"
        ),
        parallel=replace(run.parallel, data_parallel="distributed_optimizer"),
    )


@recipe
def pretrain_7b_pack() -> RunConfig:
    """`pretrain_7b` with about nine images to a pack, as NeMo's `pretrain_7b_pack`.

    Command: torchrun --nnodes 32 --nproc-per-node 8 -m megadit.train --recipe pretrain_7b_pack data.path=FOLDER
    Hardware: 256 GPUs with 80 GB; two micro-batches of one pack for each.
    Tokens: 1.2 million a step (512 packs of 2,304).
    """
    run = pretrain_7b()
    return replace(
        run,
        recipe="pretrain_7b_pack",
        data=replace(
            run.data,
            seq_length=2304,
            text_seq_length=4608,
            micro_batch_size=1,
            global_batch_size=512,
            packing_buffer_size=1000,
            mock_latent_shapes=((1, 32, 32), (4, 32, 32)),
        ),
        train=replace(run.train, output_dir="runs/pretrain_7b_pack"),
    )


@recipe
def dit_pretrain() -> RunConfig:
    """DiT-XL on packed images and clips, with the numbers of DFM's `pretrain_config` and `conf/dit_pretrain.yaml`.

    Command: torchrun --nproc-per-node 8 -m megadit.train --recipe dit_pretrain data.path=FOLDER
    Hardware: one node of 8 GPUs with 80 GB.
    Tokens: 122,880 a step (8 packs of 15,360), 1.2 billion in all.
    """
    return RunConfig(
        recipe="dit_pretrain",
        model=NAMED_CONFIGS["dit_xl"],
        data=DataConfig(
            seq_length=15_360,
            text_seq_length=15_360,
            global_batch_size=8,
            num_workers=20,
            packing_buffer_size=100,
            text_dropout=0.2,
        ),
        train=TrainConfig(train_iters=10_000, output_dir="runs/dit_pretrain", log_interval=10),
        optimizer=OptimizerConfig(lr=9e-5, min_lr=9e-6, weight_decay=0.1, lr_warmup_iters=2000),
        checkpoint=CheckpointConfig(save_interval=1000, keep_last=3),
        validation=ValidationConfig(interval=1000, num_batches=32, guidance=8.0),
    )
