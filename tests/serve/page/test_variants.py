"""A teacher and its students on one page: what a visitor chooses among, and that each is called as it says."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megadit.infer.media.video_io import encode_mp4
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.models.bundle import Bundle
from megadit.models.convert.adapters.files import read_adapter, write_adapter
from megadit.models.diffusion.settings import SamplingSettings
from megadit.serve.client import VideoClient
from megadit.serve.contract import VideoRequest
from megadit.serve.launch.local_server import LocalServer
from megadit.serve.page.studio import Studio, variants_of
from megadit.serve.repository.build import build_repository
from megadit.serve.repository.model_config import Scheduling
from megadit.serve.service_info import AdapterInfo, Limits, ServiceInfo
from tests.bundles import CONFIG, write_tiny_bundle
from tests.infer.conftest import make_adapter

from ..test_triton import frames_of

PLAIN = {"num_steps": 8, "guidance": 4.0, "sampler": "euler", "eta": 1.0, "sigmas": []}
FEW = {"num_steps": 2, "guidance": 1.0, "sampler": "consistency", "eta": 0.0, "sigmas": [20.0, 2.0]}
ONE = FEW | {"num_steps": 1, "sigmas": [20.0]}
THREE = FEW | {"num_steps": 3, "sigmas": [20.0, 3.0, 1.0]}
LIMITS = Limits(max_frames=5, max_pixels=10**6, max_work=10**9)


def client_of(defaults, *, students=(), adapters=None, told=()):
    """Of a model with these defaults; `students` are others of its server, `adapters` what those are made for."""
    about = None if adapters is None else AdapterInfo(names=(*adapters,), base="", network={}, defaults=adapters)
    info = ServiceInfo(
        defaults=defaults,
        limits=LIMITS,
        samplers=(),
        size_multiple=8,
        students=tuple(students),
        adapters=about,
        guidance_embedding_range=told,
    )
    return SimpleNamespace(info=lambda: info, with_model=lambda model: client_of(students[model]))


def test_ways_have_names_that_say_how_often_a_network_is_asked():
    assert [*variants_of(client_of(PLAIN))] == ["best"] and [*variants_of(client_of(ONE))] == ["1 call"]
    variants = variants_of(
        client_of(PLAIN, students={"text_to_video_2_calls": FEW}, adapters={"fast": FEW, "faster": ONE})
    )
    assert [*variants] == ["best", "2 calls", "2 calls, fast", "1 call"]
    own = {"seed": 1, "prompt": "a"}
    asked = [variant.request(VideoRequest(**own)) for variant in variants.values()]
    assert [(each.num_steps, each.guidance, each.eta) for each in asked] == [(8, 4, 1), *[(2, 1, 0)] * 2, (1, 1, 0)]
    assert [each.adapters for each in asked] == [("",), ("",), ("fast",), ("faster",)]
    half = variants["1 call"].request(VideoRequest(**own, adapters=("faster:0.5", "zog")))
    assert half.adapters == ("faster:0.5", "zog") and half.num_steps == 1, "which a visitor may have named, too"


def test_the_negative_prompt_of_a_way_is_its_own_until_a_visitor_writes_one(monkeypatch):
    monkeypatch.setattr(Studio, "_measure", lambda studio: 1.0)
    told = FEW | {"negative_prompt": ""}
    studio = Studio(client_of(PLAIN | {"negative_prompt": "grey"}, students={"text_to_video_2_calls": told}))
    for written, expected in (("grey", ["grey", ""]), ("blue", ["blue", "blue"]), ("", ["", ""])):
        asked = [
            studio.request(seed=1, prompt="a", variant=variant, negative_prompt=written) for variant in studio.variants
        ]
        assert [each.negative_prompt for each in asked] == expected


def test_a_network_that_is_told_the_scale_is_asked_once_at_each_that_it_knows():
    size = {"num_frames": 1, "height": 8, "width": 8}
    guided = FEW | {"guidance": 4.0}
    plain, told = (variants_of(client_of(guided | size, told=scales)) for scales in ((), (1.5, 6.0)))
    assert [*plain] == ["best"] and [*told] == ["2 calls"], "a student is one at any scale that it is told"
    work = [variant.work(variant.request(VideoRequest(prompt="a"))) for variant in (plain["best"], told["2 calls"])]
    assert work == [4 * 64, 2 * 64]
    assert plain["best"].scales == (1.0, 10.0) and told["2 calls"].scales == (1.5, 6.0)


@pytest.fixture(scope="module")
def served(tritonserver, bundle_dir, tmp_path_factory):
    """(folder of a student and of an adapter, a studio): a teacher with both beside it, in one tritonserver."""
    folder = tmp_path_factory.mktemp("students")
    bundle = Bundle.open(bundle_dir)
    few = SamplingSettings.from_dict(bundle.defaults.to_dict() | FEW)
    write_tiny_bundle(folder / "student", config=replace(CONFIG, hidden_size=48), defaults=few)
    plain = read_adapter(make_adapter(folder / "plain", bundle_dir, 1))
    write_adapter(folder / "adapters" / "learnt", replace(plain, defaults=THREE))
    repository = build_repository(
        bundle_dir,
        folder / "repository",
        scheduling=Scheduling(device="cpu"),
        adapters=folder / "adapters",
        students=[folder / "student"],
    )
    with LocalServer(repository, log=folder / "triton.log", stop_seconds=3) as running:
        yield folder, Studio(VideoClient(f"grpc://{running.grpc_url}"))


@pytest.mark.slow
def test_a_visitor_chooses_between_the_teacher_and_its_students(chromium, served, bundle_dir):
    pytest.importorskip("gradio")
    from megadit.serve.page.layout import build_page, launch

    folder, studio = served
    demo = build_page(studio)
    page = chromium.new_page(viewport={"width": 1280, "height": 1200})
    page.set_default_timeout(120_000)
    teacher, student = (TextToVideo.from_pretrained(path, device="cpu") for path in (bundle_dir, folder / "student"))
    learnt = {str(folder / "adapters" / "learnt"): 1.0}
    try:
        page.goto(launch(demo, studio, host="127.0.0.1", port=None))
        page.fill("#prompt textarea", "a red seven")
        for variant, steps, pipeline, adapters in (
            ("2 calls", 2, student, {}),
            ("3 calls", 3, teacher, learnt),
            ("best", 4, teacher, {}),
        ):
            page.locator("#way_of_video").get_by_text(variant, exact=True).click()
            number = "document.querySelector('input[type=number][aria-label*=Steps]').value"
            page.wait_for_function(f"{number} == '{steps}'")
            page.click("#make")
            page.wait_for_function(f"document.querySelector('#facts').innerText.startsWith('a red seven\\n{variant}')")
            page.wait_for_selector("#stage video")
            page.wait_for_selector("#make:not([disabled])")
            shown, seed = page.locator("#facts").inner_text(), int(page.locator("#seed input").input_value())
            assert f"{steps} steps" in shown and ("guidance 1\n" in shown) == (variant != "best")
            source = page.locator("#stage video").get_attribute("src")
            made = frames_of(page.request.get(page.url.rstrip("/") + source).body())
            (expected,) = pipeline(["a red seven"], seeds=seed, adapters=adapters)
            assert expected.settings.num_steps == steps
            assert np.abs(made - frames_of(encode_mp4(expected.video, 8))).max() <= 1, variant
        page.get_by_role("tab", name="Side by side").click()
        chosen = [page.locator(f"#way_{side} input:checked").input_value() for side in ("left", "right")]
        assert chosen == ["best", "2 calls"], "a student beside its teacher"
        page.fill("#prompt2 textarea", "a red seven")
        page.click("#make2")
        for side in ("left", "right"):
            page.wait_for_selector(f"#stage_{side} video")
    finally:
        page.close()
        demo.close()
