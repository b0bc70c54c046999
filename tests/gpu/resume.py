"""A small run is saved and goes on from there, with AdamW and with Muon: its losses are those of one that never
stopped."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rows import HAS_GPU, attempt, tell

STEPS, SAVED = 4, 2
BOUND = 1e-3 if HAS_GPU else 0.0
"""Of losses, relative: a GPU's sums may differ from run to run, a CPU's may not."""
OPTIMIZERS = {
    "AdamW": ("optimizer.optimizer=adamw",),
    "AdamW with bfloat16 moments": ("optimizer.optimizer=adamw", "optimizer.moments=bf16"),
    "Muon": ("optimizer.optimizer=muon",),
}


def train(folder: Path, overrides: tuple[str, ...]) -> dict[int, float]:
    """Step -> loss, of all that metrics.jsonl knows then."""
    settings = (f"train.train_iters={STEPS}", f"checkpoint.save_interval={SAVED}", "validation.interval=0")
    quiet = ("logger.tensorboard=false", "logger.curves=false", "data.num_workers=0")
    large = ("optimizer.lr=0.02", "optimizer.lr_warmup_iters=0")  # what a resume forgets would be seen at once
    command = ["-m", "megadit.train", "--recipe", "digits_tiny", "--mock", *settings, f"train.output_dir={folder}"]
    subprocess.run([sys.executable, *command, *quiet, *large, *overrides], stdout=sys.stderr, check=True)
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def forget(folder: Path) -> None:
    """All of a run after the checkpoint of step `SAVED`."""
    for checkpoint in folder.glob("checkpoints/iter_*"):
        if int(checkpoint.name[-7:]) > SAVED:
            shutil.rmtree(checkpoint)
    file = folder / "metrics.jsonl"
    kept = [line for line in file.read_text().splitlines() if json.loads(line).get("step", 0) <= SAVED]
    file.write_text("".join(f"{line}\n" for line in kept))


def resumed(name: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "run")
        whole = train(folder, OPTIMIZERS[name])
        forget(folder)
        again = train(folder, OPTIMIZERS[name])
    later = range(SAVED + 1, STEPS + 1)
    apart = max(abs(again[step] / whole[step] - 1) for step in later)
    told = f"losses {', '.join(f'{whole[step]:.5f} and {again[step]:.5f}' for step in later)}"
    tell(f"resume, {name}", told, failed=not apart <= BOUND, apart=apart)


if __name__ == "__main__":
    for name in OPTIMIZERS if HAS_GPU else ("AdamW",):
        attempt(f"resume, {name}", lambda name=name: resumed(name))
