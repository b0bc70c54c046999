"""Data sets in S3 (a server that speaks it, on this machine) are read, described and resumed like folders."""

import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import fsspec
import pytest

from megadit.models.shared.errors import UserError
from megadit.train.data.loader import build_train_loader, build_validation_loader, validation_captions
from megadit.train.dataset import places
from megadit.train.dataset.dataset_info import DatasetInfo
from megadit.train.dataset.places import energon_url

from .test_loader import assert_same


@pytest.fixture
def stored(s3, dataset, monkeypatch, tmp_path) -> str:
    """The URL of `dataset`, copied to a bucket."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"{s3()}/sets/toy"
    store, root = fsspec.core.url_to_fs(url)
    for path in dataset.rglob("*"):
        if path.is_file():
            store.put_file(str(path), f"{root}/{path.relative_to(dataset).as_posix()}")
    return url


def assert_same_batches(found, expected) -> None:
    for batch, reference in zip(found, expected, strict=True):
        assert_same(batch, reference)


def test_a_data_set_in_s3_is_read_and_resumed_like_its_folder(stored, dataset, make_config, tmp_path):
    config = make_config(path=stored)
    loader = build_train_loader(config, rank=0, world_size=1)
    assert_same_batches(islice(loader, 12), islice(build_train_loader(make_config(), rank=0, world_size=1), 12))
    state = json.loads(json.dumps(loader.save_state()))
    expected = list(islice(loader, 12))
    resumed = build_train_loader(config, rank=0, world_size=1)
    resumed.restore_state(state)
    assert_same_batches(islice(resumed, 12), expected)
    validation = [build_validation_loader(each, rank=0, world_size=1) for each in (config, make_config())]
    assert_same_batches(*map(list, validation))
    assert validation_captions(config, 3) == validation_captions(make_config(), 3)
    info = DatasetInfo.read(stored)
    assert info.num_samples == DatasetInfo.read(dataset).num_samples
    for folder in (info.tokenizer_folder, info.text_encoder_folder):
        assert folder.is_relative_to(tmp_path / "cache")
        assert (folder / "config.json").read_text() == "{}"


def test_a_bucket_writes_nowhere_but_into_the_cache(stored, tmp_path):
    """The copy of the encoders is made of keys that somebody else wrote."""
    import boto3

    bucket, _, key = stored.removeprefix("s3://").partition("/")
    client = boto3.client("s3")
    client.put_object(Bucket=bucket, Key=f"{key}/tokenizer/../../../../escaped", Body=b"x")
    with pytest.raises(UserError, match="whose names point out of it"):
        DatasetInfo.read(stored).tokenizer_folder  # noqa: B018  (it is fetched)
    assert not list(tmp_path.rglob("escaped")) and not list(tmp_path.parent.glob("escaped"))


def test_a_store_that_names_files_by_other_ways_writes_nowhere_else(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a" / "b"))
    with pytest.raises(UserError, match="'../../../escaped' is not the name of a file in .*: it leads elsewhere"):
        places.local_copy(OneFile(b"x", name="../../../escaped"), "tokenizer-1")
    assert not list(tmp_path.rglob("escaped"))


def test_two_places_share_no_copy(tmp_path, monkeypatch):
    """What a data set calls its tokenizer may be the name of another's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = (places.local_copy(OneFile(content), "tokenizer-1") for content in (b"{}", b"[]"))
    assert [(path / "config.json").read_bytes() for path in (first, second)] == [b"{}", b"[]"]


class OneFile:
    """A file of a store, and the folder around it, as far as they are asked."""

    def __init__(self, content, fetched=None, name="config.json"):
        self.content, self.fetched, self.name = content, [] if fetched is None else fetched, name

    def __str__(self):
        return f"msc://somewhere/{self.content!r}"

    def walk(self):
        self.fetched.append(self)
        return [self]

    def relative_to(self, folder):
        return self.name

    def open(self, mode):
        return io.BytesIO(self.content)


def test_worker_processes_read_from_s3_and_go_on(stored, make_config):
    config = make_config(path=stored, num_workers=1)
    loader = build_train_loader(config, rank=0, world_size=1)
    assert_same_batches(
        islice(loader, 10), islice(build_train_loader(make_config(num_workers=0), rank=0, world_size=1), 10)
    )
    state = json.loads(json.dumps(loader.save_state()))
    expected = list(islice(loader, 10))
    resumed = build_train_loader(config, rank=0, world_size=1)
    resumed.restore_state(state)
    assert_same_batches(islice(resumed, 10), expected)


def test_a_blend_in_s3_names_places_as_energon_does(stored, make_config):
    url = stored.replace("/toy", "/blend.yaml")
    splits = "splits:\n  train: {{path: {0}}}\n  val: {{path: {0}}}\n"
    blend = f"__module__: megatron.energon\n__class__: MetadatasetV2\n{splits}"

    def write(place: str) -> None:
        with fsspec.open(url, "w") as file:
            file.write(blend.format(place))

    for place in (energon_url(stored), "toy"):
        write(place)
        assert next(iter(build_train_loader(make_config(path=url), rank=0, world_size=1))).num_tokens > 0
    write(stored)
    with pytest.raises(UserError, match=r"names s3://.*, whose address in Energon is msc://_s3-.*; write that"):
        DatasetInfo.read(url)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{bucket}/nothing", "has no megadit.json; write it with `megadit prepare`"),
        ("s3://no-such-bucket-anywhere/set", "no-such-bucket-anywhere/set"),
        ("nonsense://bucket/set", "cannot be reached"),
        ("msc://no-such-profile/set", "cannot be reached"),
    ],
)
def test_places_that_are_not_there(s3, path, message):
    with pytest.raises(UserError, match=message):
        DatasetInfo.read(path.format(bucket=s3()))


def test_of_all_ranks_of_a_machine_one_fetches_the_encoders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fetched, seen, all_have_looked = [], [], threading.Barrier(4)

    def is_dir(path, look=Path.is_dir):
        found = look(path)
        if path.name == "tokenizer-1" and threading.get_ident() not in seen:
            seen.append(threading.get_ident())
            all_have_looked.wait(timeout=120)  # each has seen that there is none before any may fetch it
        return found

    monkeypatch.setattr(Path, "is_dir", is_dir)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: places.local_copy(OneFile(b"{}", fetched), "tokenizer-1"), range(4)))
    assert len(fetched) == 1 and [(path / "config.json").read_text() for path in found] == ["{}"] * 4
