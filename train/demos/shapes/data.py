"""Captioned scenes of one thing or two that move, turn, grow or change colour: "a red star rises over a blue heart".

Things are glyphs of DejaVu Sans, which matplotlib brings along, drawn from their signed distances at any place, size
and angle on 64x64 frames. Of two things the first one acts, the other stands still.

Shapes: B scenes, C colour channels, T/H/W frames, height, width, N shapes.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megadit.train.demos.digits.data import COLOURS

Name = TypeVar("Name", str, str | None)

FRAME_SIZE = 64
NUM_FRAMES = 9
FPS = 8.0

SHAPES = {
    "star": "\u2605",
    "heart": "\u2665",
    "castle": "\u265c",
    "cloud": "\u2601",
    "flower": "\u273f",
    "arrow": "\u2b06",
    "cross": "\u271a",
}
"""Name -> its glyph: of bold outlines, no two alike at any angle."""
SUBJECT = {"pawn": "\u265f"}
"""Shapes outside the data set, for an adapter to learn."""
GLYPHS = SHAPES | SUBJECT
BACKGROUNDS = {
    "at night": ((0.02, 0.02, 0.10), (0.08, 0.08, 0.30)),
    "in a forest": ((0.02, 0.08, 0.03), (0.07, 0.26, 0.08)),
    "in a desert": ((0.12, 0.07, 0.03), (0.34, 0.22, 0.10)),
    "in a cave": ((0.06, 0.06, 0.06), (0.22, 0.22, 0.22)),
}
"""Background in captions -> RGB at the top and at the bottom, 0..1: darker than any thing."""


class Action(NamedTuple):
    """Movement or change of a thing from the first frame to the last."""

    verbs: tuple[str, ...]
    direction: tuple[int, int] = (0, 0)
    """Along (height, width)."""
    degrees: float = 0.0
    """Rotation, clockwise."""
    growth: float = 1.0
    """Size of the last frame over that of the first."""
    share: int = 1
    """Relative frequency in training: what looks different with every shape, or every two colours, takes longer to
    learn."""


ACTIONS = {
    "left": Action(("moves left", "slides left"), direction=(0, -1)),
    "right": Action(("moves right", "slides right"), direction=(0, 1)),
    "up": Action(("rises", "climbs"), direction=(-1, 0)),
    "down": Action(("falls", "sinks"), direction=(1, 0)),
    "turn": Action(("turns", "spins"), degrees=90.0, share=2),
    "grow": Action(("grows", "swells"), growth=1.8),
    "shrink": Action(("shrinks", "dwindles"), growth=1 / 1.8),
    "recolour": Action(("becomes {becomes}", "changes to {becomes}"), share=2),
}
IN_TRAINING = {"clip": tuple(name for name, action in ACTIONS.items() for _ in range(action.share)), "image": (None,)}
"""Kind of sample -> actions that its scenes are drawn from."""


class Relation(NamedTuple):
    """Position of the thing that acts, seen from the other."""

    wordings: tuple[str, ...]
    one: str
    """Phrase in place of its name."""
    direction: tuple[int, int]
    """Along (height, width)."""


RELATIONS = {
    "above": Relation(("above", "over"), "the upper one", (-1, 0)),
    "below": Relation(("below", "under"), "the lower one", (1, 0)),
    "left": Relation(("left of", "to the left of"), "the left one", (0, -1)),
    "right": Relation(("right of", "to the right of"), "the right one", (0, 1)),
}

SIZE, TRAVEL = 26.0, 10.0
"""Pixels of a glyph's longer side, and of the way of one that moves."""
APART = 32.0
"""Pixels between the middles of two things: each looks to the network like one alone that is a token aside."""
JITTER = 1.0
"""A thing is up to this many pixels from its place, along each axis."""
SIZE_JITTER = 0.04
EDGE = 3.0
"""Pixels in which a thing's edge fades: sharper ones are what a small model learns last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """Contents of a clip as its caption describes them; of an image `action` is None."""

    shape: str
    colour: str
    action: str | None = None
    becomes: str | None = None
    """Final colour, of action `recolour`."""
    relation: str | None = None
    """Position relative to the other thing; None without another."""
    other_shape: str | None = None
    other_colour: str | None = None
    background: str = "at night"

    @property
    def num_things(self) -> int:
        return 1 if self.relation is None else 2

    @property
    def is_unseen(self) -> bool:
        """Whether training never sees it: one in ten of (shape, colour, action), and of pairs of shapes."""
        return _is_left_out(self.shape, self.colour, self.action) or (
            self.relation is not None and _is_left_out(self.shape, self.other_shape)
        )


def _is_left_out(*names: str | None) -> bool:
    """True of one combination in ten, told by its hash."""
    return hashlib.blake2b(" ".join(map(str, names)).encode(), digest_size=1).digest()[0] < 26


# --- scenes and captions ------------------------------------------------------------------------------------------


def random_scenes(
    count: int,
    num_things: int,
    generator: torch.Generator,
    *,
    actions: Sequence[str | None] = tuple(ACTIONS),
    unseen: bool = False,
) -> list[Scene]:
    """Scenes drawn evenly, each of `actions` alike, among those that training sees, or among those that it does not."""
    scenes: list[Scene] = []
    while len(scenes) < count:
        scene = _random_scene(num_things, actions, generator)
        if scene.is_unseen == unseen:
            scenes.append(scene)
    return scenes


def _random_scene(num_things: int, actions: Sequence[str | None], generator: torch.Generator) -> Scene:
    draws = iter(torch.rand(8, generator=generator).tolist())

    def one_of(names: Sequence[Name]) -> Name:
        return names[int(next(draws) * len(names))]

    shape, colour = one_of(list(SHAPES)), one_of(list(COLOURS))
    scene = Scene(shape=shape, colour=colour, background=one_of(list(BACKGROUNDS)))
    action = one_of(actions)
    becomes = one_of([name for name in COLOURS if name != colour])
    scene = replace(scene, action=action, becomes=becomes if action == "recolour" else None)
    if num_things == 1:
        return scene
    return replace(
        scene,
        relation=one_of(list(RELATIONS)),
        other_shape=one_of([name for name in SHAPES if name != shape]),
        other_colour=one_of(list(COLOURS)),
    )


def captions(scene: Scene) -> list[str]:
    """Every wording of a scene; the background is left unsaid in half of them."""
    verbs = ("",) if scene.action is None else ACTIONS[scene.action].verbs
    joints = ("",) if scene.relation is None else RELATIONS[scene.relation].wordings
    other = "" if scene.relation is None else f"a {scene.other_colour} {scene.other_shape}"
    parts = product(verbs, joints, ("", scene.background))
    return [
        " ".join(f"a {scene.colour} {scene.shape} {verb.format(becomes=scene.becomes)} {joint} {other} {place}".split())
        for verb, joint, place in parts
    ]


def neutral_caption(scene: Scene, generator: torch.Generator) -> str:
    """Caption without names and colours, for clips with a first frame as conditioning."""
    verbs = ACTIONS[scene.action].verbs
    verb = verbs[int(torch.rand(1, generator=generator) * len(verbs))].format(becomes=scene.becomes)
    return f"{RELATIONS[scene.relation].one if scene.relation else 'it'} {verb}"


def random_captions(scenes: Sequence[Scene], generator: torch.Generator) -> list[str]:
    """One caption each, drawn evenly from its wordings."""
    draws = torch.rand(len(scenes), generator=generator).tolist()
    choices = [captions(scene) for scene in scenes]
    return [choice[int(draw * len(choice))] for choice, draw in zip(choices, draws, strict=True)]


# --- drawing ------------------------------------------------------------------------------------------------------

ATLAS_SIZE = 64
ATLAS_EXTENT = 1.5
"""Side of what a table of distances covers, in glyphs' longer sides."""


