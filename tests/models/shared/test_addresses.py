"""Addresses and what they give away."""

import pytest

from megadit.models.commands.push_pull import pull_bundle
from megadit.models.shared.addresses import check_no_secret
from megadit.models.shared.errors import UserError
from megadit.serve.gateway.store.results import Results
from megadit.train.checkpoints.mirror import check_url
from megadit.train.data.ingest.sources.files import open_file

SECRETS = [
    "sftp://me:hunter2@host/run",
    "ftp://:hunter2@host",
    "s3://bucket/run?secret=hunter2",
    "abfs://c@a?sig=hunter2",
]


@pytest.mark.parametrize("url", SECRETS)
def test_no_place_is_named_with_its_password(url, tmp_path):
    """It would stand in the process list, in logs, in config.yaml and in what is written of a data set."""
    for door in (check_url, Results, open_file, lambda place: pull_bundle(place, tmp_path / "out")):
        with pytest.raises(UserError, match="holds a password") as told:
            door(url)
        assert "hunter2" not in str(told.value)
    assert not list(tmp_path.iterdir())


def test_places_without_a_password_are_taken():
    for url in (
        "s3://bucket/me@example.org/run",
        "sftp://me@host:22/run",
        "abfs://c@a.net/x",
        "gs://b/token=1/x",
        "/a:b@c",
    ):
        check_no_secret(url, "it")
