"""`megadit train` under DFM's name: `python -m megadit.train.pretrain_dit_model`.

The recipe is `dit_pretrain` if neither the command line nor the --config-file names one.
"""

import sys

from megadit.models.shared.errors import UserError
from megadit.train.__main__ import main as train
from megadit.train.config.load import named_recipe

RECIPE = "dit_pretrain"


def main(argv: list[str] | None = None) -> int:
    """Train; return 0, or 2 after printing an error of the command line."""
    argv = sys.argv[1:] if argv is None else argv
    return train(argv if _names_recipe(argv) else ["--recipe", RECIPE, *argv])


def _names_recipe(argv: list[str]) -> bool:
    options = [argument.partition("=")[0] for argument in argv]
    if "--recipe" in options or "--factory" in options:
        return True
    if "--config-file" not in options:
        return False
    position = options.index("--config-file")
    file = argv[position].partition("=")[2] or "".join(argv[position + 1 : position + 2])
    try:
        return named_recipe(file) is not None
    except UserError:
        return True  # the command reports what is wrong with the file


if __name__ == "__main__":
    raise SystemExit(main())
