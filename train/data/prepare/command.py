"""`megadit prepare SOURCE OUT`: turns a source of clips into a folder that training reads.

megadit prepare digits runs/digits/dataset
"""

from functools import partial

from megadit.models.shared.cli.command import entry_point
from megadit.models.shared.cli.verbs import load_function
from megadit.models.shared.errors import choose_one

_INGESTED = "videos", "images", "webdataset", "hf", "butterfly"
_IMPORTED = "nemo", "bridge", "automodel"
_LABELLED = "digit_classes", "digit_captions", "digit_clips", "digit_images", "digit_images_64"
GROUPS: dict[str, dict[str, str]] = {
    "clips and images": dict.fromkeys(_INGESTED, "megadit.train.data.ingest.command:prepare_command"),
    "pairs of them": dict.fromkeys(("edits", "preferences"), "megadit.train.data.prepare.pairs:command"),
    "data sets of NeMo and DFM, Megatron-Bridge, AutoModel": dict.fromkeys(
        _IMPORTED, "megadit.train.data.ingest.sources.importers:command"
    ),
    "a model's own videos: for prior preservation, distillation, rewards": {
        "prior": "megadit.train.data.prepare.prior:command",
        "trajectories": "megadit.train.data.prepare.prior:command",
        "rollouts": "megadit.train.data.prepare.rollouts:command",
    },
    "built in, for demos and tests": {
        "digits": "megadit.train.demos.digits.samples:command",
        **dict.fromkeys(_LABELLED, "megadit.train.demos.digits.labelled:command"),
        "shapes": "megadit.train.demos.shapes.samples:command",
        "dummy_images": "megadit.train.data.prepare.dummy_images:command",
    },
}
"""Title in the help -> source -> module:function, called with the source and the arguments after it."""
SOURCES = {source: place for group in GROUPS.values() for source, place in group.items()}


@partial(entry_point, is_run=True)
def main(argv: list[str]) -> int:
    """Prepare the source that the first argument names.

    Raises:
        UserError: for an unknown source.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: megadit prepare SOURCE ...\n\nTurns clips or images into a data set for training. Sources:\n")
        for title, sources in GROUPS.items():
            print(f"{title}:\n  {', '.join(sources)}\n")
        print("`megadit prepare SOURCE --help` lists the options of one.")
        return 0
    source, *rest = argv
    choose_one(source, SOURCES, f"unknown source {source!r}")
    return load_function(SOURCES[source], f"prepare {source}")(source, rest)


if __name__ == "__main__":
    raise SystemExit(main())
