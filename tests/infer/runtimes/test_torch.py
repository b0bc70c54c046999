import gc
from dataclasses import replace

import PIL.Image
import pytest
import torch

from megadit.infer.benchmarks.generate import main as benchmark
from megadit.infer.commands.classify import main as classify
from megadit.infer.commands.similarity import main as similarity
from megadit.infer.evaluate.command import main as evaluate
from megadit.infer.generate.command import main as generate
from megadit.infer.runtimes import torch as runtime
from megadit.infer.runtimes.options import RuntimeOptions
from megadit.infer.runtimes.rank import Rank
from megadit.infer.runtimes.torch import DTYPES, TorchDenoiser, find_device, find_dtype, use_device
from megadit.models.bundle import Bundle
from megadit.models.configs.config import DiTConfig
from megadit.models.diffusion.parameterization import EDMDenoiser
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.dit import DiT
from megadit.models.shared.errors import UserError
from megadit.serve.backend.features import Features
from megadit.serve.service_info import Limits
from megadit.train.data.ingest import workers
from tests.bundles import write_classifier_bundle, write_clip_bundle, write_tiny_bundle


@pytest.fixture
def bundle(bundle_dir) -> Bundle:
    return Bundle.open(bundle_dir)


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 48, 2, 4, 4, generator=generator)
    text = torch.randn(2, 3, 16, generator=generator)
    conditioning = Conditioning(text, torch.tensor([3, 0]), torch.tensor([8.0, 0.0]))
    return x, torch.tensor([2.0, 0.1]), conditioning


def test_the_network_is_cast_and_its_preconditioning_is_not(bundle, inputs):
    """Near sigma = 0, x0 is c_skip x but for little: float32's precision shows, whatever the network's."""
    x, _, conditioning = inputs
    sigma = torch.full((2,), 1e-6)
    for dtype in ("float32", "bfloat16"):
        denoiser = TorchDenoiser(bundle.load_dit(dtype=find_dtype(dtype)), dtype=find_dtype(dtype))
        assert {parameter.dtype for parameter in denoiser._denoiser.parameters()} == {find_dtype(dtype)}
        x0 = denoiser(x, sigma, conditioning)
        assert x0.dtype == torch.float32 and not x0.requires_grad
        torch.testing.assert_close(x0, x, rtol=0, atol=1e-4)
    # Negative control: x itself would not survive bfloat16 so well.
    assert (x.bfloat16().float() - x).abs().max() > 1e-3


def test_bfloat16_is_close_to_float32(bundle, inputs):
    exact = TorchDenoiser(bundle.load_dit())(*inputs)
    low = TorchDenoiser(bundle.load_dit(), dtype=torch.bfloat16)(*inputs)
    error = (low - exact).norm() / exact.norm()
    assert 1e-6 < error < 2e-2  # bfloat16 rounds to 4e-3


def count_text_reads(denoiser: TorchDenoiser) -> list[str]:
    """A list that grows whenever a part of the network reads text or positions."""
    reads = []
    for name, module in denoiser._denoiser.named_modules():
        if name.endswith((".cross_attention.kv", ".text_embedder", ".positions")):
            module.register_forward_hook(lambda *_, name=name: reads.append(name))
    return reads


def family_inputs(family: str) -> tuple[DiT, torch.Tensor, Conditioning]:
    """A small network of this family with random tensors, latents, and two texts of which one is empty."""
    own = {
        "cosmos": {"adaln_lora_dim": 8},
        "moviegen": {"position_embedding": "learned", "learned_positions": (4, 4, 4)},
    }
    sizes = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "in_channels": 4, "crossattn_emb_size": 6}
    torch.manual_seed(0)
    dit = DiT(DiTConfig(family=family, **sizes, **own.get(family, {})))
    for parameter in dit.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    conditioning = Conditioning(torch.randn(2, 5, 6), torch.tensor([3, 0]), torch.tensor([8.0, 24.0]))
    return dit, torch.randn(2, 4, 2, 4, 6), conditioning


