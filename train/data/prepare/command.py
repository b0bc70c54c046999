"""`megadit prepare SOURCE OUT`: turns a source of clips into a folder that training reads.

megadit prepare digits runs/digits/dataset
"""

import sys
from collections.abc import Callable
from functools import partial

from megadit.models.shared.cli.command import run_command
from megadit.models.shared.errors import choose_one
from megadit.train.data.ingest import command as ingest
from megadit.train.data.ingest.sources.importers import nemo_command
from megadit.train.data.prepare import drawn, dummy_images, edits, prior, rollouts
from megadit.train.demos.digits import labelled
from megadit.train.demos.digits.samples import DIGITS
from megadit.train.demos.shapes.samples import SHAPES

SOURCES: dict[str, Callable[[list[str]], int]] = {
    **{each.name: partial(drawn.command, each) for each in (DIGITS, SHAPES)},
    **{each.name: partial(labelled.command, each) for each in labelled.SOURCES},
    "dummy_images": dummy_images.command,
    **ingest.commands(),
    "nemo": nemo_command,
    "prior": prior.command,
    "trajectories": prior.trajectories_command,
    "rollouts": rollouts.command,
    "edits": edits.command,
}
"""Source -> its command, called with the arguments after the source's name."""


def main(argv: list[str] | None = None) -> int:
    """Runs `megadit prepare`; returns its exit code."""
    return run_command(_prepare, sys.argv[1:] if argv is None else argv, is_run=True)


def _prepare(argv: list[str]) -> int:
    """Prepare the source that the first argument names.

    Raises:
        UserError: for an unknown source.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: megadit prepare SOURCE OUT ...\n\nsources: {', '.join(SOURCES)}")
        print("\n`megadit prepare SOURCE --help` describes one of them.")
        return 0
    source, *rest = argv
    return SOURCES[choose_one(source, SOURCES, f"unknown source {source!r}")](rest)


if __name__ == "__main__":
    raise SystemExit(main())
