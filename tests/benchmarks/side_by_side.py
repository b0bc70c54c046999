"""Two ways to the same thing timed in turn, and diffusers' DiT of the sizes of ours to be one of them."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from megadit.infer.benchmarks.beside_diffusers import COSMOS, Inputs, Setting, diffusers
from megadit.models.configs.config import DiTConfig
from megadit.models.machine import describe, describe_in_words
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import write_json

DTYPES = (torch.float32, torch.bfloat16)


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


def _dit(setting: Setting) -> nn.Module:
    """diffusers' class-conditional DiT."""
    config = setting.config
    return diffusers().DiTTransformer2DModel(
        num_attention_heads=config.num_attention_heads,
        attention_head_dim=config.dim_per_head,
        in_channels=config.in_channels,
        out_channels=config.in_channels,
        num_layers=config.num_layers,
        sample_size=setting.latents[1],
        patch_size=config.patch_spatial,
        num_embeds_ada_norm=config.num_classes,
    )


def _call_dit(network: nn.Module, inputs: Inputs) -> Tensor:
    out = network(inputs.x_BCTHW[:, :, 0], inputs.c_noise_B, torch.tensor([0]), return_dict=False)[0]
    return out[:, :, None]


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
    theirs=_dit,
    call_theirs=_call_dit,
)
SETTINGS = (COSMOS, DIT)


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
