"""Builds TensorRT engines (10.x, 11.x) from ONNX graphs, by polygraphy; strongly typed: the graph decides precision.

TensorRT 11 has no other mode, and 10 builds the same: there are no precision flags and no calibrator here.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from megadit.export.operators import check_operators
from megadit.infer.runtimes.network_spec import NetworkSpec
from megadit.models.shared.cli.setting import check_settings, setting
from megadit.models.shared.errors import UserError

LOSES_BIASES = "11.3."
"""TensorRT versions whose refittable engines may lack the bias of a product (release notes), refitted or not."""
INSTALL = "pip install 'megadit[trt]' (an NVIDIA GPU and its driver are needed too)"
GIGABYTE = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """How engines are built."""

    workspace_gb: float | None = setting(None, "maximum memory of one layer, in GB", above=0)
    """None: TensorRT's default."""
    optimization_level: int = setting(3, "builder optimization level, 0 (fast build) to 5 (fast engine)", low=0, high=5)
    timing_cache: str | None = setting(None, "file of kernel timings, to build faster the next time", metavar="PATH")
    """A file that is read, and extended."""
    refittable: bool = setting(False, "build engines whose weights can be replaced without a new build")
    version_compatible: bool = setting(False, "build engines that newer versions of TensorRT load")
    hardware_compatible: bool = setting(False, "build engines that other GPUs, Ampere and newer, load")
    weight_streaming: bool = setting(False, "build engines whose weights may stay in host memory")

    def __post_init__(self) -> None:
        check_settings(self)


class Libraries(NamedTuple):
    trt: ModuleType
    """tensorrt"""
    backend: ModuleType
    """polygraphy.backend.trt"""


def load_libraries() -> Libraries:
    """Import TensorRT and polygraphy. Raises UserError if one is missing; says what to install."""
    try:
        import tensorrt
        from polygraphy.backend import trt as backend
    except (ImportError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"engines need TensorRT and polygraphy ({reason}): {INSTALL}") from error
    return Libraries(tensorrt, backend)


def build_engine(onnx: Path, spec: NetworkSpec, settings: EngineSettings, plan: Path, libraries: Libraries) -> None:
    """Builds the engine of one graph and writes it to `plan`. Raises UserError if TensorRT does not read the graph, or
    cannot build it."""
    trt, backend = libraries
    check_refittable(settings, trt.__version__)
    check_operators(onnx, trt.__version__)
    config = backend.CreateConfig(profiles=[_profile(spec, backend)], **_options(settings, trt))
    # as polygraphy's own command sets: engines of compatible kinds need TensorRT's native normalisation
    is_compatible = settings.version_compatible or settings.hardware_compatible
    flags = [trt.OnnxParserFlag.NATIVE_INSTANCENORM] if is_compatible else None
    network = backend.NetworkFromOnnxPath(str(onnx), flags=flags, strongly_typed=True, config=config)
    build = backend.EngineBytesFromNetwork(network, config=config, save_timing_cache=settings.timing_cache)
    try:
        engine = build()
    except Exception as error:  # polygraphy has its own exceptions, TensorRT raises any
        raise UserError(f"TensorRT cannot build {onnx.name}: {str(error).strip().splitlines()[-1]}") from error
    plan.write_bytes(memoryview(engine))


def check_refittable(settings: EngineSettings, version: str) -> None:
    """Raises UserError for refittable engines with a TensorRT version that loses some of their weights."""
    if settings.refittable and version.startswith(LOSES_BIASES):
        raise UserError(
            f"--refittable: TensorRT {version} may drop biases of such engines; use 11.4 or newer, or leave it out"
        )


def refit_engine(before: Path, onnx: Path, plan: Path, trt: ModuleType, *, host_code: bool = False) -> None:
    """Writes to `plan` the engine of `before` with the weights of a graph of the same shapes (such as other EMA
    weights).

    `host_code`: the engine contains host code, like version-compatible engines.

    Raises:
        UserError: if the engine cannot be loaded or is not refittable, or the graphs differ in more than weights.
    """
    logger = trt.Logger(trt.Logger.WARNING)
    runtime = trt.Runtime(logger)
    runtime.engine_host_code_allowed = host_code
    engine = runtime.deserialize_cuda_engine(before.read_bytes())
    if engine is None:
        raise UserError(f"TensorRT cannot load {before}")
    refitter = trt.Refitter(engine, logger)
    parser = trt.OnnxParserRefitter(refitter, logger)
    if not parser.refit_from_file(str(onnx)) or not refitter.refit_cuda_engine():
        raise UserError(f"{before} cannot take the weights of {onnx.name}: leave out --refit to build a new one")
    plan.write_bytes(memoryview(engine.serialize()))


def _profile(spec: NetworkSpec, backend: ModuleType):
    """One range of shapes for every input."""
    profile = backend.Profile()
    for tensor in spec.inputs:
        shapes = {extreme: tensor.shape_at(extreme) for extreme in ("min", "opt", "max")}
        profile.add(tensor.name, **shapes)
    return profile


def _options(settings: EngineSettings, trt: ModuleType) -> dict[str, Any]:
    """The arguments of polygraphy's CreateConfig."""
    options: dict[str, Any] = {
        "builder_optimization_level": settings.optimization_level,
        "refittable": settings.refittable,
        "version_compatible": settings.version_compatible,
        "weight_streaming": settings.weight_streaming,
        "load_timing_cache": settings.timing_cache,
    }
    if settings.workspace_gb is not None:
        size = int(settings.workspace_gb * GIGABYTE)
        options["memory_pool_limits"] = {trt.MemoryPoolType.WORKSPACE: size}
    if settings.hardware_compatible:
        options["hardware_compatibility_level"] = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    return options


def engine_record(settings: EngineSettings, libraries: Libraries, gpu: tuple[str, tuple[int, int]]) -> dict[str, Any]:
    """Settings, TensorRT version and GPU that an engine is bound to, for `plan/settings.json`."""
    name, capability = gpu
    return {
        **asdict(settings),
        "tensorrt": libraries.trt.__version__,
        "gpu": name,
        "compute_capability": list(capability),
    }
