"""Which variant computes what, and how a choice is forced."""

import random
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

from megadit.models.configs.config import DiTConfig
from megadit.models.networks.attention import QKNorm
from megadit.models.networks.embeddings import rotary_table
from megadit.models.ops import attention as attentions
from megadit.models.ops import linear, reference, tiled_attention
from megadit.models.ops.attention import attend_by_length_group
from megadit.models.ops.crossover import NEVER
from megadit.models.ops.reference import attention
from megadit.models.ops.registry import FORCED, OPS, describe_variants, force_variants, variants_run
from megadit.models.packing.dense_layout import DenseLayout, grid_positions
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment
from megadit.models.shared.errors import UserError
from megadit.train.data.packs.bin_packing import best_fit

PACK = PackLayout.pack([Segment((1, 2, 4), 3), Segment((1, 2, 4), 0)], capacity=20, text_capacity=5)


@pytest.fixture(autouse=True)
def nothing_stays_forced():
    yield
    force_variants([])


@pytest.fixture
def tiles_pay(monkeypatch):
    if linear._BY_ONEDNN is None:
        pytest.skip("this torch was built without oneDNN")
    monkeypatch.setattr(tiled_attention.CROSSOVER, "size", 1)
    monkeypatch.setattr(tiled_attention, "multiplies", lambda dtype: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(tiled_attention, "FEWEST", 16)
    monkeypatch.setattr(tiled_attention, "MOST_KEYS", 100)


def test_a_forced_variant_computes_every_call():
    qkv = torch.randn(3, 20, 1, 2, 8)
    before = variants_run().get("attention", {}).get("reference", 0)
    fast = attention(*qkv, PACK, False)
    assert attention.choose(*qkv, PACK, False).name == "by_length_group"
    force_variants(["attention=reference", "linear=reference"])
    assert FORCED == {"attention": "reference", "linear": "reference"}
    slow = attention(*qkv, PACK, False)
    torch.testing.assert_close(slow[PACK.on("cpu").is_sample_S], fast[PACK.on("cpu").is_sample_S])
    assert variants_run()["attention"]["reference"] == before + 1
    force_variants(["attention=by_length_group"])
    assert FORCED == {"attention": "by_length_group"}, "a new choice replaces the one before"


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("atention=reference", "no op 'atention'; did you mean 'attention'"),
        ("attention=varlen", "attention has no variant 'varlen'; did you mean 'varlen_flash'"),
        ("attention", "attention has no variant ''; choose one of reference, dense, varlen_flash, by_length_group"),
        ("x=y", "no op 'x'; choose one of "),
    ],
)
def test_what_there_is_not_cannot_be_forced(choice, message):
    force_variants(["linear=reference"])
    with pytest.raises(UserError, match=message):
        force_variants(["attention=reference", choice])
    assert FORCED == {"linear": "reference"}, "nothing is changed by half"


def test_what_ran_is_described():
    calls = {"linear": {"reference": 2, "onednn": 7}, "attention": {"dense": 1}}
    assert describe_variants(calls) == "linear onednn, reference; attention dense"


def test_compilers_see_one_variant_whatever_is_forced(monkeypatch):
    force_variants([f"{name}=reference" for name in OPS])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    seen = {name: op.choose().name for name, op in OPS.items()}
    assert seen == {
        "linear": "reference",
        "batch_attention": "sdpa",
        "attention": "dense",
        "gated_residual": "reference",
        "modulated_norm": "reference",
        "qk_norm_rope": "one_pass",
        "sinusoids": "reference",
    }


def test_layouts_choose_attention():
    q, text = torch.randn(20, 1, 2, 8), torch.randn(5, 1, 2, 8)
    assert attention.choose(q, text, text, PACK, True).name == "by_length_group"
    dense = DenseLayout((1, 4, 5), torch.ones(1, 5, dtype=torch.bool), torch.device("cpu"))
    assert attention.choose(q, text, text, dense, True).name == "dense"


@pytest.mark.gpu
def test_attention_on_a_gpu_is_chosen_by_precision_and_head_width():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("flash attention needs an Ampere GPU or newer")
    qkv = torch.randn(3, 20, 1, 2, 72, device="cuda")
    assert attention.choose(*qkv.bfloat16(), PACK, False).name == "varlen_flash"
    assert attention.choose(*qkv, PACK, False).name == "by_length_group"
    assert attention.choose(*qkv[..., :12].bfloat16(), PACK, False).name == "by_length_group"


def test_torch_is_asked_whether_cudnn_computes_dense_attention(monkeypatch):
    asks = attentions._has_fast_dense_attention.__wrapped__
    assert not asks(torch.device("cpu"), torch.bfloat16, 64), "by its real function, here of a CPU"
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda q, k, v: int(SDPBackend.CUDNN_ATTENTION))
    assert asks(torch.device("meta"), torch.bfloat16, 64)


SIZES = [256, *(512 * n for n in range(1, 13)), *(1024 * n for n in range(8, 15))]
"""Tokens of twenty buckets."""


