"""A network is converted in a fraction of the memory that it takes itself."""

import json
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from megadit.models.configs.named import NAMED_CONFIGS
from megadit.models.convert import wan
from megadit.models.convert.converted import their_shapes
from megadit.models.storage.components import network_shapes
from tests.models.convert.test_wan import small_autoencoder

pytest.importorskip("diffusers", reason="diffusers is not installed")
JOB = Path(__file__).parent / "converted_memory.py"
TENSORS_OF_SHARD = 200


def write_sparse(directory, config):
    """diffusers' transformer of a configuration in bfloat16 shards without data: holes, which read as zeros."""
    ours = network_shapes(config)
    shapes = [item for entry in wan.diffusers_entries(config) for item in their_shapes(entry, ours[entry.name]).items()]
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(wan.config_to_diffusers(config)))
    where = {}
    for number in range(0, len(shapes), TENSORS_OF_SHARD):
        file, header, offset = f"shard-{number}.safetensors", {}, 0
        for name, shape in shapes[number : number + TENSORS_OF_SHARD]:
            size, where[name] = 2 * prod(shape), file
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header).encode()
        with (directory / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + offset)
    index = directory / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    return sum(2 * prod(shape) for _, shape in shapes)


def convert_sparse(folder, write_t5, num_layers):
    """(bytes of the network, bytes of anonymous memory that its conversion took)."""
    config = replace(NAMED_CONFIGS["wan_14b"], num_layers=num_layers, hidden_size=2560, num_attention_heads=20)
    size = write_sparse(folder / "wan" / "transformer", config)
    small_autoencoder(z_dim=16).save_pretrained(folder / "vae")
    write_t5(folder / "text", kind="UMT5", dim=4096)
    command = [sys.executable, JOB, folder / "wan" / "transformer", folder / "bundle"]
    command += ["--tokenizer", folder / "vae", "--text_encoder", folder / "text"]
    told = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout
    return size, int(told.split()[-1])


@pytest.mark.slow
def test_conversion_takes_the_memory_of_a_few_tensors(tmp_path, write_t5):
    """Of four layers and of one: nothing is held of a tensor that was written."""
    (_, one), (size, four) = (convert_sparse(tmp_path / str(n), write_t5, n) for n in (1, 4))
    # the largest tensor, of 15,360 x 2,560 numbers, in a few copies
    assert four < 2**29 and size > 1e9, four
    assert four < one + 200e6, (one, four)  # three layers have 750 MB; a tensor more or less is freed late
