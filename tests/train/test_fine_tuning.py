"""A run can start from the weights of a bundle."""

import json
from dataclasses import replace

import pytest
import torch

from megadit.models.bundle_writer import write_bundle
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.megatron.checkpoint import find_checkpoints, read_network
from megadit.models.networks.dit import DiT
from megadit.models.text_encoders import HashedWordEncoder
from megadit.models.tokenizers import HaarTokenizer
from megadit.train.recipes import load_recipe

MODEL = replace(load_recipe("digits_tiny").model, in_channels=24, crossattn_emb_size=64)
MODEL_OVERRIDES = ("model.in_channels=24", "model.crossattn_emb_size=64")
MOCK = ("-m", "megadit.train", "--recipe", "digits_tiny", "--mock", "validation.interval=0", "train.train_iters=1")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("bundle") / "tiny"
    torch.manual_seed(0)
    write_bundle(
        path,
        config=MODEL,
        state_dict={name: torch.randn(tensor.shape) for name, tensor in DiT(MODEL).state_dict().items()},
        tokenizer=HaarTokenizer(temporal_compression=2, spatial_compression=2, sigma_data=MODEL.sigma_data),
        text_encoder=HashedWordEncoder(dim=64),
        defaults=SamplingSettings(num_steps=4, guidance=3.0, num_frames=3, height=8, width=8, fps=8.0),
    )
    return path


def test_training_starts_from_a_bundle_on_two_ranks(bundle, run_ranks, tmp_path):
    small = ("optimizer.lr=1e-9", "optimizer.min_lr=0.0", "parallel.tensor_model_parallel_size=2")
    given = (f"checkpoint.init_from={bundle}", f"train.output_dir={tmp_path}")
    told = run_ranks(2, *MOCK, *MODEL_OVERRIDES, *small, *given)
    assert "go on with" not in "".join(told), "the objective is the same"
    (checkpoint,) = find_checkpoints(tmp_path / "checkpoints")
    from safetensors.torch import load_file

    given = load_file(bundle / "transformer/model.safetensors")
    trained = read_network(checkpoint)
    assert trained.keys() == given.keys()
    # one step at a rate of 1e-9
    assert all((trained[name] - tensor).abs().max() < 1e-6 for name, tensor in given.items())


def test_a_network_goes_on_under_another_objective_and_its_first_loss_is_told(bundle, run_ranks, tmp_path):
    arguments = (*MOCK, *MODEL_OVERRIDES, f"checkpoint.init_from={bundle}", f"train.output_dir={tmp_path}")
    (told,) = run_ranks(1, *arguments, "model.parameterization=flow")
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert f"with model.parameterization=edm and go on with flow: the first loss is {first:.4g}" in told


def test_another_network_is_refused(bundle, run_ranks, tmp_path):
    outputs = run_ranks(1, *MOCK, f"checkpoint.init_from={bundle}", f"train.output_dir={tmp_path}", code=2)
    assert "has model.in_channels=24 (not " in outputs[0] and "give the run the same" in outputs[0]
