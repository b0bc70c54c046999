"""`make gpu-check`: what a GPU machine proves, with the Python and torch that are there, no venv and no network.

Makes the package importable from a temporary folder (wheels of dist/gpu/, a link to this repository), runs the tests
marked `gpu`, a short training run on digits and benchmarks of larger networks, and prints one table. Only the standard
library is needed to start; what is missing is named in the table. The exit code is 1 if any of it failed.
"""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
WHEELS = REPOSITORY / "dist" / "gpu"
OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 9)
MODULES = {
    "base": ("torch", "numpy", "einops", "safetensors", "omegaconf", "yaml", "rich", "imageio", "av", "PIL"),
    "training": ("megatron.core", "megatron.energon", "sklearn", "tensorboard", "matplotlib"),
    "tests": ("pytest", "pytest_timeout"),
}
TRAIN_ITERS = 100
DATASET_SIZE = ("--num_clips", "2000", "--num_images", "4000", "--num_val", "48")
TIME_LIMIT = 150
"""Seconds for the tests, and again for the run."""

BENCHMARK_TIME_LIMIT = 120
_ONE_PACK = (
    "data.mock=true",
    "data.global_batch_size=1",
    "data.micro_batch_size=1",
    "optimizer.optimizer=adamw",
    "ema.sigma_rels=[]",
)
_7B = ("--recipe", "performance_7b_8k_baseline", *_ONE_PACK, "optimizer.moments=bf16")
_XL = ("--recipe", "pretrain_xl", *_ONE_PACK, "data.seq_length=8192", "data.text_seq_length=512")
_MIXED = "data.mock_latent_shapes=[[1,32,32],[4,32,32],[9,32,32]]"
BENCHMARKS = {
    "DiT-XL, one clip of 8,192 tokens": (*_XL, "data.mock_latent_shapes=[[32,32,32]]"),
    "DiT-XL, 8,192 tokens of mixed sizes": (*_XL, _MIXED),
    "the same as CUDA graphs": (*_XL, _MIXED, "parallel.cuda_graph_max_segments=16"),
    "DiT-7B, one clip of 8,192 tokens": _7B,
}
"""Training steps that a GPU is timed with; without one they are not measured."""

Row = tuple[str, str, bool]
"""What, what was found, and whether that is a failure."""


def main() -> int:
    if sys.version_info < OLDEST_PYTHON:
        print(f"Python {sys.version.split()[0]} is too old; needed: 3.11 or newer (make gpu-check GPU_PYTHON=...)")
        return 1
    rows: list[Row] = [("python", sys.version.split()[0], False)]
    with tempfile.TemporaryDirectory(prefix="megadit-gpu-check-") as folder:
        site = Path(folder, "site")
        rows += install_wheels(site)
        expose_package(site)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
        run = functools.partial(subprocess.run, env=environment, cwd=folder, capture_output=True, text=True)
        missing = missing_modules(run)
        rows += [(f"missing for {use}", ", ".join(names), False) for use, names in missing.items() if names]
        if "torch" in missing["base"]:
            rows.append(("torch", f"not installed: install {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer", True))
        else:
            rows += describe_torch(run)
            rows += run_tests(run, Path(folder), missing["tests"])
            rows += run_digits(run, Path(folder), missing)
            rows += run_benchmarks(run, Path(folder), missing, has_gpu=has_gpu(run))
    print_table(rows)
    return int(any(failed for *_, failed in rows))


def install_wheels(site: Path) -> list[Row]:
    """Unpacks the wheels of dist/gpu/ that fit this Python into `site`."""
    site.mkdir()
    wheels = sorted(WHEELS.glob("*.whl"))
    fitting = [wheel for wheel in wheels if fits_this_python(wheel.name)]
    if not fitting:
        return [("wheels", f"none for this Python in {WHEELS.relative_to(REPOSITORY)}", False)]
    print(f"Installing {len(fitting)} wheels into a temporary folder.", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site)]
    done = subprocess.run([*command, *map(str, fitting)], capture_output=True, text=True)
    if done.returncode:
        return [("wheels", last_line(done.stderr), True)]
    return [("wheels", f"{len(fitting)} of {len(wheels)} installed", False)]


