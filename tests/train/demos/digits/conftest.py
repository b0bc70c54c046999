"""What the demos that follow `megadit demo` start from."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from ...conftest import FEW_STEPS


@pytest.fixture(scope="session")
def quick_demo(tmp_path_factory, forked) -> Path:
    """The folder of a demo that was hardly trained: its bundle, its classifier, its data."""
    from megadit.train.demos import stages
    from megadit.train.demos.digits import classifier, demo

    folder = tmp_path_factory.mktemp("demo") / "quick"
    steps = (*demo.QUICK.overrides, "train.train_iters=8", *FEW_STEPS)
    size = replace(demo.QUICK, num_clips=40, num_images=40, num_val=20, clip_stride=48, overrides=steps)
    few = partial(classifier.train_reader, num_clips=400, num_steps=60)
    with forked(), mock.patch.object(classifier, "train_reader", few):
        asked = ("prepare", "train", "bundle", "generate", "score")
        stages.run_stages(
            demo.Demo(out=folder, size=size, num_ranks=1), [stage for stage in demo.STAGES if stage.name in asked]
        )
    return folder
