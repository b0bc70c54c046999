"""Comparison of the demo's classifier with a ViT of clips, on the same clips of writers that neither has seen.

    python -m megadit.train.demos.digits.compare_classifiers runs/vit_digits_clips

Shapes: B clips, C colour channels, T/H/W frames, height, width.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from megadit.infer.commands.classify import Classifier
from megadit.infer.evaluate.videos import Clip
from megadit.models.bundle import open_any_bundle
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import setting
from megadit.train.demos.clips import as_float, as_uint8
from megadit.train.demos.digits import classifier, score
from megadit.train.demos.digits.data import DIGITS, FPS, Attributes
from megadit.train.demos.digits.samples import DIGITS as DRAWN

ATTRIBUTES = "digit", "colour", "direction"
NUM_TIMED = 48
"""Batch size for the measurement of time per clip."""
NUM_REPEATS = 9

Right = Callable[[Tensor, Sequence[Attributes]], dict[str, Tensor]]
"""(clips uint8 BTHWC, attributes in their captions) -> whether each of `PARTS` is right, bool [B]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareOptions:
    bundle: str = setting(help="bundle of a ViT of clips, or the folder of its run", positional=True, metavar="BUNDLE")
    num_clips: int = setting(
        classifier.NUM_TRAINING_CLIPS, "clips that the demo's classifier is trained on (default: {default})", low=1
    )
    num_steps: int = setting(
        classifier.NUM_TRAINING_STEPS, "training steps of the demo's classifier (default: {default})", low=1
    )


def by_reader(reader: classifier.DigitReader) -> Right:
    """Digit and colour by the majority of frames."""

    def right(video_BTHWC: Tensor, attributes: Sequence[Attributes]) -> dict[str, Tensor]:
        verdicts = classifier.classify(reader, as_float(video_BTHWC.permute(0, 4, 1, 2, 3)))
        return score.by_majority(score.frames_and_clips_right(verdicts, attributes))

    return right


def by_classifier(classifier: Classifier) -> Right:
    """The words of the likeliest class, "red seven left"."""

    def right(video_BTHWC: Tensor, attributes: Sequence[Attributes]) -> dict[str, Tensor]:
        best_B = classifier([Clip(video.numpy(), FPS, "a clip") for video in video_BTHWC]).argmax(1)
        said = [classifier.names[index].split() for index in best_B.tolist()]
        pairs = list(zip(said, attributes, strict=True))
        return {
            "digit": torch.tensor([digit == DIGITS[a.digit] for (_, digit, _), a in pairs]),
            "colour": torch.tensor([colour == a.colour for (colour, _, _), a in pairs]),
            "direction": torch.tensor([direction == a.direction for (_, _, direction), a in pairs]),
        }

    return right


def shares(right: Right, video_BTHWC: Tensor, attributes: Sequence[Attributes]) -> dict[str, float]:
    """Shares of the clips, 0..1, in which each of `PARTS` is right, and `all` of them."""
    found = right(video_BTHWC, attributes)
    found["all"] = torch.stack([found[name] for name in ATTRIBUTES]).all(0)
    return {name: is_right_B.float().mean().item() for name, is_right_B in found.items()}


def seconds_of_a_clip(right: Right, video_BTHWC: Tensor, attributes: Sequence[Attributes]) -> float:
    """The median of `NUM_REPEATS`, after one to warm up."""
    taken = []
    for _ in range(1 + NUM_REPEATS):
        start = time.perf_counter()
        right(video_BTHWC, attributes)
        taken.append((time.perf_counter() - start) / len(attributes))
    return median(taken[1:])


@command(CompareOptions, prog="compare_classifiers", description="Compares two classifiers of clips.")
def main(options: CompareOptions) -> None:
    """Prints the accuracy of both, on clips as drawn and as the demo's latents leave them, and their times."""
    classifiers = {"vit": by_classifier(Classifier(open_any_bundle(options.bundle)))}
    round_trip = classifier.round_trip(DRAWN.fit_tokenizer(0))
    start = time.perf_counter()
    asked = {"num_clips": options.num_clips, "num_steps": options.num_steps, "show_progress": False}
    classifiers["demo"] = by_reader(classifier.train_reader(round_trip, **asked))
    print(f"demo: trained in {time.perf_counter() - start:.1f} s")
    attributes = [each for some in score.scored_attributes() for each in some]
    drawn_BCTHW = score.real_clips(attributes)
    for name, video_BCTHW in {"as drawn": drawn_BCTHW, "round trip": round_trip(drawn_BCTHW)}.items():
        video_BTHWC = as_uint8(video_BCTHW).permute(0, 2, 3, 4, 1).contiguous()
        for of, right in classifiers.items():
            found = shares(right, video_BTHWC, attributes)
            rows = ", ".join(f"{part} {share:.1%}" for part, share in found.items())
            print(f"{of}, {len(attributes)} clips {name}: {rows}")
    for of, right in classifiers.items():
        for count in (1, NUM_TIMED):
            taken = seconds_of_a_clip(right, video_BTHWC[:count], attributes[:count])
            print(f"{of}, {count} at once: {1000 * taken:.2f} ms a clip")


if __name__ == "__main__":
    raise SystemExit(main())
