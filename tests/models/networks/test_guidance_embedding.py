"""Networks that are told a scale of guidance: they start as those that are not, and read the scale of each sample."""

from dataclasses import replace

import pytest
import torch

from megadit.models.configs.config import DiTConfig
from megadit.models.diffusion.parameterization import EDMDenoiser, denoise_packed
from megadit.models.networks.conditioning import CleanLatents, Conditioning
from megadit.models.networks.dense_packs import pack_dense, unpack_dense
from megadit.models.networks.dit import DiT
from megadit.models.networks.initialize import initialize_

SMALL = dict(num_layers=1, hidden_size=48, num_attention_heads=4, in_channels=4, crossattn_emb_size=16)
NETWORKS = {
    "megadit": DiTConfig(**SMALL),
    "with what is given": DiTConfig(**SMALL, conditioning_sigma=0.02),
    "cosmos": DiTConfig(**SMALL, family="cosmos", adaln_lora_dim=4),
    "wan": DiTConfig(**SMALL, family="wan"),
    "nemo": DiTConfig(**SMALL | {"hidden_size": 256}, family="nemo", position_embedding="sincos"),
}
SIZE = (2, 4, 6)


def asked(dit, scales, given=None):
    """D of two noisy samples, as a batch."""
    generator = torch.Generator().manual_seed(1)
    x_BCTHW = torch.randn(2, dit.config.in_channels, *SIZE, generator=generator)
    text_BLE = torch.randn(2, 3, dit.config.crossattn_emb_size, generator=generator)
    guidance_B = None if scales is None else torch.tensor(scales)
    conditioning = Conditioning(
        text_BLE, torch.tensor([3, 0]), torch.tensor([8.0, 0.0]), clean=given, guidance_B=guidance_B
    )
    return x_BCTHW, torch.tensor([2.0, 0.5]), conditioning


def random_dit(config):
    dit = DiT(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in dit.parameters():
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return dit


@pytest.mark.parametrize("name", NETWORKS)
def test_it_starts_as_the_network_that_is_told_nothing(name):
    plain = random_dit(NETWORKS[name])
    told = initialize_(DiT(replace(NETWORKS[name], guidance_embedding_range=(1.0, 6.0))), seed=0)
    told.load_state_dict(plain.state_dict(), strict=False)
    expected = EDMDenoiser(plain)(*asked(plain, None))
    for scales in ([1.0, 1.0], [1.0, 6.0]):
        assert torch.equal(EDMDenoiser(told)(*asked(told, scales)), expected)
    torch.nn.init.normal_(told.guidance_embedder.linear_2.weight)
    one, other = (EDMDenoiser(told)(*asked(told, scales)) for scales in ([1.0, 1.0], [1.0, 6.0]))
    assert torch.equal(one[0], other[0]) and not torch.allclose(one[1], other[1]), "each sample has its own"


@pytest.mark.parametrize("name", ["megadit", "with what is given"])
def test_a_pack_is_told_what_its_samples_are(name):
    dit = random_dit(replace(NETWORKS[name], guidance_embedding_range=(1.0, 6.0)))
    given = None
    if dit.config.conditioning_sigma is not None:
        is_given = torch.zeros(SIZE, dtype=torch.bool)
        is_given[0] = True
        given = CleanLatents(torch.ones(2, dit.config.in_channels, *SIZE), is_given)
        assert given.segment(dit.config).clean
    x_BCTHW, sigma_B, conditioning = asked(dit, [2.0, 5.0], given)
    pack = pack_dense(x_BCTHW, conditioning, dit.config, 16)
    sigma_G = torch.cat([sigma_B, torch.ones(pack.layout.num_segments - 2)])
    packed = denoise_packed(
        dit, pack.tokens_S1P, sigma_G, pack.text_L1E, pack.fps_G, pack.layout, guidance_G=pack.guidance_G
    )
    found = unpack_dense(packed, pack.layout, x_BCTHW, dit.config)
    torch.testing.assert_close(found[:, :, 1:], EDMDenoiser(dit)(x_BCTHW, sigma_B, conditioning)[:, :, 1:])


def test_who_says_no_scale_is_a_mistake_of_ours():
    dit = random_dit(replace(NETWORKS["megadit"], guidance_embedding_range=(1.0, 6.0)))
    with pytest.raises(AssertionError, match="needs a guidance scale"):
        EDMDenoiser(dit)(*asked(dit, None))
