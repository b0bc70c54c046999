"""`megadit classify`: names what pictures show, by the bundle of a classifier.

    megadit classify vit cat.png dog.jpg
    megadit classify vit pictures/ --labelled --out labels.json    # pictures/CLASS/*.png: also the share that is right

Pictures are cropped to the middle in the network's shape and resized; of a video its middle frames are seen.

Shapes: N pictures, T/H/W frames, height, width, C colours, K classes.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megadit.infer.checkpoints import open_any_bundle
from megadit.infer.evaluate.intervals import wilson
from megadit.infer.evaluate.videos import Clip
from megadit.infer.evaluate.window import Window, cut
from megadit.infer.runtimes.load import EXPORTED, TORCH, open_exported
from megadit.infer.runtimes.torch import find_device
from megadit.infer.video_io import IMAGE_SUFFIXES, VIDEO_SUFFIXES, read_video
from megadit.models.bundle.bundle import Bundle
from megadit.models.shared.command import run_command
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import write_json
from megadit.models.shared.options import read_options
from megadit.models.shared.setting import setting

SUFFIXES = (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassifyOptions:
    bundle: str = setting(help="bundle of a classifier, or the folder of its run", positional=True, metavar="BUNDLE")
    pictures: Sequence[Path] = setting(help="pictures, videos, and folders of them", positional=True, metavar="PICTURE")
    top: int = setting(3, "classes named of each (default: {default})", low=1)
    labelled: bool = setting(False, "the folder of a picture is its class: also tell the share that is right")
    out: Path | None = setting(None, "write all of it here, too", metavar="FILE.json")
    batch_size: int = setting(32, "pictures at once (default: {default})", low=1)
    runtime: str = setting(TORCH, "of the network (default: {default})", choices=(TORCH, *EXPORTED))
    device: str = setting("auto", "auto, cpu, cuda or cuda:N (default: {default})", metavar="NAME")


class Classifier:
    """Pictures to the probabilities of their classes; called alike under every runtime."""

    def __init__(self, bundle: Bundle, *, runtime: str = TORCH, device: torch.device | str = "cpu") -> None:
        """Loads the network.

        Raises:
            UserError: for a bundle of another kind, of a network without classes, or not exported for `runtime`.
        """
        self.config, self.device = bundle.config, torch.device(device)
        self.most: int | None = None
        """Pictures that it takes at once; None: any number."""
        if runtime == TORCH:
            self._network = bundle.load_classifier(self.device)
        else:
            exported = open_exported(bundle, runtime)
            self.most = exported.network("classifier").axes["batch"].max
            self._network = self._exported(EXPORTED[runtime].open(exported, self.device))
        if self.config.num_classes is None:
            raise UserError(f"the network of {bundle.path} was trained without classes: fine-tune it first")
        self.names = tuple(bundle.load_text_encoder().names)
        self._tokenizer = bundle.load_tokenizer()
        size = bundle.defaults
        self.window = Window(
            frames=size.num_frames, height=size.height, width=size.width, fps=size.fps, is_resized=True
        )

    @torch.no_grad()
    def __call__(self, clips: Sequence[Clip]) -> Tensor:
        """Probabilities [N, K], float32 on the CPU.

        Raises:
            UserError: for a video that is shorter than those it was trained on, or of another speed.
        """
        seen_NTHWC = torch.stack([cut(clip, clip.prompt, self.window) for clip in clips])
        video_NCTHW = seen_NTHWC.to(self.device).movedim(-1, 1).float() / 127.5 - 1
        return self._network(self._tokenizer.encode(video_NCTHW)).float().softmax(-1).cpu()

    def _exported(self, networks: Any) -> Any:
        """The graph as the network that it stands for."""
        return lambda x_BCTHW: networks["classifier"]({"x": x_BCTHW}, (len(x_BCTHW), self.config.num_classes))


def main(argv: list[str] | None = None) -> int:
    """Runs `megadit classify`; returns its exit code."""
    return run_command(_run, sys.argv[1:] if argv is None else argv)


def _run(argv: list[str]) -> None:
    options = read_options(ClassifyOptions, argv, prog="megadit classify", description="Names what pictures show.")
    classifier = Classifier(
        open_any_bundle(options.bundle), runtime=options.runtime, device=find_device(options.device)
    )
    paths = list(_pictures(options.pictures))
    labels = [_label(path, classifier.names) for path in paths] if options.labelled else []
    step = min(options.batch_size, classifier.most or options.batch_size)
    parts = [paths[first : first + step] for first in range(0, len(paths), step)]
    found = torch.cat([classifier([_read(path) for path in part]) for part in parts])
    best = [row.topk(min(options.top, len(classifier.names))) for row in found]
    named = [[(classifier.names[i], p) for p, i in zip(*map(Tensor.tolist, row), strict=True)] for row in best]
    rows = [{"picture": str(path), "classes": dict(classes)} for path, classes in zip(paths, named, strict=True)]
    for row in rows:
        print(row["picture"], *(f"{name} {share:.1%}" for name, share in row["classes"].items()), sep="  ")
    result: dict[str, Any] = {"pictures": rows}
    if labels:
        result["accuracy"] = accuracy(found, torch.tensor(labels), options.top)
        for name, (value, low, high) in result["accuracy"].items():
            print(f"{name}: {value:.2%} of {len(paths):,} (95 %: {low:.2%} to {high:.2%})")
    if options.out is not None:
        write_json(options.out, result)


def accuracy(probability_NK: Tensor, class_N: Tensor, top: int) -> dict[str, tuple[float, float, float]]:
    """{"top-1", "top-N": (share of pictures whose class is among the likeliest so many, and its 95 % interval)}."""
    found = {}
    for count in sorted({1, min(top, probability_NK.shape[1])}):
        is_among_N = (probability_NK.topk(count).indices == class_N[:, None]).any(-1)
        share = is_among_N.float().mean().item()
        found[f"top-{count}"] = (share, *wilson(share, len(class_N)))
    return found


def _pictures(paths: Sequence[Path]) -> Iterator[Path]:
    """All files, those of folders in the order of their names.

    Raises:
        UserError: for a path without any.
    """
    for path in paths:
        files = sorted(each for each in path.rglob("*") if each.suffix.lower() in SUFFIXES) if path.is_dir() else [path]
        if not files:
            raise UserError(f"{path} holds no picture; known are {', '.join(SUFFIXES)}")
        yield from files


def _read(path: Path) -> Clip:
    frames_THWC, fps = read_video(path)
    return Clip(np.ascontiguousarray(frames_THWC), fps, str(path))


def _label(path: Path, names: Sequence[str]) -> int:
    """The class that a picture's folder is called after.

    Raises:
        UserError: if the network knows no such class.
    """
    folder = path.parent.name.replace("_", " ").lower()
    for index, synonyms in enumerate(names):
        if folder in (name.strip().lower() for name in synonyms.split(",")):
            return index
    raise UserError(f"{path}: {path.parent.name!r} is not a class of this network; --labelled takes folders of classes")


if __name__ == "__main__":
    raise SystemExit(main())
