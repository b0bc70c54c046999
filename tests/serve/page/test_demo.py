"""The demo: its work without a page, and the page as a visitor meets it, in headless chromium."""

import pickle
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megadit.infer.media.video_io import encode_mp4, read_video, write_video
from megadit.models.shared.cli import verbs
from megadit.models.shared.errors import UserError
from megadit.serve.client import VideoClient
from megadit.serve.contract import VideoRequest
from megadit.serve.events import CancelledError, ServiceError, StepDone, UnavailableError, VideoResult
from megadit.serve.page import demo
from megadit.serve.page.demo import service
from megadit.serve.page.studio import Studio
from megadit.serve.page.view import Preset, facts, finished_stage, message_stage, presets, progress_stage
from megadit.serve.service_info import Limits, ServiceInfo

from ..test_triton import frames_of

SCREENS = {"desktop": (1280, 900), "phone": (390, 844)}
on_every_screen = pytest.mark.parametrize("visit", SCREENS.values(), ids=SCREENS, indirect=True)
PRESET = Preset(name="Video", num_frames=5, height=16, width=24)


@pytest.fixture(scope="module")
def studio(server):
    return Studio(VideoClient(f"grpc://{server.grpc_url}"))


def test_presets_are_sizes_that_the_service_takes():
    info = ServiceInfo(
        defaults={"num_frames": 9, "height": 32, "width": 32},
        limits=Limits(max_frames=12, max_pixels=9 * 32 * 40, max_work=10**9),
        samplers=("euler",),
        size_multiple=16,
    )
    found = presets(info)
    assert [each.name for each in found] == ["Video", "Image"], "longer, wide and tall would be refused"
    assert all(each.height % 16 == 0 and each.width % 16 == 0 for each in found)


def test_labels_tell_size_and_time():
    assert PRESET.label(3.2) == "Video · 24×16, 5 frames, about 3 s"
    assert replace(PRESET, name="Image", num_frames=1).label(0.1) == "Image · 24×16, under 1 s"


def test_nothing_a_visitor_writes_becomes_html():
    request = VideoRequest(
        prompt="<script>alert(1)</script>", negative_prompt='"><img src=x>', seed=1, num_steps=2, guidance=1.0
    )
    shown = (
        facts(request) + message_stage(PRESET, "<b>", "<script>") + finished_stage(PRESET, '"><script>', "video/mp4")
    )
    assert "<script" not in shown and "<img src=x" not in shown


def test_the_preview_sharpens_as_the_bar_grows():
    def stage(step):
        return progress_stage(PRESET, StepDone(step=step, num_steps=10, sigma=1, seconds_left=2, preview=b"x"))

    blurs = [float(re.search(r"blur\((.*?)px", stage(step)).group(1)) for step in (1, 5, 10)]
    assert blurs == sorted(blurs, reverse=True) and blurs[-1] == 0
    assert "width: 50%" in stage(5) and "2 s left" in stage(5)


def test_a_take_is_kept_with_a_picture_and_the_oldest_goes(server):
    studio = Studio(VideoClient(f"grpc://{server.grpc_url}"), max_cached=2)
    request = studio.request(prompt="a", seed=5)
    takes = [studio.keep(request, event) for _ in range(3) for event in studio.run("me", request) if is_video(event)]
    assert not takes[0].path.exists() and not studio._running
    assert takes[1].path.read_bytes() == takes[2].path.read_bytes(), "the same request gives the same video"
    assert read_video(takes[2].path)[0].shape == (5, 16, 24, 3)
    assert takes[2].picture.exists()
    assert len({take.path.parent.name for take in takes}) == 3, "another visitor's cannot be guessed"
    assert min(len(take.path.parent.name) for take in takes) > 20
    size = len(pickle.dumps(replace(takes[2], request=None)))
    assert size < 1000 < len(takes[2].path.read_bytes()), "a page keeps paths and not videos"


def is_video(event) -> bool:
    return isinstance(event, VideoResult)


def test_a_new_seed_is_new_and_a_given_one_stays(studio):
    assert studio.request(prompt="a", seed=7).seed == 7
    assert len({studio.request(prompt="a", seed=None).seed for _ in range(8)}) > 1


def test_estimates_grow_with_the_work(studio):
    short, long = (studio.estimate(studio.request(prompt="a", seed=1, num_steps=steps)) for steps in (2, 20))
    assert 0 < short and long == pytest.approx(10 * short)


def test_cancelling_reaches_the_visitor_s_own_request_alone(studio):
    long = studio.request(prompt="a", seed=1, num_steps=2500)
    events = studio.run("visitor", long)
    next(events)
    studio.cancel("somebody else")
    next(events)
    studio.cancel("visitor")
    with pytest.raises(CancelledError):
        list(events)


