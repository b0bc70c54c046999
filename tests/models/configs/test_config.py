"""A configuration that cannot work is refused when it is made."""

import dataclasses
import re
import time
import types
import typing

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import data, sampled_from

from megadit.models.configs import config as config_file
from megadit.models.configs.block import ExpertConfig
from megadit.models.configs.config import DiTConfig, TextTowerConfig
from megadit.models.configs.families import Structure
from megadit.models.configs.named import NAMED_CONFIGS
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.networks.dit import DiT
from megadit.models.networks.registry import build_without_memory
from megadit.models.shared.errors import UserError
from megadit.train.config.schema import RunConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_layers": 0}, "model.num_layers=0 must be greater than 0"),
        ({"sigma_data": -1.0}, "sigma_data=-1.0"),
        ({"position_embedding": "learnt"}, "choose one of rope, sincos, learned"),
        ({"family": "cosmo"}, "model.family='cosmo' is unknown; did you mean 'cosmos'"),
        ({"learned_positions": (4, 0, 4)}, "learned_positions"),
    ],
)
def test_impossible_values_are_named(values, message):
    with pytest.raises(UserError, match=message):
        DiTConfig(**values)


CLIP = {"family": "clip", "crossattn_emb_size": 2, "text_tower": TextTowerConfig(num_layers=1)}
CLIP_GRID = {**CLIP, "position_embedding": "learned", "learned_positions": (1, 4, 4)}
CLASSES = {"family": "dit", "num_classes": 10, "crossattn_emb_size": 2}
BREACHES = (
    (
        {"patch_spatial": 8192, "in_channels": 1},
        "model.patch_temporal=1, model.patch_spatial=8192 and model.in_channels=1 are too large: a token has",
    ),
    ({"learned_positions": (256, 256, 257)}, "model.learned_positions=[256, 256, 257] are too many; at most 16777216"),
    ({"compat": "nemo"}, "model.compat=nemo does not go with model.family=megadit, only model.family=moviegen model"),
    ({"text_tower": TextTowerConfig(num_layers=1)}, "model.family=clip has a text tower, and no other"),
    ({**CLIP, "num_classes": 10}, "model.family=clip matches texts: leave out model.num_classes"),
    ({"num_classes": 10}, "model.family=megadit is conditioned on text: leave out model.num_classes"),
    ({"family": "dit"}, "model.family=dit needs model.num_classes"),
    ({"family": "dit", "num_classes": 10}, "model.crossattn_emb_size=1024: a class or a token is read as two digits"),
    ({"family": "nemo", "hidden_size": 96}, "model.family=nemo needs model.hidden_size >= 256, got 96"),
    ({**CLASSES, "experts": ExpertConfig(num_experts=4)}, "model.family=dit has biases, which experts lack"),
    ({"family": "cosmos"}, "model.family=cosmos needs model.adaln_lora_dim"),
    (
        {"family": "wan", "adaln_lora_dim": 8},
        "model.family=wan has one modulation for all blocks: leave out model.adaln_lora",
    ),
    ({"conditioning_mode": "marked"}, "model.conditioning_mode=marked needs model.conditioning_sigma"),
    (
        {"conditioning_sigma": 0.0},
        "model.conditioning_sigma=0.0 must be above 0, or 0 with model.parameterization=flow",
    ),
    ({"image_size": 8}, "model.image_size is for model.family=wan, not for megadit"),
    ({"family": "wan", "image_positions": 8}, "model.image_positions needs model.image_size"),
    (
        {"guidance_embedding_range": (6.0, 2.0)},
        "model.guidance_embedding_range=[6.0, 2.0] must be two scales from 1, the lower first",
    ),
    (
        {**CLIP_GRID, "guidance_embedding_range": (1.0, 2.0)},
        "model.guidance_embedding_range=[1.0, 2.0] is for networks that denoise, not model.family=clip",
    ),
    ({"position_embedding": "learned"}, "needs model.learned_positions, the largest grid"),
    (
        {"family": "vit", "num_classes": 5, "crossattn_emb_size": 2},
        "model.family=vit needs model.position_embedding=learned and model.learned_positions, its grid",
    ),
    ({"num_query_groups": 4}, "model.num_query_groups=4 does not divide model.num_attention_heads=6"),
    ({"hidden_size": 100, "num_attention_heads": 7}, "use 5 heads"),
    (
        {"position_embedding": "learned", "learned_positions": (1, 4, 4), "num_attention_heads": 400},
        "model.num_attention_heads=400 does not divide model.hidden_size=384; use 384 heads",
    ),
    ({"hidden_size": 8, "num_attention_heads": 4}, "even head width of at least 6"),
    ({"head_dim": 10, "rope_scale": (2.0, 1.0, 1.0)}, r"model.rope_scale=[2.0, 1.0, 1.0] needs heads at least 12"),
    (
        {"position_embedding": "sincos", "rope_interpolation": (1.0, 2.0, 2.0)},
        "model.rope_interpolation=[1.0, 2.0, 2.0] divides rotary positions, of which model.position_embedding=sincos",
    ),
)


