"""Every variant of every op equals its reference in float64, forward and gradients, wherever it may be chosen.

A variant that no case reaches fails, unless it needs a GPU and there is none; a variant that is a little wrong is seen.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megadit.models.configs.config import DiTConfig
from megadit.models.networks.embeddings import rotary_table
from megadit.models.ops import linear, tiled_attention
from megadit.models.ops.crossover import CROSSOVERS
from megadit.models.ops.registry import OPS, Op, Variant
from megadit.models.packing.dense_layout import DenseLayout
from megadit.models.packing.pack_layout import CPU, PackLayout
from megadit.models.packing.segments import DenseRows, RowsByToken, Segment
from tests.models.ops.rounded import rounded

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-9}
"""Relative error of a whole tensor; of bfloat16, or 1.5 times the reference's own, which of attention is that of
`rounded.py`: kernels came to 1.3 times that, and to twelve times the error of the reference with nothing rounded."""
OF_TORCH = {"dense", "by_length_group", "varlen_flash", "sdpa", "float32_products"}
"""Attention by torch's kernels. Of float32 they are held to 2e-6, or to 5 times the reference's own error in float32:
on CPUs they take exponentials to 20 units in the last place. They came to 1.02e-6, or 4 times the reference's."""
NEED_A_GPU = {
    ("linear", "grouped_product"),
    ("attention", "varlen_flash"),
    ("modulated_norm", "by_run_of_tokens"),
    ("gated_residual", "by_run_of_tokens"),
}
"""`by_run_of_tokens` runs in test_row_sums.py."""
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """Inputs of an op: floating-point tensors are float64, of numbers that bfloat16 has."""

    name: str
    inputs: tuple
    is_meaningful: Tensor | None = None
    """bool [S]: which rows of the output hold meaning; None: all."""
    within: Callable[[], AbstractContextManager] = nullcontext
    """What the variant runs within."""
    has_gradients: bool = True


def numbers(*shape: int, size: float = 1.0) -> Tensor:
    return (size * torch.randn(shape, dtype=torch.float64)).bfloat16().double()


