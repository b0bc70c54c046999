"""Several data sets as one: Energon's blends as `data.path`, and their state."""

import json
from itertools import islice

import pytest
import torch

from megadit.models.shared.errors import UserError
from megadit.train.config.rules import check_dataset
from megadit.train.data.loader import build_train_loader, build_validation_loader
from megadit.train.data.writer import write_members
from megadit.train.dataset.dataset_info import DatasetInfo

from .test_loader import assert_same

BLEND = """
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend:
      - {{weight: 3, path: {first}}}
      - {{weight: 1, path: {second}}}
  val:
    path: {first}
"""


@pytest.fixture(scope="module")
def blend(dataset, module_writer, toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("blend")
    with module_writer(folder / "second", shard_size=20) as writer:
        for index in range(100):
            toy.add_sample(writer, "train", 500 + index)
    path = folder / "blend.yaml"
    path.write_text(BLEND.format(first=dataset, second=writer.root))
    return path


def test_a_blend_is_described_as_one_data_set(blend, dataset, toy, make_config):
    info = check_dataset(make_config(path=str(blend)))
    assert info.num_samples == {"train": toy.num_train + 100, "val": toy.num_val}
    assert info.tokenizer_folder == dataset / "tokenizer"


def test_weights_decide_the_mixture(blend, make_config):
    loader = build_train_loader(make_config(path=str(blend)), rank=0, world_size=1)
    names = [name for batch in islice(loader, 150) for name in batch.sample_ids if name]
    share = sum(name >= "train-00500" for name in names) / len(names)
    assert share == pytest.approx(0.25, abs=0.04)
    validation = build_validation_loader(make_config(path=str(blend)), rank=0, world_size=1)
    assert all(name.startswith("val-") for batch in validation for name in batch.sample_ids if name)


@pytest.mark.parametrize(
    ("num_workers", "num_next"), [(0, 60), *(pytest.param(n, 60, marks=pytest.mark.slow) for n in (1, 4))]
)
def test_a_blend_resumes_in_the_middle_of_its_buffers(blend, make_config, num_workers, num_next):
    config = make_config(path=str(blend), num_workers=num_workers, keep=("image:0.7",))
    loader = build_train_loader(config, rank=0, world_size=1)
    before = int(torch.randint(20, 60, (), generator=torch.Generator().manual_seed(num_workers)))
    list(islice(loader, before))
    state = json.loads(json.dumps(loader.save_state()))
    expected = list(islice(loader, num_next))
    resumed = build_train_loader(config, rank=0, world_size=1)
    resumed.restore_state(state)
    for batch, reference in zip(islice(resumed, num_next), expected, strict=True):
        assert_same(batch, reference)


def test_data_of_different_encoders_do_not_blend(blend, module_writer, toy, tmp_path):
    with module_writer(tmp_path / "other") as writer:
        writer.tokenizer.fingerprint = lambda: "another"
        toy.add_sample(writer, "train", 0)
    path = tmp_path / "blend.yaml"
    path.write_text(blend.read_text().replace(str(blend.parent / "second"), str(writer.root)))
    with pytest.raises(UserError, match="tokenizer_fingerprint differs: tokenizer-stub in .*, another in"):
        DatasetInfo.read(path)


def test_a_blend_that_is_none_is_told(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        DatasetInfo.read(tmp_path / "nowhere.yaml")
    (tmp_path / "other.yaml").write_text("splits: 3\n")
    with pytest.raises(UserError, match="other.yaml: 'splits' is 3, not names and values"):
        DatasetInfo.read(tmp_path / "other.yaml")


def test_latents_and_pixels_do_not_blend(blend, module_writer, toy, tmp_path):
    with module_writer(tmp_path / "other") as writer:
        toy.add_sample(writer, "train", 0)
    path = tmp_path / "blend.yaml"
    path.write_text(blend.read_text().replace(str(blend.parent / "second"), str(writer.root)))
    assert DatasetInfo.read(path).store == "latents"
    write_members(writer.root / "train-000000.tar", [("a.json", b"{}"), ("a.png", b""), ("b.json", b"{}")])
    with pytest.raises(UserError, match="store differs: latents in .*, raw in"):
        DatasetInfo.read(path)
