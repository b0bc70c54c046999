"""What takes several GPUs: a rank that fails alone ends while the others wait for it, and no rank opens a context on a
GPU of another one. several.py FUNCTION FOLDER is one of two ranks."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rows import HAS_GPU, attempt, tell

SOON = 60.0
"""Seconds; NCCL would wait until the watchdog ends the ranks, for twenty minutes."""
WORD = "this rank alone"
TRAINING = (
    *("--recipe", "digits_tiny", "--mock", "train.train_iters=4", "checkpoint.save_interval=2", "data.num_workers=0"),
    *("validation.interval=0", "logger.tensorboard=false", "logger.curves=false"),
)


def on_two_ranks(function: str, folder: str) -> str:
    """What the ranks say."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    done = subprocess.run([*command, function, folder], capture_output=True, text=True)
    print(done.stdout, done.stderr, file=sys.stderr)
    return done.stdout + done.stderr


def fails_alone(folder: str) -> None:
    from megadit.models.megatron import cpu_shim, groups
    from megadit.models.shared.errors import UserError

    cpu_shim.install()
    from megadit.models.configs.config import DiTConfig

    found = groups.initialize(groups.ParallelSizes(), DiTConfig())
    with groups.destroyed_at_end():
        x = torch.ones(1 << 20, device=found.device)
        torch.distributed.all_reduce(x)
        if not found.is_first:
            time.sleep(1.0)  # the other one has begun to wait
            raise UserError(WORD)
        torch.distributed.all_reduce(x)
        x.sum().item()


def trains(folder: str) -> None:
    from megadit.models.megatron import cpu_shim

    cpu_shim.install()
    from megadit.train.__main__ import main

    code = main([*TRAINING, f"train.output_dir={folder}"])
    others = [n for n in range(torch.cuda.device_count() if HAS_GPU else 0) if n != torch.cuda.current_device()]
    opened = [n for n in others if torch._C._cuda_hasPrimaryContext(n)]
    print(f"exit code {code}, contexts on other GPUs: {opened}", flush=True)


def failure() -> None:
    begin = time.perf_counter()
    said, seconds = on_two_ranks("fails_alone", ""), time.perf_counter() - begin
    tell("a rank fails alone", f"{seconds:.0f} s", failed=WORD not in said or seconds > SOON, seconds=seconds)


def contexts() -> None:
    with tempfile.TemporaryDirectory() as folder:
        said = on_two_ranks("trains", str(Path(folder, "run"))).splitlines()
    found = [line for line in said if "contexts on other GPUs" in line]
    tell(
        "contexts after a checkpoint", "; ".join(found), failed=found != ["exit code 0, contexts on other GPUs: []"] * 2
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        globals()[sys.argv[1]](sys.argv[2])
    elif HAS_GPU and torch.cuda.device_count() < 2:
        tell("several GPUs", "not measured: one GPU")
    else:
        attempt("a rank fails alone", failure)
        attempt("contexts after a checkpoint", contexts)
