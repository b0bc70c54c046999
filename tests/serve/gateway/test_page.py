"""The page of `megadit serve demo --key_file ...`, in headless chromium: what it shows comes through a gateway."""

import hashlib
from contextlib import contextmanager

import numpy as np
import pytest

from megadit.infer.generate import command as generate
from megadit.infer.media.video_io import read_video
from megadit.serve.gateway.client import GatewayClient
from megadit.serve.launch.local_server import LocalServer
from megadit.serve.page.studio import Studio
from megadit.serve.repository.build import build_repository


@pytest.fixture
def visit(chromium, start_gateway):
    """`with visit(server) as (page, studio, gateway)`: the page, opened, of a gateway before that Triton."""
    pytest.importorskip("gradio")
    from megadit.serve.page.layout import build_page, launch

    @contextmanager
    def open_page(server):
        gateway = start_gateway(f"grpc://{server.grpc_url}")
        studio = Studio(GatewayClient(gateway.url, gateway.new_key()))
        demo = build_page(studio)
        page = chromium.new_page(viewport={"width": 1280, "height": 900})
        try:
            page.set_default_timeout(120_000)
            page.goto(launch(demo, studio, host="127.0.0.1", port=None))
            page.wait_for_selector("#prompt textarea")
            yield page, studio, gateway
        finally:
            page.close()
            demo.close()

    return open_page


@pytest.mark.slow
def test_a_visitor_makes_a_video_through_the_gateway(visit, server, eventually, monkeypatch):
    with visit(server) as (page, studio, gateway):
        page.fill("#prompt textarea", "a red seven")
        page.click("#make")
        page.wait_for_selector("#stage video")
        page.wait_for_function("document.querySelector('#stage video').currentTime > 0.1")  # it plays
        source = page.locator("#stage video").get_attribute("src")
        shown = hashlib.sha256(page.request.get(page.url.rstrip("/") + source).body()).hexdigest()
        request = studio.request(prompt="a red seven", seed=int(page.locator("#seed input").input_value()))
        (made,) = studio.client.generate(request)
        assert shown == hashlib.sha256(made.data).hexdigest()

        shorter = studio.request
        monkeypatch.setattr(studio, "request", lambda **settings: shorter(**settings | {"num_steps": 5000}))
        page.click("#make")
        page.wait_for_selector("#stage img[alt=preview]")  # one that came through the gateway
        page.click("#cancel")
        page.wait_for_function("document.querySelector('#stage').innerText.includes('Cancelled')")
    eventually(lambda: '"event": "job cancelled"' in gateway.log.read_text())


@pytest.mark.slow
def test_the_picture_of_an_exported_stable_diffusion_is_torchs(
    visit, tritonserver, kept_running, exported_stable_diffusion, tmp_path
):
    """Made by ONNX Runtime in Triton behind a gateway, for the prompt and the settings that a visitor types."""
    repository = build_repository(exported_stable_diffusion, tmp_path / "repository", runtime="onnx")
    local_server = LocalServer(repository, log=tmp_path / "triton.log", stop_seconds=3)
    with kept_running(local_server) as server, visit(server) as (page, _, _):
        seen = page.locator("body").inner_text()
        assert "an image out" in seen and "video" not in seen and "frame" not in seen
        page.fill("#prompt textarea", "a red seven")
        page.get_by_label("Negative prompt").fill("a blue robot")
        steps = page.locator("#settings").get_by_label("number input for Steps")
        steps.fill("20")
        steps.press("Tab")
        page.uncheck("#seed_random input")
        page.fill("#seed input", "3")
        page.click("#make")
        page.wait_for_selector("#stage img.final")
        shown = page.locator("#facts").inner_text()
        assert "seed 3" in shown and "20 steps" in shown and "32\N{MULTIPLICATION SIGN}32\n" in shown
        with page.expect_download() as download:
            page.click("#download")
        assert download.value.suggested_filename == "seed3.png"
        download.value.save_as(tmp_path / "page.png")

    def made(seed: int) -> np.ndarray:
        told = ["--prompt", "a red seven", "--negative_prompt", "a blue robot", "--num_steps", "20"]
        told += ["--seed", str(seed), "--checkpoint_path", str(exported_stable_diffusion), "--device", "cpu"]
        assert generate.main([*told, "--video_save_path", str(tmp_path / f"{seed}.png")]) == 0
        return read_video(tmp_path / f"{seed}.png")[0].astype(int)

    picture = read_video(tmp_path / "page.png")[0]
    assert picture.shape == (1, 32, 32, 3) and np.abs(picture - made(3)).max() <= 1
    assert np.abs(picture - made(4)).max() > 1, "negative control"
