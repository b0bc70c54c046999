"""LoRA files for Stable Diffusion's U-Nets: pictures are those of diffusers' `load_lora_weights`."""

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from megadit.export.conditioning_cases import random_state
from megadit.infer.commands.check_adapter import problem_of
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.models.bundle import Bundle
from megadit.models.commands.convert import main
from megadit.models.configs.adapter import AdapterConfig
from megadit.models.configs.unet import USUAL as USUAL_SETTINGS
from megadit.models.configs.unet import UNetConfig
from megadit.models.convert.adapters.files import bundle_fingerprint, read_adapter, read_adapter_of, write_adapter
from megadit.models.convert.merging.merge import merge_bundle
from megadit.models.convert.stable_diffusion import original_entries
from megadit.models.lora.adapters import load_adapter, set_scale, targets_of
from megadit.models.lora.inputs import AdapterInputLinears, AdapterInputs
from megadit.models.networks.conditioning import Conditioning
from megadit.models.shared.errors import UserError
from megadit.models.storage.components import config_to_dict
from megadit.serve.repository.build import service_info
from tests.stable_diffusion import UNETS, make_pipeline, random_unet

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

PROMPT = "a red seven on the beach"
ALPHA, RANK = 6.0, 3
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
USUAL = (*ATTENTION, "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out")


@pytest.fixture(scope="module")
def made(tmp_path_factory, write_clip):
    """kind -> (diffusers' pipeline, its bundle), each made once."""
    found = {}

    def make(kind):
        if kind not in found:
            folder = tmp_path_factory.mktemp("sd")
            pipeline = make_pipeline(folder / "pipeline", kind, write_clip)
            assert main([str(folder / "pipeline"), str(folder / "bundle")]) == 0
            found[kind] = pipeline, Bundle.open(folder / "bundle")
        return found[kind]

    return make


def factors(bundle, endings=USUAL, seed=0):
    """diffusers' name of a layer -> random (down, up), four-sided where the layer is a convolution."""
    generator, found = torch.Generator().manual_seed(seed), {}
    shapes = {name: tuple(value.shape) for name, value in bundle.load_network().state_dict().items()}
    for name, target in targets_of(bundle.config).items():
        if name.endswith(endings):
            sides = (1,) * (len(shapes[f"{name}.weight"]) - 2)
            down = 0.3 * torch.randn(RANK, target.in_features, *sides, generator=generator)
            up = 0.3 * torch.randn(target.out_features, RANK, *sides, generator=generator)
            found[name.removeprefix("network.")] = down, up
    return found


def kohya(bundle, rename=lambda name: name, **more):
    tensors = {}
    for name, (down, up) in factors(bundle, **more).items():
        key = "lora_unet_" + rename(name).replace(".", "_")
        tensors |= {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up, f"{key}.alpha": torch.tensor(ALPHA)}
    return tensors


def of_publication(bundle):
    names = {entry.name.removeprefix("network."): entry.theirs[0] for entry in original_entries(bundle.config)}
    return kohya(bundle, lambda name: names[f"{name}.weight"].removesuffix(".weight"))


def of_diffusers(bundle):
    tensors = {}
    for name, (down, up) in factors(bundle).items():
        tensors |= {f"unet.{name}.lora_A.weight": down, f"unet.{name}.lora_B.weight": up}
    return tensors


def of_processors(bundle):
    """As diffusers wrote them first: attention alone."""
    tensors = {}
    for name, (down, up) in factors(bundle, ATTENTION).items():
        head, _, layer = name.removesuffix(".0").rpartition(".")
        key = f"unet.{head}.processor.{layer}_lora"
        tensors |= {f"{key}.down.weight": down, f"{key}.up.weight": up}
    return tensors


FILES = {
    "diffusers": ("1.x", of_diffusers),
    "processors": ("1.x", of_processors),
    "kohya": ("2.x", kohya),
    "kohya, names of the publication": ("xl", of_publication),
}
ALSO_SLOW = [pytest.param(form, marks=pytest.mark.slow) for form in ("processors", "kohya")]


@contextlib.contextmanager
def loaded(pipeline, path, scale):
    pipeline.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name="one")
    pipeline.set_adapters("one", scale)
    try:
        yield
    finally:
        pipeline.unload_lora_weights()


