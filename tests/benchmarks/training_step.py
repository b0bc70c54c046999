"""Our training step beside others, each pair in one run, as a ratio.

    python tests/benchmarks/training_step.py [--rounds 9] [--threads 2] [--json FILE]

1. Forward and backward of one block of our DiT, and a whole step (forward, backward, torch's fused AdamW) of a pack of
   one sample, beside diffusers' Cosmos transformer and DiT of the same sizes: equal width, depth, heads, tokens, text
   length and hence FLOPs.
2. The same samples, 1 to 64 frames long, as packs and as batches padded to their longest.
3. One optimizer step of recipe `digits`: Megatron-core (schedule, data-parallel buffers, optimizer, averages) on its
   layers at tensor-parallel size 1, and the same step written out in plain torch on a plain DiT.
4. What each of eight context-parallel ranks would be spared if they divided the text of 8,192 tokens too: the keys and
   values of the other ranks' text, beside all that the rank computes.

Figures: train/BENCHMARKS.md.
"""

import itertools
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace

import torch
from side_by_side import DTYPES, SETTINGS, BlockCall, Comparison, block_call, compare, show
from torch import Tensor

from megadit.infer.benchmarks.beside_diffusers import (
    COSMOS,
    BenchmarkOptions,
    Inputs,
    Setting,
    backward,
    networks,
    packed_call,
    randomised,
    training_steps,
)
from megadit.models.configs.config import DiTConfig
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.dit import DiT
from megadit.models.networks.embeddings import patchify
from megadit.models.networks.initialize import initialize_
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment
from megadit.models.shared.cli.command import run_command
from megadit.models.shared.cli.options import read_options
from megadit.train.config.schema import RunConfig
from megadit.train.data.packs.bin_packing import best_fit
from megadit.train.recipes import load_recipe

DIGITS_LATENTS = ((1, 4, 4), (3, 4, 4), (1, 4, 4))
"""The digits data set's mixture: two images to each clip."""
PACKED = DiTConfig(num_layers=4, hidden_size=256, num_attention_heads=4, crossattn_emb_size=64)
MAX_FRAMES, SIDE = 64, 8
"""Latents of 1 to 64 frames of 8 x 8: 16 to 1,024 tokens."""
NUM_CLIPS, PADDED_BATCH = 32, 4


def compare_training(setting: Setting, dtype: torch.dtype, rounds: int) -> list[Comparison]:
    """Forward and backward of one block, and a step of the whole network; every step meets a new pack."""
    ours, theirs = networks(setting, dtype)
    inputs = Inputs.of(setting, dtype)

    def of_block(block: BlockCall) -> Callable[[], None]:
        return lambda: backward(block.run(block.tokens.detach().requires_grad_()))

    what = f"{setting.num_tokens:,} tokens, {str(dtype).removeprefix('torch.')} / {setting.name}"
    blocks = [
        of_block(block_call(block, call))
        for block, call in (
            (ours.blocks["0"], packed_call(setting, ours, inputs)),
            (theirs.transformer_blocks[0], lambda: setting.call_theirs(theirs, inputs)),
        )
    ]
    return [
        compare(f"block forward + backward, {what}", *blocks, 8 * rounds),
        compare(f"step, {what}", *training_steps(setting, dtype), rounds),
    ]


def compare_packing(rounds: int) -> Comparison:
    """The same clips, lengths log-uniform: as packs of the longest clip's size, and as they come in padded batches."""
    dit = randomised(DiT(PACKED))
    generator = torch.Generator().manual_seed(0)
    lengths = [int(MAX_FRAMES ** torch.rand((), generator=generator) + 0.5) for _ in range(NUM_CLIPS)]
    clips = [torch.randn(PACKED.in_channels, frames, SIDE, SIDE, generator=generator) for frames in lengths]
    packs = _pack(clips)
    batches = [_pad(clips[start : start + PADDED_BATCH]) for start in range(0, NUM_CLIPS, PADDED_BATCH)]

    def packed() -> None:
        for segments, *inputs in packs:
            layout = PackLayout.pack(segments, capacity=len(inputs[0]), text_capacity=len(segments))
            backward(dit.forward_packed(*inputs, layout))

    def padded() -> None:
        for batch in batches:
            backward(dit(*batch))

    name = f"{NUM_CLIPS} clips of 1 to {MAX_FRAMES} frames, packed / padded in batches of {PADDED_BATCH}"
    return compare(name, packed, padded, rounds, limit=1 / 1.8)


def _pack(clips: list[Tensor]) -> list[tuple]:
    """The clips in packs of the longest one's size, as the loader packs them."""
    capacity = MAX_FRAMES * SIDE**2 // PACKED.patch_spatial**2
    tokens = [patchify(clip[None], PACKED) for clip in clips]
    packs = best_fit([(len(each), 1) for each in tokens], (capacity, len(clips)))
    return [_pack_of([tokens[index] for index in pack], capacity) for pack in packs]


