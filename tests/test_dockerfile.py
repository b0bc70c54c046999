"""The Dockerfile asks for what exists, and leaves the vendor's torch alone."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
DOCKERFILE, SERVED = ((REPOSITORY / name).read_text() for name in ("Dockerfile", "serve/Dockerfile"))


def test_it_starts_from_the_vendor_s_image():
    assert re.search(r"^ARG PYTORCH_IMAGE=nvcr\.io/nvidia/pytorch:\d+\.\d+-py3$", DOCKERFILE, re.MULTILINE)
    assert "FROM ${PYTORCH_IMAGE}" in DOCKERFILE


@pytest.mark.parametrize("dockerfile", [DOCKERFILE, SERVED], ids=["train", "serve"])
def test_extras_exist_and_the_build_ends_with_looking_for_them(dockerfile):
    """tests/test_deploy.py tries what `deploy` brings."""
    extras = re.search(r"'[./\w]+\[([\w,]+)\]'", dockerfile)[1].split(",")
    known = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "deploy" in extras and set(extras) <= set(known)
    (checked,) = re.findall(r"&& megadit doctor --extras ([\w ]+)$", dockerfile, re.MULTILINE)
    assert checked.split() == extras


def test_the_server_has_every_runtime_and_one_torch():
    assert "onnxruntime-gpu==" in SERVED and "tensorrt==" in SERVED and re.search(r'"torch==\$\{TORCH\}"', SERVED)
    assert re.search(r"^ARG TORCH=\d+\.\d+\.\d+$", SERVED, re.MULTILINE)
    assert "assert torch.version.cuda == '${CUDA}'" in SERVED
    assert re.search(r"^ARG CUDA=\d+\.\d+$", SERVED, re.MULTILINE)


def test_hadolint_finds_nothing():
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent)
    if hadolint is None:
        pytest.skip("no hadolint (the extra dev has one for Linux on x86-64)")

    def complaints(dockerfile: str) -> str:
        return subprocess.run([hadolint, "-"], input=dockerfile, stdout=subprocess.PIPE, text=True).stdout

    assert complaints(DOCKERFILE) == complaints(SERVED) == ""
    assert "DL3006" in complaints(SERVED.replace(":${TRITON}-py3", "")), "the control"


def test_torch_is_pinned_to_what_the_image_brings():
    """And nothing else: the image's own constraints are not for what is installed here."""
    assert "PIP_CONSTRAINT='' pip install --no-cache-dir --constraint /tmp/vendor.txt" in DOCKERFILE
    pattern = re.search(r"grep -iE '([^']+)'", DOCKERFILE)[1]
    installed = ["torch==2.10.0a0+b4e4ee8", "transformer_engine==2.10", "triton==3.5", "torchdata==0.11"]
    assert [line for line in installed if re.match(pattern, line)] == installed[:3]