@pytest.mark.parametrize(("values", "message"), BREACHES)
def test_values_that_do_not_go_together_are_refused(values, message):
    with pytest.raises(UserError, match=re.escape(message)):
        DiTConfig(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"num_layers": "12"},
        {"num_layers": 2.0},
        {"hidden_size": True},
        {"qk_layernorm": 1},
        {"rope_scale": [1, 2]},
        {"rope_scale": 1},
        {"learned_positions": [4, 5, "6"]},
        {"compat": "other"},
        {"head_dim": {}},
        {"experts": {"num_experts": [4]}},
        {"experts": 4},
    ],
)
def test_a_description_of_other_kinds_of_values_is_refused(values):
    with pytest.raises(UserError, match="has another type than|model settings are 4"):
        DiTConfig.from_dict(values)


def test_whole_numbers_stand_for_others():
    assert DiTConfig.from_dict({"sigma_data": 1, "head_dim": None, "rope_scale": [1, 2, 3]}).sigma_data == 1


SECTIONS = {"experts": ExpertConfig, "text_tower": TextTowerConfig}
SHALLOW = {name: dataclasses.replace(config, num_layers=1) for name, config in NAMED_CONFIGS.items()}


@given(
    name=sampled_from(sorted(SHALLOW)), size=sampled_from([10**4, 2**16, 2**31, 2**40 + 1, 2**63, 10**30]), data=data()
)
@settings(max_examples=60, deadline=None)
def test_any_size_is_built_or_refused_by_name_in_no_time(name, size, data):
    """Nobody vouches for a configuration: a file of a line must take neither a day nor an error of PyTorch."""
    values = SHALLOW[name].to_dict()
    section = data.draw(sampled_from([None, *SECTIONS]))
    of = values if section is None else values[section]
    key = data.draw(sampled_from([key for key in of if isinstance(of[key], int | tuple | None) and key != "compat"]))
    of[key] = [size] * len(of[key]) if isinstance(of[key], tuple) else size
    begun = time.process_time()
    try:
        build_without_memory(DiTConfig.from_dict(values))
    except UserError as error:
        assert key in str(error) or "too large" in str(error) or "divide" in str(error)
    assert time.process_time() - begun < 10


def test_a_rule_left_out_is_missed(monkeypatch):
    """The control: without a rule, a configuration above is no longer refused as it should be."""

    def unseen() -> list[str]:
        return [message for values, message in BREACHES if message not in complaint(values)]

    rules = config_file.RULES
    assert not unseen()
    for index in range(len(rules)):
        monkeypatch.setattr(config_file, "RULES", rules[:index] + rules[index + 1 :])
        assert unseen(), f"rule {index} has no configuration that breaks it"


