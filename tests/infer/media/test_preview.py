import numpy as np
import pytest
import torch

from megadit.infer.media.preview import fit_preview
from megadit.models.tokenizers import HaarTokenizer


@pytest.mark.parametrize(("temporal", "spatial"), [(4, 8), (1, 2)])
def test_shows_what_a_lossless_tokenizer_decodes_to(temporal, spatial):
    tokenizer = HaarTokenizer(temporal_compression=temporal, spatial_compression=spatial)
    preview = fit_preview(tokenizer)
    colours = 1.6 * torch.rand(1, 3, 3, 4, 5, generator=torch.Generator().manual_seed(0)) - 0.8
    frames = colours.repeat_interleave(spatial, 3).repeat_interleave(spatial, 4)
    video = torch.cat([frames[:, :, :1], frames[:, :, 1:].repeat_interleave(temporal, 2)], dim=2)
    shown = preview(tokenizer.encode(video))
    expected = ((frames + 1) * 127.5).permute(0, 2, 3, 4, 1).numpy()
    # The decoder is linear, so that the map is exact but for the ridge.
    assert np.abs(shown - expected).max() < 3
    # Negative control: another order of the colours is far away.
    assert np.abs(shown - expected[..., ::-1]).max() > 30


def test_a_compressing_tokenizer_and_images():
    generator = torch.Generator().manual_seed(0)
    videos = [torch.rand(4, 3, 5, 16, 16, generator=generator) * 2 - 1]
    tokenizer = HaarTokenizer.fit(videos, channels=8, temporal_compression=4, spatial_compression=8)
    preview = fit_preview(tokenizer)
    assert preview(torch.zeros(2, 8, 1, 3, 4)).shape == (2, 1, 24, 32, 3)
