"""The machine that measurements run on: hardware, matrix product speed and memory."""

import os
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, wraps
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megadit.models.shared.errors import UserError
from megadit.models.shared.resources import available_cores, host_memory

DATASHEET = {
    ("GB300", torch.bfloat16): 2500e12,
    ("B300", torch.bfloat16): 2250e12,
    ("GB200", torch.bfloat16): 2500e12,
    ("B200", torch.bfloat16): 2250e12,
    ("RTX PRO 6000", torch.bfloat16): 504e12,
    ("H100 PCIe", torch.bfloat16): 756e12,
    ("H100 NVL", torch.bfloat16): 835e12,
    ("H100", torch.bfloat16): 989e12,
    ("H200", torch.bfloat16): 989e12,
    ("A100", torch.bfloat16): 312e12,
    ("L40S", torch.bfloat16): 362e12,
}
"""Dense operations per second from NVIDIA's data sheets, by a substring of the device's name; first match."""

LIBRARIES = (
    "torch",
    "megatron-core",
    "transformer-engine",
    "flash-attn",
    "diffusers",
    "onnxruntime",
    "openvino",
    "tensorrt",
)


def datasheet_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations per second by the data sheet; None if unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for (part, of), flops in DATASHEET.items() if part in name and of == dtype), None)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of one device: by the data sheet where known, else measured in a large product."""
    return datasheet_flops(device, dtype) or matmul_flops(device, dtype)


def matmul_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.0) -> float:
    """Operations per second of large square matrix products: the best of five or more, within `seconds`."""
    on_cpu = 1024 if multiplies(dtype) else 256  # without hardware support, a large product takes seconds
    size = 8192 if device.type == "cuda" else on_cpu
    a = torch.randn(size, size, device=device).to(dtype)  # constant inputs take less power, and so run faster
    best, left, begin = float("inf"), 5, time.perf_counter()
    while left > 0 or time.perf_counter() - begin < seconds:
        synchronize(device)
        start = time.perf_counter()
        a @ a
        synchronize(device)
        best, left = min(best, time.perf_counter() - start), left - 1
    return 2 * size**3 / best


@cache
def multiplies(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies matrices of a dtype natively. Other dtypes are some ten times as slow as
    float32, or refused by oneDNN. It depends on the processor's instructions, not on a measurement: ranks must
    agree."""
    return dtype.itemsize >= torch.float32.itemsize or _has_products(dtype)


