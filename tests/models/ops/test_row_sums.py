"""Kernels of our own in Triton, run by its interpreter on a CPU; test_compiled_kernels.py compiles them."""

from itertools import pairwise
from unittest import mock

import pytest
import torch

from megadit.models.megatron.graphed_blocks import _most_starts
from megadit.models.ops import fusion
from megadit.models.ops.registry import OPS, Variant
from megadit.models.packing.pack_layout import CPU, PackLayout
from megadit.models.packing.segments import LONGEST_RUN, RowsByToken, Segment

triton = pytest.importorskip("triton")
row_sums = pytest.importorskip("megadit.models.ops.row_sums")

PACK = PackLayout.pack(
    [Segment((1, 1, 5), 1), Segment((2, 1, 20), 1, clean=((0, 3), (38, 40))), Segment((1, 1, 3), 1)],
    capacity=50,
    text_capacity=4,
)
"""A sample longer than a run, parts of which are given, between short ones, and padding."""
WIDTH, EPS = 40, 1e-6
CUT_OFF = 1 if torch.cuda.is_available() else 2
"""The interpreter cuts float32 off where a GPU rounds to the nearest bfloat16: twice the error."""


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def kernels_run_here(monkeypatch):
    """On a CPU by Triton's interpreter (conftest.py)."""
    monkeypatch.setattr(fusion, "KERNELS_ON", {DEVICE})
    fusion.triton_works.cache_clear()
    yield
    fusion.triton_works.cache_clear()


def filled_up() -> RowsByToken:
    """As a recording has them: with room for more runs."""
    starts_P = PACK.rows.starts_of_runs(CPU)
    missing = _most_starts(len(PACK.rows.of_token(CPU)), 7) - len(starts_P)
    assert missing > 1
    return RowsByToken(PACK.rows.of_token(CPU), torch.nn.functional.pad(starts_P, (0, missing), value=50))


ROWS = {"pack": PACK.rows, "recording": filled_up()}


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).bfloat16().double()


def inputs_of(name: str, *, rows, is_rms: bool) -> tuple:
    torch.manual_seed(0)
    x, y = (5 + numbers(50, 1, WIDTH) for _ in range(2))
    shift, scale = numbers(len(PACK.segment_of_row), 2 * WIDTH).chunk(2, dim=-1)  # as a modulation's product has them
    if name == "modulated_norm":
        return x, shift, scale, EPS, rows, numbers(WIDTH) if is_rms else None
    return x, shift, y, rows


def results(variant: Variant, inputs: tuple, dtype: torch.dtype) -> list[torch.Tensor]:
    """The output and the gradients of all tensors, in float64."""
    converted = [x.to(DEVICE, dtype).requires_grad_() if isinstance(x, torch.Tensor) else x for x in inputs]
    leaves = [x for x in converted if isinstance(x, torch.Tensor)]
    out = variant.compute(*converted)
    weight = torch.cos(torch.arange(out.numel())).bfloat16().view_as(out).to(out)
    return [x.double().cpu() for x in (out, *torch.autograd.grad(out, leaves, weight))]


def errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    return [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]


CASES = [("modulated_norm", False), ("modulated_norm", True), ("gated_residual", False)]


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("name", "is_rms"), CASES)
def test_a_kernel_is_as_exact_as_its_reference(name, is_rms, rows):
    op, inputs = OPS[name], inputs_of(name, rows=rows, is_rms=is_rms)
    exact = results(op.reference, inputs, torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        variant = op.choose(*(x.to(DEVICE, dtype) if isinstance(x, torch.Tensor) else x for x in inputs))
        assert variant.name == "by_run_of_tokens"
        ours = errors(results(variant, inputs, dtype), exact)
        theirs = errors(results(op.reference, inputs, dtype), exact)
        most = [1e-6 if dtype == torch.float32 else 1.5 * CUT_OFF * error for error in theirs]
        assert all(error <= bound for error, bound in zip(ours, most, strict=True)), (dtype, ours, theirs)


def test_without_a_compiler_chains_compute_the_same(monkeypatch):
    """Negative control: the kernel itself is as broken as what tries it out."""
    fails = mock.Mock(side_effect=RuntimeError("Failed to find C compiler.\nPlease"))
    monkeypatch.setattr(row_sums, "gate_backward", fails)
    op, inputs = OPS["gated_residual"], inputs_of("gated_residual", rows=PACK.rows, is_rms=False)
    inputs = tuple(x.to(DEVICE, torch.float32) if isinstance(x, torch.Tensor) else x for x in inputs)
    with pytest.warns(UserWarning, match=r"do not run, so that a step takes longer: Failed to find C compiler\.$"):
        variant = op.choose(*inputs)
    assert variant.name != "by_run_of_tokens" and op.choose(*inputs) is variant
    ours, exact = results(variant, inputs, torch.float32), results(op.reference, inputs, torch.float64)
    assert max(errors(ours, exact)) < 1e-6
    with pytest.raises(RuntimeError):
        results(op.variants["by_run_of_tokens"], inputs, torch.float32)
    assert fails.call_count == 2, "tried out once"


def test_the_same_pack_gives_the_same_bits():
    op, inputs = OPS["modulated_norm"], inputs_of("modulated_norm", rows=PACK.rows, is_rms=False)
    first, second = (results(op.variants["by_run_of_tokens"], inputs, torch.float32) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_runs_are_of_one_row_and_not_too_long():
    starts, row_S = PACK.rows.starts_of_runs(CPU).tolist(), PACK.rows.of_token(CPU)
    assert starts == sorted(set(starts)) and (starts[0], starts[-1]) == (0, 50)
    runs = [row_S[first:stop] for first, stop in pairwise(starts)]
    assert all(len(run) <= LONGEST_RUN and len(run.unique()) == 1 for run in runs)
    assert len(runs) == 7, "5, 3 that are given, 32 of 35 and the rest, 2 that are given, 3, padding"
