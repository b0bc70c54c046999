"""Named configurations of networks: published ones, and those that `make demo` trains."""

from typing import Any

from megadit.models.configs.config import DiTConfig, TextTowerConfig


def _moviegen(**sizes: int) -> DiTConfig:
    return DiTConfig(
        family="moviegen",
        num_query_groups=8,
        position_embedding="learned",
        learned_positions=(128, 120, 120),
        qk_layernorm=False,
        layernorm_epsilon=1e-5,
        **sizes,
    )


def _st_dit(*, adaln_lora_dim: int = 256, **sizes: int) -> DiTConfig:
    """Five sublayers are modulated: without a bottleneck, modulation would be a third of the network."""
    return DiTConfig(family="st_dit", adaln_lora_dim=adaln_lora_dim, **sizes)


def _cosmos(**settings: Any) -> DiTConfig:
    """Cosmos 1 text-to-video (arXiv 2501.03575), as in diffusers' config.json."""
    usual = {"adaln_lora_dim": 256, "learned_positions": (128, 120, 120), "padding_mask_channel": True}
    return DiTConfig(family="cosmos", qk_layernorm_epsilon=1e-5, **usual | settings)


COSMOS_7B = {"num_layers": 28, "hidden_size": 4096, "num_attention_heads": 32, "rope_scale": (2.0, 1.0, 1.0)}
COSMOS_14B = {"num_layers": 36, "hidden_size": 5120, "num_attention_heads": 40, "rope_scale": (2.0, 2.0, 2.0)}


def _cosmos2(**settings: Any) -> DiTConfig:
    """Cosmos-Predict2: Cosmos without learned positions, with rectified flow (diffusers' Cosmos2)."""
    flow = {"parameterization": "flow", "sigma_data": 1.0, "learned_positions": None, "rope_scale": (1.0, 4.0, 4.0)}
    return _cosmos(**flow | settings)


COSMOS2_2B = {"num_layers": 28, "hidden_size": 2048, "num_attention_heads": 16}
COSMOS2_14B = {"num_layers": 36, "hidden_size": 5120, "num_attention_heads": 40}
COSMOS_OF_VIDEOS = {"conditioning_mode": "augmented", "conditioning_sigma": 0.001}
COSMOS2_OF_VIDEOS = {"conditioning_mode": "marked", "conditioning_sigma": 0.0001}
PREDICT2_5 = {**COSMOS2_OF_VIDEOS, "compat": "predict2_5", "rope_scale": (1.0, 3.0, 3.0)}


def _wan(**settings: Any) -> DiTConfig:
    """Wan (arXiv 2503.20314, table 1), with text features of umT5-XXL."""
    return DiTConfig(family="wan", parameterization="flow", sigma_data=1.0, crossattn_emb_size=4096, **settings)


def _wan_14b(**settings: Any) -> DiTConfig:
    sizes = {"num_layers": 40, "hidden_size": 5120, "num_attention_heads": 40, "ffn_hidden_size": 13824}
    return _wan(**sizes, **settings)


WAN_OF_IMAGES = {"conditioning_mode": "channels", "conditioning_sigma": 0.0}
CLIP = {"image_size": 1280}
"""Width of the features of ViT-H, which Wan 2.1 reads."""


