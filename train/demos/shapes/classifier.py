"""Classifier of scenes: number of things in a clip, and shape, colour, place and action of each.

Nothing is trained: things are separated from the background by brightness and from each other by gaps, and classified
by the most similar drawing, at every angle. Its own errors are measured on real clips (`score.json`, `real`).

Shapes: B clips, K things, C colour channels, T/H/W frames, height, width, N shapes, A angles, P pixels of a crop.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megadit.train.demos.digits.data import COLOURS
from megadit.train.demos.shapes.data import (
    ACTIONS,
    BACKGROUNDS,
    FRAME_SIZE,
    GLYPHS,
    RELATIONS,
    backgrounds,
    draw_things,
)

FAINTEST, FULL = 0.36, 0.62
"""Largest channel, 0..1, of a pixel that belongs to no thing, and of one that belongs to one wholly."""
SMALLEST = 24.0
"""Pixels that a thing covers at least."""
LEAST_LIKE = 0.8
"""Correlation with a drawing below which a thing is none of them; real ones have .88 and more after a tokenizer."""
EDGE = 3
"""Columns at a side of a frame that no thing reaches."""
STEP_DEGREES, WIDEST_TURN = 9, 36
"""Between angles of drawings; most that a thing turns from one frame to the next."""
CROP_SIZE, CROP_RADII = 24, 2.6
"""Pixels of a crop's side; its half in radii of the disc that covers as much as the thing."""
FULL_SCALE = {"travel": 10.0, "degrees": 90.0, "growth": float(np.log(1.8))}
"""Least amount of each action in training clips; half of it counts as done."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One thing through a clip, as classified."""

    shape: str | None
    """Name of the shape; None: like no drawing in most frames."""
    colour: str | None
    becomes: str | None
    action: str | None
    """Action; None: it stands still."""
    middle_2: tuple[float, float]
    """Mean place (height, width), pixels."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The things of a clip; empty where frames do not agree how many there are."""

    things: tuple[Seen, ...]

    @property
    def mover(self) -> Seen | None:
        """The one thing that acts, or the only one."""
        if len(self.things) == 1:
            return self.things[0]
        acting = [thing for thing in self.things if thing.action is not None]
        return acting[0] if len(acting) == 1 else None

    @property
    def other(self) -> Seen | None:
        """The other one, which stands still."""
        still = [thing for thing in self.things if thing is not self.mover]
        return still[0] if self.mover is not None and len(still) == 1 else None


def relation(mover: Seen, other: Seen) -> str:
    """Position of `mover` seen from `other`."""
    direction = np.subtract(mover.middle_2, other.middle_2)
    return max(RELATIONS, key=lambda name: float(np.dot(direction, RELATIONS[name].direction)))


def classify(video_BCTHW: Tensor) -> list[Verdict]:
    """Classify each clip (BCTHW in [-1, 1])."""
    return [Verdict(_things(video_CTHW)) for video_CTHW in (video_BCTHW + 1) / 2]


def _things(video_CTHW: Tensor) -> tuple[Seen, ...]:
    cover_THW = ((video_CTHW.amax(0) - FAINTEST) / (FULL - FAINTEST)).clamp(0, 1)
    frames = [_separate(cover_HW) for cover_HW in cover_THW]
    counts = [len(frame) for frame in frames]
    count = max(set(counts), key=counts.count)
    if not count or counts.count(count) <= len(counts) // 2:
        return ()
    whole = [place for place, frame in enumerate(frames) if len(frame) == count]
    tracks = _follow([frames[place] for place in whole])
    return tuple(_see(video_CTHW[:, whole], torch.stack(track), np.array(whole)) for track in tracks)


def _separate(cover_HW: Tensor) -> list[Tensor]:
    """The cover of each thing of a frame, HW; gaps of two pixels part them."""
    from scipy.ndimage import label, maximum_filter

    found_HW, count = label(maximum_filter(cover_HW.numpy() > 0.35, 3))
    parts = [cover_HW * torch.from_numpy(found_HW == number) for number in range(1, count + 1)]
    return [part for part in parts if part.sum() >= SMALLEST]


def _follow(frames: Sequence[list[Tensor]]) -> list[list[Tensor]]:
    """Covers of each thing through frames that all show as many: each goes on with the nearest."""
    tracks = [[cover_HW] for cover_HW in frames[0]]
    for frame in frames[1:]:
        left = list(frame)
        for track in tracks:
            before_2 = _middles(track[-1][None])[0]
            nearest = min(range(len(left)), key=lambda n: float((_middles(left[n][None])[0] - before_2).norm()))
            track.append(left.pop(nearest))
    return tracks


def _middles(cover_BHW: Tensor) -> Tensor:
    """Centre of mass (height, width) in pixels from the middle of the frame, [B, 2]."""
    pixel = torch.arange(FRAME_SIZE) - (FRAME_SIZE - 1) / 2
    mass_B = cover_BHW.sum((1, 2)).clamp_min(1e-6)
    return torch.stack([cover_BHW.sum(2) @ pixel / mass_B, cover_BHW.sum(1) @ pixel / mass_B], dim=1)


