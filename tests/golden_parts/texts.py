"""What users read: help, resolved recipes, the configuration of Triton's models, the HTTP interface."""

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from golden_parts.commands import environment, megadit
from golden_parts.names import find, gateway_app, verbs, verbs_main
from golden_parts.videos import make_bundle


def record(work: Path, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
    if is_wanted("help") or is_wanted("recipes"):
        words = [sys.executable, "-m", "golden_parts.texts"]
        yield from json.loads(subprocess.check_output(words, env=environment(), text=True)).items()
    if is_wanted("openapi"):
        text = json.dumps(gateway_app(work).openapi(), indent=1, sort_keys=True)
        yield "openapi", text.splitlines()
    if is_wanted("pbtxt"):
        repository = work / "repository"
        megadit("serve", "build-repository", make_bundle(work), repository, "--images")
        for path in sorted(repository.glob("*/config.pbtxt")):
            yield f"pbtxt/{path.parent.name}", path.read_text().splitlines()


def printed(*words: str) -> list[str]:
    """What `megadit ...` prints, in this process."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        verbs_main()(list(words))
    return out.getvalue().splitlines()


def helps_and_recipes() -> dict[str, list[str]]:
    texts = {"help/megadit": printed("--help")}
    texts |= {f"help/{verb}": printed(*verb.split(), "--help") for verb in verbs()}
    for recipe in sorted(find("train.recipes:RECIPES")):
        texts[f"recipes/{recipe}"] = printed("train", "--recipe", recipe, "--print-config")
    assert all(texts.values()), [name for name, text in texts.items() if not text]
    return texts


if __name__ == "__main__":
    json.dump(helps_and_recipes(), sys.stdout)
