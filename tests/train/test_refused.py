"""A run's metrics count the samples that its readers left out, by reason, and go on counting after a resume."""

import shutil
from collections import Counter
from itertools import islice

import pytest
import torch

from megadit.models.megatron.checkpoint import find_checkpoints
from megadit.train.config.load import resolve_config
from megadit.train.data.loader import build_train_loader
from megadit.train.data.packs.packed_batch import REFUSALS
from megadit.train.data.writer import prepare_for_energon, sample_members, write_members
from megadit.train.dataset.dataset_info import DatasetInfo

pytestmark = pytest.mark.slow

NUM_STEPS = 12


@pytest.fixture(scope="module")
def mixed_dataset(tiny_dataset, tmp_path_factory):
    """`tiny_dataset` with a second shard of samples that cannot be used."""
    root = tmp_path_factory.mktemp("mixed") / "dataset"
    shutil.copytree(tiny_dataset, root)
    latent = torch.full((DatasetInfo.read(tiny_dataset).latent_channels, 1, 4, 4), torch.nan)
    described = {"caption": "", "fps": 0, "aesthetic_score": 9}
    useless = [
        *sample_members("nan", described, {"latent": latent}),
        *sample_members("loud", described, {"latent": torch.full_like(latent, 1e6)}),
        *[("four.json", b'{"caption": "", "fps": 0}'), ("four.safetensors", b"\x01\x02\x03\x04")],
        *sample_members("foreign", described, {"another": torch.zeros(3)}),
        *sample_members("wide", described, {"latent": torch.zeros(7, 1, 4, 4)}),
    ]
    write_members(root / "train-000001.tar", useless)
    prepare_for_energon(root, ["train", "val"])
    return root


def counted_by_readers(overrides) -> Counter[str]:
    """What the readers of two ranks leave out until each has given as many packs as the run takes."""
    config = resolve_config("digits_tiny", overrides=list(overrides))
    counts: Counter[str] = Counter()
    for rank in range(2):
        for batch in islice(build_train_loader(config, rank=rank, world_size=2), NUM_STEPS):
            counts.update(dict(zip(REFUSALS, batch.refused, strict=True)))
    return +counts


def test_refused_samples_are_in_the_metrics(
    mixed_dataset, tiny_dataset, tiny_arguments, run_ranks, read_metrics, tmp_path
):
    command = [argument.replace(str(tiny_dataset), str(mixed_dataset)) for argument in tiny_arguments]
    more = ("data.min_aesthetic_score=1.0", "validation.interval=0", f"train.train_iters={NUM_STEPS}")
    more = (*more, "health.max_refused_share=1")
    more = (*more, "checkpoint.save_interval=4", "checkpoint.keep_last=9", f"train.output_dir={tmp_path}")
    run_ranks(2, *command, *more)
    told = [line.get("refused", {}) for line in read_metrics(tmp_path)]
    expected = counted_by_readers([*command[command.index("digits_tiny") + 1 :], *more])
    assert told[-1] == expected and len(told) == NUM_STEPS
    assert set(expected) == {"not_finite", "too_large", "unreadable", "other_channels", "low_score"}
    assert expected["unreadable"] >= 2
    for before, after in zip(told, told[1:], strict=False):
        assert all(after[reason] >= count for reason, count in before.items()), "they add up"

    for path in find_checkpoints(tmp_path / "checkpoints")[1:]:
        shutil.rmtree(path)
    run_ranks(2, *command, *more)
    assert [line.get("refused", {}) for line in read_metrics(tmp_path)] == told
