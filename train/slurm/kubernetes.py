"""A chain as Kubernetes Jobs: one for each stage, suspended until those that it waits for are complete.

Kubernetes has no order of Jobs: `run.sh` next to the manifests applies all of them and resumes each in turn. An array
is an indexed Job, as are the nodes of a training, which find each other by the names of their pods. A pod that is
evicted, or whose node dies, is recreated and continues from its checkpoint.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from megadit.models.shared.errors import UserError
from megadit.train.slurm.config import ChainConfig, StageConfig
from megadit.train.slurm.scripts import elastic_environment, exported, filled

PORT = 29500
LONGEST_NAME = 52
"""Longest name of a Job: a pod adds a number and five letters to it, and has at most 63."""
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
CHAIN_LABEL, STAGE_LABEL = "megadit/chain", "megadit/stage"


class _Readable(yaml.SafeDumper):
    """Dumper that writes scripts as literal blocks, and repeated values without aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Readable.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def manifests(chain: ChainConfig, exclude: tuple[str, ...] = ()) -> dict[str, str]:
    """File name -> text: a YAML file for each stage, and run.sh. No pod is put on the nodes of `exclude`. Raises
    UserError for a chain without a container, or with names that Kubernetes cannot tell apart."""
    if chain.cluster.container.image is None:
        raise UserError("--kubernetes needs cluster.container.image: a Job runs in nothing else")
    for name in (chain.name, *chain.stages):
        if not _LABEL.fullmatch(name):
            raise UserError(f"--kubernetes: the name {name!r} must be of ASCII, and end in a letter or digit")
    names = {stage: job_name(chain, stage) for stage in chain.stages}
    if len(set(names.values())) < len(names):
        raise UserError(f"--kubernetes: two stages have the same name in small letters and dashes: {', '.join(names)}")
    texts = {
        f"{stage}.yaml": yaml.dump_all(_documents(chain, stage, exclude), Dumper=_Readable, sort_keys=False, width=120)
        for stage in chain.stages
    }
    stages = "\n".join(
        " ".join(["stage", names[stage], f"{stage}.yaml", *(names[before] for before in chain.before(stage))])
        for stage in chain.stages
    )
    return {**texts, "run.sh": filled("kubernetes.sh", {"name": chain.name, "stages": stages})}


def job_name(chain: ChainConfig, stage: str) -> str:
    """Name of a stage in Kubernetes: small letters, digits and dashes, a letter first (as Services require). Raises
    UserError if that is too long."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{chain.name}-{stage}".lower()).strip("-")
    name = name if name[0].isalpha() else f"chain-{name}"
    if len(name) > LONGEST_NAME:
        raise UserError(f"--kubernetes: {name} is longer than {LONGEST_NAME} letters; shorten name or stages.{stage}")
    return name


def _documents(chain: ChainConfig, name: str, exclude: tuple[str, ...]) -> list[dict[str, Any]]:
    """The Job of a stage and, before it, the names of its pods where they talk to each other."""
    stage, job = chain.stages[name], job_name(chain, name)
    labels = {CHAIN_LABEL: chain.name, STAGE_LABEL: name}
    pods = 1 if stage.tasks is None else len(stage.tasks)
    at_once = int(stage.array.partition("%")[2] or pods)
    if stage.torchrun:
        pods = at_once = stage.nodes
    spec = {
        "suspend": True,
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": at_once,
        **_retries(stage),
        # an eviction is not the program's fault: it does not count
        "podFailurePolicy": {
            "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
        },
        "template": {"metadata": {"labels": labels}, "spec": _pod(chain, stage, job, exclude)},
    }
    found = [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job, "labels": labels}, "spec": spec}]
    if stage.nodes > 1:
        found.insert(0, _names_of_pods(job, labels))
    return found


def _retries(stage: StageConfig) -> dict[str, int]:
    """Retry limit of a stage's Job: all ranks end where one node fails; tasks of an array fail alone, and a command
    that fails once fails again.

    When the first pod, where the nodes meet, is evicted, the others fail: these count, too, and the limit has room for
    them.
    """
    if stage.torchrun:
        return {"backoffLimit": max(stage.max_restarts * stage.nodes, stage.nodes - 1)}
    return {"backoffLimit": 0} if stage.tasks is None else {"backoffLimitPerIndex": 0}


def _names_of_pods(job: str, labels: dict[str, str]) -> dict[str, Any]:
    """A Service without an address: JOB-0.JOB is the first pod, also before all are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job, "labels": labels},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": job},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


def _pod(chain: ChainConfig, stage: StageConfig, job: str, exclude: tuple[str, ...]) -> dict[str, Any]:
    cluster = chain.cluster
    volumes, mounts = _volumes(cluster.container.mounts)
    container: dict[str, Any] = {
        "name": "stage",
        "image": cluster.container.image,
        "command": ["bash", "-c", _program(chain, stage, job)],
        "volumeMounts": mounts,
    }
    if cluster.container.workdir:
        container["workingDir"] = cluster.container.workdir
    if cluster.gpus_per_node:
        container["resources"] = {"limits": {"nvidia.com/gpu": cluster.gpus_per_node}}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": stage.notice,  # for a last checkpoint
        "containers": [container],
        "volumes": volumes,
    }
    if stage.nodes > 1:
        pod["subdomain"] = job
    if exclude:
        term = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(exclude)}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
        pod["affinity"] = {"nodeAffinity": required}
    return pod


def _volumes(mounts: tuple[str, ...]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Volumes and where they are seen: a path is the node's, another word names a PersistentVolumeClaim. Raises
    UserError for what is neither."""
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]  # 64 MiB otherwise
    seen: list[dict[str, Any]] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    for number, mount in enumerate(mounts):
        source, target, *mode = mount.split(":")
        if source.startswith("/"):
            place = {"hostPath": {"path": source}}
        elif _CLAIM.fullmatch(source):
            place = {"persistentVolumeClaim": {"claimName": source}}
        else:
            raise UserError(f"--kubernetes: {source} is neither a whole path nor the name of a PersistentVolumeClaim")
        volumes.append({"name": f"mount-{number}", **place})
        seen.append({"name": f"mount-{number}", "mountPath": target, **({"readOnly": True} if "ro" in mode else {})})
    return volumes, seen


def _program(chain: ChainConfig, stage: StageConfig, job: str) -> str:
    lines = [*exported(chain.cluster), *chain.cluster.setup]
    if stage.torchrun:
        ranks = f"--nproc-per-node={stage.ranks(chain.cluster)} --max-restarts={stage.max_restarts}"
        where = "--standalone"
        if stage.nodes > 1:
            where = f"--nnodes={stage.nodes} --rdzv-backend=c10d --rdzv-endpoint={job}-0.{job}:{PORT} --rdzv-id={job}"
        return "\n".join([*lines, *elastic_environment(stage), f"exec torchrun {where} {ranks} {stage.torchrun}"])
    task = "$JOB_COMPLETION_INDEX" if stage.tasks else ""
    return "\n".join([*lines, f"export TASK={task} TASKS={len(stage.tasks or ())}", stage.command])


def excluded(folder: Path) -> tuple[str, ...]:
    """Nodes that `megadit slurm validate` found faulty."""
    path = folder / "exclude"
    return tuple(path.read_text(encoding="utf-8").split()) if path.is_file() else ()
