"""What must not happen on a GPU: a sampler that compiles without end, an optimizer that does not resume, a network that
cannot be recorded."""

from dataclasses import replace

import torch
from rows import DEVICE, HAS_GPU, attempt, tell

from megadit.infer.runtimes.cuda_graphs import RecordedDenoiser
from megadit.infer.runtimes.torch import TorchDenoiser
from megadit.infer.sampling.samplers import SAMPLERS
from megadit.models.configs.config import DiTConfig
from megadit.models.networks.conditioning import CleanLatents, Conditioning
from megadit.models.networks.dit import DiT
from megadit.models.ops import fusion
from megadit.train.optim.state import OwnedSlice

SMALL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "in_channels": 4, "crossattn_emb_size": 16}
FAMILIES = {
    "megadit": {"conditioning_sigma": 0.02},
    "cosmos": {"adaln_lora_dim": 8},
    "moviegen": {"position_embedding": "learned", "learned_positions": (8, 16, 16)},
}
BATCHES = [(2, 4), (4, 4), (1, 4), (3, 1), (1, 1), (6, 2), (5, 8)]
"""(videos, latent frames)"""


def denoiser(family: str) -> TorchDenoiser:
    dit = DiT(DiTConfig(family=family, **SMALL, **FAMILIES[family]))
    for parameter in dit.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return TorchDenoiser(dit, device=DEVICE, dtype=torch.bfloat16 if HAS_GPU else torch.float32)


def sample(denoise, batch: int, frames: int, *, gives: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, 4, frames, 8, 8, generator=generator).to(DEVICE, torch.float64)
    text = Conditioning(
        torch.randn(batch, 5, 16, generator=generator), torch.full((batch,), 5), torch.full((batch,), 8.0)
    )
    if gives:
        is_given = torch.zeros(frames, 8, 8, dtype=torch.bool)
        is_given[0] = True
        latents = torch.randn(batch, 4, frames, 8, 8, generator=generator)
        text = replace(text, clean=CleanLatents(latents, is_given).to(DEVICE))
    return SAMPLERS["heun"](lambda x, s: denoise(x, s, text), x, torch.tensor([8.0, 1.0, 0.1, 0.0]).double())


def sampling() -> None:
    denoise = denoiser("megadit")
    for batch, frames in BATCHES * 2:
        assert sample(denoise, batch, frames).isfinite().all()
    written = sorted(function.__name__ for function in fusion._AS_WRITTEN)
    tell("sampling at seven sizes", f"uncompiled chains: {written or 'none'}", failed=bool(written))


def recorded(family: str) -> None:
    denoise = denoiser(family)
    replayed = RecordedDenoiser(denoise, DEVICE)
    kinds = [(*size, gives) for size in BATCHES[:3] for gives in ((False, True) if family == "megadit" else (False,))]
    pairs = [[sample(each, *size, gives=gives) for each in (replayed, denoise)] for *size, gives in kinds]
    apart = max((a - b).abs().max().item() for a, b in pairs)
    tell(f"cuda_graphs, {family}", f"largest difference {apart:.1e}", failed=apart > 0.1)


def resumed() -> None:
    parameter = torch.nn.Parameter(torch.zeros(8, 8, device=DEVICE))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    owned = OwnedSlice("x", parameter, 0, 64, parameter.detach(), parameter, optimizer)
    owned.restore_state({"exp_avg": torch.zeros(64), "exp_avg_sq": torch.zeros(64)}, step=3)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tell(
        "fused AdamW after a resume",
        f"step {optimizer.state[parameter]['step'].item():.0f}",
        failed=not parameter.any(),
    )


if __name__ == "__main__":
    attempt("sampling at seven sizes", sampling)
    attempt("fused AdamW after a resume", resumed)
    for family in FAMILIES if HAS_GPU else ():
        attempt(f"cuda_graphs, {family}", lambda family=family: recorded(family))
