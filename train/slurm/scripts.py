"""Scripts of a chain from its configuration, and the commands of a stage on this machine."""

import shlex
import string
import sys
from importlib.resources import files
from pathlib import Path
from xml.sax.saxutils import escape

from megadit.models.shared.errors import UserError
from megadit.train.slurm.config import ChainConfig, ClusterConfig, StageConfig, interconnect_environment

VALIDATION_SECONDS = 900
"""Time limit of each part of a node's check."""
DIAGNOSIS_LEVEL = 2
"""Level of `dcgmi diag`: two minutes a node."""


class _Template(string.Template):
    """`@@{name}` is filled in; what bash means by `$` stays."""

    delimiter = "@@"


def scripts(chain: ChainConfig) -> dict[str, str]:
    """File name -> text: one script for each stage, and submit.sh, which submits them."""
    texts = {f"{name}.sh": _stage_script(chain, name, stage) for name, stage in chain.stages.items()}
    return {**texts, "submit.sh": _submit_script(chain)}


def local_script(chain: ChainConfig, name: str) -> str:
    """The shell text that runs a task of a stage on this machine."""
    stage = chain.stages[name]
    program = stage.command
    if stage.torchrun:
        ranks = max(1, stage.nodes * stage.ranks(chain.cluster))
        program = (
            f"exec torchrun --standalone --nproc-per-node={ranks} --max-restarts={stage.max_restarts} {stage.torchrun}"
        )
    return "\n".join([*_preamble(chain.cluster), program])


def _stage_script(chain: ChainConfig, name: str, stage: StageConfig) -> str:
    kind = "ranks.sh" if stage.torchrun else "command.sh"
    cluster = chain.cluster
    values = {
        "title": f"{chain.name}: {name}",
        "header": "\n".join(map(_header_line, _sbatch_options(chain, name, stage))),
        "preamble": "\n".join(_preamble(cluster)),
        "state": shlex.quote(f"{Path(chain.folder).absolute()}/state/{name}"),
        "num_tasks": len(stage.tasks or ()),
        "srun_options": " ".join(_container_options(cluster)),
        "nodes": stage.nodes,
        "ranks": stage.ranks(cluster),
        "max_restarts": stage.max_restarts,
        "notice": f"@{stage.notice}",
        "elastic_environment": "\n".join(elastic_environment(stage)),
        "numa_binding": _numa_option(cluster),
        "program": stage.torchrun or shlex.quote(stage.command),
    }
    return filled(kind, {**values, "begin": filled("begin.sh", values).rstrip()})


def validation_script(chain: ChainConfig, *, nodes: int, nodelist: str | None, partition: str | None) -> str:
    """Batch script that checks `nodes` nodes, or those of `nodelist`."""
    cluster, folder = chain.cluster, Path(chain.folder).absolute()
    stage = StageConfig(nodes=nodes, time="1:00:00")
    options = [*_sbatch_options(chain, "validate", stage), "--exclusive"]
    options += [f"--nodelist={nodelist}"] if nodelist else []
    options += [f"--partition={partition}"] if partition else []  # the last one counts
    values = {
        "title": f"{chain.name}: are the nodes sound?",
        "header": "\n".join(map(_header_line, options)),
        "preamble": "\n".join(_preamble(cluster)),
        "srun_options": " ".join(_container_options(cluster)),
        "ranks": max(2, cluster.gpus_per_node),
        "results": shlex.quote(f"{folder}/validate"),
        "exclude": shlex.quote(f"{folder}/exclude"),
        "seconds": VALIDATION_SECONDS,
        "level": DIAGNOSIS_LEVEL,
    }
    on_node = shlex.quote(filled("validate_node.sh", values))
    return filled("validate.sh", {**values, "on_node": on_node})


