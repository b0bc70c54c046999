"""Exporting takes little more than twice the network's memory.

Runs where MEGADIT_EXPORT_WIDTH says how wide the network is: 2048 makes it one of 0.2 billion parameters (3 GB of disk,
minutes), 4096 one of 0.9 billion.
"""

import os
import subprocess
import sys

import pytest

WIDTH = int(os.environ.get("MEGADIT_EXPORT_WIDTH", "0"))
SCRIPT = """
import sys
from pathlib import Path
import torch
from megadit.export.build import ExportSettings, export_bundle
from megadit.models.bundle_writer import write_bundle
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.configs.config import DiTConfig
from megadit.models.networks.dit import DiT
from megadit.models.machine import peak_memory
from megadit.models.text_encoders import HashedWordEncoder
from megadit.models.tokenizers import HaarTokenizer

place, width = Path(sys.argv[1]), int(sys.argv[2])
tokenizer = HaarTokenizer(temporal_compression=1, spatial_compression=2)
config = DiTConfig(num_layers=2, hidden_size=width, num_attention_heads=width // 64, in_channels=12)
if sys.argv[3] == "write":
    network = DiT(config)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.02)
    defaults = SamplingSettings(num_steps=2, guidance=2.0, num_frames=2, height=8, width=8, fps=8)
    write_bundle(place / "in", config=config, state_dict=network.state_dict(), tokenizer=tokenizer,
                 text_encoder=HashedWordEncoder(dim=1024), defaults=defaults)
    print(sum(parameter.nbytes for parameter in network.parameters()))
else:
    import onnx, onnx_ir, onnxruntime, onnxscript, torch.onnx  # libraries take memory whatever the network
    before = peak_memory(torch.device("cpu"))
    export_bundle(place / "in", place / "out", ExportSettings(profiles=("batch=1,1,1", "text=1,2,8")))
    print(peak_memory(torch.device("cpu")) - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(WIDTH == 0, reason="takes minutes and gigabytes: set MEGADIT_EXPORT_WIDTH=2048")
def test_peak_is_little_more_than_twice_the_network(tmp_path):
    def run(what):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(WIDTH), what]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])

    size = run("write")
    peak = run("export")
    print(f"{size / 4e9:.2f}B parameters: peak {peak / size:.2f} times the network")
    assert peak <= 2.2 * size
    # large weights lie beside the graph
    data = tmp_path / "out/onnx/denoiser.onnx.data"
    assert data.exists()