def captioned_packs(count: int) -> list[PackLayout]:
    """Packs of 14,336 tokens from samples of twenty buckets, with captions of N(180, 70) tokens."""
    chance, packs = random.Random(0), []
    while len(packs) < count:
        samples = [(chance.choice(SIZES), max(8, min(512, round(chance.gauss(180, 70))))) for _ in range(500)]
        for members in best_fit(samples, (SIZES[-1], 4096)):
            segments = [Segment((1, 1, samples[index][0]), samples[index][1]) for index in members]
            packs.append(PackLayout.pack(segments, capacity=SIZES[-1], text_capacity=4096))
    return packs[:count]


def test_captions_of_any_length_make_few_plans(monkeypatch):
    """cuDNN plans each shape that it meets for the first time, forward and backward, in some 150 ms: on a GPU whose
    dense attention it computes, 200 packs give it a bounded number of shapes, and none of captions."""
    monkeypatch.setattr(attentions, "has_varlen_attention", lambda: True)
    monkeypatch.setattr(attentions, "_has_fast_dense_attention", lambda *of_q: True)
    planned = {False: set(), True: set()}

    def plan(q, k, v, mask):
        planned[cross].add((q.shape, k.shape, mask is None))
        return torch.empty_like(q)

    monkeypatch.setattr(attentions, "batch_attention", plan)
    packs, chosen = captioned_packs(200), []
    with FakeTensorMode():
        q, text = torch.empty(SIZES[-1], 1, 1, 8, dtype=torch.bfloat16), torch.empty(4096, 1, 1, 8)
        on_gpu = torch.empty(SIZES[-1], 1, 1, 8, dtype=torch.bfloat16, device="cuda")
    for pack in packs:
        for cross in (False, True):
            name = attention.choose(on_gpu, on_gpu, on_gpu, pack, cross).name
            chosen.append((cross, name))
            if name == "by_length_group":
                key = text if cross else q
                attend_by_length_group(q.to("meta"), key.to("meta"), key.to("meta"), pack, cross)
    assert {name for cross, name in chosen if cross} == {"varlen_flash"} and not planned[True]
    assert {name for cross, name in chosen if not cross} == {"varlen_flash", "by_length_group"}
    assert 0 < len(planned[False]) <= 40
    captions = {
        (group.count, group.length, max(pack.text_places[index] for index in range(*group.members.indices(99))))
        for pack in packs
        for group in pack.groups
    }
    assert len(captions) > 300, "what the groups of these packs would be planned for"


def test_where_tiles_are_used(tiles_pay, monkeypatch):
    """`batch_attention` is by tiles in float32 and bfloat16, with enough tokens, few enough keys, one thread or two."""
    op = OPS["batch_attention"]

    def is_tiled(num_queries=20, num_keys=20, dtype=torch.float32, mask=None) -> bool:
        q, k = torch.randn(1, 2, num_queries, 8, dtype=dtype), torch.randn(1, 2, num_keys, 8, dtype=dtype)
        return op.choose(q, k, k, mask).name == "tiled"

    assert is_tiled() and is_tiled(dtype=torch.bfloat16)
    assert is_tiled(num_queries=101, num_keys=100) and not is_tiled(num_keys=101)
    assert not is_tiled(num_queries=15) and not is_tiled(num_keys=15) and not is_tiled(dtype=torch.float64)
    assert not is_tiled(mask=torch.ones(1, 1, 1, 20, dtype=torch.bool))
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_tiled()
    for holder, name, value in ((torch, "get_num_threads", lambda: 3), (tiled_attention.CROSSOVER, "size", NEVER)):
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(holder, name, value)
            assert not is_tiled(), name
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(tiled_attention, "multiplies", lambda dtype: False)
        assert is_tiled() and not is_tiled(dtype=torch.bfloat16)
    monkeypatch.setattr(attentions, "_matmul", SimpleNamespace(fp32_precision="bf16"))
    assert not is_tiled() and not is_tiled(dtype=torch.bfloat16)


def test_norm_and_rotation_are_the_same_with_and_without_gradients():
    norm = QKNorm(DiTConfig(hidden_size=24, num_attention_heads=2))
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(12, 1, 2, 12, requires_grad=True)
    rotary = rotary_table(grid_positions((3, 2, 2)), DiTConfig(hidden_size=24, num_attention_heads=2), torch.float32)
    out = norm(x, rotary)
    with torch.no_grad():
        assert torch.equal(norm(x.detach(), rotary), out)


def test_without_norm_and_rotation_queries_stay_what_they_are():
    norm = QKNorm(DiTConfig(hidden_size=24, num_attention_heads=2, qk_layernorm=False))
    x = torch.randn(12, 1, 2, 12)
    assert not list(norm.parameters()) and norm(x) is x


@pytest.mark.parametrize("rows", [1, 12])
def test_attentions_definition_takes_some_queries_at_a_time(monkeypatch, rows):
    q, k, v = torch.randn(3, 2, 2, 12, 8, dtype=torch.float64)
    mask = torch.rand(2, 1, rows, 12) < 0.7
    mask[..., 0] = True
    whole = reference.batch_attention.reference.compute(q, k, v, mask)
    monkeypatch.setattr(reference, "QUERIES", 5)
    torch.testing.assert_close(reference.batch_attention.reference.compute(q, k, v, mask), whole)