def filled(template: str, values: dict[str, object]) -> str:
    """A script of this folder with its `@@{name}` filled in."""
    text = _Template((files("megadit.train.slurm") / template).read_text(encoding="utf-8")).substitute(values)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def _sbatch_options(chain: ChainConfig, name: str, stage: StageConfig) -> list[str]:
    cluster = chain.cluster
    options = [
        f"--job-name={chain.name}-{name}",
        f"--nodes={stage.nodes}",
        "--ntasks-per-node=1",
        f"--time={stage.time}",
        "--output=" + shlex.quote(f"{Path(chain.folder).absolute()}/logs/%x-{'%A_%a' if stage.array else '%j'}.log"),
        "--open-mode=append",
    ]
    if stage.array:
        options.append(f"--array={stage.array}")
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
    lines = exported(cluster)
    if cluster.container.image is None and not cluster.setup:
        lines.append(f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH")
    return lines + list(cluster.setup)


def exported(cluster: ClusterConfig) -> list[str]:
    """The environment of all stages; the user's own comes after that of the interconnect."""
    assignments = (*interconnect_environment(cluster.interconnect), *cluster.environment)
    return [f"export {name}={value}" for name, _, value in (line.partition("=") for line in assignments)]


def elastic_environment(stage: StageConfig) -> list[str]:
    """Environment variables of torchrun and its ranks, as shell lines."""
    return [
        "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={max(30, stage.notice - 60)} # seconds for a last checkpoint",
        "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # or ranks that start again read what their predecessors stored",
    ]


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
    stages = "\n".join(" ".join(["submit", name, *chain.before(name)]) for name in chain.stages)
    return filled("submit.sh", {"name": chain.name, "stages": stages})


# --- A chain as a picture: a box for each stage, an arrow from each that it waits for ---------------------------------

WIDTH, HEIGHT = 210, 58
"""Size of a box, in pixels."""
ACROSS, DOWN = 290, 84
"""Distance from one box to the next, in pixels."""
MARGIN = 20


def depths(chain: ChainConfig) -> dict[str, int]:
    """Stage -> how many others must end one after another before it starts."""
    found: dict[str, int] = {}
    for name in chain.stages:
        found[name] = 1 + max((found[before] for before in chain.before(name)), default=-1)
    return found


def describe(chain: ChainConfig, stage: StageConfig) -> str:
    """Summarise the resources that a stage requests."""
    what = "1 node"
    if stage.torchrun:
        what = f"{stage.nodes} node{'s' if stage.nodes > 1 else ''} x {stage.ranks(chain.cluster)} ranks"
    tasks = f", {len(stage.tasks)} tasks" if stage.tasks else ""
    return f"{what}{tasks}, {stage.time}"


def draw(chain: ChainConfig) -> str:
    """The picture as SVG; columns are depths."""
    places: dict[str, tuple[int, int]] = {}
    for name, depth in depths(chain).items():
        row = sum(column == depth for column, _ in places.values())
        places[name] = (depth, row)
    at = {name: (MARGIN + column * ACROSS, MARGIN + row * DOWN) for name, (column, row) in places.items()}
    width = max(x for x, _ in at.values()) + WIDTH + MARGIN
    height = max(y for _, y in at.values()) + HEIGHT + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z"/></marker></defs>',
    ]
    for name, (x, y) in at.items():
        for before in chain.before(name):
            from_x, from_y = at[before][0] + WIDTH, at[before][1] + HEIGHT // 2
            parts.append(
                f'<path d="M{from_x} {from_y}C{from_x + 40} {from_y} {x - 40} {y + HEIGHT // 2} {x} {y + HEIGHT // 2}" '
                'fill="none" stroke="black" marker-end="url(#tip)"/>'
            )
    for name, (x, y) in at.items():
        stage = chain.stages[name]
        parts += [
            f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#eef3f8" stroke="#456"/>',
            f'<text x="{x + 12}" y="{y + 24}" font-size="15">{escape(name)}</text>',
            f'<text x="{x + 12}" y="{y + 44}" font-size="11" fill="#456">{escape(describe(chain, stage))}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])
