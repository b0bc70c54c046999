"""Run as a process: asks the network in DIRECTORY on DEVICE, RESIDENT blocks of it in memory and one more (0: all of
them), and prints the most memory that it took beyond that at the start, in bytes."""

import sys
from pathlib import Path

import torch

from megadit.infer.runtimes.offloaded import load_offloaded_dit
from megadit.infer.runtimes.torch import TorchDenoiser
from megadit.models.machine import peak_memory, reset_peak_memory
from megadit.models.networks.conditioning import Conditioning
from megadit.models.storage.components import load_network


def take(directory: Path, device: torch.device, resident: int) -> None:
    options = {"device": device, "dtype": torch.float32}
    dit = (
        load_offloaded_dit(directory, **options, resident=resident) if resident else load_network(directory, **options)
    )
    text = torch.zeros(1, 3, dit.config.crossattn_emb_size)
    conditioning = Conditioning(text, torch.tensor([3]), torch.full((1,), 8.0))
    TorchDenoiser(dit, **options)(torch.zeros(1, dit.config.in_channels, 1, 4, 4), torch.ones(1), conditioning)


if __name__ == "__main__":
    directory, device = Path(sys.argv[1]), torch.device(sys.argv[2])
    take(directory / "small", device, 1)  # libraries take memory whatever the network
    reset_peak_memory(device)
    before = peak_memory(device)
    take(directory / "large", device, int(sys.argv[3]))
    print(peak_memory(device) - before)
