"""`make gpu-check`: rows come one by one and stay, whatever becomes of the measurement that told them."""

import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import PIL.Image
import pytest
import torch

from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment
from tests.bundles import write_tiny_bundle

sys.path.insert(0, str(Path(__file__).parent))

import gpu_check  # noqa: E402
from gpu_check import Measurement, Report, fits_this_python, measure, watched  # noqa: E402

ROW = 'print(json.dumps({"name": "a", "found": "b", "failed": False, "figures": {"ms": 1}}), flush=True)\n'
PROGRAMS = {
    "good.py": "import json\nprint('not a row')\n" + ROW,
    "dies.py": "import json\n" + ROW + "raise SystemExit('no such kernel')\n",
    "hangs.py": "import json, subprocess\n" + ROW + "subprocess.run(['sleep', '600'])\n",
}
NOTHING_MISSING = {kind: [] for kind in gpu_check.MODULES}


@pytest.fixture
def programs(tmp_path, monkeypatch):
    for name, content in PROGRAMS.items():
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(gpu_check, "PROGRAMS", tmp_path)
    return tmp_path


def told(report):
    lines = (report.out / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == report.rows
    return [(row["name"], row["found"], row["failed"]) for row in report.rows]


def run(report, program, limit=90, **options):
    measure(report, "x", Measurement((program,), limit), dict(os.environ), NOTHING_MISSING, has_gpu=False, **options)
    return told(report)


def test_rows_are_told_as_they_come(programs, tmp_path):
    report = Report(tmp_path / "out", 100)
    assert run(report, "good.py") == [("a", "b", False)]
    assert report.rows[0]["figures"] == {"ms": 1} and report.finish() == 0
    assert json.loads((report.out / "report.json").read_text()) == report.rows


def test_what_fails_keeps_its_rows_and_its_log(programs, tmp_path):
    report = Report(tmp_path / "out", 100)
    first, failed = run(report, "dies.py")
    assert first == ("a", "b", False) and failed == ("x", "exit code 1: no such kernel (all of it in x.log)", True)
    assert report.finish() == 1


def test_what_hangs_is_ended_with_its_children(programs, tmp_path):
    report = Report(tmp_path / "out", 100)
    *rows, ended = run(report, "hangs.py", limit=3)
    assert ended == ("x", "not done after 3 s", True) and len(rows) <= 1


def test_nothing_begins_when_the_budget_is_spent(programs, tmp_path):
    report = Report(tmp_path / "out", 0)
    assert run(report, "good.py") == [("x", "not begun: the budget is spent", True)]
    assert watched(report, "x", ["-c", "raise SystemExit(3)"], dict(os.environ), 5).startswith("not begun")


def test_what_lacks_something_is_not_measured(tmp_path):
    report, missing = Report(tmp_path / "out", 100), NOTHING_MISSING | {"base": ["einops", "imageio"]}
    measure(report, "x", Measurement(("good.py",), 9), {}, missing, has_gpu=True)
    measure(report, "x", Measurement(("good.py",), 9, needs_gpu=True), {}, NOTHING_MISSING, has_gpu=False)
    assert [found for _, found, _ in told(report)] == ["not measured: missing einops", "not measured: no GPU"]


def test_every_measurement_is_a_program():
    for measurement in gpu_check.MEASUREMENTS.values():
        assert (gpu_check.PROGRAMS / measurement.arguments[0]).is_file()
        assert measurement.needs in gpu_check.MODULES and measurement.limit <= 120


def test_what_would_be_measured_fits_ten_minutes(capsys, monkeypatch):
    monkeypatch.syspath_prepend(gpu_check.PROGRAMS)
    steps = importlib.import_module("steps")

    def in_this_process(command, **_):
        with contextlib.redirect_stdout(io.StringIO()) as told:
            steps.main(*command[2:])
        return subprocess.CompletedProcess(command, 0, told.getvalue(), "")

    monkeypatch.setattr(gpu_check.subprocess, "run", in_this_process)
    assert gpu_check.main(["--pretend", "h100-80gb"]) == 0
    *rows, total = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == list(gpu_check.FIRST)
    assert int(total.split()[-2]) <= 560
    steps = [row for row in rows if gpu_check.MEASUREMENTS[row.split()[0]].arguments[0] == "steps.py"]
    assert len(steps) >= 4 and all(re.search(r"\d+ GB, planned \d+ ms", row) for row in steps)


@pytest.mark.parametrize(
    ("gpu", "layers", "memory"),
    [("h100-80gb", range(12, 24), 80), ("rtx-pro-6000", range(16, 28), 96), ("h200", [32], 141), ("b200", [32], 180)],
)
def test_what_would_be_measured_fits_the_card(gpu, layers, memory, capsys, monkeypatch):
    monkeypatch.syspath_prepend(gpu_check.PROGRAMS)
    importlib.import_module("steps").main("7b", gpu)
    found = json.loads(capsys.readouterr().out)["found"]
    fitting, gigabytes = re.match(r"(\d+) of 32 layers, (\d+) GB, planned \d+ ms", found).groups()
    assert int(fitting) in layers and int(gigabytes) * 1e9 < memory * 2**30


def test_no_step_begins_that_cannot_fit(monkeypatch, capsys):
    monkeypatch.syspath_prepend(gpu_check.PROGRAMS)
    steps = importlib.import_module("steps")
    begun = []
    monkeypatch.setattr(steps, "HAS_GPU", True)
    monkeypatch.setattr(steps, "this_device", lambda ranks: steps.find_gpu("h100-80gb"))
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(steps.subprocess, "run", lambda command, **options: begun.append(command) or done)
    monkeypatch.setattr(steps, "free_memory", lambda device: 2e9)
    steps.main("7b")
    assert "not measured: one layer needs" in capsys.readouterr().out and not begun
    monkeypatch.setattr(steps, "free_memory", lambda device: 40e9)
    steps.main("7b")
    [command] = begun
    assert 4 <= int(next(word for word in command if word.startswith("model.num_layers=")).split("=")[1]) <= 10


def test_cudnn_takes_what_its_row_gives_it(monkeypatch):
    """Of tensors without numbers: arguments are checked before torch finds that only a GPU has the kernel."""
    monkeypatch.syspath_prepend(gpu_check.PROGRAMS)
    attention = importlib.import_module("attention")
    layout = PackLayout.pack([Segment((1, 2, 4), 3), Segment((1, 2, 2), 1)], capacity=12, text_capacity=4)
    q = torch.empty(12, 1, 2, 16, device="meta", dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="no fake impl or Meta kernel"):
        attention.attend_cudnn(q, q, q, layout, False)


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(["--only", "products,7c"])
    assert "there is no '7c'" in capsys.readouterr().err


def test_pictures_are_left_in_the_folder(tmp_path):
    """Of a bundle in place of a run's network; the curves are the run's."""
    bundle = write_tiny_bundle(tmp_path / "bundle").path
    (bundle / "curves.png").write_bytes(b"drawn")
    report = Report(tmp_path / "out", 100)
    found = gpu_check.pictures(report, dict(os.environ), bundle)
    assert found == [("  pictures", "of 4 prompts, in digits.png", False), ("  curves", "in curves.png", False)]
    with PIL.Image.open(report.out / "digits.png") as sheet:
        assert sheet.height > 16
    assert (report.out / "curves.png").read_bytes() == b"drawn" and len(
        list((report.out / "digits").glob("*.mp4"))
    ) == 4


def test_wheels_are_chosen_by_their_python():
    here = f"cp3{sys.version_info.minor}"
    fitting = ("a-1-py3-none-any.whl", f"a-1-{here}-{here}-manylinux2014_x86_64.whl", "a-1-cp38-abi3-linux_x86_64.whl")
    assert all(map(fits_this_python, fitting)) and not fits_this_python("a-1-cp37-cp37m-linux_x86_64.whl")


def test_it_runs_here(tmp_path):
    """The whole of it, with one measurement, in small where there is no GPU."""
    script, out = Path(gpu_check.__file__), tmp_path / "out"
    command = [sys.executable, script, "--only", "products", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((out / "report.json").read_text())
    products = [row for row in rows if row["part"] == "products" and "tflops" in row["figures"]]
    assert len(products) >= 12 and all(row["figures"]["tflops"] > 0 for row in products)


OTHER_PYTHON = os.environ.get("MEGADIT_GPU_PYTHON", "python3.12")
"""As GPU machines have it: the test below passes with Python 3.12, torch 2.11 and the wheels of `make gpu-wheels`."""


def has_torch(python: str) -> bool:
    done = subprocess.run(["sh", "-c", f"{python} -c 'import torch, numpy, einops, safetensors'"], capture_output=True)
    return done.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("python", [sys.executable, OTHER_PYTHON], ids=["this one", "another"])
def test_every_measurement_runs_in_small(tmp_path, python):
    if not has_torch(python):
        pytest.skip(f"{python} has no torch, numpy, einops and safetensors (MEGADIT_GPU_PYTHON names another)")
    names = {name for name, measurement in gpu_check.MEASUREMENTS.items() if not measurement.needs_gpu}
    command = [python, gpu_check.__file__, "--only", ",".join(names), "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "report.json").read_text())
    measured = {row["part"] for row in rows if not row["found"].startswith("not ")}
    assert names <= measured, done.stdout
