"""The Cosmos image tokenizers: the released network, written down from its description, equals ours."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megadit.models.shared.errors import UserError
from megadit.models.tokenizers import load_tokenizer, published_tokenizer
from megadit.models.tokenizers.cosmos_image import CosmosImageNetwork

SETTINGS = dict(first_width=32, num_layers=2, z_channels=5, latent_channels=6)
SHAPES = {
    "CI8x8": dict(widths=[64, 32, 32], num_halvings=1, patch_size=4),
    "CI16x16": dict(widths=[32, 64, 64], num_halvings=2, patch_size=4),
}


def random_network(name):
    torch.manual_seed(0)
    network = CosmosImageNetwork(**SETTINGS, **SHAPES[name])
    for parameter in network.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, mean=0.5, std=0.2)
        else:
            nn.init.kaiming_normal_(parameter)
    return network.eval()


def write_jit(tensors, path, constants=("encoder.patcher.wavelets",)):
    """Tensors, and constants as the released files hold them, as TorchScript."""
    root = nn.Module()
    for name, tensor in (tensors | dict.fromkeys(constants, torch.ones(2))).items():
        *modules, leaf = name.split(".")
        place = root
        for module in modules:
            if module not in place._modules:
                place.add_module(module, nn.Module())
            place = place._modules[module]
        place.register_buffer(leaf, tensor)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.jit.script(root).save(path)


@pytest.fixture(scope="module", params=SHAPES)
def released(request, tmp_path_factory):
    """(network, directory of its whole .jit)."""
    path = tmp_path_factory.mktemp("ci") / f"Cosmos-0.1-Tokenizer-{request.param}"
    network = random_network(request.param)
    write_jit(dict(network.state_dict()), path / "autoencoder.jit")
    return network, path


# ------------------------------------------------------------------------------- the network, from its description


def conv(w, name, x, **options):
    return F.conv2d(x, w[f"{name}.weight"], w[f"{name}.bias"], **options)


def norm(w, name, x):
    return F.group_norm(x, 32, w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-6)


def swish(x):
    return x * torch.sigmoid(x)


def residual(w, name, x):
    h = conv(w, f"{name}.conv1", swish(norm(w, f"{name}.norm1", x)), padding=1)
    h = conv(w, f"{name}.conv2", swish(norm(w, f"{name}.norm2", h)), padding=1)
    return (conv(w, f"{name}.nin_shortcut", x) if f"{name}.nin_shortcut.weight" in w else x) + h


def middle(w, name, x):
    x = residual(w, f"{name}.block_1", x)
    h = norm(w, f"{name}.attn_1.norm", x)
    q, k, v = (conv(w, f"{name}.attn_1.{one}", h).flatten(2) for one in "qkv")
    weights = torch.softmax(q.transpose(1, 2) @ k / math.sqrt(q.shape[1]), dim=2)
    h = (v @ weights.transpose(1, 2)).reshape(x.shape)
    return residual(w, f"{name}.block_2", x + conv(w, f"{name}.attn_1.proj_out", h))


def haar(x):
    """Low and high pass along the width, then along the height, by convolutions; halved."""
    low, high = torch.tensor([0.5**0.5, 0.5**0.5]), torch.tensor([0.5**0.5, -(0.5**0.5)])
    groups = x.shape[1]

    def along(x, kernel, shape, stride):
        return F.conv2d(x, kernel.reshape(1, 1, *shape).repeat(groups, 1, 1, 1), groups=groups, stride=stride)

    wide = [along(x, kernel, (1, 2), (1, 2)) for kernel in (low, high)]
    return torch.cat([along(one, kernel, (2, 1), (2, 1)) for one in wide for kernel in (low, high)], dim=1) / 2


def encoded(w, x, halvings):
    x = conv(w, "encoder.conv_in", haar(haar(x)), padding=1)
    for level in range(3):
        for block in range(2):
            x = residual(w, f"encoder.down.{level}.block.{block}", x)
        if level < halvings:
            x = conv(w, f"encoder.down.{level}.downsample.conv", F.pad(x, (0, 1, 0, 1)), stride=2)
    x = middle(w, "encoder.mid", x)
    return conv(w, "quant_conv", conv(w, "encoder.conv_out", swish(norm(w, "encoder.norm_out", x)), padding=1))


def decoded_patches(w, z, halvings):
    x = middle(w, "decoder.mid", conv(w, "decoder.conv_in", conv(w, "post_quant_conv", z), padding=1))
    for level in reversed(range(3)):
        for block in range(3):
            x = residual(w, f"decoder.up.{level}.block.{block}", x)
        if level >= 3 - halvings:
            x = conv(w, f"decoder.up.{level}.upsample.conv", F.interpolate(x, scale_factor=2.0), padding=1)
    return conv(w, "decoder.conv_out", swish(norm(w, "decoder.norm_out", x)), padding=1)


def test_the_network_is_the_described_one(released):
    network, path = released
    tokenizer, w = published_tokenizer(path), network.state_dict()
    side = tokenizer.spatial_compression
    assert f"CI{side}x{side}" in path.name and tokenizer.kind.name == "cosmos_image"
    video = torch.rand(2, 3, 3, 2 * side, 3 * side) * 2 - 1
    halvings = tokenizer.network.config["num_halvings"]
    latents = tokenizer.encode(video)
    assert latents.shape == (2, *tokenizer.latent_shape(3, 2 * side, 3 * side)) == (2, 6, 3, 2, 3)
    z = encoded(w, video[:, :, 1], halvings)
    torch.testing.assert_close(latents[:, :, 1], 0.5 * z, rtol=1e-4, atol=1e-5)
    assert (latents[:, :, 0] - 0.5 * z).abs().max() > 1e-2, "negative control: the frame must matter"
    out = tokenizer.decode(latents)[:, :, 1]
    # wavelets of what comes out are what the network's last layer gave
    torch.testing.assert_close(haar(haar(out)), decoded_patches(w, z, halvings), rtol=1e-4, atol=1e-4)


def test_two_halves_and_a_saved_copy_are_the_same_tokenizer(released, tmp_path):
    network, path = released
    for half, names in (("encoder", ("encoder.", "quant_conv.")), ("decoder", ("decoder.", "post_quant_conv."))):
        tensors = {name: tensor for name, tensor in network.state_dict().items() if name.startswith(names)}
        write_jit(tensors, tmp_path / f"halves/{half}.jit")
    whole, split = published_tokenizer(path), published_tokenizer(tmp_path / "halves")
    assert whole.fingerprint() == split.fingerprint()
    whole.save(tmp_path / "saved")
    loaded, image = load_tokenizer(tmp_path / "saved"), torch.rand(1, 3, 1, 32, 32)
    assert loaded.fingerprint() == whole.fingerprint() and torch.equal(loaded.encode(image), whole.encode(image))


def test_a_missing_tensor_is_named(released, tmp_path):
    tensors = {name: tensor for name, tensor in released[0].state_dict().items() if name != "decoder.conv_in.bias"}
    write_jit(tensors, tmp_path / "autoencoder.jit")
    with pytest.raises(UserError, match=r"missing: decoder.conv_in.bias"):
        published_tokenizer(tmp_path)
    write_jit({name: t for name, t in tensors.items() if "quant" not in name}, tmp_path / "autoencoder.jit")
    with pytest.raises(
        UserError, match=r"is not a continuous image tokenizer of Cosmos: it has no 'quant_conv.weight'"
    ):
        published_tokenizer(tmp_path / "autoencoder.jit")
