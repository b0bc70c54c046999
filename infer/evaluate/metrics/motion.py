"""Amount and consistency of motion in a video, by the optical flow of Lucas and Kanade (1981).

Shapes: B videos, T/H/W frames, height, width, C colour channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

NUM_LEVELS = 4
"""Levels of the pyramid, each of half the size: motion of about 2^4 pixels is found."""
SMALLEST_SIDE = 8
NUM_ROUNDS = 3
"""Refinements of the flow at each level."""
RADIUS = 3
"""Radius of the square whose pixels are assumed to move together."""
STIFFNESS = 1e-3
"""Damping that keeps the flow small where a square has no texture (brightness lies in 0..1)."""


def optical_flow(first_BHW: Tensor, second_BHW: Tensor) -> Tensor:
    """Displacement in pixels from the first picture (0..1) to the second, float32 [B, 2, H, W]: columns, rows."""
    pyramid = [(first_BHW[:, None], second_BHW[:, None])]
    while len(pyramid) < NUM_LEVELS and min(pyramid[-1][0].shape[2:]) >= 2 * SMALLEST_SIDE:
        pyramid.append(tuple(F.avg_pool2d(each, 2) for each in pyramid[-1]))
    flow = first_BHW.new_zeros(len(first_BHW), 2, *pyramid[-1][0].shape[2:])
    for first, second in reversed(pyramid):
        if flow.shape[2:] != first.shape[2:]:
            flow = 2 * F.interpolate(flow, first.shape[2:], mode="bilinear")
        for _ in range(NUM_ROUNDS):
            flow = flow + _correction(first, warped(second, flow))
    return flow


def warped(picture_BCHW: Tensor, flow_B2HW: Tensor) -> Tensor:
    """The picture as it was before its pixels moved, [B, C, H, W]."""
    height, width = picture_BCHW.shape[2:]
    columns = torch.arange(width, device=flow_B2HW.device) + flow_B2HW[:, 0]
    rows = torch.arange(height, device=flow_B2HW.device)[:, None] + flow_B2HW[:, 1]
    grid = torch.stack([(2 * columns + 1) / width - 1, (2 * rows + 1) / height - 1], dim=-1)
    return F.grid_sample(picture_BCHW, grid, padding_mode="border", align_corners=False)


def _correction(first_B1HW: Tensor, second_B1HW: Tensor) -> Tensor:
    """Least-squares update of the flow at each pixel: two linear equations."""
    padded = F.pad((first_B1HW + second_B1HW) / 2, (1, 1, 1, 1), mode="replicate")
    across = (padded[:, :, 1:-1, 2:] - padded[:, :, 1:-1, :-2]) / 2
    down = (padded[:, :, 2:, 1:-1] - padded[:, :, :-2, 1:-1]) / 2
    change = second_B1HW - first_B1HW
    products = torch.cat([across**2, across * down, down**2, across * change, down * change], dim=1)
    xx, xy, yy, xt, yt = F.avg_pool2d(products, 2 * RADIUS + 1, 1, RADIUS, count_include_pad=False).unbind(1)
    xx, yy = xx + STIFFNESS, yy + STIFFNESS
    determinant = xx * yy - xy**2
    step = torch.stack([xy * yt - yy * xt, xy * xt - xx * yt], dim=1) / determinant[:, None]
    return step.clamp(-1, 1)  # linear equations hold for small steps


class MotionClips:
    """Motion of a clip: mean displacement of textured pixels between frames, in hundredths of the height; and the
    fraction of the change between frames that motion does not explain, 0..1."""

    name, sees, width, fewest_frames = "flow", "motion", 2, 2
    protocol = f"Lucas-Kanade, {NUM_LEVELS} levels, {NUM_ROUNDS} rounds, squares of {2 * RADIUS + 1} pixels"
    fingerprint = "-"

    @torch.inference_mode()
    def __call__(self, video_BTHWC: Tensor) -> Tensor:
        brightness_BTHW = video_BTHWC.float().mean(-1) / 255
        first_NHW, second_NHW = (part.flatten(0, 1) for part in (brightness_BTHW[:, :-1], brightness_BTHW[:, 1:]))
        flow_N2HW = optical_flow(first_NHW, second_NHW)
        change_N = (second_NHW - first_NHW).abs().mean((1, 2))
        left_N = (warped(second_NHW[:, None], flow_N2HW)[:, 0] - first_NHW).abs().mean((1, 2))
        displacement_N = 100 * _where_textured(flow_N2HW.norm(dim=1), first_NHW) / brightness_BTHW.shape[2]
        unexplained_N = torch.where(change_N > 1e-4, left_N / change_N.clamp(min=1e-4), 0)
        per_frame = torch.stack([displacement_N, unexplained_N.clamp(max=1)], dim=1)
        return per_frame.reshape(len(video_BTHWC), -1, 2).mean(1)


def _where_textured(value_NHW: Tensor, picture_NHW: Tensor) -> Tensor:
    """Mean over pixels weighted by local texture, [N]: motion of a uniform surface is not visible."""
    mean = F.avg_pool2d(picture_NHW[:, None], 5, 1, 2)
    weight_NHW = (F.avg_pool2d(picture_NHW[:, None] ** 2, 5, 1, 2) - mean**2).clamp(min=0)[:, 0]
    return (value_NHW * weight_NHW).sum((1, 2)) / weight_NHW.sum((1, 2)).clamp(min=1e-9)