def fits_this_python(wheel: str) -> bool:
    """Whether the Python tag of a wheel's file name allows this interpreter (pip checks the platform)."""
    python, abi = wheel.removesuffix(".whl").split("-")[-3:-1]
    if any(tag.startswith("py3") for tag in python.split(".")):
        return True
    minors = [int(match[1]) for tag in python.split(".") if (match := re.fullmatch(r"cp3(\d+)", tag))]
    here = sys.version_info.minor
    return any(minor == here or (abi == "abi3" and minor <= here) for minor in minors)


def expose_package(site: Path) -> None:
    """`import megadit.models` finds this repository, and `importlib.metadata` its version, without an installation."""
    (site / "megadit").symlink_to(REPOSITORY, target_is_directory=True)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    info = site / f"megadit-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: megadit\nVersion: {project['version']}\n")


def missing_modules(run) -> dict[str, list[str]]:
    """The modules of each use that cannot be imported, asked of a fresh interpreter that sees `site`."""
    program = (
        "import importlib.util, json, sys\n"
        "def missing(name):\n"
        "    try: return importlib.util.find_spec(name) is None\n"
        "    except ImportError: return True\n"
        "print(json.dumps({use: list(filter(missing, names)) for use, names in json.loads(sys.argv[1]).items()}))"
    )
    return json.loads(run([sys.executable, "-c", program, json.dumps(MODULES)]).stdout)


def describe_torch(run) -> list[Row]:
    program = (
        "import json, torch\n"
        "gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]\n"
        "print(json.dumps([torch.__version__, torch.version.cuda, gpus]))"
    )
    done = run([sys.executable, "-c", program])
    if done.returncode:
        return [("torch", last_line(done.stderr), True)]
    version, cuda, gpus = json.loads(done.stdout)
    too_old = tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_TORCH
    names = ", ".join(gpus) or "none: tests marked gpu are skipped, the digits run uses the CPU"
    return [
        ("torch", f"{version}, CUDA {cuda}" + (" (too old: needed 2.9)" if too_old else ""), too_old),
        ("GPU", names, False),
    ]


