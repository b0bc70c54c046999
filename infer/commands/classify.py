"""`megadit classify`: classifies pictures with a ViT, or with a CLIP model and any labels.

    megadit classify vit cat.png dog.jpg
    megadit classify vit pictures/ --labelled --out labels.json    # pictures/CLASS/*.png: also the accuracy
    megadit classify clip cat.png --labels "a cat" "a dog"         # CLIP: any labels

Pictures are centre-cropped to the network's aspect ratio and resized; of a video, the middle frames are used.

Shapes: N pictures, T/H/W frames, height, width, C colours, K classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megadit.infer.evaluate.metrics.intervals import wilson
from megadit.infer.evaluate.videos import Clip
from megadit.infer.matching import USUAL_PROMPTS, Matcher
from megadit.infer.pictures import Sight, batches_of_pictures, picture_files
from megadit.infer.runtimes.load import EXPORTED, TORCH, open_exported
from megadit.infer.runtimes.torch import use_device
from megadit.models.bundle import Bundle, open_any_bundle
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import write_json


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassifyOptions:
    bundle: str = setting(help="bundle of a classifier, or the folder of its run", positional=True, metavar="BUNDLE")
    pictures: Sequence[Path] = setting(help="pictures, videos, and folders of them", positional=True, metavar="PICTURE")
    top: int = setting(3, "classes to list for each picture (default: {default})", low=1)
    labels: Sequence[str] | None = setting(None, "candidate labels, for the bundle of a CLIP model", metavar="LABEL")
    prompts: Sequence[str] = setting(
        USUAL_PROMPTS,
        "prompt templates, with {} for the label; their features are averaged (default: {default})",
        metavar="PROMPT",
    )
    labelled: bool = setting(False, "use the name of a picture's folder as its class, and report the accuracy")
    out: Path | None = setting(None, "also write all results to this file", metavar="FILE.json")
    batch_size: int = setting(32, "pictures at once (default: {default})", low=1)
    runtime: str = setting(TORCH, "runtime of the network (default: {default})", choices=(TORCH, *EXPORTED))
    device: str = setting("auto", "auto, cpu, cuda or cuda:N (default: {default})", metavar="NAME")


class Classifier:
    """Maps pictures to class probabilities; the same interface for every runtime."""

    def __init__(
        self,
        bundle: Bundle,
        *,
        labels: Sequence[str] | None = None,
        prompts: Sequence[str] = USUAL_PROMPTS,
        runtime: str = TORCH,
        device: torch.device | str = "cpu",
    ) -> None:
        """Loads the network; `labels` and `prompts` are for a CLIP model.

        Raises:
            UserError: for a bundle of another kind, without classes, or not exported for `runtime`.
        """
        self.most: int | None = None
        """Most pictures in one call; None: any number."""
        if bundle.kind == "clip":
            self._of_labels(Matcher(bundle, runtime=runtime, device=device), labels, prompts)
            return
        if labels is not None:
            raise UserError(f"{bundle.path} has its own classes: leave out --labels")
        self.config, device = bundle.config, torch.device(device)
        if runtime == TORCH:
            network = bundle.load_classifier(device)
        else:
            exported = open_exported(bundle, runtime)
            self.most = exported.network("classifier").axes["batch"].max
            network = self._exported(EXPORTED[runtime].open(exported, device))
        if self.config.num_classes is None:
            raise UserError(f"the network of {bundle.path} was trained without classes: fine-tune it first")
        self.names = tuple(bundle.load_text_encoder().names)
        see = Sight(bundle, device)
        self.window = see.window
        self._logits = lambda clips: network(see(clips))

    @torch.no_grad()
    def __call__(self, clips: Sequence[Clip]) -> Tensor:
        """Probabilities [N, K], float32 on the CPU; raises as `Sight`."""
        return self._logits(clips).float().softmax(-1).cpu()

    def _of_labels(self, matcher: Matcher, labels: Sequence[str] | None, prompts: Sequence[str]) -> None:
        """Classify by the similarity to texts of the labels."""
        if not labels:
            raise UserError("a CLIP model has no classes: give --labels")
        if not all("{}" in prompt for prompt in prompts):
            raise UserError(f"--prompts {' '.join(map(repr, prompts))}: each needs {{}} for the label")
        self.names, self.most = tuple(labels), matcher.most
        labels_KE = matcher.labels(self.names, prompts)
        self._logits = lambda clips: matcher.scale * matcher.pictures(clips) @ labels_KE.T

    def _exported(self, networks: Any) -> Any:
        """The exported graph as a function of latents."""
        return lambda x_BCTHW: networks["classifier"]({"x": x_BCTHW}, (len(x_BCTHW), self.config.num_classes))


@command(ClassifyOptions, prog="megadit classify", description="Classifies images.")
def main(options: ClassifyOptions) -> None:
    """Runs `megadit classify`; returns its exit code."""
    classifier = Classifier(
        open_any_bundle(options.bundle),
        labels=options.labels,
        prompts=options.prompts,
        runtime=options.runtime,
        device=use_device(options.device),
    )
    paths = list(picture_files(options.pictures))
    labels = [_label(path, classifier.names) for path in paths] if options.labelled else []
    batches = batches_of_pictures(paths, options.batch_size, classifier.most)
    found = torch.cat([classifier(clips) for clips in batches])
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
    """Accuracy, {"top-1", "top-N": (fraction of pictures whose class is among the top 1 or N, its 95 % interval)}."""
    found = {}
    for count in sorted({1, min(top, probability_NK.shape[1])}):
        is_among_N = (probability_NK.topk(count).indices == class_N[:, None]).any(-1)
        share = is_among_N.float().mean().item()
        found[f"top-{count}"] = (share, *wilson(share, len(class_N)))
    return found


def _label(path: Path, names: Sequence[str]) -> int:
    """Class of a picture, by the name of its folder.

    Raises:
        UserError: if the network has no such class.
    """
    folder = path.parent.name.replace("_", " ").lower()
    for index, synonyms in enumerate(names):
        if folder in (name.strip().lower() for name in synonyms.split(",")):
            return index
    raise UserError(f"{path}: {path.parent.name!r} is not a class of this network; --labelled needs folders of classes")
