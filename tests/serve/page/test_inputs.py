"""Inputs of the page without a browser; gradio takes seconds to import, once for this file."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from megadit.models.shared.errors import UserError
from megadit.serve.contract import VideoRequest
from megadit.serve.page.studio import Variant
from megadit.serve.page.view import Preset, facts
from megadit.serve.service_info import Limits, ServiceInfo

DEFAULTS = {"num_steps": 4, "guidance": 2.0, "sampler": "euler", "eta": 1.0}
SIZE = Preset(name="Video", num_frames=5, height=16, width=24)


def variant_of(name: str, told: tuple[float, ...] = (), **changes) -> Variant:
    limits = Limits(max_frames=5, max_pixels=10**6, max_work=10**9)
    info = ServiceInfo(
        defaults=DEFAULTS | changes,
        limits=limits,
        samplers=("euler", "unipc"),
        size_multiple=8,
        guidance_embedding_range=told,
    )
    return Variant(name=name, client=None, info=info, defaults=info.defaults)


def samplings(*variants: Variant, ways: tuple[dict, ...] = ({},)) -> list:
    """The inputs for each of `ways`, of a page that has these variants."""
    gradio = pytest.importorskip("gradio")
    from megadit.serve.page.inputs import Sampling

    first, *others = variants
    studio = SimpleNamespace(info=first.info, variants={each.name: each for each in variants})
    studio.first_variant, studio.has_variants = first.name, bool(others)
    with gradio.Blocks():
        sizes = SimpleNamespace(presets=[SIZE], follow=lambda *_: None, radio=gradio.Radio([]))
        sizes.labelled = lambda *chosen: chosen
        return [Sampling(studio, sizes, elem_id=f"way_{place}", **way) for place, way in enumerate(ways)]


def test_a_slider_at_its_default_is_left_out():
    """Churn and eta of the default sampler do not suit every other."""
    (sampling,) = samplings(variant_of("best"))
    plain = {"num_steps": 4, "guidance": 2.0, "sampler": "unipc"}
    assert len(sampling.components) == 5 and sampling.sliders[0].value == 1.0 and not sampling.variant.visible
    assert sampling.of("best", 4, 2, "unipc", 1) == plain | {"variant": "best"}
    assert sampling.of("best", 4, 2, "unipc", 0.5) == plain | {"variant": "best", "eta": 0.5}
    assert "eta 0.5" in facts(VideoRequest(prompt="a", seed=1, **plain, eta=0.5))


def test_sliders_of_guidance_end_where_a_way_does():
    few = variant_of("2 calls", (1.5, 6.0), num_steps=2, guidance=4.0)
    ways = ({}, {"variant": "2 calls", "has_guidance": False})
    first, lowest = samplings(variant_of("best"), few, ways=ways)
    assert [(each.guidance.minimum, each.guidance.value) for each in (first, lowest)] == [(1, 2), (1.5, 1.5)]
    steps, scale, *_, told = first._chosen("2 calls")
    assert (steps, scale.value, scale.minimum, scale.maximum) == (2, 4.0, 1.5, 6.0) and told == ("2 calls", 2, 4.0)


def test_what_is_painted_becomes_white():
    pytest.importorskip("gradio")
    from megadit.serve.page.conditioning import _painted

    layer = np.zeros((4, 6, 4), np.uint8)
    with pytest.raises(UserError, match="paint the part"):
        _painted({"layers": [layer]})
    layer[1, 2, 3] = 255
    assert np.argwhere(np.asarray(Image.open(io.BytesIO(_painted({"layers": [layer]}))))[..., 0]).tolist() == [[1, 2]]
