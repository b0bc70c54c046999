"""A model's folder in a repository: that of a bundle, and those of its exported networks for custom pipelines.

Networks are served by Triton's own backends, without Python: tensors in, tensors out, as in the folder's settings.json.
Triton's ONNX backend does not set our session options, so that not every precision runs everywhere.
"""

import os
import shutil
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from megadit.infer.runtimes.load import open_exported
from megadit.infer.runtimes.network_spec import TOWERS, Axis, NetworkSpec
from megadit.models.bundle import Bundle
from megadit.models.configs.config import DiTConfig
from megadit.models.shared.errors import UserError
from megadit.models.shared.outside import check_own

_PLATFORMS = {"onnx": ("onnxruntime_onnx", ".onnx"), "tensorrt": ("tensorrt_plan", ".plan")}
_DATA_TYPES = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16", "int32": "INT32", "int64": "INT64"}

_MODEL_PY = '''"""Triton loads this file; the model itself is in the installed megadit."""

from megadit.serve.backend.{module} import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''
_WHERE = {
    "bf16": "GPUs: no CPU opens it",
    "fp8": "GPUs: this backend moves its quantization on CPUs",
    "int8": "GPUs and CPUs with VNNI: on others this backend saturates 8-bit sums, an error of some percent of a layer",
}
"""Precision of a denoiser -> where Triton's own ONNX backend gives the verified results; others run anywhere."""


def _latents(config: DiTConfig) -> tuple[int, ...]:
    return -1, config.in_channels, -1, -1, -1


_OUTPUT_DIMS: dict[str, Callable[[DiTConfig], tuple[int, ...]]] = {
    "text_encoder": lambda config: (-1, -1, -1),
    "video_decoder": lambda config: (-1, 3, -1, -1, -1),
    "classifier": lambda config: (-1, config.num_classes or config.hidden_size),
    **dict.fromkeys(TOWERS, lambda config: (-1, config.text_tower.embedding_size)),
}
"""Network -> the shape of its output, -1 for dynamic axes; other networks return latents."""


def write_networks(bundle: Bundle, runtime: str, repository: Path) -> list[str]:
    """Adds a model for each exported network to `repository`; returns their names. Raises UserError if the bundle was
    not exported for `runtime`."""
    if runtime not in _PLATFORMS:
        raise UserError(f"runtime {runtime!r} has no networks that Triton serves by itself; use onnx or tensorrt")
    exported = open_exported(bundle, runtime)
    precision, opset = (exported.settings.get(name) for name in ("precision", "opset"))
    if runtime == "onnx" and precision in _WHERE:
        note = f"the denoiser in {precision} (ONNX opset {opset}) by itself is for {_WHERE[precision]}"
        print(f"NOTE: {note}; for other machines, export with --precision fp16 or fp32", file=sys.stderr)
    for name in exported.settings["networks"]:
        version = repository / name / "1"
        version.mkdir(parents=True)
        config = network_config(exported.network(name), runtime, bundle.config, precision)
        (version.parent / "config.pbtxt").write_text(config, encoding="utf-8")
        suffix = _PLATFORMS[runtime][1]
        for file in exported.directory.glob(f"{name}{suffix}*"):  # large weights are next to an ONNX file
            shutil.copy2(file, version / file.name)
    return list(exported.settings["networks"])


def network_config(spec: NetworkSpec, runtime: str, config: DiTConfig, precision: str | None = None) -> str:
    """config.pbtxt of one network; its batch is a dynamic axis like the others. `precision` is that of denoisers."""
    platform, suffix = _PLATFORMS[runtime]
    inputs = ",\n".join(
        f'  {{ name: "{tensor.name}" data_type: TYPE_{_DATA_TYPES[tensor.dtype]} dims: [ {_dims(tensor.axes)} ] }}'
        for tensor in spec.inputs
    )
    is_for_gpus = runtime == "onnx" and spec.is_denoiser and precision in ("bf16", "fp8")
    instances = "instance_group [ { kind: KIND_GPU } ]\n" if is_for_gpus else ""
    output_dims = ", ".join(map(str, _OUTPUT_DIMS.get(spec.name, _latents)(config)))
    return f"""\
# Written by `megadit serve build-repository --networks`.
name: "{spec.name}"
platform: "{platform}"
default_model_filename: "{spec.name}{suffix}"
max_batch_size: 0
{instances}input [
{inputs}
]
output [
  {{ name: "{spec.output}" data_type: TYPE_FP32 dims: [ {output_dims} ] }}
]
"""


def _dims(axes: tuple[Axis | int, ...]) -> str:
    return ", ".join("-1" if isinstance(axis, Axis) else str(axis) for axis in axes)


def check_replaceable(path: Path, models: Collection[str]) -> None:
    """Raises UserError for a folder that is not a repository with one of our `models`."""
    if path.is_dir() and any(path.iterdir()) and not any((path / name / "config.pbtxt").is_file() for name in models):
        raise UserError(f"{path} holds no {' or '.join(models)} but other files, and would be replaced; choose another")


def write_model(repository: Path, name: str, *, config: str, module: str, bundle: Path) -> Path:
    """Writes the model `name`, implemented by `megadit.serve.backend.{module}`, and returns its copy of the bundle.

    If `bundle` is in the repository already, its files are shared, so that large weights are stored once.
    """
    check_own(bundle)
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(config, encoding="utf-8")
    (version / "model.py").write_text(_MODEL_PY.format(module=module), encoding="utf-8")
    copy = os.link if bundle.is_relative_to(repository) else shutil.copy2
    shutil.copytree(bundle, version / "bundle", copy_function=copy)
    return version / "bundle"