def _vit(side: int, patch: int, **sizes: Any) -> DiTConfig:
    """ViT (arXiv 2010.11929, table 1; g and G: 2106.04560, table 2) for square images and ImageNet-1k classes."""
    usual = {"in_channels": 3, "crossattn_emb_size": 2, "num_classes": 1000, "patch_spatial": patch}
    positions = {"position_embedding": "learned", "learned_positions": (1, side // patch, side // patch)}
    return DiTConfig(family="vit", qk_layernorm=False, layernorm_epsilon=1e-12, **usual | positions | sizes)


def _clip(side: int, patch: int, text: dict[str, Any], **sizes: Any) -> DiTConfig:
    """CLIP (arXiv 2103.00020, table 20; H: LAION's, arXiv 2210.08402) for square images, with OpenAI's vocabulary."""
    usual = {"in_channels": 3, "crossattn_emb_size": 2, "patch_spatial": patch, "layernorm_epsilon": 1e-5}
    positions = {"position_embedding": "learned", "learned_positions": (1, side // patch, side // patch)}
    tower = TextTowerConfig(**{"num_layers": 12} | text)
    return DiTConfig(family="clip", qk_layernorm=False, text_tower=tower, **usual | positions | sizes)


NAMED_CONFIGS: dict[str, DiTConfig] = {
    "dit_s": DiTConfig(num_layers=12, hidden_size=384, num_attention_heads=6),
    "dit_b": DiTConfig(num_layers=12, hidden_size=768, num_attention_heads=12),
    "dit_l": DiTConfig(num_layers=24, hidden_size=1024, num_attention_heads=16),
    "dit_xl": DiTConfig(num_layers=28, hidden_size=1152, num_attention_heads=16),
    "image_xl": DiTConfig(
        num_layers=28,
        hidden_size=1152,
        num_attention_heads=16,
        in_channels=4,
        crossattn_emb_size=768,
        sigma_data=1.0,
    ),
    "dit_7b": DiTConfig(num_layers=32, hidden_size=3072, num_attention_heads=24),
    "dit_28b": DiTConfig(num_layers=32, hidden_size=6144, num_attention_heads=48),
    "cosmos_7b": _cosmos(**COSMOS_7B),
    "cosmos_14b": _cosmos(**COSMOS_14B),
    "cosmos_7b_video": _cosmos(**COSMOS_7B, **COSMOS_OF_VIDEOS),
    "cosmos_14b_video": _cosmos(**COSMOS_14B, **COSMOS_OF_VIDEOS),
    "moviegen_1b": _moviegen(num_layers=16, hidden_size=2048, num_attention_heads=32, ffn_hidden_size=8192),
    "moviegen_3b": _moviegen(num_layers=28, hidden_size=3072, num_attention_heads=24, ffn_hidden_size=8192),
    "moviegen_5b": _moviegen(num_layers=32, hidden_size=3072, num_attention_heads=24, ffn_hidden_size=8192),
    "moviegen_30b": _moviegen(num_layers=48, hidden_size=6144, num_attention_heads=48, ffn_hidden_size=16384),
    "st_dit_s": _st_dit(num_layers=12, hidden_size=384, num_attention_heads=6),
    "st_dit_b": _st_dit(num_layers=12, hidden_size=768, num_attention_heads=12),
    "st_dit_l": _st_dit(num_layers=24, hidden_size=1024, num_attention_heads=16),
    "st_dit_xl": _st_dit(num_layers=28, hidden_size=1152, num_attention_heads=16),
    "st_dit_3b": _st_dit(num_layers=24, hidden_size=2048, num_attention_heads=16, adaln_lora_dim=512),
    "dit_xl_2": DiTConfig(
        family="dit",
        num_layers=28,
        hidden_size=1152,
        num_attention_heads=16,
        in_channels=4,
        crossattn_emb_size=2,
        position_embedding="sincos",
        qk_layernorm=False,
        sigma_data=1.0,
        parameterization="vp",
        num_classes=1000,
        learned_variance=True,
    ),
    "cosmos2_2b": _cosmos2(**COSMOS2_2B),
    "cosmos2_14b": _cosmos2(**COSMOS2_14B),
    "cosmos2_2b_video": _cosmos2(**COSMOS2_2B, **COSMOS2_OF_VIDEOS, rope_scale=(1.0, 3.0, 3.0)),
    "cosmos2_14b_video": _cosmos2(**COSMOS2_14B, **COSMOS2_OF_VIDEOS, rope_scale=(20 / 24, 2.0, 2.0)),
    "cosmos2_5_2b": _cosmos2(**COSMOS2_2B, **PREDICT2_5),
    "cosmos2_5_14b": _cosmos2(**COSMOS2_14B, **PREDICT2_5),
    "wan_1_3b": _wan(num_layers=30, hidden_size=1536, num_attention_heads=12, ffn_hidden_size=8960),
    "wan_14b": _wan_14b(),
    "wan_14b_image": _wan_14b(**WAN_OF_IMAGES, **CLIP),
    "wan_14b_first_last": _wan_14b(**WAN_OF_IMAGES, **CLIP, image_positions=514),
    "wan2_2_14b_image": _wan_14b(**WAN_OF_IMAGES),
    "wan2_2_5b": _wan(
        num_layers=30,
        hidden_size=3072,
        num_attention_heads=24,
        ffn_hidden_size=14336,
        in_channels=48,
        conditioning_sigma=0.0,
    ),
    "clip_b_32": _clip(224, 32, {}, num_layers=12, hidden_size=768, num_attention_heads=12, quick_gelu=True),
    "clip_l_14": _clip(
        224,
        14,
        {"hidden_size": 768, "num_attention_heads": 12, "embedding_size": 768},
        num_layers=24,
        hidden_size=1024,
        num_attention_heads=16,
        quick_gelu=True,
    ),
    "clip_h_14": _clip(
        224,
        14,
        {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "embedding_size": 1024},
        num_layers=32,
        hidden_size=1280,
        num_attention_heads=16,
    ),
    "clip_digits": _clip(
        32,
        4,
        {
            "num_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 2,
            "num_words": 512,
            "max_length": 24,
            "embedding_size": 64,
        },
        num_layers=4,
        hidden_size=96,
        num_attention_heads=3,
    ),
    "vit_b_16": _vit(224, 16, num_layers=12, hidden_size=768, num_attention_heads=12),
    "vit_l_16": _vit(224, 16, num_layers=24, hidden_size=1024, num_attention_heads=16),
    "vit_h_14": _vit(224, 14, num_layers=32, hidden_size=1280, num_attention_heads=16),
    "vit_g_14": _vit(224, 14, num_layers=40, hidden_size=1408, num_attention_heads=16, ffn_hidden_size=6144),
    "vit_G_14": _vit(224, 14, num_layers=48, hidden_size=1664, num_attention_heads=16, ffn_hidden_size=8192),
    "vit_digits": _vit(32, 4, num_layers=4, hidden_size=64, num_attention_heads=4, num_classes=10),
    "vit_digits_clips": _vit(
        32,
        8,
        num_layers=4,
        hidden_size=96,
        num_attention_heads=4,
        num_classes=240,
        patch_temporal=3,
        learned_positions=(3, 4, 4),
    ),
    "digits": DiTConfig(
        num_layers=4,
        hidden_size=96,
        num_attention_heads=4,
        in_channels=32,
        patch_spatial=1,
        crossattn_emb_size=64,
        sigma_data=1.0,
        learned_positions=(32, 32, 32),
    ),
    "shapes": DiTConfig(
        num_layers=4,
        hidden_size=96,
        num_attention_heads=2,
        in_channels=64,
        patch_spatial=1,
        crossattn_emb_size=64,
        sigma_data=1.0,
        conditioning_sigma=0.02,
        learned_positions=(3, 4, 4),
    ),
}
"""Named configurations: published sizes (L, XL and 7B as trained upstream on text and video; MovieGen as in NeMo's
`DiTLlama*`), published networks (Cosmos, Cosmos-Predict2 and 2.5, Wan 2.1 and 2.2, the class-conditional DiT-XL/2) and
those that `make demo` and `make demo-shapes` train."""
