"""The Dockerfile asks for what exists, and leaves the vendor's torch alone."""

import re
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()


def test_it_starts_from_the_vendor_s_image():
    assert re.search(r"^ARG PYTORCH_IMAGE=nvcr\.io/nvidia/pytorch:\d+\.\d+-py3$", DOCKERFILE, re.MULTILINE)
    assert "FROM ${PYTORCH_IMAGE}" in DOCKERFILE


def test_extras_exist():
    extras = re.search(r"'\.\[([\w,]+)\]'", DOCKERFILE)[1].split(",")
    known = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) <= set(known)


def test_torch_is_pinned_to_what_the_image_brings():
    assert "--constraint /tmp/vendor.txt" in DOCKERFILE
    pattern = re.search(r"grep -iE '([^']+)'", DOCKERFILE)[1]
    installed = ["torch==2.10.0a0+b4e4ee8", "transformer_engine==2.10", "triton==3.5", "torchdata==0.11"]
    assert [line for line in installed if re.match(pattern, line)] == installed[:3]
