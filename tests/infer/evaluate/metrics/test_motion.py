"""Optical flow against motions that are known; a still video does not win."""

import pytest
import torch
import torch.nn.functional as F

from megadit.infer.evaluate.metrics.distances import Features
from megadit.infer.evaluate.metrics.intervals import resamplings
from megadit.infer.evaluate.metrics.motion import MotionClips, optical_flow, warped
from megadit.infer.evaluate.metrics.table import METRICS


def texture(count, size, seed=0):
    """Smooth random pictures, [N, H, W], 0..1."""
    noise = torch.rand(count, 1, size // 4, size // 4, generator=torch.Generator().manual_seed(seed))
    return F.interpolate(noise, (size, size), mode="bicubic").clamp(0, 1)[:, 0]


def moved(picture_NHW, across, down):
    flow = torch.tensor([-across, -down], dtype=torch.float32)[None, :, None, None]
    return warped(picture_NHW[:, None], flow.expand(len(picture_NHW), 2, *picture_NHW.shape[1:]))[:, 0]


@pytest.mark.parametrize(("across", "down"), [(1.0, 0.0), (0.0, -2.5), (4.0, 3.0)])
def test_flow_finds_a_known_motion(across, down):
    first = texture(2, 64)
    flow = optical_flow(first, moved(first, across, down))[:, :, 8:-8, 8:-8]
    assert flow.median(2).values.median(2).values == pytest.approx(torch.tensor([[across, down]] * 2), abs=0.15)


def clips(speed, count=24, frames=6, jump=0.0):
    """uint8 BTHWC clips of textures that move `speed` pixels a frame, which `jump` pixels of chance may add to."""
    pictures, generator = texture(count, 48), torch.Generator().manual_seed(1)
    speeds = speed * (0.75 + 0.5 * torch.rand(count, generator=generator))
    videos = []
    for picture, each in zip(pictures, speeds, strict=True):
        offsets = each * torch.arange(frames) + jump * torch.rand(frames, generator=generator)
        videos.append(torch.cat([moved(picture[None], offset.item(), 0.0) for offset in offsets]))
    return (torch.stack(videos)[..., None].expand(-1, -1, -1, -1, 3) * 255).byte()


def test_motion_is_measured_in_hundredths_of_the_height():
    found = MotionClips()(clips(1.0))
    assert found.shape == (24, 2)
    assert found[:, 0].mean().item() == pytest.approx(100 / 48, rel=0.2)
    assert (MotionClips()(clips(0.0))[:, 0] < 0.02).all()


def test_a_still_or_a_jumping_video_does_not_win():
    real, same, still, jumping = (
        MotionClips()(each)[:, None] for each in (clips(1.0), clips(1.0, jump=0.1), clips(0.0), clips(1.0, jump=6.0))
    )

    def motion(features_NFD):
        made = Features(features_NFD, resamplings(range(24), "made"))
        return METRICS["motion"].estimate(made, Features(real, resamplings(range(24), "real")))

    assert motion(still).interval[0] > motion(same).interval[1]
    assert motion(jumping).interval[0] > motion(same).interval[1]
    assert motion(still).extra["mean"] < 0.1 < motion(same).extra["mean"]
