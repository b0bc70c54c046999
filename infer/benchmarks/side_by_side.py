"""Two ways to the same thing timed in turn, and diffusers' transformers of the sizes of ours to be one of them."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from megadit.models.configs.config import DiTConfig
from megadit.models.machine import describe, describe_in_words
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.dit import DiT
from megadit.models.networks.embeddings import patchify
from megadit.models.packing.layout import PackLayout
from megadit.models.packing.segments import Segment
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import write_json

DTYPES = (torch.float32, torch.bfloat16)
TEXT_LENGTH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One of our networks beside diffusers' of the same sizes, and what both compute."""

    name: str
    config: DiTConfig
    latents: tuple[int, int, int]
    """Latent frames, height, width."""

    @property
    def num_tokens(self) -> int:
        frames, height, width = self.config.token_grid(*self.latents)
        return frames * height * width


COSMOS = Setting(
    name="Cosmos",
    config=DiTConfig(num_layers=8, hidden_size=512, num_attention_heads=8, crossattn_emb_size=512),
    latents=(4, 32, 32),
)
DIT = Setting(
    name="DiT",
    config=DiTConfig(
        family="dit",
        num_layers=8,
        hidden_size=512,
        num_attention_heads=8,
        crossattn_emb_size=2,
        position_embedding="sincos",
        qk_layernorm=False,
        parameterization="vp",
        num_classes=1000,
    ),
    latents=(1, 64, 64),
)
SETTINGS = (COSMOS, DIT)


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkOptions:
    """Options of all comparisons."""

    rounds: int = setting(9, "rounds, after one that is not counted (default: {default})", low=1)
    threads: int | None = setting(None, "threads of torch (default: torch's own choice)", low=1)
    json: str = setting("", "also write the figures here", metavar="FILE")

    def set_threads(self) -> None:
        if self.threads is not None:
            torch.set_num_threads(self.threads)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two functions timed in turn, A B A B: seconds, and the ratios A / B pair by pair."""

    name: str
    ours: list[float]
    theirs: list[float]
    limit: float
    """The ratio that ought not to be exceeded."""

    @property
    def ratios(self) -> list[float]:
        return sorted(a / b for a, b in zip(self.ours, self.theirs, strict=True))

    @property
    def ratio(self) -> float:
        """The median."""
        return statistics.median(self.ratios)


def compare(
    name: str,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    rounds: int,
    *,
    limit: float = 1.0,
    clock: Callable[[], float] = time.process_time,
) -> Comparison:
    """Times both `rounds` times in turn, so that a drifting machine slows both. Others' work does not count, unless
    another `clock` is asked than the processors'.

    Raises:
        UserError: for fewer rounds than one.
    """
    if rounds < 1:
        raise UserError(f"--rounds {rounds} must be at least 1")

    def seconds(function: Callable[[], object]) -> float:
        start = clock()
        function()
        return clock() - start

    seconds(ours), seconds(theirs)
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    return Comparison(name, *(list(side) for side in zip(*pairs, strict=True)), limit=limit)


def show(title: str, comparisons: list[Comparison], json: str = "") -> None:
    """A table of medians and ratios, and the machine they were measured on; as JSON, too, where a file is named."""
    table = Table("what", "ours (s)", "theirs (s)", "ratio, median", "lowest", "highest", "at most", "", title=title)
    for one in comparisons:
        ours, theirs = statistics.median(one.ours), statistics.median(one.theirs)
        ratios = [f"{value:.3f}" for value in (one.ratio, one.ratios[0], one.ratios[-1], one.limit)]
        table.add_row(one.name, f"{ours:.4f}", f"{theirs:.4f}", *ratios, "" if one.ratio <= one.limit else "too slow")
    about = describe(torch.device("cpu"))
    console = Console()
    console.print(table)
    console.print(describe_in_words(about), soft_wrap=True)
    if json:
        write_json(json, {"machine": about, "comparisons": [asdict(one) | {"ratio": one.ratio} for one in comparisons]})
        print(json)


# -------------------------------------------------------------------------------------------------- networks


def networks(setting: Setting, dtype: torch.dtype) -> tuple[DiT, nn.Module]:
    """Ours and theirs, with random weights: what is multiplied by zero may be cheaper.

    Raises:
        UserError: without diffusers.
    """
    theirs = dit_like(setting) if setting.config.num_classes else cosmos_like(setting)
    return randomised(DiT(setting.config)).to(dtype), randomised(theirs).to(dtype)


def randomised(network: nn.Module) -> nn.Module:
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.02)
    return network


def _diffusers() -> Any:
    try:
        import diffusers
    except ImportError:
        raise UserError("the comparison needs diffusers: pip install 'megadit[diffusers]'") from None
    diffusers.utils.logging.set_verbosity_error()  # about casts, of weights that are random anyway
    return diffusers


def cosmos_like(setting: Setting) -> nn.Module:
    """diffusers' Cosmos transformer."""
    config = setting.config
    return _diffusers().CosmosTransformer3DModel(
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


def dit_like(setting: Setting) -> nn.Module:
    """diffusers' class-conditional DiT."""
    config = setting.config
    return _diffusers().DiTTransformer2DModel(
        num_attention_heads=config.num_attention_heads,
        attention_head_dim=config.dim_per_head,
        in_channels=config.in_channels,
        out_channels=config.in_channels,
        num_layers=config.num_layers,
        sample_size=setting.latents[1],
        patch_size=config.patch_spatial,
        num_embeds_ada_norm=config.num_classes,
    )


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


def call_theirs(setting: Setting, network: nn.Module, inputs: Inputs) -> Tensor:
    """Their prediction, BCTHW."""
    dtype = inputs.x_BCTHW.dtype
    if not setting.config.num_classes:
        time_B = inputs.c_noise_B.to(dtype)
        return network(inputs.x_BCTHW, time_B, inputs.conditioning.text_BLE, fps=24, return_dict=False)[0]
    out = network(inputs.x_BCTHW[:, :, 0], inputs.c_noise_B, torch.tensor([0]), return_dict=False)[0]
    return out[:, :, None]


class BlockCall(NamedTuple):
    """A block, and the tokens that its network gives it."""

    run: Callable[[Tensor], Tensor]
    tokens: Tensor


def block_call(block: nn.Module, call: Callable[[], object]) -> BlockCall:
    """The block with all else that it is given when `call` runs its network."""
    seen: list[tuple[tuple, dict]] = []
    hook = block.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        call()
    hook.remove()
    args, kwargs = seen[0]
    if args:
        return BlockCall(lambda tokens: block(tokens, *args[1:], **kwargs), args[0])
    rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
    return BlockCall(lambda tokens: block(hidden_states=tokens, **rest), kwargs["hidden_states"])


# --------------------------------------------------------------------------------------------------- training


def training_steps(setting: Setting, dtype: torch.dtype) -> tuple[Callable[[], None], Callable[[], None]]:
    """A whole step (forward, backward, torch's fused AdamW) of ours, of one pack, and of theirs."""
    ours, theirs = networks(setting, dtype)
    inputs = Inputs.of(setting, dtype)
    return (
        _step_of(ours, packed_call(setting, ours, inputs)),
        _step_of(theirs, lambda: call_theirs(setting, theirs, inputs)),
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
