"""Loss and gradient of a pack with conditioning beside those of the same pack without, as a ratio.

    python tests/benchmarks/conditioning_step.py [--rounds 9] [--threads 1] [--json FILE]

The modes and their shares are those of the recipe `digits_conditioned`. Both packs have the same samples, so that each
token attends to as many others.
"""

import sys
import tempfile
from dataclasses import replace
from functools import partial

import torch
from side_by_side import compare, show

from megadit.infer.benchmarks.beside_diffusers import BenchmarkOptions, randomised
from megadit.models.networks.dit import DiT
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.shared.cli.command import run_command
from megadit.models.shared.cli.options import read_options
from megadit.train.config.schema import RunConfig
from megadit.train.data.packs.packed_batch import PackedBatch
from megadit.train.objectives.denoise import token_noise
from megadit.train.objectives.losses import edm_loss
from megadit.train.recipes import load_recipe

CASES = {
    "the demo's network, clips of 48 tokens": ({}, {"mock_latent_shapes": ((3, 4, 4),)}),
    "8 blocks 512 wide, clips of 512 tokens": (
        {"num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "patch_spatial": 2, "crossattn_emb_size": 512},
        {"mock_latent_shapes": ((8, 16, 16),), "seq_length": 4096, "text_seq_length": 512},
    ),
}
"""What is packed -> how model and data differ from the recipe's."""
LIMIT = 1.02


def _run_of(model: dict, data: dict, folder: str) -> RunConfig:
    run = load_recipe("digits_conditioned")
    return replace(
        run,
        model=replace(run.model, **model),
        data=replace(run.data, mock=True, global_batch_size=1, num_workers=0, **data),
        train=replace(run.train, output_dir=folder, num_threads=torch.get_num_threads()),
    )


def without(batch: PackedBatch) -> PackedBatch:
    """The same samples, of which nothing is given."""
    segments = tuple(replace(segment, clean=()) for segment in batch.layout.segments)
    return replace(batch, layout=PackLayout(segments))


def _step(dit: DiT, batch: PackedBatch) -> None:
    sigma_G = torch.linspace(-3, 3, batch.layout.num_segments).exp()
    edm_loss(dit, batch, sigma_G, token_noise(batch)).objective.backward()


def _run(argv: list[str]) -> None:
    options = read_options(
        BenchmarkOptions,
        argv,
        prog="python tests/benchmarks/conditioning_step.py",
        description="Times packs with conditioning beside packs without.",
    )
    options.set_threads()
    if not torch.cuda.is_available():
        from megadit.models.megatron import cpu_shim

        cpu_shim.install()  # before anything imports Megatron
    from megadit.models.megatron import groups as process_groups
    from megadit.train.data.distribute import TrainBatches
    from megadit.train.engine.setup import start_processes

    found = []
    for name, sizes in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            run = _run_of(*sizes, folder)
            batch, dit = next(TrainBatches(run, start_processes(run))).arrived(), randomised(DiT(run.model))
            name += f", {1 - batch.layout.num_targets / batch.layout.num_tokens:.0%} of them given"
            sides = partial(_step, dit, batch), partial(_step, dit, without(batch))
            found.append(compare(name, *sides, options.rounds, limit=LIMIT))
            process_groups.release()
    show("loss and gradient of a pack: of given and wanted / with nothing given", found, options.json)


def main(argv: list[str]) -> int:
    return run_command(_run, argv)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
