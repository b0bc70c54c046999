"""Check, in a process of its own, of whether a file that somebody sent is an adapter of a network.

    python -m megadit.infer.commands.check_adapter FILE < what.json       {"network": ..., "base": FINGERPRINT, ...}

prints JSON: {"error": null}, or what is wrong in one line. Nothing but safetensors is read; what a file does to this
process is its end alone.
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
from megadit.models.storage.weights import config_from_dict

_PROCESSOR_SECONDS = 60
_LEAST_CLAIM = 19
"""Niceness of the check: whoever else waits for a core comes first."""
_MOST_TENSORS = 20_000
"""Most tensors of a file: some five times as many as an adapter of every linear of the largest network has."""


def problem_of(
    path: Path, network: dict[str, Any], base: str, slots: dict[str, Any] | None = None, max_rank: int | None = None
) -> str | None:
    """Return why this is no adapter of the network of this configuration and these weights; None: it is one.

    An adapter that does not say to which weights it belongs is one of any. `base` has the fingerprints of one network
    or of two. `slots` are the room that the network was
    exported with (`AdapterInputs`), `max_rank` the highest rank that the service takes.
    """
    try:
        opened = open_adapter(path)
        if len(opened.source.stored) > _MOST_TENSORS:
            return f"the file has {len(opened.source.stored):,} tensors; {_MOST_TENSORS:,} is the most"
        if max_rank is not None and (rank := adapter_size(path)[0]) > max_rank:
            return f"the adapter has rank {rank}; this service takes up to {max_rank}"
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
