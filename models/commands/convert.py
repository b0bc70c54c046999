"""`megadit convert`: imports and exports published weights.

    megadit convert nvidia/Cosmos-1.0-Diffusion-7B-Text2World cosmos        # from the hub's cache: a bundle
    megadit convert DiT-XL-2-256/ dit --dtype bfloat16                      # diffusers' pipeline, tokenizer included
    megadit convert stable-diffusion-v1-5/ sd                               # also XL
    megadit convert iter_0010000/ bundle --tokenizer CV4x8x8/ --text_encoder t5-11b/
    megadit convert Cosmos-Tokenizer-CV4x8x8/autoencoder.jit tokenizer      # a single component
    megadit convert bundle out --to diffusers
    megadit convert google/vit-base-patch16-224 vit                         # and back: --to transformers; CLIP too
    megadit convert lora.safetensors adapter --base bundle                  # an adapter as a PEFT folder
    megadit convert high=lora.safetensors adapter --base bundle             # for one of two experts: high= or low=
    megadit convert adapter lora.safetensors                                # an adapter as one file, for diffusers
    megadit convert adapter lora.safetensors --to original                  # and for ComfyUI

Tensors are read, converted and written one at a time.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from megadit.models.bundle import Bundle, check_single
from megadit.models.bundle_writer import write_bundle
from megadit.models.configs.config import DiTConfig
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.convert import pipelines, schedulers, stable_diffusion
from megadit.models.convert.adapters.files import is_adapter, read_adapter, with_base, write_adapter
from megadit.models.convert.published import (
    TRANSFORMERS,
    WEIGHTS,
    Published,
    open_published,
    published_conditionings,
    transformers_type,
)
from megadit.models.convert.published_defaults import kind_of, published_defaults
from megadit.models.convert.written import diffusers_folder, write_diffusers, write_original, write_transformers
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.lora.named import split_expert
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_directory, is_bundle, read_json, write_json
from megadit.models.storage import components as parts
from megadit.models.storage import hub
from megadit.models.storage.license import License, find_license
from megadit.models.storage.tensor_source import DTYPES, from_state_dict, open_safetensors, write_safetensors
from megadit.models.text_encoders import (
    ClassLabels,
    CLIPTextEncoder,
    QwenVLTextEncoder,
    T5TextEncoder,
    TextEncoder,
    load_text_encoder,
)
from megadit.models.text_encoders.image_encoder import RELEASED, ImageEncoder
from megadit.models.text_encoders.t5 import RELEASED_FILES
from megadit.models.text_encoders.token_ids import published_words
from megadit.models.tokenizers import Autoencoder, VideoTokenizer, holds_tokenizer, load_tokenizer, published_tokenizer
from megadit.models.tokenizers.network import OURS
from megadit.models.tokenizers.released_wan import FILES as WAN_FILES

T5 = "google-t5/t5-11b"
UMT5 = "google/umt5-xxl"
PRECISIONS = {"float32": DTYPES["F32"], "bfloat16": DTYPES["BF16"], "float16": DTYPES["F16"]}


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertOptions:
    source: str = setting(
        help="a published checkpoint (directory, file, or name of a model in the hub's cache), a bundle or an adapter",
        positional=True,
        metavar="SOURCE",
    )
    out: Path = setting(help="folder or file to write; an existing bundle is replaced", positional=True, metavar="OUT")
    to: Literal["bundle", "diffusers", "transformers", "original"] = setting(
        "bundle",
        "output format: a bundle; from a bundle, that of diffusers, transformers (ViT, CLIP) or the original release "
        "(default: {default})",
    )
    tokenizer: str | None = setting(None, "directory of a video tokenizer (default: the pipeline's)", metavar="PATH")
    text_encoder: str | None = setting(
        None,
        "directory or name of a T5, a CLIP, or a Qwen2.5-VL for Predict2.5 (default: the pipeline's, else "
        f"{T5}; for Wan {UMT5})",
        metavar="PATH",
    )
    image_encoder: str | None = setting(
        None,
        "directory or name of the CLIP that encodes conditioning images (default: the pipeline's)",
        metavar="PATH",
    )
    dtype: str | None = setting(None, "dtype of the network's weights (default: unchanged)", choices=tuple(PRECISIONS))
    base: str | None = setting(
        None,
        "bundle of an adapter's base weights (default: as its metadata say)",
        metavar="BUNDLE",
    )
    compression: str = setting("", "compression of a .jit tokenizer whose folder name lacks it", metavar="TxHxW")


@command(
    ConvertOptions,
    prog="megadit convert",
    description="Converts published weights to a bundle, or a bundle to their format.",
)
def main(options: ConvertOptions) -> int:
    """Run `megadit convert`; the exit code is 0, or 2 after a user's error, printed in one line."""
    if is_adapter(Path(split_expert(options.source)[1])):
        _convert_adapter(options)
    elif options.base is not None:
        raise UserError(f"--base is for adapters, and {options.source} is not one")
    elif options.to != "bundle":
        _export(Path(options.source), options.out, options.to)
    else:
        source = _locate(options.source)
        if holds_tokenizer(source):
            tokenizer = published_tokenizer(source, compression=options.compression)
            with atomic_directory(_free(options.out)) as directory:
                tokenizer.save(directory)
            print(f"{options.out}: a tokenizer with {tokenizer.latent_channels} channels")
        else:
            _import(source, options)
    return 0


