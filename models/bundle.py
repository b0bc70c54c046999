"""A bundle: the directory with everything that is needed to generate a video from a prompt, or to classify an image.

megadit.json      components, versions, sampling defaults, training, size and checksum of every file
transformer/      config.json, model.safetensors (of a U-Net, too)
transformer_2/    the same, of a low-noise expert
tokenizer/        config.json, model.safetensors (where it has tensors)
text_encoder/     config.json, model.safetensors (where it has tensors)
image_encoder/    config.json (for networks that read features of a conditioning image)
vocabulary.json   the vocabulary of the training captions, to compare prompts with
notices/          license files of published weights, where the bundle was made from them

`bundle_writer.py` writes it.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from megadit.models.configs.config import DiTConfig
from megadit.models.configs.families import Task
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.networks.clip import CLIP
from megadit.models.networks.dit import DiT
from megadit.models.networks.registry import SavedNetwork
from megadit.models.networks.vit import ViT
from megadit.models.shared.cli.command import python_module
from megadit.models.shared.errors import UserError, not_written
from megadit.models.shared.files import (
    MANIFEST_FILE,
    check_files,
    held_alone,
    is_bundle,
    read_json,
    write_json,
)
from megadit.models.storage import components as parts
from megadit.models.storage.hub import cached_model
from megadit.models.storage.license import License
from megadit.models.text_encoders import TextEncoder, load_text_encoder
from megadit.models.text_encoders.image_encoder import ImageEncoder
from megadit.models.tokenizers import VideoTokenizer, load_tokenizer

NOTICES = "notices"
FORMAT_VERSION = 3
LOW_NOISE = "transformer_2"
Kind = Literal["video", "classifier", "clip"]
KINDS: dict[Task, Kind] = {"denoise": "video", "classify": "classifier", "match": "clip"}
USED_BY: dict[Kind, str] = {
    "video": "makes videos: see `megadit generate`",
    "classifier": "names the classes of images: see `megadit classify`",
    "clip": "scores how well texts fit images: see `megadit similarity`",
}
"""Kind of a bundle -> what it does, and the command for it."""
COMPONENTS = ("transformer", "tokenizer", "text_encoder")


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle; its components are loaded when asked for."""

    path: Path
    manifest: dict[str, Any]
    """The contents of megadit.json."""
    defaults: SamplingSettings
    config: NetworkConfig

    @property
    def kind(self) -> Kind:
        """Kind of the bundle: video, clip or classifier."""
        return _kind_of(self.config)

    @property
    def conditionings(self) -> tuple[str, ...]:
        """Kinds of conditioning that the network was trained for (`data.conditioning`)."""
        return tuple((self.manifest.get("training") or {}).get("conditioning") or ())

    @property
    def prompts(self) -> tuple[str, ...]:
        """A few prompts from validation, as examples."""
        found = (self.manifest.get("training") or {}).get("prompts")
        return tuple(prompt for prompt in found if isinstance(prompt, str)) if isinstance(found, list) else ()

    @property
    def longest_caption(self) -> int | None:
        """Number of words in the longest training caption, where known."""
        found = (self.manifest.get("training") or {}).get("longest_caption")
        return found if isinstance(found, int) else None

    @property
    def networks(self) -> tuple[str, ...]:
        """The folders of its networks: one, or a high-noise and a low-noise expert."""
        return ("transformer",) if self.boundary is None else ("transformer", LOW_NOISE)

    @property
    def boundary(self) -> float | None:
        """The lowest sigma of the high-noise expert; None: there is a single network."""
        t = self.manifest.get("boundary")
        return None if t is None else t / (1 - t)

    @property
    def license(self) -> License | None:
        """License of the published weights that the bundle was made from; None: not made from any."""
        values = self.manifest.get("license")
        return None if values is None else License.from_dict(values)

    @classmethod
    def open(cls, path: str | os.PathLike, *, verify: bool = False) -> "Bundle":
        """Reads the manifest and checks that every file exists in its full size; `verify` compares checksums too.

        Raises:
            UserError: if `path` is no bundle, a newer version wrote it, or a file is missing or was changed.
        """
        path = Path(path)
        manifest = _read_manifest(path)
        check_files(path, manifest, verify=verify)
        return cls(
            path=path,
            manifest=manifest,
            defaults=_defaults(path, manifest["defaults"]),
            config=parts.load_config(path / "transformer"),
        )

    def load_network(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> SavedNetwork:
        """Load the single network of a video bundle.

        Raises:
            UserError: if there are two networks, or a classifier; see also `components.load_network`.
        """
        check_single(self)
        check_kind(self, "video")
        return parts.load_network(self.path / "transformer", device=device, dtype=dtype)

    def load_dit(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> DiT:
        """Load the single network of a video bundle, a transformer.

        Raises:
            UserError: if it is not a transformer; see also `load_network`.
        """
        check_transformer(self, "this command needs the blocks of a transformer")
        return self.load_network(device, dtype)

    def load_classifier(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> ViT:
        """Load the network of a classifier bundle.

        Raises:
            UserError: if it is no classifier; see also `components.load_network`.
        """
        check_kind(self, "classifier")
        return parts.load_network(self.path / "transformer", device=device, dtype=dtype)

    def load_clip(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> CLIP:
        """Load the network of a CLIP bundle.

        Raises:
            UserError: if it is no CLIP; see also `components.load_network`.
        """
        check_kind(self, "clip")
        return parts.load_network(self.path / "transformer", device=device, dtype=dtype)

    def load_tokenizer(self) -> VideoTokenizer:
        return load_tokenizer(self.path / "tokenizer")

    def load_text_encoder(self) -> TextEncoder:
        return load_text_encoder(self.path / "text_encoder")

    def load_image_encoder(self) -> ImageEncoder | None:
        """Load the encoder of conditioning images; None where the network reads none."""
        return ImageEncoder.load(self.path / "image_encoder") if self.config.image_size is not None else None


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
        if not is_bundle(converted):
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


def check_single(bundle: Bundle) -> None:
    """Raises UserError for a bundle of two experts, in commands that take a single network."""
    if bundle.boundary is not None:
        raise UserError(
            f"{bundle.path} has two experts, for high and for low noise, which can be sampled, exported, served and "
            "converted; this command takes a single network: convert the published networks one by one"
        )


def check_transformer(bundle: Bundle, reason: str) -> None:
    """Raises UserError, with the reason, for a bundle whose network is not a transformer."""
    if not isinstance(bundle.config, DiTConfig):
        raise UserError(
            f"the network of {bundle.path} is {bundle.config.outline}, which can be sampled, converted, exported and "
            f"served: {reason}"
        )


def check_kind(bundle: Bundle, kind: Kind) -> None:
    """Raises UserError for a bundle of another kind, with the command for it."""
    if bundle.kind != kind:
        raise UserError(f"{bundle.path} {USED_BY[bundle.kind]}")


def _kind_of(config: NetworkConfig) -> Kind:
    return KINDS[config.task]


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


def update_manifest(path: str | os.PathLike, **entries: Any) -> None:
    """Sets entries of a bundle's megadit.json, whole or not at all.

    Raises:
        UserError: if `path` is no bundle, or may not be written to.
    """
    manifest = _read_manifest(Path(path)) | entries
    try:
        write_json(Path(path) / MANIFEST_FILE, manifest)
    except OSError as error:
        raise not_written(path, error) from error


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST_FILE
    if not is_bundle(path):
        raise UserError(
            f"{path} is not a bundle: expected a directory with {MANIFEST_FILE}, {'/, '.join(COMPONENTS)}/; "
            "`megadit bundle CHECKPOINT OUT` makes one from a training checkpoint"
        )
    manifest = read_json(file)
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if not isinstance(version, int):
        raise UserError(f"{file} has no format_version: it was not written by megadit")
    if version > FORMAT_VERSION:
        raise UserError(
            f"{path} has format version {version}, written by megadit {manifest.get('megadit_version')}; "
            f"this version reads {FORMAT_VERSION}: upgrade megadit"
        )
    if version < FORMAT_VERSION:
        raise UserError(
            f"{path} has format version {version}, from before the first release; this version reads {FORMAT_VERSION}: "
            "write it again from its run (`megadit bundle`), or convert its weights again"
        )
    missing = {"components", "fingerprints", "defaults", "files"} - manifest.keys()
    if missing:
        raise UserError(f"{file} lacks {', '.join(sorted(missing))}")
    boundary = manifest.get("boundary", 0.5)
    if not isinstance(boundary, float) or not 0 < boundary < 1:
        raise UserError(f"{file}: boundary is {boundary!r:.60}, not a noise level t between 0 and 1")
    for name in ("components", "fingerprints", "defaults", "files", "training", "license"):
        if not isinstance(manifest.get(name) or {}, dict):
            raise UserError(f"{file}: {name} is {manifest[name]!r:.60}, not names and values")
    conditioning = (manifest.get("training") or {}).get("conditioning") or []
    if not isinstance(conditioning, list | dict) or not all(isinstance(kind, str) for kind in conditioning):
        raise UserError(f"{file}: training.conditioning is {conditioning!r:.60}, not names")
    for name, expected in manifest["files"].items():
        if not isinstance(expected, dict) or not {"bytes", "sha256"} <= expected.keys():
            raise UserError(f"{file} gives no size and checksum of {name!r:.60}")
    return manifest


def _defaults(path: Path, values: Mapping[str, Any]) -> SamplingSettings:
    """Read the sampling defaults of a bundle, which is untrusted: they may not name other files.

    Raises:
        UserError: for invalid settings, and for a path.
    """
    defaults = SamplingSettings.from_dict(values)
    if defaults.autoguidance:
        raise UserError(
            f"{path / MANIFEST_FILE}: defaults.autoguidance={defaults.autoguidance!r:.100} names a checkpoint outside "
            'the bundle, which is not allowed; set it to "", and give --autoguidance PATH'
        )
    return defaults
