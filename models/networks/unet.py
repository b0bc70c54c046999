"""Stable Diffusion's U-Net by diffusers' own class, called like a `DiT`.

Shapes: B batch, C latent channels, T/H/W latent frames (1), height, width, L text tokens, E text feature width, P
width of the pooled feature.
"""

import torch
from torch import Tensor, nn

from megadit.models.configs.unet import DIFFUSERS_CLASS, UNetConfig
from megadit.models.networks.conditioning import Conditioning
from megadit.models.packing.dense_layout import TensorCache
from megadit.models.shared.errors import UserError, library_errors


class UNet(nn.Module):
    """F of an image. Every text token is attended to, as CLIP text encoders expect."""

    def __init__(self, config: UNetConfig) -> None:
        """Raises UserError if diffusers is not installed, or cannot build such a network."""
        super().__init__()
        self.config = config
        self.network = _build(config)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def forward(self, x_BCTHW: Tensor, c_noise_B: Tensor, conditioning: Conditioning, layout: None = None) -> Tensor:
        """Predicts F (BCTHW) for images; `c_noise_B` are DDPM's steps. `layout` is always None."""
        added = {}
        if self.config.pooled_size is not None:
            height, width = (side * self.config.pixels_per_latent for side in x_BCTHW.shape[3:])
            # as if the image originally had this size and were not cropped
            sides = (height, width, 0, 0, height, width)
            sizes = torch.stack([x_BCTHW.new_full((), side) for side in sides])  # created on the device: no copy
            # float32 as the embeddings of sizes next to it: exporters convert neither
            pooled_BP = conditioning.pooled_BP.float()
            added = {"text_embeds": pooled_BP, "time_ids": sizes.expand(x_BCTHW.shape[0], -1)}
        text_BLE = conditioning.text_BLE.to(x_BCTHW.dtype)
        (F_BCHW,) = self.network(x_BCTHW[:, :, 0], c_noise_B, text_BLE, added_cond_kwargs=added, return_dict=False)
        return F_BCHW[:, :, None]

    def dense_layout(
        self,
        conditioning: Conditioning,
        size: tuple[int, int, int],
        device: torch.device,
        kept: TensorCache | None = None,
    ) -> None:
        """Return None: nothing is cached for a size (T, H, W).

        Raises:
            UserError: for a size that the network cannot take.
        """
        self.config.token_grid(*size)


def _build(config: UNetConfig) -> nn.Module:
    try:
        import diffusers
    except ModuleNotFoundError:
        raise UserError(f"{DIFFUSERS_CLASS} needs the library diffusers: pip install 'megadit[diffusers]'") from None
    builder = f"diffusers {diffusers.__version__}"
    with library_errors(lambda reason: f"{builder} cannot build this {DIFFUSERS_CLASS}: {reason}"):
        return getattr(diffusers, DIFFUSERS_CLASS)(**config.settings)
