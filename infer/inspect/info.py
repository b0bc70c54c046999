"""`megadit info PATH`: describes a bundle, an adapter, a training run, a data set or a video, from its files alone."""

import json
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megadit.infer.inspect.files import MEDIA_SUFFIXES, describe_media, describe_samples
from megadit.models.bundle import Bundle
from megadit.models.configs.config import DiTConfig
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.configs.unet import UNetConfig
from megadit.models.convert.adapters.adapter import DOWN
from megadit.models.convert.adapters.files import is_adapter, open_adapter, read_adapter, tensor_file
from megadit.models.convert.adapters.names import split_key
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.megatron.checkpoint import CONFIG, STATE, is_complete, read_state
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import setting, settings_of
from megadit.models.shared.documents import parse_json
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import MANIFEST_FILE, is_bundle, read_end, read_json, read_yaml
from megadit.models.shared.outside import next_step
from megadit.models.shared.shards import damaged_shards, partly_copied, verified_shards
from megadit.models.storage.components import network_shapes

CHECKPOINTS = "checkpoints"
DEFAULT = "default "
"""Prefix of the names of a bundle's sampling settings."""
NEUTRAL = (0.0, 1.0, "", ())
"""Values that switch a setting off, if they are its default."""

Facts = dict[str, Any]
"""Facts by name, in the order to show them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InfoOptions:
    path: Path = setting(
        help="a bundle, an adapter, a run's folder or checkpoint, a data set, a YAML file of a blend, or a video",
        positional=True,
        metavar="PATH",
    )
    all: bool = setting(False, "also show sampling settings whose values have no effect")
    json: bool = setting(False, "print everything as JSON instead of a table")
    sheet: Path | None = setting(None, "draw samples of a dataset into this picture")
    verify: bool = setting(False, "read every shard of a dataset, and verify its checksum")
    html: Path | None = setting(None, "write an HTML page of a run, or of a dataset's kept and omitted samples")


@command(InfoOptions, prog="megadit info", description=__doc__)
def main(options: InfoOptions) -> None:
    """Prints a table about PATH; the exit code is 2 if megadit did not write it."""
    facts = describe(options.path)
    if options.verify:
        if "dataset" not in facts:
            raise UserError(f"--verify reads the shards of a dataset, and {options.path} is not one")
        if damaged := verified_shards(options.path):
            raise UserError(partly_copied(options.path, damaged))
        facts["verified"] = "every shard is unchanged"
    if options.sheet is not None:
        if "dataset" not in facts:
            raise UserError(f"--sheet draws samples of a dataset, and {options.path} is not one")
        from megadit.infer.inspect.dataset_sheet import write_sheet

        write_sheet(options.path, options.sheet)
    if options.html is not None:
        write_page(options.path, options.html, in_words(facts))
    if options.json:
        print(json.dumps(facts, indent=2, default=str))
    else:
        Console().print(_table(facts if options.all else in_force(facts)))


def write_page(path: Path, page: Path, facts: Facts) -> None:
    """Writes an HTML page; raises UserError unless this is a training run or a dataset."""
    if "training run" in facts:
        from megadit.infer.inspect.run_page import write_run_page

        write_run_page(path, page, facts)
    elif "dataset" in facts:
        from megadit.infer.inspect.dataset_page import write_dataset_page

        write_dataset_page(path, page, facts)
    else:
        raise UserError(f"--html is the page of a training run or a dataset, and {path} is neither; leave it out")


def describe(path: Path) -> Facts:
    """Describe the file or folder at `path`. Raises UserError if nothing is there, or megadit did not write it."""
    if not path.exists():
        raise UserError(f"{path} does not exist; give a bundle, an adapter, a run, a checkpoint or a data set")
    if is_bundle(path):
        return describe_bundle(path)
    if is_adapter(path):
        return describe_adapter(path)
    if (path / MANIFEST_FILE).is_file():
        return describe_dataset(path)
    if is_complete(path):
        return describe_checkpoint(path)
    if _is_run(path):
        return describe_run(path)
    if path.is_file() and path.suffix in (".yaml", ".yml"):
        return describe_blend(path)
    if path.is_file() and path.suffix.lower() in MEDIA_SUFFIXES:
        return describe_media(path)
    is_published = any((path / name).is_file() for name in ("model_index.json", "config.json"))
    step = "; megadit convert makes a bundle of a published model" if is_published else next_step(path)
    raise UserError(
        f"{path} is neither a bundle nor a dataset (no {MANIFEST_FILE}), neither a training run (no {CONFIG} next to "
        f"{CHECKPOINTS}/) nor a complete checkpoint (no {STATE}), nor an adapter, a video or an image{step}"
    )


def describe_bundle(path: Path) -> Facts:
    """Components, sizes, parameters and origin of a bundle."""
    bundle = Bundle.open(path)
    files = bundle.manifest["files"]
    facts: Facts = {
        "bundle": str(path),
        "kind": bundle.kind,
        **({"makes": "images" if bundle.defaults.num_frames == 1 else "videos"} if bundle.kind == "video" else {}),
        "written by": f"megadit {bundle.manifest.get('megadit_version', '?')}",
    }
    for part, kind in bundle.manifest["components"].items():
        size = sum(file["bytes"] for name, file in files.items() if name.startswith(f"{part}/"))
        facts[part] = f"{kind}, {_bytes(size)}"
    facts |= _model_facts(bundle.config)
    known = bundle.defaults.to_dict()
    shown = known if bundle.kind == "video" else ("num_frames", "height", "width")
    facts |= {f"{DEFAULT}{name}": known[name] for name in shown if known[name] != ""}
    for name, value in (bundle.manifest.get("training") or {}).items():
        facts[f"training {name}"] = value
    return facts


def describe_adapter(path: Path) -> Facts:
    """Rank, linears and base of an adapter; of a file without a base, what the names of its tensors say."""
    opened, size = open_adapter(path), tensor_file(path).stat().st_size
    if opened.config is None:
        names = {key: split_key(key) for key in opened.source.stored}
        ranks = {opened.source.shapes[key][0] for key, name in names.items() if name and name[1] == DOWN}
        return {
            "adapter": str(path),
            "rank": ", ".join(map(str, sorted(ranks))),
            "linears": len({name[0] for name in names.values() if name}),
            "bytes": _bytes(size),
            "family": "not said; `megadit convert ADAPTER OUT --base BUNDLE` finds out whether it fits",
        }
    adapter = read_adapter(path)
    ranks = sorted({change.rank for change in adapter.changes.values()})
    scalings = sorted({change.alpha / change.rank for change in adapter.changes.values()})
    return {
        "adapter": str(path),
        "kind": adapter.kind,
        "rank": ", ".join(map(str, ranks)),
        "alpha / rank": ", ".join(f"{scaling:g}" for scaling in scalings),
        "linears": len(adapter.changes),
        "parameters": f"{adapter.num_parameters:,}, {_bytes(size)}",
        "family": adapter.config.family,
        "layers x width": f"{adapter.config.num_layers} x {adapter.config.hidden_size}",
        "weights of its base": adapter.base or "not said",
        **{f"training {name}": value for name, value in adapter.training.items()},
    }


def describe_dataset(path: Path) -> Facts:
    """Samples, shards and tokenizer of a dataset."""
    manifest = read_json(path / MANIFEST_FILE)
    kept = set(path.glob("source_media/*.tar"))
    facts: Facts = {"dataset": str(path), "shards": _sizes(set(path.rglob("*.tar")) - kept)}
    if damaged := damaged_shards(path):
        facts["damaged"] = "; ".join(damaged)
    if kept:
        facts["source_media"] = f"{_sizes(kept)}; training does not read them, `megadit prepare webdataset` does"
    for name, value in manifest.items():
        if isinstance(value, dict):
            facts |= {f"{name.replace('_', ' ')} {key}": item for key, item in value.items()}
        else:
            facts[name.replace("_", " ")] = value
    for part in ("tokenizer", "text_encoder"):
        if (path / part / "config.json").is_file():
            facts[part.replace("_", " ")] = read_json(path / part / "config.json").get("type")
    return facts | describe_samples(path)


def _sizes(files: Collection[Path]) -> str:
    return f"{len(files)}, {_bytes(sum(file.stat().st_size for file in files))}"


def describe_blend(path: Path) -> Facts:
    """Describe a blend of data sets: folders, samples and weights of each split. Raises UserError if the file names no
    data sets, or one of them was not prepared."""
    document = read_yaml(path)
    facts: Facts = {"blend": str(path)}
    try:
        for split, source in document["splits"].items():
            for number, part in enumerate(source.get("blend") or [source], 1):
                folder = path.parent / part["path"]
                samples = read_json(folder / MANIFEST_FILE)["num_samples"].get(part.get("split_part", split), 0)
                facts[f"{split} {number}"] = f"{folder}: {samples:,} samples, weight {part.get('weight', 1):g}"
    except UserError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{path} is not a blend of data sets: `splits:`, each with a `path:` or a `blend:`") from error
    return facts


def describe_run(path: Path) -> Facts:
    """Recipe, progress and checkpoints of a training run."""
    config = _read_run_config(path / CONFIG)
    checkpoints = sorted(filter(is_complete, (path / CHECKPOINTS).iterdir()))
    last = _last_record(path / "metrics.jsonl")
    names = ", ".join(folder.name for folder in checkpoints) or "none"
    facts: Facts = {"training run": str(path), "checkpoints": names}
    with _as_a_run_says(path):
        if checkpoints:
            facts |= _progress_facts(checkpoints[-1], config)
        if (step := last.get("step")) is not None:
            saved = ""
            if checkpoints:
                saved = f"; the newest checkpoint is of step {read_state(checkpoints[-1])['run']['iteration']:,}"
            facts["step"] = f"{step:,} of {config['train']['train_iters']:,}{saved}"
        facts |= {_LAST[name]: last[name] for name in _LAST if name in last}
        return facts | _config_facts(config)


_LAST = {"loss": "last loss", "lr": "last learning rate", "seconds": "seconds a step"}
"""Key of the last step in metrics.jsonl -> its name."""


def describe_checkpoint(path: Path) -> Facts:
    """Progress, EMA weights and recipe of one checkpoint."""
    config = _read_run_config(path / CONFIG)
    with _as_a_run_says(path):
        return {"checkpoint": str(path)} | _progress_facts(path, config) | _config_facts(config)


@contextmanager
def _as_a_run_says(path: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{path} is not a valid training run: {error!r}") from error


def _progress_facts(checkpoint: Path, config: dict[str, Any]) -> Facts:
    state = read_state(checkpoint)
    run = state["run"]
    return {
        "step": f"{run['iteration']:,} of {config['train']['train_iters']:,}",
        "samples seen": f"{run['consumed_samples']:,}",
        **({"samples left out": left_out} if (left_out := _left_out(run)) else {}),
        "tokens seen": f"{run['consumed_tokens']:,}",
        "averages (sigma_rel)": ", ".join(map(str, state["ema_sigma_rels"])) or "none",
    }


def _left_out(run: dict[str, Any]) -> str:
    """The fraction of samples that were left out, with the reasons; "" if none were."""
    refused = run.get("refused_samples") or {}
    count = sum(refused.values())
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in sorted(refused.items()))
    return f"{count / (count + run['consumed_samples']):.1%} of those read ({reasons})" if count else ""


def _config_facts(config: dict[str, Any]) -> Facts:
    data = config["data"]
    sizes = {name.removesuffix("_size"): size for name, size in config["parallel"].items() if name.endswith("_size")}
    return {
        "recipe": config.get("recipe"),
        **_model_facts(DiTConfig.from_dict(config["model"])),
        "data": "random samples (mock)" if data["mock"] else data["path"],
        "packs a step": f"{data['global_batch_size']} of {data['seq_length']} video tokens",
        "layout": ", ".join(f"{name} {size}" for name, size in sizes.items()),
    }


def _is_run(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and (folder / CHECKPOINTS).is_dir()


def _read_run_config(path: Path) -> dict[str, Any]:
    try:
        config = read_yaml(path)
        missing = {"model", "data", "train", "parallel"} - config.keys()
    except (UserError, AttributeError) as error:
        raise UserError(f"{path} is not the configuration of a training run") from error
    if missing:
        raise UserError(f"{path} lacks {', '.join(sorted(missing))}")
    return config


def _last_record(metrics: Path) -> dict[str, Any]:
    """The last complete line with a loss; a killed run may leave half a line."""
    for line in reversed(read_end(metrics).splitlines() if metrics.is_file() else []):
        try:
            record = parse_json(line, str(metrics), is_finite=False)
        except UserError:
            continue
        if "loss" in record:
            return record
    return {}


def _model_facts(config: NetworkConfig) -> Facts:
    parameters = sum(math.prod(shape) for shape in network_shapes(config).values())
    return {
        "parameters": f"{parameters:,}",
        **_SIZES[type(config)](config),
        "latent channels": config.in_channels,
        "text width": config.crossattn_emb_size,
    }


def _sizes_of_dit(config: DiTConfig) -> Facts:
    return {"layers x width": f"{config.num_layers} x {config.hidden_size}, {config.num_attention_heads} heads"}


def _sizes_of_unet(config: UNetConfig) -> Facts:
    return {
        "levels": f"{len(config.widths)}, {config.widths[0]} to {config.widths[-1]} wide",
        "predicts": config.prediction,
        "pooled text width": config.pooled_size,
    }


_SIZES: dict[type, Callable[[Any], Facts]] = {DiTConfig: _sizes_of_dit, UNetConfig: _sizes_of_unet}
"""Class of a configuration -> its sizes as facts."""


def _bytes(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def in_force(facts: Facts) -> Facts:
    """Leave out sampling settings that have no effect (`churn 0`)."""
    values = {name.removeprefix(DEFAULT): value for name, value in facts.items() if name.startswith(DEFAULT)}
    usual = {name: about.default for name, about in settings_of(SamplingSettings).items() if about.default in NEUTRAL}
    unused = {name for name in usual.keys() & values.keys() if values[name] in (usual[name], [])}
    if values.get("sigmas"):
        unused |= {"schedule", "sigma_min", "sigma_max", "rho"}
    elif values.get("schedule") != "karras":
        unused.add("rho")
    return {name: value for name, value in facts.items() if name not in {f"{DEFAULT}{each}" for each in unused}}


def in_words(facts: Facts) -> dict[str, str]:
    """Numbers in four digits, with commas; lists without brackets; unknown facts are left out."""
    return {name: _in_words(value) for name, value in facts.items() if value is not None}


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(_in_words, value)) or "none" if isinstance(value, list | tuple) else str(value)


def _table(facts: Facts) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in in_words(facts).items():
        table.add_row(escape(name), escape(value))
    return table
