"""One random network, as a directory of diffusers and as a `.jit`, is the same tokenizer."""

import dataclasses
import json
import math
import pickle
import shutil
import zipfile

import pytest
import torch
import torch.nn.functional as F

from megadit.models.commands.convert import main as convert
from megadit.models.shared.errors import UserError
from megadit.models.storage.tensor_archive import read_archive
from megadit.models.tokenizers import load_tokenizer, published_tokenizer
from megadit.models.tokenizers.released_cosmos import diffusers_names
from megadit.models.tokenizers.tiling import Tiles
from tests.half_products import counted_half_products, without_half_products
from tests.models.tokenizers.test_cosmos_image import write_jit
from tests.models.tokenizers.test_tiling import tiling_error

TO_RELEASED = (
    ("mid_block.resnets.0", "mid.block_1"),
    ("mid_block.resnets.1", "mid.block_2"),
    ("mid_block.attentions.0", "mid.attn_1.0"),
    ("mid_block.temp_attentions.0", "mid.attn_1.1"),
    (".conv_s.", ".0.conv3d."),
    (".conv_t.", ".1.conv3d."),
    (".conv_shortcut.", ".nin_shortcut.conv3d."),
    (".to_out.0.", ".proj_out.conv3d."),
    (".to_q.", ".q.conv3d."),
    (".to_k.", ".k.conv3d."),
    (".to_v.", ".v.conv3d."),
    ("downsamplers.0.conv", "downsample.conv"),
    ("upsamplers.0.conv", "upsample.conv"),
    (".resnets.", ".block."),
    ("down_blocks.", "down."),
)


def released_name(name, num_up):
    for ours, theirs in TO_RELEASED:
        name = name.replace(ours, theirs)
    for level in range(num_up):
        name = name.replace(f"up_blocks.{level}.", f"up.{num_up - 1 - level}.")
    if "sample.conv" in name or name.startswith(("quant_conv", "post_quant_conv")):
        head, tail = name.rsplit(".", 1)
        name = f"{head}.conv3d.{tail}"
    return name


def write_released(network, path):
    """The tensors under the released names, as TorchScript."""
    num_up = len(network.decoder.up_blocks)
    tensors = {released_name(name, num_up): tensor for name, tensor in network.state_dict().items()}
    write_jit(tensors, path, ("encoder.patcher3d.wavelets", "encoder.patcher3d._arange"))


@pytest.fixture(scope="module", params=[4, 8])
def published(request, tmp_path_factory, make_cosmos_autoencoder):
    """(network, directory of diffusers, directory of the released form)."""
    path = tmp_path_factory.mktemp("published")
    network = make_cosmos_autoencoder(request.param, statistics=request.param == 8)
    network.save_pretrained(path / "diffusers")
    released = path / f"Cosmos-Tokenizer-CV{request.param}x8x8"
    write_released(network, released / "autoencoder.jit")
    if request.param == 8:
        table = [torch.tensor(network.config[name]).reshape(4, 3) for name in ("latents_mean", "latents_std")]
        torch.save(tuple(table), released / "mean_std.pt")
    return network, path / "diffusers", released


@pytest.fixture(scope="module")
def tokenizer(published):
    return published_tokenizer(published[1])


def random_video(frames=9, height=32, width=48, batch=1):
    return torch.rand(batch, 3, frames, height, width, generator=torch.Generator().manual_seed(frames)) * 2 - 1


def test_a_processor_without_bfloat16_computes_in_float32(tokenizer):
    video = random_video()
    with without_half_products(), counted_half_products() as counted:
        half = dataclasses.replace(tokenizer, dtype="bfloat16")
        latents = half.encode(video)
        half.decode(latents)
    assert not counted and torch.equal(latents, tokenizer.encode(video))


def test_jit_and_diffusers_give_the_same_tokenizer(published, tokenizer):
    network, _, released = published
    ours, from_jit = tokenizer, published_tokenizer(released)
    assert from_jit.network.config == ours.network.config
    assert from_jit.fingerprint() == ours.fingerprint()
    video = random_video()
    latents = ours.encode(video)
    assert torch.equal(latents, from_jit.encode(video))
    assert torch.equal(ours.decode(latents), from_jit.decode(latents))
    with torch.no_grad():
        z = network.encode(video).latent_dist.mode()
        expected = network.decode(z).sample
    if network.config.latents_mean is not None:
        tables = (torch.tensor(network.config[name]).reshape(1, 4, 3, 1, 1) for name in ("latents_mean", "latents_std"))
        mean, std = (table[:, :, : z.shape[2]] for table in tables)
        z = (z - mean) / std
    torch.testing.assert_close(latents, 0.5 * z, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.decode(latents), expected, rtol=1e-4, atol=1e-4)


def test_a_compression_is_taken_if_it_fits(published, tmp_path, capsys):
    released = published[2] / "autoencoder.jit"
    size = released.parent.name.rpartition("CV")[2]
    assert convert([str(released), str(tmp_path / "right"), "--compression", size]) == 0
    assert convert([str(released), str(tmp_path / "wrong"), "--compression", "2x2x2"]) == 2
    assert "does not fit a compression of 2x2x2" in capsys.readouterr().err


def test_names_are_those_of_the_whole_network(published):
    network, _, released = published
    whole = read_archive(released / "autoencoder.jit")
    assert set(diffusers_names(whole.stored).values()) == set(network.state_dict())


