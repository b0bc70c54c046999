"""What a GPU compiles of the ops: few kinds of each chain of operations, whatever packs and batches come.

Compiled as on a GPU, by a compiler that counts what it is asked for and changes nothing.
"""

import random
import warnings
from collections import Counter
from functools import cache

import pytest
import torch

from megadit.models.configs.config import DiTConfig
from megadit.models.diffusion.parameterization import EDMDenoiser
from megadit.models.networks import dit as dit_module
from megadit.models.networks.conditioning import CleanLatents, Conditioning
from megadit.models.ops import fusion, gated_residual, modulated_norm, qk_norm_rope
from megadit.models.ops.fusion import fused
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import RowsByToken, Segment
from megadit.train.optim.adamw import HalfMomentAdamW
from tests.bundles import random_network

CONFIG = DiTConfig(
    num_layers=1, hidden_size=32, num_attention_heads=2, in_channels=4, crossattn_emb_size=16, conditioning_sigma=0.02
)
CAPACITY, TEXT_CAPACITY = 96, 24
MOST = 2
"""Kinds of one chain: heads that lie side by side, and those of a fused projection, which lie apart."""


@pytest.fixture
def made(monkeypatch):
    """Chain -> how many kinds of it were compiled."""
    counts, plain = Counter(), fusion.compiled.__wrapped__

    @cache
    def compiled(function, kinds):
        def backend(graph, inputs):
            counts[function.__module__, function.__name__, kinds] += 1
            return graph.forward

        with monkeypatch.context() as patch:
            patch.setattr(fusion, "BACKEND", backend)
            return plain(function, kinds)

    monkeypatch.setattr(fusion, "COMPILED_ON", {"cpu"})
    monkeypatch.setattr(fusion, "compiled", compiled)
    monkeypatch.setattr(fusion, "_AS_WRITTEN", set())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs uncompiled")
        yield counts


def given(chance, num_tokens):
    """Nothing, or some of the tokens: the first, the last, or two runs."""
    if num_tokens < 4:
        return ()
    a, b, c = sorted(chance.sample(range(1, num_tokens), 3))
    return chance.choice(((), ((0, a),), ((c, num_tokens),), ((0, a), (b, c))))


