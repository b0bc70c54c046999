"""The loss of a model on real videos at fixed noise levels, as in validation of a training run.

Shapes: B videos, C channels, T/H/W frames, height, width, S noise levels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.models.bundle import Bundle
from megadit.models.diffusion.noise import latent_noise, seed_key
from megadit.models.diffusion.parameterization import parameterization_of
from megadit.models.networks.conditioning import Conditioning

LOSS = "loss"
SIGMAS = (0.1, 0.5, 1.0, 2.0, 10.0)


class LossScorer:
    """lambda(sigma) |D(x0 + sigma n; sigma) - x0|^2, a mean over the latents of a video (arXiv 2206.00364, eq. 2).

    The noise of a video depends on its content, so that every model gets the same noise.
    """

    name, sees, fewest_frames, needs_prompts = "loss", "scores", 1, True
    columns = tuple(f"loss at sigma {sigma:g}" for sigma in SIGMAS)
    better = dict.fromkeys(columns, "lower")
    protocol = "weighted, the noise drawn from the pixels"
    fingerprint = "-"

    def __init__(self, bundle: Bundle, device: torch.device, dtype: str) -> None:
        self._bundle, self._device, self._dtype = bundle, device, dtype
        self._pipeline: TextToVideo | None = None

    @torch.inference_mode()
    def __call__(self, video_BTHWC: Tensor, prompts: Sequence[str]) -> Tensor:
        if self._pipeline is None:
            self._pipeline = TextToVideo.from_pretrained(self._bundle, device=str(self._device), dtype=self._dtype)
        pipeline = self._pipeline
        pipeline.text_encoder.prepare(list(prompts))
        x0 = pipeline.tokenizer.encode(video_BTHWC.permute(0, 4, 1, 2, 3).float() / 127.5 - 1).to(self._device)
        key_B = torch.tensor([seed_key(int(video.long().sum())) for video in video_BTHWC], device=self._device)
        noise = latent_noise(key_B, tuple(x0.shape[1:]))
        fps = float(pipeline.defaults.fps) if video_BTHWC.shape[1] > 1 else 0.0
        conditioning = pipeline.text_encoder.conditioning(list(prompts), fps).to(self._device)
        losses = [self._weighted(x0, noise, sigma, conditioning) for sigma in SIGMAS]
        return torch.stack(losses, dim=1).cpu()

    def _weighted(self, x0: Tensor, noise: Tensor, sigma: float, conditioning: Conditioning) -> Tensor:
        sigma_B = torch.full((len(x0),), sigma, device=self._device)
        error_B = (self._pipeline.denoiser(x0 + sigma * noise, sigma_B, conditioning) - x0).square().mean((1, 2, 3, 4))
        return parameterization_of(self._pipeline.config).loss_weight(sigma_B) * error_B
