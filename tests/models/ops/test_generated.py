"""What inductor would make of the chains on a Hopper GPU: few kernels that move little, and the same for all sizes."""

import re
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[2] / "gpu"))

import generated  # noqa: E402

from megadit.models.networks import embeddings  # noqa: E402
from megadit.models.ops import fusion, qk_norm_rope  # noqa: E402

MOST = 1.3
"""Bytes moved, of the least possible."""
DOCUMENT = Path(__file__).parents[3] / "docs" / "kernels.md"


@pytest.fixture(scope="module")
def found():
    return generated.generated(generated.chains)


@pytest.mark.slow
def test_chains_move_little_more_than_they_must(found):
    assert len(found) == 9
    assert {chain.name: chain.ratio for chain in found if not 1 <= chain.ratio <= MOST} == {}


@pytest.mark.slow
def test_a_chain_is_one_kernel_and_what_adds_its_parts_up(found):
    """Whatever else there is moves no more than a tenth of the first."""
    for chain in found:
        first, *others = sorted((kernel.moved for kernel in chain.kernels), reverse=True)
        assert len(others) <= 2 and sum(others) <= 0.1 * first, chain.name


def test_sinusoids_are_one_kernel():
    of_level = generated.generated(lambda: embeddings.sinusoids(torch.rand(8), 128, 100.0, 0.0, False, torch.bfloat16))
    assert {chain.name: len(chain.kernels) for chain in of_level} == {"embeddings.sinusoids": 1}


@pytest.mark.slow
def test_the_width_is_a_constant_and_nothing_else(found):
    compiled = [chain for chain in found if "async_compile.triton" in chain.source]
    assert len(compiled) == 7
    for chain in compiled:
        if "norm" in chain.name:
            assert re.search(r"r0_numel = (3072|128)$", chain.source, re.M), chain.name
        assert not re.search(r"xnumel = \d{4,}$", chain.source, re.M), f"{chain.name} is for one number of tokens"


LIMIT_OF_INT32 = re.compile(r"[^<>=]+ <= (s\d+ \+ )?21474835\d\d|[^<>=]+ <= (s\d+ \+ )?2147483647")


@pytest.mark.slow
def test_nothing_is_compiled_anew_for_other_sizes(found):
    """But where an index no longer fits into 32 bits."""
    others = [guard for chain in found for guard in chain.guards if not LIMIT_OF_INT32.fullmatch(guard)]
    assert others == []


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the document's figures are of torch 2.13")
def test_the_document_has_these_figures(found):
    assert "\n".join(generated.table(found)) in DOCUMENT.read_text(), "python tests/gpu/generated.py prints the table"


@pytest.mark.slow
def test_without_the_options_a_product_goes_through_memory(monkeypatch):
    """Negative control: as it was, by inductor's own thresholds."""
    monkeypatch.setattr(fusion, "OPTIONS", {})

    def rotation() -> None:
        x = generated._normal(4096, 1, generated.HEADS, generated.WIDTH // generated.HEADS)
        table = generated._normal(4096, 1, 1, x.shape[-1]).detach()
        out = qk_norm_rope.qk_norm_rope(x, generated._normal(x.shape[-1]), table, table, 1e-6)
        out.backward(out.detach())

    backward = generated.generated(rotation)[-1]
    assert backward.name == "qk_norm_rope._norm_rotate_backward" and backward.ratio > 2
    assert not all(map(LIMIT_OF_INT32.fullmatch, backward.guards)), "and small tensors are another kind"
