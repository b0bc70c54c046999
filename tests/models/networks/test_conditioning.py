"""Parts of a sample that are given: clean tokens among noisy ones, with a noise level of their own."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megadit.models.configs.config import DiTConfig
from megadit.models.diffusion.parameterization import EDMDenoiser, denoise_packed
from megadit.models.networks.conditioning import CleanLatents, Conditioning
from megadit.models.networks.dense_packs import pack_dense, pad_segments, unpack_dense
from megadit.models.networks.dit import DiT
from megadit.models.networks.initialize import initialize_
from megadit.models.packing.pack_layout import CPU, PackLayout
from megadit.models.packing.segments import Segment, TokenMesh
from megadit.train.data.packs.packed_batch import PackedBatch
from megadit.train.objectives.denoise import token_noise
from megadit.train.objectives.losses import edm_loss

CONFIG = DiTConfig(
    num_layers=2,
    hidden_size=48,
    num_attention_heads=2,
    in_channels=4,
    patch_spatial=2,
    crossattn_emb_size=8,
    conditioning_sigma=0.02,
)
FIRST, ENDS, BOX = ((0, 4),), ((0, 4), (8, 12)), ((0, 2), (3, 6), (7, 12))
MIXED = PackLayout.pack(
    [Segment((3, 2, 2), 2, clean=given) for given in (FIRST, FIRST, (), ENDS, BOX)]
    + [Segment((5, 2, 2), 3, clean=((12, 20),), times=(0, 1, 2, 2, 0.5))],
    capacity=96,
    text_capacity=24,
)


def network(config=CONFIG) -> DiT:
    model = initialize_(DiT(config), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.norm() == 0:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def conditions(count: int, given: CleanLatents | None = None) -> Conditioning:
    generator = torch.Generator().manual_seed(2)
    text = torch.randn(count, 3, CONFIG.crossattn_emb_size, generator=generator)
    return Conditioning(text, torch.tensor([3, 1, 0, 2][:count]), torch.full((count,), 8.0), clean=given)


def given_latents(count: int, extra: int = 1) -> CleanLatents:
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(count, 4, 3 + extra, 4, 4, generator=generator)
    is_given = torch.zeros(3 + extra, 4, 4, dtype=torch.bool)
    is_given[0] = is_given[3:] = True
    is_given[1, :2] = True
    return CleanLatents(latents, is_given, (1.5,) * extra)


@torch.no_grad()
def test_a_token_given_in_part_is_noisy_as_in_training():
    given = given_latents(1, extra=0)
    given.is_clean_THW[1, :3, :3] = True  # of the rows, and of the columns of each, one and a half tokens
    whole = given.of_whole_tokens(CONFIG)
    assert whole.of_whole_tokens(CONFIG) is whole
    assert whole.is_clean_THW[1].sum() == 8 < given.is_clean_THW[1].sum() and whole.is_clean_THW[1, :2].all()
    assert torch.equal(whole.is_clean_THW[[0, 2]], given.is_clean_THW[[0, 2]])
    dit, x, sigma_B = network(), 5 * torch.randn(1, 4, 3, 4, 4), torch.tensor([5.0])
    of_part, of_whole = (conditions(1, each) for each in (given, whole))
    found = EDMDenoiser(dit)(x, sigma_B, of_whole)
    pack = pack_dense(x, of_whole, CONFIG, 1)
    D_S1P = denoise_packed(
        dit, pack.tokens_S1P, pad_segments(sigma_B, pack.layout, 1.0), pack.text_L1E, pack.fps_G, pack.layout
    )
    of_training = unpack_dense(D_S1P, pack.layout, x, CONFIG)
    is_new = ~whole.is_clean_THW
    torch.testing.assert_close(found[:, :, is_new], of_training[:, :, is_new], rtol=1e-4, atol=1e-4)
    assert (EDMDenoiser(dit)(x, sigma_B, of_part) - of_training)[:, :, is_new].abs().max() > 0.1


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_follow_the_tokens_however_they_are_cut(size):
    G = MIXED.num_segments
    given_segments = [index for index, segment in enumerate(MIXED.segments) if segment.clean]
    expected = torch.cat([torch.full((segment.num_tokens,), index) for index, segment in enumerate(MIXED.segments)])
    for row, index in enumerate(given_segments):
        for first, stop in MIXED.segments[index].clean:
            expected[MIXED.starts[index] + first : MIXED.starts[index] + stop] = G + row
    assert MIXED.segment_of_row == (*range(G), *given_segments)
    assert torch.equal(MIXED.on(CPU).row_of_token_S, expected)
    slices = [MIXED.shard(TokenMesh(slices=size, rank=rank)).rows.of_token(CPU) for rank in range(size)]
    assert torch.equal(torch.cat(slices), expected)
    shards = [MIXED.shard(TokenMesh(context=size, rank=rank)) for rank in range(size)]
    for shard in shards:
        assert torch.equal(shard.rows.of_token(CPU), expected[shard.on(CPU).index_S])
    assert sum(shard.num_targets for shard in shards) == MIXED.num_targets == int((expected < G)[:80].sum())


def test_alike_neighbours_are_grouped():
    """Two groups for any number of neighbours of which the same is given: kernels are as few as without."""
    layout = PackLayout.pack([Segment((3, 2, 2), 1, clean=FIRST)] * 7, capacity=84, text_capacity=7)
    assert [(group.first, group.count, group.length, group.gap) for group in layout.rows.groups] == [
        (7, 7, 4, 8),
        (0, 7, 8, 4),
    ]
    assert len(layout.groups) == 1, "attention sees whole segments"


def test_tokens_are_given_where_all_of_their_latents_are():
    is_given = torch.zeros(2, 4, 4, dtype=torch.bool)
    is_given[0, :3] = True
    is_given[1, 2:, 2:] = True
    assert CleanLatents(torch.zeros(1, 4, 2, 4, 4), is_given).segment(CONFIG).clean == ((0, 2), (7, 8))


@torch.no_grad()
@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, family="st_dit")], ids=["dit", "st_dit"])
def test_a_batch_equals_its_pack(config, extra):
    dit, given = network(config), given_latents(3, extra)
    conditioning = conditions(3, given)
    x, sigma = torch.randn(3, 4, 3, 4, 4), torch.tensor([0.3, 2.0, 11.0])
    dense = EDMDenoiser(dit)(x, sigma, conditioning)
    pack = pack_dense(x, conditioning, config, multiple=8)
    sigma_G = pad_segments(sigma, pack.layout, value=1.0)
    tokens = denoise_packed(dit, pack.tokens_S1P, sigma_G, pack.text_L1E, pack.fps_G, pack.layout)
    packed = unpack_dense(tokens, pack.layout, x, config)
    wanted = ~given.is_clean_THW[:3]
    torch.testing.assert_close(packed[:, :, wanted], dense[:, :, wanted], rtol=2e-5, atol=2e-5)


MARKED = replace(CONFIG, family="cosmos", adaln_lora_dim=4, padding_mask_channel=True)
FLOW = replace(CONFIG, family="wan", parameterization="flow", conditioning_sigma=0.0)
FORMS = {
    "augmented": replace(MARKED, conditioning_mode="augmented"),
    "marked": replace(MARKED, conditioning_mode="marked"),
    "clean": FLOW,
    "channels": replace(FLOW, conditioning_mode="channels"),
}
"""Of published networks."""


@torch.no_grad()
@pytest.mark.parametrize("config", FORMS.values(), ids=FORMS)
def test_a_batch_of_a_published_form_equals_its_pack(config):
    dit, given = network(config), given_latents(3, extra=0)
    conditioning = conditions(3, given)
    x, sigma = torch.randn(3, 4, 3, 4, 4), torch.tensor([0.3, 2.0, 11.0])
    dense = EDMDenoiser(dit)(x, sigma, conditioning)
    pack = pack_dense(x, conditioning, config, multiple=8)
    layout, sigma_G = pack.layout, pad_segments(sigma, pack.layout, value=1.0)
    asked = (dit, pack.tokens_S1P, sigma_G, pack.text_L1E, pack.fps_G, layout)
    packed = unpack_dense(denoise_packed(*asked, attached_S1Q=pack.attached_S1Q), layout, x, config)
    predicted = ~given.is_clean_THW if config.conditioning.is_among else torch.ones_like(given.is_clean_THW)
    torch.testing.assert_close(packed[:, :, predicted], dense[:, :, predicted], rtol=2e-5, atol=2e-5)
    # the control: nothing given, and another form of the same tensors
    nothing = EDMDenoiser(dit)(x, sigma, conditions(3))
    assert (nothing - dense)[:, :, predicted].abs().max() > 1e-3
    forms = {"augmented": "marked", "marked": "augmented"}
    if config.conditioning_mode in forms:
        other = network(replace(config, conditioning_mode=forms[config.conditioning_mode]))
        other.load_state_dict(dit.state_dict())
        assert (EDMDenoiser(other)(x, sigma, conditioning) - dense)[:, :, predicted].abs().max() > 1e-4


@torch.no_grad()
def test_a_pack_that_was_seen_sends_the_device_nothing():
    """A number that Python makes a tensor of there stops the host until the device has done all it was told."""
    dit, made = network(), []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made.extend([str(function)] * (function is torch.ops.aten.lift_fresh.default))
            return function(*args, **kwargs or {})

    pack = pack_dense(torch.randn(3, 4, 3, 4, 4), conditions(3, given_latents(3, extra=0)), CONFIG, multiple=8)
    asked = (dit, pack.tokens_S1P, pack.fps_G.new_ones(len(pack.fps_G)), pack.text_L1E, pack.fps_G, pack.layout)
    denoise_packed(*asked)
    with Made():
        denoise_packed(*asked)
    assert not made


def batch_of(config, given=()) -> PackedBatch:
    """Two samples, of the first of which this much is given, and padding."""
    layout = PackLayout.pack([Segment((3, 2, 2), 2, clean=given), Segment((3, 2, 2), 1)], capacity=32, text_capacity=8)
    generator = torch.Generator().manual_seed(5)
    return PackedBatch(
        tokens_S1P=torch.randn(32, 1, config.patch_dim, generator=generator),
        text_L1E=torch.randn(8, 1, 8, generator=generator),
        fps_G=torch.full((3,), 8.0),
        noise_key_G=torch.arange(3),
        loss_weight_G=torch.ones(3),
        layout=layout,
        sample_ids=("a", "b", ""),
    )


def learned(dit: DiT, batch: PackedBatch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(the objective, the gradients) of a step."""
    sums = edm_loss(dit, batch, torch.tensor([0.5, 3.0, 1.0]), token_noise(batch))
    sums.objective.backward()
    return sums.objective, [parameter.grad for parameter in dit.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("name", [name for name, config in FORMS.items() if config.conditioning.is_among])
def test_a_published_form_learns(name):
    """One step on a pack of which parts are given: a finite loss, and gradients of all that tells of them."""
    config = FORMS[name]
    dit = network(config)
    objective, grads = learned(dit, batch_of(config, FIRST))
    assert objective.isfinite() and all(grad.isfinite().all() for grad in grads)
    marks = dit.x_embedder.weight.grad[:, config.patch_dim : config.patch_dim + config.conditioning_dim]
    assert not config.conditioning_dim or marks.norm() > 0


@torch.no_grad()
def test_the_network_sees_what_is_given_clean_and_nothing_else_of_it():
    dit, given = network(), given_latents(2)
    denoise = EDMDenoiser(dit)
    x, sigma = torch.randn(2, 4, 3, 4, 4), torch.tensor([0.5, 5.0])
    wanted = ~given.is_clean_THW[:3]

    def answer(given=given, x=x, **changes):
        return denoise(x, sigma, conditions(2, replace(given, **changes)))[:, :, wanted]

    usual = answer()
    elsewhere = torch.where(wanted, x, torch.randn_like(x))
    assert torch.equal(answer(x=elsewhere), usual), "what the sampler's state holds there is not read"
    for frame in (0, 3):
        other = given.latents_BCTHW.clone()
        other[:, :, frame] += 1
        assert not torch.allclose(answer(latents_BCTHW=other), usual), frame
    unread = given.latents_BCTHW.clone()
    unread[:, :, 2] = torch.nan
    assert torch.equal(answer(latents_BCTHW=unread), usual)
    assert not torch.allclose(answer(extra_times=(0.5,)), usual), "when a frame is, is seen"
    label = replace(CONFIG, conditioning_sigma=0.5)
    other = network(label)
    other.load_state_dict(dit.state_dict())
    relabelled = EDMDenoiser(other)(x, sigma, conditions(2, given))[:, :, wanted]
    assert not torch.allclose(relabelled, usual), "their noise level is told"


def test_nothing_given_changes_nothing():
    """To the last bit, of a batch and of a pack, and of what is learned from a pack."""
    plain, able = network(replace(CONFIG, conditioning_sigma=None)), network()
    x, sigma = torch.randn(2, 4, 3, 4, 4), torch.tensor([0.5, 5.0])
    with torch.no_grad():
        assert torch.equal(EDMDenoiser(plain)(x, sigma, conditions(2)), EDMDenoiser(able)(x, sigma, conditions(2)))
        pack = pack_dense(x, conditions(2), CONFIG, multiple=8)
        sigma_G = pad_segments(sigma, pack.layout, value=1.0)
        asked = (pack.tokens_S1P, sigma_G, pack.text_L1E, pack.fps_G, pack.layout)
        assert torch.equal(denoise_packed(plain, *asked), denoise_packed(able, *asked))
    (loss, grads), (able_loss, able_grads) = (learned(dit, batch_of(CONFIG)) for dit in (plain, able))
    assert torch.equal(loss, able_loss) and all(map(torch.equal, grads, able_grads)) and len(grads) > 20
    assert not torch.equal(learned(able, batch_of(CONFIG, FIRST))[0], loss), "the control: something given"