def random_pack(seed: int) -> PackLayout:
    """Segments of any lengths, neighbours sometimes equal, with and without padding."""
    chance = random.Random(seed)
    lengths = [chance.choice((1, 2, 7, 7, 30, 64)) for _ in range(chance.randint(1, 9))]
    grids = [(1, 1, length) if length % 2 else (2, 1, length // 2) for length in lengths]
    segments = [Segment(grid, chance.randint(0, 3)) for grid in grids]
    text = sum(segment.text_places for segment in segments)
    spare = chance.choice((0, 5, 40))
    return PackLayout.pack(segments, capacity=sum(lengths) + spare, text_capacity=text + min(spare, 2))


def random_packs(count: int) -> list[PackLayout]:
    """With a sample of several tokens and frames, and one of several words: else some gradients are zero."""
    packs = (random_pack(seed) for seed in itertools.count())
    return list(itertools.islice((one for one in packs if max(one.lengths) >= 30 and max(one.text_places) > 1), count))


PACKS = random_packs(6)


@contextmanager
def bf16_products() -> Iterator[None]:
    """As `train.matmul_precision=bf16` sets it, which float64 is spared."""
    matmul = torch.backends.mkldnn.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        yield
    finally:
        assert matmul.fp32_precision == "bf16", "a variant leaves the setting as it found it"
        matmul.fp32_precision = before


def linear_cases() -> Iterator[Case]:
    for bias, gelu in itertools.product((None, numbers(80)), (None, "none", "tanh")):
        inputs = (numbers(35, 2, 48), numbers(80, 48), bias, gelu)
        yield Case(f"bias {bias is not None}, gelu {gelu}", inputs)
        yield Case(
            f"no gradients, bias {bias is not None}, gelu {gelu}", inputs, within=torch.no_grad, has_gradients=False
        )
    yield Case("a batch first", (numbers(2, 35, 48).transpose(0, 1), numbers(80, 48)))
    yield Case("experts", (numbers(40, 16), numbers(4, 24, 16), None, None, torch.tensor([7, 0, 20, 13])))


def attention_cases() -> Iterator[Case]:
    for index, (pack, cross) in enumerate(itertools.product(PACKS, (False, True))):
        keys = pack.text_capacity if cross else pack.capacity
        size = (0.1, 1.0, 2.0)[index % 3]  # nearly uniform, nearly one key
        q, k, v = (
            numbers(pack.capacity, 1, 2, 24, size=size),
            numbers(keys, 1, 2, 24, size=size),
            numbers(keys, 1, 2, 24),
        )
        yield Case(
            f"pack {index // 2}, cross {cross}", (q, k, v, pack, cross), is_meaningful=pack.on("cpu").is_sample_S
        )
    mask = torch.arange(7) < torch.tensor([7, 1, 4])[:, None]
    for over, cross in (("sample", False), ("time", False), ("space", False), ("sample", True)):
        keys = 7 if cross else 24
        layout = DenseLayout((2, 3, 4), mask, torch.device("cpu"), over)
        yield Case(
            f"dense over {over}, cross {cross}",
            (*map(numbers, (24, keys, keys), *[[n] * 3 for n in (3, 2, 16)]), layout, cross),
        )


def batch_attention_cases() -> Iterator[Case]:
    mask = (torch.arange(7) < torch.tensor([7, 1, 4])[:, None])[:, None, None]
    for within in (nullcontext, bf16_products):
        yield Case(
            f"masked {within.__name__}",
            (numbers(3, 2, 12, 16), numbers(3, 2, 7, 16), numbers(3, 2, 7, 16), mask),
            within=within,
        )
        for sizes, size in itertools.product(((16, 16), (48, 16), (33, 70), (17, 40)), (0.1, 1.0, 3.0)):
            # heads side by side, as projections give them, and values among other numbers
            q, k, v = (numbers(2, length, 3, 24)[..., :20].transpose(1, 2) for length in (sizes[0], sizes[1], sizes[1]))
            yield Case(f"{sizes} of {size} {within.__name__}", (size * q, size * k, v, None), within=within)


GIVEN = PackLayout.pack(
    [Segment((3, 2, 2), 1, clean=((0, 4),))] * 2
    + [Segment((3, 2, 2), 1), Segment((2, 2, 2), 1, clean=((0, 2), (5, 8))), Segment((2, 1, 2), 1, clean=((1, 3),))],
    capacity=52,
    text_capacity=6,
)
"""Parts of some segments are given: they have rows of their own."""


def rows_of_packs() -> Iterator[tuple[str, int, int, Any]]:
    """(name, tokens, condition rows, what assigns them)."""
    for index, pack in enumerate((*PACKS, GIVEN)):
        count = len(pack.segment_of_row)
        yield f"pack {index}", pack.capacity, count, pack.rows
        yield f"pack {index} by token", pack.capacity, count, by_token(pack.rows.of_token(CPU))


def by_token(row_S: Tensor) -> RowsByToken:
    """Rows of which only tensors are known, whose table of runs has room for more."""
    edges = [0, *(row_S.diff().nonzero().flatten() + 1).tolist(), len(row_S)]
    return RowsByToken(row_S, torch.tensor([*edges, len(row_S), len(row_S)], dtype=torch.int32))


def modulated_norm_cases() -> Iterator[Case]:
    for weight in (None, numbers(48)):
        name = "RMS norm" if weight is not None else "LayerNorm"
        for of, tokens, count, rows in rows_of_packs():
            vectors = numbers(count, 48), numbers(count, 48)
            yield Case(f"{name}, {of}", (100 * numbers(tokens, 1, 48), *vectors, EPS, rows, weight))
        for count in (1, 3):
            vectors = numbers(count, 48), numbers(count, 48)
            yield Case(f"{name}, batch of {count}", (5 + numbers(30, count, 48), *vectors, EPS, None, weight))
        rows = DenseRows(30, ((0, 6), (20, 30)), 3)
        vectors = numbers(6, 48), numbers(6, 48)
        yield Case(f"{name}, given in a batch", (5 + numbers(30, 3, 48), *vectors, EPS, rows, weight))


def gated_residual_cases() -> Iterator[Case]:
    for of, tokens, count, rows in rows_of_packs():
        yield Case(of, (numbers(tokens, 1, 48), numbers(count, 48), numbers(tokens, 1, 48), rows))
    yield Case("batch", (numbers(30, 3, 48), numbers(3, 48), numbers(30, 3, 48)))
    rows = DenseRows(30, ((4, 6),), 3)
    yield Case("given in a batch", (numbers(30, 3, 48), numbers(6, 48), numbers(30, 3, 48), rows))


def qk_norm_rope_cases() -> Iterator[Case]:
    config = DiTConfig(hidden_size=48, num_attention_heads=2)
    rotary = rotary_table(torch.randint(0, 60, (90, 3)), config, torch.bfloat16)
    tables = [table.double() for table in rotary]
    for size, weight, turn in itertools.product((1e-3, 1.0, 1e3), (None, numbers(24)), (tables, [None, None])):
        if weight is not None or turn[0] is not None:
            inputs = (numbers(90, 1, 2, 24, size=size), weight, *turn, EPS)
            name = f"size {size}, weight {weight is not None}, rotation {turn[0] is not None}"
            yield Case(name, inputs)
            yield Case(f"{name}, no gradients", inputs, within=torch.no_grad, has_gradients=False)


def sinusoids_cases() -> Iterator[Case]:
    for scale, cos_first in itertools.product((1.0, 100.0), (False, True)):
        inputs = (numbers(7), 24, scale, 1.0, cos_first, torch.float64)
        yield Case(f"scale {scale}, cosines first {cos_first}", inputs)
        yield Case(f"scale {scale}, cosines first {cos_first}, no gradients", inputs, has_gradients=False)


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "linear": linear_cases,
    "attention": attention_cases,
    "batch_attention": batch_attention_cases,
    "modulated_norm": modulated_norm_cases,
    "gated_residual": gated_residual_cases,
    "qk_norm_rope": qk_norm_rope_cases,
    "sinusoids": sinusoids_cases,
}
CONSTANT = {"qk_norm_rope": (2, 3)}
"""Inputs without gradients."""


@pytest.fixture(autouse=True)
def everything_pays(monkeypatch):
    """Variants for large inputs and slow libraries are chosen for small inputs and on any processor."""
    if linear._BY_ONEDNN is None:
        pytest.skip("this torch was built without oneDNN")
    for crossover in CROSSOVERS.values():
        monkeypatch.setattr(crossover, "size", 1)
    for name, value in {"FEWEST": 16, "MOST_KEYS": 100, "TILE": 16}.items():
        monkeypatch.setattr(tiled_attention, name, value)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    torch.manual_seed(0)


def converted(case: Case, name: str, dtype: torch.dtype, device: str) -> list:
    """The inputs in one precision, on one device; floating-point ones are leaves."""

    def convert(index: int, value: Any) -> Any:
        if isinstance(value, DenseLayout):
            return replace(value, text_mask_BL=value.text_mask_BL.to(device), device=torch.device(device))
        if isinstance(value, RowsByToken):
            return RowsByToken(value.row_S.to(device), value.starts_P.to(device))
        if not isinstance(value, Tensor):
            return dtype if isinstance(value, torch.dtype) else value
        if not value.is_floating_point():
            return value.to(device)
        is_leaf = case.has_gradients and index not in CONSTANT.get(name, ())
        return value.detach().to(device, dtype).requires_grad_(is_leaf)  # a transposed tensor keeps its strides

    return [convert(index, value) for index, value in enumerate(case.inputs)]


def results(case: Case, compute: Callable[..., Tensor], inputs: list) -> list[Tensor]:
    """The output where it holds meaning, and the gradients."""
    out = compute(*inputs)
    if case.is_meaningful is not None:
        out = out[case.is_meaningful.to(out.device)]
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    if not leaves:
        return [out]
    weight = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).bfloat16().view_as(out)
    return [out, *torch.autograd.grad(out, leaves, weight.to(out), allow_unused=True)]


