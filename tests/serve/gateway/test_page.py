"""The demo page of `megadit serve demo --key_file ...`, in headless chromium: its videos are made through a gateway."""

import hashlib

import pytest

from megadit.serve.gateway.client import GatewayClient
from megadit.serve.page.demo import Studio


@pytest.mark.slow
def test_a_visitor_makes_a_video_through_the_gateway(chromium, start_gateway, server, eventually, monkeypatch):
    pytest.importorskip("gradio")
    from megadit.serve.page.layout import build_page, launch

    gateway = start_gateway(f"grpc://{server.grpc_url}")
    studio = Studio(GatewayClient(gateway.url, gateway.new_key()))
    demo = build_page(studio)
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    try:
        page.set_default_timeout(120_000)
        page.goto(launch(demo, studio, host="127.0.0.1", port=None))
        page.wait_for_selector("#prompt textarea")
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
        monkeypatch.setattr(studio, "request", lambda **settings: shorter(**settings | {"num_steps": 2500}))
        page.click("#make")
        page.wait_for_selector("#stage img[alt=preview]")  # one that came through the gateway
        page.click("#cancel")
        page.wait_for_function("document.querySelector('#stage').innerText.includes('Cancelled')")
    finally:
        page.close()
        demo.close()
    eventually(lambda: '"event": "job cancelled"' in gateway.log.read_text())
