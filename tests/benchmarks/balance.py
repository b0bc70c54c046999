"""A step of two ranks with packs of equal work beside one with packs in random order, as a ratio.

    python tests/benchmarks/balance.py [--rounds 5] [--steps 24]

Clips have log-uniform lengths of 64 to 12,288 tokens, and attention is most of the work of the small network. Two gloo
ranks of one thread train on the same clips. The arithmetic promises the ratio of the work of the busiest ranks, which
each run writes to metrics.jsonl.
"""

import json
import math
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from megadit.models.shared.cli.command import run_command
from megadit.models.shared.cli.options import read_options
from megadit.models.shared.cli.setting import setting
from megadit.models.text_encoders.hashed_words import HashedWordEncoder
from megadit.models.tokenizers.haar import HaarTokenizer
from megadit.train.data.writer import DatasetWriter

CLIPS, SHORTEST, LONGEST = 2000, 64, 12_288
WARMUP = 4
"""First steps of a run, which are not counted."""


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: int = setting(5, "pairs of runs", low=1)
    steps: int = setting(24, "steps of a run", low=WARMUP + 1)


def write_clips(root: Path) -> None:
    generator = random.Random(0)
    tokenizer, text_encoder = HaarTokenizer(temporal_compression=1, spatial_compression=1), HashedWordEncoder(dim=16)
    with DatasetWriter(root, tokenizer=tokenizer, text_encoder=text_encoder) as writer:
        for number in range(CLIPS):
            tokens = math.exp(generator.uniform(math.log(SHORTEST), math.log(LONGEST)))
            frames = max(1, round(tokens / 64))
            size = {"num_frames": frames, "height": 8, "width": 8}
            latent = torch.randn(tokenizer.latent_channels, frames, 8, 8)
            text = text_encoder.encode(["a clip"]).features_BLE[0]
            split = "train" if number % 50 else "val"
            writer.add(split, f"{number:05d}", latent_CTHW=latent, text_LE=text, caption="a clip", fps=8.0, **size)


def run(data: Path, out: Path, balance: str, steps: int) -> tuple[float, float]:
    """(seconds, work of the busiest rank over the mean) of the steps of a run, added up."""
    subprocess.run(
        [
            *(sys.executable, "-m", "megadit.train", "--nproc", "2", "--recipe", "digits"),
            *(f"data.path={data}", f"train.output_dir={out}", f"data.balance={balance}", f"train.train_iters={steps}"),
            *("model.patch_spatial=1", "model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=2"),
            *(f"data.seq_length={LONGEST}", "data.text_seq_length=512", "data.global_batch_size=2", "data.keep=[]"),
            *("data.micro_batch_size=1", "data.packing_buffer_size=1000", "train.num_threads=1", "data.num_workers=1"),
            *("validation.interval=0", "model.learned_positions=null"),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][WARMUP:]
    flops = sum(line["tflops"] * line["seconds"] for line in lines)
    busiest = sum(line["imbalance"] * line["tflops"] * line["seconds"] for line in lines)
    return sum(line["seconds"] - line["reading_seconds"] for line in lines) / flops, busiest / flops


def main(argv: list[str]) -> int:
    options = read_options(Options, argv, prog="balance.py")
    with tempfile.TemporaryDirectory() as folder:
        data, pairs = Path(folder, "data"), []
        write_clips(data)
        for number in range(options.rounds):
            pairs.append([run(data, Path(folder, f"{number}-{how}"), how, options.steps) for how in ("work", "none")])
            measured, promised = (pairs[-1][0][index] / pairs[-1][1][index] for index in range(2))
            print(f"pair {number}: time {measured:.3f}, work of the busiest rank {promised:.3f}", flush=True)
    measured, promised = (median(work[index] / none[index] for work, none in pairs) for index in range(2))
    share = (1 - measured) / (1 - promised)
    print(f"time of a step {measured:.3f}, the arithmetic {promised:.3f}: {share:.0%} of what it promises")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main, sys.argv[1:]))
