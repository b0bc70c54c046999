"""Checkpoints at a second place, by URL."""

import importlib.util
import time
from dataclasses import replace
from types import SimpleNamespace

import fsspec
import pytest
import torch.distributed as dist

from megadit.models.megatron import groups
from megadit.models.megatron.integrity import SUMS, checksums, file_names, write_sums
from megadit.models.shared.errors import UserError
from megadit.train.checkpoints.checkpoint import CheckpointStore
from megadit.train.checkpoints.mirror import SecondCopy, check_url
from megadit.train.recipes import load_recipe


@pytest.fixture(params=["memory", "file", "s3"])
def url(request, tmp_path):
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')()}/run"
    if request.param == "file":
        return f"file://{tmp_path}/copies"
    fsspec.filesystem("memory").store.clear()
    return "memory://bucket/run"


def checkpoint(tmp_path, step):
    path = tmp_path / "run" / f"iter_{step:07d}"
    (path / "tensors").mkdir(parents=True)
    (path / "state.json").write_text(str(step))
    (path / "tensors" / ".metadata").write_bytes(bytes(range(step, 200)))
    write_sums(path, checksums(path, file_names(path)))
    return path


def test_copies_are_kept_listed_and_fetched(url, tmp_path, capsys):
    copy = SecondCopy(url)
    assert copy.names() == []
    for step in (1, 2, 10_000_000):
        copy.start(checkpoint(tmp_path, step), keep_last=2)
    copy.finish()
    assert copy.names() == ["iter_0000002", "iter_10000000"]
    fetched = SecondCopy(url).fetch("iter_0000002", tmp_path, tmp_path / "iter_0000002.unfinished")
    original = tmp_path / "run" / "iter_0000002"
    assert checksums(fetched, [*file_names(fetched), SUMS]) == checksums(original, [*file_names(original), SUMS])
    assert not (tmp_path / "iter_0000002.unfinished").exists() and not capsys.readouterr().err


def test_a_run_that_went_back_keeps_the_copies_it_makes(url, tmp_path):
    copy = SecondCopy(url)
    for step in (1, 2, 9):
        copy.start(checkpoint(tmp_path, step), keep_last=3)
    for step in (3, 4):
        copy.start(checkpoint(tmp_path, step), keep_last=1)
    copy.finish()
    assert copy.names() == ["iter_0000004", "iter_0000009"]


def test_a_bucket_writes_nowhere_but_into_its_run(s3, tmp_path):
    """Keys are whatever somebody with a key to the bucket wrote."""
    import boto3

    url = s3()
    copy = SecondCopy(f"{url}/run")
    copy.start(checkpoint(tmp_path, 1), keep_last=2)
    copy.finish()
    boto3.client("s3").put_object(
        Bucket=url.removeprefix("s3://"), Key="run/iter_0000001/../../../escaped", Body=b"ssh-rsa"
    )
    inside = tmp_path / "a" / "b" / "run"
    inside.mkdir(parents=True)
    with pytest.raises(UserError, match=r"'../../../escaped' is not the name of a file in .*: it leads elsewhere"):
        SecondCopy(f"{url}/run").fetch("iter_0000001", inside, inside / "iter_0000001.unfinished")
    assert not list(tmp_path.rglob("escaped")) and not (inside / "iter_0000001").exists()


def test_a_copy_without_its_checksums_is_none(url, tmp_path):
    copy = SecondCopy(url)
    copy.start(checkpoint(tmp_path, 1), keep_last=2)
    copy.finish()
    files, root = fsspec.core.url_to_fs(url)
    files.rm_file(f"{root}/iter_0000001/{SUMS}")
    assert copy.names() == []


def test_a_copy_that_fails_is_told_and_the_run_goes_on(url, tmp_path, capsys):
    copy = SecondCopy(url)
    path = checkpoint(tmp_path, 1)
    copy.start(path.with_name("iter_0000009"), keep_last=2)
    copy.start(path, keep_last=2)
    copy.finish()
    assert f"no second copy of iter_0000009 at {url}" in capsys.readouterr().err
    assert copy.names() == ["iter_0000001"]


@pytest.mark.parametrize("url", ["nonsense://bucket/run", "s3://bucket/run"])
def test_a_url_that_cannot_be_used(url):
    if url.startswith("s3") and importlib.util.find_spec("s3fs"):
        pytest.skip("s3fs is installed")
    with pytest.raises(UserError, match=f"checkpoint.copy_to={url} cannot be used"):
        check_url(url)


@pytest.mark.parametrize("is_first", [True, False])
def test_all_ranks_report_to_the_watchdog_while_the_first_copies(is_first, monkeypatch, tmp_path):
    """A copy of some hundred gigabytes takes longer than a collective, or the watchdog, waits."""
    signs, done = [], []
    monkeypatch.setattr(groups, "SECONDS_OF_A_SIGN", 0.02)
    monkeypatch.setattr(dist, "barrier", lambda: None)

    def broadcast(found, src):
        if not is_first:
            found[0] = (None,) if len(signs) > 4 else None

    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    config = load_recipe("digits_tiny")
    config = replace(config, checkpoint=replace(config.checkpoint, copy_to="memory://slow"))
    config = replace(config, train=replace(config.train, output_dir=str(tmp_path)))
    store = CheckpointStore(config, SimpleNamespace(is_first=is_first), mark=lambda: signs.append(True))
    if is_first:
        store._copy = SimpleNamespace(finish=lambda: time.sleep(0.2) or done.append(True))
    store.close()
    assert len(signs) > 4 and done == [True] * is_first
