"""I3D (arXiv 1705.07750) as used by FVD: the 400 logits of Kinetics.

Written from the paper's figures 3 and 5, with the names of the public PyTorch files. Normalisation adds 1e-3 to
variances, as in training and in pytorch-i3d; VideoGPT's copy of the network adds 1e-5, and has slightly different
features.

Shapes: B clips, C channels, T/H/W frames, height, width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadit.infer.evaluate.extractors.base import resized

SIZE = 224
MIXED = {
    "Mixed_3b": (64, 96, 128, 16, 32, 32),
    "Mixed_3c": (128, 128, 192, 32, 96, 64),
    "Mixed_4b": (192, 96, 208, 16, 48, 64),
    "Mixed_4c": (160, 112, 224, 24, 64, 64),
    "Mixed_4d": (128, 128, 256, 24, 64, 64),
    "Mixed_4e": (112, 144, 288, 32, 64, 64),
    "Mixed_4f": (256, 160, 320, 32, 128, 128),
    "Mixed_5b": (256, 160, 320, 32, 128, 128),
    "Mixed_5c": (384, 192, 384, 48, 128, 128),
}
"""Channels of the convolutions b0, b1a, b1b, b2a, b2b, b3b."""
STEM = (("Conv3d_1a_7x7", 64, 7, 2), ("Conv3d_2b_1x1", 64, 1, 1), ("Conv3d_2c_3x3", 192, 3, 1))
"""Name, channels out, kernel, stride."""
POOLED_BEFORE = {
    "Conv3d_2b_1x1": ((1, 3, 3), (1, 2, 2)),
    "Mixed_3b": ((1, 3, 3), (1, 2, 2)),
    "Mixed_4b": ((3, 3, 3), (2, 2, 2)),
    "Mixed_5b": ((2, 2, 2), (2, 2, 2)),
}
"""Kernel and stride of the max pooling before a module."""
LAST_POOL = (2, 7, 7)


def _pad(x_BCTHW: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """Zero padding as TensorFlow's SAME: inputs / stride outputs, an odd zero at the end."""
    sides: list[int] = []
    for size, width, step in zip(x_BCTHW.shape[2:], kernel, stride, strict=True):
        total = max(width - (size % step or step), 0)
        sides = [total // 2, total - total // 2, *sides]
    return F.pad(x_BCTHW, sides)


def _maximum(x_BCTHW: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    return F.max_pool3d(_pad(x_BCTHW, kernel, stride), kernel, stride)


class _Convolution(nn.Module):
    def __init__(self, into: int, out: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.conv3d = nn.Conv3d(into, out, kernel, stride, bias=False)
        self.bn = nn.BatchNorm3d(out, eps=0.001)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        padded = _pad(x_BCTHW, self.conv3d.kernel_size, self.conv3d.stride)
        return F.relu(self.bn(self.conv3d(padded)), inplace=True)


class _Mixed(nn.Module):
    """Four parallel branches: 1x1x1; two of 1x1x1 and 3x3x3; max pooling and 1x1x1."""

    def __init__(self, into: int, channels: tuple[int, ...]) -> None:
        super().__init__()
        self.b0 = _Convolution(into, channels[0])
        self.b1a, self.b1b = _Convolution(into, channels[1]), _Convolution(channels[1], channels[2], 3)
        self.b2a, self.b2b = _Convolution(into, channels[3]), _Convolution(channels[3], channels[4], 3)
        self.b3b = _Convolution(into, channels[5])
        self.width = channels[0] + channels[2] + channels[4] + channels[5]

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        pooled = _maximum(x_BCTHW, (3, 3, 3), (1, 1, 1))
        branches = [self.b0(x_BCTHW), self.b1b(self.b1a(x_BCTHW)), self.b2b(self.b2a(x_BCTHW)), self.b3b(pooled)]
        return torch.cat(branches, dim=1)


class _Logits(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.conv3d = nn.Conv3d(into, out, 1)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        """Logits [B, out], the mean over the remaining time steps."""
        return self.conv3d(F.avg_pool3d(x_BCTHW, LAST_POOL, 1)).mean((2, 3, 4))


class I3D(nn.Module):
    """Maps clips (BCTHW, -1 to 1, 224x224, 9 frames or more) to logits [B, classes]."""

    def __init__(self, narrow: int = 1, num_classes: int = 400) -> None:
        super().__init__()
        channels = 3
        for name, out, kernel, stride in STEM:
            self.add_module(name, _Convolution(channels, out // narrow, kernel, stride))
            channels = out // narrow
        for name, widths in MIXED.items():
            self.add_module(name, made := _Mixed(channels, tuple(width // narrow for width in widths)))
            channels = made.width
        self.logits = _Logits(channels, num_classes)
        self.width = num_classes

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        x = x_BCTHW
        for name, module in self.named_children():
            x = module(_maximum(x, *POOLED_BEFORE[name]) if name in POOLED_BEFORE else x)
        return x


class I3DClips:
    name, sees, fewest_frames = "i3d", "clips", 9
    protocol = f"bicubic with antialias to {SIZE}x{SIZE}, -1 to 1, logits"

    def __init__(self, network: I3D, fingerprint: str) -> None:
        self._network, self.width, self.fingerprint = network, network.width, fingerprint

    @torch.inference_mode()
    def __call__(self, video_BTHWC: Tensor) -> Tensor:
        video_BTHWC = video_BTHWC.to(next(self._network.parameters()).device)
        return self._network(resized(video_BTHWC, SIZE, SIZE) / 127.5 - 1)