def test_two_requests_side_by_side_give_both_videos(studio):
    requests = [studio.request(prompt="a", seed=1, guidance=scale) for scale in (1.0, 4.0)]
    results = {side: event for side, event in studio.run_side_by_side("me", requests) if is_video(event)}
    assert results.keys() == {0, 1}
    assert [results[side].settings["guidance"] for side in (0, 1)] == [1.0, 4.0]


def test_one_refused_side_leaves_the_other(studio):
    requests = [studio.request(prompt="a", seed=1, sampler=name) for name in ("nonsense", "euler")]
    events = list(studio.run_side_by_side("me", requests))
    assert any(side == 0 and isinstance(event, Exception) for side, event in events)
    assert any(side == 1 and is_video(event) for side, event in events)


def test_a_service_that_cannot_answer_is_told_in_one_line(monkeypatch, capsys):
    class Failing:
        def info(self):
            raise ServiceError("text_to_video is not a model of megadit")

    monkeypatch.setattr(demo, "_client", lambda *_: nullcontext(Failing()))
    monkeypatch.setitem(sys.modules, "megadit.serve.page.layout", SimpleNamespace(show=None))  # gradio takes seconds
    monkeypatch.setattr(demo, "interrupt_at_ending_signals", lambda: None)
    assert demo.main([]) == 2
    assert capsys.readouterr().err == "error: text_to_video is not a model of megadit\n"


