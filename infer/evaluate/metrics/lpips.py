"""LPIPS (arXiv 1801.03924): perceptual distance of two pictures by features of AlexNet.

Weights are read from a folder and never downloaded: `alexnet*.pth`, torchvision's network, and `alex.pth`, LPIPS'
weights of its features (included in the package torchmetrics).

Shapes: N pictures, H/W height, width.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadit.models.shared.errors import UserError
from megadit.models.storage.tensor_source import load_pickled

LAYERS = (0, 3, 6, 8, 10)
"""Indices of the convolutions in torchvision's `features` whose rectified outputs are compared."""
CONVOLUTIONS = ((3, 64, 11, 4, 2), (64, 192, 5, 1, 2), (192, 384, 3, 1, 1), (384, 256, 3, 1, 1), (256, 256, 3, 1, 1))
"""(channels in, channels out, kernel, stride, padding)."""
POOLED_BEFORE = (1, 2)
"""Convolutions after a 3x3 max pooling of stride 2."""
SHIFT = (-0.030, -0.088, -0.188)
SCALE = (0.458, 0.448, 0.450)
"""Shift and scale of pictures in [-1, 1]."""
SMALLEST = 64
"""Least pixels of a side; smaller pictures are enlarged, since the network's features would be empty."""


class LPIPS(nn.Module):
    """The distance of pictures N3HW in [-1, 1], [N]."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(into, out, kernel, stride, padding) for into, out, kernel, stride, padding in CONVOLUTIONS
        )
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(out)) for _, out, *_ in CONVOLUTIONS)

    @classmethod
    def load(cls, folder: str | Path) -> "LPIPS":
        """Reads the two files of a folder. Raises UserError if one is missing, or holds other weights."""
        network = cls().eval()
        backbone = load_pickled(_only(Path(folder), "alexnet*.pth"))
        heads = load_pickled(_only(Path(folder), "alex.pth"))
        try:
            with torch.no_grad():
                for convolution, layer in zip(network.convolutions, LAYERS, strict=True):
                    convolution.weight.copy_(backbone[f"features.{layer}.weight"])
                    convolution.bias.copy_(backbone[f"features.{layer}.bias"])
                for number, weight in enumerate(network.weights):
                    weight.copy_(heads[f"lin{number}.model.1.weight"].flatten())
        except (KeyError, RuntimeError, AttributeError, TypeError) as error:
            raise UserError(f"{folder} does not hold the weights of LPIPS with AlexNet: {error}") from None
        return network

    @torch.no_grad()
    def forward(self, a_N3HW: Tensor, b_N3HW: Tensor) -> Tensor:
        a_N3HW, b_N3HW = _large_enough(a_N3HW), _large_enough(b_N3HW)
        distance_N = a_N3HW.new_zeros(len(a_N3HW))
        for a, b, weight in zip(self._features(a_N3HW), self._features(b_N3HW), self.weights, strict=True):
            difference = (_unit(a) - _unit(b)).square()
            distance_N += torch.einsum("nchw,c->nhw", difference, weight).mean((1, 2))
        return distance_N

    def _features(self, x_N3HW: Tensor) -> list[Tensor]:
        shift, scale = (x_N3HW.new_tensor(values)[:, None, None] for values in (SHIFT, SCALE))
        x, found = (x_N3HW - shift) / scale, []
        for number, convolution in enumerate(self.convolutions):
            x = F.max_pool2d(x, 3, 2) if number in POOLED_BEFORE else x
            x = convolution(x).relu()
            found.append(x)
        return found


def _large_enough(x_N3HW: Tensor) -> Tensor:
    factor = SMALLEST / min(x_N3HW.shape[2:])
    return x_N3HW if factor <= 1 else F.interpolate(x_N3HW, scale_factor=factor, mode="bilinear", antialias=False)


def _unit(x_NCHW: Tensor) -> Tensor:
    """Each pixel's features with length 1."""
    return x_NCHW / (x_NCHW.square().sum(1, keepdim=True) + 1e-8).sqrt()


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise UserError(
            f"{folder} holds {len(found)} files {pattern}; LPIPS needs one: see infer/evaluate/metrics/lpips.py"
        )
    return found[0]