@cache
def distances() -> Tensor:
    """Signed distance to the outline of each shape, positive inside, in units of its longer side: [N, I, J]."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont
    from scipy.ndimage import distance_transform_edt

    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    font = ImageFont.truetype(str(fonts / "DejaVuSans.ttf"), 512)
    tables = []
    for glyph in GLYPHS.values():
        left, top, right, bottom = font.getbbox(glyph)
        side = max(right - left, bottom - top)
        canvas = round(ATLAS_EXTENT * side)
        picture = Image.new("L", (canvas, canvas))
        corner = ((canvas - right - left) / 2, (canvas - bottom - top) / 2)
        ImageDraw.Draw(picture).text(corner, glyph, font=font, fill=255)
        inside = np.asarray(picture) > 127
        distance = torch.from_numpy(distance_transform_edt(inside) - distance_transform_edt(~inside)) / side
        tables.append(F.interpolate(distance[None, None].float(), (ATLAS_SIZE, ATLAS_SIZE), mode="area")[0, 0])
    return torch.stack(tables)


def draw_things(shape_B: Tensor, centre_BT2: Tensor, size_BT: Tensor, degrees_BT: Tensor) -> Tensor:
    """Coverage of each pixel by a thing, 0..1, BTHW.

    Args:
        shape_B: places in GLYPHS.
        centre_BT2: (height, width) in pixels from the middle of the frame.
        size_BT: of the longer side, in pixels.
        degrees_BT: clockwise.
    """
    pixel = torch.arange(FRAME_SIZE) - (FRAME_SIZE - 1) / 2
    y_BTH, x_BTW = (pixel - centre_BT2[..., axis, None] for axis in (0, 1))
    turn_BT11 = torch.deg2rad(degrees_BT)[..., None, None]
    cos, sin, y, x = turn_BT11.cos(), turn_BT11.sin(), y_BTH[..., :, None], x_BTW[..., None, :]
    scale_BT11 = 2 / (ATLAS_EXTENT * size_BT[..., None, None])
    grid_BTHW2 = torch.stack([(cos * x + sin * y) * scale_BT11, (cos * y - sin * x) * scale_BT11], dim=-1)
    # one scene's frames under one another: the distances of its shape are looked up once
    distance_B1THW = F.grid_sample(
        distances()[shape_B][:, None], grid_BTHW2.flatten(1, 2), padding_mode="border", align_corners=False
    )
    distance_BTHW = distance_B1THW.view(grid_BTHW2.shape[:-1]) * size_BT[..., None, None]
    return (distance_BTHW / EDGE + 0.5).clamp_(0, 1)


def draw_scenes(scenes: Sequence[Scene], generator: torch.Generator, num_frames: int = NUM_FRAMES) -> Tensor:
    """Clips of these scenes, BCTHW in [-1, 1], each thing about its place and of about its size."""
    progress_T = torch.linspace(-0.5, 0.5, num_frames) if num_frames > 1 else torch.zeros(1)
    video_BCTHW = _backgrounds(scenes, num_frames)
    place_B2, other_place_B2 = _places(scenes, generator)
    size_B2 = SIZE * (1 + SIZE_JITTER * (2 * torch.rand(len(scenes), 2, generator=generator) - 1))
    _paint(video_BCTHW, scenes, place_B2, size_B2[:, 0], progress_T)
    pairs = [row for row, scene in enumerate(scenes) if scene.relation]
    if pairs:
        others = [Scene(shape=scenes[row].other_shape, colour=scenes[row].other_colour) for row in pairs]
        painted_BCTHW = video_BCTHW[pairs]
        _paint(painted_BCTHW, others, other_place_B2[pairs], size_B2[pairs, 1], progress_T)
        video_BCTHW[pairs] = painted_BCTHW
    return video_BCTHW.mul_(2).sub_(1)


def _paint(video_BCTHW: Tensor, scenes: Sequence[Scene], place_B2: Tensor, size_B: Tensor, progress_T: Tensor) -> None:
    """Draws the thing of each scene that acts over a video in 0..1; `place_B2` is the middle of its way."""
    actions = [ACTIONS[scene.action] if scene.action else Action(()) for scene in scenes]
    direction_B2 = TRAVEL * torch.tensor([action.direction for action in actions])
    growth_B1 = torch.tensor([[action.growth] for action in actions])
    covered_BTHW = draw_things(
        torch.tensor([list(GLYPHS).index(scene.shape) for scene in scenes]),
        place_B2[:, None] + progress_T[:, None] * direction_B2[:, None],
        size_B[:, None] * growth_B1**progress_T,
        torch.tensor([[action.degrees] for action in actions]) * progress_T,
    )
    start_BC, end_BC = (
        torch.tensor([COLOURS[name] for name in names])
        for names in ([each.colour for each in scenes], [each.becomes or each.colour for each in scenes])
    )
    colour_BCT = torch.lerp(start_BC[..., None], end_BC[..., None], progress_T + 0.5)
    video_BCTHW += covered_BTHW[:, None] * (colour_BCT[..., None, None] - video_BCTHW)


def _places(scenes: Sequence[Scene], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Middles (height, width) of the way of the thing that acts, and of the other, from the middle of the frame."""
    directions_B2 = (
        torch.tensor([RELATIONS[s.relation].direction if s.relation else (0, 0) for s in scenes]) * APART / 2
    )
    jitter_2B2 = (2 * torch.rand(2, len(scenes), 2, generator=generator) - 1) * JITTER
    return directions_B2 + jitter_2B2[0], -directions_B2 + jitter_2B2[1]


def backgrounds(names: Iterable[str]) -> Tensor:
    """Colours of each row of pixels, 0..1, [B, C, H]."""
    ends_B2C = torch.tensor([BACKGROUNDS[name] for name in names])
    return torch.lerp(ends_B2C[:, 0, :, None], ends_B2C[:, 1, :, None], torch.linspace(0, 1, FRAME_SIZE))


def _backgrounds(scenes: Sequence[Scene], num_frames: int) -> Tensor:
    """BCTHW in 0..1."""
    rows_BCH = backgrounds(scene.background for scene in scenes)
    return rows_BCH[:, :, None, :, None].repeat(1, 1, num_frames, 1, FRAME_SIZE)