def _convert_adapter(options: ConvertOptions) -> None:
    """Convert an adapter; the name of `out` decides the format."""
    plain = ConvertOptions(source=options.source, out=options.out)
    is_original = options.to == "original"
    if options != replace(plain, dtype=options.dtype, base=options.base, to=options.to if is_original else plain.to):
        raise UserError(
            "an adapter becomes one file with diffusers' keys where OUT ends in .safetensors (with ComfyUI's by --to "
            "original), else a folder of PEFT's: leave out all other options but --base and --dtype"
        )
    bundle = None if options.base is None else Bundle.open(options.base)
    expert, path = split_expert(options.source)
    if expert is not None and bundle is None:
        raise UserError(f"{options.source}: name its bundle of two experts (--base BUNDLE), or leave {expert}= out")
    adapter = read_adapter(path, None if bundle is None else bundle.config)
    based = adapter if bundle is None else with_base(adapter, bundle, options.source)
    write_adapter(options.out, based, PRECISIONS.get(options.dtype), is_original=is_original)
    print(f"{options.source}: {adapter.reading}")
    print(f"{options.out}: a {adapter.kind} of {len(adapter.changes)} linears, {adapter.num_parameters:,} numbers")


def _locate(source: str) -> Path:
    path = Path(source)
    return path if path.exists() else hub.local_directory(source, "checkpoint", "the files of the published model")


def _free(out: Path) -> Path:
    """`out`, after a check that at most a component of ours would be replaced."""
    if out.exists() and not (out.is_dir() and (_is_component(out) or not any(out.iterdir()))):
        raise UserError(f"{out} holds something else, and would be replaced; choose another directory")
    return out


def _is_component(path: Path) -> bool:
    """Whether `path` is a tokenizer that this command wrote; published ones have a config.json without a type."""
    config = read_json(path / parts.CONFIG_FILE) if (path / parts.CONFIG_FILE).is_file() else None
    return isinstance(config, dict) and "type" in config


# ------------------------------------------------------------------------------------------------------- in


def _import(source: Path, options: ConvertOptions) -> None:
    published = open_published(source)
    conditionings = published_conditionings(published)
    license = find_license(source, published.config.family)
    tokenizer = _choose_tokenizer(source, options.tokenizer, options.compression)
    if tokenizer is None:
        raise UserError(
            f"{source} is a network without its tokenizer: give --tokenizer (a Cosmos tokenizer, or a directory of "
            f"diffusers' AutoencoderKL or AutoencoderKLWan)"
        )
    defaults = published_defaults(published, tokenizer)
    text_encoder = _choose_text_encoder(source, published, options.text_encoder)
    text_encoder.fingerprint()  # a damaged one is found before the network is written
    write_bundle(
        options.out,
        config=published.config,
        state_dict=published.tensors,
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        image_encoder=_choose_image_encoder(source, published.config, options.image_encoder),
        defaults=defaults,
        training={
            "converted_from": str(options.source),
            **({"conditioning": list(conditionings)} if conditionings else {}),
        },
        dtype=PRECISIONS.get(options.dtype),
        license=license,
        low_noise=published.low_noise,
        boundary=published.boundary,
    )
    if published.config.task == "denoise":
        _print_sampling(published, defaults)
    _print_license(license, options.out)


