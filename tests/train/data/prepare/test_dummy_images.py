"""`megadit prepare dummy_images`: pictures of nothing that the usual networks can be trained on."""

import pytest

from megadit.models.shared.errors import UserError
from megadit.train.config.load import resolve_config
from megadit.train.data.loader import build_train_loader
from megadit.train.data.prepare import command as prepare
from megadit.train.data.prepare.dummy_images import prepare_dummy_images
from megadit.train.dataset.dataset_info import DatasetInfo


def test_what_nemo_s_documents_say(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = ["dummy_images", "--factory", "prepare_dummy_image_dataset", "--num_images", "16", "--size", "64"]
    monkeypatch.setenv("RANK", "1")
    assert prepare.main(argv) == 0 and not list(tmp_path.iterdir()), "the first rank does it"
    monkeypatch.setenv("RANK", "0")
    assert prepare.main(argv) == 0
    told = capsys.readouterr().out
    settings = [word for word in told.split() if "=" in word]
    small = (
        "data.num_workers=0",
        "data.text_seq_length=512",
        "data.shuffle_buffer_size=4",
        "data.packing_buffer_size=4",
    )
    run = resolve_config("pretrain_xl", overrides=[*settings, *small])
    batch = next(iter(build_train_loader(run, rank=0, world_size=1)))
    assert {segment.grid for segment in batch.layout.segments if not segment.is_padding} == {(1, 4, 4)}
    assert DatasetInfo.read("dummy_images").num_samples == {"train": 14, "val": 2}
    assert prepare.main(argv) == 0 and "already prepared" in capsys.readouterr().out


@pytest.mark.parametrize(("settings", "message"), [({"num_images": 7}, "at least 8"), ({"size": 40}, "multiple of 16")])
def test_what_cannot_be_drawn(tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        prepare_dummy_images(tmp_path / "out", **settings)


def test_options_decide_the_pictures(tmp_path):
    def shard(*more):
        assert prepare.main(["dummy_images", str(tmp_path / "out"), "--num_images", "8", "--size", "32", *more]) == 0
        return (tmp_path / "out" / "train-000000.tar").read_bytes()

    first = shard()
    assert shard("--seed", "1") == first, "what is there stays"
    assert shard("--seed", "1", "--overwrite") != first == shard("--overwrite")


def test_another_factory_is_refused(capsys):
    assert prepare.main(["dummy_images", "--factory", "another"]) == 2
    assert "prepare_dummy_image_dataset" in capsys.readouterr().err
