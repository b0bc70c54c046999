"""All stages of a small `megadit demo` in one process that has no instructions for half precision: prints, as JSON,
the products in half precision that each stage asked for.

Usage: half_products.py FOLDER.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from megadit.models.megatron import cpu_shim

cpu_shim.install()

sys.path.insert(0, str(Path(__file__).parents[2]))

from half_products import counted_half_products, without_half_products  # noqa: E402

from megadit.train.__main__ import main as train  # noqa: E402
from megadit.train.checkpoints import to_bundle  # noqa: E402
from megadit.train.demos import stages  # noqa: E402
from megadit.train.demos.digits import classifier, demo  # noqa: E402

STEPS = ("train.train_iters=2", "train.num_threads=1", "validation.num_batches=1", "logger.curves=false")
STEPS += ("data.shuffle_buffer_size=8", "data.packing_buffer_size=8")


def in_this_process(module: str, *arguments: str) -> None:
    """In place of `run_module`: the same command, without ranks of its own."""
    mains = {"megadit.train": train, "megadit.train.checkpoints.to_bundle": to_bundle.main}
    kept = [argument for argument in arguments if argument not in ("--nproc", "1")]
    assert mains[module](kept) == 0


def main(folder: Path) -> None:
    stages.run_module = in_this_process
    classifier.train_reader = partial(classifier.train_reader, num_clips=22, num_steps=2)
    size = replace(demo.QUICK, num_clips=40, num_images=40, num_val=20, overrides=STEPS, clip_stride=48)
    small = demo.Demo(out=folder, size=size, num_ranks=1)
    found = {}
    with without_half_products():
        for stage in demo.STAGES:
            with counted_half_products() as counted:
                stages.run_stages(small, [stage])
            found[stage.name] = counted
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