def relative_error(ours: list[Tensor | None], exact: list[Tensor | None]) -> float:
    """The largest, of any of the tensors; of what is zero nothing but zero is right."""
    pairs = [(a.double(), b) for a, b in zip(ours, exact, strict=True) if a is not None]
    assert all(a.shape == b.shape for a, b in pairs)
    return max(((a - b).norm() / b.norm().clamp(min=1e-30)).item() for a, b in pairs)


def errors(op: Op, variant: Variant, device: str, mistake=lambda compute: compute) -> Iterator[tuple[str, float]]:
    """(case, the error as a multiple of what is tolerated), of all cases that the variant suits."""
    for case, dtype in itertools.product(CASES[op.name](), TOLERANCE):
        with case.within():
            ours = converted(case, op.name, dtype, device)
            if not variant.suits(*ours):
                continue
            got = results(case, mistake(variant.compute), ours)
            with torch.set_grad_enabled(case.has_gradients):
                exact = results(case, op.reference.compute, converted(case, op.name, torch.float64, device))
            allowed = tolerance(op, variant, case, dtype, device, exact)
        assert all(each is None or each.dtype == dtype for each in got)
        yield f"{case.name}, {dtype}", relative_error(got, exact) / allowed


def tolerance(
    op: Op, variant: Variant, case: Case, dtype: torch.dtype, device: str, exact: list[Tensor | None]
) -> float:
    inputs, compute = converted(case, op.name, dtype, device), op.reference.compute
    is_attention, least, times = "attention" in op.name, TOLERANCE[dtype], 1.5
    if dtype == torch.float32:
        least, times = (2 * least, 5.0) if is_attention and variant.name in OF_TORCH else (least, 1.5 * is_attention)
    elif is_attention:
        compute = rounded(op.name, dtype)
        inputs = [x.detach().double().requires_grad_(x.requires_grad) if _is_number(x) else x for x in inputs]
    return max(least, times * relative_error(results(case, compute, inputs), exact))


