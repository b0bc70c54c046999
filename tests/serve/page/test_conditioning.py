"""What a visitor gives of a video: the page's places for it, and a mask that is painted in a real browser."""

import numpy as np
import pytest

from megadit.infer.media.video_io import read_video
from megadit.serve.client import VideoClient
from megadit.serve.page.studio import Studio

from ..media import MP4, OTHER_PNG, PNG


@pytest.mark.slow
def test_a_visitor_paints_what_is_made_anew(chromium, able_server, tmp_path):
    pytest.importorskip("gradio")
    from megadit.serve.page.layout import build_page, launch

    for name, data in (("a.png", PNG), ("b.png", OTHER_PNG), ("c.mp4", MP4)):
        (tmp_path / name).write_bytes(data)
    studio = Studio(VideoClient(f"grpc://{able_server.grpc_url}"))
    demo = build_page(studio)
    page = chromium.new_page(viewport={"width": 1280, "height": 1500})
    page.set_default_timeout(120_000)
    try:
        page.goto(launch(demo, studio, host="127.0.0.1", port=None))
        page.wait_for_selector("#prompt textarea")
        page.get_by_text("Start from images or a video").click()
        page.locator("#video input[type=file]").set_input_files(str(tmp_path / "c.mp4"))
        page.get_by_text("Make the painted part anew").click()
        page.wait_for_selector("#mask canvas")
        page.wait_for_timeout(3000)  # the editor draws its background
        box = page.locator("#mask canvas").first.bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x + 40, y + 10, steps=8)
        page.mouse.up()
        page.fill("#prompt textarea", "a blue two")
        page.click("#make")
        page.wait_for_selector("#stage video")
        assert "with mask" in page.locator("#facts").inner_text()
    finally:
        page.close()
        demo.close()
    (made,) = studio.folder.glob("*/seed*.mp4")
    source = read_video(tmp_path / "c.mp4")[0][:5].astype(int)
    far = np.abs(read_video(made)[0].astype(int) - source).mean(axis=(0, 3))
    assert far[:4, :4].mean() < 30 < far[6:12, 10:14].mean(), "the corner stays, the middle is new"