def _see(video_CTHW: Tensor, cover_THW: Tensor, time_T: np.ndarray) -> Seen:
    middle_T2 = _middles(cover_THW)
    like_TNA = _likeness(cover_THW, middle_T2)
    best = like_TNA.flatten(2).amax(2).max(1)
    shapes_T = [n if like >= LEAST_LIKE else -1 for n, like in zip(*map(Tensor.tolist, best[::-1]), strict=True)]
    shape = max(set(shapes_T), key=shapes_T.count)
    weight_THW = cover_THW**2
    colours_T = _name_colours((video_CTHW * weight_THW).sum((2, 3)).T / weight_THW.sum((1, 2))[:, None])
    start, end = colours_T[0], colours_T[-1]
    # of the first frame to the last, whatever frames were left out
    span = 8 / (time_T[-1] - time_T[0]) if len(time_T) > 1 else 0.0
    travel_2 = (middle_T2[-1] - middle_T2[0]) * span
    growth = float((cover_THW[-1].sum() / cover_THW[0].sum()).log() / 2) * span
    degrees = _turned(like_TNA[:, shape]) * span if shape >= 0 else 0.0
    return Seen(
        shape=list(GLYPHS)[shape] if shape >= 0 else None,
        colour=start,
        becomes=end if end != start else None,
        action=_name_action(travel_2, degrees, growth, recoloured=end != start),
        middle_2=tuple(middle_T2.mean(0).tolist()),
    )


def _name_action(travel_2: Tensor, degrees: float, growth: float, recoloured: bool) -> str | None:
    """The action of which most was done, None where it is less than half."""
    done = {"recolour": 0.9 * recoloured}
    for name, action in ACTIONS.items():
        if action.direction != (0, 0):
            done[name] = float(travel_2 @ torch.tensor(action.direction, dtype=torch.float32)) / FULL_SCALE["travel"]
        elif action.degrees:
            done[name] = degrees / FULL_SCALE["degrees"]
        elif action.growth != 1:
            done[name] = growth * float(np.sign(np.log(action.growth))) / FULL_SCALE["growth"]
    best = max(done, key=done.__getitem__)
    return best if done[best] >= 0.5 else None


def _name_colours(colour_TC: Tensor) -> list[str]:
    """The nearest named colour of each, both scaled to a largest channel of 1."""
    palette_NC = torch.tensor(list(COLOURS.values()))
    hue_TC, palette_NC = (each / each.amax(1, keepdim=True).clamp_min(1e-6) for each in (colour_TC, palette_NC))
    return [list(COLOURS)[place] for place in torch.cdist(hue_TC, palette_NC).argmin(1).tolist()]


def name_backgrounds(video_BCTHW: Tensor) -> list[str]:
    """Name the background of each clip as in captions, by the columns at either side of all frames."""
    sides_BCTHW = (torch.cat([video_BCTHW[..., :EDGE], video_BCTHW[..., -EDGE:]], dim=-1) + 1) / 2
    rows_BN = torch.cdist(sides_BCTHW.mean((2, 4)).flatten(1), backgrounds(BACKGROUNDS).flatten(1))
    return [list(BACKGROUNDS)[place] for place in rows_BN.argmin(1).tolist()]


# --- likeness -----------------------------------------------------------------------------------------------------


def _likeness(cover_THW: Tensor, middle_T2: Tensor) -> Tensor:
    """Correlation of each frame with each shape at each angle, [T, N, A]."""
    return torch.einsum("tp,nap->tna", _crops(cover_THW, middle_T2), _drawings())


def _crops(cover_BHW: Tensor, middle_B2: Tensor) -> Tensor:
    """Squares around things, as large as they are, of mean 0 and norm 1: [B, P]."""
    half_B = CROP_RADII * (cover_BHW.sum((1, 2)).clamp_min(1.0) / np.pi).sqrt() / (FRAME_SIZE / 2)
    affine_B23 = torch.zeros(len(cover_BHW), 2, 3)
    affine_B23[:, 0, 0] = affine_B23[:, 1, 1] = half_B
    affine_B23[:, :, 2] = middle_B2.flip(1) / (FRAME_SIZE / 2)
    grid = F.affine_grid(affine_B23, [len(cover_BHW), 1, CROP_SIZE, CROP_SIZE], align_corners=False)
    crop_BP = F.grid_sample(cover_BHW[:, None], grid, align_corners=False).flatten(1)
    return F.normalize(crop_BP - crop_BP.mean(1, keepdim=True), dim=1)


@cache
def _drawings() -> Tensor:
    """Crops of every shape at every angle, [N, A, P]."""
    degrees_A = torch.arange(0, 360, STEP_DEGREES, dtype=torch.float32)
    still = torch.ones(len(GLYPHS), len(degrees_A))
    cover_NAHW = draw_things(torch.arange(len(GLYPHS)), torch.zeros(*still.shape, 2), 30 * still, degrees_A * still)
    cover_BHW = F.avg_pool2d(cover_NAHW.flatten(0, 1)[:, None], 3, 1, 1)[:, 0]
    return _crops(cover_BHW, _middles(cover_BHW)).view(*still.shape, -1)


def _turned(like_TA: Tensor) -> float:
    """Degrees clockwise from the first frame to the last: the smoothest way through the likeliest angles.

    Shapes that look alike at several angles are followed from where they are, frame by frame (Viterbi).
    """
    angles = like_TA.shape[1]
    reach = WIDEST_TURN // STEP_DEGREES
    score_A, came = like_TA[0], []
    for like_A in like_TA[1:]:
        # from each angle: -reach..reach steps on
        moved = torch.stack([score_A.roll(step) - 0.004 * abs(step) for step in range(-reach, reach + 1)])
        best = moved.max(0)
        score_A = best.values + like_A
        came.append(best.indices - reach)
    place, steps = int(score_A.argmax()), 0
    for step_A in reversed(came):
        step = int(step_A[place])
        steps, place = steps + step, (place - step) % angles
    return float(steps * STEP_DEGREES)
