"""`megadit evaluate tokenizer`: the reconstruction error of a tokenizer, with confidence intervals.

    megadit evaluate tokenizer BUNDLE CLIPS --out runs/tokenizer.json

Shapes: B videos, T/H/W frames, height, width, C channels. Pixels are uint8, RGB, 0..255.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megadit.infer.evaluate.metrics.intervals import Estimate, mean_estimate, resamplings
from megadit.infer.evaluate.metrics.lpips import LPIPS
from megadit.infer.evaluate.report.report import shown
from megadit.infer.evaluate.videos import VideoSet, open_videos
from megadit.infer.evaluate.window import Window, window_of, windowed
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import write_json
from megadit.models.shared.progress import Progress
from megadit.models.tokenizers import VideoTokenizer, load_tokenizer

SSIM_SIGMA, SSIM_RADIUS = 1.5, 5
"""Standard deviation and radius of the Gaussian window, in pixels."""
SSIM_C1, SSIM_C2 = 0.01**2, 0.03**2
HIGHEST_PSNR = 100.0
"""PSNR of perfect reconstructions, in dB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerOptions:
    tokenizer: Path = setting(help="folder of a tokenizer, a bundle or a data set", positional=True, metavar="BUNDLE")
    clips: Path = setting(help="videos: a folder, or a data set that stores pixels", positional=True, metavar="CLIPS")
    out: Path | None = setting(None, ".json file for the metrics")
    frames: int | None = setting(
        None, "frames from the middle of each video (default: 16, or what can be encoded)", above=0
    )
    size: tuple[int, int] | None = setting(None, "crop and resize all videos to this height and width")
    count: int | None = setting(None, "maximum number of videos", above=1)
    lpips_weights: Path | None = setting(None, "folder of alexnet*.pth (torchvision's) and alex.pth (LPIPS')")


@command(
    TokenizerOptions,
    prog="megadit evaluate tokenizer",
    description="Measures a tokenizer's reconstruction error: PSNR, SSIM, LPIPS; and the scale of its latents.",
)
def main(options: TokenizerOptions) -> None:
    """Runs `megadit evaluate tokenizer`; returns its exit code."""
    inner = options.tokenizer / "tokenizer"  # in a bundle, or a data set
    tokenizer = load_tokenizer(inner if inner.is_dir() else options.tokenizer)
    videos = open_videos(options.clips, options.count)
    window = _encodable(window_of(videos.parts[0].read()[0], options.frames, options.size), tokenizer, options.frames)
    lpips = None if options.lpips_weights is None else LPIPS.load(options.lpips_weights)
    found = reconstruction(tokenizer, videos, window, lpips)
    rows = {name: (estimate.value, *estimate.interval) for name, estimate in found.items()}
    print(f"{videos.count} videos, {window.text}; sigma_data {tokenizer.sigma_data:g}")
    for name, (value, low, high) in rows.items():
        print(f"{name:<34}{shown(value):>10}   95 %: {shown(low)} to {shown(high)}")
    if options.out is not None:
        metric_values = {name: dict(zip(("value", "low", "high"), row, strict=True)) for name, row in rows.items()}
        about = {"videos": videos.count, "real": videos.key, "window": window.text}
        write_json(options.out, {**about, "tokenizer": tokenizer.fingerprint(), "metrics": metric_values})


def _encodable(window: Window, tokenizer: VideoTokenizer, asked: int | None) -> Window:
    """Return the window, by default with the most frames that can be encoded. Raises UserError for sizes that cannot be
    encoded."""
    frames = window.frames
    while asked is None and frames > 1 and tokenizer.frames_covering(frames) != frames:
        frames -= 1
    tokenizer.latent_shape(frames, window.height, window.width)
    return replace(window, frames=frames)


@torch.inference_mode()
def reconstruction(
    tokenizer: VideoTokenizer, videos: VideoSet, window: Window, lpips: LPIPS | None = None
) -> dict[str, Estimate]:
    """PSNR (dB), SSIM, LPIPS (with weights), and the standard deviation and mean of latents over sigma_data."""
    measures: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"PSNR (dB)": psnr, "SSIM": ssim}
    if lpips is not None:
        measures["LPIPS"] = lpips
    values: dict[str, list[float]] = {}
    with Progress(videos.count, "reconstructing") as bar:
        for part in videos.parts:
            for video_THWC in windowed(part, window)[0]:
                video_1CTHW = video_THWC.permute(3, 0, 1, 2)[None].float() / 127.5 - 1
                latents = tokenizer.encode(video_1CTHW)
                decoded = ((tokenizer.decode(latents).clamp(-1, 1) + 1) * 127.5).round() / 127.5 - 1
                pair = [each[0].transpose(0, 1) for each in (decoded, video_1CTHW)]
                for name, measure in measures.items():
                    values.setdefault(name, []).append(measure(*pair).mean().item())
                spread = latents.square().mean().sqrt().item() / tokenizer.sigma_data
                values.setdefault("latents' size / sigma_data", []).append(spread)
                values.setdefault("latents' mean / sigma_data", []).append(latents.mean().item() / tokenizer.sigma_data)
                bar.advance()
    if videos.count < 2:
        raise UserError(f"{videos.label} holds one video: an interval needs two or more")
    weight_RN = resamplings(range(videos.count), "real")
    return {name: mean_estimate(torch.tensor(each), weight_RN) for name, each in values.items()}


def psnr(a_N3HW: Tensor, b_N3HW: Tensor) -> Tensor:
    """10 log10(2^2 / mean squared error) of pictures in [-1, 1], in dB, [N]."""
    error_N = (a_N3HW - b_N3HW).square().mean((1, 2, 3))
    return (10 * torch.log10(4 / error_N.clamp(min=1e-20))).clamp(max=HIGHEST_PSNR)


def ssim(a_N3HW: Tensor, b_N3HW: Tensor) -> Tensor:
    """Structural similarity of pictures in [-1, 1], [N] (Wang et al., 2004, eq. 13, with its window of 11 pixels)."""
    a, b = (a_N3HW + 1) / 2, (b_N3HW + 1) / 2
    place = torch.arange(-SSIM_RADIUS, SSIM_RADIUS + 1, dtype=a.dtype)
    weight = (-(place**2) / (2 * SSIM_SIGMA**2)).exp()
    weight = weight / weight.sum()

    def local_mean(x: Tensor) -> Tensor:
        x = x.flatten(0, 1)[:, None]
        return F.conv2d(F.conv2d(x, weight[None, None, :, None]), weight[None, None, None, :])

    mean_a, mean_b = local_mean(a), local_mean(b)
    var_a, var_b = local_mean(a**2) - mean_a**2, local_mean(b**2) - mean_b**2
    covariance = local_mean(a * b) - mean_a * mean_b
    likeness = (2 * mean_a * mean_b + SSIM_C1) * (2 * covariance + SSIM_C2)
    likeness = likeness / ((mean_a**2 + mean_b**2 + SSIM_C1) * (var_a + var_b + SSIM_C2))
    return likeness.reshape(len(a_N3HW), -1).mean(1)
