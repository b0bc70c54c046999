from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megadit.infer.evaluate.extractors.digits import DigitReader
from megadit.infer.evaluate.extractors.files import KIND
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.models.bundle import Bundle
from megadit.models.configs.adapter import AdapterConfig
from megadit.models.convert.adapters.adapter import Adapter
from megadit.models.convert.adapters.files import bundle_fingerprint, write_adapter
from megadit.models.lora.adapters import chosen_targets
from tests.bundles import write_able_bundle, write_tiny_bundle


@pytest.fixture(scope="session")
def bundle_dir(tmp_path_factory):
    """A tiny random bundle: latents of 4x4x4 pixels, tokens of 2x2 latents."""
    return write_tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny", training={"step": 7}).path


def make_adapter(path, bundle_dir, seed, *, kind="lora", rank=2, patterns=("blocks.*", "final_layer.*"), base=True):
    """Writes a random adapter of the bundle (with `base`; else one that does not say of which weights)."""
    config = AdapterConfig(rank=rank, alpha=2.0 * rank, targets=patterns, kind=kind)
    network = Bundle.open(bundle_dir).config
    generator, state = torch.Generator().manual_seed(seed), {}
    for name, target in chosen_targets(network, patterns).items():
        state[f"{name}.down"] = 0.3 * torch.randn(rank, target.in_features, generator=generator)
        state[f"{name}.up"] = 0.3 * torch.randn(target.out_features, rank, generator=generator)
        if kind == "dora":
            state[f"{name}.magnitude"] = 0.5 + torch.rand(target.out_features, generator=generator)
    fingerprint = bundle_fingerprint(Bundle.open(bundle_dir)) if base else None
    write_adapter(path, Adapter.from_state(state, config, network, base=fingerprint, training={"step": seed}))
    return str(path)


@pytest.fixture(scope="session")
def able_dir(bundle_dir, tmp_path_factory) -> Path:
    """The same network, as if it had been trained to be given parts of every kind."""
    out = tmp_path_factory.mktemp("able") / "bundle"
    write_able_bundle(bundle_dir, out)
    return out


@pytest.fixture(scope="session")
def able(able_dir) -> TextToVideo:
    return TextToVideo.from_pretrained(able_dir, device="cpu")


@pytest.fixture(scope="session")
def pipeline(bundle_dir) -> TextToVideo:
    return TextToVideo.from_pretrained(bundle_dir, device="cpu")


@pytest.fixture(scope="session")
def reader_file(tmp_path_factory):
    """An extractor of pictures and clips with random weights."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("reader") / "classifier.safetensors"
    save_file(DigitReader().state_dict(), path, metadata={KIND: "digits"})
    return path
