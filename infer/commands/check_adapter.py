"""Checks in a separate process whether an uploaded file is an adapter of a network.

    python -m megadit.infer.commands.check_adapter FILE < what.json       {"network": ..., "base": FINGERPRINT, ...}

It prints JSON: {"error": null}, or a message of one line. Only safetensors is read; a crash ends only this process.
"""

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from megadit.infer.sampling.schedules import explicit_sigmas
from megadit.models.convert.adapters.files import adapter_size, open_adapter, read_adapter
from megadit.models.diffusion.settings import check_asked
from megadit.models.lora.inputs import AdapterInputs
from megadit.models.shared.errors import UserError
from megadit.models.storage.components import config_from_dict

_PROCESSOR_SECONDS = 60
_LEAST_CLAIM = 19
"""Niceness of the check, so that other work comes first."""
_MOST_TENSORS = 20_000
"""Most tensors of a file, about five times those of an adapter for every linear of the largest network."""


def problem_of(
    path: Path, network: dict[str, Any], base: str, slots: dict[str, Any] | None = None, max_rank: int | None = None
) -> str | None:
    """Return why this is not an adapter of the network with this configuration and weights; None if it is one.

    An adapter without a fingerprint of its base fits any weights. `base` has the fingerprints of the network, or of two
    experts. `slots` are the network's adapter inputs, if it was exported (`AdapterInputs`); `max_rank` is the highest
    rank that the service supports.
    """
    try:
        opened = open_adapter(path)
        if len(opened.source.stored) > _MOST_TENSORS:
            return f"the file has {len(opened.source.stored):,} tensors; {_MOST_TENSORS:,} is the most"
        if max_rank is not None and (rank := adapter_size(path)[0]) > max_rank:
            return f"the adapter has rank {rank}; this service supports up to {max_rank}"
        if opened.base is not None and opened.base not in base.split():
            return f"the adapter was trained with other weights ({opened.base}) than this service's ({base})"
        if sigmas := check_asked(opened.defaults, "the file asks for settings: ").get("sigmas"):
            explicit_sigmas(sigmas)
        adapter = read_adapter(path, config_from_dict(network))
        if slots is not None:
            AdapterInputs.from_dict(slots, adapter.config).check(adapter.to_state()[0])
    except UserError as error:
        return " ".join(str(error).replace(str(path), "the file").split())
    return None


def main() -> None:
    os.nice(_LEAST_CLAIM)
    resource.setrlimit(resource.RLIMIT_CPU, (_PROCESSOR_SECONDS, _PROCESSOR_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps({"error": problem_of(Path(sys.argv[1]), **json.load(sys.stdin))}))


if __name__ == "__main__":
    main()
