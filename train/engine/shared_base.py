"""Several networks for the memory of one: adapters of their own beside the same frozen weights.

Each is a network by itself, with modules of its own, so that none is told which adapter is meant: not where blocks are
computed again in a backward, nor by hooks of FSDP. What they share are the parameters.
"""

import torch
from torch import nn

from megadit.models.lora.adapters import adapter_key


def share_base(network: nn.Module, base: nn.Module, device: torch.device) -> None:
    """Gives a network the frozen parameters of `base`, whose linears are of the same kind and the same shares, in place
    of its own on the meta device; those of its adapters get memory on `device`, and wait for their values.

    What is not on the meta device stays as it is: it is no part of the weights that both have.
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
    vars(made).update(vars(parameter))  # the marks of how ranks share it
    return made
