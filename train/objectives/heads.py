"""The discriminator head of a critic, which is trained beside it and then discarded.

Shapes: S video tokens, D width.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from megadit.models.networks.initialize import initial_value

HIDDEN = 256
"""Hidden width of a discriminator head."""


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
