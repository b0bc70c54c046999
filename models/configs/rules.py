"""Rules that the settings of a network (`DiTConfig`) must satisfy together."""

from math import prod
from typing import Any

from megadit.models.configs.families import COMPAT
from megadit.models.shared.errors import Rule

MOST_ELEMENTS = 1 << 24
"""Maximum elements of a token, and learned positions: products of sizes."""


def _nearest_number_of_heads(config: Any) -> int:
    """The divisor of the width that is nearest to the requested number of heads."""
    divisors = [number for number in range(1, config.hidden_size + 1) if config.hidden_size % number == 0]
    return min(divisors, key=lambda number: abs(number - config.num_attention_heads))


RULES: tuple[Rule[Any], ...] = (
    Rule(
        needs=lambda config: config.token_dim <= MOST_ELEMENTS,
        remedy="model.patch_temporal={patch_temporal}, model.patch_spatial={patch_spatial} and model.in_channels="
        "{in_channels} are too large: a token has {token_dim} elements; at most " + str(MOST_ELEMENTS),
    ),
    Rule(
        when=lambda config: config.learned_positions is not None,
        needs=lambda config: prod(config.learned_positions) <= MOST_ELEMENTS,
        remedy="model.learned_positions={learned_positions} are too many; at most " + str(MOST_ELEMENTS),
    ),
    # family
    Rule(
        when=lambda config: config.compat is not None,
        needs=lambda config: (config.family, config.compat) in COMPAT,
        remedy="model.compat={compat} does not go with model.family={family}, only "
        + ", ".join(f"model.family={family} model.compat={compat}" for family, compat in COMPAT),
    ),
    Rule(
        when=lambda config: config.structure.cross_attention,
        needs=lambda config: config.num_classes is None,
        remedy="model.family={family} is conditioned on text: leave out model.num_classes",
    ),
    Rule(
        when=lambda config: not config.structure.cross_attention and config.denoises,
        needs=lambda config: config.num_classes is not None,
        remedy="model.family={family} needs model.num_classes",
    ),
    Rule(
        when=lambda config: config.num_classes is not None or config.task == "match",
        needs=lambda config: config.crossattn_emb_size == 2,
        remedy="model.crossattn_emb_size={crossattn_emb_size}: a class or a token is read as two digits, which takes 2",
    ),
    Rule(
        needs=lambda config: (config.text_tower.num_layers > 0) == (config.task == "match"),
        remedy="model.family={family} with model.text_tower.num_layers={text_tower.num_layers}: model.family=clip has "
        "a text tower, and no other",
    ),
    Rule(
        when=lambda config: config.task == "match",
        needs=lambda config: config.num_classes is None,
        remedy="model.family={family} matches texts: leave out model.num_classes",
    ),
    Rule(
        when=lambda config: config.structure.fps == "padded",
        needs=lambda config: config.hidden_size >= 256,
        remedy="model.family={family} needs model.hidden_size >= 256, got {hidden_size}",
    ),
    Rule(
        when=lambda config: config.structure.linear_bias,
        needs=lambda config: not config.experts.num_experts,
        remedy="model.family={family} has biases, which experts lack: leave out model.experts",
    ),
    Rule(
        when=lambda config: config.structure.modulation_groups > 1,
        needs=lambda config: config.adaln_lora_dim is not None,
        remedy="model.family={family} needs model.adaln_lora_dim",
    ),
    Rule(
        when=lambda config: config.structure.single_modulation,
        needs=lambda config: config.adaln_lora_dim is None,
        remedy="model.family={family} has one modulation for all blocks: leave out model.adaln_lora_dim",
    ),
    # positions
    Rule(
        when=lambda config: config.position_embedding == "learned",
        needs=lambda config: config.learned_positions is not None,
        remedy="model.position_embedding=learned needs model.learned_positions, the largest grid",
    ),
    Rule(
        when=lambda config: not config.denoises,
        needs=lambda config: config.position_embedding == "learned",
        remedy="model.family={family} needs model.position_embedding=learned and model.learned_positions, its grid",
    ),
    # conditioning
    Rule(
        when=lambda config: config.conditioning_mode != "tokens",
        needs=lambda config: config.conditioning_sigma is not None,
        remedy="model.conditioning_mode={conditioning_mode} needs model.conditioning_sigma, a noise level",
    ),
    Rule(
        when=lambda config: config.conditioning_sigma is not None,
        needs=lambda config: (
            config.conditioning_sigma > 0 or (config.conditioning_sigma == 0 and config.parameterization == "flow")
        ),
        remedy="model.conditioning_sigma={conditioning_sigma} must be above 0, or 0 with model.parameterization=flow",
    ),
    Rule(
        when=lambda config: config.image_size is not None,
        needs=lambda config: config.structure.block == "wan",
        remedy="model.image_size is for model.family=wan, not for {family}",
    ),
    Rule(
        when=lambda config: config.image_positions is not None,
        needs=lambda config: config.image_size is not None,
        remedy="model.image_positions needs model.image_size",
    ),
    # guidance
    Rule(
        when=lambda config: config.guidance_embedding_range is not None,
        needs=lambda config: 1 <= config.guidance_embedding_range[0] < config.guidance_embedding_range[1],
        remedy="model.guidance_embedding_range={guidance_embedding_range} must be two scales from 1, the lower first",
    ),
    Rule(
        when=lambda config: config.guidance_embedding_range is not None,
        needs=lambda config: config.denoises,
        remedy="model.guidance_embedding_range={guidance_embedding_range} is for networks that denoise, not "
        "model.family={family}; leave it out",
    ),
    # heads
    Rule(
        needs=lambda config: config.num_attention_heads % config.key_heads == 0,
        remedy="model.num_query_groups={num_query_groups} does not divide "
        "model.num_attention_heads={num_attention_heads}",
    ),
    Rule(
        when=lambda config: config.position_embedding != "learned" or config.dim_per_head == 0,
        needs=lambda config: config.head_dim is not None or config.hidden_size % config.num_attention_heads == 0,
        remedy=lambda config: (
            f"model.num_attention_heads={config.num_attention_heads} does not divide "
            f"model.hidden_size={config.hidden_size}; use {_nearest_number_of_heads(config)} heads, or set "
            "model.head_dim yourself"
        ),
    ),
    Rule(
        when=lambda config: config.position_embedding == "rope",
        needs=lambda config: config.dim_per_head % 2 == 0 and config.dim_per_head >= 6,
        remedy="rotary positions need an even head width of at least 6, got {dim_per_head} (hidden_size "
        "{hidden_size}, {num_attention_heads} heads); set model.head_dim",
    ),
    Rule(
        when=lambda config: set(config.rope_scale) != {1},
        needs=lambda config: config.dim_per_head >= 12,
        remedy="model.rope_scale={rope_scale} needs heads at least 12 wide",
    ),
    Rule(
        when=lambda config: set(config.rope_interpolation) != {1},
        needs=lambda config: config.position_embedding == "rope",
        remedy="model.rope_interpolation={rope_interpolation} divides rotary positions, of which "
        "model.position_embedding={position_embedding} has none",
    ),
)
"""The rules, in the order in which they are checked."""
