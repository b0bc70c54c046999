"""From a chain's configuration to the scripts that run it."""

import shlex
import string
import sys
from importlib.resources import files
from pathlib import Path

from megadit.models.shared.errors import UserError
from megadit.train.slurm.config import ChainConfig, ClusterConfig, StageConfig


class _Template(string.Template):
    """`@@{name}` is filled in; what bash means by `$` stays."""

    delimiter = "@@"


def scripts(chain: ChainConfig) -> dict[str, str]:
    """File name -> text: one script for each stage, and submit.sh, which submits them one after another."""
    texts = {f"{name}.sh": _stage_script(chain, name, stage) for name, stage in chain.stages().items()}
    return {**texts, "submit.sh": _submit_script(chain)}


def _stage_script(chain: ChainConfig, name: str, stage: StageConfig) -> str:
    kind = "ranks.sh" if stage.torchrun else "command.sh"
    cluster = chain.cluster
    values = {
        "title": f"{chain.name}: {name}",
        "header": "\n".join(map(_header_line, _sbatch_options(chain, name, stage))),
        "preamble": "\n".join(_preamble(cluster)),
        "srun_options": " ".join(_container_options(cluster)),
        "nodes": stage.nodes,
        "ranks": stage.ranks(cluster),
        "max_restarts": stage.max_restarts,
        "notice": f"@{stage.notice}",
        "grace": max(30, stage.notice - 60),
        "numa_binding": _numa_option(cluster),
        "program": stage.torchrun or shlex.quote(stage.command),
    }
    text = _Template((files("megadit.train.slurm") / kind).read_text(encoding="utf-8")).substitute(values)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def _sbatch_options(chain: ChainConfig, name: str, stage: StageConfig) -> list[str]:
    cluster = chain.cluster
    options = [
        f"--job-name={chain.name}-{name}",
        f"--nodes={stage.nodes}",
        "--ntasks-per-node=1",
        f"--time={stage.time}",
        f"--output={Path(chain.folder).absolute()}/logs/%x-%j.log",
        "--open-mode=append",
    ]
    if stage.torchrun:
        options += ["--exclusive", "--mem=0"]
    if cluster.gpus_per_node:
        options.append(f"--gpus-per-node={cluster.gpus_per_node}")
    options += [f"--account={cluster.account}"] if cluster.account else []
    options += [f"--partition={cluster.partition}"] if cluster.partition else []
    return options + list(cluster.sbatch_options)


def _header_line(option: str) -> str:
    """A line that only Slurm reads; what follows a line break, the shell would run."""
    if not option.isprintable():
        raise UserError(f"{option!r} is more than one line of a script; mend the setting that it comes from")
    return f"#SBATCH {option}"


def _preamble(cluster: ClusterConfig) -> list[str]:
    """Environment and set-up; without either set-up or container, the commands beside this interpreter are found."""
    lines = [f"export {name}={value}" for name, _, value in (line.partition("=") for line in cluster.environment)]
    if cluster.container.image is None and not cluster.setup:
        lines.append(f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH")
    return lines + list(cluster.setup)


def _container_options(cluster: ClusterConfig) -> list[str]:
    container = cluster.container
    if container.image is None:
        return []
    options = [f"--container-image={shlex.quote(container.image)}", "--no-container-mount-home"]
    if container.mounts:
        options.append(f"--container-mounts={shlex.quote(','.join(container.mounts))}")
    if container.workdir:
        options.append(f"--container-workdir={shlex.quote(container.workdir)}")
    return options


def _numa_option(cluster: ClusterConfig) -> str:
    is_bound = cluster.gpus_per_node and cluster.numa_binding != "none"
    return f"--numa-binding={cluster.numa_binding}" if is_bound else ""


def _submit_script(chain: ChainConfig) -> str:
    """Each stage waits for the one before (`afterok`), and is taken out of the queue when that one fails."""
    lines = [
        "#!/usr/bin/env bash",
        f"# {chain.name}: submits its stages; each starts when the one before has ended well.",
        "set -euo pipefail",
        'here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)',
        'mkdir -p "$here/logs"',
    ]
    before = ""
    for name in chain.stages():
        wait = f'--dependency="afterok:${{job_{before}%%;*}}" --kill-on-invalid-dep=yes ' if before else ""
        lines += [f'job_{name}=$(sbatch --parsable {wait}"$here/{name}.sh")', f'echo "{name}: job ${{job_{name}%%;*}}"']
        before = name
    return "\n".join(lines) + "\n"
