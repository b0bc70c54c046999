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
from megadit.models.shared.cli.options import read_options
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


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkOptions:
    """Of the comparisons that take turns."""

    rounds: int = setting(9, "pairs timed, after one that is not counted (default: {default})")
    threads: int | None = setting(None, "threads of torch (default: torch's own choice)")
    json: str = setting("", "also write the figures here", metavar="FILE")


def begin(argv: list[str], script: str, description: str) -> BenchmarkOptions:
    """The options of a script of this folder; torch computes with as many threads as they say."""
    options = read_options(BenchmarkOptions, argv, prog=f"python tests/benchmarks/{script}", description=description)
    if options.threads:
        torch.set_num_threads(options.threads)
    return options


# -------------------------------------------------------------------------------------------------- networks


def networks(setting: Setting, dtype: torch.dtype) -> tuple[DiT, nn.Module]:
    """Ours and theirs, with random weights: what is multiplied by zero may be cheaper.

    Raises:
        UserError: without diffusers.
    """
    theirs = cosmos_like(setting) if setting is COSMOS else dit_like(setting)
    return randomised(DiT(setting.config)).to(dtype), randomised(theirs).to(dtype)


def randomised(network: nn.Module) -> nn.Module:
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.02)
    return network


def _diffusers() -> Any:
    try:
        import diffusers
    except ImportError:
        raise UserError("the comparison needs diffusers: pip install diffusers") from None
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
    if setting is COSMOS:
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