def _is_number(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


ALL = [(op, variant) for op in OPS.values() for variant in (op.reference, *op.variants.values())]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "variant"), ALL, ids=[f"{op.name}-{variant.name}" for op, variant in ALL])
def test_variant_is_its_reference(op, variant, device):
    found = dict(errors(op, variant, device))
    if not found and device == "cpu" and (op.name, variant.name) in NEED_A_GPU:
        pytest.skip("this variant needs a GPU")
    if not found and device == "cuda":
        pytest.skip("this variant is for CPUs")
    assert found, "no case reaches this variant: add one to CASES"
    worst = max(found, key=found.get)
    assert found[worst] < 1, (worst, found[worst])


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return 1.1 * grad


MISTAKES = {
    "a result a little too large": lambda compute: (
        lambda *inputs: 1.1 * compute(*inputs).detach() + 0 * compute(*inputs)
    ),
    "a gradient a little too large": lambda compute: lambda *inputs: _WrongGradient.apply(compute(*inputs)),
    "the rows of another token": lambda compute: lambda x, *rest: compute(x.roll(1, 0).roll(1, -min(x.ndim, 2)), *rest),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_a_mistake_is_seen(op, mistake, device):
    """A perturbed copy of each variant fails the comparison, by the first case that tells."""
    for variant in (op.reference, *op.variants.values()):
        if variant.name in ("onednn", "one_pass") and "gradient" in mistake:
            continue  # they have none
        found = []
        for _, error in errors(op, variant, device, MISTAKES[mistake]):
            found.append(error)
            if error > 2:
                break
        assert not found or found[-1] > 2, (variant.name, found)


def test_a_variant_without_a_case_would_fail():
    def nothing(x):
        return x

    op = Op(nothing)
    try:
        op.variant("unreachable", suits=lambda x: False)(lambda x: x)
        with pytest.raises(AssertionError, match="no case reaches"), pytest.MonkeyPatch.context() as patch:
            patch.setitem(CASES, "nothing", lambda: iter([Case("any", (numbers(3),))]))
            test_variant_is_its_reference(op, op.variants["unreachable"], "cpu")
    finally:
        del OPS["nothing"]


def test_every_op_has_cases():
    assert CASES.keys() == OPS.keys()


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_the_same_inputs_give_the_same_bits(op):
    for case in CASES[op.name]():
        with case.within():
            first, second = (results(case, op, converted(case, op.name, torch.float32, "cpu")) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True) if a is not None), case.name