def conditions(config, batch=2):
    generator = torch.Generator().manual_seed(5)
    text = torch.randn(batch, 77, config.crossattn_emb_size, generator=generator)
    pooled = torch.randn(batch, 20, generator=generator)
    x = torch.randn(batch, 4, 1, 8, 8, generator=generator)
    return x, Conditioning(text, torch.full((batch,), 77), torch.zeros(batch), pooled_BP=pooled)


def by_diffusers(pipeline, x, conditioning, steps):
    sizes = torch.tensor([[16.0, 16.0, 0.0, 0.0, 16.0, 16.0]] * len(x))
    added = {"text_embeds": conditioning.pooled_BP, "time_ids": sizes}
    return pipeline.unet(x[:, :, 0], steps, conditioning.text_BLE, added_cond_kwargs=added).sample[:, :, None]


@pytest.mark.parametrize("form", ["diffusers", "kohya, names of the publication", *ALSO_SLOW])
def test_a_file_changes_a_network_as_in_diffusers(made, tmp_path, form):
    """At two scales, one of them negative; what is computed without it comes back."""
    kind, write = FILES[form]
    (pipeline, bundle), path = made(kind), tmp_path / "lora.safetensors"
    save_file(write(bundle), path)
    adapter = read_adapter_of(path, bundle)
    network, steps = bundle.load_network(), torch.tensor([500.0, 32.5])
    x, conditioning = conditions(bundle.config)
    with torch.no_grad():
        base = by_diffusers(pipeline, x, conditioning, steps)
        load_adapter(network, *adapter.to_state())
        for scale in (0.8, -0.5):
            with loaded(pipeline, path, scale):
                expected = by_diffusers(pipeline, x, conditioning, steps)
            set_scale(network, scale)
            assert (network(x, steps, conditioning) - expected).norm() <= 1e-5 * expected.norm()
            assert (expected - base).abs().max() > 1e-2, "negative control: it must matter"
        set_scale(network, 0.0)
        torch.testing.assert_close(network(x, steps, conditioning), base, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["1.x", "xl"])
def test_samples_of_a_batch_have_scales_of_their_own(made, tmp_path, kind):
    """Attention, time embeddings and convolutions of single pixels, all of which have samples on their first side."""
    _, bundle = made(kind)
    endings = (*USUAL, "time_emb_proj", "linear_1", "conv_shortcut")
    save_file(kohya(bundle, endings=endings), tmp_path / "lora.safetensors")
    network, steps = bundle.load_network(), torch.tensor([500.0, 32.5])
    load_adapter(network, *read_adapter_of(tmp_path / "lora.safetensors", bundle).to_state())
    x, conditioning = conditions(bundle.config)
    with torch.no_grad():
        set_scale(network, torch.tensor([0.7, -1.0]))
        together = network(x, steps, conditioning)
        for place, scale in enumerate((0.7, -1.0)):
            set_scale(network, scale)
            alone = network(x[[place]], steps[[place]], conditioning.at([place]))
            torch.testing.assert_close(together[[place]], alone, rtol=1e-5, atol=1e-5)
        set_scale(network, 0.7)
        assert (network(x, steps, conditioning)[1] - together[1]).abs().max() > 1e-2, "negative control"


@pytest.mark.parametrize("kind", UNETS)
@torch.no_grad()
def test_slots_of_exported_networks_are_adapters(made, kind):
    """Of every linear and every convolution of single pixels, others in each sample; empty ones are the base."""
    _, bundle = made(kind)
    network, steps = bundle.load_network(), torch.tensor([500.0, 32.5])
    x, conditioning = conditions(bundle.config)
    base, scale_B = network(x, steps, conditioning), torch.tensor([0.8, -0.5])
    slots = AdapterInputs(config=bundle.config, rank=RANK + 1, targets=("*",))
    state, about = random_state(slots, RANK, seed=0), AdapterConfig(rank=RANK, alpha=ALPHA, targets=("*",))
    inputs, slotted = slots.filled(2, [(slots.packed(state, about), scale_B)]), AdapterInputLinears(network, slots)
    with slotted.filled(tuple(inputs.values())):
        found = network(x, steps, conditioning)
    with slotted.filled(tuple(torch.zeros_like(value) for value in inputs.values())):
        torch.testing.assert_close(network(x, steps, conditioning), base, rtol=0, atol=0)
    load_adapter(network, state, about)
    set_scale(network, scale_B)
    torch.testing.assert_close(found, network(x, steps, conditioning), rtol=1e-5, atol=1e-5)
    assert (found - base).abs().amax((1, 2, 3, 4)).min() > 1e-2, "negative control"


