"""The table of `megadit prepare`: every source has its command, and every command its sources."""

from megadit.models.shared.cli.verbs import load_function
from megadit.train.data.ingest.command import KINDS
from megadit.train.data.prepare.command import GROUPS, SOURCES, main
from megadit.train.data.prepare.prior import PURPOSES
from megadit.train.demos.digits import labelled


def test_every_source_is_in_the_table_and_can_be_loaded():
    assert {*KINDS, *PURPOSES, *labelled.SOURCES} <= {*SOURCES}
    assert all(callable(load_function(reference, source)) for source, reference in SOURCES.items())


def test_help_lists_every_source_under_its_title(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    for title, sources in GROUPS.items():
        assert f"\n{title}:\n  {', '.join(sources)}\n" in said
    assert sum(map(len, GROUPS.values())) == len(SOURCES), "a source stands in one group"
