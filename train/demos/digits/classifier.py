"""Classifier of clips of moving digits: digit and colour of each frame, and direction of the clip.

A small convolutional network, trained on real clips of the training glyphs, reads digits. Colour and direction are
measured: mean colour of the strokes, and motion of their centre of mass.

Shapes: B clips or frames, C colour channels, T/H/W frames, height, width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from megadit.infer.evaluate.extractors.digits import CROP_SIZE, DigitReader, centred_crops, centres_of_mass, strokes
from megadit.infer.evaluate.extractors.files import KIND
from megadit.models.machine import one_thread
from megadit.models.shared.files import atomic_path
from megadit.models.shared.progress import Progress
from megadit.models.tokenizers import VideoTokenizer
from megadit.train.demos.digits.data import COLOURS, DIGITS, DIRECTIONS, Attributes, draw_clips, random_attributes

FILE = "classifier.safetensors"
"""File name of the classifier in the folder of a demo."""
NONE = -1
"""The verdict where a frame shows no ink, a colour that has no name here, or a clip that goes nowhere."""

NUM_TRAINING_CLIPS = 4000
NUM_TRAINING_STEPS = 700
BATCH_SIZE = 128

FAINTEST_INK = 0.3
"""A frame whose brightest pixel is darker than this (0..1) shows nothing."""
FARTHEST_COLOUR = 0.35
"""Distance in RGB, both scaled to a largest channel of 1, beyond which a colour has no name. White to yellow is 0.8."""
SHORTEST_TRAVEL = 2.0
"""Pixels from the first frame to the last; slow digits travel 4.8."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Contents of clips as classified: indices into DIGITS, COLOURS and DIRECTIONS, or NONE."""

    digit_BT: Tensor
    colour_BT: Tensor
    direction_B: Tensor


def _random_handwriting(count: int, generator: torch.Generator) -> Tensor:
    """Linear maps [B, 2, 2] near the identity: a slant, a turn, a stretch, as between writers."""
    turn_B, slant_B = 0.12 * torch.randn(2, count, generator=generator)
    stretch_B2 = (0.08 * torch.randn(count, 2, generator=generator)).exp()
    rotation = torch.stack([turn_B.cos(), -turn_B.sin(), turn_B.sin(), turn_B.cos()], dim=1).reshape(-1, 2, 2)
    shear = torch.stack([stretch_B2[:, 0], slant_B, torch.zeros(count), stretch_B2[:, 1]], dim=1).reshape(-1, 2, 2)
    return rotation @ shear


