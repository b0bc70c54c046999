"""Extractor without a download: features of the demo's classifier of moving digits, before its last layer.

The network reads single frames from crops around the ink; colour and position, which it ignores, are added as features.

Shapes: B clips or frames, C colour channels, T/H/W frames, height, width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CROP_SIZE = 16
CROP_EXTENT = 0.75
"""Side of the square around the centre of mass that the network reads, as a fraction of the frame."""
_LAST = 8
"""The modules of the network up to the features of its last convolution."""
_LOGIT_SCALE = 0.2
"""Scale of the logits, to match the size of those features."""
_NUM_OTHERS = 36
"""Features of a frame in addition to the logits: 32 of the last convolution, 3 of the colour, 1 of the ink."""


class DigitReader(nn.Module):
    """Classifies the digit in single frames from its strokes, independent of colour and position.

    With more than ten classes it classifies other shapes too.
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(32 * (CROP_SIZE // 4) ** 2, num_classes),
        )

    def forward(self, crop_BHW: Tensor) -> Tensor:
        """Logits [B, classes] of crops made by `centred_crops`."""
        return self.network(crop_BHW[:, None])

    def features(self, crop_BHW: Tensor) -> Tensor:
        """Features of the last convolution, each a mean over the crop, and scaled logits, [B, 32 + classes].

        The means alone do not distinguish strokes from patches of the same brightness.
        """
        last_BCHW = self.network[:_LAST](crop_BHW[:, None])
        return torch.cat([last_BCHW.mean((2, 3)), _LOGIT_SCALE * self.network[_LAST:](last_BCHW)], dim=1)


def strokes(video_BCTHW: Tensor) -> Tensor:
    """Brightness of the strokes, 0..1, BTHW: the largest channel, which the palette draws at nearly full strength."""
    return ((video_BCTHW.amax(1) + 1) / 2).clamp(0, 1)


def centres_of_mass(stroke_BHW: Tensor) -> Tensor:
    """Centre (height, width) of the ink in pixels from the middle of the frame, [B, 2]; zero without ink."""
    rows_H, columns_W = (torch.arange(size) - (size - 1) / 2 for size in stroke_BHW.shape[1:])
    mass_B = stroke_BHW.sum((1, 2)).clamp_min(1e-6)
    return torch.stack([(stroke_BHW.sum(2) @ rows_H) / mass_B, (stroke_BHW.sum(1) @ columns_W) / mass_B], dim=1)


def centred_crops(stroke_BHW: Tensor, linear_B22: Tensor | None = None, shift_B2: Tensor | None = None) -> Tensor:
    """Squares around the ink, resampled to CROP_SIZE; optionally distorted by a linear map and a shift (augmentation).

    Args:
        linear_B22: maps (width, height) in the crop to (width, height) in the frame; identity by default.
        shift_B2: (height, width) in pixels.
    """
    centre_B2 = centres_of_mass(stroke_BHW) if shift_B2 is None else centres_of_mass(stroke_BHW) + shift_B2
    linear_B22 = torch.eye(2).expand(len(stroke_BHW), 2, 2) if linear_B22 is None else linear_B22
    height, width = stroke_BHW.shape[1:]
    translation_B21 = (centre_B2 / torch.tensor([height / 2, width / 2])).flip(1)[:, :, None]
    affine_B23 = torch.cat([CROP_EXTENT * linear_B22, translation_B21], dim=2)
    grid = F.affine_grid(affine_B23, [len(stroke_BHW), 1, CROP_SIZE, CROP_SIZE], align_corners=False)
    return F.grid_sample(stroke_BHW[:, None], grid, align_corners=False)[:, 0]


class DigitPictures:
    """Features of a frame: the last layers, the mean colour of the strokes, and the fraction of ink."""

    name, sees, fewest_frames = "digits", "pictures", 1
    protocol = "crops of 16x16 around the ink, last convolution and logits"

    def __init__(self, reader: DigitReader, fingerprint: str) -> None:
        self.reader, self.fingerprint = reader, fingerprint
        self.width = _NUM_OTHERS + reader.num_classes

    def __call__(self, video_BTHWC: Tensor) -> Tensor:
        return _frame_features(self.reader, _scaled(video_BTHWC))[:, 0]


class DigitClips:
    """Features of a clip: those of its frames, their changes between frames, and the path of the ink.

    The path is the mean step and the mean change of the step, in pixels along height and width: a digit that stands
    still or jumps is far from one that moves evenly.
    """

    name, sees, fewest_frames = "digits", "clips", 3
    protocol = "crops of 16x16 around the ink of all frames, last convolution and logits, and its way"

    def __init__(self, reader: DigitReader, fingerprint: str) -> None:
        self.reader, self.fingerprint = reader, fingerprint
        self.width = 2 * (_NUM_OTHERS + reader.num_classes) + 4

    def __call__(self, video_BTHWC: Tensor) -> Tensor:
        video_BCTHW = _scaled(video_BTHWC)
        features_BTD = _frame_features(self.reader, video_BCTHW)
        stroke_BTHW = strokes(video_BCTHW)
        centre_BT2 = centres_of_mass(stroke_BTHW.flatten(0, 1)).reshape(*stroke_BTHW.shape[:2], 2)
        step_BT2 = centre_BT2.diff(dim=1)
        change = [features_BTD.diff(dim=1).abs().mean(1), step_BT2.mean(1), step_BT2.diff(dim=1).abs().mean(1)]
        return torch.cat([features_BTD.mean(1), *change], dim=1)


def _scaled(video_BTHWC: Tensor) -> Tensor:
    """BCTHW in [-1, 1]."""
    return video_BTHWC.cpu().permute(0, 4, 1, 2, 3).float() / 127.5 - 1


@torch.inference_mode()
def _frame_features(reader: DigitReader, video_BCTHW: Tensor) -> Tensor:
    """Features of each frame, [B, T, 36 + classes]."""
    stroke_BTHW = strokes(video_BCTHW)
    last_ND = reader.features(centred_crops(stroke_BTHW.flatten(0, 1)))
    weight_B1THW = stroke_BTHW[:, None] ** 2
    colour_BCT = ((video_BCTHW + 1) / 2 * weight_B1THW).sum((3, 4)) / weight_B1THW.sum((3, 4)).clamp_min(1e-6)
    ink_BT1 = stroke_BTHW.mean((2, 3))[..., None]
    return torch.cat([last_ND.reshape(*ink_BT1.shape[:2], -1), colour_BCT.mT, ink_BT1], dim=2)
