"""Conditioning inputs of the page: images, a clip and a painted mask, if the network was trained with them."""

from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np

from megadit.infer.conditioning.items import DARKEST_WHITE
from megadit.infer.media.animations import encode_image
from megadit.models.shared.errors import UserError
from megadit.serve.page.studio import Studio

_CONTINUE, _CHANGE, _PAINT = "Continue it", "Change it as the prompt says", "Make the painted part anew"
_ACTIONS = {_CONTINUE: "prefix", _CHANGE: "edit", _PAINT: "inpaint"}
"""Label of an operation on a video -> the conditioning that a network must have been trained with."""


class ConditioningInputs:
    """Inputs for files; only those that the service's network supports are shown."""

    def __init__(self, studio: Studio) -> None:
        self._studio, conditionings = studio, studio.info.conditionings
        actions = [action for action, kind in _ACTIONS.items() if kind in conditionings]
        first, last, edits = "first_frame" in conditionings, "last_frame" in conditionings, bool(actions)
        head, is_any = "Start from images or a video", first or last or edits
        with gr.Accordion(head, open=False, visible=is_any, elem_id="conditioning"):
            with gr.Row():
                self.image = self._image("First frame", "image", visible=first)
                self.last_image = self._image("Last frame", "last_image", visible=last)
            self.video = gr.Video(label="A video", elem_id="video", visible=edits, height=180)
            action = actions[0] if actions else None
            self.action = gr.Radio(actions, value=action, label="What to do with it", elem_id="action", visible=edits)
            self.mask = gr.ImageEditor(
                label="Paint what is made anew",
                elem_id="mask",
                type="numpy",
                visible=False,
                brush=gr.Brush(colors=["#ff3366"], color_mode="fixed"),
                layers=False,
                sources=[],
                transforms=[],
                height=320,
            )
        gr.on([self.video.change, self.action.change], self._show_mask, [self.video, self.action], self.mask, **_QUIET)

    @staticmethod
    def _image(label: str, name: str, *, visible: bool) -> gr.Image:
        return gr.Image(label=label, elem_id=name, type="filepath", format="png", sources=["upload", "clipboard"],
                        visible=visible, height=180)  # fmt: skip

    @property
    def components(self) -> list[Any]:
        return [self.image, self.last_image, self.video, self.action, self.mask]

    def of(
        self, prompt: str, image: str | None, last: str | None, video: str | None, action: str | None, mask: Any
    ) -> dict:
        """The fields of a request, including its prompt."""
        fields: dict[str, Any] = {"prompt": prompt}
        files = {"image": image, "last_image": last}
        if video and action == _CONTINUE:
            files["continue_video"] = video
        elif video:
            files["video"] = video
            painted = _painted(mask) if action == _PAINT else None
            fields |= {"prompt": "", "instruction": prompt} if action == _CHANGE else {"mask": painted}
        return fields | {name: Path(path).read_bytes() for name, path in files.items() if path}

    def _show_mask(self, video: str | None, action: str | None) -> Any:
        """The mask editor, with the first frame of the video."""
        if not video or action != _PAINT:
            return gr.ImageEditor(visible=False)
        try:
            frame = self._studio.media.read(Path(video).read_bytes())[0]
        except (UserError, TimeoutError) as error:
            gr.Warning(str(error))
            return gr.ImageEditor(visible=False)
        factor = max(1, 256 // max(frame.shape[:2]))  # large enough for a brush
        return gr.ImageEditor(value=frame.repeat(factor, axis=0).repeat(factor, axis=1), visible=True)


_QUIET = {"show_progress": "hidden"}


def _painted(mask: dict[str, Any] | None) -> bytes:
    """Mask as a png, white where it was painted. Raises UserError if nothing was painted."""
    layers = [layer for layer in (mask or {}).get("layers", ()) if layer is not None]
    if not any((layer[..., 3] >= DARKEST_WHITE).any() for layer in layers):
        raise UserError("paint the part to generate, or choose another use of the video")
    white_HW = np.any([layer[..., 3] >= DARKEST_WHITE for layer in layers], axis=0)
    return encode_image(np.repeat(white_HW[..., None] * np.uint8(255), 3, axis=2), ".png")
