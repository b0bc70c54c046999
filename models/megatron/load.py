"""Loads a saved DiT, and adapters, into a network that is split over tensor-parallel ranks."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from megadit.models.configs.adapter import AdapterConfig
from megadit.models.lora.adapters import DEFAULT, load_adapter
from megadit.models.megatron.groups import Groups, initialize
from megadit.models.megatron.parallel_sizes import ParallelSizes
from megadit.models.megatron.parallelize import parallelize, share_adapters
from megadit.models.megatron.plan import PLAN, role_of
from megadit.models.megatron.shards import full_shape, own_shard, shard
from megadit.models.megatron.transformer_config import transformer_config
from megadit.models.networks.dit import DiT
from megadit.models.storage import components as parts
from megadit.models.storage.components import check_shapes, load_config


def load_split_dit(
    directory: str | os.PathLike, layout: ParallelSizes, *, device: torch.device | str, dtype: torch.dtype
) -> tuple[DiT, Groups]:
    """This rank's shard of the network saved in `directory`, in evaluation mode, and the process groups.

    Starts Megatron's process groups. One tensor is read at a time.

    Raises:
        UserError: if the layout does not fit the network or the number of ranks, or the tensors do not fit config.json.
    """
    config = load_config(directory)
    groups = initialize(layout, config)
    with torch.device("meta"):
        model = DiT(config)
    parallelize(model, transformer_config(config, layout, dtype=dtype), groups, device=torch.device("cpu"))
    path = Path(directory) / parts.TENSOR_FILE
    with safe_open(path, framework="pt") as file, torch.no_grad():
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        expected = {name: tuple(full_shape(parameter, groups.axes)) for name, parameter in model.named_parameters()}
        check_shapes(found, expected, f"the tensors of {path}")
        for name, parameter in model.named_parameters():
            parameter.copy_(shard(parameter, file.get_tensor(name), groups.axes))
    return model.to(device, dtype).eval(), groups


@torch.no_grad()
def load_split_adapter(
    dit: DiT, state: Mapping[str, Tensor], adapter: AdapterConfig, name: str = DEFAULT, *, groups: Groups
) -> None:
    """`adapters.load_adapter` for a network of `load_split_dit`: a rank keeps its shard of each whole tensor.

    Raises:
        UserError: for tensors that do not fit the network (by name and shape), or are not finite; then nothing changes.
    """
    load_adapter(dit, state, adapter, name)
    for path, module in dit.named_modules():
        if f".adapters.{name}." in path:
            for part, whole in list(module.named_parameters(recurse=False)):
                own = own_shard(whole, role_of(f"{path}.{part}"), groups.axes)
                setattr(module, part, nn.Parameter(own.clone()))
    share_adapters(dit, PLAN, groups.tensor, sequence_parallel=False)
