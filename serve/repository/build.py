"""`megadit serve build-repository`: a bundle, or a training directory, becomes a Triton model repository.

text_to_video/config.pbtxt    generated: inputs, batching, queue, instances, limits
text_to_video/1/model.py      imports megadit's TritonPythonModel
text_to_video/1/bundle/       the bundle
text_to_image/                the same for single images, with --images
text_to_video_4_calls/        a student of it, with --student
denoiser/, video_decoder/     exported networks as separate models, with --networks

A CLIP model or a classifier becomes `image_to_features`, `text_to_features` or `image_to_classes` instead.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from megadit.infer.hooks.guardrail import find_guardrail
from megadit.infer.hooks.scorer import find_scorer
from megadit.infer.media.signing import SigningOptions, load_marker
from megadit.infer.pipeline.adapters import CACHE_BYTES, NO_ADAPTER_INPUTS
from megadit.infer.runtimes.load import TORCH, adapter_inputs, check_runtime, open_exported, taken
from megadit.infer.runtimes.options import AUTO, RuntimeOptions, warn_of_cost
from megadit.infer.runtimes.torch import find_device, find_dtype
from megadit.infer.sampling.resolve import DefaultOptions, with_changed_defaults
from megadit.models.bundle import USED_BY, Bundle, check_transformer, open_any_bundle, open_bundle, update_manifest
from megadit.models.convert.adapters.files import bundle_fingerprint, open_adapter
from megadit.models.diffusion.conditioning_settings import MediaLimits
from megadit.models.diffusion.settings import SAMPLERS, STOCHASTIC, SamplingSettings, check_asked
from megadit.models.lora.named import OF_A_KEY, adapters_in, find_adapter
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import group, partial_dataclass, setting, settings_of
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_directory
from megadit.models.storage.components import config_to_dict
from megadit.serve.contract import IMAGE_MODEL, MODEL
from megadit.serve.repository.features import LIMITS, build_feature_repository
from megadit.serve.repository.model_config import Scheduling, service_config
from megadit.serve.repository.network_config import check_replaceable, write_model, write_networks
from megadit.serve.service_info import AdapterInfo, Limits, ServiceInfo, calls_in_words, calls_of

_SIZE_BEYOND_DEFAULT = 4
_STEPS_BEYOND_DEFAULT = 10


def build_repository(
    checkpoint: str | os.PathLike,
    repository: str | os.PathLike,
    *,
    scheduling: Scheduling | None = None,
    dtype: str = AUTO,
    runtime: str = "torch",
    with_images: bool = False,
    with_networks: bool = False,
    limits: dict[str, int] | None = None,
    adapters: str | os.PathLike | None = None,
    adapter_bytes: int = CACHE_BYTES,
    defaults: Sequence[str] = (),
    guardrail_dir: str | os.PathLike | None = None,
    scorer_dir: str | os.PathLike | None = None,
    signing: SigningOptions | None = None,
    students: Sequence[str | os.PathLike] = (),
) -> Path:
    """Writes the repository atomically, and returns its path; an existing one is replaced.

    Args:
        runtime: torch, or onnx, openvino or tensorrt for a bundle that `megadit export` made.
        limits: fields of `Limits`; others follow from the bundle's defaults.
        with_networks: adds each exported network as a model of Triton's own backends.
        adapters: folder of adapters that requests may name, read at run time and not copied.
        adapter_bytes: limit of the unused adapters that stay in memory.
        defaults: changes to the bundle's defaults, such as num_steps=20.
        guardrail_dir: folder of a content filter (`infer/hooks/guardrail.py`), executed in Triton and not copied.
        scorer_dir: folder of a scorer (`infer/hooks/scorer.py`) for requests with `evaluate`, likewise.
        signing: files to sign videos with; the repository holds only their paths.
        students: bundles that `megadit distill` made of this one; each becomes a model, named by its calls.

    Raises:
        UserError: for a checkpoint that cannot be served, and a directory that holds other files.
    """
    if dtype != AUTO:
        find_dtype(dtype)
    check_runtime(RuntimeOptions(runtime=runtime, dtype=dtype))
    bundle = with_changed_defaults(open_bundle(checkpoint), defaults)
    if runtime != "torch":
        open_exported(bundle, runtime)
    path = Path(repository)
    check_replaceable(path, [MODEL])
    scheduling = scheduling or Scheduling()
    if scheduling.tp_size * scheduling.cp_size > 1:
        check_transformer(bundle, "it does not support several ranks; leave out --tp_size and --cp_size")
    folder = None if adapters is None else _adapter_folder(adapters, bundle, runtime, scheduling)
    learnt = _students(students, runtime)
    info = service_info(bundle, bundle.defaults, limits, runtime, folder)
    models = {MODEL: replace(info, students=tuple(learnt))}
    if with_images:
        of_images = replace(bundle.defaults, num_frames=1)
        models[IMAGE_MODEL] = service_info(bundle, of_images, limits, runtime, folder)
    models |= {name: service_info(each, each.defaults, limits, runtime) for name, each in learnt.items()}
    others = {"adapters": str(folder or ""), "adapter_bytes": str(adapter_bytes)}
    signing = signing or SigningOptions()
    load_marker(signing)
    found = signing.found()  # from the environment, too: a container has another one
    others |= {name: str(found.get(name, "")) for name in asdict(signing)}
    others["guardrail_dir"] = "" if guardrail_dir is None else str(find_guardrail(guardrail_dir).parent)
    others["scorer_dir"] = "" if scorer_dir is None else str(find_scorer(scorer_dir).parent)
    models = {name: replace(info, has_scorer=scorer_dir is not None) for name, info in models.items()}
    with atomic_directory(path) as temporary:
        sources = {name: student.path for name, student in learnt.items()}
        for name, info in models.items():
            own = others | ({"adapters": ""} if name in learnt else {})
            config = service_config(name, info, scheduling, dtype=dtype, runtime=runtime, others=own)
            source = sources.get(name, bundle.path)
            written = write_model(temporary, name, config=config, module="triton_model", bundle=source)
            if name == MODEL:
                sources[IMAGE_MODEL] = written
                if defaults:
                    update_manifest(written, defaults=bundle.defaults.to_dict())
        if with_networks:
            write_networks(bundle, runtime, temporary)
    return path


def _students(paths: Sequence[str | os.PathLike], runtime: str) -> dict[str, Bundle]:
    """Students by the names of their models. Raises UserError for a bundle that is not a student, or two students with
    the same number of calls."""
    found: dict[str, Bundle] = {}
    for path in paths:
        student = open_bundle(path)
        has_guidance_embedding = student.config.guidance_embedding_range is not None
        if (calls := calls_of(student.defaults.to_dict(), has_guidance_embedding=has_guidance_embedding)) is None:
            raise UserError(f"--student {path} is not a student: its defaults have guidance, or no sigmas of their own")
        if (name := f"{MODEL}_{calls_in_words(calls).replace(' ', '_')}") in found:
            raise UserError(f"--student {path} takes as many calls as {found[name].path}: serve one of them")
        if runtime != TORCH:
            open_exported(student, runtime)
        found[name] = student
    return found


def _adapter_folder(path: str | os.PathLike, bundle: Bundle, runtime: str, scheduling: Scheduling) -> Path:
    folder = Path(path).absolute()
    if scheduling.ranks > 1 and runtime != TORCH:
        raise UserError(
            f"--adapters with --ranks={scheduling.ranks} needs the torch runtime: leave out --ranks or "
            f"--runtime={runtime}"
        )
    if runtime != TORCH and adapter_inputs(bundle, runtime) is None:
        raise UserError(f"--adapters: {bundle.path} was {NO_ADAPTER_INPUTS}")
    if not folder.is_dir():
        raise UserError(f"{path} is not a folder; adapters are the folders and .safetensors files in it")
    return folder


def service_info(
    bundle: Bundle,
    defaults: SamplingSettings,
    limits: dict[str, int] | None,
    runtime: str = "torch",
    adapters: Path | None = None,
) -> ServiceInfo:
    """Build the description of a bundle's service for clients."""
    pixels = defaults.num_frames * defaults.height * defaults.width
    multiple = bundle.load_tokenizer().spatial_compression * bundle.config.patch_spatial
    shared_memory = {
        "max_frames": 1 if defaults.num_frames == 1 else defaults.num_frames * _SIZE_BEYOND_DEFAULT,
        "max_pixels": pixels * _SIZE_BEYOND_DEFAULT,
        "max_work": pixels * _SIZE_BEYOND_DEFAULT * defaults.num_steps * _STEPS_BEYOND_DEFAULT,
        "max_media_pixels": max(MediaLimits().max_media_pixels, pixels * _SIZE_BEYOND_DEFAULT),
    }
    limits = Limits(**shared_memory | (limits or {}))
    return ServiceInfo(
        defaults=defaults.to_dict(),
        limits=limits,
        samplers=SAMPLERS,
        size_multiple=multiple,
        examples=bundle.prompts,
        eta_samplers=(*STOCHASTIC, *(alias for name in STOCHASTIC for alias in SAMPLERS[name].aliases)),
        conditionings=taken(bundle, runtime),
        guidance_embedding_range=bundle.config.guidance_embedding_range or (),
        longest_caption=bundle.longest_caption,
        adapters=None if adapters is None else _adapter_info(bundle, adapters, runtime, limits.max_adapter_rank),
    )


