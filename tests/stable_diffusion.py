"""Small pipelines of Stable Diffusion with random weights, written by diffusers itself."""

from pathlib import Path
from typing import Any

import torch

SCHEDULE = {"beta_start": 8.5e-4, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
_UNET = {
    "sample_size": 16,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 2,
}
_FIRST = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 16,
}
UNETS: dict[str, dict[str, Any]] = {
    "1.x": _UNET | _FIRST,
    "2.x": _UNET | _FIRST | {"use_linear_projection": True, "attention_head_dim": (2, 4)},
    "xl": _UNET
    | {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 16 + 24,
        "transformer_layers_per_block": (1, 2),
        "attention_head_dim": (2, 4),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 4,
        "projection_class_embeddings_input_dim": 20 + 6 * 4,
    },
}
"""As published ones, but narrow, and of two levels."""
SHALLOW = {"transformer_layers_per_block": (1, 1)}
"""Of each place one layer, for tests that trace the network: it takes half as long, and a second layer is like the
first."""

ONE_LEVEL = {
    "block_out_channels": (8,),
    "down_block_types": ("CrossAttnDownBlock2D",),
    "up_block_types": ("CrossAttnUpBlock2D",),
}
"""Of a 1.x the level with cross-attention alone, as other tests export what leads to a second one."""


def random_unet(kind: str, **changes: Any) -> Any:
    import diffusers

    torch.manual_seed(1)
    return diffusers.UNet2DConditionModel(**UNETS[kind] | changes).eval()


def random_vae() -> Any:
    import diffusers

    torch.manual_seed(2)
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        scaling_factor=0.18215,
    )
    return vae.eval()


def make_pipeline(folder: Path, kind: str, write_clip: Any, **changes: Any) -> Any:
    """The pipeline, which is also saved in `folder`; `changes` are those of the U-Net's configuration."""
    import diffusers
    import transformers

    parts: dict[str, Any] = {"unet": random_unet(kind, **changes), "vae": random_vae()}
    parts["scheduler"] = diffusers.DDIMScheduler(
        **SCHEDULE,
        clip_sample=False,
        set_alpha_to_one=True,
        prediction_type="v_prediction" if kind == "2.x" else "epsilon",
    )
    clips = {"": {"pad": "!" if kind == "2.x" else "<|endoftext|>"}}
    if kind == "xl":
        clips["_2"] = {"dim": 24, "projection": 20, "pad": "!"}
    for end, settings in clips.items():
        path = write_clip(folder.parent / f"clip{end}", **settings)
        name = "CLIPTextModelWithProjection" if end else "CLIPTextModel"
        parts[f"text_encoder{end}"] = getattr(transformers, name).from_pretrained(path).eval()
        parts[f"tokenizer{end}"] = transformers.CLIPTokenizer.from_pretrained(path)
    if kind == "xl":
        pipeline = diffusers.StableDiffusionXLPipeline(**parts, add_watermarker=False)
    else:
        parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        pipeline = diffusers.StableDiffusionPipeline(**parts)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained(folder)
    return pipeline
