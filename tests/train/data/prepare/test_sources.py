"""The table of `megadit prepare`: every source has its command, and every command its sources."""

from megadit.models.shared.cli.verbs import load_function
from megadit.train.data.ingest.command import KINDS
from megadit.train.data.prepare.command import SOURCES
from megadit.train.data.prepare.prior import PURPOSES
from megadit.train.demos.digits import labelled


def test_every_source_is_in_the_table_and_can_be_loaded():
    assert {*KINDS, *PURPOSES, *labelled.SOURCES} <= {*SOURCES}
    assert all(callable(load_function(reference, source)) for source, reference in SOURCES.items())
