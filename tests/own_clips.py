"""A folder as somebody has it who comes with clips of their own: what they recorded, downloaded and drew, all mixed.

Shapes that move, 72 to 96 pixels, in every kind of file; what is transparent, what is there twice, what does not move
and what is broken among them.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from megadit.infer.media.video_io import write_video

FPS = 8
NUM_FRAMES = 20
COLOURS = {"red": (220, 40, 40), "blue": (40, 70, 220), "yellow": (240, 210, 40)}
SHAPES = ("ball", "box")
MOVES = {"left": (-2.0, 0.0), "right": (2.0, 0.0), "up": (0.0, -2.0), "down": (0.0, 2.0)}
GROUNDS = {"on grass": (70, 130, 60), "at night": (20, 20, 50), "": (200, 200, 205)}
SUFFIXES = (".mp4", ".gif", ".webp", ".apng")


def write_own_clips(folder: Path) -> dict[str, str]:
    """Name -> caption of the clips in it that a model can learn from: one of each colour, shape and direction."""
    folder.mkdir(parents=True)
    captions = {}
    for number, (colour, shape, move) in enumerate(product(COLOURS, SHAPES, MOVES)):
        where, ground = list(GROUNDS.items())[number % len(GROUNDS)]
        frames = drawn(shape, COLOURS[colour], MOVES[move], side=72 + 8 * (number % 4), seed=number)
        name = f"{number:02d}{SUFFIXES[number % len(SUFFIXES)]}"
        captions[name] = f"a {colour} {shape} moving {move} {where}".strip()
        _write(folder / name, frames, ground, captions[name])
    frames = drawn("ball", COLOURS["red"], MOVES["left"], side=72, seed=0)
    for name, noise in (("00 (copy).mp4", 0), ("00 again.mp4", 3)):  # the first one once more, and nearly so
        _write(folder / name, _noisy(frames, noise), GROUNDS["on grass"], captions["00.mp4"])
    for number, (move, suffix) in enumerate(zip(MOVES, (".webp", ".apng", ".gif"), strict=False)):
        name = f"sticker {number}{suffix}"
        captions[name] = f"a green box moving {move}"
        _write(folder / name, drawn("box", (30, 180, 60), MOVES[move], side=64, seed=7), None, captions[name])
    _write(folder / "still.mp4", frames[:1].repeat(NUM_FRAMES, 0), GROUNDS["at night"], "a red ball")
    (folder / "broken.mp4").write_bytes((folder / "04.mp4").read_bytes()[:400])
    (folder / "broken.txt").write_text("a blue ball")
    (folder / "Notes about these.docx").write_bytes(b"PK")
    return captions


def drawn(shape: str, colour: tuple, move: tuple[float, float], *, side: int, seed: int) -> np.ndarray:
    """RGBA, THWC: the shape crosses the middle, on nothing."""
    draw_from = np.random.default_rng(seed)
    radius, middle = side * draw_from.uniform(0.16, 0.24), side / 2 + draw_from.uniform(-6, 6, 2)
    frames = []
    for time in np.arange(NUM_FRAMES) - NUM_FRAMES / 2:
        picture = Image.new("RGBA", (4 * side, 4 * side))
        (x, y), r = 4 * (middle + time * np.array(move) * side / 96), 4 * radius
        paint = ImageDraw.Draw(picture).ellipse if shape == "ball" else ImageDraw.Draw(picture).rectangle
        paint((x - r, y - r, x + r, y + r), fill=(*colour, 255))
        frames.append(np.asarray(picture.resize((side, side), Image.Resampling.BOX)))
    return np.stack(frames)


def _noisy(frames: np.ndarray, amount: int) -> np.ndarray:
    noise = np.random.default_rng(1).integers(-amount, amount + 1, frames.shape)
    return (frames + noise * (frames[..., 3:] > 0)).clip(0, 255).astype(np.uint8)


def _write(path: Path, frames: np.ndarray, ground: tuple | None, caption: str) -> None:
    """The clip on a ground of one colour (None: transparent) that grows darker below, and its caption beside it."""
    path.with_suffix(".txt").write_text(caption + "\n")
    if ground is not None:
        shade = np.linspace(1.0, 0.6, frames.shape[1])[:, None, None] * np.array(ground)
        share = frames[..., 3:] / 255
        frames = (share * frames[..., :3] + (1 - share) * shade).astype(np.uint8)
    if path.suffix == ".mp4":
        write_video(path, frames, FPS)
    else:
        _animate(path, [Image.fromarray(frame) for frame in frames])


def _animate(path: Path, pictures: Sequence[Image.Image]) -> None:
    options = {".gif": {"disposal": 2}, ".webp": {"lossless": True}}.get(path.suffix, {})
    duration = 1000 // FPS
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=duration, loop=0, **options)