def _pack_of(members: list[Tensor], capacity: int) -> tuple:
    """Segments, and what else `forward_packed` takes."""
    side = SIDE // PACKED.patch_spatial
    segments = [Segment((len(tokens) // side**2, side, side), 1) for tokens in members]
    tokens_S1P = torch.zeros(capacity, 1, PACKED.patch_dim)
    tokens_S1P[: sum(map(len, members))] = torch.cat(members)
    rows = torch.zeros(len(segments) + (sum(map(len, members)) < capacity))
    return segments, tokens_S1P, rows, torch.zeros(len(segments), 1, PACKED.crossattn_emb_size), rows


def _pad(clips: list[Tensor]) -> tuple:
    """What `forward` takes: as long as the longest. Nothing is masked, which costs a padding trainer more yet."""
    longest = max(clip.shape[1] for clip in clips)
    x_BCTHW = torch.zeros(len(clips), PACKED.in_channels, longest, SIDE, SIDE)
    for x_CTHW, clip in zip(x_BCTHW, clips, strict=True):
        x_CTHW[:, : clip.shape[1]] = clip
    ones = torch.ones(len(clips))
    text = torch.zeros(len(clips), 1, PACKED.crossattn_emb_size)
    return x_BCTHW, 0 * ones, Conditioning(text, ones.long(), ones)


def compare_text_of_others(rounds: int) -> Comparison:
    """An upper bound: attention to other ranks' tokens is left out of the whole, and collectives out of the part."""
    num_ranks, grid, text_length = 8, (8, 32, 32), 512
    own = (grid[0] // num_ranks, *grid[1:])
    config = replace(COSMOS.config, num_layers=2, hidden_size=1024)
    dit = randomised(DiT(config))
    layout = PackLayout.pack([Segment(own, text_length)], capacity=math.prod(own), text_capacity=text_length)
    tokens_S1P = torch.randn(math.prod(own), 1, config.patch_dim)
    text_L1E = torch.randn(text_length, 1, config.crossattn_emb_size)
    c_noise_G, fps_G = torch.tensor([0.3]), torch.tensor([24.0])
    spared_L1D = torch.randn(text_length - text_length // num_ranks, 1, config.hidden_size, requires_grad=True)

    def spared() -> None:
        for block in dit.blocks.values():
            backward(block.cross_attention.kv(spared_L1D))

    def whole() -> None:
        backward(dit.forward_packed(tokens_S1P, c_noise_G, text_L1E, fps_G, layout))

    return compare("keys and values of other ranks' text / all of a rank, 8 ranks", spared, whole, rounds)


def _digits_run(folder: str) -> RunConfig:
    """The recipe `digits` on one rank: both packs of a step in one micro-batch, as two ranks would share them."""
    run = load_recipe("digits")
    packs = run.data.global_batch_size
    return replace(
        run,
        data=replace(run.data, mock=True, mock_latent_shapes=DIGITS_LATENTS, num_workers=0, micro_batch_size=packs),
        train=replace(run.train, output_dir=folder, num_threads=torch.get_num_threads()),
        logger=replace(run.logger, tensorboard=False),
    )


def _megatron_step(config: RunConfig, batches: Callable) -> Callable[[], object]:
    from megadit.train.engine.setup import build_training, start_processes
    from megadit.train.engine.step import train_step

    training = build_training(config, start_processes(config))
    steps = itertools.count(1)
    return lambda: train_step(training, batches, next(steps), must_stop=False)


def _torch_step(config: RunConfig, batches) -> Callable[[], object]:
    from megadit.train.objectives.denoise import draw_sigma, token_noise
    from megadit.train.objectives.losses import Uncertainty, edm_loss

    dit, uncertainty, settings = initialize_(DiT(config.model), config.train.seed), Uncertainty(), config.optimizer
    named = dict(dit.named_parameters())
    matrices = [parameter for name, parameter in named.items() if name.startswith("blocks.") and parameter.ndim == 2]
    others = [parameter for parameter in named.values() if not any(parameter is matrix for matrix in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=settings.lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([*others, *uncertainty.parameters()], lr=settings.lr, betas=(0.9, 0.99), fused=True),
    ]
    parameters = [*named.values(), *uncertainty.parameters()]
    ema_weights = [[parameter.detach().clone() for parameter in parameters] for _ in config.ema.sigma_rels]

    def step() -> None:
        batch = next(batches)
        sigma_G = draw_sigma(batch.noise_key_G, config.diffusion, batch.layout)
        sums = edm_loss(dit, batch, sigma_G, token_noise(batch), uncertainty)
        (sums.objective / batch.num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip_grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for average in ema_weights:
            torch._foreach_lerp_(average, [parameter.detach() for parameter in parameters], 0.01)

    return step


def compare_megatron(rounds: int) -> Comparison:
    from megadit.train.data.loader import build_train_loader

    with tempfile.TemporaryDirectory() as folder:
        config = _digits_run(folder)
        loader = iter(build_train_loader(config, rank=0, world_size=1, group=None))
        # the same batches for both, made beforehand: a pair of steps is timed, not the reader
        made = list(itertools.islice(loader, 8))
        ours = _megatron_step(config, itertools.cycle(made))
        theirs = _torch_step(config, itertools.cycle(made))
        return compare("one step of recipe digits, Megatron TP1 / plain torch", ours, theirs, rounds, limit=1.1)


def _run(argv: list[str]) -> None:
    options = read_options(
        BenchmarkOptions,
        argv,
        prog="python tests/benchmarks/training_step.py",
        description="Times training beside other ways to do it.",
    )
    options.set_threads()
    comparisons = [
        one for setting in SETTINGS for dtype in DTYPES for one in compare_training(setting, dtype, options.rounds)
    ]
    comparisons += [compare_packing(options.rounds), compare_text_of_others(options.rounds)]
    if not torch.cuda.is_available():
        from megadit.models.megatron import cpu_shim

        cpu_shim.install()  # before anything imports Megatron, and after what needs an unpatched torch
    # a small step: many of them, for a steady median
    comparisons.append(compare_megatron(10 * options.rounds))
    show("training: megadit / others", comparisons, options.json)


def main(argv: list[str]) -> int:
    return run_command(_run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