def run_tests(run, folder: Path, missing: list[str]) -> list[Row]:
    """The tests marked `gpu`, from the files that have any, so that other tests' libraries need not be there."""
    if "pytest" in missing:
        return [("tests marked gpu", "skipped: pytest is not installed", False)]
    files = [str(file) for file in (REPOSITORY / "tests").rglob("test_*.py") if "pytest.mark.gpu" in file.read_text()]
    if not files:
        return [("tests marked gpu", "there are none", False)]
    print(f"Running the tests marked gpu in {len(files)} files.", flush=True)
    report = folder / "report.xml"
    # The project's own addopts are strict about options of plugins that may be missing here.
    options = [
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=--import-mode=importlib",
        f"--junitxml={report}",
    ]
    try:
        done = run([sys.executable, "-m", "pytest", *options, f"--rootdir={REPOSITORY}", *files], timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        return [("tests marked gpu", f"not done after {TIME_LIMIT} s", True)]
    if not report.is_file():
        return [("tests marked gpu", last_line(done.stderr or done.stdout), True)]
    return summarize_tests(report)


def summarize_tests(report: Path) -> list[Row]:
    """Counts, then a row for each failure and each reason to skip."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failures = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    reasons = [skipped.get("message", "") for case in cases if (skipped := case.find("skipped")) is not None]
    passed = len(cases) - len(failures) - len(reasons)
    rows = [("tests marked gpu", f"{passed} passed, {len(failures)} failed, {len(reasons)} skipped", bool(failures))]
    rows += [("  skipped", f"{reasons.count(reason)} x {reason}", False) for reason in dict.fromkeys(reasons)]
    return rows + [("  failed", f"{case.get('classname')}::{case.get('name')}", True) for case in failures]


def run_digits(run, folder: Path, missing: dict[str, list[str]]) -> list[Row]:
    """A short run of the recipe `digits`: on the digits themselves where Energon and scikit-learn are there."""
    needed = [name for name in (*missing["base"], *missing["training"]) if name not in ("av", "imageio", "matplotlib")]
    if any(name not in ("megatron.energon", "sklearn", "tensorboard") for name in needed):
        return [("digits run", f"skipped: missing {', '.join(needed)}", False)]
    output, source = folder / "train", ["--mock"]
    if not needed:
        print("Preparing a few digits.", flush=True)
        dataset = folder / "dataset"
        failure = try_module(run, "megadit.models.shared.verbs", "prepare", "digits", str(dataset), *DATASET_SIZE)
        if failure:
            return [("prepare digits", failure, True)]
        source = [f"data.path={dataset}"]
    overrides = [f"train.train_iters={TRAIN_ITERS}", f"train.output_dir={output}", "validation.interval=0"]
    if "tensorboard" in needed:
        overrides.append("logger.tensorboard=false")
    print(f"Training {TRAIN_ITERS} steps of the recipe digits.", flush=True)
    failure = try_module(run, "megadit.train", "--recipe", "digits", *source, *overrides)
    if failure:
        return [("digits run", failure, True)]
    return summarize_run(output / "metrics.jsonl", mock="--mock" in source)


def try_module(run, module: str, *arguments: str, limit: int = TIME_LIMIT) -> str | None:
    """Runs `python -m module arguments`; None, or what went wrong."""
    try:
        done = run([sys.executable, "-m", module, *arguments], timeout=limit)
    except subprocess.TimeoutExpired:
        return f"not done after {limit} s"
    return last_line(done.stderr) if done.returncode else None


def summarize_run(metrics: Path, *, mock: bool) -> list[Row]:
    steps = [record for line in metrics.read_text().splitlines() if "loss" in (record := json.loads(line))]
    tenth = max(1, len(steps) // 10)
    first, last = (sum(step["loss"] for step in part) / tenth for part in (steps[:tenth], steps[-tenth:]))
    later = steps[len(steps) // 2 :]
    speed = len(later) / max(sum(step["seconds"] for step in later), 1e-9)
    kind = "random samples" if mock else "digits"
    learned = mock or last < first
    return [
        ("digits run", f"{len(steps)} steps on {kind}, {speed:.1f} steps/s", False),
        ("  loss", f"{first:.3f} -> {last:.3f}" + ("" if learned else " (does not fall)"), not learned),
    ]


def has_gpu(run) -> bool:
    done = run([sys.executable, "-c", "import torch; print(torch.cuda.is_available())"])
    return done.stdout.strip() == "True"


def run_benchmarks(run, folder: Path, missing: dict[str, list[str]], *, has_gpu: bool) -> list[Row]:
    """A row for each of `BENCHMARKS`."""
    if not has_gpu:
        return [(name, "not measured: no GPU", False) for name in BENCHMARKS]
    if "megatron.core" in missing["training"]:
        return [(name, "not measured: megatron.core is not installed", False) for name in BENCHMARKS]
    rows = []
    for name, arguments in BENCHMARKS.items():
        print(f"Timing {name}.", flush=True)
        file = folder / "figures.json"
        options = ("--steps", "5", "--json", str(file))
        failure = try_module(run, "megadit.train.benchmarks.train", *arguments, *options, limit=BENCHMARK_TIME_LIMIT)
        if failure:
            rows.append((name, failure, True))
            continue
        record = json.loads(file.read_text())
        rows.append((name, describe_figures(record["figures"]), False))
        for op, calls in record["ops"].items():
            rows.append((f"  {op}", ", ".join(f"{variant} {count} x" for variant, count in calls.items()), False))
    return rows


def describe_figures(figures: dict) -> str:
    share = figures["tflops"] / figures["matmul_tflops"]
    return (
        f"{figures['tokens_per_second']:,.0f} tokens/s, {figures['tflops']:.0f} TFLOP/s computed "
        f"({share:.0%} of the matmul rate, {figures['upstream_tflops']:.0f} by the upstream formula), "
        f"{figures['peak_memory_gb']:.0f} GB, fill {figures['fill']:.0%}"
    )


def print_table(rows: list[Row]) -> None:
    width = max(len(name) for name, *_ in rows)
    print()
    for name, found, failed in rows:
        print(f"{'FAIL' if failed else 'ok  '}  {name:{width}}  {found}")


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


if __name__ == "__main__":
    raise SystemExit(main())
