"""`make gpu-check`: what a GPU machine proves, with the Python and torch that are there, no venv and no network.

Makes the package importable from a temporary folder: a link to this repository, and wheels of dist/gpu/, which
`make gpu-wheels` fetches where there is a network. Then each of `MEASUREMENTS` in turn, a process of its own with a
limit of its own: a row is printed, and written to OUT/rows.jsonl, when it is known, so that nothing is lost where the
machine is taken away. What a process says on its way is in OUT/NAME.log. Only the standard library is needed to start;
what is missing is named. The exit code is 1 if any of it failed.
"""

import argparse
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
WHEELS = REPOSITORY / "dist" / "gpu"
OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 9)
MODULES = {
    "base": ("torch", "numpy", "einops", "safetensors", "omegaconf", "yaml", "rich", "imageio", "av", "PIL"),
    "training on random samples": ("megatron.core",),
    "training": ("megatron.core", "megatron.energon", "sklearn", "httpx", "tensorboard", "matplotlib"),
    "tests": ("pytest", "pytest_timeout"),
}
NEEDED = ("torch", "numpy", "einops", "safetensors", "omegaconf", "yaml", "rich", "PIL", "megatron.core")
"""Without which nothing of megadit computes."""
FOR_DATA = ("megatron.energon", "sklearn", "httpx")
"""Without which a run has random samples alone."""
TRAIN_ITERS = 100
DATASET_SIZE = ("--num_clips", "2000", "--num_images", "4000", "--num_val", "48")
PROMPTS = ("a red seven moving left", "a green three moving up", "a blue zero", "a white nine moving right")
PICTURES_LIMIT = 60
PROGRAMS = REPOSITORY / "tests" / "gpu"
TEST_LIMIT = 120
"""Seconds for the tests of one file."""
FILES_AT_ONCE = 4


class Measurement(NamedTuple):
    """A program of tests/gpu/, which prints its rows as JSON."""

    arguments: tuple[str, ...]
    limit: int
    """Seconds."""
    needs_gpu: bool = False
    needs: str = "base"
    """A use in `MODULES`."""


MEASUREMENTS = {
    "products": Measurement(("products.py",), 30),
    "attention": Measurement(("attention.py",), 75),
    "chains": Measurement(("chains.py",), 45),
    "layers": Measurement(("layers.py",), 60),
    "optimizer": Measurement(("optimizer.py",), 45),
    "7b": Measurement(("steps.py", "7b"), 75, True, "training on random samples"),
    "7b-fused": Measurement(("steps.py", "7b-fused"), 75, True, "training on random samples"),
    "7b-four": Measurement(("steps.py", "7b-four"), 75, True, "training on random samples"),
    "beside-diffusers": Measurement(("beside_diffusers.py",), 120),
    "eight-bits": Measurement(("eight_bits.py",), 45, False, "training on random samples"),
    "7b-eight-bits": Measurement(("steps.py", "7b-eight-bits"), 75, True, "training on random samples"),
    "7b-graphs": Measurement(("steps.py", "7b-graphs"), 75, True, "training on random samples"),
    "xl": Measurement(("steps.py", "xl"), 60, True, "training on random samples"),
    "xl-mixed": Measurement(("steps.py", "xl-mixed"), 60, True, "training on random samples"),
    "xl-graphs": Measurement(("steps.py", "xl-graphs"), 60, True, "training on random samples"),
    "behaviour": Measurement(("behaviour.py",), 60),
    "resume": Measurement(("resume.py",), 120, False, "training on random samples"),
    "several": Measurement(("several.py",), 120, False, "training on random samples"),
    "tiny": Measurement(("steps.py", "tiny"), 90, False, "training on random samples"),
}
"""In the order in which they matter; `digits` and `tests` follow."""
FIRST = ("layers", "attention", "7b", "7b-eight-bits", "xl-mixed", "xl-graphs", "chains", "eight-bits", "behaviour")
"""What `--pretend` tells of where nothing is named: the first ten minutes on a card."""

Row = tuple[str, str, bool]
"""What, what was found, and whether that is a failure."""