@pytest.mark.parametrize("family", ["megadit", "cosmos", "moviegen", "st_dit"])
def test_text_is_read_once_for_all_noise_levels(family, monkeypatch):
    dit, x, conditioning = family_inputs(family)
    plain, keeping = EDMDenoiser(dit).eval(), TorchDenoiser(dit)
    reads = count_text_reads(keeping)
    sigmas = [torch.full((2,), sigma) for sigma in (9.0, 1.0, 0.1)]
    with torch.no_grad():
        expected = [plain(x, sigma, conditioning) for sigma in sigmas]
    per_call = len(reads) // 3
    assert per_call >= dit.config.num_layers
    reads.clear()
    for sigma, answer in zip(sigmas, expected, strict=True):
        assert torch.equal(keeping(x, sigma, conditioning), answer)  # kept or not, the same numbers
    assert len(reads) == per_call
    # other conditions and other sizes are read anew
    other = replace(conditioning, text_length_B=torch.tensor([2, 5]))
    assert not torch.equal(keeping(x, sigmas[0], other), expected[0]) and len(reads) == 2 * per_call
    keeping(x[:, :, :1], sigmas[0], conditioning)
    assert len(reads) == 3 * per_call
    # what there is no room for is computed at each call
    monkeypatch.setattr(runtime, "CACHE_BYTES", 0)
    without, reads = TorchDenoiser(dit), count_text_reads(keeping)
    for sigma, answer in zip(sigmas, expected, strict=True):
        assert torch.equal(without(x, sigma, conditioning), answer)
    assert len(reads) == 3 * per_call


def test_what_was_kept_goes_with_its_conditions():
    dit, x, conditioning = family_inputs("megadit")
    denoiser = TorchDenoiser(dit)
    denoiser(x, torch.ones(2), conditioning)
    assert len(denoiser._seen) == 1
    del conditioning
    gc.collect()
    assert not len(denoiser._seen)


def test_names_of_types_and_devices():
    assert find_dtype("bf16") is find_dtype("bfloat16") is torch.bfloat16
    assert find_device("cpu").type == "cpu" and find_device("auto").type in ("cpu", "cuda")
    with pytest.raises(UserError, match=f"'int8' is unknown; choose one of {', '.join(DTYPES)}"):
        find_dtype("int8")
    for name in ("abacus", "mps", f"cuda:{torch.cuda.device_count()}"):
        with pytest.raises(UserError, match=name):
            find_device(name)


LIMITS = Limits(max_frames=1, max_pixels=64, max_work=64)


class UsedError(Exception):
    """A GPU became the current one."""


@pytest.fixture
def gpus(monkeypatch):
    """Four, in name only: who makes one of them the current one ends there."""

    def use(device):
        raise UsedError(str(device))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80e9, 80e9))
    monkeypatch.setattr(torch.cuda, "set_device", use)


def test_every_entrance_computes_on_its_own_gpu(gpus, tmp_path, monkeypatch):
    """Kernels, streams and tensors on "cuda" are then that GPU's."""
    video, judge = write_tiny_bundle(tmp_path / "video").path, write_classifier_bundle(tmp_path / "judge")
    picture = str(tmp_path / "a.png")
    PIL.Image.new("RGB", (8, 8)).save(picture)
    (tmp_path / "prompts.txt").write_text("a\nb\nc\n")
    on_third = ("--device", "cuda:3")
    commands = {
        generate: ["--checkpoint_path", str(video), "--prompt", "a", "--dtype", "float32", *on_third],
        classify: [str(judge.path), picture, *on_third],
        similarity: [str(write_clip_bundle(tmp_path / "clip").path), picture, *on_third],
        benchmark: [str(video), *on_third],
        evaluate: [str(video), "--out", str(tmp_path / "out"), "--prompts", str(tmp_path / "prompts.txt"), *on_third],
    }
    for run, arguments in commands.items():
        with pytest.raises(UsedError, match="cuda:3"):
            run(arguments)
    with pytest.raises(UsedError, match="cuda:3"):
        Features(
            "image_to_classes",
            judge,
            runtime="torch",
            device="cuda:3",
            limits=Limits(max_frames=1, max_pixels=64, max_work=64),
        )
    with pytest.raises(UsedError, match="cuda:3"):
        Rank().load(str(video), True, RuntimeOptions(device="cuda:3", dtype="float32", runtime="torch"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(workers, "join_ranks", lambda *_, **__: None)
    monkeypatch.setattr(workers.dist, "get_rank", lambda: 1)
    with pytest.raises(UsedError, match="cuda:1"), workers.join_workers(workers.Shard()):
        pass


def test_no_gpu_is_used_where_none_is_named(gpus):
    assert use_device("cpu").type == "cpu" and use_device("auto") == torch.device("cuda")