def test_a_network_of_four_levels_has_few_inputs():
    """One for all places of a name and a size: 192 linears of the attentions of 1.x."""
    config = UNetConfig(settings=USUAL_SETTINGS | {"cross_attention_dim": 768}, prediction="noise", pixels_per_latent=8)
    slots = AdapterInputs(config=config, rank=16)
    assert sum(len(group.targets) for group in slots.groups.values()) == 192 and len(slots.inputs) == 2 * 36
    assert slots.inputs["blocks.attn2.to_k.768x1280.down"] == (6, 16, 768)
    assert slots.inputs["blocks.ff.net.0.proj.320x2560.up"] == (5, 2560, 16)


@pytest.mark.slow
def test_pictures_are_those_of_diffusers(made, tmp_path):
    """Guided, ten steps, two adapters: one of them in PEFT's own folder, which we wrote."""
    from megadit.models.diffusion.noise import latent_noise, seed_key
    from megadit.models.diffusion.parameterization import ddpm_sigmas

    pipeline, bundle = made("xl")
    paths = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    save_file(kohya(bundle), paths[0])
    save_file(kohya(bundle, endings=ATTENTION, seed=1), paths[1])
    write_adapter(tmp_path / "two", read_adapter_of(paths[1], bundle))
    sigma = ddpm_sigmas("stable_diffusion")[901].item()  # of the first of ten steps
    noise = latent_noise(torch.tensor([seed_key(3)]), (4, 1, 16, 16))[:, :, 0].double()
    for name, path in zip(("one", "two"), paths, strict=True):
        pipeline.load_lora_weights(str(tmp_path), weight_name=path.name, adapter_name=name)
    pipeline.set_adapters(["one", "two"], [0.3, 0.2])
    try:
        expected = pipeline(
            PROMPT,
            guidance_scale=5.0,
            num_inference_steps=10,
            latents=(noise * sigma / (1 + sigma**2) ** 0.5).float(),
            output_type="latent",
        ).images[0]
    finally:
        pipeline.unload_lora_weights()
    ours = TextToVideo.from_pretrained(bundle.path, device="cpu")
    settings = {"seeds": 3, "num_steps": 10, "guidance": 5.0}
    (image,) = ours([PROMPT], adapters={str(paths[0]): 0.3, str(tmp_path / "two"): 0.2}, **settings)
    found = torch.as_tensor(image.latents_CTHW[:, 0])
    (without,) = ours([PROMPT], **settings)
    assert (found - torch.as_tensor(without.latents_CTHW[:, 0])).abs().max() > 1e-2, "negative control"
    # ten steps of two programs, whose states are float64 and float32
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_merged_bundle_makes_the_same_pictures(made, tmp_path):
    """Convolutions of single pixels are merged, too."""
    _, bundle = made("1.x")
    save_file(kohya(bundle), tmp_path / "lora.safetensors")
    adapters = {str(tmp_path / "lora.safetensors"): 0.8}
    merge_bundle(bundle, adapters, tmp_path / "merged")
    merged = TextToVideo.from_pretrained(tmp_path / "merged", device="cpu")
    beside = TextToVideo.from_pretrained(bundle.path, device="cpu")
    settings = {"seeds": 3, "num_steps": 3}
    (one,), (other,) = merged([PROMPT], **settings), beside([PROMPT], adapters=adapters, **settings)
    torch.testing.assert_close(one.latents_CTHW, other.latents_CTHW, rtol=1e-4, atol=1e-4)
    (without,) = beside([PROMPT], **settings)
    assert abs(torch.as_tensor(without.latents_CTHW) - torch.as_tensor(one.latents_CTHW)).max() > 1e-2


def test_a_file_that_we_write_is_diffusers_own(made, tmp_path):
    """It says for which network it is: another's is refused."""
    _, bundle = made("2.x")
    save_file(kohya(bundle), tmp_path / "lora.safetensors")
    source, out = tmp_path / "lora.safetensors", tmp_path / "ours.safetensors"
    assert main([str(source), str(out), "--base", str(bundle.path)]) == 0
    names = factors(bundle)
    assert load_file(out).keys() == {f"unet.{name}.lora_{side}.weight" for name in names for side in "AB"}
    assert read_adapter(out).config == bundle.config
    (state, about), (theirs, other) = (read_adapter_of(path, bundle).to_state() for path in (out, source))
    assert about.scaling == other.scaling and all(torch.equal(state[name], theirs[name]) for name in theirs)
    with pytest.raises(UserError, match="was trained with other weights"):
        read_adapter_of(out, made("1.x")[1])