def reconstruct(tokenizer, video_BCTHW):
    """decode(encode(video)), BCTHW of any size: edges are repeated to a size that can be encoded, and cropped again."""
    frames, height, width = video_BCTHW.shape[2:]
    side = tokenizer.spatial_compression
    missing = (
        tokenizer.frames_covering(frames) - frames,
        math.ceil(height / side) * side - height,
        math.ceil(width / side) * side - width,
    )
    padded = F.pad(video_BCTHW.float(), (0, missing[2], 0, missing[1], 0, missing[0]), mode="replicate")
    return tokenizer.decode(tokenizer.encode(padded))[:, :, :frames, :height, :width]


@pytest.mark.parametrize(("frames", "height", "width"), [(1, 30, 41), (10, 17, 33)])
def test_any_clip_comes_back_in_its_size(tokenizer, frames, height, width):
    assert reconstruct(tokenizer, random_video(frames, height, width)).shape == (1, 3, frames, height, width)


def test_121_frames(tokenizer):
    video = random_video(121, 15, 11)
    assert reconstruct(tokenizer, video).shape == video.shape
    assert tokenizer.latent_shape(121, 16, 16) == (4, 1 + 120 // tokenizer.temporal_compression, 2, 2)


def test_the_first_latent_depends_on_no_later_frame(tokenizer):
    video = random_video(9 + 8)
    changed = video.clone()
    changed[:, :, 1:] = random_video(16)
    before, after = tokenizer.encode(video), tokenizer.encode(changed)
    # the same sums, over clips of the same shape
    torch.testing.assert_close(before[:, :, 0], after[:, :, 0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(before[:, :, :1], tokenizer.encode(video[:, :, :1]), rtol=1e-4, atol=1e-5)
    assert (before[:, :, 1] - after[:, :, 1]).abs().max() > 1e-3
    assert (before[:, :, -1] - tokenizer.encode(video.flip(2))[:, :, -1]).abs().max() > 1e-3


def test_saving_and_loading(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.fingerprint() == tokenizer.fingerprint() and loaded.tiles == tokenizer.tiles
    assert torch.equal(loaded.encode(random_video()), tokenizer.encode(random_video()))


def test_tiles_bound_memory_and_come_close(tokenizer):
    whole, tiles = tokenizer, Tiles(side=8, overlap=4, frames=6, context=2)
    tiled = dataclasses.replace(whole, tiles=tiles)
    latents = whole.encode(random_video(33, 64, 72))
    largest = []
    decode = whole.network.module.decode
    whole.network.module.decode = lambda z, **options: largest.append(z.shape) or decode(z, **options)
    try:
        out = tiled.decode(latents)
    finally:
        del whole.network.module.decode
    assert max(shape[2] for shape in largest) <= 6 and max(*largest[0][3:]) <= 8
    expected = whole.decode(latents)
    error = tiling_error(expected, out, tiles, 8)
    signal = expected.std().item()
    # a random network's global norms differ from tile to tile: close, not equal, and no visible edge
    assert error.psnr > -20 * torch.tensor(signal / 2).log10().item() and error.seams < 3


def test_sizes_that_cannot_be_encoded_name_their_neighbours(tokenizer):
    with pytest.raises(UserError, match="10 frames cannot be encoded: take 1 \\+ a multiple of"):
        tokenizer.encode(random_video(10))
    with pytest.raises(UserError, match="width 44 cannot be encoded: take a multiple of 8, 40 or 48"):
        tokenizer.encode(random_video(9, 32, 44))


class Attack:
    def __reduce__(self):
        import os

        return os.system, ("touch pwned",)


def test_hostile_and_damaged_archives_are_refused(published, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jit = published[2] / "autoencoder.jit"
    hostile = tmp_path / "hostile.jit"
    with zipfile.ZipFile(hostile, "w") as archive:
        archive.writestr("hostile/data.pkl", pickle.dumps(Attack()))
    with pytest.raises(UserError, match=r"hostile.jit cannot be read: it asks for .*system, which no archive"):
        published_tokenizer(hostile)
    assert not (tmp_path / "pwned").exists()
    cut = tmp_path / "cut.jit"
    cut.write_bytes(jit.read_bytes()[:-2000])
    with pytest.raises(UserError, match="cut.jit cannot be read"):
        published_tokenizer(cut)
    short = tmp_path / "short.jit"
    with zipfile.ZipFile(jit) as source, zipfile.ZipFile(short, "w") as archive:
        for info in source.infolist():
            data = source.read(info)
            archive.writestr(info.filename, data[:-4] if "/data/" in info.filename else data)
    with pytest.raises(UserError, match="it was cut"):
        published_tokenizer(short)
    with pytest.raises(UserError, match="does not exist"):
        published_tokenizer(tmp_path / "none.jit")


def test_another_network_is_named(published, tmp_path):
    (tmp_path / "config.json").write_text('{"_class_name": "VQModel"}')
    with pytest.raises(UserError, match="holds a VQModel, not one of AutoencoderKLCosmos, Cosmos"):
        published_tokenizer(tmp_path)


def test_settings_of_the_future_are_named(published, tokenizer, tmp_path):
    config = json.loads((published[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"use_time_travel": True}))
    shutil.copy(published[1] / "diffusion_pytorch_model.safetensors", tmp_path)
    with pytest.raises(UserError, match=r"diffusers .* cannot build this AutoencoderKLCosmos: .*use_time_travel"):
        published_tokenizer(tmp_path)
    tokenizer.save(tmp_path / "saved")
    config = json.loads((tmp_path / "saved/config.json").read_text())
    (tmp_path / "saved/config.json").write_text(json.dumps(config | {"time_travel": True}))
    with pytest.raises(UserError, match=r"unknown setting 'time_travel'; was it written by a newer version\?"):
        load_tokenizer(tmp_path / "saved")
