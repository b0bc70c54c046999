import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json, write_json
from megadit.models.tokenizers import HaarTokenizer, haar, load_tokenizer
from megadit.models.tokenizers.haar import haar_matrix, psnr


def moving_squares(count, frames=9, seed=0):
    """Coloured squares that drift over a black background: clips with the statistics of the digits, roughly."""
    generator = torch.Generator().manual_seed(seed)
    video = torch.full((count, 3, frames, 32, 32), -1.0)
    for clip in video:
        colour = torch.randint(0, 2, (3, 1, 1), generator=generator) * 2.0 - 1.0
        side = int(torch.randint(6, 14, (), generator=generator))
        x, y = torch.randint(6, 12, (2,), generator=generator).tolist()
        dx, dy = torch.randint(-1, 2, (2,), generator=generator).tolist()
        for frame in range(frames):
            top, left = y + dy * frame // 2, x + dx * frame // 2
            clip[:, frame, top : top + side, left : left + side] = colour
    return video


SMALL = {"temporal_compression": 2, "spatial_compression": 4}  # 96 coefficients: quick to fit


@pytest.fixture(scope="module")
def fitted():
    return HaarTokenizer.fit([moving_squares(64), moving_squares(64, frames=1, seed=1)])


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_haar_matrix_is_orthonormal(size):
    matrix = haar_matrix(size).double()
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-6)


def test_haar_matrix_of_four():
    root = 1 / math.sqrt(2)
    expected = [[0.5, 0.5, 0.5, 0.5], [0.5, 0.5, -0.5, -0.5], [root, -root, 0, 0], [0, 0, root, -root]]
    torch.testing.assert_close(haar_matrix(4), torch.tensor(expected))


@pytest.mark.parametrize("temporal", [1, 2, 4, 8])
@pytest.mark.parametrize("spatial", [2, 4, 8, 16])
def test_without_pca_nothing_is_lost(temporal, spatial):
    tokenizer = HaarTokenizer(temporal_compression=temporal, spatial_compression=spatial)
    for frames, height, width in ((1, 16, 48), (1 + 2 * temporal, 32, 16)):
        video = torch.rand(2, 3, frames, height, width, generator=torch.Generator().manual_seed(0)) * 2 - 1
        latents = tokenizer.encode(video)
        assert tuple(latents.shape) == (2, *tokenizer.latent_shape(frames, height, width))
        assert latents.shape[1] == 3 * temporal * spatial**2 == tokenizer.latent_channels
        # Three orthonormal float32 products: a few units in the last place of 1.
        assert (tokenizer.decode(latents) - video).abs().max() <= 1e-6


def test_transform_keeps_the_energy_of_each_patch():
    """So that the latents of a lossless tokenizer have the standard deviation of the pixels."""
    tokenizer = HaarTokenizer()
    video = torch.randn(1, 3, 9, 16, 16, generator=torch.Generator().manual_seed(0))
    latents = tokenizer.encode(video)
    torch.testing.assert_close(latents[:, :, 1:].square().sum(), video[:, :, 1:].square().sum())


@pytest.mark.parametrize("is_fitted", [False, True])
def test_latents_do_not_depend_on_later_frames(fitted, is_fitted):
    tokenizer = fitted if is_fitted else HaarTokenizer()
    video = moving_squares(2)
    changed = video.clone()
    changed[:, :, 5:] = torch.rand(2, 3, 4, 32, 32, generator=torch.Generator().manual_seed(0))
    latents, others = tokenizer.encode(video), tokenizer.encode(changed)
    torch.testing.assert_close(latents[:, :, :2], others[:, :, :2], rtol=0, atol=1e-6)
    assert (latents[:, :, 2] - others[:, :, 2]).abs().max() > 0.1
    torch.testing.assert_close(tokenizer.encode(video[:, :, :1]), latents[:, :, :1], rtol=0, atol=1e-6)


def test_a_batch_has_the_latents_and_pixels_of_its_videos_and_is_transformed_a_few_at_once(fitted, monkeypatch):
    videos = moving_squares(5)
    latents, at_once = fitted.encode(videos), []
    monkeypatch.setattr(haar, "_PIXELS_AT_ONCE", 2 * videos[0].numel())
    of_few = haar.HaarTokenizer._to_coefficients
    monkeypatch.setattr(haar.HaarTokenizer, "_to_coefficients", lambda *a: at_once.append(len(a[1])) or of_few(*a))
    assert torch.equal(fitted.encode(videos), latents) and at_once == [2, 2, 1]
    alone = torch.cat([fitted.decode(latents_CTHW[None]) for latents_CTHW in latents])
    assert torch.equal(fitted.decode(latents), alone)
    assert fitted.encode(videos[:0]).shape == (0, *latents.shape[1:])


@pytest.mark.parametrize("frames", [1, 9])
@pytest.mark.parametrize("is_fitted", [False, True])
def test_graphs_convolve_to_the_same_latents(fitted, monkeypatch, is_fitted, frames):
    tokenizer, video = fitted if is_fitted else HaarTokenizer(**SMALL), moving_squares(2, frames)
    latents = tokenizer.encode(video)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(haar, "_along_each", None)
    torch.testing.assert_close(tokenizer.encode(video), latents, rtol=1e-5, atol=1e-5)


