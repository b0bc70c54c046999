"""What Triton tells an instance of a model of its Python backend."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import triton_python_backend_utils as pb_utils  # exists only inside Triton


@dataclass(frozen=True, slots=True)
class Instance:
    """Where one instance computes, and what."""

    device: str
    bundle: Path
    parameters: dict[str, str]
    """Of the model's configuration."""

    @classmethod
    def of(cls, args: dict[str, str]) -> "Instance":
        """That which `initialize` was called for.

        Raises:
            RuntimeError: if this backend and numpy misread each other's arrays, which they would do without an error.
        """
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
