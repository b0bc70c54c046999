"""Bundles and checkpoints from strangers are loaded, or refused in one line; none runs code, hangs or fills memory."""

import random
import shutil
from collections import Counter

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megadit.infer.inspect.info import describe_bundle, describe_checkpoint
from megadit.models.bundle import Bundle, update_manifest
from megadit.models.bundle_writer import write_bundle
from megadit.models.configs.config import DiTConfig
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.megatron.checkpoint import CONFIG, STATE, TENSORS, read_network
from megadit.models.megatron.integrity import checksums, file_names, write_sums
from megadit.models.networks.dit import DiT
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import MANIFEST_FILE, read_json, write_json, write_manifest
from megadit.models.text_encoders import HashedWordEncoder
from megadit.models.tokenizers import HaarTokenizer
from tests.memory import within_memory
from tests.mutations import mutated

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
NETWORK = DiTConfig(num_layers=1, hidden_size=24, num_attention_heads=2, in_channels=24, crossattn_emb_size=16)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("bundles") / "bundle"
    write_bundle(
        path,
        config=NETWORK,
        state_dict=DiT(NETWORK).state_dict(),
        tokenizer=HaarTokenizer(temporal_compression=2, spatial_compression=2),
        text_encoder=HashedWordEncoder(dim=16),
        defaults=SamplingSettings(num_steps=4, guidance=3.0, num_frames=3, height=8, width=8, fps=8.0),
    )
    update_manifest(path, license={"name": "MIT", "asks_for_guardrail": False})
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints") / "iter_0000002"
    path.mkdir()
    run = {"iteration": 2, "consumed_samples": 8, "consumed_tokens": 80}
    write_json(path / STATE, {"ema_sigma_rels": [0.1], "run": run, "settings": {}, "format_version": 2})
    (path / CONFIG).write_text(
        "recipe: digits\nmodel: {num_layers: 1, hidden_size: 24, num_attention_heads: 2}\n"
        "train: {train_iters: 9}\ndata: {mock: true, path: null, global_batch_size: 4, seq_length: 200}\n"
        "parallel: {tensor_size: 1}\n"
    )
    tensors = {f"{kind}.dit.{name}": torch.randn(9, 7) for kind in ("model", "ema.0.1") for name in "abc"}
    dcp.save(tensors, checkpoint_id=path / TENSORS, no_dist=True)
    sign_checkpoint(path)
    return path


def sign_checkpoint(path) -> None:
    write_sums(path, checksums(path, file_names(path)))


def sign_bundle(path) -> None:
    manifest = read_json(path / MANIFEST_FILE)
    write_manifest(path, {name: value for name, value in manifest.items() if name != "files"})


def load_bundle(path) -> None:
    bundle = Bundle.open(path, verify=True)
    describe_bundle(path)
    assert bundle.license is not None
    bundle.load_dit()
    bundle.load_tokenizer()
    bundle.load_text_encoder()


def load_checkpoint(path) -> None:
    describe_checkpoint(path)
    read_network(path)
    read_network(path, ema=0.1)


@pytest.mark.parametrize("kind", ["bundle", "checkpoint"])
@within_memory()
def test_mutated_files_are_refused_in_one_line(kind, tmp_path, request):
    """`--cases N` of each; whoever changed a file knew of its checksum."""
    whole = request.getfixturevalue(kind)
    load, sign = {"bundle": (load_bundle, sign_bundle), "checkpoint": (load_checkpoint, sign_checkpoint)}[kind]
    load(whole)
    found: Counter[str] = Counter()
    for case in range(request.config.getoption("--cases") or 40):
        draw = random.Random(case)
        path = shutil.copytree(whole, tmp_path / whole.name)
        file = draw.choice(sorted(file for file in path.rglob("*") if file.is_file()))
        content = file.read_bytes()
        file.write_bytes(mutated(content[:4096], draw) + content[4096:])  # headers, not weights
        try:
            if file.name != MANIFEST_FILE:
                sign(path)
            load(path)
            found["loaded"] += 1
        except UserError as error:
            assert "\n" not in str(error).rstrip(), (case, file, error)
            found[file.name] += 1
        shutil.rmtree(path)
    print(kind, dict(found))
    assert found["loaded"] and found.total() > found["loaded"]
