"""`megadit demo-conditioning`: the demo's model is trained further with conditioning by frames, clips, masks and edits.

megadit demo-conditioning                # from the bundle of `megadit demo`, into runs/demo-conditioning
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from megadit.infer.conditioning.items import ConditioningItem
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.models.bundle import Bundle
from megadit.models.shared.cli.options import command
from megadit.models.shared.files import read_json, write_json
from megadit.models.shared.progress import tracked
from megadit.train.demos import contact_sheets
from megadit.train.demos.clips import pixels
from megadit.train.demos.digits import classifier, conditioning_data, conditioning_score, score
from megadit.train.demos.digits.conditioning_score import generate, neutral_captions, video_of
from megadit.train.demos.digits.data import Attributes
from megadit.train.demos.stages import (
    FollowingDemo,
    FollowingOptions,
    Stage,
    following_demo,
    run_and_show,
    training_stages,
)

GRID_SCALES = (1.0, 1.5, 2.0, 3.0)
"""Guidance scales of the text and of the clip, in the picture and the results of edits."""


@dataclass(frozen=True, kw_only=True)
class ConditioningDemo(FollowingDemo):
    """The folder of this demo and what goes into it."""

    @property
    def attributes(self) -> list[Attributes]:
        return score.scored_attributes()[0][:: self.stride]


# --- stages -------------------------------------------------------------------------------------------------------


def _prepare(demo: ConditioningDemo) -> None:
    conditioning_data.write_conditioning(demo.dataset, Bundle.open(demo.base))


def _score(demo: ConditioningDemo) -> None:
    """Score the network on each conditioning mode, and the base, which is held to a first frame while sampling."""
    attributes, pipeline = demo.attributes, TextToVideo.from_pretrained(demo.bundle, device="cpu")
    base, clips = TextToVideo.from_pretrained(demo.base, device="cpu"), score.real_clips(demo.attributes)
    reader = classifier.load_reader(classifier.classifier_file(demo.base, demo.out, pipeline.tokenizer))
    centred = conditioning_score.centred_starts(attributes)
    measures = {
        "first_frame": lambda: conditioning_score.first_frame(pipeline, reader, attributes, clips),
        "first_frame_overwritten": lambda: conditioning_score.first_frame(base, reader, attributes, clips),
        "first_frame_centred": lambda: conditioning_score.first_frame(pipeline, reader, attributes, centred),
        "last_frame": lambda: conditioning_score.last_frame(pipeline, reader, attributes),
        "continuation": lambda: conditioning_score.continuation(pipeline, reader, attributes[::2]),
        "continuation_by_windows_alone": lambda: conditioning_score.continuation(
            pipeline, reader, attributes[::2], keep_first=False
        ),
        "inpainting": lambda: conditioning_score.inpainting(pipeline, reader, attributes),
        "edits": lambda: conditioning_score.edits(pipeline, reader, attributes),
        "edit_scales": lambda: conditioning_score.edit_scales(pipeline, reader, attributes[::2], GRID_SCALES),
        "text": lambda: conditioning_score.text_to_video(pipeline, reader, attributes, base.defaults.guidance),
        "text_before": lambda: conditioning_score.text_to_video(base, reader, attributes, base.defaults.guidance),
    }
    result = {"num_clips": len(attributes)}
    for name, measure in tracked(measures.items(), "measuring"):
        result[name] = measure()
    write_json(demo.out / "score.json", result)


def _draw(demo: ConditioningDemo) -> None:
    """Draw one row for each mode: the conditioning, then the result."""
    pipeline = TextToVideo.from_pretrained(demo.bundle, device="cpu")
    chosen = contact_sheets.spread(range(len(demo.attributes)), 3)
    rows = [row for place in chosen for row in _rows(pipeline, demo.attributes[place], seed=place)]
    found = read_json(demo.out / "score.json")
    title = (
        f"what is given above, what is made of it below; digit kept from a first frame: "
        f"{found['first_frame']['digit']:.0%} (overwriting: {found['first_frame_overwritten']['digit']:.0%}); "
        f"instructions obeyed: {found['edits']['obeyed']:.0%}"
    )
    contact_sheets.contact_sheet(demo.out / "given.png", rows, title=title, columns=len(chosen))
    _draw_scales(demo, pipeline)


def _rows(pipeline: TextToVideo, attributes: Attributes, seed: int) -> list[contact_sheets.SheetRow]:
    (clip,) = pixels(score.real_clips([attributes], seed))
    (caption,) = neutral_captions([attributes], seed)
    after, (instruction,), source = conditioning_score.draw_edits([attributes], seed)
    mask = np.zeros((1, *clip.shape[1:3]), dtype=bool)
    mask[:, :, conditioning_score.MIDDLE :] = True
    hidden = np.where(mask[..., None], np.uint8(60), clip)
    cases = [
        ("first frame", caption, ConditioningItem(frames=clip[:1], kind="first_frame"), _only(clip, slice(0, 1))),
        ("last frame", caption, ConditioningItem(frames=clip[-1:], kind="last_frame"), _only(clip, slice(-1, None))),
        ("continuation", caption, ConditioningItem(frames=clip[:5], kind="prefix"), _only(clip, slice(0, 5))),
        ("inpainting", caption, ConditioningItem(frames=clip, kind="inpaint", mask=mask), hidden),
        ("edit", instruction, ConditioningItem(frames=pixels(source)[0], kind="edit"), pixels(source)[0]),
    ]
    found = []
    for name, prompt, item, shown in cases:
        found.append(contact_sheets.SheetRow(prompt, video_of([shown])[0], note=name))
        found.append(contact_sheets.SheetRow("", generate(pipeline, [prompt], [(item,)])[0]))
    return found


def _only(clip: np.ndarray, shown: slice) -> np.ndarray:
    frames = np.zeros_like(clip)
    frames[shown] = clip[shown]
    return frames


def _draw_scales(demo: ConditioningDemo, pipeline: TextToVideo) -> None:
    """One edit at every pair of scales: text from left to right, the clip from top to bottom."""
    _, (instruction,), source = conditioning_score.draw_edits([demo.attributes[len(demo.attributes) // 3]])
    rows = [
        contact_sheets.SheetRow(
            instruction,
            conditioning_score.make_edits(pipeline, [instruction], source, guidance=by_text, image_guidance=by_clip)[0],
            note=f"text {by_text:g}, clip {by_clip:g}",
        )
        for by_text in GRID_SCALES
        for by_clip in GRID_SCALES
    ]
    title = "one clip, one instruction: guidance by the text grows to the right, guidance by the clip downwards"
    contact_sheets.contact_sheet(demo.out / "edit_scales.png", rows, title=title, columns=len(GRID_SCALES))


STAGES = (
    Stage("prepare", "draw clips with frames to give, and clips to edit", _prepare, lambda demo: [demo.dataset]),
    *training_stages("digits_conditioned", "from the demo's model", lambda demo: demo.training_overrides),
    Stage("score", "give it frames, clips, masks and instructions", _score, lambda demo: [demo.out / "score.json"]),
    Stage(
        "figures",
        "draw what was given and what was made",
        _draw,
        lambda demo: [demo.out / "given.png", demo.out / "edit_scales.png"],
    ),
)


# --- the command --------------------------------------------------------------------------------------------------


@command(
    FollowingOptions,
    prog="megadit demo-conditioning",
    description="Teaches the demo's model to take first and last frames, clips, masks and instructions.",
)
def main(options: FollowingOptions) -> None:
    """Runs `megadit demo-conditioning`; returns its exit code."""
    demo = following_demo(ConditioningDemo, options, "demo-conditioning")
    run_and_show(demo, STAGES, summary_table, demo.out / "given.png", demo.out / "edit_scales.png")
    print(
        f"Make your own: megadit generate --checkpoint_path {demo.bundle} --image first.png "
        '--prompt "a digit moving left" --guidance 2'
    )


def summary_table(result: dict[str, Any]) -> str:
    """One line for each use, its figures by name."""
    lines = []
    for name, values in result.items():
        if isinstance(values, dict):
            found = "  ".join(f"{key.replace('_', ' ')} {value:g}" for key, value in values.items())
            lines.append(f"{name.replace('_', ' '):26}{found}")
    return "\n".join(lines)