def pack(chance):
    """Of one segment that fills it, of one and padding, or of many; clips and images, with text or without, parts of
    them given or none."""
    most = chance.choice((1, 1, 2, 7))
    if most == 1 and chance.random() < 0.5:
        whole = Segment((6, 4, 4), TEXT_CAPACITY, clean=given(chance, CAPACITY))
        return PackLayout.pack([whole], capacity=CAPACITY, text_capacity=TEXT_CAPACITY)
    segments, left, text_left = [], CAPACITY, TEXT_CAPACITY
    while left and len(segments) < most:
        num_tokens, text = chance.choice((1, 2, 6, 12, 48)), chance.choice((0, 0, 1, 5))
        if num_tokens > left or max(text, 1) > text_left:
            break
        grid = (1, 1, num_tokens) if num_tokens % 2 else (2, 1, num_tokens // 2)
        segments.append(Segment(grid, text, clean=given(chance, num_tokens)))
        left, text_left = left - num_tokens, text_left - max(text, 1)
    return PackLayout.pack(segments, capacity=CAPACITY, text_capacity=TEXT_CAPACITY)


def run_pack(dit, chance, *, is_training=True):
    layout = pack(chance)
    text = torch.randn(TEXT_CAPACITY, 1, 16)
    tokens = torch.randn(CAPACITY, 1, 16)
    with torch.set_grad_enabled(is_training):
        out = dit.forward_packed(
            tokens, torch.zeros(len(layout.segment_of_row)), text, torch.full((layout.num_segments,), 8.0), layout
        )
    if is_training:
        out.square().mean().backward()


def run_batch(dit, chance):
    """As a sampler asks: videos and images, several at once, with guidance (twice as many) or without, some given."""
    batch, length = chance.choice((1, 2, 3, 4)) * chance.choice((1, 2)), chance.choice((1, 2, 9, 20))
    size = chance.choice(((1, 2, 4), (1, 4, 4), (2, 4, 6), (3, 4, 4)))
    lengths = torch.tensor([chance.randint(0, length) for _ in range(batch)])
    x = torch.randn(batch, 4, *size)
    is_given = torch.zeros(size, dtype=torch.bool)
    is_given[0, : size[1] // 2] = True
    some = CleanLatents(torch.randn_like(x), is_given) if chance.random() < 0.3 else None
    conditioning = Conditioning(torch.randn(batch, length, 16), lengths, torch.full((batch,), 8.0), clean=some)
    with torch.no_grad():
        EDMDenoiser(dit)(x, torch.ones(batch), conditioning)


def test_packs_of_every_kind_are_drawn():
    packs = [pack(random.Random(seed)) for seed in range(100)]
    assert min(sum(x.has_conditioning for x in packs), sum(not x.has_conditioning for x in packs)) > 20
    assert {len(x.groups) > 1 for x in packs} == {len(x.segments) > 1 for x in packs} == {True, False}


def test_forty_packs_and_batches_meet_two_kinds_of_a_chain_at_most(made):
    dit, chance = random_network(CONFIG), random.Random(0)
    for _ in range(2):
        run_pack(dit, chance)
    after_two_steps = Counter(made)
    for _ in range(18):
        run_pack(dit, chance)
    assert made == after_two_steps, "a run compiles nothing after its second step"
    for _ in range(8):
        run_pack(dit, chance, is_training=False)
    assert made == after_two_steps, "nor in its validation"
    for _ in range(12):
        run_batch(dit, chance)
    assert made and max(made.values()) <= MOST, made
    assert len({chain[:2] for chain in made}) == 7


def test_packs_of_one_segment_would_be_more_kinds(made, monkeypatch):
    monkeypatch.setattr(dit_module, "two_or_more", lambda x: x)
    dit, chance = random_network(CONFIG), random.Random(0)
    for _ in range(2):
        run_pack(dit, chance)
    after_two_steps = Counter(made)
    for _ in range(10):
        run_pack(dit, chance, is_training=False)
        if made != after_two_steps:
            return
    pytest.fail("no other kind was met")


def test_the_optimizer_is_one_kind_for_each_form_of_its_weights(made):
    """Gradients are views of one buffer, at any place of it; weights are written beside, or not."""
    sizes = ((8, 4), (3, 5), (7,), (16, 16))
    buffer = torch.randn(sum(torch.Size(size).numel() for size in sizes))
    parameters = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
    for parameter, grad in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = grad.view(parameter.shape)
    optimizer = HalfMomentAdamW([{"params": parameters}], lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for _ in range(3):
        optimizer.step()
    assert list(made.values()) == [1]


def chained(x, y):
    return (x + 1).relu() * y


def test_what_is_too_much_for_the_compiler_runs_as_it_is_written(made, monkeypatch):
    monkeypatch.setattr(fusion, "MOST_VARIANTS", 1)
    fused(chained, torch.randn(3), torch.randn(3))
    with pytest.warns(UserWarning, match="chained runs uncompiled, more slowly"):
        found = fused(chained, torch.ones(1), torch.ones(3))
    assert torch.equal(found, torch.full((3,), 2.0))
    assert torch.equal(fused(chained, torch.ones(1), torch.ones(4)), torch.full((4,), 2.0)), "told once"
    assert sum(made.values()) == 1


def failing(x):
    torch._assert_async(x.sum() > 1e9)
    return x


def test_errors_of_the_chain_itself_are_raised(made):
    with pytest.raises(RuntimeError, match="nonzero"):
        fused(failing, torch.ones(3))
    assert made and not fusion._AS_WRITTEN


def shifted(x, y, factor):
    """As many results as a chain gives, of which one is none."""
    return x * factor + y[:, None], None, y.sum()


def test_later_calls_pass_the_compiler_by(made, monkeypatch):
    """They compute with their own numbers and sizes, also where sides were equal in the first call by chance."""
    checked = []
    fused(shifted, torch.randn(4, 4), torch.randn(4), 2.0)
    monkeypatch.setattr(fusion._Compiled, "_checked", property(lambda self: checked.append(self)), raising=False)
    for rows, width, factor in ((4, 4, 2.0), (7, 4, 2.0), (2, 4, 2.0)):
        x, y = torch.randn(rows, width), torch.randn(rows)
        out, nothing, total = fused(shifted, x, y, factor)
        assert torch.equal(out, x * factor + y[:, None]) and nothing is None and torch.equal(total, y.sum())
    assert not checked and sum(made.values()) == 1
    for x, factor in ((torch.randn(4, 4).T, 2.0), (torch.randn(1, 4), 2.0), (torch.randn(4, 4), 3.0)):
        y = torch.randn(len(x))
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(fusion._Compiled, "_checked", raising=False)
            out, *_ = fused(shifted, x, y, factor)
        assert torch.equal(out, x * factor + y[:, None])
    assert sum(made.values()) == 4, "other strides, a side of one and another number are kinds of their own"


# --- what is compiled computes the same ---------------------------------------------------------------------------

ROWS = [torch.tensor([0, 0, 1, 2, 2, 2]), torch.tensor([1, 0, 0])]


def numbers(row_S, *, is_rms):
    """Results and gradients of the three ops whose operations are fused."""
    torch.manual_seed(0)
    rows = RowsByToken(row_S, torch.arange(len(row_S) + 1, dtype=torch.int32))
    x, y = (torch.randn(len(row_S), 1, 24, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    shift, scale, gate = (torch.randn(3, 24, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    weight = torch.randn(24, dtype=torch.bfloat16) if is_rms else None
    cos, sin = torch.randn(2, len(row_S), 1, 1, 12, dtype=torch.bfloat16)
    heads = modulated_norm.by_token(x, shift, scale, 1e-6, rows, weight).unflatten(-1, (2, 12))
    turned = qk_norm_rope.qk_norm_rope(heads, torch.ones(12), cos, sin, 1e-6)
    out = gated_residual.by_token(x, gate, turned.flatten(2), rows)
    return [out, *torch.autograd.grad(out.square().sum(), (x, shift, scale, gate))]


def test_chains_compile_whole_and_stay_what_they_are(monkeypatch):
    """As on a GPU; the compiled operations still run one by one."""
    cases = list(zip(ROWS, (False, True), strict=True))
    plain = [numbers(row_S, is_rms=is_rms) for row_S, is_rms in cases]
    monkeypatch.setattr(fusion, "COMPILED_ON", {"cpu"})
    monkeypatch.setattr(fusion, "BACKEND", "aot_eager")
    fusion.compiled.cache_clear()
    try:
        found = [numbers(row_S, is_rms=is_rms) for row_S, is_rms in cases]
        assert fusion.compiled.cache_info().currsize >= 6 and not fusion._AS_WRITTEN
    finally:
        fusion.compiled.cache_clear()
    for ours, theirs in zip(found, plain, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["norm_backward", "gate_backward", "cast_transposed", "normal_by_kernel"])
def test_kernels_run_on_the_gpu_of_their_tensors(name, monkeypatch):
    """Triton launches on the current one: of others it reads nothing, or before it is written."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from megadit.models.diffusion import noise_kernel
    from megadit.models.ops import cast_transpose, row_sums

    [launch] = [getattr(of, name) for of in (row_sums, cast_transpose, noise_kernel) if hasattr(of, name)]
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: pytest.fail(f"{x} chooses"))
    with pytest.raises(pytest.fail.Exception, match="its own GPU chooses"):
        launch("its own GPU")
