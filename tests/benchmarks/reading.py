"""How fast samples are read, beside a bare webdataset reader and a bare Energon loader of the same shards.

    python tests/benchmarks/reading.py [DATASET] [--num_samples 2000] [--rounds 3] [--num_lengths 1000000]

One reader in this process, in turns, so that all readers meet the same machine; the best round counts, in seconds of
CPU time. Without DATASET, samples of random latents (16 x 9 x 32 x 32) and texts (64 x 1024) are written first. Then
lengths alone are packed.
"""

import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_loader,
    get_train_dataset,
    stateless,
)

from megadit.models.configs.config import DiTConfig
from megadit.models.shared.cli.command import run_command
from megadit.models.shared.cli.options import read_options
from megadit.models.shared.cli.setting import setting
from megadit.train.config.schema import DataConfig
from megadit.train.data.loader import MAX_SAMPLES_PER_SEQUENCE, savable_loader
from megadit.train.data.packs.bin_packing import best_fit
from megadit.train.data.packs.packed_batch import PackFormat
from megadit.train.data.packs.rules import Rules
from megadit.train.data.packs.samples import OCCURRENCE, decode
from megadit.train.data.packs.task_encoder import LatentTaskEncoder
from megadit.train.data.writer import prepare_for_energon, sample_members, write_members
from megadit.train.dataset.dataset_info import iter_captions
from megadit.train.dataset.energon_files import CRUDE

CHANNELS, TEXT_WIDTH = 16, 1024
SHUFFLE = 100


@edataclass
class BareSample(Sample):
    """Members as they come."""

    members: dict[str, Any]


@stateless
def cook_bare(crude: dict[str, Any]) -> BareSample:
    return BareSample(**basic_sample_keys(crude), members=crude)


@stateless
def cook_decoded(crude: dict[str, Any]) -> BareSample:
    return BareSample(**basic_sample_keys(crude), members={"sample": decode(crude | {OCCURRENCE: 0})})


class BareTaskEncoder(DefaultTaskEncoder):
    """The shortest that Energon's manual shows."""

    decoder = None
    cookers = [Cooker(cook_bare)]


class DecodingTaskEncoder(DefaultTaskEncoder):
    """The same with our decoding, for what is left of the difference."""

    decoder = None
    cookers = [Cooker(cook_decoded)]


def write_random(root: Path, count: int) -> None:
    """Shards of random samples, with Energon's metadata."""
    generator = torch.Generator().manual_seed(0)
    root.mkdir(parents=True, exist_ok=True)
    for shard in range(4):
        members = []
        for number in range(count // 4):
            tensors = {
                "latent": torch.randn(CHANNELS, 9, 32, 32, generator=generator).half(),
                "text": torch.randn(64, TEXT_WIDTH, generator=generator).half(),
            }
            description = {"caption": "", "num_frames": 33, "height": 256, "width": 256, "fps": 24.0}
            members += sample_members(f"{shard}-{number:05d}", description, tensors)
        write_members(root / f"train-{shard:06d}.tar", members)
    prepare_for_energon(root, ["train"])


def bare_webdataset(root: Path) -> Iterator[Any]:
    import webdataset

    shards = sorted(str(path) for path in root.glob("train-*.tar"))
    return iter(webdataset.WebDataset(shards * 1000, shardshuffle=False).shuffle(SHUFFLE))


def energon(root: Path, task_encoder: Any, loader: Callable[[Any], Any] = get_loader) -> Iterator[Any]:
    dataset = get_train_dataset(
        root,
        dataset_config=CRUDE,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=None,
        shuffle_buffer_size=SHUFFLE,
        max_samples_per_sequence=MAX_SAMPLES_PER_SEQUENCE,
        task_encoder=task_encoder,
    )
    return iter(loader(dataset))


class UnpackedTaskEncoder(LatentTaskEncoder):
    """Ours up to the packing: counted passes, decoding, all rules."""

    def build_batch(self, dataset: Any, **_: Any) -> Any:
        return dataset


def ours(root: Path) -> Iterator[Any]:
    data = DataConfig(seq_length=1 << 20, text_seq_length=1 << 20, global_batch_size=1)
    model = DiTConfig(
        num_layers=1, hidden_size=24, num_attention_heads=2, in_channels=CHANNELS, patch_spatial=2,
        crossattn_emb_size=TEXT_WIDTH,
    )  # fmt: skip
    pack_format = PackFormat(
        model=model, seq_length=data.seq_length, text_seq_length=data.text_seq_length, seed=1, text_dropout=0.1
    )
    return energon(root, UnpackedTaskEncoder(Rules.of(data, pack_format, training=True)), savable_loader)


READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    "bare webdataset": bare_webdataset,
    "bare Energon": lambda root: energon(root, BareTaskEncoder()),
    "bare Energon + safetensors": lambda root: energon(root, DecodingTaskEncoder()),
    "megadit, not packed": ours,
}


