"""Hook for a content filter: `--guardrail_dir DIRECTORY`, off by default.

The directory holds `guardrail.py`, a user program, which is executed. It defines one of these, or both:

    def check_prompt(prompt: str) -> str | None:
        "Why this prompt must not be used, or None."

    def check_video(video: numpy.ndarray) -> numpy.ndarray | str:
        "The video to return (uint8 THWC; for example with blurred faces), or the reason for refusing it."

An exception in either one refuses the prompt or video.
"""

import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megadit.infer.hooks.user_program import FAILURES, find_program, run_program
from megadit.models.bundle import Bundle
from megadit.models.shared.errors import UserError

FILE = "guardrail.py"


class HeldBackError(UserError):
    """The filter refused a prompt or a video, or failed."""


@dataclass(frozen=True, slots=True)
class Guardrail:
    directory: Path
    check_prompt: Callable[[str], str | None] | None
    check_video: Callable[[np.ndarray], np.ndarray | str] | None

    @classmethod
    def load(cls, directory: str | Path) -> "Guardrail":
        """Runs the directory's guardrail.py.

        Raises:
            UserError: if there is none, it fails, or defines neither function.
        """
        path = find_guardrail(directory)
        module = run_program(path)
        checks = [getattr(module, name, None) for name in ("check_prompt", "check_video")]
        if not any(map(callable, checks)):
            raise UserError(f"{path} defines neither check_prompt nor check_video")
        return cls(Path(directory), *checks)

    def admit(self, prompts: Iterable[str]) -> None:
        """Raises HeldBackError for the first prompt that must not be used."""
        for prompt in prompts if self.check_prompt is not None else ():
            if reason := self._asked(self.check_prompt, prompt):
                raise HeldBackError(f"the guardrail refuses the prompt {prompt!r}: {reason}")

    def screen(self, video_THWC: np.ndarray) -> np.ndarray:
        """The video to return, from `check_video`.

        Raises:
            HeldBackError: if the filter refuses it.
        """
        if self.check_video is None:
            return video_THWC
        screened = self._asked(self.check_video, video_THWC)
        if isinstance(screened, str):
            raise HeldBackError(f"the guardrail holds a video back: {screened}")
        if not isinstance(screened, np.ndarray) or screened.shape != video_THWC.shape or screened.dtype != np.uint8:
            raise HeldBackError(f"check_video in {self.directory / FILE} must give a uint8 video of the same shape")
        return screened

    @staticmethod
    def _asked(check: Callable[[Any], Any], value: Any) -> Any:
        try:
            return check(value)
        except FAILURES as error:
            traceback.print_exception(error)
            raise HeldBackError(f"the guardrail failed: {type(error).__name__}") from error


def find_guardrail(directory: str | Path) -> Path:
    """The program in a directory, absolute.

    Raises:
        UserError: if there is none.
    """
    return find_program(directory, FILE, option="--guardrail_dir", defines="check_prompt or check_video")


def load_guardrail(directory: str | None, bundle: Bundle) -> Guardrail | None:
    """The guardrail in `directory`, if one is named; if not, warns where the license of the weights asks for one."""
    if directory:
        return Guardrail.load(directory)
    if bundle.license is not None and bundle.license.asks_for_guardrail:
        print(
            f"WARNING: the license of these weights ({bundle.license.name}) asks for a content filter, and none is "
            "set: give --guardrail_dir DIRECTORY",
            file=sys.stderr,
            flush=True,
        )
    return None