def _print_sampling(published: Published, defaults: SamplingSettings) -> None:
    """Print the default sampling settings."""
    how = f"sampler {defaults.sampler}, schedule {defaults.schedule}, shift {defaults.shift:g}"
    of = "its scheduler_config.json" if published.scheduler else "its publication: it has no scheduler_config.json"
    print(f"sampled by default with {how}, after {of}", flush=True)
    kind = kind_of(published.config, projects_text=bool(published.text_projection))
    if departing := schedulers.departures(kind, published.scheduler):
        print(f"NOTE: of scheduler_config.json, {', '.join(departing)} is not taken", file=sys.stderr)


def _print_license(license: License, out: Path) -> None:
    print(f"{out}: a bundle; license of the weights: {license.name}", flush=True)
    if license.asks_for_guardrail:
        print(
            "NOTE: the license of these weights asks for a content filter: generate with --guardrail_dir DIRECTORY",
            file=sys.stderr,
        )


def _choose_tokenizer(source: Path, chosen: str | None, compression: str) -> VideoTokenizer | None:
    if chosen is None and (kind := transformers_type(source)) is not None:
        return TRANSFORMERS[kind].pixels_of(source)
    own = [source / "vae", *sorted(source.glob(WAN_FILES))] if source.is_dir() else []
    places = [_locate(chosen)] if chosen is not None else [place for place in own if holds_tokenizer(place)]
    if not places:
        return None
    path = places[0]
    if (path / "vae").is_dir() or holds_tokenizer(path):
        return published_tokenizer(path, compression=compression)
    return load_tokenizer(path)


def _choose_text_encoder(source: Path, published: Published, chosen: str | None) -> TextEncoder:
    """Choose the text encoder: class names for a class-conditional network; else the chosen one, the pipeline's, or the
    one that the network was trained with."""
    if not published.config.has_text:
        numbers = range(published.config.num_classes or 0)
        names = published.class_names or tuple(f"class {i}" for i in numbers) or ("unlabelled",)
        return ClassLabels(names=names)
    if chosen is not None and (Path(chosen) / parts.CONFIG_FILE).is_file():
        if "type" in read_json(Path(chosen) / parts.CONFIG_FILE):
            return load_text_encoder(chosen)
    has_own = transformers_type(source) is not None or (source / "text_encoder" / parts.CONFIG_FILE).is_file()
    has_own = has_own or (source.is_dir() and any(source.glob(RELEASED_FILES)))
    of_pipeline = str(source.absolute()) if has_own else None
    family = "predict2_5" if published.text_projection else published.config.family
    return _TEXT_ENCODERS.get(family, _t5)(published, chosen or of_pipeline)


def _t5(published: Published, model: str | None, usual: str = T5) -> TextEncoder:
    return T5TextEncoder(model=model or usual, text_padding=_padding(published.config))


def _clip(published: Published, model: str | None) -> TextEncoder:
    """CLIP with all 77 tokens attended to. XL reads the penultimate layer, and zeros for an empty text unless its
    pipeline says otherwise."""
    if model is None:
        raise UserError("the pipeline has no text_encoder/: give --text_encoder, the directory of its CLIP")
    is_xl = published.config.pooled_size is not None
    return CLIPTextEncoder(
        model=model,
        layer="penultimate" if is_xl else "last",
        text_padding="tokens",
        empty_text="zeros" if is_xl and published.index.get("force_zeros_for_empty_prompt", True) else "encoded",
    )


def _qwen_vl(published: Published, model: str | None) -> TextEncoder:
    return QwenVLTextEncoder(model=model or QwenVLTextEncoder().model, projection=dict(published.text_projection))


def _words(published: Published, model: str | None) -> TextEncoder:
    return published_words(model, published.config.text_tower.max_length)


_TEXT_ENCODERS: dict[str, Callable[[Published, str | None], TextEncoder]] = {
    "clip": _words,
    "predict2_5": _qwen_vl,
    "stable_diffusion": _clip,
    "wan": partial(_t5, usual=UMT5),
}
"""Family, or variant with another text encoder -> function that loads it from a directory, or its default; else T5."""


