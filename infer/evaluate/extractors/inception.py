"""Inception-v3 as used by FID: TensorFlow's weights of 2015, up to the mean over the last feature map (2,048 numbers).

The architecture of arXiv 1512.00567, with the names of torchvision and of the public files. In contrast to torchvision,
the 2015 network leaves padding out of average pooling, and the last block uses max pooling instead.

Shapes: N pictures, C channels, H/W height, width.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadit.infer.evaluate.extractors.base import resized

SIZE = 299
Layer = tuple[str, int, tuple[int, int], int]
"""Name, channels out, kernel, stride."""


def _layers(prefix: str, *layers: tuple[int, int | tuple[int, int]], last_stride: int = 1) -> list[Layer]:
    """Convolutions in a row: (channels, kernel) each."""
    found = []
    for number, (channels, kernel) in enumerate(layers, start=1):
        name = f"{prefix}_{number}" if len(layers) > 1 else prefix
        size = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        found.append((name, channels, size, last_stride if number == len(layers) else 1))
    return found


def _block_a(pooled: int) -> dict:
    rows = [_layers("branch1x1", (64, 1)), _layers("branch5x5", (48, 1), (64, 5))]
    return {"rows": [*rows, _layers("branch3x3dbl", (64, 1), (96, 3), (96, 3))], "pooled": pooled}


def _block_c(width: int) -> dict:
    wide, tall = (1, 7), (7, 1)
    rows = [
        _layers("branch1x1", (192, 1)),
        _layers("branch7x7", (width, 1), (width, wide), (192, tall)),
        _layers("branch7x7dbl", (width, 1), (width, tall), (width, wide), (width, tall), (192, wide)),
    ]
    return {"rows": rows, "pooled": 192}


def _block_e(maximum: bool) -> dict:
    rows = [
        _layers("branch1x1", (320, 1)),
        [("branch3x3_1", 384, (1, 1), 1)],
        [("branch3x3dbl_1", 448, (1, 1), 1), ("branch3x3dbl_2", 384, (3, 3), 1)],
    ]
    forks = {1: ("branch3x3_2a", "branch3x3_2b"), 2: ("branch3x3dbl_3a", "branch3x3dbl_3b")}
    return {"rows": rows, "pooled": 192, "forks": forks, "maximum": maximum}


BLOCKS: dict[str, dict] = {
    "Mixed_5b": _block_a(32),
    "Mixed_5c": _block_a(64),
    "Mixed_5d": _block_a(64),
    "Mixed_6a": {
        "rows": [
            _layers("branch3x3", (384, 3), last_stride=2),
            _layers("branch3x3dbl", (64, 1), (96, 3), (96, 3), last_stride=2),
        ]
    },
    "Mixed_6b": _block_c(128),
    "Mixed_6c": _block_c(160),
    "Mixed_6d": _block_c(160),
    "Mixed_6e": _block_c(192),
    "Mixed_7a": {
        "rows": [
            _layers("branch3x3", (192, 1), (320, 3), last_stride=2),
            _layers("branch7x7x3", (192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3), last_stride=2),
        ]
    },
    "Mixed_7b": _block_e(maximum=False),
    "Mixed_7c": _block_e(maximum=True),
}
STEM = (
    ("Conv2d_1a_3x3", 32, 3, 2, 0),
    ("Conv2d_2a_3x3", 32, 3, 1, 0),
    ("Conv2d_2b_3x3", 64, 3, 1, 1),
    ("Conv2d_3b_1x1", 80, 1, 1, 0),
    ("Conv2d_4a_3x3", 192, 3, 1, 0),
)
"""Name, channels out, kernel, stride, padding."""
POOLED_AFTER = ("Conv2d_2b_3x3", "Conv2d_4a_3x3")


class _Convolution(nn.Module):
    def __init__(self, into: int, out: int, kernel: int | tuple[int, int], stride: int, padding) -> None:
        super().__init__()
        self.conv = nn.Conv2d(into, out, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(out, eps=0.001)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x_NCHW)), inplace=True)


class _Block(nn.Module):
    """Parallel branches, each a sequence of convolutions, whose last may fork; one branch has pooling."""

    def __init__(
        self,
        into: int,
        narrow: int,
        *,
        rows: Sequence[Sequence[Layer]],
        pooled: int = 0,
        forks: dict[int, tuple[str, str]] | None = None,
        maximum: bool = False,
    ) -> None:
        super().__init__()
        self._rows = [[name for name, *_ in row] for row in rows]
        self._forks, self._maximum, self._pooled = forks or {}, maximum, pooled
        self.width = 0
        for number, row in enumerate(rows):
            channels = into
            for name, out, kernel, stride in row:
                padding = tuple(size // 2 for size in kernel) if stride == 1 else 0
                self.add_module(name, _Convolution(channels, out // narrow, kernel, stride, padding))
                channels = out // narrow
            for name, kernel in zip(self._forks.get(number, ()), ((1, 3), (3, 1)), strict=False):
                padding = tuple(size // 2 for size in kernel)
                self.add_module(name, _Convolution(channels, channels, kernel, 1, padding))
            self.width += channels * (2 if number in self._forks else 1)
        if pooled:
            self.add_module("branch_pool", _Convolution(into, pooled // narrow, 1, 1, 0))
        self.width += pooled // narrow if pooled else into

    def forward(self, x_NCHW: Tensor) -> Tensor:
        found = []
        for number, names in enumerate(self._rows):
            row = x_NCHW
            for name in names:
                row = self.get_submodule(name)(row)
            forks = self._forks.get(number)
            found += [self.get_submodule(name)(row) for name in forks] if forks else [row]
        return torch.cat([*found, self._pool(x_NCHW)], dim=1)

    def _pool(self, x_NCHW: Tensor) -> Tensor:
        if not self._pooled:
            return F.max_pool2d(x_NCHW, 3, 2)
        average = F.max_pool2d(x_NCHW, 3, 1, 1) if self._maximum else _average(x_NCHW)
        return self.get_submodule("branch_pool")(average)


def _average(x_NCHW: Tensor) -> Tensor:
    return F.avg_pool2d(x_NCHW, 3, 1, 1, count_include_pad=False)


class Inception(nn.Module):
    """Maps pictures (N3HW, -1 to 1) to features [N, 2048 / narrow]."""

    def __init__(self, narrow: int = 1) -> None:
        super().__init__()
        channels = 3
        for name, out, kernel, stride, padding in STEM:
            self.add_module(name, _Convolution(channels, out // narrow, kernel, stride, padding))
            channels = out // narrow
        for name, block in BLOCKS.items():
            self.add_module(name, made := _Block(channels, narrow, **block))
            channels = made.width
        self.width = channels

    def forward(self, x_N3HW: Tensor) -> Tensor:
        x = x_N3HW
        for name, module in self.named_children():
            x = module(x)
            x = F.max_pool2d(x, 3, 2) if name in POOLED_AFTER else x
        return x.mean((2, 3))


class InceptionPictures:
    name, sees, fewest_frames = "inception", "pictures", 1
    protocol = f"bicubic with antialias to {SIZE}x{SIZE}, (x - 128) / 128"

    def __init__(self, network: Inception, fingerprint: str) -> None:
        self._network, self.width, self.fingerprint = network, network.width, fingerprint

    @torch.inference_mode()
    def __call__(self, video_BTHWC: Tensor) -> Tensor:
        video_BTHWC = video_BTHWC.to(next(self._network.parameters()).device)
        pictures_NCHW = resized(video_BTHWC, SIZE, SIZE)[:, :, 0]
        return self._network((pictures_NCHW - 128) / 128)