def complaint(values) -> str:
    try:
        DiTConfig(**values)
    except (UserError, KeyError) as error:  # KeyError: of a combination that there is not
        return str(error)
    return ""


def test_sizes_the_patch_cannot_divide_name_their_neighbours():
    with pytest.raises(UserError, match="latent width 5 is not a multiple of the patch size 2; use 4 or 6"):
        DiTConfig().token_grid(1, 4, 5)
    assert DiTConfig(patch_temporal=2).token_grid(4, 6, 8) == (2, 3, 4)


def test_dict_round_trip_and_unknown_keys():
    config = NAMED_CONFIGS["digits"]
    assert DiTConfig.from_dict(config.to_dict()) == config
    with pytest.raises(UserError, match="did you mean 'num_layers'"):
        DiTConfig.from_dict({"num_layer": 3})


def test_head_dim_is_a_field_of_its_own():
    config = DiTConfig(hidden_size=100, num_attention_heads=3, head_dim=32)
    assert config.attention_size == 96
    with torch.device("meta"):
        block = DiT(config).blocks["0"]
    assert block.self_attention.qkv.weight.shape == (3 * 96, 100)
    assert block.self_attention.proj.weight.shape == (100, 96)


@pytest.mark.parametrize("name", [name for name, config in NAMED_CONFIGS.items() if config.family == "megadit"])
def test_parameter_counts_follow_the_architecture(name):
    """Counted by hand from the block diagram: 9D^2 modulation, 4D^2 + 4D^2 attention, 2DF MLP a layer."""
    config = NAMED_CONFIGS[name]
    with torch.device("meta"):
        counted = sum(parameter.numel() for parameter in DiT(config).parameters())
    width, attention, hidden = config.hidden_size, config.attention_size, config.mlp_size
    layer = 9 * width**2 + 8 * width * attention + 2 * width * hidden + 4 * config.dim_per_head
    scalar_embedder = (256 + 1) * width + (width + 1) * width
    ends = (config.patch_dim + 1) * width + (config.crossattn_emb_size + 1) * width + width
    final = 2 * width**2 + (width + 1) * config.patch_dim
    positions = sum(config.learned_positions or ()) * width
    assert counted == config.num_layers * layer + 2 * scalar_embedder + ends + final + positions


@pytest.mark.parametrize("config_class", [DiTConfig, ExpertConfig, Structure, SamplingSettings, RunConfig])
def test_every_value_of_a_configuration_is_a_field_or_a_constant(config_class):
    """An assignment without a type would be read by nobody: the field of that name kept its other default."""
    for one in classes_within(config_class):
        values = {name for name, value in vars(one).items() if not name.startswith("_") and not is_code(value)}
        assert values <= typing.get_type_hints(one).keys(), one


def test_a_value_without_a_type_is_noticed():
    @dataclasses.dataclass
    class Careless:
        epsilon: float = 1e-5
        layernorm_epsilon = 1e-6

    assert not is_code(vars(Careless)["layernorm_epsilon"]) and len(dataclasses.fields(Careless)) == 1


@pytest.mark.parametrize("name", ["betas", "pooled_size", "denoises", "nonsense"])
def test_what_is_no_setting_is_refused_in_a_file(name):
    """Constants of the class and properties, too."""
    values = DiTConfig(num_layers=1, hidden_size=16, num_attention_heads=2).to_dict()
    with pytest.raises(UserError, match=f"unknown model setting '{name}'"):
        DiTConfig.from_dict({**values, name: None})


def classes_within(config_class):
    """A dataclass and those of its fields."""
    hints = typing.get_type_hints(config_class).values()
    return [config_class, *(one for hint in hints if dataclasses.is_dataclass(hint) for one in classes_within(hint))]


def is_code(value):
    return isinstance(value, (property, classmethod, staticmethod, types.MemberDescriptorType)) or callable(value)
