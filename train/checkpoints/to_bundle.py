"""`megadit bundle CHECKPOINT OUT`: converts a training checkpoint of any layout to a bundle or an adapter.

    megadit bundle runs/digits bundle                  # the newest checkpoint, the EMA weights with the lowest loss
    megadit bundle runs/digits bundle --ema 0.05 --step 2000
    megadit bundle runs/digits bundles --step '*000'   # one for every thousandth step: bundles/1000 and so on
    megadit bundle runs/digits/checkpoints/iter_0002000 bundle --ema none
    megadit bundle runs/subject adapter                # run with train.adapter: a PEFT folder
    megadit bundle bundle merged --merge adapter:0.8   # a bundle with the adapter merged into its weights
    megadit bundle bundle mean --average other:0.5     # mean of the weights of two bundles

Tokenizer and text encoder are copied from the folder of the data set.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain, compress, islice
from pathlib import Path
from typing import Any

from megadit.infer.sampling.resolve import DefaultOptions, changed_defaults
from megadit.models.bundle import Bundle, open_bundle
from megadit.models.bundle_writer import write_bundle
from megadit.models.convert.adapters.adapter import Adapter
from megadit.models.convert.adapters.files import write_adapter
from megadit.models.convert.merging.average import average_bundles
from megadit.models.convert.merging.merge import merge_bundle
from megadit.models.lora.named import parse_adapters
from megadit.models.megatron.checkpoint import (
    CONFIG,
    base_of,
    ema_profiles,
    find_checkpoints,
    is_complete,
    read_adapter,
    read_network,
    read_state,
)
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import group, setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import is_bundle
from megadit.models.shared.words import MOST_CAPTIONS, read_words, split_words, words_of
from megadit.models.text_encoders import HashedWordEncoder, TextEncoder, load_text_encoder
from megadit.models.tokenizers import load_tokenizer
from megadit.train.checkpoints.sampling_defaults import sampling_defaults
from megadit.train.config.load import load_config
from megadit.train.config.schema import RunConfig
from megadit.train.data.packs.conditioning import parse_kinds
from megadit.train.dataset.dataset_info import DatasetInfo, captions_of
from megadit.train.dataset.places import is_url

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""OWNER/NAME."""
NUM_PROMPTS = 6
"""Number of sample prompts in a bundle, as on the page of `megadit serve demo`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleOptions:
    checkpoint: Path = setting(
        help="folder of a run, or one of its checkpoints/iter_*; with --merge or --average a bundle", positional=True
    )
    out: Path = setting(help="the bundle to write, or the adapter; one already there is replaced", positional=True)
    ema: str = setting(
        "best",
        "EMA weights to use: those with the lowest validation loss (default), none, or a sigma_rel",
        metavar="best|none|SIGMA_REL",
    )
    step: str | None = setting(
        None, "step of the checkpoint (default: the newest); a pattern such as '*000' writes all as OUT/N", metavar="N"
    )
    dataset: str | None = setting(
        None, "folder or URL of the data set, if it is no longer at data.path", metavar="PLACE"
    )
    merge: tuple[str, ...] = setting(
        (),
        "adapter to add to the weights of a bundle, and its scale (default: 1); repeat for several; high=PATH or "
        "low=PATH for the high-noise or low-noise expert alone",
        repeated=True,
        metavar="PATH[:SCALE]",
    )
    average: tuple[str, ...] = setting(
        (),
        "bundle of the same network to average with, and its weight relative to 1 of the bundle (default: 1); "
        "repeat for several",
        repeated=True,
        metavar="PATH[:WEIGHT]",
    )
    defaults: DefaultOptions = group(DefaultOptions)


@command(BundleOptions, prog="megadit bundle", description="Turns a training checkpoint into a bundle.")
def main(options: BundleOptions) -> int:
    """Run the command; return 0, or 2 after printing an error."""
    if options.merge or options.average:
        _rewrite(options)
        return 0
    for checkpoint, out in chosen_checkpoints(options):
        ema = choose_average(checkpoint, options.ema)
        convert(checkpoint, out, ema=ema, dataset=options.dataset, defaults=options.defaults.default)
        average = "the weights without EMA" if ema is None else f"EMA weights of sigma_rel {ema:g}"
        print(f"{out}: {average} from {checkpoint}", flush=True)
    return 0


def chosen_checkpoints(options: BundleOptions) -> list[tuple[Path, Path]]:
    """(checkpoint, path of its bundle) of the requested step, or of all steps that match a pattern. Raises UserError if
    there is none."""
    step = options.step
    if step is None or not set(step) & set("*?["):
        return [(find_checkpoint(options.checkpoint, step), options.out)]
    found = find_checkpoints(options.checkpoint / "checkpoints")
    if not any(fits := [fnmatchcase(step_of(checkpoint), step) for checkpoint in found]):
        raise UserError(f"--step {step}: {options.checkpoint} has checkpoints of the steps {_steps(found)}")
    return [(checkpoint, options.out / step_of(checkpoint)) for checkpoint in compress(found, fits)]


def step_of(checkpoint: Path) -> str:
    """Step of a checkpoint as text, without leading zeros."""
    return str(int(checkpoint.name.removeprefix("iter_")))


def _steps(checkpoints: Sequence[Path]) -> str:
    return ", ".join(map(step_of, checkpoints)) or "none"


def _rewrite(options: BundleOptions) -> None:
    """Write a bundle again with other weights."""
    changes = {"merge": options.merge} if options.merge else {"average": options.average}
    if options != replace(BundleOptions(checkpoint=options.checkpoint, out=options.out), **changes):
        raise UserError(
            "--merge and --average take a bundle as it is, and only one of the two: leave out --ema, --step, --dataset "
            "and --default"
        )
    bundle = open_bundle(options.checkpoint)
    if options.average:
        average_bundles(bundle, parse_adapters(options.average, "bundle"), options.out)
    else:
        for path, reading in merge_bundle(bundle, parse_adapters(options.merge), options.out).items():
            print(f"{path}: {reading}")
    print(f"{options.out}: {options.checkpoint} with {', '.join(options.merge or options.average)}")


def find_checkpoint(path: Path, step: str | None = None) -> Path:
    """Find the checkpoint of `path` (a checkpoint, or the folder of a run) and `step`. Raises UserError if there is
    none."""
    if is_complete(path):
        if step is not None:
            raise UserError(f"{path} is one checkpoint; give the folder of the run to choose with --step {step}")
        return path
    if not path.exists():
        raise UserError(f"{path} does not exist; give the folder of a run, or one of its checkpoints")
    if is_bundle(path):
        raise UserError(f"{path} is a bundle already; give a run, or --merge ADAPTER to add one to it")
    found = find_checkpoints(path / "checkpoints")
    if not found:
        raise UserError(f"{path} holds no complete checkpoint; give the folder of a run, or one of its checkpoints")
    if step is None:
        return found[-1]
    for checkpoint in found:
        if step_of(checkpoint) == step:
            return checkpoint
    raise UserError(f"--step {step}: {path} has checkpoints of the steps {_steps(found)}")


def choose_average(checkpoint: Path, name: str) -> float | None:
    """The sigma_rel of `name` (best, none, or a number); None: the weights without EMA.

    `best` is the result of the newest validation before the checkpoint; without one, the narrowest profile.

    Raises:
        UserError: for any other name, or a profile that the run does not have.
    """
    profiles = ema_profiles(checkpoint)
    if name == "best":
        best = read_state(checkpoint)["run"]["validation"].get("best")
        name = best or (f"{min(profiles):g}" if profiles else "none")
    if name == "none":
        return None
    for sigma_rel in profiles:
        if name == f"{sigma_rel:g}" or name == str(sigma_rel):
            return sigma_rel
    known = ", ".join(["best", "none", *(f"{sigma_rel:g}" for sigma_rel in profiles)])
    raise UserError(f"--ema {name}: {checkpoint} has no such EMA weights; choose one of {known}")


def convert(
    checkpoint: Path, out: Path, *, ema: float | None, dataset: str | Path | None = None, defaults: Sequence[str] = ()
) -> None:
    """Write the bundle of a checkpoint, or its adapter if it has one; `defaults` as `changed_defaults`. Raises
    UserError if the data set does not exist, or `out` holds something else."""
    config = load_config(checkpoint / CONFIG)
    if config.train.adapter is not None:
        if defaults:
            raise UserError(
                f"--default sets defaults of a bundle; {checkpoint} has an adapter, which takes those of its base"
            )
        write_adapter(out, trained_adapter(config, checkpoint, ema))
        return
    path, info = dataset or config.data.path, _dataset(config, dataset)
    tokenizer, text_encoder = load_tokenizer(info.tokenizer_folder), load_text_encoder(info.text_encoder_folder)
    words, longest = training_words(config, path, info, text_encoder)
    origin = {**_origin(config, checkpoint, ema), "prompts": prompts_of(config, path, info)}
    write_bundle(
        out,
        config=config.model,
        state_dict=read_network(checkpoint, ema=ema),
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        defaults=changed_defaults(sampling_defaults(config, info), defaults, config.model, tokenizer),
        training=origin if longest is None else origin | {"longest_caption": longest},
        words=words,
    )


def prompts_of(config: RunConfig, path: str | Path, info: DatasetInfo) -> list[str]:
    """Sample prompts of a bundle: those of validation, or held-out captions."""
    split = "val" if info.num_samples.get("val") else "train"
    prompts = config.validation.prompts or filter(None, captions_of(path, split))
    return list(islice(dict.fromkeys(islice(prompts, 10 * NUM_PROMPTS)), NUM_PROMPTS))


def training_words(
    config: RunConfig, path: str | Path, info: DatasetInfo, text_encoder: TextEncoder
) -> tuple[set[str] | None, int | None]:
    """Words of the captions that this run and its predecessors were trained on, and the length of the longest in words;
    None if unknown, or if the text encoder was trained on other words too."""
    begun = config.starting_weights
    before = set() if begun is None else read_words(Path(begun))
    is_unchanged = (
        isinstance(text_encoder, HashedWordEncoder) and config.checkpoint.load is None and not config.data.conditioning
    )
    is_few = info.num_samples["train"] <= MOST_CAPTIONS and not is_url(path)
    if not is_unchanged or not is_few or before is None:
        return None, None
    captions = list(captions_of(path, "train"))
    longest = 0 if begun is None else open_bundle(begun).longest_caption or 0
    return words_of(chain(before, captions)), max([longest, *(len(split_words(caption)) for caption in captions)])


def trained_adapter(config: RunConfig, checkpoint: Path, ema: float | None) -> Adapter:
    """The adapter of a checkpoint of a run with `train.adapter`."""
    return Adapter.from_state(
        read_adapter(checkpoint, ema=ema),
        config.train.adapter,
        config.model,
        base=base_of(checkpoint),
        training={**_origin(config, checkpoint, ema), "base_model": _base_model(config)},
    )


def _base_model(config: RunConfig) -> str | None:
    """Hub name of the published weights from which the base was converted, for PEFT's settings; None if there are
    none."""
    base = config.starting_weights
    training = (Bundle.open(base).manifest.get("training") or {}) if base and is_bundle(base) else {}
    name = str(training.get("converted_from", ""))
    return name if _HUB_NAME.fullmatch(name) and not Path(name).exists() else None


def _dataset(config: RunConfig, dataset: str | Path | None) -> DatasetInfo:
    path = dataset or config.data.path
    if path is None:
        raise UserError(
            "this run was trained on mock data, which has no tokenizer and no text encoder; give --dataset FOLDER"
        )
    return DatasetInfo.read(path)


def _origin(config: RunConfig, checkpoint: Path, ema: float | None) -> dict[str, Any]:
    """Origin of the weights, for the manifest."""
    run = read_state(checkpoint)["run"]
    return {
        "recipe": config.recipe,
        "step": run["iteration"],
        "ema_sigma_rel": ema,
        "consumed_samples": run["consumed_samples"],
        "consumed_tokens": run["consumed_tokens"],
        "validation": run["validation"],
        **({"conditioning": dict(parse_kinds(config.data.conditioning))} if config.data.conditioning else {}),
    }


if __name__ == "__main__":
    raise SystemExit(main())
