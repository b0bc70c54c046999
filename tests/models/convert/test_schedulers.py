"""Every field of a published configuration is used, is known to be without effect, or is refused by its name."""

import inspect
import itertools
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megadit.models.configs.unet import FIXED, USUAL
from megadit.models.convert import class_dit, cosmos, schedulers, stable_diffusion, vit, wan
from megadit.models.convert.converted import to_theirs
from megadit.models.convert.published import config_of, open_published
from megadit.models.convert.schedulers import scheduler_settings
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.shared.errors import UserError
from megadit.models.storage.tensor_source import from_state_dict, write_safetensors
from megadit.models.tokenizers.kinds import KINDS
from tests.models.convert.test_conditioning import random_cosmos
from tests.models.convert.test_parity import ours_from, random_class_dit
from tests.models.convert.test_wan import random_wan

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")


def flipped(value):
    """Another value of the kind that a field has."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 2 * value + 1
    if isinstance(value, str):
        return f"{value}_other"
    if isinstance(value, list | tuple):
        return [2 * each for each in value] or [1]
    return 7


def fields_of(kind):
    return [name for name in inspect.signature(kind.__init__).parameters if name not in ("self", "kwargs")]


MODELS = {wan: lambda: random_wan(0), cosmos: lambda: random_cosmos(4), class_dit: lambda: random_class_dit(0)}


@pytest.mark.parametrize("known", MODELS, ids=lambda known: known.DIFFUSERS_CLASS)
def test_fields_of_networks(known):
    model = MODELS[known]()
    values = dict(model.config)
    usual = known.config_from_diffusers(values)
    assert set(fields_of(type(model))) <= known.SETTINGS, "those of the diffusers that is installed"
    unused = set()
    for name in fields_of(type(model)):
        try:
            if known.config_from_diffusers(values | {name: flipped(values[name])}) == usual:
                unused.add(name)
        except UserError:
            pass  # which names it: the next test
    elsewhere = {"sample_size"} if known is class_dit else set()  # `Published.sample_size`
    where_positions_are_not_learned = {"max_size"} if known is cosmos else set()
    assert unused <= known.WITHOUT_EFFECT | elsewhere | where_positions_are_not_learned


ANYTHING = [None, "x", "", [], [1], [None] * 3, {}, -1, 0, 1.5, True, 10**9, float("nan"), float("inf")]


@pytest.mark.parametrize("known", [*MODELS, stable_diffusion], ids=lambda known: known.DIFFUSERS_CLASS)
def test_a_value_that_no_network_has_is_named(known):
    if known in MODELS:
        values = dict(MODELS[known]().config)
    else:
        values = {**USUAL, **FIXED, "prediction": "noise", "pixels_per_latent": 8}
    for name in values:
        for value in ANYTHING if not name.startswith("_") else ():
            try:
                config_of(known, values | {name: value}, Path("config.json"))
            except UserError as error:
                assert str(error).startswith("config.json") and name in str(error), (name, value)


@pytest.mark.parametrize("known", MODELS, ids=lambda known: known.DIFFUSERS_CLASS)
def test_a_list_is_not_multiplied(known):
    values = dict(MODELS[known]().config)
    sizes = ["num_attention_heads", "attention_head_dim", *({"mlp_ratio"} & values.keys())]
    tracemalloc.start()
    for name, value in itertools.product(sizes, ([1] * 10**5, "x" * 10**6)):
        large = dict(zip(sizes, (64, 128, 4.0), strict=False)) | {name: value}
        with pytest.raises(UserError, match=rf"^config\.json: {name}="):
            config_of(known, values | large, Path("config.json"))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 3e7


DEFAULTS = {"num_steps": 5, "guidance": 1.0, "num_frames": 5, "height": 32, "width": 32, "fps": 8.0}
CLASSES = [(kind, name) for kind, classes in schedulers._SCHEDULERS.items() for name in classes]


def published(kind, name):
    """The configuration with which a scheduler of this class is published."""
    scheduler = schedulers._SCHEDULERS[kind][name]
    usual = {
        parameter: value.default for parameter, value in inspect.signature(getattr(diffusers, name)).parameters.items()
    }
    return {"_class_name": name, "_diffusers_version": "0.42.1"} | usual | scheduler.defaults | scheduler.only


@pytest.mark.parametrize(("kind", "name"), CLASSES)
def test_fields_of_schedulers(kind, name):
    values = published(kind, name)
    usual, scheduler = scheduler_settings(kind, values), schedulers._SCHEDULERS[kind][name]
    for field in set(values) - {"_class_name", "_diffusers_version"}:
        changed = values | {field: flipped(values[field])}
        try:
            found = scheduler_settings(kind, changed)
        except UserError as error:
            assert f"{field}=" in str(error) and field in scheduler.only
        else:
            assert (found == usual) == (field in scheduler.without_effect), field
    with pytest.raises(UserError, match="'newer' is an unknown setting of"):
        scheduler_settings(kind, values | {"newer": 1})
    with pytest.raises(UserError, match="a LMSDiscreteScheduler is not supported .* delete scheduler/"):
        scheduler_settings(kind, values | {"_class_name": "LMSDiscreteScheduler"})


@pytest.mark.parametrize("name", [name for kind, name in CLASSES if kind == "wan"])
def test_what_is_without_effect_changes_no_level_of_diffusers(name):
    def levels(values):
        scheduler = getattr(diffusers, name).from_config(values)
        scheduler.set_timesteps(7)
        return scheduler.sigmas.tolist(), scheduler.timesteps.tolist()

    values = published("wan", name)
    others = {"beta_schedule": "scaled_linear", "timestep_spacing": "trailing", "time_shift_type": "exponential"}
    others |= {"trained_betas": [0.1] * 1000}
    for field in schedulers._SCHEDULERS["wan"][name].without_effect:
        changed = values | {field: others.get(field, flipped(values[field]))}
        assert levels(changed) == levels(values), field
    shift = "flow_shift" if "flow_shift" in values else "shift"
    assert levels(values | {shift: 7.0}) != levels(values), "negative control"


RELEASED = {
    "_class_name": "WanModel", "_diffusers_version": "0.30.0", "model_type": "t2v", "dim": 64, "eps": 1e-5,
    "ffn_dim": 40, "freq_dim": 256, "in_dim": 4, "num_heads": 4, "num_layers": 1, "out_dim": 4, "text_len": 512,
    "patch_size": [1, 2, 2], "qk_norm": True, "cross_attn_norm": True, "window_size": [-1, -1], "text_dim": 8,
}  # fmt: skip


@pytest.fixture
def released(tmp_path):
    """Writes the released names of a network with heads and an epsilon of its own, and this config.json."""
    sizes = {"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4}
    model = random_wan(2, **sizes, patch_size=(1, 2, 2), num_layers=1, text_dim=8, ffn_dim=40, eps=1e-5)
    config = wan.config_from_diffusers(model.config)
    dit = ours_from(model, config, wan.diffusers_entries(config))
    theirs = to_theirs(from_state_dict(dit.state_dict()), wan.released_entries(config))
    write_safetensors(tmp_path / "diffusion_pytorch_model.safetensors", theirs)

    def write(**changes):
        values = {name: value for name, value in (RELEASED | changes).items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(values))
        return tmp_path, config, dit

    return write


def test_a_released_configuration_is_read(released):
    path, config, dit = released()
    for source in (path, path / "diffusion_pytorch_model.safetensors"):
        found = open_published(source)
        assert found.config == config, "heads and epsilon too"
        assert all(torch.equal(found.tensors.read(name), tensor) for name, tensor in dit.state_dict().items())
    (path / "config.json").unlink()
    with pytest.raises(UserError, match="is 64 wide, which does not determine the number of heads"):
        open_published(path / "diffusion_pytorch_model.safetensors")


def test_fields_of_a_released_configuration(released):
    for name in (name for name in RELEASED if not name.startswith("_")):
        path, config, _ = released(**{name: flipped(RELEASED[name])})
        try:
            assert open_published(path).config != config, name
        except UserError as error:
            assert name in str(error)
    with pytest.raises(UserError, match="the setting 'newer'"):
        open_published(released(newer=1)[0])


def test_fields_of_autoencoders():
    """Those that no tensor depends on."""
    config = dict(diffusers.AutoencoderKLWan().config)
    kind = KINDS["wan"]
    assert (kind.temporal_compression(config), kind.spatial_compression(config)) == (4, 8)
    for name in ("scale_factor_temporal", "scale_factor_spatial"):
        with pytest.raises(UserError, match=f"{name}=16, but its layers make"):
            kind.temporal_compression(config | {name: 16})
            kind.spatial_compression(config | {name: 16})
    z = torch.zeros(1, 2, 1, 1, 1)
    of_xl = {"scaling_factor": 0.5, "latents_mean": [1.0, 2.0], "latents_std": [3.0, 4.0]}
    mean, deviation = KINDS["autoencoder_kl"].statistics(of_xl, z)
    assert mean.flatten().tolist() == [1, 2] and deviation.flatten().tolist() == [6, 8]


def test_pixels_that_are_not_normalised_are_refused(tmp_path):
    for name, value in (("do_rescale", False), ("do_normalize", False), ("rescale_factor", 1 / 128)):
        (tmp_path / vit.PREPROCESSOR).write_text(json.dumps({name: value}))
        with pytest.raises(UserError, match=f"{name}=.* is not supported"):
            vit.pixels_of(tmp_path)


@pytest.mark.parametrize(("kind", "name"), CLASSES)
def test_a_scheduler_is_written_as_it_was_read(kind, name, tmp_path):
    """By which diffusers steps as it would by the one that was read."""
    scheduler = schedulers._SCHEDULERS[kind][name]
    numbers = {"flow_shift": 3.0, "shift": 3.0, "sigma_min": 0.1, "sigma_max": 70.0, "rho": 6.0}
    own = scheduler.defaults.keys() - scheduler.only.keys() - scheduler.without_effect
    values = {"_class_name": name, **scheduler.only} | {field: numbers[field] for field in own}
    settings = SamplingSettings(**DEFAULTS | scheduler_settings(kind, values))
    written, other = schedulers.scheduler_values(kind, settings)
    assert written == values and not other
    theirs = getattr(diffusers, name).from_config(written)
    assert all(theirs.config[field] == numbers[field] for field in own)
    assert schedulers.scheduler_values(kind, replace(settings, sigmas=(2.0, 1.0))) == ({}, [])


def test_what_no_scheduler_says_is_told():
    """Wan's own levels are nearly those of diffusers' UniPC."""
    settings = SamplingSettings(**DEFAULTS, sampler="unipc_bh2", schedule="wan", shift=5.0)
    written, other = schedulers.scheduler_values("wan", settings)
    assert written["_class_name"] == "UniPCMultistepScheduler" and written["flow_shift"] == 5.0
    assert other == ["schedule=wan"]
    assert schedulers.scheduler_values("megadit", settings) == ({}, [])


def test_departures_of_a_scheduler_with_many_forms_are_named():
    """Stable Diffusion is published with many; ours is one of them."""
    values = {"timestep_spacing": "trailing", "steps_offset": 1, "use_karras_sigmas": True}
    assert schedulers.departures("stable_diffusion", values) == [
        "timestep_spacing='trailing'",
        "use_karras_sigmas=True",
    ]
    assert schedulers.departures("wan", values) == []
