"""A real run on data of a stranger: nothing of it is run, and no sample of it ends the run."""

import json
import shutil

import pytest
import torch

from megadit.train.data.writer import prepare_for_energon, sample_members, write_members
from megadit.train.dataset.dataset_info import DatasetInfo

pytestmark = pytest.mark.slow


@pytest.fixture
def train(run_ranks, tiny_arguments, tiny_dataset, tmp_path):
    """train(root, code=0): what two ranks printed that trained on the data set at `root`, and ended with `code`."""

    def start(root, code=0):
        command = [argument.replace(str(tiny_dataset), str(root)) for argument in tiny_arguments]
        command.append("health.max_refused_share=1")
        return run_ranks(2, *command, f"train.output_dir={tmp_path / 'run'}", code=code)

    return start


def hostile_samples(channels: int, split: str) -> list[tuple[str, bytes]]:
    latent = torch.zeros(channels, 1, 4, 4)
    good = dict(sample_members("x", {"caption": "a", "fps": 0}, {"latent": latent}))["x.safetensors"]
    descriptions = {
        "infinite": b'{"caption": "a", "fps": 0, "height": Infinity}',
        "nan": b'{"caption": "a", "fps": NaN}',
        "beyond": b'{"caption": "a", "fps": 1e999}',
        "digits": b'{"caption": "a", "fps": 0, "height": ' + b"9" * 400 + b"}",
        "deep": b"[" * 100_000,
        "half": rb'{"caption": "\ud800", "fps": 0}',
    }
    members = []
    for name, description in descriptions.items():
        members += [(f"{split}-{name}.json", description), (f"{split}-{name}.safetensors", good)]
    for dtype in (torch.bool, torch.float8_e4m3fn, torch.uint16):
        name = f"{split}-{str(dtype).rpartition('.')[2]}"
        members += sample_members(name, {"caption": "a", "fps": 0}, {"latent": latent.to(dtype)})
    return members


def test_a_run_goes_on_past_every_hostile_sample(train, tiny_dataset, read_metrics, tmp_path):
    root = shutil.copytree(tiny_dataset, tmp_path / "data")
    channels = DatasetInfo.read(root).latent_channels
    for split in ("train", "val"):
        write_members(root / f"{split}-000001.tar", hostile_samples(channels, split))
    prepare_for_energon(root, ["train", "val"])
    train(root)
    metrics = read_metrics(tmp_path / "run")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert metrics[-1]["refused"]["unreadable"] >= 6 and metrics[-1]["refused"]["other_dtype"] >= 3
    assert all(torch.tensor(line["loss"]).isfinite() for line in metrics)


def test_a_run_does_not_start_on_data_that_name_a_program(train, tiny_dataset, tmp_path):
    root = shutil.copytree(tiny_dataset, tmp_path / "data")
    marker = tmp_path / "marker"
    (root / ".nv-meta" / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nkeep = lambda part: True\n")
    crude = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset", "part_filter": "evil.py:keep"}
    (root / ".nv-meta" / "crude.yaml").write_text(json.dumps(crude))
    told = [output.strip() for output in train(root, code=2)]
    assert sorted(told)[0] == "" and "\n" not in sorted(told)[1]
    assert sorted(told)[1].endswith("says 'part_filter', which no data set needs; do not trust its source")
    assert not marker.exists()
