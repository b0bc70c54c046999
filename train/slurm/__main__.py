"""`megadit slurm`: writes the scripts of a chain of Slurm jobs and submits them.

    megadit slurm --config-file chain.yaml --dry-run                  # writes the scripts, submits nothing
    megadit slurm --config-file chain.yaml train.nodes=16             # writes and submits
    megadit slurm train.nodes=4 train.torchrun='-m megadit.train --recipe pretrain_7b_pack data.path=FOLDER'

train/slurm/chain.yaml is an example to copy.
"""

import argparse
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from megadit.models.shared.command import run_command
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path
from megadit.models.shared.options import read_options, setting
from megadit.train.config.load import change, to_yaml
from megadit.train.slurm.config import ChainConfig
from megadit.train.slurm.scripts import scripts


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOptions:
    config_file: str | None = setting(
        None, "YAML with the cluster and the stages", names=("--config-file",), metavar="FILE"
    )
    dry_run: bool = setting(False, "write the scripts and submit nothing", names=("--dry-run",))
    print_config: bool = setting(False, "print the resolved configuration and stop", names=("--print-config",))
    overrides: tuple[str, ...] = setting((), "change single values", positional=True, metavar="section.key=value")


def main(argv: list[str] | None = None) -> int:
    """Writes, and submits; the exit code is 0, or 2 after a mistake, told in one line."""
    return run_command(_run, sys.argv[1:] if argv is None else argv)


def _run(argv: list[str]) -> int:
    options = read_options(
        SlurmOptions,
        argv,
        prog="megadit slurm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    chain = change(ChainConfig(), config_file=options.config_file, overrides=options.overrides)
    chain.check()
    if options.print_config:
        print(to_yaml(chain), end="")
        return 0
    folder = write(chain)
    print(f"{folder}: {', '.join(path.name for path in sorted(folder.glob('*.sh')))}")
    if options.dry_run:
        return 0
    return submit(folder)


def write(chain: ChainConfig) -> Path:
    """Writes the scripts and the configuration they were made from; returns their folder."""
    folder = Path(chain.folder)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    for name, text in {**scripts(chain), "chain.yaml": to_yaml(chain)}.items():
        with atomic_path(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
            temporary.chmod(0o755 if name.endswith(".sh") else 0o644)
    return folder


def submit(folder: Path) -> int:
    """Submits the stages; the exit code is sbatch's."""
    if shutil.which("sbatch") is None:
        raise UserError("sbatch is not on this machine; --dry-run writes the scripts to take to one where it is")
    return subprocess.run([folder / "submit.sh"]).returncode


if __name__ == "__main__":
    raise SystemExit(main())
