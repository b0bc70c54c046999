"""The plan of memory is what tensors take: activations counted as they live and die, weights by their files."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megadit.infer.generate.command import main
from megadit.infer.generate.memory_plan import Choices, describe_plan, fitting, plan_memory
from megadit.infer.runtimes.torch import TorchDenoiser
from megadit.models.bundle import Bundle
from megadit.models.configs.config import DiTConfig
from megadit.models.configs.named import NAMED_CONFIGS
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.lora.inputs import AdapterInputs
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.dit import DiT
from megadit.models.shared.resources import GIB

BF16 = Choices(dtype=torch.bfloat16)
SIZES = {"num_layers": 2, "hidden_size": 192, "num_attention_heads": 4, "crossattn_emb_size": 32}
CONFIGS = {
    "dit": DiTConfig(**SIZES),
    "wan": DiTConfig(**SIZES, family="wan", parameterization="flow"),
    "cosmos": DiTConfig(**SIZES, family="cosmos", adaln_lora_dim=16, rope_scale=(2.0, 1.0, 1.0)),
}


class Live(TorchDispatchMode):
    """The most bytes of tensors made within that lived at once."""

    def __init__(self):
        super().__init__()
        self.sizes, self.most = {}, 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        made = function(*arguments, **(keywords or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.sizes[StorageWeakRef(storage)] = storage.nbytes()
        known = {reference.cdata: size for reference, size in self.sizes.items() if not reference.expired()}
        self.sizes = {reference: size for reference, size in self.sizes.items() if not reference.expired()}
        self.most = max(self.most, sum(known.values()))
        return made


def stand_in(config, channels=16):
    """A tokenizer of latents of these sizes, 8 x 8 x 8 pixels each."""
    return SimpleNamespace(
        temporal_compression=8,
        spatial_compression=8,
        frames_covering=lambda frames: frames,
        latent_shape=lambda frames, height, width: (channels, 1 + (frames - 1) // 8, height // 8, width // 8),
    )


def settings(num_frames, height, width, **more):
    return SamplingSettings(
        num_steps=2, guidance=3.0, num_frames=num_frames, height=height, width=width, fps=8.0, **more
    )


def bundle_of(config, **manifest):
    return Bundle(path=Path("nowhere"), manifest=manifest, defaults=settings(1, 16, 16), config=config)


@pytest.mark.parametrize("name", CONFIGS)
def test_activations_are_planned(name):
    config = CONFIGS[name]
    dit = DiT(config).eval()
    denoiser = TorchDenoiser(dit)
    wanted = settings(33, 256, 256)
    choices = Choices(dtype=torch.float32, batch_size=1)
    planned = plan_memory(bundle_of(config), wanted, stand_in(config), None, choices).sampling
    x, text = torch.randn(2, 16, 5, 32, 32), torch.randn(2, 8, 32)
    conditioning = Conditioning(text, torch.tensor([8, 8]), torch.full((2,), 8.0))
    with torch.no_grad(), Live() as live:
        denoiser(x, torch.full((2,), 3.0), conditioning)
    assert 0.5 * planned < live.most <= planned, (live.most / 1e6, planned / 1e6)


@pytest.mark.parametrize(
    ("changes", "sets"),
    [
        ({}, 2),
        ({"guidance": 1.0}, 1),
        ({"adapter_interval": (0.3, 80.0)}, 4),
        ({"second_prompt": "rain", "second_guidance": 2.0}, 3),
    ],
)
def test_room_for_adapters_is_planned(changes, sets):
    """As the inputs of a graph take it: for both halves of guidance, full and empty ones of an interval."""
    slots = AdapterInputs(config=CONFIGS["dit"], rank=4)
    asked = bundle_of(CONFIGS["dit"]), replace(settings(9, 64, 64), **changes), stand_in(CONFIGS["dit"]), None
    choices = Choices(dtype=torch.float32, batch_size=1)
    with_slots, without = (plan_memory(*asked, replace(choices, slots=each)).sampling for each in (slots, None))
    taken = sum(value.nbytes for value in slots.filled(1, []).values())
    assert with_slots - without == sets * taken > 0


def test_the_weaker_network_of_autoguidance_is_planned(bundle_dir):
    """Beside the other, of which it takes a call of its own."""
    bundle, config = Bundle.open(bundle_dir), CONFIGS["dit"]
    asked = (stand_in(config), None, replace(BF16, batch_size=1))
    guided = replace(settings(9, 64, 64), autoguidance=str(bundle_dir))
    with_it, without = (plan_memory(bundle, each, *asked) for each in (guided, replace(guided, autoguidance="")))
    assert with_it.network == 2 * without.network and with_it.sampling < without.sampling


def test_14b_fits_24_gib_with_blocks_that_come_for_their_turn():
    """Wan 2.1's 14B in bfloat16, 81 frames of 480p: 26.6 GiB of weights."""
    config, tokenizer = NAMED_CONFIGS["wan_14b"], stand_in(NAMED_CONFIGS["wan_14b"])
    asked = (bundle_of(config), settings(81, 480, 832), tokenizer, None)
    whole = plan_memory(*asked, BF16)
    assert whole.network == pytest.approx(2 * 14_288_491_584) and whole.host == 0
    found = fitting(*asked, BF16, 24 * GIB)
    plan = plan_memory(*asked, found)
    assert found.running.resident_blocks and plan.peak <= 24 * GIB < whole.peak
    assert plan.host > 0.95 * whole.network and "--resident_blocks" in found.flags
    fuller = replace(found.running, resident_blocks=found.running.resident_blocks + 1)
    more = plan_memory(*asked, replace(found, running=fuller))
    assert more.peak > 24 * GIB, "the most blocks that fit"
    assert "too much: use" in describe_plan(whole, 24 * GIB, found)
    assert fitting(*asked, BF16, GIB // 4) is None
    pair = plan_memory(bundle_of(config, boundary=0.875), *asked[1:], BF16)
    assert pair.network == 2 * whole.network


def test_a_dry_run_tells_and_makes_nothing(bundle_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["--checkpoint_path", str(bundle_dir), "--prompt", "a red seven", "--device", "cpu", "--dry-run"]
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "network " in told and "sampling " in told and "too much" not in told
    assert main([*command, "--device_memory", "0.0001"]) == 0
    assert "too much" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_no_more_videos_are_planned_than_are_asked_for(bundle_dir, capsys):
    """A small network's default batch holds hundreds."""
    command = ["--checkpoint_path", str(bundle_dir), "--prompt", "a", "--device", "cpu", "--dry-run"]
    command += ["--device_memory", "16"]  # what is free changes from call to call

    def said(*more: str) -> str:
        assert main([*command, *more]) == 0
        return capsys.readouterr().out

    assert said() == said("--batch_size", "1")
    assert said("--seeds", *map(str, range(400))) == said("--seeds", *map(str, range(400)), "--batch_size", "400")
    assert said("--seeds", *map(str, range(400))) != said()