@pytest.mark.parametrize("use_dora", [False, True])
@torch.no_grad()
def test_peft_s_convolutions_come_and_go(made, tmp_path, use_dora):
    """Factors and magnitudes of those of single pixels have four sides."""
    import peft

    _, bundle = made("1.x")
    layers, trained = ["to_q", "proj_in", "conv_shortcut"], random_unet("1.x")
    settings = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=layers, use_dora=use_dora, init_lora_weights=False
    )
    (x, conditioning), steps = conditions(bundle.config), torch.tensor([500.0, 32.5])
    theirs = peft.get_peft_model(trained, settings)
    expected = by_diffusers(SimpleNamespace(unet=theirs), x, conditioning, steps)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    adapter, network = read_adapter(tmp_path / "theirs", bundle.config), bundle.load_network()
    base = network(x, steps, conditioning)
    load_adapter(network, *adapter.to_state())
    found = network(x, steps, conditioning)
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert (base - expected).norm() > 1e-3 * expected.norm(), "negative control"
    write_adapter(tmp_path / "ours", adapter)
    of_both = [load_file(tmp_path / place / "adapter_model.safetensors") for place in ("ours", "theirs")]
    assert of_both[0].keys() == of_both[1].keys()
    again = peft.PeftModel.from_pretrained(random_unet("1.x"), str(tmp_path / "ours"))
    assert torch.equal(by_diffusers(SimpleNamespace(unet=again), x, conditioning, steps), expected)


UNFIT = {
    "kohya's text encoder": ("lora_te_text_model_encoder_layers_0_self_attn_q_proj.lora_down.weight", (3, 16)),
    "diffusers' text encoder": ("text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight", (3, 16)),
    "a convolution": ("lora_unet_down_blocks_0_resnets_0_conv1.lora_down.weight", (3, 8, 3, 3)),
    "of a deeper network": ("lora_unet_input_blocks_9_1_proj_in.lora_down.weight", (3, 16)),
}


def test_what_does_not_fit_is_refused_by_name_before_anything_is_loaded(made, tmp_path):
    _, bundle = made("1.x")
    pipeline, tensors = TextToVideo.from_pretrained(bundle.path, device="cpu"), kohya(bundle)
    for case, (key, shape) in UNFIT.items():
        path = tmp_path / f"{case}.safetensors"
        save_file(tensors | {key: torch.zeros(shape)}, path)
        with pytest.raises(UserError) as refused:
            pipeline([PROMPT], adapters={str(path): 1.0})
        assert f"unexpected: {key} {list(shape)}" in str(refused.value), case


def test_a_service_asks_whether_a_file_fits(made, tmp_path):
    """In a process of its own, told the network as JSON."""
    _, bundle = made("1.x")
    save_file(kohya(bundle), tmp_path / "lora.safetensors")
    info = service_info(bundle, bundle.defaults, None, "torch", tmp_path)
    network, base = json.loads(json.dumps(info.adapters.network)), bundle_fingerprint(bundle)
    assert network == json.loads(json.dumps(config_to_dict(bundle.config)))
    assert problem_of(tmp_path / "lora.safetensors", network, base) is None
    other = json.loads(json.dumps(config_to_dict(made("xl")[1].config)))
    assert "does not fit the network" in problem_of(tmp_path / "lora.safetensors", other, base)


@pytest.mark.parametrize("kind", UNETS)
def test_names_of_the_publication_are_those_that_diffusers_reads(made, kind):
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    unet, (_, bundle) = random_unet(kind), made(kind)
    state = unet.state_dict()
    published = {
        f"model.diffusion_model.{entry.theirs[0]}": state[entry.name.removeprefix("network.")]
        for entry in original_entries(bundle.config)
    }
    assert len(published) == len(state)
    again = convert_ldm_unet_checkpoint(published, dict(unet.config))
    assert again.keys() == state.keys() and all(torch.equal(again[name], state[name]) for name in state)
