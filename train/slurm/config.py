"""Configuration of a chain of jobs: the cluster, and named stages with their dependencies."""

import re
import subprocess
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Literal

import yaml

from megadit.models.shared.cli.setting import check_text
from megadit.models.shared.errors import UserError, choose_one

Interconnect = Literal["none", "azure", "efa", "infiniband"]
NumaBinding = Literal["node", "socket", "exclusive", "core-complex", "none"]

_TIME = re.compile(r"(\d+-)?\d{1,2}(:\d{2}){1,2}")
_ARRAY = re.compile(r"0-(\d{1,6})(%[1-9]\d*)?")
_NAME = re.compile(r"[A-Za-z0-9][\w-]*")
_MOUNT = re.compile(r"[^:]+:/[^:]*(:r[ow])?")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerConfig:
    """The container of every stage (pyxis' options of srun); without an image, stages run on the nodes themselves."""

    image: str | None = None
    """Image that the Dockerfile at the root builds: its NAME in a registry, or the path of a .sqsh file."""
    mounts: tuple[str, ...] = ()
    """HOST:/CONTAINER or HOST:/CONTAINER:ro."""
    workdir: str | None = None

    def __post_init__(self) -> None:
        for mount in self.mounts:
            if not _MOUNT.fullmatch(mount):
                raise UserError(f"cluster.container.mounts={mount!r}: write HOST:/CONTAINER or HOST:/CONTAINER:ro")
        targets = [mount.split(":")[1] for mount in self.mounts]
        if twice := next((each for each in targets if targets.count(each) > 1), None):
            raise UserError(f"cluster.container.mounts has two of {twice}; leave one out")
        if self.image is None and (self.mounts or self.workdir):
            raise UserError("cluster.container.mounts and .workdir need cluster.container.image")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """Cluster that stages run on: settings that differ from one cluster to the next."""

    account: str | None = None
    partition: str | None = None
    sbatch_options: tuple[str, ...] = ()
    """Further options of sbatch, such as --qos=high or --constraint=h100."""
    gpus_per_node: int = 8
    """Number of GPUs; 0 requests none."""
    numa_binding: NumaBinding = "node"
    """Keeps each rank's threads on the cores beside its GPU (numactl must be installed)."""
    interconnect: Interconnect = "none"
    """Preset of NCCL variables for a kind of cluster: interconnects/NAME.yaml, where each is explained."""
    environment: tuple[str, ...] = ()
    """NAME=value, for every stage; the value is shell text, so $HOME is known."""
    setup: tuple[str, ...] = ()
    """Shell lines to run first, such as `module load cuda` or `source venv/bin/activate`."""
    container: ContainerConfig = field(default_factory=ContainerConfig)

    def __post_init__(self) -> None:
        if self.gpus_per_node < 0:
            raise UserError(f"cluster.gpus_per_node={self.gpus_per_node} must not be negative")
        for assignment in self.environment:
            if not _ASSIGNMENT.fullmatch(assignment):
                raise UserError(f"cluster.environment={assignment!r}: write NAME=value")
        for option in self.sbatch_options:
            if not option.startswith("-"):
                raise UserError(f"cluster.sbatch_options={option!r}: write an option of sbatch, such as --qos=high")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageConfig:
    """One job, or an array of them: any command of `megadit`, or any other."""

    command: str = ""
    """A shell command, run once on one node."""
    torchrun: str = ""
    """Arguments of torchrun that every rank runs, without its own options: `-m megadit.train --recipe NAME a.b=c`."""
    after: tuple[str, ...] | None = None
    """Stages that must have succeeded before; None: the one above, []: none."""
    array: str = ""
    """0-99: a hundred tasks; 0-99%8: at most 8 at once. $TASK is the number of a task and $TASKS their count, for
    `megadit prepare ... --shard $TASK/$TASKS`."""
    nodes: int = 1
    ranks_per_node: int | None = None
    """Ranks on each node; None: one for each GPU."""
    time: str = "4:00:00"
    """Time limit in Slurm's format: H:MM:SS or D-HH:MM:SS."""
    notice: int = 300
    """Seconds before the time limit at which ranks get a signal to write a checkpoint; the job is then requeued."""
    max_restarts: int = 3
    """Maximum number of restarts of all ranks by torchrun after one fails."""

    def check(self, name: str, cluster: ClusterConfig) -> None:
        """Raises UserError for values that no job can have."""
        if not (self.command or self.torchrun):
            raise UserError(f"{name} has nothing to run; give {name}.command or {name}.torchrun")
        if self.command and self.torchrun:
            raise UserError(f"{name}.command and {name}.torchrun are both set; give one of them")
        if self.command and self.nodes != 1:
            raise UserError(f"{name}.nodes={self.nodes}: a command runs on 1 node; {name}.torchrun takes several")
        if self.nodes < 1 or self.max_restarts < 0 or self.notice < 1:
            raise UserError(
                f"{name}.nodes={self.nodes}, .max_restarts={self.max_restarts}, .notice={self.notice}: at least 1, 0, 1"
            )
        if self.array and not _ARRAY.fullmatch(self.array):
            raise UserError(f"{name}.array={self.array!r}: write 0-99, or 0-99%8 for 8 at once")
        if not _TIME.fullmatch(self.time):
            raise UserError(f"{name}.time={self.time!r}: write H:MM:SS or D-HH:MM:SS")
        seconds = _seconds(self.time)
        if self.torchrun and seconds <= self.notice:  # told to stop at once, the job would be requeued for ever
            raise UserError(
                f"{name}.time={self.time!r} is over after {seconds} s, and ranks are signalled to stop "
                f"{name}.notice={self.notice} s before; write H:MM:SS, or a shorter notice"
            )
        if self.torchrun and self.ranks(cluster) < 1:
            raise UserError(
                f"{name}.ranks_per_node is not set and cluster.gpus_per_node={cluster.gpus_per_node}; give 1 or more"
            )
        check_shell(self.command or self.torchrun, f"{name}.{'command' if self.command else 'torchrun'}")

    def ranks(self, cluster: ClusterConfig) -> int:
        """Ranks on each node."""
        return cluster.gpus_per_node if self.ranks_per_node is None else self.ranks_per_node

    @property
    def tasks(self) -> list[int] | None:
        """The numbers of an array's tasks; None of a single job."""
        return list(range(int(_ARRAY.fullmatch(self.array)[1]) + 1)) if self.array else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainConfig:
    """A chain of stages, each of which starts when those in its `after` have succeeded."""

    name: str = "megadit"
    """Prefix of the jobs' names."""
    folder: str = "runs/slurm"
    """Folder of the scripts, the jobs' output (logs/) and their exit codes (state/)."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    stages: dict[str, StageConfig] = field(default_factory=dict)

    def check(self) -> None:
        """Raises UserError for what cannot be a chain of jobs."""
        if not _NAME.fullmatch(self.name.replace(".", "")):
            raise UserError(f"name={self.name!r}: use letters, digits, dots and dashes")
        check_text("folder", self.folder)
        if not self.stages:
            raise UserError("no stage has anything to run; set stages.NAME.torchrun='-m megadit.train --recipe ...'")
        above: list[str] = []
        for name, stage in self.stages.items():
            if not _NAME.fullmatch(name):
                raise UserError(f"stages.{name}: use letters, digits and dashes for the name of a stage")
            stage.check(f"stages.{name}", self.cluster)
            for needed in stage.after or ():
                choose_one(needed, above, f"stages.{name}.after={needed!r} is no stage above it")
            above.append(name)
        for line in self.cluster.setup:
            check_shell(line, "cluster.setup")
        for line in self.cluster.environment:
            check_shell(f"export {line}", "cluster.environment")

    def before(self, name: str) -> list[str]:
        """The stages that this one waits for."""
        names = list(self.stages)
        above = names[: names.index(name)]
        after = self.stages[name].after
        return above[-1:] if after is None else list(after)


def _seconds(time: str) -> int:
    """Seconds of a `_TIME`; without hours, its last part are seconds."""
    days, _, clock = time.rpartition("-")
    hours, minutes, seconds = map(int, f"0:{clock}".split(":")[-3:])
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def interconnect_environment(name: Interconnect) -> list[str]:
    """NAME=value of one of our presets."""
    if name == "none":
        return []
    path = files("megadit.train.slurm") / "interconnects" / f"{name}.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))["environment"]


def check_shell(text: str, name: str) -> None:
    """Raises UserError where bash cannot read `text`."""
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{name}={text!r} is not shell: {done.stderr.strip().splitlines()[0]}")
