"""Style of the demo page, and the HTML of the area in which a video appears."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from megadit.models.diffusion.settings import SERVED
from megadit.models.shared.progress import duration
from megadit.serve.contract import VideoRequest
from megadit.serve.events import StepDone
from megadit.serve.service_info import ServiceInfo

SLIDERS = {name: about for name, about in SERVED.items() if about.low is not None and about.high is not None}
"""Settings between two bounds, except those with their own inputs."""

CSS = """
.gradio-container { max-width: 1180px !important; margin: 0 auto !important; }
#headline h1 { font-size: 1.9rem; letter-spacing: -0.02em; margin-bottom: 0.1rem; }
#headline p { color: var(--body-text-color-subdued); margin-top: 0; }
.stage { position: relative; width: 100%; margin: 0 auto; border-radius: 16px; overflow: hidden; background: #0b1020;
  display: flex; align-items: center; justify-content: center; box-shadow: 0 8px 30px rgb(11 16 32 / 25%); }
.stage > img, .stage > video { width: 100%; height: 100%; object-fit: contain; display: block; }
.stage.small { max-width: 480px; }
.stage.small > video, .stage.small > img.final { image-rendering: pixelated; }
.stage .hint { color: #94a3b8; text-align: center; padding: 2rem; line-height: 1.6; }
.stage .hint b { color: #e2e8f0; font-size: 1.1rem; }
.stage .hint.error b { color: #fca5a5; }
.stage .told span { color: #e2e8f0; }
.stage .told { position: absolute; left: 0; right: 0; bottom: 0; padding: 2.2rem 1rem 0.9rem;
  font-variant-numeric: tabular-nums; font-size: 0.9rem;
  background: linear-gradient(transparent, rgb(11 16 32 / 90%)); }
.stage .told .row { display: flex; justify-content: space-between; gap: 1rem; margin-bottom: 0.45rem; }
.stage .bar { height: 6px; border-radius: 3px; background: rgb(255 255 255 / 18%); overflow: hidden; }
.stage .bar > div { height: 100%; border-radius: 3px; background: linear-gradient(90deg, #6366f1, #22d3ee);
  transition: width 0.15s linear; }
.facts { display: flex; flex-wrap: wrap; gap: 0.4rem; min-height: 1.8rem; justify-content: center; }
.facts span { background: var(--background-fill-secondary); border: 1px solid var(--border-color-primary);
  border-radius: 999px; padding: 0.12rem 0.7rem; font-size: 0.82rem; color: var(--body-text-color); }
.facts .prompt { border: none; background: none; font-weight: 600; flex-basis: 100%; font-size: 0.95rem;
  text-align: center; max-height: 4.2rem; overflow-y: auto; overflow-wrap: anywhere; }
.stage .hint { max-height: 100%; overflow-y: auto; overflow-wrap: anywhere; }
#gallery { border: none !important; outline: none; background: none; min-height: 0 !important; }
#gallery .grid-wrap { height: auto !important; min-height: 0 !important; max-height: none !important; }
#gallery .grid-container { grid-template-columns: repeat(6, 1fr) !important; grid-template-rows: none !important; }
#gallery img { image-rendering: pixelated; border-radius: 10px; aspect-ratio: 1; }
#gallery .caption-label { font-size: 0.7rem; }
@media (max-width: 768px) {
  #headline h1 { font-size: 1.5rem; }
  /* the video comes right after the buttons, the settings after the video */
  #inputs { display: contents; }
  #inputs > * { flex: 1 1 100%; }
  #outputs { order: 2; flex: 1 1 100%; }
  #settings { order: 3; }
  #gallery .grid-container { grid-template-columns: repeat(3, 1fr) !important; }
}
"""


_KEYS = "if (event.key === 'f') this.requestFullscreen()"
"""Keys in addition to those of browsers (space plays and pauses, arrows seek)."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A size of videos on the page."""

    name: str
    num_frames: int
    height: int
    width: int

    @property
    def size(self) -> dict[str, int]:
        """Size as fields of a request."""
        return {"num_frames": self.num_frames, "height": self.height, "width": self.width}

    def label(self, seconds: float) -> str:
        return f"{self.name} \N{MIDDLE DOT} {size_text(self)}, {about(seconds)}"


def size_text(size: Preset | VideoRequest) -> str:
    """`832×480, 81 frames`; for an image `832×480`."""
    frames = "" if size.num_frames == 1 else f", {size.num_frames} frames"
    return f"{size.width}\N{MULTIPLICATION SIGN}{size.height}{frames}"


def makes_images(info: ServiceInfo) -> bool:
    """Whether the service's default is an image."""
    return info.defaults["num_frames"] == 1


def presets(info: ServiceInfo) -> list[Preset]:
    """Sizes around the service's default within its limits, the default first."""
    frames, height, width = (int(info.defaults[name]) for name in ("num_frames", "height", "width"))

    def scaled(size: int, factor: float) -> int:
        return max(1, round(size * factor / info.size_multiple)) * info.size_multiple

    if makes_images(info):
        choices = [Preset("Image", 1, height, width)]
    else:
        longer = Preset("Longer", 2 * frames - 1, height, width)
        choices = [Preset("Video", frames, height, width), Preset("Image", 1, height, width), longer]
    choices += [
        Preset("Wide", frames, height, scaled(width, 1.5)),
        Preset("Tall", frames, scaled(height, 1.5), width),
    ]
    most_frames, most_pixels = info.limits.max_frames, info.limits.max_pixels
    choices = [each for each in choices if each.num_frames <= most_frames]
    return [each for each in choices if each.num_frames * each.height * each.width <= most_pixels]


def about(seconds: float) -> str:
    """`about 3 s`."""
    return "under 1 s" if seconds < 1 else f"about {duration(seconds)}"


def how_to_begin(info: ServiceInfo) -> str:
    return "Write a prompt, or click an example." if info.examples else "Write a prompt."


def empty_stage(info: ServiceInfo, preset: Preset) -> str:
    what = "image" if makes_images(info) else "video"
    return message_stage(preset, f"Your {what} appears here", how_to_begin(info))


def waiting_stage(preset: Preset) -> str:
    return message_stage(preset, "Waiting for a place in the queue\N{HORIZONTAL ELLIPSIS}")


def message_stage(preset: Preset, title: str, text: str = "", *, is_error: bool = False) -> str:
    """A message in the video's place."""
    kind = "hint error" if is_error else "hint"
    return _stage(preset, f'<div class="{kind}"><b>{escape(title)}</b><br>{escape(text)}</div>')


def progress_stage(preset: Preset, progress: StepDone) -> str:
    """The latest preview, less blurred with every step, with a progress bar."""
    share = progress.step / progress.num_steps
    image = ""
    if progress.preview:
        blur = f"filter: blur({10 * (1 - share) ** 2:.1f}px)"
        source = f"data:image/jpeg;base64,{base64.b64encode(progress.preview).decode()}"
        image = f'<img src="{source}" alt="preview" style="{blur}">'
    attributes = (
        '<div class="told"><div class="row">'
        f"<span>Step {progress.step} of {progress.num_steps}</span><span>{duration(progress.seconds_left)} left</span>"
        f'</div><div class="bar"><div style="width: {100 * share:.0f}%"></div></div></div>'
    )
    return _stage(preset, image + attributes)


def finished_stage(preset: Preset, url: str, media_type: str) -> str:
    """The video in a loop, with the browser's controls, which work by keyboard; or the image."""
    if media_type.startswith("video/"):
        attributes = 'autoplay loop muted playsinline controls tabindex="0" aria-label="the video"'
        return _stage(preset, f'<video src="{escape(url)}" {attributes} onkeydown="{_KEYS}"></video>')
    return _stage(preset, f'<img class="final" src="{escape(url)}" alt="the image">')


def facts(
    request: VideoRequest,
    seconds: float | None = None,
    note: str = "",
    scores: Mapping[str, float] | None = None,
    variant: str = "",
) -> str:
    """Labels for a video: prompt, variant, settings, and scores."""
    shown: Sequence[str] = [
        *([variant] if variant else []),
        f"seed {request.seed}",
        f"{request.num_steps} steps",
        f"guidance {request.guidance:g}",
        str(request.sampler),
        size_text(request),
        *(f"{name.replace('_', ' ')} {value:g}" for name in SLIDERS if (value := getattr(request, name))),
        *(f"with {name.replace('_', ' ')}" for name in request.media()),
        *(f"adapter {text}" for text in request.adapters or () if text),
        *([f"without: {request.negative_prompt}"] if request.negative_prompt else []),
        *([f"{seconds:.1f} s"] if seconds is not None else []),
        *(f"{name} {score:.4g}" for name, score in (scores or {}).items()),
        *([note] if note else []),
    ]
    labels = "".join(f"<span>{escape(text)}</span>" for text in shown)
    return f'<div class="facts"><span class="prompt">{escape(request.text)}</span>{labels}</div>'


def _stage(preset: Preset, inside: str) -> str:
    size = "stage small" if max(preset.height, preset.width) < 256 else "stage"
    return f'<div class="{size}" style="aspect-ratio: {preset.width} / {preset.height}">{inside}</div>'