def train_reader(
    round_trip: Callable[[Tensor], Tensor],
    *,
    seed: int = 0,
    num_clips: int = NUM_TRAINING_CLIPS,
    num_steps: int = NUM_TRAINING_STEPS,
    draw_other: Callable[[Sequence[Attributes], torch.Generator], Tensor] | None = None,
    show_progress: bool = True,
) -> DigitReader:
    """Trains the network on frames of real clips of training glyphs.

    Args:
        round_trip: encodes and decodes clips (BCTHW in [-1, 1]) as generated ones are decoded, so that the classifier
            reads digits and not the traces of compression. Half of the clips go through it.
        draw_other: draws clips (BCTHW) of a shape that is no digit, in the colours and directions of attributes: one
            more class, of one clip in eleven.
    """
    generator = torch.Generator().manual_seed(seed)
    attributes = random_attributes(num_clips, images=False, generator=generator)
    clips = draw_clips(attributes, "train", generator)
    digit_B = torch.tensor([a.digit for a in attributes])
    if draw_other is not None:
        others = slice(None, None, len(DIGITS) + 1)
        clips[others], digit_B[others] = draw_other(attributes[others], generator), len(DIGITS)
    clips[num_clips // 2 :] = round_trip(clips[num_clips // 2 :])
    stroke_BTHW = strokes(clips)
    with torch.random.fork_rng(devices=[]), one_thread():  # crops of 16x16 are too small to share
        torch.manual_seed(seed)  # the initial weights and dropout, which take no generator
        reader = DigitReader(len(DIGITS) + (draw_other is not None)).train()
        _fit(reader, stroke_BTHW, digit_B, num_steps, generator, show_progress)
    return reader.eval().requires_grad_(False)


def _fit(
    reader: DigitReader,
    stroke_BTHW: Tensor,
    digit_B: Tensor,
    num_steps: int,
    generator: torch.Generator,
    show_progress: bool,
) -> None:
    optimizer = torch.optim.AdamW(reader.parameters(), lr=5e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=num_steps)
    with Progress(num_steps, "training the classifier", enabled=show_progress) as bar:
        for _ in range(num_steps):
            clip = torch.randint(len(digit_B), (BATCH_SIZE,), generator=generator)
            frame = torch.randint(stroke_BTHW.shape[1], (BATCH_SIZE,), generator=generator)
            shift_B2 = torch.randn(BATCH_SIZE, 2, generator=generator)
            crop = centred_crops(stroke_BTHW[clip, frame], _random_handwriting(BATCH_SIZE, generator), shift_B2)
            loss = F.cross_entropy(reader(crop), digit_B[clip], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            bar.advance(1, loss=loss.item())


def round_trip(tokenizer: VideoTokenizer) -> Callable[[Tensor], Tensor]:
    """Encodes and decodes clips (BCTHW in [-1, 1]), a few at a time."""
    return lambda video_BCTHW: torch.cat([tokenizer.decode(tokenizer.encode(part)) for part in video_BCTHW.split(250)])


def load_or_train_reader(path: Path, round_trip: Callable[[Tensor], Tensor], fingerprint: str) -> DigitReader:
    """The classifier in a safetensors file; trained anew if it was trained on another tokenizer's clips."""
    recipe = f"{fingerprint} clips={NUM_TRAINING_CLIPS} steps={NUM_TRAINING_STEPS} crop={CROP_SIZE}"
    if path.exists():
        with safe_open(path, framework="pt") as stored:
            about = stored.metadata() or {}
        if about.get("recipe") == recipe and KIND in about:
            return load_reader(path)
    reader = train_reader(round_trip)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        save_file(reader.state_dict(), temporary, metadata={"recipe": recipe, KIND: "digits"})
    return reader


def classifier_file(bundle: Path, out: Path, tokenizer: VideoTokenizer) -> Path:
    """Path of the classifier in the folder of a bundle; or of one trained for its tokenizer, in `out`."""
    if (found := bundle.parent / FILE).exists():
        return found
    load_or_train_reader(out / FILE, round_trip(tokenizer), tokenizer.fingerprint())
    return out / FILE


def load_reader(path: Path) -> DigitReader:
    """The classifier's network in a safetensors file."""
    reader = DigitReader().eval().requires_grad_(False)
    reader.load_state_dict(load_file(path))
    return reader


def classify(reader: DigitReader, video_BCTHW: Tensor) -> Verdicts:
    """Classify each clip (BCTHW in [-1, 1])."""
    stroke_BTHW = strokes(video_BCTHW)
    return Verdicts(
        digit_BT=_read_digits(reader, stroke_BTHW),
        colour_BT=_name_colours(video_BCTHW, stroke_BTHW),
        direction_B=_name_directions(stroke_BTHW),
    )


def _read_digits(reader: DigitReader, stroke_BTHW: Tensor) -> Tensor:
    with torch.inference_mode():
        digit_BT = reader(centred_crops(stroke_BTHW.flatten(0, 1))).argmax(1).reshape(stroke_BTHW.shape[:2])
    return torch.where(_shows_ink(stroke_BTHW), digit_BT, NONE)


def _shows_ink(stroke_BTHW: Tensor) -> Tensor:
    return stroke_BTHW.amax((2, 3)) >= FAINTEST_INK


def _name_colours(video_BCTHW: Tensor, stroke_BTHW: Tensor) -> Tensor:
    """The nearest named colour to the mean colour of the strokes; squared weights keep soft edges out of it."""
    weight_B1THW = stroke_BTHW[:, None] ** 2
    mean_BTC = ((video_BCTHW + 1) / 2 * weight_B1THW).sum((3, 4)).mT / weight_B1THW.sum((3, 4)).mT.clamp_min(1e-6)
    palette_NC = torch.tensor(list(COLOURS.values()))
    hue_BTC = mean_BTC / mean_BTC.amax(2, keepdim=True).clamp_min(1e-6)
    distance_BTN = torch.cdist(hue_BTC, palette_NC / palette_NC.amax(1, keepdim=True))
    nearest = distance_BTN.min(2)
    is_named_BT = (nearest.values <= FARTHEST_COLOUR) & _shows_ink(stroke_BTHW)
    return torch.where(is_named_BT, nearest.indices, NONE)


def _name_directions(stroke_BTHW: Tensor) -> Tensor:
    """The direction nearest to the straight line (least squares) through the centres of mass.

    NONE if the clip is shorter than two frames, travels too little, or strays across by more than half of its way.
    """
    num_clips, num_frames = stroke_BTHW.shape[:2]
    if num_frames < 2:
        return torch.full((num_clips,), NONE)
    centre_BT2 = centres_of_mass(stroke_BTHW.flatten(0, 1)).reshape(num_clips, num_frames, 2)
    time_T = torch.arange(num_frames) - (num_frames - 1) / 2
    travel_B2 = torch.einsum("t,bti->bi", time_T, centre_BT2) / (time_T**2).sum() * (num_frames - 1)
    along_BD = travel_B2 @ torch.tensor(list(DIRECTIONS.values()), dtype=torch.float32).T
    best = along_BD.max(1)
    across_B = travel_B2.abs().amin(1)
    is_clear_B = (best.values >= SHORTEST_TRAVEL) & (across_B <= best.values / 2)
    return torch.where(is_clear_B, best.indices, NONE)
