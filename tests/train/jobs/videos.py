"""Samples videos with the same random network under several layouts: videos.py OUT OVERRIDES...; every rank runs it.

OUT/layouts.json is {name: settings of `parallel`}; of each, OUT/NAME.npy has the videos that rank 0 made, and
OUT/torch.npy those of plain torch layers.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megadit.models.megatron import cpu_shim

if __name__ == "__main__":
    cpu_shim.install()

from layouts import randomise_initial_values  # noqa: E402

from megadit.infer.runtimes.torch import TorchDenoiser  # noqa: E402
from megadit.models.megatron import groups as process_groups  # noqa: E402
from megadit.models.networks.dit import DiT  # noqa: E402
from megadit.models.networks.initialize import initialize_  # noqa: E402
from megadit.train.config.load import resolve_config  # noqa: E402
from megadit.train.config.schema import ParallelConfig  # noqa: E402
from megadit.train.engine.schedule import evaluation  # noqa: E402
from megadit.train.engine.setup import build_training, start_processes  # noqa: E402
from megadit.train.engine.validation import _pipeline  # noqa: E402

PROMPTS = ["a red seven", "", "sample number three"]


def generate(pipeline):
    return np.stack([made.video for made in pipeline(PROMPTS, seeds=[3, 1, 2], num_frames=3)])


def main():
    out = Path(sys.argv[1])
    randomise_initial_values()
    config = resolve_config("digits_tiny", overrides=[*sys.argv[2:], f"train.output_dir={out / 'run'}"])
    for name, parallel in json.loads((out / "layouts.json").read_text()).items():
        laid_out = replace(config, parallel=ParallelConfig(**parallel))
        training = build_training(laid_out, start_processes(laid_out))
        with evaluation(training):
            pipeline = _pipeline(training, PROMPTS)
            videos = generate(pipeline)
        if dist.get_rank() == 0:
            np.save(out / f"{name}.npy", videos)
            pipeline.denoiser = TorchDenoiser(initialize_(DiT(config.model), 0))
            np.save(out / "torch.npy", generate(pipeline))
        process_groups.release()
    process_groups.destroy()


if __name__ == "__main__":
    main()
