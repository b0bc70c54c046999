"""Instance of a model in Triton's Python backend, from Triton's arguments."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import triton_python_backend_utils as pb_utils  # exists only inside Triton


@dataclass(frozen=True, slots=True)
class Instance:
    """Device, bundle and parameters of one instance."""

    device: str
    bundle: Path
    parameters: dict[str, str]
    """Parameters of the model's configuration."""

    @classmethod
    def of(cls, args: dict[str, str]) -> "Instance":
        """Read the instance that `initialize` was called for. Raises RuntimeError if this backend and numpy are
        incompatible, which would corrupt arrays without an error."""
        _check_numpy()
        parameters = json.loads(args["model_config"])["parameters"]
        return cls(
            device="cpu" if args["model_instance_kind"] == "CPU" else f"cuda:{args['model_instance_device_id']}",
            bundle=Path(args["model_repository"]) / args["model_version"] / "bundle",
            parameters={name: value["string_value"] for name, value in parameters.items()},
        )


def _check_numpy() -> None:
    sent = torch.tensor([3, 1, 2], dtype=torch.int32)
    if pb_utils.Tensor.from_dlpack("check", sent).as_numpy().tolist() != sent.tolist():
        raise RuntimeError(f"this Triton's Python backend misreads numpy {np.__version__}; use numpy<2")
