"""`megadit slurm`: writes the scripts of a chain of jobs and submits them, or runs them on this machine.

    megadit slurm --config-file chain.yaml --dry-run                  # writes scripts and a picture, submits nothing
    megadit slurm --config-file chain.yaml stages.train.nodes=16      # writes and submits
    megadit slurm --config-file chain.yaml --stages bundle,export     # these; what they wait for is done, or queued
    megadit slurm status --config-file chain.yaml                     # how each stage stands
    megadit slurm --config-file chain.yaml --failed                   # again what did not end well, and no more
    megadit slurm --config-file chain.yaml --local                    # the same stages on this machine, without Slurm
    megadit slurm validate --config-file chain.yaml --nodes 32        # tries nodes; bad ones are left out from then on
    megadit slurm --config-file chain.yaml --kubernetes               # the same stages as Jobs, and what starts them

train/slurm/chain.yaml is an example to copy.
"""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError, choose_one
from megadit.models.shared.files import atomic_path
from megadit.train.config.load import change, to_yaml
from megadit.train.slurm.config import ChainConfig
from megadit.train.slurm.kubernetes import excluded, manifests
from megadit.train.slurm.local import run_here
from megadit.train.slurm.scripts import describe, draw, scripts, validation_script
from megadit.train.slurm.state import read_tasks, status, unfinished


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOptions:
    config_file: str | None = setting(
        None, "YAML with the cluster and the stages", names=("--config-file",), metavar="FILE"
    )
    stages: str | None = setting(None, "stages to run, such as bundle,export (default: all)")
    failed: bool = setting(False, "run only what has not succeeded")
    local: bool = setting(False, "run the stages on this machine")
    kubernetes: bool = setting(False, "write the stages as Jobs of Kubernetes, and submit nothing")
    at_once: int = setting(1, "concurrent processes of --local (default: {default})", low=1)
    nodes: int | None = setting(None, "number of nodes to validate", low=1)
    nodelist: str | None = setting(None, "nodes to validate, as Slurm writes them")
    partition: str | None = setting(None, "partition of the nodes to validate")
    dry_run: bool = setting(False, "write the scripts and submit nothing", names=("--dry-run",))
    print_config: bool = setting(False, "print the resolved configuration and stop", names=("--print-config",))
    overrides: tuple[str, ...] = setting(
        (), "change single values", positional=True, metavar="[status|validate] section.key=value"
    )


@command(SlurmOptions, prog="megadit slurm", description=__doc__)
def main(options: SlurmOptions) -> int:
    """Run the command; return 0, or 2 after printing an error."""
    verb = options.overrides[0] if options.overrides[:1] in (("status",), ("validate",)) else ""
    _check(options, verb)
    overrides = list(options.overrides[bool(verb) :])
    chain = change(ChainConfig(), config_file=options.config_file, overrides=overrides)
    if verb == "validate":
        return _validate(chain, options)
    chain.check()
    if options.print_config:
        print(to_yaml(chain), end="")
        return 0
    if verb == "status":
        print(status(read_tasks(chain)))
        return 0
    if options.kubernetes:
        return _write_jobs(chain)
    words = _chosen(chain, options)
    folder = write(chain)
    print(f"{folder}: {', '.join(path.name for path in sorted(folder.glob('*.sh')))}, chain.svg")
    for name, stage in chain.stages.items():
        print(f"  {name}: {describe(chain, stage)}; after {', '.join(chain.before(name)) or 'nothing'}")
    if options.dry_run:
        return 0
    if not words:
        print("nothing has failed; nothing to do")
        return 0
    if options.local:
        return run_here(chain, words, at_once=options.at_once)
    return submit(folder, words)


def _check(options: SlurmOptions, verb: str) -> None:
    """Raises UserError for options that would have no effect."""
    of_trial = [name for name in ("nodes", "nodelist", "partition") if getattr(options, name) is not None]
    if of_trial and verb != "validate":
        raise UserError(f"--{of_trial[0]} belongs to validate; stages have stages.NAME.nodes and cluster.partition")
    if options.at_once > 1 and not options.local:
        raise UserError(f"--at_once={options.at_once} belongs to --local")
    if options.kubernetes and (options.local or options.failed or options.stages):
        raise UserError("--kubernetes writes all stages; leave out --local, --failed and --stages")


def _write_jobs(chain: ChainConfig) -> int:
    folder = Path(chain.folder) / "kubernetes"
    texts = manifests(chain, excluded(folder.parent))
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        _write(folder / name, text)
    print(f"{folder}: {', '.join(texts)}; NAMESPACE=... bash {folder / 'run.sh'} starts them")
    return 0


def _validate(chain: ChainConfig, options: SlurmOptions) -> int:
    """Submits the trial of nodes; those that fail it stand in `exclude` of the chain's folder."""
    if options.nodes is None:
        raise UserError("validate needs --nodes N: how many are tried together")
    text = validation_script(chain, nodes=options.nodes, nodelist=options.nodelist, partition=options.partition)
    path = Path(chain.folder) / "validate.sh"
    _write(path, text)
    (path.parent / "logs").mkdir(exist_ok=True)
    print(f"{path}: results will be in {path.parent / 'validate'}, bad nodes in {path.parent / 'exclude'}")
    if options.dry_run:
        return 0
    _require_slurm()
    return subprocess.run(["sbatch", path]).returncode


def _chosen(chain: ChainConfig, options: SlurmOptions) -> list[str]:
    """Stages and tasks to run, as arguments of submit.sh."""
    names = list(chain.stages)
    if options.stages is not None:
        asked = dict.fromkeys(options.stages.split(","))
        names = [choose_one(name, names, f"--stages: unknown stage {name!r}") for name in asked]
    if not options.failed:
        return names
    return [word for word in unfinished(read_tasks(chain)) if word.partition(":")[0] in names]


def write(chain: ChainConfig) -> Path:
    """Writes the scripts and the configuration they were made from; returns their folder."""
    folder = Path(chain.folder)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    for name, text in {**scripts(chain), "chain.yaml": to_yaml(chain), "chain.svg": draw(chain)}.items():
        _write(folder / name, text)
    return folder


def _write(path: Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
        temporary.chmod(0o755 if path.suffix == ".sh" else 0o644)


def submit(folder: Path, words: list[str]) -> int:
    """Submits stages, or tasks of one (`encode:3,17`); the exit code is sbatch's."""
    _require_slurm()
    return subprocess.run([folder / "submit.sh", *words]).returncode


def _require_slurm() -> None:
    if shutil.which("sbatch") is None:
        raise UserError(
            "sbatch is not on this machine; --dry-run writes the scripts to take to one where it is, "
            "--local runs them here"
        )


if __name__ == "__main__":
    raise SystemExit(main())