def _adapter_info(bundle: Bundle, folder: Path, runtime: str, max_rank: int) -> AdapterInfo:
    names = tuple(name for name in adapters_in(folder) if not OF_A_KEY.fullmatch(name))
    asked = {name: _defaults_of(folder, name) for name in names}
    slots = None if runtime == TORCH else adapter_inputs(bundle, runtime)
    return AdapterInfo(
        names=names,
        base=" ".join(bundle_fingerprint(bundle, network) for network in bundle.networks),
        network=config_to_dict(bundle.config),
        slots=None if slots is None else slots.to_dict(),
        max_rank=max_rank,
        defaults={name: values for name, values in asked.items() if values},
    )


def _defaults_of(folder: Path, name: str) -> dict[str, Any]:
    """Return an adapter's default settings; {} for an unreadable one: requests that use it get the error."""
    try:
        return check_asked(open_adapter(find_adapter(folder, name, sys.maxsize)).defaults, f"{name}: ")
    except UserError:
        return {}


PartialLimits = partial_dataclass("PartialLimits", Limits)
_OF_FEATURES = ("networks", "runtime", *settings_of(Scheduling), *LIMITS)
"""Options that apply to embedding and classification models, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RepositoryOptions:
    checkpoint: str = setting(help="a bundle or a training directory", positional=True, metavar="CHECKPOINT")
    repository: str = setting(help="the directory to write", positional=True, metavar="REPOSITORY")
    images: bool = setting(False, f"add the model {IMAGE_MODEL} for single images")
    networks: bool = setting(
        False, "add each exported network as a model of its own, for your own pipelines (needs --runtime)"
    )
    dtype: str = setting(
        AUTO,
        "dtype of the network: float32, bfloat16, float16, or auto (default): as its weights are stored, "
        "where the device supports that",
    )
    adapters: Path | None = setting(
        None, "folder of adapters that requests may name; read at run time, not copied", metavar="DIR"
    )
    adapter_bytes: int = setting(
        CACHE_BYTES, "bytes of unused adapters that stay in memory (default: 2 GiB)", low=0, metavar="N"
    )
    guardrail_dir: Path | None = setting(
        None, "folder of a content filter for every prompt and video; executed there, not copied", metavar="DIR"
    )
    student: tuple[Path, ...] = setting(
        (),
        "a student by `megadit distill`, served as another model; repeat for several",
        repeated=True,
        metavar="BUNDLE",
    )
    scorer_dir: Path | None = setting(
        None,
        "folder of a scorer (scorer.py) for requests that ask for scores; executed there, not copied",
        metavar="DIR",
    )
    runtime: str = setting(
        "torch", "torch; onnx, openvino or tensorrt for a bundle of `megadit export` (default: {default})"
    )
    defaults: DefaultOptions = group(DefaultOptions)
    scheduling: Scheduling = group(Scheduling, "queue and devices")
    signing: SigningOptions = group(SigningOptions, "signatures (C2PA) in videos and images")
    limits: PartialLimits = group(
        PartialLimits, "limits of a request (defaults: a multiple of the bundle's default video)"
    )


GROUPS: dict[str, tuple[str, ...]] = {
    "most used": ("images", "dtype", "runtime", "device", "default", "adapters", "student"),
    "queue and devices": tuple(name for name in settings_of(Scheduling) if name != "device"),
    "limits of a request (defaults: a multiple of the bundle's default video)": tuple(settings_of(Limits)),
    "safety": ("guardrail_dir", "scorer_dir", "c2pa_certificate", "c2pa_key"),
    "other": ("networks", "adapter_bytes"),
}
EXAMPLES = (
    "megadit serve build-repository runs/demo/bundle models",
    "megadit serve build-repository exported models --runtime onnx --images --max_videos 2",
    "megadit serve build-repository bundle models --dtype bfloat16 --device 0,1,2,3 --ranks 2 --tp_size 2",
)


@command(
    RepositoryOptions,
    groups=GROUPS,
    examples=EXAMPLES,
    prog="megadit serve build-repository",
    description="Turns a bundle, or a training directory, into a Triton model repository.",
)
def main(options: RepositoryOptions) -> None:
    """Runs `megadit serve build-repository`; returns its exit code."""
    bundle = open_any_bundle(options.checkpoint)
    path = _of_videos(options) if bundle.kind == "video" else _of_features(bundle, options)
    print(
        f"{path}: {', '.join(sorted(folder.name for folder in path.iterdir()))}; `megadit serve run {path}` serves it"
    )


def _of_videos(options: RepositoryOptions) -> Path:
    if options.dtype != AUTO and not options.scheduling.gpus:
        warn_of_cost(find_device(options.scheduling.device), find_dtype(options.dtype))
    return build_repository(
        options.checkpoint,
        options.repository,
        scheduling=options.scheduling,
        dtype=options.dtype,
        runtime=options.runtime,
        with_images=options.images,
        with_networks=options.networks,
        limits=_set_limits(options),
        adapters=options.adapters,
        adapter_bytes=options.adapter_bytes,
        defaults=options.defaults.default,
        guardrail_dir=options.guardrail_dir,
        scorer_dir=options.scorer_dir,
        signing=options.signing,
        students=options.student,
    )


def _of_features(bundle: Bundle, options: RepositoryOptions) -> Path:
    """Build the repository of a CLIP model or a classifier; raises UserError for options that are only for videos."""
    asked = _by_name(options)
    plain = _by_name(RepositoryOptions(checkpoint=options.checkpoint, repository=options.repository))
    if wrong := [name for name in asked if asked[name] != plain[name] and name not in _OF_FEATURES]:
        raise UserError(f"--{wrong[0]} is for models of videos, and {bundle.path} {USED_BY[bundle.kind]}: leave it out")
    return build_feature_repository(
        bundle,
        options.repository,
        scheduling=options.scheduling,
        runtime=options.runtime,
        with_networks=options.networks,
        limits=_set_limits(options),
    )


def _by_name(options: RepositoryOptions) -> dict[str, Any]:
    """The values of options, including those of groups."""
    values = {each.name: getattr(options, each.name) for each in fields(options)}
    groups = {name: asdict(value) for name, value in values.items() if is_dataclass(value)}
    return {name: value for each in values for name, value in groups.get(each, {each: values[each]}).items()}


def _set_limits(options: RepositoryOptions) -> dict[str, int]:
    return {name: value for name, value in asdict(options.limits).items() if value is not None}
