"""`megadit doctor`: reports what this machine can run, what is missing, and how to get it."""

import importlib.util
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError, choose_one
from megadit.models.shared.resources import available_cores

NAME = "megadit"
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    name: str
    found: str | None
    """Version or size that was found; None if it is missing."""
    enables: str
    remedy: str = ""
    """How to get it if it is missing."""


LIBRARIES: tuple[tuple[str, str, str, str], ...] = (
    ("megatron-core", "megatron.core", "training", "pip install 'megadit[train]'"),
    ("megatron-energon", "megatron.energon", "training on datasets", "pip install 'megadit[train]'"),
    ("scikit-learn", "sklearn", "the handwritten digits of `make demo`", "pip install 'megadit[train]'"),
    ("tensorboard", "tensorboard", "training curves in a browser", "pip install 'megadit[train]'"),
    ("matplotlib", "matplotlib", "curves.png of `make demo`", "pip install 'megadit[train]'"),
    ("transformer-engine", "transformer_engine", "fused kernels and FP8 on GPUs", "pip install 'megadit[te]'"),
    ("flash_attn_3", "flash_attn_interface", "FlashAttention-3 on Hopper GPUs", "docs/gpu.md says how to build it"),
    ("onnx", "onnx", "export to ONNX", "pip install 'megadit[export]'"),
    ("onnxruntime", "onnxruntime", "sampling from ONNX files", "pip install 'megadit[export]'"),
    ("openvino", "openvino", "ONNX files on CPUs, by OpenVINO", "pip install 'megadit[openvino]'"),
    ("diffusers", "diffusers", "Cosmos' and other published tokenizers", "pip install 'megadit[diffusers]'"),
    ("transformers", "transformers", "T5 as the text encoder", "pip install 'megadit[t5]'"),
    ("c2pa-python", "c2pa", "signatures in videos", "pip install 'megadit[c2pa]'"),
    ("opentelemetry-sdk", "opentelemetry.sdk", "traces of requests", "pip install 'megadit[otel]'"),
    ("tensorrt", "tensorrt", "TensorRT engines", "pip install 'megadit[trt]'"),
    ("polygraphy", "polygraphy", "building TensorRT engines", "pip install 'megadit[trt]'"),
    ("tritonclient", "tritonclient", "talking to a Triton server", "pip install 'megadit[serve]'"),
    ("fastapi", "fastapi", "the HTTP service", "pip install 'megadit[serve]'"),
    ("gradio", "gradio", "the demo page in a browser", "pip install 'megadit[serve]'"),
    ("wandb", "wandb", "metrics on Weights & Biases", "pip install 'megadit[wandb]'"),
)
"""Distribution, module, what it enables, how to get it."""
TESTED = {"megatron-core": ("0.16.1", "0.19.2")}
"""Distribution -> the tested versions, for libraries with a range of supported versions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorOptions:
    distributed: bool = setting(
        False, "test every rank's device, and the links between all ranks and nodes (also under torchrun)"
    )
    extras: tuple[str, ...] = setting(
        (),
        "exit with 1 if a requirement of these extras of megadit is missing, such as deploy",
        nargs="+",
        metavar="EXTRA",
    )
    nproc: int | None = setting(None, "ranks for --distributed (default: one for each GPU)", low=1, metavar="N")


@command(DoctorOptions, prog="megadit doctor", description=__doc__)
def main(options: DoctorOptions) -> int:
    """Prints the table and exits with 0, even if something is missing; `--distributed` and `--extras` exit with 1 for
    a fault."""
    if options.nproc is not None and not options.distributed:
        raise UserError(f"--nproc={options.nproc} needs --distributed")
    if options.distributed:
        from megadit.infer.inspect.interconnect import examine  # torch comes with it

        return examine(options.nproc)
    console = Console()
    for title, findings in (
        ("machine", machine_findings()),
        ("accelerator", accelerator_findings()),
        ("variants on this CPU", variant_findings()),
        ("libraries", library_findings()),
        ("video and programs", program_findings()),
    ):
        console.print(_table(title, findings))
    return _print_missing(options.extras) if options.extras else 0


def _print_missing(extras: tuple[str, ...]) -> int:
    needs = list(needs_of(extras))
    missing = [need for need in needs if not need.is_met]
    for need in missing:
        print(f"{need.asked}, which {need.by} requires, is {need.found or 'missing'}", file=sys.stderr)
    print(f"{', '.join(extras)}: {len({need.name for need in needs})} libraries, {len(missing)} requirements unmet")
    return 1 if missing else 0


def machine_findings() -> list[Finding]:
    """Python, cores, memory and disk."""
    total, available = _memory()
    free = shutil.disk_usage(Path.cwd()).free
    return [
        Finding("python", f"{platform.python_version()} on {platform.system()}", ""),
        Finding("CPU cores", str(available_cores()), "`make demo` needs 2"),
        Finding("memory", f"{total / GIB:.1f} GiB, {available / GIB:.1f} GiB of it free", "`make demo` needs 6 GiB"),
        Finding("disk", f"{free / GIB:.1f} GiB free in {Path.cwd()}", "`make setup` takes 4 GB, with torch for CUDA 7"),
        Finding("network", own_address(), "runs on several nodes"),
    ]


def own_address() -> str:
    """Address that this machine's own name resolves to, where gloo listens if nothing else is set."""
    name = platform.node()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return f"{name} has no address: between nodes set GLOO_SOCKET_IFNAME, or name it in /etc/hosts"
    if not address.startswith("127."):
        return f"{name} is {address}"
    return f"{name} is {address}, loopback: between nodes gloo takes the interface towards MASTER_ADDR instead"


