"""`megadit new FOLDER`: proposes a run for a folder of videos or images, as a commented YAML and four commands."""

import shlex
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from megadit.models.shared.cli.command import run_module
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path, can_be_folder
from megadit.models.shared.progress import duration
from megadit.models.shared.resources import memory_in_words
from megadit.train.data.ingest.clips.probe import FolderSummary, summarize
from megadit.train.new.proposal import Machine, Proposal, propose, yaml_of
from megadit.train.plan.hardware import find_gpu, ranks_that_gain, this_device
from megadit.train.plan.work import count_parameters

PROMPT = "a video"
"""Prompt for a model trained without captions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewOptions:
    source: str = setting(help="folder of videos or images", positional=True, metavar="FOLDER")
    out: Path | None = setting(None, "folder for everything that is written (default: runs/ and the folder's name)")
    captions: str | None = setting(
        None, "table (.csv, .jsonl, .parquet) of files and captions; folders: their names are labels"
    )
    gpu: str | None = setting(None, "GPU to propose for, such as h200 (default: this machine)", metavar="NAME")
    gpus: int = setting(1, "number of GPUs, with --gpu (default: {default})", low=1, metavar="N")
    minutes: float | None = setting(
        None, "minutes that training may take (default: 20 on a CPU, 240 on a GPU)", above=0
    )
    go: bool = setting(False, "run the four commands; repeated, continue where they stopped")


@command(NewOptions, prog="megadit new", description=__doc__)
def main(options: NewOptions) -> int:
    """Run the command; return 0, or 2 after printing an error."""
    if options.go and options.gpu:
        raise UserError("--go runs here and --gpu proposes for another machine; give one of them")
    seen = summarize(options.source, options.captions)
    machine = _machine(options)
    out = options.out or Path("runs") / (Path(options.source.rstrip("/")).name or "new")
    if not can_be_folder(out):
        raise UserError(f"--out={out} cannot be a folder: there is a file of that name; give another")
    if out.resolve() == Path(options.source).resolve():  # what the run makes would be among what it reads
        raise UserError(f"--out={out} is the folder of the sources; give another")
    proposal = propose(seen, machine, data=str(out / "data"), out=str(out / "train"), minutes=options.minutes)
    commands = _commands(options, out, seen, machine, proposal)
    _print_proposal(options, seen, machine, proposal)
    path = out / "run.yaml"
    if path.is_file():
        print(f"{path} is there already, and stays as it is; remove it for a new one")
    else:
        with atomic_path(path) as temporary:
            temporary.write_text(_yaml(seen, machine, proposal, commands), encoding="utf-8")
        print(f"{path}: the run, to edit")
    for words in commands:
        print(f"    megadit {shlex.join(words)}")
    for words in commands if options.go else ():
        run_module("megadit.models.shared.cli.verbs", *words)
    return 0


def _machine(options: NewOptions) -> Machine:
    if options.gpu is not None:
        return Machine(gpu=find_gpu(options.gpu), ranks=options.gpus)
    import torch

    ranks = torch.cuda.device_count() or ranks_that_gain()
    return Machine(gpu=this_device(ranks), ranks=ranks)


def _commands(
    options: NewOptions, out: Path, seen: FolderSummary, machine: Machine, proposal: Proposal
) -> list[tuple[str, ...]]:
    """Prepare, train, bundle, generate."""
    sizes = ",".join(f"{height}x{width}" for height, width in proposal.sizes)
    prepare = ["prepare", f"{seen.kind}s", options.source, str(out / "data"), "--sizes", sizes]
    if seen.kind == "video":
        prepare += ["--num_frames", str(proposal.num_frames), "--fps", f"{proposal.fps:g}"]
    prepare += ["--channels", str(proposal.channels)]
    prepare += [] if proposal.has_validation else ["--val_share", "0"]
    prepare += ["--captions", options.captions] if options.captions else []
    made = out / ("picture.png" if proposal.num_frames == 1 else "video.mp4")
    prompt = seen.captions[0] if seen.captions else PROMPT
    return [
        tuple(prepare),
        ("train", "--config-file", str(out / "run.yaml"), "--nproc", str(machine.ranks)),
        ("bundle", str(out / "train"), str(out / "bundle")),
        ("generate", "--checkpoint_path", str(out / "bundle"), "--prompt", prompt, "--video_save_path", str(made)),
    ]


def _print_proposal(options: NewOptions, seen: FolderSummary, machine: Machine, proposal: Proposal) -> None:
    print(_seen_in_words(options.source, seen))
    steps, sizes = proposal.config.train.train_iters, " ".join(f"{height}x{width}" for height, width in proposal.sizes)
    what = "images" if seen.kind == "image" else f"clips of {proposal.num_frames} frames at {proposal.fps:g} fps"
    print(f"proposed for {machine.ranks} x {machine.gpu.name} ({memory_in_words(machine.gpu.memory)}): {what}, {sizes}")
    print(
        f"    {count_parameters(proposal.config.model).total:,} parameters, {steps:,} steps of about "
        f"{proposal.seconds:.2g} s: {duration(steps * proposal.seconds)}"
    )


def _seen_in_words(source: str, seen: FolderSummary) -> str:
    heights, widths = ([getattr(one, side) for one in seen.seen] for side in ("height", "width"))
    words = f"{source}: {seen.count:,} {seen.kind}s, {len(seen.captions):,} with captions; of {len(seen.seen)}: "
    words += f"{min(heights)} to {max(heights)} pixels high, {min(widths)} to {max(widths)} wide"
    if seen.kind == "video":
        frames, rates = [one.frames for one in seen.seen], [one.fps for one in seen.seen]
        words += f", {min(frames)} to {max(frames)} frames at {min(rates):.3g} to {max(rates):.3g} fps"
    return words + "".join(f"; {count} {reason}" for reason, count in seen.unusable.items())


def _yaml(seen: FolderSummary, machine: Machine, proposal: Proposal, commands: list[tuple[str, ...]]) -> str:
    """The run as a YAML file to edit: every chosen value, with its reason."""
    lines = [
        f"# Proposed by `megadit new` for {seen.count:,} {seen.kind}s on {machine.ranks} x {machine.gpu.name}.",
        "# Change what you like; `megadit train --config-file THIS --print-config` shows all that is not named here.",
        *(f"#   megadit {shlex.join(command)}" for command in commands),
        f"recipe: {proposal.recipe}",
    ]
    rows = sorted(proposal.rows, key=lambda row: row[0].rpartition(".")[0])
    for section, group in groupby(rows, key=lambda row: row[0].rpartition(".")[0]):
        names = section.split(".")
        lines += ["", f"{names[0]}:"] if len(names) == 1 else []
        lines += [f"{'  ' * depth}{name}:" for depth, name in enumerate(names)][1:]
        for key, value, why in group:
            text = f"{'  ' * len(names)}{key.rpartition('.')[2]}: {yaml_of(value)}"
            lines.append(f"{text:34}  # {why}" if why else text)
    return "\n".join(lines) + "\n"
