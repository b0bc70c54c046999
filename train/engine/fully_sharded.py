"""Fully sharded data parallelism: torch's FSDP2 behind the interface of Megatron's data-parallel wrappers; several
networks with adapters of their own on the same frozen base weights, held once."""

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megadit.models.lora.adapters import adapter_key
from megadit.models.megatron.groups import Groups
from megadit.models.networks.blocks import BLOCKS
from megadit.models.networks.experts import Experts
from megadit.train.objectives.networks import TrainingModel
from megadit.train.optim.state import assign


class FullySharded(_BaseDataParallel):
    """A network whose float32 parameters, gradients and optimizer state are sharded over its data-parallel ranks
    (experts over their own group).

    The weights of a block are gathered in `precision` when it runs; gradients are summed in float32. Parameters on the
    meta device get uninitialized memory for this rank's shard.
    """

    def __init__(
        self,
        config: TransformerConfig,
        network: TrainingModel,
        groups: Groups,
        precision: torch.dtype,
        base: nn.Module | None = None,
    ) -> None:
        """`base`: another network on these ranks, whose shards of all weights except adapters this one shares."""
        super().__init__(config, network)
        self.ddp_config = DistributedDataParallelConfig()
        marks = {name: dict(vars(parameter)) for name, parameter in network.named_parameters()}
        values = {name: value.detach().clone() for name, value in network.named_parameters() if not value.is_meta}
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        mesh, expert_mesh = (DeviceMesh.from_group(group, device.type) for group in (groups.data, groups.expert_data))
        # inputs are cast where they are needed: noise levels and noise stay float32
        policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32, cast_forward_inputs=False)
        # inner modules first
        for kind, of_kind in ((Experts, expert_mesh), (tuple(BLOCKS.values()), mesh)):
            for module in network.modules():
                if isinstance(module, kind):
                    fully_shard(module, mesh=of_kind, mp_policy=policy)
        # resharded like the blocks: after a forward without backward no whole parameter may remain
        fully_shard(network, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        for module in network.modules():
            if isinstance(module, FSDPModule):
                # a plain sum, divided once by the number of tokens (and gloo cannot multiply first)
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
        if base is None:
            network.to_empty(device=device)
        else:
            share_base(network, base, device)
            # FSDP registers its parameters anew, and pads them before an optimizer holds their storage
            network._apply(lambda tensor: tensor)
        for name, parameter in network.named_parameters():  # FSDP replaces parameters by other tensors
            vars(parameter).update(marks[name])
            if name in values:
                assign(parameter, values[name])

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Do nothing: the backward has reduced the gradients."""

    def scale_gradients(self, scaling_factor: Tensor) -> None:
        """Multiplies all gradients by `scaling_factor`, one number."""
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.to_local().mul_(scaling_factor)


def share_base(network: nn.Module, base: nn.Module, device: torch.device) -> None:
    """Replace the parameters of `network` on the meta device by the frozen ones of `base`, which has the same linears
    and sharding; parameters of adapters get uninitialized memory on `device`.

    The networks share no modules: recomputed blocks and FSDP's hooks need not know which adapter is active.

    Parameters that are not on the meta device are left unchanged.
    """
    shared = dict(base.named_parameters())
    for path, module in list(network.named_modules()):
        for name, parameter in list(module.named_parameters(path, recurse=False)):
            if parameter.is_meta:
                is_own = adapter_key(name) is not None
                taken = _with_memory(parameter, device) if is_own else shared[name]
                setattr(module, name.rpartition(".")[2], taken)


def _with_memory(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    made = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))  # attributes that describe its sharding
    return made
