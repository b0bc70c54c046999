"""A chain as Jobs of Kubernetes: manifests that it knows, and the order in which they run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import megadit.train.slurm
from megadit.models.shared.errors import UserError
from megadit.train.config.load import change
from megadit.train.slurm.__main__ import main
from megadit.train.slurm.config import ChainConfig
from megadit.train.slurm.kubernetes import manifests

EXAMPLE = Path(megadit.train.slurm.__file__).parent / "chain.yaml"
IMAGE = ("cluster.container.image=lab/megadit:1", "cluster.container.mounts=[runs:/runs,/data:/data:ro]")

KUBECTL = r"""
import json, os, subprocess, sys
from pathlib import Path
state, arguments = Path(os.environ["FAKE_KUBERNETES"]), sys.argv[1:]
with (state / "log").open("a") as log:
    print(*arguments[:3], file=log)
verb = arguments[0]
if (state / "shaky").exists():  # does not answer the first patch of a Job, nor the first question after that
    patched, asked = (state / f"{arguments[2]}.{what}" for what in ("patched", "asked"))
    first = patched if verb == "patch" else asked if patched.exists() and arguments[-1] != "name" else state
    if not first.exists():
        first.touch()
        sys.exit("Unable to connect to the server: net/http: TLS handshake timeout")
if verb == "apply":
    import yaml
    *_, job = yaml.safe_load_all(Path(arguments[2]).read_text())
    assert job["spec"]["suspend"]
    (state / job["metadata"]["name"]).write_text(json.dumps(job))
elif verb == "delete":
    for path in state.glob(arguments[2] + "*"):
        path.unlink()
elif verb == "get":
    job, outcome = state / arguments[2], state / (arguments[2] + ".outcome")
    if arguments[-1] == "name":
        print(job.name if job.exists() else "")
    else:
        print(outcome.read_text() if outcome.exists() else "", end="")
elif verb == "patch" and not (state / (arguments[2] + ".outcome")).exists():
    spec = json.loads((state / arguments[2]).read_text())["spec"]
    command = spec["template"]["spec"]["containers"][0]["command"]
    codes = [subprocess.run(command, env={**os.environ, "JOB_COMPLETION_INDEX": str(index)}).returncode
             for index in range(spec["completions"])]
    (state / (arguments[2] + ".outcome")).write_text("Failed" if any(codes) else "Complete")
