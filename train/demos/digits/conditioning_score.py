"""Scores of conditional generation of digits: fidelity to conditioning frames, continuation, and edits.

Shapes: B clips, C colour channels, T/H/W frames, height, width.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megadit.infer.conditioning.items import ConditioningItem, Media
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.pipeline.windows import stream_windows
from megadit.train.demos.clips import as_float, pixels
from megadit.train.demos.digits import data as digits
from megadit.train.demos.digits.classifier import DigitReader, Verdicts, centres_of_mass, classify, strokes
from megadit.train.demos.digits.conditioning_data import INSTRUCTIONS, change, draw_edit_pairs, neutral_caption
from megadit.train.demos.digits.data import Attributes, load_glyphs
from megadit.train.demos.digits.score import by_majority, frames_and_clips_right, heldout_captions, real_clips, score

BATCH = 108
GUIDANCE = 2.0
"""Guidance scale with conditioning, lower than for text alone."""
LONG, BACK = 65, {"left": "right", "right": "left", "up": "down", "down": "up"}
"""Frames of a continuation, and where a digit goes in the next window, so that it stays in view."""
MIDDLE = digits.FRAME_SIZE // 2


def generate(pipeline: TextToVideo, prompts: Sequence[str], conditioning: Sequence[Media], **settings) -> Tensor:
    """Clips, BCTHW in [-1, 1], of the seeds 0, 1, ..."""
    settings = {"guidance": GUIDANCE} | settings
    seeds = list(range(len(prompts)))
    results = pipeline(list(prompts), seeds=seeds, conditioning=list(conditioning), batch_size=BATCH, **settings)
    return video_of([result.video for result in results])


def video_of(videos: Sequence[np.ndarray]) -> Tensor:
    """BCTHW in [-1, 1] of uint8 THWC."""
    return as_float(torch.from_numpy(np.stack(videos)).permute(0, 4, 1, 2, 3))


def centred_starts(attributes: Sequence[Attributes], seed: int = 0) -> Tensor:
    """Real clips, BCTHW in [-1, 1], whose first frame is in the middle, so that it does not give the direction away."""
    generator = torch.Generator().manual_seed(seed)
    glyphs = load_glyphs("heldout")
    ink = torch.stack(
        [
            glyphs.ink_BIJ[members[int(torch.randint(len(members), (1,), generator=generator))]]
            for members in ((glyphs.digit_B == each.digit).nonzero()[:, 0] for each in attributes)
        ]
    )
    steps = torch.tensor([digits._step(each) for each in attributes])
    return digits.render_clips(ink, attributes, (digits.NUM_FRAMES - 1) / 2 * steps, digits.NUM_FRAMES)


# ------------------------------------------------------------------------------------------------------------ scores


def after_first(reader: DigitReader, video_BCTHW: Tensor, attributes: Sequence[Attributes]) -> dict[str, float]:
    """Shares of clips in which what follows the first frame shows the attributes.

    `digit` and `colour` by the majority of the later frames; `every_frame`: the digit in each of them.
    """
    verdicts = classify(reader, video_BCTHW)
    later = Verdicts(verdicts.digit_BT[:, 1:], verdicts.colour_BT[:, 1:], verdicts.direction_B)
    right = frames_and_clips_right(later, attributes)
    most = by_majority(right)
    found = {"digit": most["digit"], "every_frame": right["digit"].all(1), **most}
    return {name: round(values.float().mean().item(), 4) for name, values in found.items()}


def first_frame(
    pipeline: TextToVideo, reader: DigitReader, attributes: Sequence[Attributes], clips: Tensor, **settings
) -> dict:
    """Score clips from the first frame of real clips, BCTHW, and captions that name neither digit nor colour."""
    return after_first(reader, make_from_first(pipeline, attributes, clips, **settings), attributes)


def make_from_first(pipeline: TextToVideo, attributes: Sequence[Attributes], clips: Tensor, **settings) -> Tensor:
    """Clips, BCTHW, of the same attributes from the first frames of `clips`, BCTHW."""
    conditioning = [(ConditioningItem(frames=frames[:1], kind="first_frame"),) for frames in pixels(clips)]
    return generate(pipeline, neutral_captions(attributes), conditioning, **settings)


def neutral_captions(attributes: Sequence[Attributes], seed: int = 0) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    return [neutral_caption(each, generator) for each in attributes]


def last_frame(pipeline: TextToVideo, reader: DigitReader, attributes: Sequence[Attributes]) -> dict:
    """`off`: pixels between the centres of the generated and the requested last frame; `floor`: the same for the
    tokenizer's reconstruction."""
    clips = real_clips(attributes)
    conditioning = [(ConditioningItem(frames=frames[-1:], kind="last_frame"),) for frames in pixels(clips)]
    captions = neutral_captions(attributes)
    made, free = generate(pipeline, captions, conditioning), generate(pipeline, captions, [()] * len(captions))
    decoded = pipeline.tokenizer.decode(pipeline.tokenizer.encode(clips))
    off = {name: _off(video, clips) for name, video in (("off", made), ("off_without", free), ("baseline", decoded))}
    return {"digit": after_first(reader, made, attributes)["digit"], **off}