def test_first_frame_has_no_temporal_detail():
    """An image uses the same channels as a still clip: all differences in time are zero."""
    tokenizer = HaarTokenizer()
    latents = tokenizer.encode(moving_squares(2, frames=1)).unflatten(1, (3, 4, 8, 8))
    assert latents[:, :, 0].abs().max() > 1
    assert latents[:, :, 1:].abs().max() < 1e-6


def test_sizes_that_do_not_divide_name_the_nearest():
    tokenizer = HaarTokenizer()
    for size, message in (
        ((8, 32, 32), "8 frames .* 5 or 9"),
        ((0, 32, 32), "0 frames .* a multiple of 4, 1$"),
        ((9, 30, 32), "height 30 .* 24 or 32"),
        ((9, 32, 5), "width 5 .* a multiple of 8, 8$"),
    ):
        with pytest.raises(UserError, match=message):
            tokenizer.latent_shape(*size)
    with pytest.raises(UserError, match="6 frames .* 5 or 9"):
        tokenizer.encode(torch.zeros(1, 3, 6, 32, 32))


def test_frames_covering_is_the_smallest_valid_count():
    for temporal in (1, 2, 4, 8):
        tokenizer = HaarTokenizer(temporal_compression=temporal)
        for frames in range(1, 30):
            covering = tokenizer.frames_covering(frames)
            tokenizer.latent_shape(covering, 8, 8)
            assert frames <= covering < frames + temporal


def test_unsupported_factors_are_refused():
    with pytest.raises(UserError, match="temporal_compression=3 .* 1, 2, 4, 8"):
        HaarTokenizer(temporal_compression=3)
    with pytest.raises(UserError, match="spatial_compression=3 .* 1, 2, 4, 8, 16"):
        HaarTokenizer(spatial_compression=3)


def test_with_factors_of_one_latents_are_the_pixels():
    tokenizer = HaarTokenizer(temporal_compression=1, spatial_compression=1)
    video_BCTHW = torch.rand(2, 3, 4, 5, 7) * 2 - 1
    assert tokenizer.latent_shape(4, 5, 7) == (3, 4, 5, 7)
    assert torch.equal(tokenizer.encode(video_BCTHW), video_BCTHW)
    assert torch.equal(tokenizer.decode(video_BCTHW), video_BCTHW)


def test_fitted_latents_are_normalised(fitted):
    """Over the videos that the PCA was fitted to, in which each latent frame counts once."""
    latents = torch.cat(
        [
            fitted.encode(videos).transpose(0, 1).flatten(1)
            for videos in (moving_squares(64), moving_squares(64, frames=1, seed=1))
        ],
        dim=1,
    )
    assert latents.shape[0] == fitted.latent_channels == 32
    torch.testing.assert_close(latents.mean(dim=1), torch.zeros(32), rtol=0, atol=1e-5)
    assert latents.square().mean().sqrt().item() == pytest.approx(fitted.sigma_data, rel=1e-4)
    covariance = latents @ latents.T / latents.shape[1]
    assert (covariance - covariance.diag().diag()).abs().max() < 1e-4


def test_whitening_is_a_power_of_the_standard_deviation():
    videos = moving_squares(32)
    plain = HaarTokenizer.fit([videos], channels=8, whitening=0.0, **SMALL)
    std = plain.encode(videos).std(dim=(0, 2, 3, 4))
    for whitening in (0.5, 1.0):
        whitened = HaarTokenizer.fit([videos], channels=8, whitening=whitening, **SMALL)
        found = whitened.encode(videos).std(dim=(0, 2, 3, 4))
        torch.testing.assert_close(found / found[0], (std / std[0]) ** (1 - whitening), rtol=1e-3, atol=1e-3)
        assert whitened.reconstruction_psnr == pytest.approx(plain.reconstruction_psnr, abs=0.02)


def test_more_components_reconstruct_better_than_fewer_and_than_the_mean():
    """On held-out clips, and as the fitted tokenizer reports of its own."""
    train, held_out = [moving_squares(64)], [moving_squares(16, seed=7)]
    mean_video = train[0].mean(dim=(0, 2, 3, 4), keepdim=True)
    baseline = 10 * math.log10(4 / (held_out[0] - mean_video).square().mean().item())
    tokenizers = [HaarTokenizer.fit(train, channels=channels, **SMALL) for channels in (4, 16)]
    fewer, more = (psnr(tokenizer, held_out) for tokenizer in tokenizers)
    assert baseline + 3 < fewer < more - 2, (baseline, fewer, more)
    for tokenizer in tokenizers:
        assert tokenizer.reconstruction_psnr == pytest.approx(psnr(tokenizer, train), abs=0.01)