def accelerator_findings() -> list[Finding]:
    """torch, its CUDA, and each GPU."""
    torch = _try(lambda: importlib.import_module("torch"))
    if torch is None:
        return [Finding("torch", None, "everything", "pip install torch")]
    findings = [Finding("torch", torch.__version__, "everything")]
    if not torch.cuda.is_available():
        built_for = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built for CPUs"
        remedy = f"{built_for}; on a GPU machine: pip install torch (its CUDA build), check nvidia-smi"
        return [*findings, Finding("GPU", None, "training and sampling at full size", remedy)]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = properties.major * 10 + properties.minor
        precisions = "bf16" if capability >= 80 else "fp32 only"
        precisions += ", FP8" if capability >= 89 else ""
        found = f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, CUDA {torch.version.cuda}"
        findings.append(Finding(f"GPU {index}", found, precisions))
    return findings


def variant_findings() -> list[Finding]:
    """Sizes from which the network's ops leave torch's own kernels on this CPU, with torch's default threads."""
    if _try(lambda: importlib.import_module("torch")) is None:
        return []
    from megadit.models.ops import crossover, tiled_attention  # noqa: F401  the ops have the crossovers

    crossover.tune_for_cpu()
    return [Finding(name, found, "") for name, found in crossover.describe_crossovers().items()]


def library_findings() -> list[Finding]:
    """The optional libraries: their versions, whether they can be imported, and what each is for."""
    return [Finding(name, _library(name, module), enables, remedy) for name, module, enables, remedy in LIBRARIES]


def program_findings() -> list[Finding]:
    """The H.264 codec that mp4 files need, and programs on the PATH."""
    return [
        Finding(
            "H.264 encoder",
            _try(_h264_encoder),
            "writing mp4",
            "pip install av (its wheels carry ffmpeg with libx264)",
        ),
        Finding(
            "tritonserver",
            shutil.which("tritonserver") or _packaged_triton(),
            "serving without a container",
            "pip install --no-deps nvidia-pytriton, or use the container of NVIDIA Triton",
        ),
        Finding(
            "trtexec",
            shutil.which("trtexec"),
            "timing TensorRT engines",
            "comes with TensorRT's tar file and containers",
        ),
    ]


def _table(title: str, findings: list[Finding]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, expand=True)
    table.add_column(width=1)
    table.add_column(width=18)
    table.add_column(ratio=3, overflow="fold")
    table.add_column(ratio=2, overflow="fold")
    for finding in findings:
        if finding.found:
            table.add_row("[green]+[/]", finding.name, escape(finding.found), finding.enables)
        else:
            missing = f"[dim]missing; {escape(finding.remedy)}[/]"
            table.add_row("[yellow]-[/]", finding.name, missing, f"[dim]for {finding.enables}[/]")
    return table


def _library(distribution: str, module: str) -> str | None:
    """The installed version, and the tested ones if it is none of these.

    A library that the import system cannot find counts as missing.
    """
    version = _try(lambda: metadata.version(distribution))
    if not version or not _try(lambda: importlib.util.find_spec(module)):
        return None
    tested = TESTED.get(distribution, (version,))
    return version if version in tested else f"{version}; tested are {' and '.join(tested)}"


def _packaged_triton() -> str | None:
    version = _library("nvidia-pytriton", "pytriton")
    return version and f"that of nvidia-pytriton {version}"


def _h264_encoder() -> str:
    import av
    from av.codec import Codec

    return f"{Codec('libx264', 'w').name} of av {av.__version__}"


def _try(function: Callable[[], object]) -> object | None:
    """The result, or None after any error: a broken installation must not stop the report."""
    try:
        return function()
    except Exception:
        return None


def _memory() -> tuple[int, int]:
    """Total and available bytes of this machine, or of its container if that is smaller."""
    page = os.sysconf("SC_PAGE_SIZE")
    total, available = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        values = dict(line.split(":") for line in meminfo.read_text(encoding="utf-8").splitlines())
        available = int(values["MemAvailable"].split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text(encoding="utf-8").strip()).isdigit():
        total = min(total, int(text))
        available = min(available, total - int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="utf-8")))
    return total, available


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """One requirement of a distribution."""

    name: str
    """Canonical name."""
    asked: str
    """Requirement as it is written, such as `onnx>=1.18`."""
    by: str
    """The distribution that requires it."""
    found: str | None
    """The installed version; None if it is missing."""
    is_met: bool


def needs_of(extras: Collection[str], name: str = NAME) -> Iterator[Need]:
    """Yield the requirements of a distribution with these extras, and theirs in turn; each pair once. Raises UserError
    if it is not installed, or has no such extra."""
    if _version(name) is None:
        raise UserError(f"{name} is not installed, so its extras are unknown: pip install -e .")
    known = metadata.metadata(name).get_all("Provides-Extra") or []
    for extra in extras:
        choose_one(extra, known, f"{name} has no extra {extra!r}")
    seen, waiting = set(), [(canonicalize_name(name), frozenset(extras))]
    while waiting:
        asking = waiting.pop()
        if asking in seen:
            continue
        seen.add(asking)
        for requirement in _required(*asking):
            needed = canonicalize_name(requirement.name)
            found = _version(needed)
            is_met = found is not None and requirement.specifier.contains(found, prereleases=True)
            if needed != canonicalize_name(name):
                asked = f"{requirement.name}{requirement.specifier}"
                yield Need(name=needed, asked=asked, by=asking[0], found=found, is_met=is_met)
            if found is not None:
                waiting.append((needed, frozenset(requirement.extras)))


def _required(name: str, extras: Iterable[str]) -> Iterator[Requirement]:
    for requirement in _requirements(name):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


@cache
def _requirements(name: str) -> list[Requirement]:
    return list(map(Requirement, metadata.requires(name) or []))


@cache
def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    raise SystemExit(main())
