"""A long pack goes through a block in bounded memory: nothing is quadratic in its length."""

import subprocess
import sys

import pytest

SCRIPT = """
import random, torch
from megadit.models.networks.blocks import BlockInputs, DiTBlock
from megadit.models.configs.config import DiTConfig
from megadit.models.networks.embeddings import rotary_table
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.machine import peak_memory
from megadit.models.ops.ledger import cheap_values_recomputed
from megadit.models.packing.segments import Segment

TOKENS, SEGMENTS, TEXT = 65536, 40, 20
random.seed(0)
cuts = [0, *sorted(random.sample(range(1, TOKENS // 16), SEGMENTS - 1)), TOKENS // 16]
segments = [Segment((b - a, 4, 4), TEXT) for a, b in zip(cuts, cuts[1:])]
layout = PackLayout.pack(segments, capacity=TOKENS, text_capacity=TEXT * SEGMENTS)
config = DiTConfig(hidden_size=256, num_attention_heads=4)
block = DiTBlock(config)
for parameter in block.parameters():
    torch.nn.init.normal_(parameter, std=0.05)
x = torch.randn(TOKENS, 1, 256, requires_grad=True)
condition, text = torch.randn(SEGMENTS, 256), torch.randn(TEXT * SEGMENTS, 1, 256)
rotary = rotary_table(layout.on("cpu").positions_S3, config, torch.float32)
inputs = BlockInputs(condition_GD=condition, text_LBD=text, layout=layout, rotary=rotary)
with cheap_values_recomputed():
    out = block(x, inputs)
out.square().mean().backward()
assert all(parameter.grad.abs().max() > 0 for parameter in block.parameters())
print(peak_memory(torch.device("cpu")))
"""


@pytest.mark.slow
def test_65536_tokens_in_40_segments_stay_below_2_gib():
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    peak = int(result.stdout)
    assert peak < 2 * 2**30, f"peak {peak / 2**30:.2f} GiB"
