"""A bundle becomes a whole pipeline, which diffusers opens: theirs went in, theirs comes out."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from megadit.models.bundle import Bundle
from megadit.models.commands.convert import main
from megadit.models.configs.config import DiTConfig
from megadit.models.shared.files import read_json, write_json
from megadit.models.storage import tensor_source
from tests.bundles import write_tiny_bundle
from tests.models.convert import load_by_servers
from tests.models.convert.load_by_servers import SERVERS
from tests.models.convert.test_conditioning import (
    NETWORKS,
    OF_IMAGES,
    clip_sizes,
    cosmos2_pipeline,
    cosmos_pipeline,
    pictures,
    wan_image_pipeline,
)
from tests.models.convert.test_conditioning import frames as random_frames
from tests.models.convert.test_pipelines import Harmless
from tests.models.convert.test_wan import random_wan, save, text_to_video
from tests.stable_diffusion import make_pipeline

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

SIZE = {"height": 32, "width": 48, "num_frames": 9, "num_inference_steps": 2, "output_type": "latent"}


def image_network(name):
    """With places for the image tokens of two pictures, where it takes a last frame."""
    places = {"pos_embed_seq_len": 10} if "flf" in name else {}
    return random_wan(1, **OF_IMAGES, **clip_sizes(1), **places) if places else NETWORKS[name]()


def saved(made, path):
    save(made, path / "Tiny", type(made).__name__)
    return made


PIPELINES = {
    "wan of two experts": lambda path, t5, clip, cosmos: text_to_video(path, t5, has_experts=True, boundary_ratio=0.8),
    "wan 5B": lambda path, t5, clip, cosmos: text_to_video(path, t5, expand_timesteps=True),
    **{
        name: lambda path, t5, clip, cosmos, name=name: wan_image_pipeline(path, t5, image_network(name))
        for name in ("wan2.2 i2v", "wan2.1 flf2v")
    },
    "cosmos of clips": lambda path, t5, clip, cosmos: saved(cosmos_pipeline(path, t5, cosmos), path),
    "cosmos2 of clips": lambda path, t5, clip, cosmos: saved(cosmos2_pipeline(path, t5, cosmos), path),
    **{
        f"stable diffusion {kind}": lambda path, t5, clip, cosmos, kind=kind: make_pipeline(path / "Tiny", kind, clip)
        for kind in ("2.x", "xl")
    },
}


def called(pipeline):
    """Latents of a prompt, from the same noise."""
    pipeline.set_progress_bar_config(disable=True)
    name, size = type(pipeline).__name__, dict(SIZE)
    if name.startswith("StableDiffusion"):
        size = {"height": 16, "width": 16, "num_inference_steps": 2, "output_type": "latent"}
    elif "ImageToVideo" in name or "VideoToWorld" in name or "Video2World" in name:
        first, last = pictures(random_frames(2))
        size |= {"image": first} | (
            {"last_image": last} if pipeline.transformer.config.get("pos_embed_seq_len") else {}
        )
    found = pipeline(prompt="a red seven", negative_prompt="blue", generator=torch.Generator().manual_seed(0), **size)
    return found[0]


@pytest.mark.parametrize("name", PIPELINES)
def test_it_is_opened_and_computes_the_same(
    name, tmp_path, write_t5, write_clip, make_cosmos_autoencoder, monkeypatch, without_torchvision
):
    made = PIPELINES[name](tmp_path, write_t5, write_clip, make_cosmos_autoencoder)
    assert main([str(tmp_path / "Tiny"), str(tmp_path / "bundle")]) == 0
    if name == "wan 5B":
        monkeypatch.setattr(tensor_source, "MAX_SHARD_BYTES", 20_000)
    assert main([str(tmp_path / "bundle"), str(tmp_path / "out"), "--to", "diffusers"]) == 0
    index = tmp_path / "out/transformer/diffusion_pytorch_model.safetensors.index.json"
    assert index.exists() == (name == "wan 5B"), "shards, where weights are large"
    for module in ("wan.pipeline_wan", "wan.pipeline_wan_i2v"):
        monkeypatch.setattr(f"diffusers.pipelines.{module}.prompt_clean", str)
    checker = {"safety_checker": Harmless()} if "safety_checker" in made.components and "cosmos" in name else {}
    again = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "out", **checker)
    assert type(again) is type(made)
    if name == "cosmos2 of clips":  # as in the fixture; the pipeline itself sets another value in any scheduler
        again.scheduler.register_to_config(final_sigmas_type="zero")
    for part, network in made.components.items():
        if isinstance(network, torch.nn.Module):
            before, after = network.state_dict(), getattr(again, part).state_dict()
            assert before.keys() == after.keys(), part
            assert {key: tensor.dtype for key, tensor in before.items()} == {key: after[key].dtype for key in before}
            assert all(torch.equal(after[key], tensor) for key, tensor in before.items()), part
    assert type(again.scheduler) is type(made.scheduler)
    assert {key: value for key, value in made.config.items() if key in ("boundary_ratio", "expand_timesteps")} == {
        key: value for key, value in again.config.items() if key in ("boundary_ratio", "expand_timesteps")
    }
    theirs, ours = called(made), called(again)
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm() and theirs.std() > 0
    assert main([str(tmp_path / "out"), str(tmp_path / "back")]) == 0, "and it comes in again"
    assert Bundle.open(tmp_path / "back").config == Bundle.open(tmp_path / "bundle").config


def test_servers_find_the_pipeline(tmp_path, write_t5):
    """What SGLang, vLLM-Omni and TensorRT-LLM look for in a folder; and by SGLang's own code, where it is installed."""
    text_to_video(tmp_path, write_t5)
    assert main([str(tmp_path / "Tiny"), str(tmp_path / "bundle")]) == 0
    assert main([str(tmp_path / "bundle"), str(tmp_path / "out"), "--to", "diffusers"]) == 0
    index = read_json(tmp_path / "out/model_index.json")
    assert index["_class_name"] == "WanPipeline" and "_diffusers_version" in index
    present = [name for name, value in index.items() if isinstance(value, list) and value != [None, None]]
    assert sorted(present) == ["scheduler", "text_encoder", "tokenizer", "transformer", "vae"]
    assert all((tmp_path / "out" / name).is_dir() for name in present)
    sglang = pytest.importorskip("sglang.cli.utils", reason="SGLang, a server for GPUs, is not installed")
    assert sglang.get_is_diffusion_model(str(tmp_path / "out"))
    del index["_diffusers_version"]
    write_json(tmp_path / "out/model_index.json", index)
    assert not sglang.get_is_diffusion_model(str(tmp_path / "out")), "negative control"


