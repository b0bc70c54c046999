"""Modules that are trained beside a network for its objective alone, and then discarded.

Shapes: S video tokens, D width, G segments of a pack (padding included).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadit.models.networks.initialize import initial_value

HIDDEN = 256
"""Hidden width of a discriminator head."""


class Uncertainty(nn.Module):
    """u(sigma), the logarithm of the loss to expect at a noise level (EDM2, arXiv 2312.02696, section 3.1).

    A linear function of Fourier features of c_noise, initially zero. It is trained with the network and then discarded.
    """

    def __init__(self, num_features: int = 128) -> None:
        super().__init__()
        generator = torch.Generator("cpu").manual_seed(0)
        # not buffers: these stay float32 whatever the precision of the parameters
        self._frequency = 2 * math.pi * torch.randn(num_features, generator=generator, device="cpu")
        self._phase = 2 * math.pi * torch.rand(num_features, generator=generator, device="cpu")
        self.linear = nn.Linear(num_features, 1, bias=False)
        nn.init.zeros_(self.linear.weight)

    def forward(self, c_noise_G: Tensor) -> Tensor:
        self._frequency, self._phase = (x.to(c_noise_G.device) for x in (self._frequency, self._phase))  # copied once
        frequency, phase = self._frequency, self._phase
        features = math.sqrt(2) * torch.cos(c_noise_G.float()[:, None] * frequency + phase)
        # divided by sqrt(features), because one step of Adam at a large rate could move u by more than its range
        return (features @ self.linear.weight.float().T)[:, 0] / math.sqrt(len(frequency))


def head_parameters(width: int) -> int:
    """Number of parameters of the head of a network of this width."""
    return HIDDEN * (width + 2) + 1


class Adversary(nn.Module):
    """Logits from features in the middle of a network: norm, linear, SiLU, linear, in float32.

    Initially all logits are 0. It is trained with the critic and then discarded.
    """

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(width, HIDDEN), nn.Linear(HIDDEN, 1)
        self.linear_1.weight.data.copy_(initial_value("adversary.linear_1.weight", self.linear_1.weight.shape, seed))
        for parameter in (self.linear_1.bias, *self.linear_2.parameters()):
            nn.init.zeros_(parameter)

    def forward(self, x_S1D: Tensor) -> Tensor:
        """[S, 1, D] -> [S]."""
        h_SD = F.layer_norm(x_S1D[:, 0].float(), x_S1D.shape[-1:])
        for layer in (self.linear_1, self.linear_2):
            h_SD = F.linear(F.silu(h_SD) if layer is self.linear_2 else h_SD, layer.weight.float(), layer.bias.float())
        return h_SD[:, 0]