def _off(video_BCTHW: Tensor, clips_BCTHW: Tensor) -> float:
    ours, theirs = (centres_of_mass(strokes(video[:, :, -1:])[:, 0]) for video in (video_BCTHW, clips_BCTHW))
    return round((ours - theirs).norm(dim=1).mean().item(), 3)


def continuation(
    pipeline: TextToVideo, reader: DigitReader, attributes: Sequence[Attributes], *, keep_first: bool = True
) -> dict:
    """`LONG` frames by windows of one frame kept, back and forth: digit and colour of all frames and of the last 8.

    With `keep_first` each window has the first one beside it as a clip to edit, and is told where to go; without, a
    caption that names neither digit nor colour.
    """
    frames, generator = pixels(real_clips(attributes)), torch.Generator().manual_seed(0)
    stories = []
    for each in attributes:
        directions = [each.direction, BACK[each.direction]] * (LONG // 8)
        captions = [neutral_caption(replace(each, direction=direction), generator) for direction in directions]
        instructions = [f"let it move {digits.DIRECTION_WORDINGS[direction][0]}" for direction in directions]
        stories.append([captions[0], *(instructions if keep_first else captions)[1:]])
    windows = stream_windows(
        pipeline,
        stories,
        replace(pipeline.defaults, guidance=GUIDANCE),
        total_frames=LONG,
        keep_first=keep_first,
        seeds=[1000 * place for place in range(len(stories))],
        conditioning=[(ConditioningItem(frames=clip[:1], kind="first_frame"),) for clip in frames],
        batch_size=BATCH,
    )
    long = video_of([np.concatenate(parts) for parts in zip(*windows, strict=True)])
    shares = {}
    for name, part in (("all_frames", long[:, :, 1:]), ("last_8", long[:, :, -8:])):
        most = by_majority(frames_and_clips_right(classify(reader, part), attributes))
        shares[name] = most["digit"] & most["colour"]
    return {name: round(share.float().mean().item(), 4) for name, share in shares.items()}


def inpainting(pipeline: TextToVideo, reader: DigitReader, attributes: Sequence[Attributes]) -> dict:
    """The right half is made anew: the digit of the left half, its colour and motion; `kept`: error of the left."""
    clips = real_clips(attributes)
    mask = np.zeros((1, digits.FRAME_SIZE, digits.FRAME_SIZE), dtype=bool)
    mask[:, :, MIDDLE:] = True
    conditioning = [(ConditioningItem(frames=frames, kind="inpaint", mask=mask),) for frames in pixels(clips)]
    made = generate(pipeline, neutral_captions(attributes), conditioning)
    decoded = pipeline.tokenizer.decode(pipeline.tokenizer.encode(video_of(pixels(clips)))).clamp(-1, 1)
    error = (made - decoded)[..., :MIDDLE].abs().max().item() * 127.5
    scored = score(reader, made, attributes)
    return {name: scored[name] for name in ("digit", "colour", "direction", "all")} | {"kept_within": round(error, 2)}


class Edited(NamedTuple):
    """Scores of edited clips."""

    obeyed_B: Tensor
    """bool: the clip shows what its instruction names."""
    fixed_BN: Tensor
    """bool: it shows what its instruction does not name."""
    distance_B: Tensor
    """Mean difference of pixels in [-1, 1] from the clip before."""
    named: list[str]
    """Attribute that each instruction names, one of `INSTRUCTIONS`."""


def edited(pipeline: TextToVideo, reader: DigitReader, attributes: Sequence[Attributes], **settings) -> Edited:
    after, instructions, sources = draw_edits(attributes)
    made = make_edits(pipeline, instructions, sources, **settings)
    shows = by_majority(frames_and_clips_right(classify(reader, made), after))
    named = [list(INSTRUCTIONS)[place % len(INSTRUCTIONS)] for place in range(len(attributes))]
    return Edited(
        obeyed_B=torch.stack([shows[name][place] for place, name in enumerate(named)]),
        fixed_BN=torch.stack(
            [torch.stack([shows[other][i] for other in shows if other != name]) for i, name in enumerate(named)]
        ),
        distance_B=(made - video_of(pixels(sources))).abs().flatten(1).mean(1),
        named=named,
    )


def edits(pipeline: TextToVideo, reader: DigitReader, attributes: Sequence[Attributes], **settings) -> dict[str, float]:
    """`obeyed`: share of clips that show what the instruction names; `kept`: mean share of the rest that stays.

    `distance` is the mean of `Edited.distance_B`, `within` half of its 95 % interval.
    """
    found = edited(pipeline, reader, attributes, **settings)
    means = {"obeyed": found.obeyed_B, "kept": found.fixed_BN, "distance": found.distance_B}
    shares = {name: value.float().mean().item() for name, value in means.items()}
    shares["within"] = interval_95(found.distance_B)
    for name in INSTRUCTIONS:
        is_named_B = torch.tensor([each == name for each in found.named])
        shares[name] = found.obeyed_B[is_named_B].float().mean().item()
    return {name: round(value, 4) for name, value in shares.items()}


def interval_95(value_B: Tensor) -> float:
    """Half of the 95 % interval of the mean."""
    return 1.96 * value_B.float().std().item() / len(value_B) ** 0.5


def edit_scales(
    pipeline: TextToVideo, reader: DigitReader, attributes: Sequence[Attributes], scales: Sequence[float]
) -> dict[str, float | bool]:
    """Measure `obeyed` at each guidance scale of the text, and `distance` from the clip at each one of the clip.

    The other scale is 2 for text and 1.5 for the clip. Half of a 95 % interval stands beside each; `is_monotone`:
    larger scales of text are nearer to the instructions, those of the clip nearer to the clips.
    """
    by_text = [edited(pipeline, reader, attributes, guidance=scale, image_guidance=1.5) for scale in scales]
    by_clip = [edited(pipeline, reader, attributes, image_guidance=scale) for scale in scales]
    obeyed_SB = torch.stack([each.obeyed_B for each in by_text]).float()
    distance_SB = torch.stack([each.distance_B for each in by_clip])
    found: dict[str, float | bool] = {}
    for name, value_SB in (("text_{}_obeyed", obeyed_SB), ("clip_{}_distance", distance_SB)):
        for scale, value_B in zip(scales, value_SB, strict=True):
            found[name.format(f"{scale:g}")] = round(value_B.mean().item(), 4)
            found[f"{name[:5]}{scale:g}_within"] = round(interval_95(value_B), 4)
    return found | {"text_is_monotone": rises(obeyed_SB), "clip_is_monotone": rises(-distance_SB)}


def rises(value_SB: Tensor) -> bool:
    """Whether the mean over the clips rises from scale to scale, as far as so many clips can tell.

    No step falls by more than half of the 95 % interval of its mean, and all of them together rise by more than that;
    intervals are those of differences between values of the same clip.
    """
    whole_B, steps = value_SB[-1] - value_SB[0], value_SB.diff(dim=0)
    has_fallen = any(step_B.mean().item() < -interval_95(step_B) for step_B in steps)
    return not has_fallen and whole_B.mean().item() > interval_95(whole_B)


def draw_edits(attributes: Sequence[Attributes], seed: int = 0) -> tuple[list[Attributes], list[str], Tensor]:
    """Return the attributes of clips after an edit, the instructions, and real clips before it, BCTHW."""
    generator = torch.Generator().manual_seed(seed)
    changes = [
        change(each, list(INSTRUCTIONS)[place % len(INSTRUCTIONS)], generator) for place, each in enumerate(attributes)
    ]
    after = [each for each, _ in changes]
    sources, _ = draw_edit_pairs(attributes, after, "heldout", generator)
    return after, [words for _, words in changes], sources


def make_edits(pipeline: TextToVideo, instructions: Sequence[str], sources: Tensor, **settings) -> Tensor:
    """Clips, BCTHW, that instructions make of `sources`, BCTHW."""
    conditioning = [(ConditioningItem(frames=frames, kind="edit"),) for frames in pixels(sources)]
    return generate(pipeline, instructions, conditioning, **settings)


def text_to_video(
    pipeline: TextToVideo, reader: DigitReader, attributes: Sequence[Attributes], guidance: float
) -> dict:
    """Score clips of held-out captions without conditioning."""
    captions = heldout_captions(attributes)
    made = generate(pipeline, captions, [()] * len(captions), guidance=guidance)
    return score(reader, made, attributes)
