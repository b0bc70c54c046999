"""Text-to-video diffusion transformers, from a folder of clips to videos.

    from megadit import TextToVideo

    pipeline = TextToVideo.from_pretrained("runs/demo/bundle")
    (video,) = pipeline(["a red seven moving left"], seeds=7)
    video.save("seven.mp4")

The names below are loaded when they are first asked for: commands that need no torch start without it.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers, which do not ask `__getattr__`
    from megadit.infer.conditioning.items import ConditioningItem as ConditioningItem
    from megadit.infer.pipeline.batches import Cancelled as Cancelled
    from megadit.infer.pipeline.pipeline import TextToVideo as TextToVideo
    from megadit.infer.pipeline.results import GeneratedVideo as GeneratedVideo
    from megadit.models.diffusion.settings import SamplingSettings as SamplingSettings
    from megadit.models.shared.errors import UserError as UserError

    __version__: str

_HOMES = {
    "Cancelled": "megadit.infer.pipeline.batches",
    "GeneratedVideo": "megadit.infer.pipeline.results",
    "ConditioningItem": "megadit.infer.conditioning.items",
    "SamplingSettings": "megadit.models.diffusion.settings",
    "TextToVideo": "megadit.infer.pipeline.pipeline",
    "UserError": "megadit.models.shared.errors",
}
"""Name -> the module that defines it."""
__all__ = [*_HOMES, "__version__"]

_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file():  # a repository, where models, infer, ... stand beside this folder
    __path__.append(str(_root))


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # whose import takes longer than that of all else here

        return version("megadit")
    if name not in _HOMES:
        raise AttributeError(f"module 'megadit' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
