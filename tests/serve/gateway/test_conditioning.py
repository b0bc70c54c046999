"""Media through the whole service: a gateway, a real tritonserver, mp4; in torch and by exported networks."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from megadit.infer.media.video_io import encode_mp4
from megadit.serve.contract import VideoRequest
from megadit.serve.events import InvalidRequestError
from megadit.serve.gateway.client import GatewayClient

from ..media import GIF, MASK, MP4, OTHER_PNG, PNG
from ..test_media import CASES, expected_of, request_of

pytestmark = pytest.mark.slow
pytest.importorskip("tritonclient.grpc")
MOST = {"torch": 1, "onnx": 3}
"""By how much a pixel may differ after both were encoded as mp4; ONNX Runtime's frames differ by 1 before."""
REFUSED_AT_THE_DOOR = [
    ({"image": PNG, "continue_video": MP4}, "give image or continue_video, not both"),
    ({"mask": MASK}, "mask needs video"),
    ({"image": MP4[:200]}, "mp4"),
]
REFUSED_BY_THE_MODEL = [
    ({"video": MP4, "num_frames": 13}, "has 9 frames, 13 are needed"),
    ({"continue_video": MP4, "keep_frames": 9}, "leaves none of"),
    ({"lead_to_video": PNG}, "takes at least 4 frames"),
    ({"keyframe": (b"9:" + PNG,)}, "the video has the frames 0 to 8"),
    ({"video": MP4, "mask": GIF, "num_frames": 13}, "has 9 frames, 13 are needed"),
]
"""Files that are sound, of a video of 9 frames that they do not fit."""


@pytest.fixture
def exported_server(tritonserver, exported_able, tmp_path):
    from megadit.serve.launch.local_server import LocalServer
    from megadit.serve.repository.build import build_repository
    from megadit.serve.repository.model_config import Scheduling

    options = {"scheduling": Scheduling(device="cpu"), "runtime": "onnx"}
    repository = build_repository(exported_able.path, tmp_path / "repository", **options)
    with LocalServer(repository, log=tmp_path / "triton.log", stop_seconds=3) as triton:
        yield triton


@pytest.fixture(params=["torch", "onnx"])
def service(request, start_gateway):
    """The runtime, and a gateway in front of a tritonserver."""
    triton = request.getfixturevalue({"torch": "able_server", "onnx": "exported_server"}[request.param])
    return request.param, start_gateway(f"grpc://{triton.grpc_url}")


def test_every_use_is_what_generate_makes_of_it(service, able):
    from ..test_triton import frames_of

    runtime, gateway = service
    key = gateway.new_key()
    client = GatewayClient(gateway.url, key)
    with ThreadPoolExecutor(4) as threads:
        videos = dict(zip(CASES, threads.map(client.generate, map(request_of, CASES)), strict=True))
    for name, (video,) in videos.items():
        expected = frames_of(encode_mp4(expected_of(able, name), 8))
        error = np.abs(frames_of(video.data) - expected).max()
        assert error <= MOST[runtime], (name, error)
    assert len({video.data for (video,) in videos.values()}) == len(CASES), "each changes something"
    form = gateway.client(key)
    files = {"image": ("a.png", PNG), "last_image": ("b.png", OTHER_PNG)}
    made = form.post("/v1/videos", data={"prompt": "a red seven", "seed": "5", "num_frames": "9"}, files=files)
    assert made.status_code == 200, made.text
    for fields, told in REFUSED_AT_THE_DOOR:
        with pytest.raises(InvalidRequestError, match=told):
            client.generate(replace(request_of("text"), **fields))
    for fields, told in REFUSED_BY_THE_MODEL:
        steps = []
        with pytest.raises(InvalidRequestError, match=told):
            steps += client.stream(VideoRequest(prompt="a", **{"num_frames": 9} | fields))
        assert not steps, "no step was done"
    wait_for_end(form, made.json()["id"])
    content = form.get(f"/v1/videos/{made.json()['id']}/content").content
    assert np.abs(frames_of(content) - frames_of(videos["both ends"][0].data)).max() <= MOST[runtime]


def wait_for_end(client, video_id: str) -> None:
    from .conftest import wait_for

    wait_for(lambda: client.get(f"/v1/videos/{video_id}").json()["status"] == "completed")
