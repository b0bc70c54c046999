"""What tests of training share: a small data set, a command that trains on it, what a run told."""

import json
import time
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path

import pytest

STOPS_ITSELF = Path(__file__).parent / "jobs" / "stops_itself.py"
FEW_STEPS = ("data.num_workers=0", "data.shuffle_buffer_size=8", "data.packing_buffer_size=8", "logger.curves=false")
"""For a run of a few steps: it starts no processes, and does not read its few samples many times before the first."""
MOVIEGEN = {
    "family": "moviegen",
    "num_query_groups": 4,
    "position_embedding": "learned",
    "learned_positions": [4, 5, 5],
    "qk_layernorm": False,
}
"""A network of MovieGen's blocks, in the shape that the jobs of layouts take."""


@pytest.fixture(scope="session")
def read_metrics() -> Callable[[Path], list[dict]]:
    """read_metrics(folder of a run): what it told of each step."""
    return lambda out: [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def state_of(pid: int) -> str:
    """The state of a process (proc(5)); "" where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.fixture
def start_until(start_ranks) -> Callable[..., list]:
    """start_until(step, count, "-m", "megadit.train", ...): ranks of a training whose first one suspends itself once
    `step` is told (0: once a checkpoint stands); returns when it has, however busy the machine is."""

    def start(step: int, count: int, *command: str) -> list:
        assert command[:2] == ("-m", "megadit.train")
        ranks = start_ranks(count, STOPS_ITSELF, step, *command[2:])
        while state_of(ranks[0].pid) != "T":
            assert all(rank.poll() is None for rank in ranks), ranks[0].communicate()[0]
            time.sleep(0.005)
        return ranks

    return start


@pytest.fixture
def kill_in_the_middle(start_until, read_metrics) -> Callable[..., None]:
    """kill_in_the_middle(steps, out, *command): two ranks, killed once a checkpoint stands and before step `steps`."""

    def kill(steps: int, out: Path, *command: str) -> None:
        ranks = start_until(0, 2, *command, f"train.output_dir={out}")
        for rank in ranks:
            rank.kill()
            rank.wait()
        assert len(read_metrics(out)) < steps, "it must be killed in the middle"

    return kill


@pytest.fixture(scope="module")
def folders_of(run_ranks, tmp_path_factory) -> Callable[..., Callable[[int], Path]]:
    """folders_of(cases, job, timeout)(ranks): where a job leaves the results of the cases that `cases(ranks)` gives;
    they run when they are first asked for."""

    def make(cases: Callable[[int], dict], job: Path, timeout: float) -> Callable[[int], Path]:
        @cache
        def run(ranks: int) -> Path:
            folder = tmp_path_factory.mktemp(f"ranks{ranks}")
            (folder / "cases.json").write_text(json.dumps(cases(ranks)))
            run_ranks(ranks, job, folder, timeout=timeout)
            return folder

        return run

    return make


def tensors_of(folder: Path, prefix: str) -> dict:
    """Those of a job's checkpoint in `folder` whose names begin so."""
    return {name: tensor for name, tensor in _all_tensors(folder).items() if name.startswith(prefix)}


@lru_cache(maxsize=32)
def _all_tensors(folder: Path) -> dict:
    from megadit.models.megatron.checkpoint import _read

    return _read(folder / "tensors", "")


def numbers(folder: Path, name: str) -> dict:
    """What a job of layouts found of a case."""
    return json.loads((folder / f"{name}.json").read_text())


def relative(ours: list[float], theirs: list[float]) -> float:
    """How far two series are apart, at most."""
    return max(abs(x - y) / abs(y) for x, y in zip(ours, theirs, strict=True))


def deviations(ours: dict, one: dict) -> dict[str, float]:
    """What may differ between layouts, as multiples of what is allowed.

    Sums over tokens, features or ranks are taken in parts: float32 rounds them otherwise, by about 1e-7 of their size,
    and small gradients are differences of large ones. Copies of a parameter stay equal to the last bit.
    """
    return {
        "loss": relative(ours["loss"], one["loss"]) / 1e-6,
        "grad_norm": relative(ours["grad_norm"], one["grad_norm"]) / 1e-5,
        "spread": ours["spread"] / 1e-30,
    }


def distance(ours: dict, theirs: dict) -> float:
    """Of tensors of the same names, by the norms of `theirs`: the largest."""
    assert ours and set(ours) == set(theirs)
    return max(((ours[key] - theirs[key]).norm() / theirs[key].norm()).item() for key in theirs)


@pytest.fixture(scope="session")
def same() -> Callable[[list[dict], list[dict]], bool]:
    """same(metrics, expected): whether every step is there once, with equal numbers, to the last bit."""
    names = ("step", "loss", "objective", "grad_norm", "lr", "consumed_samples", "sample_checksum", "validation")
    return lambda *both: len({str([[line.get(name) for name in names] for line in run]) for run in both}) == 1


@pytest.fixture(scope="session")
def tiny_dataset(tmp_path_factory, write_tiny_dataset) -> Path:
    """Captioned noise, 3 frames of 8 x 8, and images of that size, prepared with real parts."""
    root = tmp_path_factory.mktemp("data") / "tiny"
    write_tiny_dataset(root)
    return root


@pytest.fixture(scope="session")
def write_tiny_dataset() -> Callable[..., None]:
    """write_tiny_dataset(root): the data set above; with `is_prior`, as a model's own samples."""
    return write_noise_dataset


def write_noise_dataset(root: Path, *, is_prior: bool = False) -> None:
    import torch

    from megadit.models.text_encoders.hashed_words import HashedWordEncoder
    from megadit.models.tokenizers.haar import HaarTokenizer
    from megadit.train.data.writer import DatasetWriter

    tokenizer = HaarTokenizer(temporal_compression=2, spatial_compression=2)
    text_encoder = HashedWordEncoder(dim=16)
    generator = torch.Generator().manual_seed(0)
    with DatasetWriter(root, tokenizer=tokenizer, text_encoder=text_encoder) as writer:
        for index in range(40):
            frames = 3 if index % 2 else 1
            video_CTHW = 2 * torch.rand(3, frames, 8, 8, generator=generator) - 1
            caption = f"sample number {index}"
            features = text_encoder.encode([caption])
            writer.add(
                "val" if index < 8 else "train",
                f"sample-{index:02d}",
                latent_CTHW=tokenizer.encode(video_CTHW[None])[0],
                text_LE=features.features_BLE[0, : features.length_B[0]],
                caption=caption,
                num_frames=frames,
                height=8,
                width=8,
                fps=8 if frames > 1 else 0,
                aesthetic_score=index / 10,
                is_prior=is_prior,
            )


@pytest.fixture(scope="session")
def tiny_arguments(tiny_dataset) -> tuple[str, ...]:
    """A command that trains on `tiny_dataset`, but for train.output_dir."""
    from megadit.train.dataset.dataset_info import DatasetInfo

    info = DatasetInfo.read(tiny_dataset)
    return (
        *("-m", "megadit.train", "--recipe", "digits_tiny", f"data.path={tiny_dataset}", "data.num_workers=0"),
        *(f"model.in_channels={info.latent_channels}", f"model.crossattn_emb_size={info.text_width}"),
        *(f"model.sigma_data={info.sigma_data}", "train.train_iters=4", "checkpoint.save_interval=2"),
        *("validation.interval=2", "validation.num_batches=2", "validation.sampling.guidance=3"),
        "ema.sigma_rels=[0.05,0.15]",
    )
