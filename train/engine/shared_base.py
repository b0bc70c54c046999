"""Several networks with adapters of their own on the same frozen base weights, held once.

The networks share parameters, but no modules. So recomputed blocks and FSDP's hooks need not know which adapter is
active.
"""

import torch
from torch import nn

from megadit.models.lora.adapters import adapter_key


def share_base(network: nn.Module, base: nn.Module, device: torch.device) -> None:
    """Replace the parameters of `network` on the meta device by the frozen ones of `base`, which has the same linears
    and sharding; parameters of adapters get uninitialized memory on `device`.

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
