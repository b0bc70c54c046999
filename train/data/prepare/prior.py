"""`megadit prepare prior BUNDLE OUT`, `megadit prepare trajectories BUNDLE OUT`: data sets of a model's samples.

    megadit prepare prior BUNDLE data/dogs --prompt "a dog" --count 200 --guidance 1
    megadit prepare trajectories BUNDLE data/pairs --prompt_file captions.txt --count 20000 --sampler euler

Prior samples show the class of a subject: a model fine-tuned on one subject forgets the class, unless it also trains on
its own earlier samples (prior preservation: DreamBooth, arXiv 2208.12242, section 3.3). Blend them with those of the
subject (README.md, "Mixing"); `data.prior_weight` is their loss weight.

Trajectories are pairs of initial noise (a seed) and final video, for `train.distill.objective=regression`. Their
sampler must be deterministic.

Samples are stored as latents, with prompts in turn and sample n from seed n. Under torchrun the shards are divided
among the ranks. After an interruption the same command continues, and writes the same bytes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megadit.infer.generate.specs import prompts_alone
from megadit.infer.pipeline.adapters import Scales, scaled_adapters
from megadit.infer.pipeline.batches import nothing_around
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.pipeline.results import GeneratedVideo, checkpoint_fingerprint
from megadit.infer.sampling.resolve import latent_size, resolve_settings
from megadit.infer.sampling.samplers import settings_randomness
from megadit.models.bundle import Bundle, open_bundle
from megadit.models.diffusion.settings import OF_PROMPTS, PartialSettings, SamplingSettings
from megadit.models.shared.cli.options import read_options
from megadit.models.shared.cli.setting import group, setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.progress import Progress
from megadit.train.data.ingest.workers import Shard, Workers, join_workers
from megadit.train.data.prepare.requests import begin, missing_shards
from megadit.train.data.prepare.states import States
from megadit.train.data.writer import describe_dataset, is_prepared, sample_members, write_encoders, write_members
from megadit.train.dataset.dataset_info import DatasetInfo

SHARD_SIZE = 64
"""Samples per shard, which is the unit of work and of progress."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Purpose:
    """Purpose of generated samples: prior preservation, or trajectories."""

    name: str
    """Prefix of their keys."""
    description: str
    is_prior: bool
    next: str

    @property
    def request_file(self) -> str:
        """File with the request, so that shards of different requests are not mixed."""
        return f"{self.name}.json"


