"""How the processes of a run find each other: as the environment of torchrun says."""

import os
from typing import Any

import torch.distributed as dist

from megadit.models.shared.errors import UserError


def join_ranks(backend: str, **settings: Any) -> None:
    """Joins the other ranks.

    Raises:
        UserError: where they cannot meet: the port is another program's, or nobody answers.
    """
    try:
        dist.init_process_group(backend, **settings)
    except dist.DistNetworkError as error:
        place = f"MASTER_ADDR={os.environ.get('MASTER_ADDR')} MASTER_PORT={os.environ.get('MASTER_PORT')}"
        if "EADDRINUSE" in str(error):
            raise UserError(
                f"{place}: the port is in use on this machine, perhaps by another run; set another MASTER_PORT for all "
                "ranks, or start them with --nproc or torchrun, which find one"
            ) from error
        raise UserError(f"the ranks cannot meet at {place}: {str(error).splitlines()[0]}") from error