"""


def documents(*overrides: str, exclude: tuple[str, ...] = ()) -> dict[str, list[dict]]:
    """Stage -> what is applied for it."""
    chain = change(ChainConfig(), config_file=EXAMPLE, overrides=[*IMAGE, *overrides])
    chain.check()
    texts = manifests(chain, exclude)
    return {
        name.removesuffix(".yaml"): list(yaml.safe_load_all(text)) for name, text in texts.items() if "yaml" in name
    }


@pytest.fixture
def kubectl(tmp_path, monkeypatch) -> Path:
    """A cluster on this machine, whose Jobs run where they are let go; where it keeps its state."""
    programs, state = tmp_path / "bin", tmp_path / "kubernetes"
    programs.mkdir()
    state.mkdir()
    (programs / "kubectl").write_text(f'#!/usr/bin/env -S "{sys.executable}"\n{KUBECTL}')  # its path may have spaces
    (programs / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_KUBERNETES", str(state))
    monkeypatch.setenv("POLL_SECONDS", "0.05")
    return state


def test_kubernetes_knows_every_field():
    validator = pytest.importorskip("kubernetes_validate")
    every = [document for found in documents(exclude=("node-7",)).values() for document in found]
    assert {document["kind"] for document in every} == {"Job", "Service"} and len(every) == 8
    for document in every:
        validator.validate(document, "1.30", strict=True)
    with pytest.raises(validator.ValidationError):  # the control: a misspelt field is noticed
        validator.validate(every[0] | {"spec": every[0]["spec"] | {"completion": 1}}, "1.30", strict=True)


def test_a_training_is_a_job_whose_pods_find_each_other():
    service, job = documents("stages.train.nodes=4")["train"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (4, 4, 12)
    assert pod["subdomain"] == service["metadata"]["name"] == "dit-7b-train"
    (container,) = pod["containers"]
    script = container["command"][-1]
    assert "--nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=dit-7b-train-0.dit-7b-train:29500" in script
    assert "--max-restarts=3" in script and "--recipe pretrain_7b_pack" in script
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert pod["terminationGracePeriodSeconds"] == 300  # stages.train.notice: a last checkpoint
    assert spec["podFailurePolicy"]["rules"][0]["action"] == "Ignore"
    assert [volume for volume in pod["volumes"] if "persistentVolumeClaim" in volume or "hostPath" in volume] == [
        {"name": "mount-0", "persistentVolumeClaim": {"claimName": "runs"}},
        {"name": "mount-1", "hostPath": {"path": "/data"}},
    ]
    assert {"name": "mount-1", "mountPath": "/data", "readOnly": True} in container["volumeMounts"]
    assert (
        "--standalone"
        in documents("stages.train.nodes=1")["train"][0]["spec"]["template"]["spec"]["containers"][0]["command"][-1]
    )


def test_an_array_is_an_indexed_job_whose_tasks_fail_alone():
    spec = documents()["encode"][0]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["backoffLimitPerIndex"]) == (16, 8, 0)
    assert "export TASK=$JOB_COMPLETION_INDEX TASKS=16" in spec["template"]["spec"]["containers"][0]["command"][-1]


@pytest.mark.parametrize(("nodes", "restarts", "limit"), [(4, 0, 3), (1, 0, 0), (1, 3, 3)])
def test_the_first_pod_may_be_evicted(nodes, restarts, limit):
    """The others fail with it: as many as there are."""
    *_, job = documents(f"stages.train.nodes={nodes}", f"stages.train.max_restarts={restarts}")["train"]
    assert job["spec"]["backoffLimit"] == limit


def test_a_service_has_a_name_that_begins_with_a_letter():
    service, job = documents("stages.train.nodes=4", "name=7b-run")["train"]
    assert service["metadata"]["name"] == job["metadata"]["name"] == "chain-7b-run-train"
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert "--rdzv-endpoint=chain-7b-run-train-0.chain-7b-run-train:29500" in container["command"][-1]


def test_bad_nodes_are_left_out(tmp_path):
    (tmp_path / "exclude").write_text("node-3\nnode-9\n")
    assert main(["--config-file", str(EXAMPLE), *IMAGE, f"folder={tmp_path}", "--kubernetes"]) == 0
    job = yaml.safe_load((tmp_path / "kubernetes" / "scan.yaml").read_text())
    affinity = job["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"][0] == {
        "key": "kubernetes.io/hostname",
        "operator": "NotIn",
        "values": ["node-3", "node-9"],
    }
    assert "affinity" not in documents()["scan"][0]["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.container.image=null", "cluster.container.mounts=[]"], "needs cluster.container.image"),
        (["stages.Scan.command=ls"], "two stages have the same name in small letters"),
        ([f"name={'long' * 15}"], "is longer than 52 letters"),
    ],
)
def test_what_cannot_be_jobs_is_told(overrides, message):
    with pytest.raises(UserError, match=message):
        documents(*overrides)


def test_jobs_run_in_the_order_of_the_chain(kubectl, diamond, ran, tmp_path):
    """What fails keeps what needs it from starting; a second run makes it anew, and no more. A cluster that does not
    answer is asked again."""
    assert main([*diamond, IMAGE[0], "--kubernetes"]) == 0
    script = tmp_path / "chain" / "kubernetes" / "run.sh"
    (tmp_path / "right.1.fails").touch()
    (kubectl / "shaky").touch()
    done = subprocess.run(["bash", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "megadit-last: left out, for megadit-right failed" in done.stdout, done
    assert done.stderr.count("TLS handshake timeout") == 2 * 3, "of each Job that was let go"
    assert sorted(ran()) == ["first/0", "left/0", "right.0/3", "right.1/3", "right.2/3"] and ran()[0] == "first/0"
    (tmp_path / "right.1.fails").unlink()
    (kubectl / "shaky").unlink()
    assert subprocess.run(["bash", script], env={**os.environ, "NAMESPACE": ""}).returncode == 0
    assert ran()[5:] == ["right.0/3", "right.1/3", "right.2/3", "last/0"]
    assert subprocess.run(["bash", script]).returncode == 0 and len(ran()) == 9  # nothing is left to do


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cluster.container.mounts=[./data:/data]", "./data is neither a whole path nor the name of a Persistent"),
        ("cluster.container.mounts=[my_claim:/data]", "my_claim is neither a whole path"),
        ("cluster.container.mounts=['~/data:/data']", "~/data is neither a whole path"),
        ("cluster.container.mounts=[/a:data]", "write HOST:/CONTAINER"),
        ("cluster.container.mounts=[/a:/b:RO]", "write HOST:/CONTAINER"),
        ("cluster.container.mounts=[/a:/b,/c:/b]", "has two of /b; leave one out"),
        ("name=a-", "the name 'a-' must be of ASCII"),
        ("name=größe", "must be of ASCII"),
        ("stages.scan_.command=ls", "the name 'scan_' must be of ASCII"),
    ],
)
def test_no_manifest_is_written_that_kubernetes_refuses(override, message):
    with pytest.raises(UserError, match=re.escape(message)):
        documents(override)