def measure(root: Path, num_samples: int, rounds: int) -> dict[str, float]:
    """Samples per second of CPU time of each reader."""
    iterators = {name: build(root) for name, build in READERS.items()}
    for iterator in iterators.values():
        next(islice(iterator, SHUFFLE, None))  # buffers fill, files are opened
    best = dict.fromkeys(READERS, 0.0)
    for _ in range(rounds):
        for name, iterator in iterators.items():
            start = time.process_time()
            for _ in islice(iterator, num_samples):
                pass
            best[name] = max(best[name], num_samples / (time.process_time() - start))
    return best


def measure_packing(num_lengths: int) -> tuple[float, float, float]:
    """Seconds of CPU time to pack so many samples of 256 to 8,192 tokens (log-uniform, 1 to 64 of text) into packs of
    8,192, how full these are, and how full those of buffers of 1,000 samples each."""
    generator = random.Random(0)
    low, high = math.log(256), math.log(8192)
    lengths = [(round(math.exp(generator.uniform(low, high))), generator.randint(1, 64)) for _ in range(num_lengths)]
    capacity = (8192, 4096)

    def fill(packs: list[list[list[int]]], parts: list[list[tuple[int, int]]]) -> float:
        return sum(tokens for part in parts for tokens, _ in part) / (capacity[0] * sum(map(len, packs)))

    start = time.process_time()
    packs = best_fit(lengths, capacity)
    seconds = time.process_time() - start
    buffers = [lengths[begin : begin + 1000] for begin in range(0, num_lengths, 1000)]
    of_buffers = [best_fit(buffer, capacity) for buffer in buffers]
    return seconds, fill([packs], [lengths]), fill(of_buffers, buffers)


def main(argv: list[str] | None = None) -> int:
    return run_command(_run, sys.argv[1:] if argv is None else argv)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingOptions:
    dataset: Path | None = setting(None, "written by megadit prepare", positional=True, metavar="DATASET")
    num_samples: int = setting(2000, "of a round and reader (default: {default})")
    rounds: int = setting(3, "of which the best counts (default: {default})")
    num_lengths: int = setting(1_000_000, "of samples packed (default: 1,000,000)")


def _run(argv: list[str]) -> int:
    prog = "python tests/benchmarks/reading.py"
    options = read_options(ReadingOptions, argv, prog=prog, description=__doc__.splitlines()[0])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = options.dataset
        if root is None:
            root = Path(folder) / "random"
            write_random(root, 800)
        shards = list(root.glob("train-*.tar"))
        num_samples = sum(1 for _ in iter_captions(root, "train"))
        megabytes = sum(path.stat().st_size for path in shards) / num_samples / 1e6
        print(f"{megabytes:.3f} MB a sample, one reader, CPU time")
        speeds = measure(root, options.num_samples, options.rounds)
    for name, speed in speeds.items():
        ratio = speed / speeds["bare Energon"]
        print(f"{name:28} {speed:9.0f} samples/s  {speed * megabytes:8.0f} MB/s  {ratio:5.2f} of bare Energon")
    seconds, fill, fill_of_buffers = measure_packing(options.num_lengths)
    print(f"{options.num_lengths:,} samples packed in {seconds:.2f} s of CPU time; packs {fill:.1%} full")
    print(f"in buffers of 1,000 samples: {fill_of_buffers:.1%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
