"""Our training step beside two others, each pair in one run, as a ratio.

    python -m megadit.train.benchmark [--rounds 9] [--threads 2]

1. Forward and backward of our DiT (a pack of one sample) and of diffusers' Cosmos transformer of the same size: equal
   width, depth, heads, tokens, text length and hence FLOPs.
2. One optimizer step of recipe `digits`: Megatron-core (schedule, data-parallel buffers, optimizer, averages) on its
   layers at tensor-parallel size 1, and the same step written out in plain torch on `TorchLayers`.
3. What each of eight context-parallel ranks would be spared if they divided the text of 8,192 tokens too: the keys and
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
from torch import Tensor

from megadit.infer.benchmark import (
    CONFIG,
    LATENTS,
    TEXT_LENGTH,
    Comparison,
    compare,
    cosmos_like,
    parse_flags,
    randomised,
    show,
)
from megadit.models.dit import DiT
from megadit.models.embeddings import patchify
from megadit.models.initialize import initialize_
from megadit.models.segments import Segment, SegmentLayout
from megadit.models.support import run_command
from megadit.train.config import RunConfig
from megadit.train.recipes import load_recipe

DIGITS_LATENTS = ((1, 4, 4), (3, 4, 4), (1, 4, 4))
"""The digits data set's mixture: two images to each clip."""


def _forward_backward(rounds: int) -> Comparison:
    ours, cosmos = randomised(DiT(CONFIG)), randomised(cosmos_like(CONFIG))
    x_BCTHW = torch.randn(1, CONFIG.in_channels, *LATENTS)
    text_BLE = torch.randn(1, TEXT_LENGTH, CONFIG.crossattn_emb_size)
    c_noise_B, fps_B = torch.tensor([0.3]), torch.tensor([24.0])
    tokens_S1P, text_L1E = patchify(x_BCTHW, CONFIG), text_BLE.transpose(0, 1)
    grid = CONFIG.token_grid(*LATENTS)
    layout = SegmentLayout.pack([Segment(grid, TEXT_LENGTH)], capacity=tokens_S1P.shape[0], text_capacity=TEXT_LENGTH)

    def backward(out: Tensor) -> None:
        out.backward(torch.ones_like(out))

    return compare(
        "forward + backward, 1,024 tokens / diffusers Cosmos",
        lambda: backward(ours.forward_packed(tokens_S1P, c_noise_B, text_L1E, fps_B, layout)),
        lambda: backward(cosmos(x_BCTHW, c_noise_B, text_BLE, fps=24, return_dict=False)[0]),
        rounds,
    )


def _text_of_other_ranks(rounds: int) -> Comparison:
    """An upper bound: attention to other ranks' tokens is left out of the whole, and collectives out of the part."""
    num_ranks, grid, text_length = 8, (8, 32, 32), 512
    own = (grid[0] // num_ranks, *grid[1:])
    config = replace(CONFIG, num_layers=2, hidden_size=1024)
    dit = randomised(DiT(config))
    layout = SegmentLayout.pack([Segment(own, text_length)], capacity=math.prod(own), text_capacity=text_length)
    tokens_S1P = torch.randn(math.prod(own), 1, config.patch_dim)
    text_L1E = torch.randn(text_length, 1, config.crossattn_emb_size)
    c_noise_G, fps_G = torch.tensor([0.3]), torch.tensor([24.0])
    spared_L1D = torch.randn(text_length - text_length // num_ranks, 1, config.hidden_size, requires_grad=True)

    def spared() -> None:
        for block in dit.blocks.values():
            block.cross_attention.kv(spared_L1D).sum().backward()

    def whole() -> None:
        dit.forward_packed(tokens_S1P, c_noise_G, text_L1E, fps_G, layout).sum().backward()

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
    from megadit.train.setup import build_training, start_processes
    from megadit.train.step import train_step

    training = build_training(config, start_processes(config))
    steps = itertools.count(1)
    return lambda: train_step(training, batches, next(steps), must_stop=False)


def _torch_step(config: RunConfig, batches) -> Callable[[], object]:
    from megadit.train.loss import Uncertainty, draw_sigma, edm_loss, token_noise

    dit, uncertainty, settings = initialize_(DiT(config.model), config.train.seed), Uncertainty(), config.optimizer
    named = dict(dit.named_parameters())
    matrices = [parameter for name, parameter in named.items() if name.startswith("blocks.") and parameter.ndim == 2]
    others = [parameter for parameter in named.values() if not any(parameter is matrix for matrix in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=settings.lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([*others, *uncertainty.parameters()], lr=settings.lr, betas=(0.9, 0.99), fused=True),
    ]
    parameters = [*named.values(), *uncertainty.parameters()]
    averages = [[parameter.detach().clone() for parameter in parameters] for _ in config.ema.sigma_rels]

    def step() -> None:
        batch = next(batches)
        sigma_G = draw_sigma(batch.noise_key_G, config.diffusion)
        sums = edm_loss(dit, batch, sigma_G, token_noise(batch), uncertainty)
        (sums.objective / batch.num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip_grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for average in averages:
            torch._foreach_lerp_(average, [parameter.detach() for parameter in parameters], 0.01)

    return step


def _optimizer_step(rounds: int) -> Comparison:
    from megadit.train.data.loader import build_train_loader

    with tempfile.TemporaryDirectory() as folder:
        config = _digits_run(folder)
        loader = iter(build_train_loader(config, rank=0, world_size=1, group=None))
        # the same batches for both, made beforehand: a pair of steps is timed, not the reader
        made = list(itertools.islice(loader, 8))
        ours = _megatron_step(config, itertools.cycle(made))
        theirs = _torch_step(config, itertools.cycle(made))
        return compare("one step of recipe digits, Megatron TP1 / TorchLayers", ours, theirs, rounds)


def _run(argv: list[str]) -> None:
    flags = parse_flags(argv)
    if flags.threads:
        torch.set_num_threads(flags.threads)
    plain = [_forward_backward(flags.rounds), _text_of_other_ranks(flags.rounds)]
    if not torch.cuda.is_available():
        from megadit.models.megatron import cpu_shim

        cpu_shim.install()  # before anything imports Megatron, and after what needs an unpatched torch
    # a small step: many of them, for a steady median
    show("training: megadit / others", [*plain, _optimizer_step(10 * flags.rounds)])


def main(argv: list[str]) -> int:
    return run_command(_run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
