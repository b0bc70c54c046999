"""One small network of each structure, all of whose tensors are random: outputs, gradients, traced graphs."""

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.node import Node, map_arg

from golden_parts.digests import digest, digest_tensor, digest_tensors
from golden_parts.names import make_conditioning, make_config, make_dit, make_pack

COMMON = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "in_channels": 4, "crossattn_emb_size": 2}
LOW_RANK = {"adaln_lora_dim": 6, "learned_positions": (4, 5, 4)}
MOVIEGEN = {
    "family": "moviegen",
    "num_query_groups": 2,
    "position_embedding": "learned",
    "learned_positions": (4, 5, 4),
    "qk_layernorm": False,
}
NEMO = {"hidden_size": 260, "family": "nemo", "position_embedding": "sincos", "layernorm_epsilon": 1e-5}
NETWORKS: dict[str, dict[str, Any]] = {
    "megadit": {},
    "megadit_low_rank": LOW_RANK,
    "megadit_wide_heads": {"head_dim": 24, "num_query_groups": 2, "rope_scale": (2.0, 1.0, 1.5)},
    "megadit_sincos": {"position_embedding": "sincos"},
    "cosmos": {**LOW_RANK, "family": "cosmos", "rope_scale": (2.0, 1.0, 1.5), "padding_mask_channel": True},
    "nemo": NEMO,
    "dfm": NEMO | {"family": "dfm", "adaln_lora_dim": 6},
    "dit_of_classes": {
        "family": "dit",
        "position_embedding": "sincos",
        "qk_layernorm": False,
        "num_classes": 600,
        "parameterization": "vp",
    },
    "moviegen": MOVIEGEN,
    "moviegen_of_nemo": MOVIEGEN | {"compat": "nemo", "hidden_size": 260},
    "st_dit": {**LOW_RANK, "family": "st_dit"},
    "token_choice": {"experts": {"num_experts": 4, "top_k": 2, "shared_ffn_hidden_size": 16}},
    "expert_choice": {"experts": {"num_experts": 4, "routing": "expert_choice"}},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

SHAPES = ((3, 4, 4), (1, 4, 6), (3, 4, 4), (2, 8, 4))
TEXT_LENGTHS = (3, 0, 1, 2)
FPS = (12.0, 0.0, 30.0, 24.0)


def record(work: Path, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
    torch.set_num_threads(1)
    for name in filter(is_wanted, NETWORKS):
        config = make_config(**COMMON | NETWORKS[name])
        for dtype_name, dtype in DTYPES.items():
            dit = random_network(config).to(dtype)
            for variant, run in (("dense", run_dense), ("packed", run_packed)):
                yield from described(f"{name}/{dtype_name}/{variant}", dit, *run(dit))
        yield f"{name}/graph", digest(traced(random_network(config)).encode())


def random_network(config: Any) -> nn.Module:
    """Every parameter is drawn by its name: nothing wrong hides behind zeros or in another order of parameters."""
    dit = make_dit(config)
    with torch.no_grad():
        for name, parameter in dit.named_parameters():
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw) + ("layernorm" in name))
    return dit


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def text_features(*shape: int) -> Tensor:
    """Small integers, which are classes to networks that read such."""
    return torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(2)).float()


def run_dense(dit: nn.Module) -> tuple[Tensor, Tensor]:
    """(output, input) of a uniform batch with and without text."""
    x_BCTHW = normal(3, dit.config.in_channels, 3, 4, 6).to(dit.dtype).requires_grad_()
    conditioning = make_conditioning(
        text_features(3, 3, 2).to(dit.dtype), torch.tensor([3, 0, 1]), torch.tensor([12.0, 0.0, 30.0])
    )
    options = {}
    if dit.config.padding_mask_channel:
        options["padding_mask_B1THW"] = (normal(3, 1, 3, 4, 6, seed=3) > 0.5).to(dit.dtype)
    return dit(x_BCTHW, normal(3, seed=4), conditioning, **options), x_BCTHW


def run_packed(dit: nn.Module) -> tuple[Tensor, Tensor]:
    """(output, input) of a pack with padding, and a sample without text."""
    segments = [(dit.config.token_grid(*shape), n) for shape, n in zip(SHAPES, TEXT_LENGTHS, strict=True)]
    layout = make_pack(segments, capacity=60, text_capacity=10)
    tokens_S1P = normal(60, 1, dit.config.patch_dim).to(dit.dtype).requires_grad_()
    text_L1E = text_features(10, 1, 2).to(dit.dtype)
    return dit.forward_packed(tokens_S1P, normal(5, seed=4), text_L1E, torch.tensor([*FPS, 0.0]), layout), tokens_S1P


def described(name: str, dit: nn.Module, out: Tensor, x: Tensor) -> Iterator[tuple[str, str]]:
    """Digests of the output, and of the gradients of a loss that weighs its numbers unequally."""
    dit.zero_grad()
    (out.float() * normal(*out.shape, seed=5)).sum().backward()
    yield f"{name}/output", digest_tensor(out)
    yield f"{name}/gradient_of_input", digest_tensor(x.grad)
    gradients = {parameter: value.grad for parameter, value in dit.named_parameters() if value.grad is not None}
    yield from digest_tensors(gradients, f"{name}/gradients/")


class Plain(nn.Module):
    """A network that takes tensors alone."""

    def __init__(self, dit: nn.Module) -> None:
        super().__init__()
        self.dit = dit

    def forward(self, x_BCTHW: Tensor, c_noise_B: Tensor, text_BLE: Tensor, length_B: Tensor, fps_B: Tensor) -> Tensor:
        return self.dit(x_BCTHW, c_noise_B, make_conditioning(text_BLE, length_B, fps_B))


def traced(dit: nn.Module) -> str:
    """The operations that torch's exporter sees, in order, and what each reads; without those that nobody reads."""
    inputs = (normal(2, 4, 2, 4, 4), normal(2), text_features(2, 3, 2), torch.tensor([3, 0]), torch.tensor([8.0, 0.0]))
    with torch.no_grad():
        graph = torch.export.export(Plain(dit), inputs, strict=False).graph_module.graph
    graph.eliminate_dead_code()
    numbers: dict[Node, str] = {}
    for node in graph.nodes:
        numbers[node] = node.name if node.op == "placeholder" else f"%{len(numbers)}"
    return "\n".join(f"{numbers[node]} = {node.target}{_arguments(node, numbers)}" for node in graph.nodes)


def _arguments(node: Node, numbers: dict[Node, str]) -> str:
    return str(map_arg((node.args, dict(node.kwargs)), lambda read: numbers[read]))