PRIOR = Purpose(
    name="prior",
    description="Samples of a model for prior preservation (DreamBooth).",
    is_prior=True,
    next="blend them with those of the subject, see data.prior_weight",
)
TRAJECTORIES = Purpose(
    name="trajectories",
    description="Pairs of noise and video of a model, for distillation.",
    is_prior=False,
    next="train on them with train.distill.objective=regression",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOptions:
    bundle: str = setting(help="the model: a bundle, or a training directory", positional=True, metavar="BUNDLE")
    out: Path = setting(help="folder to write", positional=True, metavar="OUT")
    prompt: Sequence[str] = setting(
        (), "prompt of the samples; several take turns", nargs="+", repeated=True, metavar="TEXT"
    )
    prompt_file: str = setting("", "file with more prompts, one per line", metavar="PATH")
    seed: int = setting(0, "seed of the first sample; the others count on from it (default: {default})", low=0)
    batch_size: int | None = setting(None, "videos generated at once", above=0)
    device: str = setting("auto", "device: auto, cpu, cuda or cuda:N (default: auto)", metavar="NAME")
    dtype: str = setting("float32", "precision of the network (default: {default})", metavar="NAME")
    overwrite: bool = setting(False, "replace a finished folder")
    settings: PartialSettings = group(
        PartialSettings, "sampling (default: as the checkpoint says)", only=(*OF_PROMPTS, "churn")
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PriorOptions(SampleOptions):
    count: int = setting(200, "number of samples (default: {default})", above=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prior:
    """A request for samples of a model."""

    purpose: Purpose
    prompts: Sequence[str]
    settings: SamplingSettings
    count: int
    seed: int
    batch_size: int | None = None
    adapters: Scales = field(default_factory=dict)
    describe: Callable[[GeneratedVideo], dict[str, Any]] = lambda video: {}
    """Returns what the description of a sample says in addition."""
    states: States | None = None
    """Records states of the sampling, which are stored with the samples."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further JSON values that determine the bytes of the data set."""

    def request(self, bundle: Bundle) -> dict[str, Any]:
        """Settings that determine the bytes of the data set, as JSON values."""
        settings = {
            name: list(value) if isinstance(value, tuple) else value for name, value in self.settings.to_dict().items()
        }
        return {
            "model": checkpoint_fingerprint(bundle),
            "prompts": list(self.prompts),
            "count": self.count,
            "seed": self.seed,
            "settings": settings,
            **self.more,
            **({"adapters": [asdict(adapter) for adapter in scaled_adapters(self.adapters)]} if self.adapters else {}),
        }


GROUPS: dict[str, tuple[str, ...]] = {
    "most used": ("prompt", "prompt_file", "count", "seed", "overwrite"),
    "sampling (default: as the checkpoint says)": (*OF_PROMPTS, "churn"),
    "machine": ("batch_size", "device", "dtype"),
}


PURPOSES = {each.name: each for each in (PRIOR, TRAJECTORIES)}


def command(source: str, argv: list[str]) -> int:
    """Runs `megadit prepare` for one of `PURPOSES`."""
    purpose = PURPOSES[source]
    prog = f"megadit prepare {purpose.name}"
    about = {"description": purpose.description, "examples": (f"{prog} bundle data/made --prompt robot --count 200",)}
    options = read_options(PriorOptions, argv, groups=GROUPS, prog=prog, **about)
    bundle = open_bundle(options.bundle)
    settings = resolve_settings(bundle.defaults, **asdict(options.settings))
    if purpose is TRAJECTORIES:
        _check_ode(settings)
        settings = replace(settings, noise_scale=1.0)  # regression needs the noise as it was drawn
    prior = Prior(
        purpose=purpose,
        prompts=prompts_of(options),
        settings=settings,
        count=options.count,
        seed=options.seed,
        batch_size=options.batch_size,
    )
    count = prepare_samples(options, bundle, prior)
    if count is not None:
        print(f"{options.out}: {count} samples; {purpose.next}")
    return 0


def prepare_samples(
    options: SampleOptions, bundle: Bundle, prior: Prior, finish: Callable[[Path], int] | None = None
) -> int | None:
    """Write the data set of a request; `finish` may change its shards once all are there, and returns how many samples
    they have.

    Returns:
        the number of samples, on the first rank alone.

    Raises:
        UserError: for a folder that holds something else, or settings that the model cannot sample.
    """
    tokenizer, text_encoder = bundle.load_tokenizer(), bundle.load_text_encoder()
    latent_size(prior.settings, bundle.config, tokenizer)  # raises for an unsupported size before anything is written
    with join_workers(Shard()) as workers:
        if workers.is_first:
            request = prior.request(bundle)
            begin(options.out, prior.purpose.request_file, request, overwrite=options.overwrite)
        workers.wait()
        if is_prepared(options.out):
            return DatasetInfo.read(options.out).num_samples["train"] if workers.is_first else None
        pipeline = TextToVideo.from_pretrained(
            bundle,
            device=str(workers.device) if options.device == "auto" else options.device,
            dtype=options.dtype,
            tokenizer=tokenizer,
            text_encoder=text_encoder,
        )
        if prior.states is not None:
            prior.states.watch(pipeline)
        write_shards(options.out, pipeline, prior, workers)
        workers.wait()
        if not workers.is_first:
            return None
        count = prior.count if finish is None else finish(options.out)
        write_encoders(options.out, tokenizer, text_encoder)
        describe_dataset(options.out, tokenizer, text_encoder, {"train": count, "val": 0})
        return count


def _check_ode(settings: SamplingSettings) -> None:
    if settings_randomness(settings, torch.zeros(1, dtype=torch.long), (1, 1, 1, 1)):
        raise UserError(
            f"the sampler {settings.sampler} adds noise while sampling (eta={settings.eta:g}, "
            f"churn={settings.churn:g}), and videos would depend on more than their initial noise: give "
            "--sampler euler --eta 0 --churn 0, or dpmpp_2m, which adds none"
        )


def prompts_of(options: SampleOptions) -> list[str]:
    prompts = [*options.prompt, *prompts_alone(options.prompt_file)]
    if not prompts:
        raise UserError('there is no prompt; give --prompt "a dog" or --prompt_file FILE')
    return prompts


def write_shards(out: Path, pipeline: TextToVideo, prior: Prior, workers: Workers) -> None:
    """Write this rank's missing shards, each atomically."""
    missing = missing_shards(out, "train", prior.count, SHARD_SIZE, workers)
    with Progress(sum(map(len, missing.values())), "making samples", enabled=workers.is_first) as bar:
        for path, numbers in missing.items():
            write_members(path, _members(pipeline, prior, numbers, bar))


def _members(pipeline: TextToVideo, prior: Prior, numbers: range, bar: Progress) -> Iterator[tuple[str, bytes]]:
    prompts = [prior.prompts[number % len(prior.prompts)] for number in numbers]
    seeds = [prior.seed + number for number in numbers]
    settings, around = prior.settings, nothing_around if prior.states is None else prior.states.around
    of_batches = {"batch_size": prior.batch_size, "adapters": prior.adapters, "around": around}
    videos = pipeline.stream(prompts, settings, seeds=seeds, **of_batches)
    for place, (number, video) in enumerate(zip(numbers, videos, strict=True)):
        text = pipeline.text_encoder.encode([video.prompt])
        text_LE = text.features_BLE[0, : text.length_B[0]]
        description = {
            "caption": video.prompt,
            "num_frames": settings.num_frames,
            "height": settings.height,
            "width": settings.width,
            "fps": settings.fps if settings.num_frames > 1 else 0.0,
            "seed": prior.seed + number,
        } | ({"prior": True} if prior.purpose.is_prior else {})
        description |= prior.describe(video)
        tensors = {"latent": video.latents_CTHW.half()} | ({"text": text_LE.cpu().half()} if len(text_LE) else {})
        if prior.states is not None:
            tensors["states"], description["states"] = prior.states.of(place, video.seed)
        yield from sample_members(f"{prior.purpose.name}-{prior.seed + number:08d}", description, tensors)
        bar.advance(1)