def _choose_image_encoder(source: Path, config: NetworkConfig, chosen: str | None) -> ImageEncoder | None:
    if config.image_size is None:
        return None
    has_own = (source / "image_encoder").is_dir() or (source.is_dir() and any(source.glob(RELEASED)))
    of_pipeline = str(source) if has_own else None
    if chosen is None and of_pipeline is None:
        raise UserError(f"{source} reads conditioning images by a CLIP: give --image_encoder, its directory or name")
    encoder = ImageEncoder(model=chosen or of_pipeline)
    encoder.check()
    return encoder


def _padding(config: DiTConfig) -> str:
    """Padding mode: published networks attend to 512 zero-padded tokens, others only to the text."""
    return "none" if config.structure.projects_text and not config.structure.text_mlp else "zeros"


# ------------------------------------------------------------------------------------------------------ out


def _export(source: Path, out: Path, form: str) -> None:
    if not is_bundle(source):
        raise UserError(f"--to {form} needs a bundle, and {source} is not one")
    bundle = Bundle.open(source)
    networks = {part: open_safetensors(source / part / parts.TENSOR_FILE) for part in bundle.networks}
    text_encoder = bundle.load_text_encoder()
    projection = getattr(text_encoder, "projection", {})
    with atomic_directory(_free(out)) as directory:
        if form == "transformers":
            components = bundle.load_tokenizer(), text_encoder
            write_transformers(directory, bundle.config, networks["transformer"], *components)
        elif form == "original":
            check_single(bundle)
            write_original(directory, bundle.config, networks["transformer"], projection)
        else:
            tokenizer = bundle.load_tokenizer()
            side = bundle.defaults.height // tokenizer.spatial_compression
            for part, tensors in networks.items():
                folder = directory / diffusers_folder(bundle.config, part)
                folder.mkdir()
                write_diffusers(folder, bundle.config, tensors, side, projection)
            _export_tokenizer(tokenizer, directory / "vae")
            kind = kind_of(bundle.config, projects_text=bool(projection))
            _export_scheduler(kind, bundle, directory)
            _complete_pipeline(kind, bundle, text_encoder, directory)
        if (source / "notices").is_dir():
            for notice in (source / "notices").iterdir():
                (directory / notice.name).write_bytes(notice.read_bytes())
    print(out)


def _complete_pipeline(kind: str, bundle: Bundle, text_encoder: TextEncoder, directory: Path) -> None:
    """Make the folder a pipeline that diffusers opens, or say why it is not one."""
    boundary = bundle.manifest.get("boundary")
    try:
        pipelines.write_pipeline(directory, kind, bundle.config, text_encoder, bundle.load_image_encoder(), boundary)
    except UserError as error:
        print(f"NOTE: without {pipelines.FILE}, diffusers opens the folders one by one: {error}", file=sys.stderr)


def _export_scheduler(kind: str, bundle: Bundle, directory: Path) -> None:
    """Write the diffusers scheduler that is equivalent, or closest, to the bundle's sampling."""
    defaults = bundle.defaults
    values, other = schedulers.scheduler_values(kind, defaults)
    if not values:
        how = f"sampler {defaults.sampler}, schedule {defaults.schedule}, shift {defaults.shift}"
        print(f"NOTE: no {schedulers.FILE} is written: choose a scheduler near {how}", file=sys.stderr)
        return
    (directory / schedulers.FILE).parent.mkdir()
    if kind == "stable_diffusion":
        values = {**values, "prediction_type": stable_diffusion.prediction_type(bundle.config)}
    write_json(directory / schedulers.FILE, values)
    if other:
        name = values["_class_name"]
        print(f"NOTE: the {name} in {schedulers.FILE} is near the bundle's {', '.join(other)}", file=sys.stderr)


def _export_tokenizer(tokenizer: VideoTokenizer, directory: Path) -> None:
    """Write the tokenizer in diffusers' format, where diffusers has its network."""
    if isinstance(tokenizer, Autoencoder) and tokenizer.network.class_name not in OURS:
        network = tokenizer.network
        directory.mkdir()
        write_json(directory / "config.json", {"_class_name": network.class_name, **network.config})
        write_safetensors(directory / f"{WEIGHTS}.safetensors", from_state_dict(network.tensors()))
