"""Pictures of finished videos: `variant=thumbnail` and `variant=spritesheet` of their content."""

import io
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import numpy as np
import pytest
from PIL import Image

from megadit.infer.media.animations import encode_image
from megadit.infer.media.signing import Marker
from megadit.infer.media.video_io import encode_mp4
from megadit.serve.gateway.http import content
from tests.signing import state_of, write_chain

MODELS = frozenset({"text_to_video"})


def levels(count: int, height: int = 32, width: int = 48) -> np.ndarray:
    """uint8 THWC, each frame of a level of its own, that rises from 20 to 240."""
    steps = np.linspace(20, 240, count).round().astype(np.uint8)
    return np.broadcast_to(steps[:, None, None, None], (count, height, width, 3)).copy()


@pytest.fixture
def finished(gateway, new_key, visit):
    """finished(bytes): a client, and the address of its video that was made so."""

    def make(data: bytes, media_type: str = "video/mp4"):
        client = visit(new_key()[0])
        video = client.post("/v1/videos", json={"prompt": "a"}).json()["id"]
        job = gateway.store.claim(MODELS)
        assert gateway.store.complete(job, gateway.results.put(video, data, media_type), seconds_to_live=1000)
        return client, f"/v1/videos/{video}/content"

    return make


def picture(answer) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    image = Image.open(io.BytesIO(answer.content))
    assert Image.MIME[image.format] == answer.headers["content-type"]
    return np.asarray(image.convert("RGB")).astype(int)


def test_a_thumbnail_is_the_first_frame_and_a_sprite_sheet_goes_through_all(finished):
    client, url = finished(encode_mp4(levels(61), 8))
    thumbnail = picture(client.get(url, params={"variant": "thumbnail"}))
    assert thumbnail.shape == (32, 48, 3) and np.abs(thumbnail - 20).max() <= 3
    sheet = picture(client.get(url, params={"variant": "spritesheet"}))
    assert sheet.shape == (4 * 32, 4 * 48, 3)
    cells = sheet.reshape(4, 32, 4, 48, 3).swapaxes(1, 2).reshape(16, 32, 48, 3)
    assert np.abs(cells - levels(61)[np.arange(0, 61, 4)]).max() <= 6, "the frames 0, 4, ..., 60"
    name = client.get(url, params={"variant": "spritesheet"}).headers["content-disposition"]
    assert name.endswith('_spritesheet.jpg"')


def test_short_videos_have_small_sheets(finished):
    for count, rows, columns in ((1, 1, 1), (3, 1, 3), (5, 2, 4), (16, 4, 4), (17, 4, 4)):
        client, url = finished(encode_mp4(levels(count), 8))
        sheet = picture(client.get(url, params={"variant": "spritesheet"}))
        assert sheet.shape == (rows * 32, columns * 48, 3), count
        assert np.abs(sheet[:32, :48] - 20).max() <= 6
        row, column = divmod(min(count, 16) - 1, columns)
        last = sheet[row * 32 :, column * 48 : (column + 1) * 48]
        assert np.abs(last - int(levels(count)[-1, 0, 0, 0])).max() <= 6, count


def test_images_have_pictures_too(finished):
    image = np.random.default_rng(0).integers(0, 256, (40, 24, 3), dtype=np.uint8)
    client, url = finished(encode_image(image, ".png"), "image/png")
    for variant in ("thumbnail", "spritesheet"):
        assert picture(client.get(url, params={"variant": variant})).shape == (40, 24, 3)


def test_pictures_are_small_however_large_the_video(finished):
    for height, width in ((512, 1024), (1024, 16)):
        client, url = finished(encode_mp4(levels(2, height, width), 8))
        for variant, side, count in (("thumbnail", 512, 1), ("spritesheet", 256, 2)):
            share = side / max(height, width)
            shape = picture(client.get(url, params={"variant": variant})).shape
            assert shape == (round(height * share), count * round(width * share), 3)


def test_pictures_have_ranges_and_tags(finished):
    client, url = finished(encode_mp4(levels(9), 8))
    whole = client.get(url, params={"variant": "thumbnail"})
    part = client.get(url, params={"variant": "thumbnail"}, headers={"range": "bytes=4-9"})
    assert (part.status_code, part.content) == (206, whole.content[4:10])
    assert part.headers["etag"] == whole.headers["etag"] != client.get(url).headers["etag"]
    assert client.get(url).content == encode_mp4(levels(9), 8), "the video itself stays what it is"


def test_what_has_no_picture(finished, visit):
    client, url = finished(b"what a Triton made")
    for variant in ("thumbnail", "spritesheet"):
        answer = client.get(url, params={"variant": variant})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unreadable")
        assert visit().get(url, params={"variant": variant}).json()["error"]["code"] == "not_found", "another's"
    assert client.get(url, params={"variant": "poster"}).status_code == 400
    waiting = client.post("/v1/videos", json={"prompt": "a"}).json()["id"]
    answer = client.get(f"/v1/videos/{waiting}/content", params={"variant": "thumbnail"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_completed")


def test_pictures_are_signed_as_videos_are(finished, gateway, tmp_path):
    client, url = finished(encode_mp4(levels(9), 8))
    gateway.mark = Marker(*write_chain(tmp_path))
    for variant, suffix in (("thumbnail", ".webp"), ("spritesheet", ".jpg")):
        assert state_of(client.get(url, params={"variant": variant}).content, suffix) == "Valid"


def test_one_picture_is_made_at_a_time_and_all_else_goes_on(finished, gateway, url, monkeypatch, eventually):
    """However many are asked for, who asks for something else has threads that answer; another's picture is next."""
    gateway.settings = replace(gateway.settings, max_streams=100)
    (client, path), (neighbour, its_path) = finished(encode_mp4(levels(9), 8)), finished(encode_mp4(levels(7), 8))
    began, may_end, most, ended = [], threading.Event(), [], []
    picture_of = content.picture_of

    def slow(*arguments) -> bytes:
        began.append(1)
        most.append(len(began))
        may_end.wait(60)
        began.pop()
        ended.append(arguments[0])
        return picture_of(*arguments)

    monkeypatch.setattr(content, "picture_of", slow)
    settings = {"headers": dict(client.headers), "timeout": 120, "limits": httpx.Limits(max_connections=None)}
    with (
        httpx.Client(base_url=url, **settings) as outside,
        ThreadPoolExecutor(61) as threads,
    ):
        ask = threads.map(lambda _: outside.get(path, params={"variant": "thumbnail"}).status_code, range(60))
        eventually(lambda: began)
        eventually(lambda: gateway.metrics.streams._value.get() == 60)
        assert outside.get(path).status_code == 200 and outside.get("/v1/videos").status_code == 200
        asks = {"params": {"variant": "thumbnail"}, "headers": dict(neighbour.headers)}
        other = threads.submit(lambda: outside.get(its_path, **asks).status_code)
        eventually(lambda: gateway.metrics.streams._value.get() == 61)
        eventually(lambda: len(gateway.picturing._count) == 2)  # keys that wait or run; a counted request may not yet
        may_end.set()
        assert other.result() == 200 and set(ask) == {200}
    assert encode_mp4(levels(7), 8) in ended[:3]
    assert max(most) == 1
