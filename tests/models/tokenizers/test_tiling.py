"""Tiles are exact where a tokenizer looks at one patch at a time, and images have an autoencoder of their own."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megadit.models.shared.errors import UserError
from megadit.models.tokenizers import HaarTokenizer, load_tokenizer, published_tokenizer
from megadit.models.tokenizers.tiling import Tiles, _starts, decode_in_tiles, encode_in_tiles

HAAR = HaarTokenizer(temporal_compression=4, spatial_compression=8)


@dataclass(frozen=True, slots=True)
class TilingError:
    psnr: float
    """PSNR of the tiled against the untiled video, in dB, for values in [-1, 1]."""
    seams: float
    """Seam ratio: mean step of the difference across tile edges, over its mean step elsewhere; 1 means no seam."""


def tiling_error(whole_BCTHW: Tensor, tiled_BCTHW: Tensor, tiles: Tiles, spatial: int) -> TilingError:
    """Difference between a video decoded in tiles and the same decoded at once."""
    difference = tiled_BCTHW.double() - whole_BCTHW.double()
    mean_square = difference.square().mean().item()
    steps_W = difference.diff(dim=-1).abs().mean(dim=(0, 1, 2, 3))
    side, overlap = tiles.side * spatial, tiles.overlap * spatial
    starts = _starts(whole_BCTHW.shape[-1], side, overlap)
    edges = [start - 1 for start in starts[1:]] + [start + side - 1 for start in starts[:-1]]
    is_edge = torch.zeros_like(steps_W, dtype=torch.bool)
    is_edge[edges] = True
    seams = (steps_W[is_edge].mean() / steps_W[~is_edge].mean()).item() if edges and mean_square else 1.0
    return TilingError(math.inf if mean_square == 0 else -10 * math.log10(mean_square / 4), seams)


@pytest.mark.parametrize(
    "tiles", [Tiles(side=4, overlap=1, frames=3, context=1), Tiles(side=5, frames=4, overlap=3, context=3)]
)
@pytest.mark.parametrize("shape", [(1, 64, 72), (33, 40, 104), (9, 24, 24)])
def test_haar_in_tiles_is_exact(tiles, shape):
    video = torch.rand(2, 3, *shape) * 2 - 1
    whole = HAAR.encode(video)
    # blending divides by the weights it multiplied with: the last digit may differ
    torch.testing.assert_close(encode_in_tiles(HAAR.encode, video, tiles, 4, 8), whole, rtol=1e-5, atol=1e-6)
    tiled = decode_in_tiles(HAAR.decode, whole, tiles, 4, 8)
    torch.testing.assert_close(tiled, video, rtol=1e-5, atol=1e-5)
    assert tiling_error(HAAR.decode(whole), tiled, tiles, 8).psnr > 110


def test_wrong_context_would_be_noticed():
    """Negative control: a piece that took its first latent for the video's first is far off."""
    video = torch.rand(1, 3, 33, 16, 16)
    late = HAAR.encode(video[:, :, 4:])
    assert (late[:, :, 0] - HAAR.encode(video)[:, :, 1]).abs().max() > 0.1


def test_seams_are_seen():
    smooth = torch.linspace(0, 1, 64).expand(1, 3, 1, 64, 64)
    tiles = Tiles(side=4, overlap=0, frames=2, context=1)
    with_edge = smooth.clone()
    with_edge[..., 32:] += 0.1
    with_edge += 1e-3 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    error = tiling_error(smooth, with_edge, tiles, 8)
    assert error.seams > 5 and 20 < error.psnr < 40


def test_impossible_tiles_are_refused():
    with pytest.raises(UserError, match="overlap=8 must be at least 0 and smaller than side=8"):
        Tiles(side=8, overlap=8)
    with pytest.raises(UserError, match="context=0"):
        Tiles(context=0)


def test_images_have_an_autoencoder(tmp_path):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    torch.manual_seed(0)
    network = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        latent_channels=4,
        scaling_factor=0.2,
        shift_factor=0.1,
    ).eval()
    network.save_pretrained(tmp_path / "vae")
    tokenizer = published_tokenizer(tmp_path)
    images = torch.rand(2, 3, 3, 16, 24) * 2 - 1
    latents = tokenizer.encode(images)
    assert latents.shape == (2, *tokenizer.latent_shape(3, 16, 24)) == (2, 4, 3, 8, 12)
    with torch.no_grad():
        expected = (network.encode(images[:, :, 1]).latent_dist.mode() - 0.1) * 0.2
        decoded = network.decode(expected / 0.2 + 0.1).sample
    torch.testing.assert_close(latents[:, :, 1], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tokenizer.decode(latents)[:, :, 1], decoded, rtol=1e-4, atol=1e-5)
    tokenizer.save(tmp_path / "saved")
    loaded = load_tokenizer(tmp_path / "saved")
    assert loaded.fingerprint() == tokenizer.fingerprint()
    assert torch.equal(loaded.encode(images), latents)