@pytest.mark.parametrize("server", SERVERS)
def test_a_server_loads_the_weights(server, tmp_path, write_t5):
    """By its own loader, in a process of its own: every tensor is used, and every parameter filled."""
    if importlib.util.find_spec(server) is None:
        pytest.skip(f"{server}, a server for GPUs, is not installed")
    text_to_video(tmp_path, write_t5, has_experts=True, boundary_ratio=0.8)
    assert main([str(tmp_path / "Tiny"), str(tmp_path / "bundle")]) == 0
    assert main([str(tmp_path / "bundle"), str(tmp_path / "out"), "--to", "diffusers"]) == 0

    def loaded(folder):
        command = [sys.executable, load_by_servers.__file__, server, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        if done.returncode == load_by_servers.NOT_HERE:
            pytest.skip(f"{server} cannot be imported here: {done.stdout}")
        return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr

    for name in ("transformer", "transformer_2"):
        assert loaded(tmp_path / "out" / name) == {"unused": [], "unfilled": []}
    file = tmp_path / "out/transformer/diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["blocks.0.attn1.to_r.weight"] = tensors.pop("blocks.0.attn1.to_q.weight")
    save_file(tensors, file)
    found = loaded(tmp_path / "out/transformer")
    assert "blocks.0.attn1.to_r.weight" in (found if isinstance(found, str) else found["unused"]), "negative control"


def test_what_diffusers_has_not_is_named(tmp_path, capsys):
    """The network is written, and it is said why no pipeline is."""
    config = DiTConfig(
        family="wan", num_layers=1, hidden_size=32, num_attention_heads=2, in_channels=48, patch_spatial=2
    )
    bundle = write_tiny_bundle(tmp_path / "bundle", config)
    assert main([str(bundle.path), str(tmp_path / "out"), "--to", "diffusers"]) == 0
    told = capsys.readouterr().err
    assert "without model_index.json, diffusers opens the folders one by one: diffusers has no" in told
    assert (tmp_path / "out/transformer/config.json").is_file()
    assert not (tmp_path / "out/model_index.json").exists()
