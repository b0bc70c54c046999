"""The Dockerfile asks for what exists, and leaves the vendor's torch alone."""

import re
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
DOCKERFILE, SERVED = ((REPOSITORY / name).read_text() for name in ("Dockerfile", "serve/Dockerfile"))


def test_it_starts_from_the_vendor_s_image():
    assert re.search(r"^ARG PYTORCH_IMAGE=nvcr\.io/nvidia/pytorch:\d+\.\d+-py3$", DOCKERFILE, re.MULTILINE)
    assert "FROM ${PYTORCH_IMAGE}" in DOCKERFILE


@pytest.mark.parametrize("dockerfile", [DOCKERFILE, SERVED], ids=["train", "serve"])
def test_extras_exist_and_decode_what_tokenizers_need(dockerfile):
    extras = set(re.search(r"'[./\w]+\[([\w,]+)\]'", dockerfile)[1].split(","))
    known = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras <= set(known)
    assert {"diffusers", "t5"} <= extras, "Cosmos' decoder is diffusers', the text encoder transformers'"


def test_the_server_has_every_runtime_and_one_torch():
    assert "onnxruntime-gpu" in SERVED and "tensorrt==" in SERVED and re.search(r'"torch==\$\{TORCH\}"', SERVED)
    assert re.search(r"^ARG TORCH=\d+\.\d+\.\d+$", SERVED, re.MULTILINE)


def test_torch_is_pinned_to_what_the_image_brings():
    assert "--constraint /tmp/vendor.txt" in DOCKERFILE
    pattern = re.search(r"grep -iE '([^']+)'", DOCKERFILE)[1]
    installed = ["torch==2.10.0a0+b4e4ee8", "transformer_engine==2.10", "triton==3.5", "torchdata==0.11"]
    assert [line for line in installed if re.match(pattern, line)] == installed[:3]
