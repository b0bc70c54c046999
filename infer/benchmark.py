"""One sampling step of our DiT beside diffusers' Cosmos transformer of the same size, in one run, as a ratio.

    python -m megadit.infer.benchmark [--rounds 9] [--threads 2]

The networks have equal width, depth, heads, tokens, text length and hence FLOPs; both stand behind the same EDM
preconditioning and the same sampler. Figures: infer/BENCHMARKS.md.
"""

import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from megadit.infer.samplers import euler
from megadit.models.conditioning import Conditioning
from megadit.models.config import DiTConfig
from megadit.models.dit import DiT
from megadit.models.precondition import EDMDenoiser, edm_scalings
from megadit.models.support import CommandParser, UserError, run_command

CONFIG = DiTConfig(num_layers=8, hidden_size=512, num_attention_heads=8, crossattn_emb_size=512)
LATENTS = (4, 32, 32)
"""Latent frames, height, width: 1,024 tokens under a patch of 1 x 2 x 2."""
TEXT_LENGTH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    rounds: int = 9
    """Pairs timed, after one that is not counted."""
    threads: int | None = None
    """Threads of torch; None leaves torch's own choice."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two functions timed in turn, A B A B: medians in seconds, and the ratios A / B pair by pair."""

    name: str
    ours: list[float]
    theirs: list[float]

    @property
    def ratios(self) -> list[float]:
        return sorted(a / b for a, b in zip(self.ours, self.theirs, strict=True))


def compare(name: str, ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> Comparison:
    """Times both `rounds` times in turn, so that a drifting machine slows both."""
    if rounds < 1:
        raise UserError(f"--rounds {rounds} must be at least 1")

    def seconds(function: Callable[[], object]) -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    seconds(ours), seconds(theirs)
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    return Comparison(name, *(list(side) for side in zip(*pairs, strict=True)))


def show(title: str, comparisons: list[Comparison]) -> None:
    """A table of medians and ratios, and the machine they were measured on."""
    table = Table("what", "ours (s)", "theirs (s)", "ratio, median", "lowest", "highest", title=title)
    for one in comparisons:
        ours, theirs = statistics.median(one.ours), statistics.median(one.theirs)
        ratio = statistics.median(one.ratios)
        cells = (f"{ours:.3f}", f"{theirs:.3f}", f"{ratio:.3f}", f"{one.ratios[0]:.3f}", f"{one.ratios[-1]:.3f}")
        table.add_row(one.name, *cells)
    console = Console()
    console.print(table)
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}, float32")


def cosmos_like(config: DiTConfig) -> nn.Module:
    """diffusers' Cosmos transformer with the sizes of `config`, random weights.

    Raises:
        UserError: without diffusers.
    """
    try:
        from diffusers import CosmosTransformer3DModel
    except ImportError:
        raise UserError("the comparison needs diffusers: pip install diffusers") from None
    return CosmosTransformer3DModel(
        in_channels=config.in_channels,
        out_channels=config.in_channels,
        num_attention_heads=config.num_attention_heads,
        attention_head_dim=config.dim_per_head,
        num_layers=config.num_layers,
        mlp_ratio=config.mlp_size / config.hidden_size,
        text_embed_dim=config.crossattn_emb_size,
        patch_size=(config.patch_temporal, config.patch_spatial, config.patch_spatial),
        concat_padding_mask=False,  # it would want torchvision
        extra_pos_embed_type=None,
    )


def randomised(network: nn.Module) -> nn.Module:
    """No tensor zero: what is multiplied by zero may be cheaper."""
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.02)
    return network


def _sampling_step(rounds: int) -> Comparison:
    ours = EDMDenoiser(randomised(DiT(CONFIG)))
    cosmos = randomised(cosmos_like(CONFIG))
    text_BLE = torch.randn(1, TEXT_LENGTH, CONFIG.crossattn_emb_size)
    conditioning = Conditioning(text_BLE, torch.tensor([TEXT_LENGTH]), torch.tensor([24.0]))
    x_BCTHW = 80 * torch.randn(1, CONFIG.in_channels, *LATENTS)

    def cosmos_denoiser(x: Tensor, sigma_B: Tensor) -> Tensor:
        c_skip, c_out, c_in, c_noise = edm_scalings(sigma_B.reshape(-1, 1, 1, 1, 1), CONFIG.sigma_data)
        return c_skip * x + c_out * cosmos(c_in * x, c_noise.flatten(), text_BLE, fps=24, return_dict=False)[0]

    @torch.no_grad()
    def step(denoise: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return euler(denoise, x_BCTHW, torch.tensor([80.0, 60.0], dtype=torch.float64))

    return compare(
        "one Euler step, 1,024 tokens",
        lambda: step(lambda x, sigma: ours(x, sigma, conditioning)),
        lambda: step(cosmos_denoiser),
        rounds,
    )


def parse_flags(argv: list[str]) -> Flags:
    parser = CommandParser(
        prog="python -m megadit.infer.benchmark", description="Times our DiT beside diffusers' Cosmos transformer."
    )
    parser.add_argument("--rounds", type=int, default=9, help="pairs timed, after one that is not counted (default: 9)")
    parser.add_argument("--threads", type=int, help="threads of torch (default: torch's own choice)")
    return Flags(**vars(parser.parse_args(argv)))


def _run(argv: list[str]) -> None:
    flags = parse_flags(argv)
    if flags.threads:
        torch.set_num_threads(flags.threads)
    show("sampling: megadit / diffusers Cosmos transformer", [_sampling_step(flags.rounds)])


def main(argv: list[str]) -> int:
    return run_command(_run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