def test_without_service_and_bundle_it_says_what_to_do(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert verbs.main(["serve", "demo", "--url", "grpc://127.0.0.1:1"]) == 2
    assert "no Triton server responds" in capsys.readouterr().err
    with pytest.raises(UserError, match="make demo"), service(None, "no/such/bundle"):
        pass
    assert verbs.main(["serve", "demo", "--student", "somewhere"]) == 2
    assert "--student needs its teacher" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def address(studio):
    pytest.importorskip("gradio")
    from megadit.serve.page.layout import build_page, launch

    page = build_page(studio)
    yield launch(page, studio, host="127.0.0.1", port=None)
    page.close()


@pytest.fixture
def visit(chromium, address, request):
    width, height = getattr(request, "param", SCREENS["desktop"])
    page = chromium.new_page(viewport={"width": width, "height": height})
    page.set_default_timeout(60_000)
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(address)
    page.wait_for_selector("#prompt textarea")
    yield page
    page.close()
    assert not problems


def video_bytes(page) -> bytes:
    source = page.locator("#stage video").get_attribute("src")
    return page.request.get(page.url.rstrip("/") + source).body()


@pytest.mark.slow
def test_a_visitor_makes_a_video_and_makes_it_again(visit, pipeline, tmp_path):
    page = visit
    page.fill("#prompt textarea", "a red seven")
    page.click("#make")
    page.wait_for_selector("#stage video")
    page.wait_for_function("document.querySelector('#stage video').currentTime > 0.1")  # it plays
    seed = int(page.locator("#seed input").input_value())
    first = video_bytes(page)
    expected = pipeline(["a red seven"], seeds=seed)[0]
    shown = page.locator("#facts").inner_text()
    assert f"seed {seed}" in shown and "4 steps" in shown
    page.click("#again")
    page.wait_for_function("document.querySelector('#facts').innerText.includes('made again')")
    page.wait_for_selector("#again:not([disabled])")
    page.wait_for_selector("#stage video")
    assert video_bytes(page) == first
    assert page.locator("#gallery img").count() == 2
    with page.expect_download() as download:
        page.click("#download")
    frames, fps = read_video(download.value.path().rename(download.value.path().with_suffix(".mp4")))
    write_video(tmp_path / "expected.mp4", expected.video, 8)
    assert np.array_equal(frames, read_video(tmp_path / "expected.mp4")[0]) and fps == 8
    page.locator("#gallery button").last.click()
    page.wait_for_function(f"document.querySelector('#facts').innerText.includes('seed {seed}')")


@pytest.mark.slow
def test_progress_moves_and_cancel_ends_it(visit, studio, monkeypatch):
    page = visit
    long = studio.request
    monkeypatch.setattr(studio, "request", lambda **settings: long(**settings | {"num_steps": 5000}))
    page.fill("#prompt textarea", "a long one")
    page.click("#make")
    page.wait_for_selector("#stage img[alt=preview]")
    first = page.locator("#stage .told").inner_text()
    page.wait_for_function("text => document.querySelector('#stage .told').innerText != text", arg=first)  # it moves
    page.click("#cancel")
    page.wait_for_function("document.querySelector('#stage').innerText.includes('Cancelled')")
    page.wait_for_selector("#make:not([disabled])")


@pytest.mark.slow
@on_every_screen
def test_a_video_is_paused_sought_and_made_large_by_keyboard(visit):
    """And however long its prompt is, its buttons stay beside it."""
    page, prompt = visit, "a red seven moves left. " * 80
    page.fill("#prompt textarea", prompt)
    page.press("#prompt textarea", "Shift+Enter")
    page.wait_for_selector("#stage video")
    stage, button = (page.locator(name).bounding_box() for name in ("#stage", "#download"))
    assert button["y"] < stage["y"] + stage["height"] + 300 and prompt.strip() in page.locator("#facts").text_content()
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    video = page.locator("#stage video")
    assert video.get_attribute("controls") is not None
    video.focus()
    page.wait_for_function("!document.querySelector('#stage video').paused")
    page.keyboard.press("Space")
    page.wait_for_function("document.querySelector('#stage video').paused")
    before = video.evaluate("video => { video.currentTime = 0; return video.currentTime }")
    page.keyboard.press("ArrowRight")
    page.wait_for_function("before => document.querySelector('#stage video').currentTime != before", arg=before)
    page.keyboard.press("f")
    page.wait_for_function("document.fullscreenElement?.tagName === 'VIDEO'")


@pytest.mark.slow
@on_every_screen
def test_a_failure_offers_no_other_video_and_names_no_address(visit, studio, monkeypatch, capfd):
    page = visit
    page.fill("#prompt textarea", "a red seven")
    page.click("#make")
    page.wait_for_selector("#download:not([disabled])")

    def fails(*_):
        raise UnavailableError("no gateway responds at http://10.0.0.7:8080: [Errno 111] refused")
        yield

    monkeypatch.setattr(studio, "run", fails)
    for button, stage in (("#make", "#stage"), ("#make2", "#stage_left")):
        if button == "#make2":
            page.get_by_role("tab", name="Side by side").click()
            page.fill("#prompt2 textarea", "a red seven")
        page.click(button)
        page.wait_for_function(f"document.querySelector('{stage}').innerText.includes('That did not work')")
        assert "10.0.0.7" not in page.content() and "Try again" in page.locator(stage).inner_text()
        if button == "#make":
            assert page.locator("#download").is_disabled() and page.locator("#again").is_disabled()
    assert "http://10.0.0.7:8080" in capfd.readouterr().err, "whoever runs the page is told"
    page.get_by_role("tab", name="Make a video").click()
    page.locator("#gallery button").first.click()
    page.wait_for_selector("#download:not([disabled])")


@pytest.mark.slow
def test_settings_side_by_side(visit):
    page = visit
    page.get_by_role("tab", name="Side by side").click()
    page.fill("#prompt2 textarea", "a red seven")
    page.click("#make2")
    page.wait_for_selector("#stage_left video")
    page.wait_for_selector("#stage_right video")
    sources = [page.locator(f"#stage_{side} video").get_attribute("src") for side in ("left", "right")]
    assert sources[0] != sources[1]


@pytest.mark.slow
def test_a_visitor_chooses_an_adapter(visit, pipeline, adapter_dir):
    page = visit
    page.fill("#prompt textarea", "a red seven")
    page.locator("#adapters input").click()
    page.get_by_role("option", name="one").click()
    page.fill("#scale input[type=number]", "0.5")
    page.locator("#scale input[type=number]").press("Tab")
    page.click("#make")
    page.wait_for_selector("#stage video")
    assert "adapter one:0.5" in page.locator("#facts").inner_text()
    seed = int(page.locator("#seed input").input_value())
    adapted = pipeline(["a red seven"], seeds=seed, adapters={str(adapter_dir / "one"): 0.5})[0].video
    plain = pipeline(["a red seven"], seeds=seed)[0].video
    made = frames_of(video_bytes(page))
    assert np.abs(made - frames_of(encode_mp4(adapted, 8))).max() <= 1
    assert np.abs(made - frames_of(encode_mp4(plain, 8))).max() > 1


@pytest.mark.slow
def test_on_a_phone_the_video_comes_before_the_settings(chromium, address):
    page = chromium.new_page(viewport={"width": 390, "height": 844})
    page.goto(address)
    page.wait_for_selector("#stage")
    places = {name: page.locator(f"#{name}").bounding_box() for name in ("prompt", "stage", "settings", "make")}
    assert places["prompt"]["y"] < places["make"]["y"] < places["stage"]["y"] < places["settings"]["y"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 390, "nothing sticks out"
    page.close()
