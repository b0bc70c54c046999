"""Opens a bundle from any kind of checkpoint path, and checks the components used with it."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megadit.infer.sampling.guidance import Denoiser
from megadit.models.bundle import Bundle, check_kind
from megadit.models.convert.adapters.files import is_adapter
from megadit.models.shared.cli.command import python_module
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import MANIFEST_FILE, held_alone
from megadit.models.storage.hub import cached_model
from megadit.models.text_encoders import TextEncoder
from megadit.models.tokenizers import VideoTokenizer


def open_bundle(path: str | Path) -> Bundle:
    """The bundle of a video model at `path`; see `open_any_bundle`.

    Raises:
        UserError: if there is none, or its model generates no videos.
    """
    bundle = open_any_bundle(path)
    check_kind(bundle, "video")
    return bundle


def open_any_bundle(path: str | Path) -> Bundle:
    """The bundle at `path`: a bundle, a training directory (its newest valid step), or a name in a hub's cache.

    A training directory (the one that holds `checkpoints/`) is converted once into its folder `bundle/`, and again
    only after a newer checkpoint was written. Of several processes, one converts and the others wait.

    Raises:
        UserError: if there is none of these, or the conversion fails.
    """
    path = _existing(path)
    if (path / "checkpoints").is_dir():
        converted = _converted(path)
        if is_adapter(converted):
            raise UserError(
                f"{path} has trained an adapter, now in {converted}: give the bundle that it was trained on, and "
                f"--adapter {converted}"
            )
        return Bundle.open(converted)
    if (path / "model_index.json").is_file():
        raise UserError(f"{path} is a pipeline of diffusers: run `megadit convert {path} OUT`, and give OUT")
    if not (path / MANIFEST_FILE).exists():
        raise UserError(
            f"{path} is neither a bundle (no megadit.json) nor a training directory (no checkpoints/); to choose one "
            "checkpoint yourself, run: megadit bundle CHECKPOINT OUT"
        )
    return Bundle.open(path)


def _existing(path: str | Path) -> Path:
    """The folder at `path`, or that of a model of this name in a hub's cache."""
    if found := Path(path) if Path(path).exists() else cached_model(str(path)):
        return found
    raise UserError(
        f"{path} does not exist: give a bundle, a training directory, or the name of a bundle in the cache of a hub"
    )


def weaker_bundle(path: str, bundle: Bundle) -> Bundle:
    """The bundle of a weaker checkpoint for autoguidance.

    Raises:
        UserError: if there is none, or its latents or text features are not those of `bundle`.
    """
    weaker = open_bundle(path)
    for part, fingerprint in bundle.manifest["fingerprints"].items():
        if weaker.manifest["fingerprints"][part] != fingerprint:
            name = part.replace("_", " ")
            raise UserError(
                f"autoguidance={path} has another {name} than {bundle.path}: use a checkpoint with the same"
            )
    return weaker


@dataclass
class WeakerDenoisers:
    """Loads denoisers of weaker checkpoints for autoguidance; the last one stays in memory."""

    bundle: Bundle
    load: Callable[[Bundle], Denoiser]
    _cached: dict[str, Denoiser] = field(default_factory=dict)

    def __call__(self, path: str) -> Denoiser:
        """Raises UserError: as `weaker_bundle`."""
        if path not in self._cached:
            self._cached = {path: self.load(weaker_bundle(path, self.bundle))}
        return self._cached[path]


def no_weaker_denoiser(path: str) -> Denoiser:
    """Raises UserError: the pipeline opens no path."""
    raise UserError(f"autoguidance={path}: this pipeline cannot load a second checkpoint")


def check_component(bundle: Bundle, part: str, component: VideoTokenizer | TextEncoder) -> None:
    """Check a tokenizer or text encoder: any other than the one trained with would give noise without an error.

    Raises:
        UserError: if `component` differs from the bundle's `part`.
    """
    expected = bundle.manifest["fingerprints"][part]
    if component.fingerprint() != expected:
        name = part.replace("_", " ")
        raise UserError(
            f"this {name} (fingerprint {component.fingerprint()}) is not the one that {bundle.path} was trained with "
            f"({expected})"
        )


def _converted(training_directory: Path) -> Path:
    bundle = training_directory / "bundle"
    if _is_older(bundle, training_directory):
        with held_alone(training_directory / ".bundle.lock"):
            changed = _last_change(training_directory)
            if _is_older(bundle, training_directory):  # no other process has made it meanwhile
                message = f"converting the newest checkpoint of {training_directory} to {bundle}"
                print(message, file=sys.stderr, flush=True)
                _convert(training_directory, bundle)
                # checkpoints written during the conversion must be newer than its result
                os.utime(bundle / MANIFEST_FILE, ns=(changed, changed))
    return bundle


def _is_older(bundle: Path, training_directory: Path) -> bool:
    manifest = bundle / MANIFEST_FILE
    return not manifest.exists() or manifest.stat().st_mtime_ns < _last_change(training_directory)


def _last_change(training_directory: Path) -> int:
    """Time when a checkpoint was last added; complete checkpoints are renamed into their directory."""
    return (training_directory / "checkpoints").stat().st_mtime_ns


def _convert(training_directory: Path, bundle: Path) -> None:
    """Runs `megadit bundle` in a process of its own.

    Reading a training checkpoint takes Megatron, its process groups and, without a GPU, patches to torch. They stay
    out of this process, and this package stays independent of `megadit.train`.
    """
    command = python_module("megadit.train.checkpoints.to_bundle", str(training_directory), str(bundle))
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()] or [f"exit code {result.returncode}"]
        reason = lines[-1].removeprefix("error: ")
        raise UserError(f"cannot convert {training_directory} ({reason}); try: megadit bundle {training_directory} OUT")