def _has_products(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies a dtype on this processor, which has instructions for it."""
    if dtype == torch.bfloat16 and torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported():
        return False  # torch says that it is supported, because oneDNN converts every number
    asked = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    is_supported = getattr(torch.ops.mkldnn, asked.get(dtype, ""), None)  # a torch without oneDNN has no such op
    return is_supported is not None and torch.backends.mkldnn.is_available() and is_supported()


def computing_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """`dtype` where this device multiplies it natively, else float32."""
    return dtype if device.type != "cpu" or multiplies(dtype) else torch.float32


@contextmanager
def one_thread() -> Iterator[None]:
    """Operations of torch in one thread: others would wait for each other where work is small or the machine busy, and
    sums would have another order."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def small_operations_speed() -> float:
    """Speed of one thread of this CPU in small operations (norms, activations, dispatch), forward and backward; 1 is
    one core of an Intel Xeon with AMX (family 6, model 143)."""
    x, scale, seconds = torch.randn(1920, 192, requires_grad=True), torch.randn(192), []
    with one_thread():
        for _ in range(15):
            start = time.perf_counter()
            normed = F.layer_norm(x, scale.shape) * (1 + scale) + scale
            (F.gelu(normed, approximate="tanh") * scale + x).sum().backward()
            seconds.append(time.perf_counter() - start)
    return 0.0046 / statistics.median(seconds)


def auto_dtype(device: torch.device, stored: torch.dtype) -> torch.dtype:
    """Default dtype in which a network with `stored` weights computes on `device`: the stored half-precision dtype
    where the device multiplies it (bfloat16: GPUs from Ampere on), else float32; 8-bit weights count as bfloat16."""
    half = torch.bfloat16 if stored.itemsize == 1 else stored
    if half not in (torch.bfloat16, torch.float16):
        return torch.float32
    if device.type == "cpu":  # float16's range is too small for some networks, and only saves time
        return half if half == torch.bfloat16 and multiplies(half) else torch.float32
    return half if half == torch.float16 or torch.cuda.get_device_capability(device) >= (8, 0) else torch.float32


def cost_in_words(device: torch.device, dtype: torch.dtype) -> str | None:
    """Describe in a line the cost of matrix products in a dtype that `device` emulates; None where it is native."""
    if computing_dtype(device, dtype) == dtype:
        return None
    times = _seconds_of_linear(dtype) / _seconds_of_linear(torch.float32)
    name = str(dtype).removeprefix("torch.")
    return f"this processor does not multiply {name}: a product takes about {times:.0f} times as long as in float32"


def _seconds_of_linear(dtype: torch.dtype) -> float:
    """Seconds that a linear layer of 512 x 512 takes for 512 tokens on this CPU, the best of three."""
    x, seconds = torch.randn(512, 512).to(dtype), []
    for _ in range(4):  # the first one also prepares its kernel
        start = time.perf_counter()
        F.linear(x, x)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def on_its_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function that launches Triton kernels: on the GPU of its first input, not on the current one."""

    @wraps(function)
    def there(x: Tensor, *inputs: Any, **named: Any) -> Any:
        with torch.cuda.device_of(x):
            return function(x, *inputs, **named)

    return there


def reset_peak_memory(device: torch.device) -> None:
    """Make `peak_memory` start again from now (on a CPU, where Linux allows it)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that torch allocated on the GPU; on a CPU, the process's peak resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def free_memory(device: torch.device) -> int:
    """Bytes that a process can still allocate: on the GPU; on a CPU, its fraction of the free memory of the machine or
    of its control group, whichever is less."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return host_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


NO_MEMORY = (
    *("out of memory", "OutOfMemoryError", "can't allocate memory", "Cannot allocate memory", "Unable to allocate"),
    *("bad_alloc", "Failed to allocate memory"),
)
"""Phrases of out-of-memory errors from CUDA, torch, Linux, numpy, C++ and ONNX Runtime."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error is an out-of-memory error, on a GPU or a CPU."""
    has_its_type = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return has_its_type or any(words in str(error) for words in NO_MEMORY)


def memory_message(error: Exception) -> str:
    """Return the first line of an out-of-memory error."""
    return str(error).partition("\n")[0] or type(error).__name__


@contextmanager
def enough_memory(remedy: str) -> Iterator[None]:
    """Turn an out-of-memory error within the block into a UserError that says what helps.

    Raises:
        UserError: in place of the library's error.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each library has its own class
        if not is_out_of_memory(error):
            raise
        raise UserError(f"not enough memory ({memory_message(error)}): {remedy}") from error


def describe(device: torch.device) -> dict[str, Any]:
    """Hardware, versions and commit, as JSON values; None if unknown."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "gpu": gpu.name if gpu else None,
        "gpu_memory_gb": round(gpu.total_memory / 1e9, 1) if gpu else None,
        "cuda": torch.version.cuda if gpu else None,
        "processor": processor(),
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "python": platform.python_version(),
        **{library: _version(library) for library in LIBRARIES},
        "commit": commit(),
    }


def describe_in_words(about: dict[str, Any]) -> str:
    """`describe` as one line."""
    return ", ".join(f"{name} {value}" for name, value in about.items() if value is not None)


def commit() -> str | None:
    """The commit of this package, with a + where files differ from it; None where it was installed without git."""
    folder = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout

    try:
        if Path(git("rev-parse", "--show-toplevel").strip()).resolve() != folder:
            return None  # an environment inside another repository
        return git("rev-parse", "--short", "HEAD").strip() + ("+" if git("status", "--porcelain").strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def processor() -> str:
    """The processor's name, with family and model where they are told: clouds call several generations the same."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    if "model name" not in facts:
        return platform.machine()
    known = [f"{name.removeprefix('cpu ')} {facts[name]}" for name in ("cpu family", "model") if name in facts]
    return f"{facts['model name']} ({', '.join(known)})" if known else facts["model name"]


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None