def test_layer_norm_of_the_reference_is_that_of_the_paper():
    x, shift, scale = numbers(6, 3, 48), numbers(3, 48), numbers(3, 48)
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    expected = (x - mean) / (variance + EPS).sqrt() * (1 + scale) + shift
    torch.testing.assert_close(OPS["modulated_norm"].reference.compute(x, shift, scale, EPS), expected)
    rms = (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    expected = x / rms * shift[0] * (1 + scale) + shift
    found = OPS["modulated_norm"].reference.compute(x, shift, scale, EPS, None, shift[0])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("cross", [False, True])
def test_attention_of_the_reference_is_torch_sample_by_sample(cross):
    for pack in PACKS:
        keys = pack.text_capacity if cross else pack.capacity
        q, k, v = numbers(pack.capacity, 1, 2, 24), numbers(keys, 1, 2, 24), numbers(keys, 1, 2, 24)
        out = OPS["attention"].reference.compute(q, k, v, pack, cross)
        starts, lengths = (pack.text_starts, pack.text_places) if cross else (pack.starts, pack.lengths)
        for index, segment in enumerate(pack.segments):
            if not segment.is_padding:
                here = slice(pack.starts[index], pack.starts[index] + pack.lengths[index])
                there = slice(starts[index], starts[index] + lengths[index])
                heads = (x[:, 0].transpose(0, 1) for x in (q[here], k[there], v[there]))
                expected = F.scaled_dot_product_attention(*heads).transpose(0, 1).flatten(1)
                torch.testing.assert_close(out[here, 0], expected)


@pytest.mark.parametrize("is_inference", [False, True])
def test_tiles_are_the_same_to_the_bit_with_any_number_of_threads(is_inference, monkeypatch):
    monkeypatch.undo()
    before, found = torch.get_num_threads(), []
    q, k, v, grad = torch.randn(4, 2, 3, 300, 16).unbind()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        if is_inference:
            with torch.inference_mode():
                found.append([tiled_attention.TiledAttention.apply(q, k, v)])
        else:
            out = tiled_attention.TiledAttention.apply(q, k, v)
            found.append([out, *torch.autograd.grad(out, leaves, grad)])
        assert torch.get_num_threads() == threads
        with ThreadPoolExecutor(1) as other:
            assert other.submit(torch.get_num_threads).result() == threads, "of threads that begin later"
    torch.set_num_threads(before)
    assert all(torch.equal(*pair) for one in found[1:] for pair in zip(found[0], one, strict=True))
    torch.testing.assert_close(found[0][0], F.scaled_dot_product_attention(q, k, v))


def test_a_tile_in_the_wrong_place_is_seen(monkeypatch):
    right = tiled_attention._probabilities

    def wrong(q, k):
        return ((rows, p.roll(1, 0) if rows.start else p) for rows, p in right(q, k))

    monkeypatch.setattr(tiled_attention, "_probabilities", wrong)
    found = errors(OPS["batch_attention"], OPS["batch_attention"].variants["tiled"], "cpu")
    assert min(error for name, error in found if "(33, 70) of 1.0" in name) > 10


def test_rows_in_another_order_are_seen():
    for name in ("modulated_norm", "gated_residual"):
        variant = OPS[name].variants["by_token"]

        def flipped(*inputs, compute=variant.compute):
            return compute(*(by_token(x.row_S.flip(0)) if isinstance(x, RowsByToken) else x for x in inputs))

        found = errors(OPS[name], replace(variant, compute=flipped), "cpu")
        assert min(error for case, error in found if "pack 0" in case) > 2


def test_rotation_of_the_reference_turns_pairs():
    config = DiTConfig(hidden_size=24, num_attention_heads=2)
    x, weight = numbers(12, 1, 2, 12), numbers(12)
    rotary = rotary_table(torch.randint(0, 9, (12, 3)), config, torch.float64)
    found = OPS["qk_norm_rope"].reference.compute(x, weight, *rotary, EPS)
    normed = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    turn = torch.complex(rotary.cos.chunk(2, dim=-1)[0], rotary.sin.chunk(2, dim=-1)[1])
    pairs = torch.complex(*normed.chunk(2, dim=-1)) * turn
    torch.testing.assert_close(found, torch.cat([pairs.real, pairs.imag], dim=-1))
    rotated = OPS["qk_norm_rope"].reference.compute(x, None, *rotary, EPS)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))
