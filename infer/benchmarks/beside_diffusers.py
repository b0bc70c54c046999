"""Our network and diffusers' of the same sizes, and what both compute."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megadit.models.configs.config import DiTConfig
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.dit import DiT
from megadit.models.networks.embeddings import patchify
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError

TEXT_LENGTH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One of our networks beside diffusers' of the same sizes, and what both compute."""

    name: str
    config: DiTConfig
    latents: tuple[int, int, int]
    """Latent frames, height, width."""
    theirs: "Callable[[Setting], nn.Module]"
    """Makes diffusers' network."""
    call_theirs: "Callable[[nn.Module, Inputs], Tensor]"
    """Its prediction, BCTHW."""

    @property
    def num_tokens(self) -> int:
        frames, height, width = self.config.token_grid(*self.latents)
        return frames * height * width


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkOptions:
    """Options of all comparisons."""

    rounds: int = setting(9, "timed rounds, after a warm-up round (default: {default})", low=1)
    threads: int | None = setting(None, "threads of torch (default: torch's own choice)", low=1)
    json: str = setting("", "also write the timings to this JSON file", metavar="FILE")

    def set_threads(self) -> None:
        if self.threads is not None:
            torch.set_num_threads(self.threads)


# -------------------------------------------------------------------------------------------------- networks


def networks(setting: Setting, dtype: torch.dtype) -> tuple[DiT, nn.Module]:
    """Ours and theirs, with random weights: what is multiplied by zero may be cheaper.

    Raises:
        UserError: without diffusers.
    """
    return randomised(DiT(setting.config)).to(dtype), randomised(setting.theirs(setting)).to(dtype)


def randomised(network: nn.Module) -> nn.Module:
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.02)
    return network


def diffusers() -> Any:
    """The library. Raises UserError if it is missing."""
    try:
        import diffusers as library
    except ImportError:
        raise UserError("the comparison needs diffusers: pip install 'megadit[diffusers]'") from None
    library.utils.logging.set_verbosity_error()  # about casts, of weights that are random anyway
    return library


@dataclass(frozen=True, slots=True)
class Inputs:
    """One sample: noise, its noise level, and its text or class."""

    x_BCTHW: Tensor
    c_noise_B: Tensor
    conditioning: Conditioning

    @classmethod
    def of(cls, setting: Setting, dtype: torch.dtype) -> "Inputs":
        config = setting.config
        x_BCTHW = torch.randn(1, config.in_channels, *setting.latents, dtype=dtype)
        length = 1 if config.num_classes else TEXT_LENGTH
        text_BLE = torch.zeros if config.num_classes else torch.randn
        text = text_BLE(1, length, config.crossattn_emb_size, dtype=dtype)
        return cls(x_BCTHW, torch.tensor([0.3]), Conditioning(text, torch.tensor([length]), torch.tensor([24.0])))


def _cosmos(setting: Setting) -> nn.Module:
    """diffusers' Cosmos transformer."""
    config = setting.config
    return diffusers().CosmosTransformer3DModel(
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


def _call_cosmos(network: nn.Module, inputs: Inputs) -> Tensor:
    time_B = inputs.c_noise_B.to(inputs.x_BCTHW.dtype)
    return network(inputs.x_BCTHW, time_B, inputs.conditioning.text_BLE, fps=24, return_dict=False)[0]


COSMOS = Setting(
    name="Cosmos",
    config=DiTConfig(num_layers=8, hidden_size=512, num_attention_heads=8, crossattn_emb_size=512),
    latents=(4, 32, 32),
    theirs=_cosmos,
    call_theirs=_call_cosmos,
)


# --------------------------------------------------------------------------------------------------- training


def training_steps(setting: Setting, dtype: torch.dtype) -> tuple[Callable[[], None], Callable[[], None]]:
    """A whole step (forward, backward, torch's fused AdamW) of ours, of one pack, and of theirs."""
    ours, theirs = networks(setting, dtype)
    inputs = Inputs.of(setting, dtype)
    return (
        _step_of(ours, packed_call(setting, ours, inputs)),
        _step_of(theirs, lambda: setting.call_theirs(theirs, inputs)),
    )


def packed_call(setting: Setting, network: DiT, inputs: Inputs) -> Callable[[], Tensor]:
    """Our network on a new pack of the one sample."""
    tokens_S1P = patchify(inputs.x_BCTHW, setting.config)
    text_L1E = inputs.conditioning.text_BLE.transpose(0, 1)
    segment = Segment(setting.config.token_grid(*setting.latents), len(text_L1E))

    def call() -> Tensor:
        layout = PackLayout.pack([segment], capacity=len(tokens_S1P), text_capacity=len(text_L1E))
        return network.forward_packed(tokens_S1P, inputs.c_noise_B, text_L1E, inputs.conditioning.fps_B, layout)

    return call


def backward(out: Tensor) -> None:
    """Gradients of the sum of `out`, of any shape."""
    out.backward(torch.ones_like(out))


def _step_of(network: nn.Module, call: Callable[[], Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        backward(call())
        optimizer.step()
        optimizer.zero_grad()

    return step
