"""`megadit similarity`: scores image-text similarity with the bundle of a CLIP model.

    megadit similarity clip cat.png "a cat" "a dog"           # the similarity of each text
    megadit similarity clip pictures/ "a cat"                 # all pictures in a folder
    megadit similarity clip pictures/ --out recall.json       # cat.png with cat.txt next to it: retrieval recall

Without texts, each picture's own text file is read, and recall at 1, 5 and 10 is reported in both directions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megadit.infer.matching import Matcher, recall
from megadit.infer.pictures import batches_of_pictures, picture_files
from megadit.infer.runtimes.load import EXPORTED, TORCH
from megadit.infer.runtimes.torch import use_device
from megadit.models.bundle import open_any_bundle
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import write_json
from megadit.models.shared.text_encoding import decoded

COUNTS = (1, 5, 10)
MOST_TEXT = 1 << 16
"""Most bytes of a picture's text file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimilarityOptions:
    bundle: str = setting(help="bundle of a CLIP model, or the folder of its run", positional=True, metavar="BUNDLE")
    picture: Path = setting(help="a picture, a video, or a folder of them", positional=True, metavar="PICTURE")
    texts: Sequence[str] = setting(
        (), "texts to score (default: the pictures' text files)", positional=True, metavar="TEXT"
    )
    out: Path | None = setting(None, "also write all results to this file", metavar="FILE.json")
    batch_size: int = setting(32, "pictures at once (default: {default})", low=1)
    runtime: str = setting(TORCH, "runtime of the network (default: {default})", choices=(TORCH, *EXPORTED))
    device: str = setting("auto", "auto, cpu, cuda or cuda:N (default: {default})", metavar="NAME")


@command(SimilarityOptions, prog="megadit similarity", description="Scores image-text similarity.")
def main(options: SimilarityOptions) -> None:
    """Runs `megadit similarity`; returns its exit code."""
    matcher = Matcher(open_any_bundle(options.bundle), runtime=options.runtime, device=use_device(options.device))
    paths = list(picture_files([options.picture]))
    own = [] if options.texts else [_text_of(path) for path in paths]
    texts = list(options.texts or dict.fromkeys(own))
    batches = batches_of_pictures(paths, options.batch_size, matcher.most)
    pictures_NE = torch.cat([matcher.pictures(clips) for clips in batches])
    similarity_NJ = pictures_NE @ matcher.texts(texts).T
    result = _recall(similarity_NJ, own, texts) if own else _scores(similarity_NJ, paths, texts)
    if options.out is not None:
        write_json(options.out, result)


def _scores(similarity_NJ: Tensor, paths: Sequence[Path], texts: Sequence[str]) -> dict[str, Any]:
    """Similarities, -1..1, printed with the best text first."""
    rows = [dict(zip(texts, row, strict=True)) for row in similarity_NJ.tolist()]
    for path, row in zip(paths, rows, strict=True):
        print(path, *(f"{value:.3f} {text}" for text, value in sorted(row.items(), key=lambda x: -x[1])), sep="  ")
    return {"pictures": [{"picture": str(path), "texts": row} for path, row in zip(paths, rows, strict=True)]}


def _recall(similarity_NJ: Tensor, own: Sequence[str], texts: Sequence[str]) -> dict[str, Any]:
    place = {text: index for index, text in enumerate(texts)}
    own_NJ = F.one_hot(torch.tensor([place[mine] for mine in own]), len(texts)).bool()
    found = recall(similarity_NJ, own_NJ, COUNTS)
    for name, (of_pictures, of_texts) in found.items():
        print(f"{name}: {of_pictures:.2%} of {len(own):,} pictures, {of_texts:.2%} of {len(texts):,} texts")
    return found


def _text_of(path: Path) -> str:
    """The text of a picture, from the .txt file of its name.

    Raises:
        UserError: if there is none.
    """
    text_file = path.with_suffix(".txt")
    try:
        if text_file.stat().st_size <= MOST_TEXT:
            return decoded(text_file.read_bytes()).strip()
    except OSError:
        pass
    except ValueError as error:
        raise UserError(f"{text_file} cannot be read: {error}") from None
    raise UserError(f"{text_file} holds no text of {path.name}: give texts, or put a .txt file next to each picture")
