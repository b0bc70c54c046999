"""A cluster on this machine: sbatch, srun and scontrol that really run what they are given, two nodes being one."""

import os
import sys
from pathlib import Path

import pytest

SBATCH = r'''
import os, re, signal, subprocess, sys, threading, time
from pathlib import Path
state = Path(os.environ["FAKE_SLURM"])
options, script = sys.argv[1:-1], Path(sys.argv[-1])
job = str(1001 + len(list(state.glob("job*.code"))))
with (state / "sbatch.log").open("a") as log:
    print(job, script.stem, *options, file=log)
before = [option.rpartition(":")[2] for option in options if option.startswith("--dependency=afterok:")]
if any((state / f"job{other}.code").read_text() != "0" for other in before):
    (state / f"job{job}.code").write_text("cancelled")
    print(job)
    raise SystemExit(0)
text = script.read_text()
nodes = re.search(r"^#SBATCH --nodes=(\d+)$", text, re.M)[1]
output = re.search(r"^#SBATCH --output=(.*)$", text, re.M)[1].replace("%x", script.stem).replace("%j", job)
environment = {**os.environ, "SLURM_JOB_ID": job, "SLURM_JOB_NUM_NODES": nodes, "SLURM_JOB_NODELIST": "local[1-2]"}

def preempt(process):
    """Tells the script alone, once as many lines are in the file as the test says."""
    path, lines = os.environ["FAKE_SLURM_PREEMPT"].rsplit(":", 1)
    while process.poll() is None:
        if os.path.exists(path) and open(path, "rb").read().count(b"\n") >= int(lines):
            return process.send_signal(signal.SIGUSR1)
        time.sleep(0.01)

for restarts in range(5):
    with open(output, "ab") as log:
        process = subprocess.Popen(["bash", script], env={**environment, "SLURM_RESTART_COUNT": str(restarts)},
                                   stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        if "--requeue" in text and not restarts and "FAKE_SLURM_PREEMPT" in os.environ:
            threading.Thread(target=preempt, args=(process,), daemon=True).start()
        code = process.wait()
    requeued = state / f"requeue{job}"
    if not requeued.exists():
        break
    requeued.rename(state / f"requeued{job}.{restarts}")
(state / f"job{job}.code").write_text(str(code))
print(job)
'''

SRUN = r"""
import os, signal, subprocess, sys
from pathlib import Path
arguments = sys.argv[1:]
options = [arguments.pop(0) for _ in list(arguments) if arguments[0].startswith("--")]
with (Path(os.environ["FAKE_SLURM"]) / "srun.log").open("a") as log:
    print(os.environ["SLURM_JOB_ID"], *options, "--", *arguments, file=log)
count = int(next(option for option in options if option.startswith("--ntasks=")).partition("=")[2])
tasks = [subprocess.Popen(arguments, env={**os.environ, "SLURM_PROCID": str(task)}) for task in range(count)]
signal.signal(signal.SIGTERM, lambda *_: [task.send_signal(signal.SIGTERM) for task in tasks if task.poll() is None])
raise SystemExit(max(abs(task.wait()) for task in tasks))
"""

SCONTROL = r"""
import os, sys
from pathlib import Path
if sys.argv[1] == "show":
    print("localhost", "localhost", sep="\n")
else:
    (Path(os.environ["FAKE_SLURM"]) / f"requeue{sys.argv[2]}").touch()
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Path:
    """The folder in which the commands leave what they were asked: sbatch.log, srun.log, job*.code, requeued*."""
    programs, state = tmp_path / "bin", tmp_path / "slurm"
    programs.mkdir()
    state.mkdir()
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL}.items():
        (programs / name).write_text(f"#!{sys.executable}\n{text}")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(state))
    return state
