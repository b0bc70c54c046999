"""What the demos that follow `megadit demo` start from."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def quick_demo(tmp_path_factory) -> Path:
    """The folder of a demo that was hardly trained: its bundle, its classifier, its data."""
    from megadit.train.demos.digits import demo

    folder = tmp_path_factory.mktemp("demo") / "quick"
    assert demo.main(["--out", str(folder), "--quick"]) == 0
    return folder
