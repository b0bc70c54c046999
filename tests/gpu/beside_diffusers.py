"""The published Cosmos 7B network by diffusers and by us, of the same random weights: how far apart the denoised
latents are, and what a call takes of each in turn; then a training step of a few of its layers."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import torch
from einops import rearrange
from rows import DEVICE, DTYPE, HAS_GPU, attempt, synchronize, tell
from torch import Tensor, nn

from megadit.infer.benchmarks.beside_diffusers import diffusers, randomised
from megadit.infer.runtimes.cuda_graphs import RecordedDenoiser
from megadit.infer.runtimes.torch import TorchDenoiser
from megadit.models.configs.config import DiTConfig
from megadit.models.configs.named import NAMED_CONFIGS
from megadit.models.convert import cosmos
from megadit.models.diffusion.parameterization import parameterization_of
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.dit import DiT
from megadit.models.networks.embeddings import patchify
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment

SMALL = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "crossattn_emb_size": 32,
    "padding_mask_channel": False,  # for which diffusers needs torchvision
}
SIZES = {"8,192 tokens": (8, 64, 64), "56,320 tokens, 121 frames of 704x1280": (16, 88, 160)}
"""Latent frames, height, width."""
WORDS = 512 if HAS_GPU else 8
TRAINED_LAYERS = 4
APART = 5e-2
"""Largest relative difference of what both give: some roundings of bfloat16 in each of 28 layers."""
FPS, SIGMA = 24, 5.0


def config_of(**changes: int) -> DiTConfig:
    return replace(NAMED_CONFIGS["cosmos_7b"], **({} if HAS_GPU else SMALL), **changes)


def networks(config: DiTConfig) -> tuple[DiT, nn.Module]:
    """Ours and theirs, of equal weights."""
    with DEVICE:
        theirs = randomised(diffusers().CosmosTransformer3DModel.from_config(cosmos.config_to_diffusers(config)))
        theirs = theirs.to(DTYPE).eval()
        ours = DiT(config).to(DTYPE).eval()
    weights, places = theirs.state_dict(), ours.state_dict()
    for entry in cosmos.diffusers_entries(config):
        places[entry.name].copy_(entry.join([weights[name] for name in entry.theirs]))
    return ours, theirs


def in_turn(calls: dict[str, Callable[[], object]], rounds: int, *, warm: bool = True) -> dict[str, list[float]]:
    """Seconds of each call, one of each a round; `warm`: after a round that is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for counted in [False] * warm + [True] * rounds:
        for name, call in calls.items():
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            if counted:
                taken[name].append(time.perf_counter() - start)
    return taken


def told(title: str, taken: dict[str, list[float]], beside: str) -> None:
    for name, seconds in taken.items():
        ratios = sorted(a / b for a, b in zip(seconds, taken[beside], strict=True))
        found = f"{statistics.median(seconds) * 1e3:,.1f} ms, of {beside} {statistics.median(ratios):.3f} "
        found += f"({ratios[0]:.3f} to {ratios[-1]:.3f} of {len(ratios)})"
        tell(f"{title}, {name}", found, ms=statistics.median(seconds) * 1e3, ratio=statistics.median(ratios))


def denoise_theirs(network: nn.Module, config: DiTConfig, text_BLE: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    scalings = parameterization_of(config).scalings

    def denoise(x: Tensor, sigma_B: Tensor) -> Tensor:
        c_skip, c_out, c_in, c_noise = scalings(rearrange(sigma_B.float(), "B -> B 1 1 1 1"))
        mask = torch.zeros(1, 1, *x.shape[3:], dtype=DTYPE, device=DEVICE)
        noisy, level = (c_in * x).to(DTYPE), c_noise.flatten().to(DTYPE)
        out = network(noisy, level, text_BLE, fps=FPS, padding_mask=mask, return_dict=False)[0]
        return c_skip * x + c_out * out.float()

    return denoise


@torch.no_grad()
def sampling() -> None:
    config = config_of()
    ours, theirs = networks(config)
    text = torch.randn(1, WORDS, config.crossattn_emb_size, device=DEVICE, dtype=DTYPE)
    conditioning = Conditioning(text, torch.tensor([WORDS]), torch.tensor([float(FPS)]))
    plain, expected = TorchDenoiser(ours, device=DEVICE, dtype=DTYPE), denoise_theirs(theirs, config, text)
    sigma = torch.tensor([SIGMA])
    recorded = RecordedDenoiser(plain, DEVICE) if HAS_GPU else None
    sizes = SIZES.items() if HAS_GPU else {"small": (2, 8, 8)}.items()

    def calls(x: Tensor) -> dict[str, Callable[[], Tensor]]:
        return {
            "diffusers": lambda: expected(x, sigma.to(DEVICE)),
            "megadit": lambda: plain(x, sigma, conditioning),
        }

    for name, latents in sizes:
        x = SIGMA * torch.randn(1, config.in_channels, *latents, device=DEVICE)
        theirs_x, ours_x = (call() for call in calls(x).values())
        apart = ((ours_x - theirs_x).norm() / theirs_x.norm()).item()
        tell(f"Cosmos 7B, {name}", f"relative difference {apart:.1e}", failed=not apart < APART, error=apart)
        is_long = latents[0] > 8
        graphs = (
            {} if is_long or not HAS_GPU else {"megadit, CUDA graphs": lambda x=x: recorded(x, sigma, conditioning)}
        )
        told(f"a call, {name}", in_turn(calls(x) | graphs, 3 if is_long else 7, warm=not is_long), "diffusers")


def training() -> None:
    """Forward and backward, without an optimizer."""
    config = config_of(num_layers=TRAINED_LAYERS) if HAS_GPU else config_of()
    ours, theirs = (network.train() for network in networks(config))
    latents = next(iter(SIZES.values())) if HAS_GPU else (2, 8, 8)
    x = torch.randn(1, config.in_channels, *latents, device=DEVICE, dtype=DTYPE)
    text = torch.randn(1, WORDS, config.crossattn_emb_size, device=DEVICE, dtype=DTYPE)
    level, fps = torch.tensor([0.3], device=DEVICE), torch.tensor([float(FPS)], device=DEVICE)
    mask = torch.zeros(1, 1, *latents[1:], dtype=DTYPE, device=DEVICE)
    tokens = patchify(torch.cat([x, torch.zeros_like(x[:, :1])], 1) if config.padding_mask_channel else x, config)
    segment = Segment(config.token_grid(*latents), WORDS)

    def of_ours() -> None:
        layout = PackLayout.pack([segment], capacity=len(tokens), text_capacity=WORDS)
        text_LBE = rearrange(text, "B L E -> L B E")
        ours.forward_packed(tokens, level, text_LBE, fps, layout).float().square().mean().backward()
        ours.zero_grad()

    def of_theirs() -> None:
        out = theirs(x, level.to(DTYPE), text, fps=FPS, padding_mask=mask, return_dict=False)[0]
        out.float().square().mean().backward()
        theirs.zero_grad()

    taken = in_turn({"diffusers": of_theirs, "megadit": of_ours}, 7 if HAS_GPU else 1)
    told(f"forward and backward of {config.num_layers} layers", taken, "diffusers")


if __name__ == "__main__":
    torch.manual_seed(0)
    if find_spec("diffusers") is None:
        tell("beside diffusers", "not measured: diffusers is not installed")
    else:
        attempt("a training step beside diffusers", training)
        attempt("sampling beside diffusers", sampling)
