"""The tensors of a training checkpoint: their names on disk, and a reader that needs neither Megatron nor torchrun.

A checkpoint is a directory `iter_0000100` that holds, next to its description, `tensors/`: a torch distributed
checkpoint written by Megatron. Every tensor is stored whole, in float32, under the canonical name of its parameter,
so that it does not depend on the parallel layout:

    model.<name>                     the weights
    ema.<sigma_rel>.<name>           the EMA weights
    optimizer.<state>.<name>         the optimizer state of each element

<name> is the parameter's name in the training model, where the network's begin with "dit.". Checksums are compared
before anything is read, and no code in a checkpoint is run (see `integrity`).
"""

import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megadit.models.lora.adapters import adapter_key
from megadit.models.megatron.integrity import DESCRIPTION, SUMS, DamagedCheckpointError, SafeReader, check
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json

TENSORS = "tensors"
STATE = "state.json"
CONFIG = "config.yaml"
NETWORK = "dit."
_NAME = re.compile(r"iter_(\d{7,})")


def model_key(name: str) -> str:
    return f"model.{name}"


def ema_key(sigma_rel: float, name: str) -> str:
    return f"ema.{sigma_rel:g}.{name}"


def optimizer_key(state: str, name: str) -> str:
    return f"optimizer.{state}.{name}"


def checkpoint_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def find_checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints in a directory, oldest first."""
    return list(filter(is_complete, named_checkpoints(root)))


def named_checkpoints(root: Path) -> list[Path]:
    """The directories with the name of a checkpoint, complete or not, oldest first."""
    named = [path for path in root.glob("iter_*") if _NAME.fullmatch(path.name)] if root.is_dir() else []
    return sorted(named, key=lambda path: int(path.name.removeprefix("iter_")))


def read_state(path: Path) -> dict[str, Any]:
    """Read the state of a checkpoint (`state.json`): `run` with its `iteration`, `ema_sigma_rels`, settings.

    Raises:
        UserError: if it cannot be read, or is something else.
    """
    state = read_json(path / STATE, is_finite=False)  # losses may be infinite
    run = state.get("run") if isinstance(state, dict) else None
    if not (isinstance(run, dict) and isinstance(run.get("iteration"), int) and _are_numbers(state, "ema_sigma_rels")):
        raise UserError(f"{path / STATE} is not the state of a run")
    return state


def _are_numbers(values: dict[str, Any], name: str) -> bool:
    found = values.get(name)
    return isinstance(found, list) and all(isinstance(value, int | float) for value in found)


def is_complete(path: Path) -> bool:
    """Whether `path` is a complete checkpoint; one being written has another name."""
    try:
        read_state(path)
    except UserError:
        return False
    return all((path / part).is_file() for part in (CONFIG, SUMS, f"{TENSORS}/{DESCRIPTION}"))


def check_checkpoint(path: Path, found: dict[str, str] | None = None) -> None:
    """Compares a checkpoint with its checksums, and its name with the step in its state.

    `found` are the checksums of its files, where they are known already.

    Raises:
        DamagedCheckpointError: naming the damaged file.
    """
    check(path, found)
    step = read_state(path)["run"]["iteration"]
    if _NAME.fullmatch(path.resolve().name) and path.resolve().name != checkpoint_name(step):
        raise DamagedCheckpointError(f"{path} holds step {step}, which its name contradicts")


def ema_profiles(path: Path) -> tuple[float, ...]:
    """The sigma_rel of each set of EMA weights in a checkpoint."""
    return tuple(read_state(path)["ema_sigma_rels"])


def base_of(path: Path) -> str | None:
    """The fingerprint of the base weights of a checkpoint's adapter; None for a whole network."""
    return read_json(path / STATE).get("base")


def read_network(path: Path, *, ema: float | None = None) -> dict[str, Tensor]:
    """The network's canonical state dict, float32 on the CPU, from any checkpoint.

    Args:
        path: the checkpoint (`.../iter_0000100`), written by any layout.
        ema: sigma_rel of the EMA weights to read; None reads the weights themselves.

    Raises:
        UserError: if it is no complete checkpoint, is damaged, has no such EMA weights, or holds an adapter.
    """
    tensors = _read_trained(path, ema)
    if base_of(path) is not None:
        raise UserError(f"{path} has only an adapter, without its base network")
    return tensors


def read_adapter(path: Path, *, ema: float | None = None) -> dict[str, Tensor]:
    """The adapter state (`lora/adapters.py`), float32 on the CPU, of a checkpoint; arguments as of `read_network`.

    Raises:
        UserError: as `read_network`, for a checkpoint of a whole network.
    """
    tensors = _read_trained(path, ema)
    if base_of(path) is None:
        raise UserError(f"{path} has a whole network, no adapter; train one with train.adapter.rank=8")
    return {adapter_key(name): tensor for name, tensor in tensors.items()}


def _read_trained(path: Path, ema: float | None) -> dict[str, Tensor]:
    """Read the trained tensors of the network: all of them, or only an adapter's."""
    if not is_complete(path):
        raise UserError(f"{path} is not a complete checkpoint; give a directory such as checkpoints/iter_0000100")
    check_checkpoint(path)
    if ema is not None and ema not in ema_profiles(path):
        known = ", ".join(f"{sigma_rel:g}" for sigma_rel in ema_profiles(path)) or "none"
        raise UserError(f"{path} has no EMA weights with sigma_rel {ema:g}; it has {known}")
    prefix = model_key(NETWORK) if ema is None else ema_key(ema, NETWORK)
    tensors = _read(path / TENSORS, prefix)
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}


def _read(directory: Path, prefix: str) -> dict[str, Tensor]:
    """All tensors whose key begins with `prefix`, whole."""
    reader = SafeReader(directory)
    stored = reader.read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(tensors, storage_reader=reader, no_dist=True)
        except (CheckpointException, pickle.UnpicklingError) as error:
            raise DamagedCheckpointError(
                f"{directory} is damaged or hostile: {type(error).__name__} in its tensors"
            ) from error
    return tensors