class Report:
    """Rows, told and written down one by one."""

    def __init__(self, out: Path, budget: float) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.rows = out, []
        self._end = time.monotonic() + budget
        (out / "rows.jsonl").write_text("")

    def tell(self, part: str, name: str, found: str, failed: bool = False, figures: dict | None = None) -> None:
        row = {"part": part, "name": name, "found": found, "failed": failed, "figures": figures or {}}
        self.rows.append(row)
        with (self.out / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{'FAIL' if failed else 'ok  '}  {name:40}  {found}", flush=True)

    def add(self, part: str, rows: list[Row]) -> None:
        for row in rows:
            self.tell(part, *row)

    def seconds_left(self, limit: float) -> float:
        return min(limit, self._end - time.monotonic())

    def finish(self) -> int:
        """Writes report.json; the exit code."""
        temporary = self.out / "report.json.part"
        temporary.write_text(json.dumps(self.rows, indent=1))
        temporary.replace(self.out / "report.json")
        failed = sum(row["failed"] for row in self.rows)
        print(f"\n{len(self.rows)} rows, {failed} failed; all of it is in {self.out}")
        return int(failed > 0)


def main(argv: list[str] | None = None) -> int:
    if sys.version_info < OLDEST_PYTHON:
        print(f"Python {sys.version.split()[0]} is too old; needed: 3.11 or newer (make gpu-check GPU_PYTHON=...)")
        return 1
    parser = argparse.ArgumentParser(prog="gpu_check.py", allow_abbrev=False)
    parser.add_argument(
        "--out", type=Path, default=REPOSITORY / "runs" / "gpu-check", help="a folder for rows and logs"
    )
    known = (*MEASUREMENTS, "digits", "tests")
    parser.add_argument("--only", default="", metavar="NAME,...", help=f"some of {', '.join(known)}")
    parser.add_argument("--budget", type=float, default=1e9, metavar="SECONDS", help="nothing begins after so many")
    parser.add_argument(
        "--pretend", metavar="GPU", help="run nothing: what would be measured on a GPU such as h100-80gb"
    )
    options = parser.parse_args(argv)
    wanted = options.only.split(",") if options.only else list(known)
    if unknown := set(wanted) - set(known):
        parser.error(f"there is no {sorted(unknown)[0]!r}; choose of {', '.join(known)}")
    if options.pretend:
        return pretend(wanted if options.only else FIRST, options.pretend)
    report = Report(options.out.resolve(), options.budget)
    report.tell("machine", "python", sys.version.split()[0])
    with tempfile.TemporaryDirectory(prefix="megadit-gpu-check-") as folder:
        site = Path(folder, "site")
        report.add("machine", install_wheels(site))
        expose_package(site)
        path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
        memory = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        environment = {**os.environ, "PYTHONPATH": path, "PYTORCH_CUDA_ALLOC_CONF": memory}
        run = functools.partial(subprocess.run, env=environment, cwd=folder, capture_output=True, text=True)
        missing = missing_modules(run)
        report.add(
            "machine", [(f"missing for {kind}", ", ".join(names), False) for kind, names in missing.items() if names]
        )
        if "torch" in missing["base"]:
            report.tell(
                "machine", "torch", f"not installed: install {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer", True
            )
            return report.finish()
        rows, gpu = describe_torch(run)
        report.add("machine", rows)
        for name in wanted:
            if name in MEASUREMENTS:
                measurement = MEASUREMENTS[name]._replace(limit=MEASUREMENTS[name].limit * (1 if gpu else 10))
                measure(report, name, measurement, environment, missing, has_gpu=gpu)
        if "digits" in wanted:
            report.add("digits", run_digits(report, environment, Path(folder), missing))
        if "tests" in wanted:
            run_tests(report, environment, missing["tests"], has_gpu=gpu)
    return report.finish()


def pretend(wanted: Sequence[str], gpu: str) -> int:
    """Prints what would be measured on `gpu`, how long each part may take, and what a step needs there; the exit code.
    Needs megadit itself, but no GPU."""
    total = 0
    for name in wanted:
        measurement = MEASUREMENTS.get(name)
        limit = measurement.limit if measurement else TEST_LIMIT
        total += limit
        found = ""
        if measurement and measurement.arguments[0] == "steps.py":
            command = [sys.executable, str(PROGRAMS / "steps.py"), measurement.arguments[1], gpu]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(last_line(done.stderr))
                return 1
            found = json.loads(last_line(done.stdout))["found"]
        print(f"{name:20}  at most {limit:3} s  {found}")
    print(f"in all at most {total} s")
    return 0


def measure(
    report: Report, name: str, measurement: Measurement, environment: dict, missing: dict, *, has_gpu: bool
) -> None:
    """Runs a program, and tells its rows as they come."""
    lacking = [*missing["base"], *(missing[measurement.needs] if measurement.needs != "base" else [])]
    lacking = [module for module in lacking if module in NEEDED]
    if lacking or (measurement.needs_gpu and not has_gpu):
        report.tell(name, name, f"not measured: {'missing ' + ', '.join(lacking) if lacking else 'no GPU'}")
        return
    program, *arguments = measurement.arguments

    def row(line: str) -> None:
        try:
            found = json.loads(line)
            report.tell(name, found["name"], found["found"], found["failed"], found["figures"])
        except (ValueError, KeyError, TypeError):
            print(f"      {line}", flush=True)

    failure = watched(report, name, [str(PROGRAMS / program), *arguments], environment, measurement.limit, row)
    if failure:
        report.tell(name, name, failure, True)


def watched(report: Report, name: str, arguments: list[str], environment: dict, limit: float, tell=print) -> str | None:
    """Runs `python arguments`, told each line of its output; None, or what went wrong. Its errors are in NAME.log."""
    left = report.seconds_left(limit)
    if left < min(limit, 10):
        return "not begun: the budget is spent"
    log = report.out / f"{name}.log"
    with log.open("a") as errors:
        command = [sys.executable, *arguments]
        options = {"env": environment, "cwd": report.out, "stdout": subprocess.PIPE, "stderr": errors, "text": True}
        process = subprocess.Popen(command, start_new_session=True, **options)
        ended_by_us = threading.Event()

        def end() -> None:
            ended_by_us.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(left, end)
        timer.start()
        try:
            for line in process.stdout:
                tell(line.rstrip("\n"))
        finally:
            timer.cancel()
            code = process.wait()
    if ended_by_us.is_set():
        return f"not done after {left:.0f} s"
    return f"exit code {code}: {last_line(log.read_text())} (all of it in {log.name})" if code else None


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


def describe_torch(run) -> tuple[list[Row], bool]:
    """Rows of it, and whether it finds a GPU."""
    program = (
        "import json, torch\n"
        "gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]\n"
        "print(json.dumps([torch.__version__, torch.version.cuda, gpus]))"
    )
    done = run([sys.executable, "-c", program])
    if done.returncode:
        return [("torch", last_line(done.stderr), True)], False
    version, cuda, gpus = json.loads(done.stdout)
    too_old = tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_TORCH
    names = ", ".join(gpus) or "none: tests marked gpu are skipped, the digits run uses the CPU"
    rows = [
        ("torch", f"{version}, CUDA {cuda}" + (" (too old: needed 2.9)" if too_old else ""), too_old),
        ("GPU", names, False),
    ]
    return rows, bool(gpus)


def run_tests(report: Report, environment: dict, missing: list[str], *, has_gpu: bool) -> None:
    """The tests marked `gpu`, some files at a time: one that hangs, or lacks a library, costs its own alone."""
    if "pytest" in missing or not has_gpu:
        report.tell("tests", "tests marked gpu", f"not run: {'no GPU' if not has_gpu else 'pytest is not installed'}")
        return
    # the project's own addopts are strict about options of plugins that may be missing here
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", "-o", "timeout=0"]

    def run(file: Path) -> tuple[list[str], str | None]:
        lines: list[str] = []
        arguments = ["-m", "pytest", *options, f"--rootdir={REPOSITORY}", str(file)]
        failure = watched(report, f"tests_{file.stem}", arguments, environment, TEST_LIMIT, lines.append)
        return lines, failure

    files = sorted(file for file in (REPOSITORY / "tests").rglob("test_*.py") if "pytest.mark.gpu" in file.read_text())
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        for file, (lines, failure) in zip(files, pool.map(run, files), strict=True):
            name = f"tests {file.relative_to(REPOSITORY / 'tests')}"
            report.tell("tests", name, (lines or [failure or ""])[-1], failure is not None)
            failed = [line for line in lines if line.startswith("FAILED")]
            report.add("tests", [(f"  {line.split(' - ')[0]}", line, True) for line in failed])


def run_digits(report: Report, environment: dict, folder: Path, missing: dict[str, list[str]]) -> list[Row]:
    """A short run of the recipe `digits`: on the digits themselves where all of `FOR_DATA` is there."""
    needed = [name for name in (*missing["base"], *missing["training"]) if name not in ("av", "imageio", "matplotlib")]
    if any(name not in (*FOR_DATA, "tensorboard") for name in needed):
        return [("digits run", f"skipped: missing {', '.join(needed)}", False)]
    output, source = folder / "train", ["--mock"]
    if not set(FOR_DATA) & set(needed):
        dataset = folder / "dataset"
        prepare = ["-m", "megadit.models.shared.cli.verbs", "prepare", "digits", str(dataset), *DATASET_SIZE]
        if failure := watched(report, "digits", prepare, environment, 90):
            return [("prepare digits", failure, True)]
        source = [f"data.path={dataset}"]
    overrides = [f"train.train_iters={TRAIN_ITERS}", f"train.output_dir={output}", "validation.interval=0"]
    if "tensorboard" in needed:
        overrides.append("logger.tensorboard=false")
    command = ["-m", "megadit.train", "--recipe", "digits", *source, *overrides]
    if failure := watched(report, "digits", command, environment, 150):
        return [("digits run", failure, True)]
    rows = summarize_run(output / "metrics.jsonl", mock="--mock" in source)
    return rows if "--mock" in source else rows + pictures(report, environment, output)


def pictures(report: Report, environment: dict, trained: Path) -> list[Row]:
    """Puts into the report's folder what the network of a run, or a bundle, makes of a few prompts, and the curves."""
    sheet = report.out / "digits.png"
    command = [
        "-m",
        "megadit.models.shared.cli.verbs",
        "generate",
        "--checkpoint_path",
        str(trained),
        "--prompt",
        *PROMPTS,
    ]
    command += ["--video_save_path", str(report.out / "digits"), "--contact_sheet", str(sheet)]
    failure = watched(report, "digits", command, environment, PICTURES_LIMIT)
    rows = [("  pictures", failure or f"of {len(PROMPTS)} prompts, in {sheet.name}", failure is not None)]
    if (curves := trained / "curves.png").is_file():
        shutil.copy(curves, report.out)
        rows.append(("  curves", "in curves.png", False))
    return rows


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


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


if __name__ == "__main__":
    raise SystemExit(main())
