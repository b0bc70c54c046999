"""Triton model repository of a CLIP model or a classifier: the models of `backend/features.py`.

image_to_features/, text_to_features/   of a CLIP model
image_to_classes/                       of a classifier; labels.txt names its classes, for Triton's clients
image_tower/, text_tower/, classifier/  exported networks as separate models, with --networks
"""

import json
import os
from dataclasses import asdict
from pathlib import Path

from megadit.infer.runtimes.load import TORCH, check_runtime, open_exported
from megadit.infer.runtimes.options import RuntimeOptions
from megadit.models.bundle import Bundle
from megadit.models.diffusion.conditioning_settings import MediaLimits
from megadit.models.shared.cli.setting import settings_of
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_directory
from megadit.serve.backend.features import MODELS
from megadit.serve.repository.model_config import Scheduling, features_config
from megadit.serve.repository.network_config import check_replaceable, write_model, write_networks
from megadit.serve.service_info import Limits

LIMITS = (*settings_of(MediaLimits), "max_prompt_characters")
"""Limits of a request that apply to these models."""
LABELS = "labels.txt"


def build_feature_repository(
    bundle: Bundle,
    repository: str | os.PathLike,
    *,
    scheduling: Scheduling | None = None,
    runtime: str = TORCH,
    with_networks: bool = False,
    limits: dict[str, int] | None = None,
) -> Path:
    """Writes the repository atomically, and returns its path; an existing one is replaced.

    `limits` replaces those of `LIMITS`; `with_networks` adds each exported network as a model of Triton's own backends.

    Raises:
        UserError: for a network without classes, one that was not exported for `runtime`, and a directory that holds
            something else.
    """
    check_runtime(RuntimeOptions(runtime=runtime))
    scheduling, path, models = scheduling or Scheduling(), Path(repository), MODELS[bundle.kind]
    if scheduling.ranks > 1:
        raise UserError(f"--ranks={scheduling.ranks} is for models of videos: leave it out")
    if any(model.width(bundle.config) is None for model in models.values()):
        raise UserError(f"the network of {bundle.path} was trained without classes: fine-tune it first")
    if runtime != TORCH:
        open_exported(bundle, runtime)
    check_replaceable(path, models)
    seen = bundle.defaults
    pixels = seen.num_frames * seen.height * seen.width
    of_request = Limits(max_frames=seen.num_frames, max_pixels=pixels, max_work=pixels, **(limits or {}))
    parameters = {"runtime": runtime, "limits": json.dumps(asdict(of_request))}
    with atomic_directory(path) as temporary:
        source = bundle.path
        for name, model in models.items():
            labels = [label.replace("\n", " ") for label in model.labels(bundle)]
            config = features_config(
                name,
                scheduling,
                input=model.input,
                output=model.output,
                width=model.width(bundle.config),
                labels=LABELS if labels else None,
                parameters=parameters,
            )
            source = write_model(temporary, name, config=config, module="features_model", bundle=source)
            if labels:
                (temporary / name / LABELS).write_text("\n".join([*labels, ""]), encoding="utf-8")
        if with_networks:
            write_networks(bundle, runtime, temporary)
    return path
