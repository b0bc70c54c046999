"""A step of two ranks with packs of equal work beside one with packs in random order, as a ratio.

    python tests/benchmarks/balance.py [--rounds 5] [--steps 24]
    python tests/benchmarks/balance.py --seeds 20      # what is learned with both, from the same initial weights

Clips have log-uniform lengths of 64 to 12,288 tokens, and attention is most of the work of the small network. Two gloo
ranks of one thread train on the same clips. The arithmetic promises the ratio of the work of the busiest ranks, which
each run writes to metrics.jsonl. What is learned is told by the validation loss of one rank after `LEARNING_STEPS` on
clips of 4 to 256 tokens, colours that drift: a network that saw long clips less would do worse on them.
"""

import json
import math
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch

from megadit.models.shared.cli.command import run_command
from megadit.models.shared.cli.options import read_options
from megadit.models.shared.cli.setting import setting
from megadit.models.text_encoders.hashed_words import HashedWordEncoder
from megadit.models.tokenizers.haar import HaarTokenizer
from megadit.train.data.writer import DatasetWriter

CLIPS, SHORTEST, LONGEST = 2000, 64, 12_288
LEARNING_STEPS = 60
WARMUP = 4
"""First steps of a run, which are not counted."""


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: int = setting(5, "pairs of runs", low=1)
    steps: int = setting(24, "steps of a run", low=WARMUP + 1)
    seeds: int = setting(0, "compare the validation loss of this many pairs of short runs instead", low=0)


def write_clips(root: Path, *, shortest: int, longest: int, side: int) -> None:
    """Clips of side x side latents; the colour of a clip drifts from one random value to another."""
    generator, noise = random.Random(0), torch.Generator().manual_seed(0)
    tokenizer, text_encoder = HaarTokenizer(temporal_compression=1, spatial_compression=1), HashedWordEncoder(dim=16)
    with DatasetWriter(root, tokenizer=tokenizer, text_encoder=text_encoder) as writer:
        for number in range(CLIPS):
            tokens = math.exp(generator.uniform(math.log(shortest), math.log(longest)))
            frames = max(1, round(tokens / side**2))
            size = {"num_frames": frames, "height": side, "width": side}
            first, last = torch.randn(2, tokenizer.latent_channels, 1, 1, 1, generator=noise)
            time = torch.linspace(0, 1, frames)[:, None, None]
            latent = torch.lerp(first, last, time).repeat(1, 1, side, side)
            latent += 0.3 * torch.randn(latent.shape, generator=noise)
            text = text_encoder.encode(["a clip"]).features_BLE[0]
            split = "train" if number % 50 else "val"
            writer.add(split, f"{number:05d}", latent_CTHW=latent, text_LE=text, caption="a clip", fps=8.0, **size)


def train(data: Path, out: Path, ranks: int, *settings: str) -> None:
    subprocess.run(
        [
            *(sys.executable, "-m", "megadit.train", "--nproc", str(ranks), "--recipe", "digits"),
            *(f"data.path={data}", f"train.output_dir={out}", "model.learned_positions=null", "model.patch_spatial=1"),
            *("model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=2", "data.keep=[]"),
            *("data.micro_batch_size=1", "train.num_threads=1", "data.num_workers=1", "data.text_seq_length=512"),
            *settings,
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def time_and_work(data: Path, out: Path, balance: str, steps: int) -> tuple[float, float]:
    """(seconds, work of the busiest rank over the mean) of the steps of a run, added up."""
    longest, pack = f"data.seq_length={LONGEST}", ("data.global_batch_size=2", "data.packing_buffer_size=1000")
    run = f"data.balance={balance}", f"train.train_iters={steps}", "validation.interval=0"
    train(data, out, 2, longest, *pack, *run)
    lines = lines_of(out / "metrics.jsonl")[WARMUP:]
    flops = sum(line["tflops"] * line["seconds"] for line in lines)
    busiest = sum(line["imbalance"] * line["tflops"] * line["seconds"] for line in lines)
    return sum(line["seconds"] - line["reading_seconds"] for line in lines) / flops, busiest / flops


def validation_loss(data: Path, out: Path, balance: str, seed: int) -> float:
    steps = f"train.train_iters={LEARNING_STEPS}", f"validation.interval={LEARNING_STEPS}"
    short = (
        "data.seq_length=512",
        "data.global_batch_size=4",
        "data.packing_buffer_size=100",
        "validation.prompts=[a clip]",
    )
    train(data, out, 1, *short, *steps, f"data.balance={balance}", f"train.seed={seed}")
    return lines_of(out / "metrics.jsonl")[-1]["validation"]["none"]["mean"]


def compare_learning(folder: Path, seeds: int) -> None:
    write_clips(folder / "data", shortest=4, longest=256, side=2)
    off = []
    for seed in range(seeds):
        found = [validation_loss(folder / "data", folder / f"{seed}-{how}", how, seed) for how in ("work", "tokens")]
        off.append(found[0] - found[1])
        print(f"seed {seed}: validation loss {found[0]:.4f} with work, {found[1]:.4f} with tokens", flush=True)
    half = 1.96 * stdev(off) / math.sqrt(seeds)
    print(f"work less tokens: {mean(off):+.4f} +- {half:.4f} (95 %, {seeds} pairs)")


def main(argv: list[str]) -> int:
    options = read_options(Options, argv, prog="balance.py")
    with tempfile.TemporaryDirectory() as folder:
        if options.seeds:
            compare_learning(Path(folder), options.seeds)
            return 0
        data, pairs = Path(folder, "data"), []
        write_clips(data, shortest=SHORTEST, longest=LONGEST, side=8)
        for number in range(options.rounds):
            runs = [(Path(folder, f"{number}-{balance}"), balance) for balance in ("work", "tokens")]
            pairs.append([time_and_work(data, out, balance, options.steps) for out, balance in runs])
            measured, promised = (pairs[-1][0][index] / pairs[-1][1][index] for index in range(2))
            print(f"pair {number}: time {measured:.3f}, work of the busiest rank {promised:.3f}", flush=True)
    measured, promised = (median(work[index] / tokens[index] for work, tokens in pairs) for index in range(2))
    share = (1 - measured) / (1 - promised)
    print(f"time of a step {measured:.3f}, the arithmetic {promised:.3f}: {share:.0%} of what it promises")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main, sys.argv[1:]))
