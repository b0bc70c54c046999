"""A cluster on this machine: Slurm's commands that really run what they are given, two nodes being one."""

import os
import sys
from collections.abc import Callable
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
before = [job for option in options if option.startswith("--dependency=afterok:") for job in option.split(":")[1:]]
if any((state / f"job{other}.code").read_text() != "0" for other in before):
    (state / f"job{job}.code").write_text("cancelled")
    print(job)
    raise SystemExit(0)
text = script.read_text()
nodes = re.search(r"^#SBATCH --nodes=(\d+)$", text, re.M)[1]
output = re.search(r"^#SBATCH --output=(.*)$", text, re.M)[1].replace("%x", script.stem).replace("%j", job)
array = [option for option in [*re.findall(r"^#SBATCH (--array=.*)$", text, re.M), *options] if "--array=" in option]
environment = {**os.environ, "SLURM_JOB_ID": job, "SLURM_JOB_NUM_NODES": nodes, "SLURM_JOB_NODELIST": "local[1-2]"}

def preempt(process):
    """Tells the script alone, or the ranks alone, once as many lines are in the file as the test says."""
    path, lines = os.environ["FAKE_SLURM_PREEMPT"].rsplit(":", 1)
    whom, name = os.environ.get("FAKE_SLURM_TELLS", "script:USR1").split(":")
    while process.poll() is None:
        if os.path.exists(path) and open(path, "rb").read().count(b"\n") >= int(lines):
            if whom == "script":
                return process.send_signal(signal.Signals["SIG" + name])
            (state / "preempted").touch()
            return subprocess.run(["scancel", "--signal=" + name, job])
        time.sleep(0.01)

if array:  # its tasks one after another; how many may run at once is Slurm's to see to
    numbers, codes = array[-1].partition("=")[2].partition("%")[0], []
    first, dash, last = numbers.partition("-")
    for task in range(int(first), int(last) + 1) if dash else map(int, numbers.split(",")):
        with open(output.replace("%A", job).replace("%a", str(task)), "ab") as log:
            own = {**environment, "SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_JOB_ID": job}
            codes.append(subprocess.run(["bash", script], env=own, stdout=log, stderr=log).returncode)
    (state / f"job{job}.code").write_text(str(max(codes)))
    print(job)
    raise SystemExit(0)
for restarts in range(5):
    with open(output, "ab") as log:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # or the script could not hear what whoever started this ignores
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
signal.signal(signal.SIGTERM, lambda *_: [task.kill() for task in tasks])  # "srun: forcing job termination"
tasks = [subprocess.Popen(arguments, env={**os.environ, "SLURM_PROCID": str(task)}) for task in range(count)]
place = Path(os.environ["FAKE_SLURM"]) / f"tasks{os.environ['SLURM_JOB_ID']}"
place.write_text(" ".join(str(task.pid) for task in tasks))
code = max(abs(task.wait()) for task in tasks)
place.unlink()
raise SystemExit(code)
"""

SCANCEL = r"""
import os, signal, sys
from pathlib import Path
option, job = sys.argv[1:]
place = Path(os.environ["FAKE_SLURM"]) / f"tasks{job}"
for pid in place.read_text().split() if place.exists() else []:
    os.kill(int(pid), signal.Signals["SIG" + option.removeprefix("--signal=")])
"""

SCONTROL = r"""
import os, sys
from pathlib import Path
state = Path(os.environ["FAKE_SLURM"])
if sys.argv[1:3] == ["show", "hostnames"]:
    print("localhost", "localhost", sep="\n")
elif sys.argv[1:3] == ["show", "job"]:
    print("   PreemptTime=" + ("2026-01-01T00:00:00" if (state / "preempted").exists() else "None"))
else:
    (state / f"requeue{sys.argv[2]}").touch()
"""

SQUEUE = r"""
import os, sys
from pathlib import Path
state = Path(os.environ["FAKE_SLURM"])
with (state / "squeue.log").open("a") as log:
    print(*sys.argv[1:], file=log)
queued = (state / "queued").read_text().split() if (state / "queued").exists() else []
asked = next(option for option in sys.argv if option.startswith("--jobs=")).partition("=")[2].split(",")
print(*(f"{job} {job}" for job in queued if job in asked), sep="\n")
"""

RANKS = r"""#!/usr/bin/env bash
[ "$SLURM_RESTART_COUNT" = 0 ] || exit 0
trap 'echo >> "$FAKE_SLURM/saved"; exit 1' TERM
until [ -s "$FAKE_SLURM/tasks$SLURM_JOB_ID" ]; do sleep 0.01; done
echo >> "$FAKE_SLURM/started"
for _ in {1..2000}; do sleep 0.05; done
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Path:
    """Where the commands leave what they were asked: sbatch.log, srun.log, job*.code, requeued*. Jobs that
    a test names in `queued` are in the queue."""
    programs, state = tmp_path / "bin", tmp_path / "slurm"
    programs.mkdir()
    state.mkdir()
    for name, text in {
        "sbatch": SBATCH,
        "srun": SRUN,
        "scancel": SCANCEL,
        "scontrol": SCONTROL,
        "squeue": SQUEUE,
    }.items():
        # its path may have spaces; they need no packages
        (programs / name).write_text(f'#!/usr/bin/env -S "{sys.executable}" -S\n{text}')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(state))
    return state


@pytest.fixture
def ranks(slurm, monkeypatch) -> Path:
    """The same folder, and a torchrun whose ranks wait for SIGTERM, save (a line in `saved`) and end; at once after a
    requeue. Slurm tells when those of two nodes have started."""
    torchrun = slurm.parent / "bin" / "torchrun"
    torchrun.write_text(RANKS)
    torchrun.chmod(0o755)
    monkeypatch.setenv("FAKE_SLURM_PREEMPT", f"{slurm / 'started'}:2")
    monkeypatch.setattr("megadit.train.slurm.scripts._preamble", lambda cluster: [])  # nor another torchrun before it
    return slurm


@pytest.fixture
def note(tmp_path) -> Callable[[str], str]:
    """note("word"): a command that notes it, and its task; it fails while a file `word.fails` (`word.3.fails`) lies
    there."""
    return lambda word: (
        f'name={word}; test -z "$TASK" || name=$name.$TASK; echo $name/$TASKS >> {tmp_path}/ran; '
        f"! test -e {tmp_path}/$name.fails"
    )


@pytest.fixture
def ran(tmp_path) -> Callable[[], list[str]]:
    """ran(): what has been noted, in order."""
    return lambda: (tmp_path / "ran").read_text().split() if (tmp_path / "ran").exists() else []


@pytest.fixture
def diamond(tmp_path, note) -> list[str]:
    """left and right after first, last after both; right is an array of three."""
    return [
        f"folder={tmp_path / 'chain'}",
        "cluster.gpus_per_node=0",
        *(f"stages.{name}.command={note(name)}" for name in ("first", "left", "right", "last")),
        "stages.right.after=[first]",
        "stages.right.array=0-2%2",
        "stages.last.after=[left,right]",
    ]
