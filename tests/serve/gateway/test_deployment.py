"""Manifests: by what Kubernetes, docker compose and systemd take, and by the options that our commands know."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megadit.models.shared.cli.options import every_setting, read_options
from megadit.serve.gateway import command
from megadit.serve.launch.run import RunOptions
from megadit.serve.launch.up import UpOptions
from megadit.serve.page.demo import PageOptions

SERVE = Path(__file__).resolve().parents[3] / "serve"
UNIT = SERVE / "systemd" / "megadit.service"
KUBERNETES = sorted((SERVE / "kubernetes").glob("*.yaml"))
DOCUMENTS = [
    document
    for path in KUBERNETES
    for document in yaml.safe_load_all(path.read_text())
    if path.name != "kustomization.yaml"
]


def find(kind: str, name: str) -> dict:
    return next(each for each in DOCUMENTS if each["kind"] == kind and each["metadata"]["name"] == name)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda each: f"{each['kind']} {each['metadata']['name']}")
def test_kubernetes_knows_every_field(document):
    validator = pytest.importorskip("kubernetes_validate")
    validator.validate(document, "1.30", strict=True)
    spoiled = document | {"spec": document["spec"] | {"repplicas": 1}}
    with pytest.raises(validator.ValidationError):  # the control: a misspelt field is noticed
        validator.validate(spoiled, "1.30", strict=True)


def test_kustomize_names_every_manifest():
    listed = yaml.safe_load((SERVE / "kubernetes" / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == [path.name for path in KUBERNETES if path.name != "kustomization.yaml"]


def test_claims_and_servers_are_those_that_exist():
    claims = {each["metadata"]["name"] for each in DOCUMENTS if each["kind"] == "PersistentVolumeClaim"}
    pods = [each["spec"]["template"]["spec"] for each in DOCUMENTS if "template" in each["spec"]]
    mounted = [volume.get("persistentVolumeClaim", {}).get("claimName") for pod in pods for volume in pod["volumes"]]
    assert set(filter(None, mounted)) == claims
    autoscaler = find("HorizontalPodAutoscaler", "megadit-triton")["spec"]
    arguments = find("Deployment", "megadit-gateway")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert sum(argument.startswith("--server=") for argument in arguments) == autoscaler["maxReplicas"]


def test_the_gateway_alone_may_ask_triton():
    """In the cluster and in compose, where what is published is published to the machine itself."""
    (asked, watched) = find("NetworkPolicy", "megadit-triton")["spec"]["ingress"]
    assert asked == {"from": [{"podSelector": {"matchLabels": {"app": "megadit-gateway"}}}], "ports": [{"port": 8001}]}
    assert watched["ports"] == [{"port": 8002}]
    pods = {each["metadata"]["name"]: each["spec"] for each in DOCUMENTS if "template" in each["spec"]}
    for name in ("megadit-triton", "megadit-gateway"):
        chosen = find("NetworkPolicy", name)["spec"]["podSelector"]["matchLabels"]
        assert chosen.items() <= pods[name]["template"]["metadata"]["labels"].items()
    services = compose()["services"]
    assert [name for name, each in services.items() if "inside" in each["networks"]] == ["triton", "gateway"]
    assert "ports" not in services["triton"] and compose()["networks"]["inside"] == {"internal": True}
    published = [port for each in services.values() for port in each.get("ports", [])]
    assert len(published) == 3 and all(port.startswith("127.0.0.1:") for port in published)


def test_containers_may_do_and_write_as_little_as_they_need():
    for name, service in compose()["services"].items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["mem_limit"], name
        assert service["security_opt"] == ["no-new-privileges:true"] and service["restart"] == "unless-stopped", name
    for pod in (each["spec"]["template"]["spec"] for each in DOCUMENTS if "template" in each["spec"]):
        assert pod["automountServiceAccountToken"] is False and pod["securityContext"]["runAsNonRoot"]
        for container in pod["containers"]:
            allowed = container["securityContext"]
            assert allowed["readOnlyRootFilesystem"] and not allowed["allowPrivilegeEscalation"]
            assert allowed["capabilities"] == {"drop": ["ALL"]} and container["resources"]["limits"]["memory"]


def test_the_image_is_newer_than_those_that_tiny_chunks_end():
    year, month = re.search(r"^ARG TRITON=(\d+)\.(\d+)$", (SERVE / "Dockerfile").read_text(), re.MULTILINE).groups()
    assert (int(year), int(month)) >= (25, 7)


def test_our_commands_know_every_option():
    """In the manifests and in the compose file."""
    options = {"gateway": command.GatewayOptions, "run": RunOptions, "demo": PageOptions}
    commands = [find("Deployment", "megadit-gateway"), find("StatefulSet", "megadit-triton")]
    commands = [each["spec"]["template"]["spec"]["containers"][0]["args"] for each in commands]
    commands += [compose()["services"][name]["command"] for name in ("gateway", "demo")]
    for megadit, serve, verb, *arguments in commands:
        assert (megadit, serve) == ("megadit", "serve")
        names = [name for name, about in every_setting(options[verb]).items() if not about.positional]
        read_options(options[verb], arguments, prog=verb, groups={"all": names})


def compose() -> dict:
    return yaml.safe_load((SERVE / "docker-compose.yml").read_text())


def test_compose_knows_every_field(tmp_path):
    tool = shutil.which("check-jsonschema", path=str(Path(sys.executable).parent))
    if tool is None:
        pytest.skip("check-jsonschema is not installed")
    check = [tool, "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*check, str(SERVE / "docker-compose.yml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    spoiled = compose()
    spoiled["services"]["gateway"]["comand"] = "x"
    (tmp_path / "spoiled.yml").write_text(yaml.safe_dump(spoiled))
    assert subprocess.run([*check, str(tmp_path / "spoiled.yml")], capture_output=True).returncode != 0


def test_systemd_knows_every_line(tmp_path):
    tool, text = shutil.which("systemd-analyze"), UNIT.read_text()
    command = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    arguments = command.partition(" serve up ")[2].split()
    names = [name for name, about in every_setting(UpOptions).items() if not about.positional]
    read_options(UpOptions, arguments[: arguments.index("--")], prog="up", groups={"all": names})
    if tool is None:
        pytest.skip("no systemd-analyze; on Debian: apt-get install systemd")
    there = text.replace("/opt/megadit/bin/megadit", f'"{sys.executable}"')  # which has to be there
    spoiled = there.replace("Restart=always", "Restart=whenever")
    for name, content, is_right in (("right", there, True), ("spoiled", spoiled, False)):
        unit = tmp_path / f"{name}.service"
        unit.write_text(content)
        done = subprocess.run([tool, "verify", "--man=no", str(unit)], capture_output=True, text=True)
        assert (unit.name not in done.stderr and done.returncode == 0) == is_right, done.stderr