@pytest.mark.parametrize("sizes", [SMALL, {"temporal_compression": 1, "spatial_compression": 4}])
@pytest.mark.parametrize("frames", [[1], [9], [5, 1]])
def test_other_numbers_of_channels_give_what_was_foreseen(frames, sizes):
    """Of images, of clips and of both: without encoding anything again."""
    videos = [moving_squares(16, frames=count, seed=count) for count in frames]
    _, foreseen = HaarTokenizer.fit_at_most(videos, 6, [4, 8, 12, 90], **sizes)
    assert [4, 8, 12] == [count for count in foreseen if count < 90], "moving squares have at least twelve components"
    for count in (4, 8, 12):
        fitted = HaarTokenizer.fit(videos, count, **sizes)
        assert foreseen[count] == pytest.approx(fitted.reconstruction_psnr, abs=0.02), "rounded, in float32"


def test_channels_that_there_are_no_components_for_are_not_foreseen():
    grey = torch.linspace(-1, 1, 8).reshape(8, 1, 1, 1, 1).expand(8, 3, 5, 8, 8)
    _, foreseen = HaarTokenizer.fit_at_most([grey], 1, [1, 2], **SMALL)
    assert list(foreseen) == [1]


def test_fitting_is_deterministic_up_to_the_order_of_batches():
    videos = moving_squares(32)
    whole = HaarTokenizer.fit([videos], channels=8, **SMALL)
    chunked = HaarTokenizer.fit([videos[16:], videos[:16]], channels=8, **SMALL)
    torch.testing.assert_close(whole.pca.basis_RC, chunked.pca.basis_RC, rtol=0, atol=1e-5)
    largest = whole.pca.basis_RC.gather(0, whole.pca.basis_RC.abs().argmax(dim=0, keepdim=True))
    assert (largest > 0).all()


def test_few_videos_have_few_channels():
    """A picture of four places has no more components than these differ in."""
    videos = [torch.rand(1, 3, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1]
    fitted = HaarTokenizer.fit(videos, channels=90, **SMALL)
    assert 0 < fitted.latent_channels < 5
    assert HaarTokenizer.fit(videos, channels=fitted.latent_channels, **SMALL).fingerprint() == fitted.fingerprint()


def test_fit_refuses_what_it_cannot_fit():
    with pytest.raises(UserError, match="there are none"):
        HaarTokenizer.fit([])
    with pytest.raises(UserError, match="only 0 principal components"):
        HaarTokenizer.fit([torch.zeros(4, 3, 5, 16, 16)], channels=4, **SMALL)
    with pytest.raises(UserError, match="channels=769 .* 768"):
        HaarTokenizer.fit([moving_squares(4)], channels=769)


@pytest.mark.parametrize("is_fitted", [False, True])
def test_saving_and_loading_gives_the_same_latents(tmp_path, fitted, is_fitted):
    tokenizer = fitted if is_fitted else HaarTokenizer(temporal_compression=2, spatial_compression=4)
    tokenizer.save(tmp_path)
    assert (tmp_path / "model.safetensors").exists() == is_fitted
    assert read_json(tmp_path / "config.json")["reconstruction_psnr"] == tokenizer.reconstruction_psnr
    loaded = load_tokenizer(tmp_path)
    video = moving_squares(2)
    assert torch.equal(loaded.encode(video), tokenizer.encode(video))
    assert loaded.fingerprint() == tokenizer.fingerprint()
    assert loaded.sigma_data == tokenizer.sigma_data and loaded.latent_channels == tokenizer.latent_channels


def test_fingerprints_differ_where_latents_do(fitted, tmp_path):
    fitted.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["basis_RC"][0, 0] += 1e-3
    save_file(tensors, tmp_path / "model.safetensors")
    tokenizers = [fitted, load_tokenizer(tmp_path), HaarTokenizer(), HaarTokenizer(spatial_compression=4)]
    assert len({tokenizer.fingerprint() for tokenizer in tokenizers}) == 4


def test_loading_tells_what_is_wrong(fitted, tmp_path):
    with pytest.raises(UserError, match="config.json does not exist"):
        load_tokenizer(tmp_path)
    fitted.save(tmp_path)
    config = read_json(tmp_path / "config.json")
    for change, message in (
        (
            {"type": "cosmic"},
            "unknown tokenizer type 'cosmic'; this version knows autoencoder_kl, cosmos,",
        ),
        ({"spatial_compresion": 8}, "did you mean 'spatial_compression'"),
        ({"channels": 16}, "asks for the tensors"),
    ):
        write_json(tmp_path / "config.json", config | change)
        with pytest.raises(UserError, match=message):
            load_tokenizer(tmp_path)
    write_json(tmp_path / "config.json", {name: value for name, value in config.items() if name != "sigma_data"})
    with pytest.raises(UserError, match="'sigma_data' is missing"):
        load_tokenizer(tmp_path)
    write_json(tmp_path / "config.json", config)
    for content, message in (
        (b"nonsense", "is longer than"),
        (b"\x08" + bytes(7) + b"nonsense", "is not a readable safetensors"),
    ):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(UserError, match=message):
            load_tokenizer(tmp_path)
