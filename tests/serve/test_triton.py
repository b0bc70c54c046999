"""The service in a real tritonserver: the videos of `generate`, over every way in, and no request that breaks it."""

import io
import queue
import threading
import time
import urllib.request
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from unittest import mock

import av
import httpx
import imageio.v3 as iio
import numpy as np
import pytest

from megadit.infer.media.video_io import encode_mp4
from megadit.models.shared.cli import verbs
from megadit.serve.client import VideoClient
from megadit.serve.contract import IMAGE_MODEL, VideoRequest
from megadit.serve.events import (
    CancelledError,
    DeadlineExceededError,
    InvalidRequestError,
    ServiceError,
    UnavailableError,
    VideoResult,
)
from megadit.serve.launch.local_server import LocalServer
from tests.serve import conftest
from tests.serve.conftest import once_more_after_a_crash
from tests.serve.gateway.served_up import num_waiting

tritonclient = pytest.importorskip("tritonclient.grpc")

LONG = VideoRequest(prompt="a long one", num_steps=5000)
SECONDS = 120
"""After which what is answered at once counts as not answered."""


@pytest.fixture(params=["grpc", "http"])
def client(server, request):
    return VideoClient(f"grpc://{server.grpc_url}" if request.param == "grpc" else f"http://{server.http_url}")


@pytest.fixture
def grpc_client(server):
    return VideoClient(f"grpc://{server.grpc_url}")


def frames_of(data: bytes) -> np.ndarray:
    with av.open(io.BytesIO(data)) as container:  # imageio would collect garbage, which takes long beside torch
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]).astype(int)


def test_the_video_is_that_of_generate(client, pipeline):
    """Bit for bit: one video in a batch of its own, on the same machine."""
    request = VideoRequest(
        prompt="a red seven moving left", negative_prompt="green", seed=11, guidance=3.0, num_steps=5
    )
    steps = []
    (video,) = client.generate(request, on_progress=steps.append)
    expected = pipeline([request.prompt], seeds=11, negative_prompt="green", guidance=3.0, num_steps=5)[0]
    assert np.array_equal(frames_of(video.data), frames_of(encode_mp4(expected.video, 8)))
    assert [step.step for step in steps] == [1, 2, 3, 4, 5]
    other = client.generate(replace(request, seed=12))[0]
    assert not np.array_equal(frames_of(other.data), frames_of(video.data))


def test_the_command_writes_the_video_of_generate(server, bundle_dir, tmp_path):
    generate = ["generate", "--checkpoint_path", str(bundle_dir), "--prompt", "a two", "--seed", "3", "--device", "cpu"]
    assert verbs.main([*generate, "--video_save_path", str(tmp_path / "ours.mp4")]) == 0
    ask = ["serve", "ask", "a two", "--seed", "3", "--url", server.grpc_url, "-o", str(tmp_path / "theirs.mp4")]
    assert verbs.main(ask) == 0
    ours, theirs = (frames_of((tmp_path / name).read_bytes()) for name in ("ours.mp4", "theirs.mp4"))
    assert np.array_equal(ours, theirs)


def test_info_tells_defaults_limits_and_samplers(client):
    info = client.info()
    assert client.is_ready()
    assert (info.defaults["num_steps"], info.size_multiple, info.limits.max_videos) == (4, 4, 4)
    assert "heun" in info.samplers


def test_images_have_a_model_of_their_own(server, pipeline):
    client = VideoClient(f"http://{server.http_url}", model=IMAGE_MODEL)
    with mock.patch("ssl.create_default_context", None):  # certificates were read: they take longer than a request
        (image,) = client.generate(VideoRequest(prompt="a five", seed=2))
    expected = pipeline(["a five"], seeds=2, num_frames=1)[0].video[0]
    assert image.media_type == "image/png"
    assert np.array_equal(iio.imread(image.data, extension=".png"), expected)
    with pytest.raises(InvalidRequestError, match="up to 1 frames"):
        client.generate(VideoRequest(prompt="a five", num_frames=2))


def test_nemo_s_names_of_inputs_work(server):
    body = {"prompt": "a", "unconditional_guidance_scale": 3.0, "inference_steps": 2, "seed": 4, "eta": 0.0}
    answer = httpx.post(f"http://{server.http_url}/v2/models/text_to_video/generate_stream", json=body).text
    assert answer.count('\\"type\\": \\"progress\\"') == 2
    assert '\\"guidance\\": 3.0' in answer


def test_bad_requests_are_refused(client):
    """Those that a transport might change or cut; all others are the engine's (test_engine.py)."""
    for change in (
        *({"prompt": text} for text in ("x" * 2**20, "bell\x07", "nul\0")),
        *({"guidance": scale} for scale in (float("nan"), float("inf"), -1.0)),
        *({"num_steps": steps} for steps in (-3, 2**31 - 1, 2**40, "four")),
        *({"seed": 2**64}, {"fps": 1e30}, {"height": 17}, {"num_videos": 10**6}),
    ):
        with pytest.raises(InvalidRequestError):
            print(change, client.generate(replace(VideoRequest(prompt="a"), **change), timeout=SECONDS))


RAW = [
    ("prompt", np.array([[1.0]], np.float32), "FP32"),
    ("prompt", np.array([[b"a", b"b"]], np.object_), "BYTES"),
    ("prompt", np.array([[[b"a"]]], np.object_), "BYTES"),
    ("prompt", np.array([[b"\xff\xfe"]], np.object_), "BYTES"),
    ("prompt", np.array([[b"a"]] * 3, np.object_), "BYTES"),
    ("prompt", np.array([[b"a"]] * 100, np.object_), "BYTES"),
    ("guidance", np.array([[np.nan]], np.float32), "FP32"),
    ("guidance", np.array([[-np.inf]], np.float32), "FP32"),
    ("guidance", np.array([[2]], np.int64), "INT64"),
    ("num_steps", np.array([[-(2**31)]], np.int32), "INT32"),
    ("num_steps", np.zeros((1, 0), np.int32), "INT32"),
    ("seed", np.array([[1, 2, 3]], np.int64), "INT64"),
    ("no_such_input", np.array([[1]], np.int32), "INT32"),
]


def test_raw_tensors_of_wrong_type_shape_or_value_are_answered(server):
    """What no client of ours would send: the answer is an error, and soon."""
    for name, array, kind in RAW:
        case = (name, kind, array.shape)
        tensors = []
        if name != "prompt":
            tensors.append(tritonclient.InferInput("prompt", [array.shape[0], 1], "BYTES"))
            tensors[0].set_data_from_numpy(np.array([[b"a"]] * array.shape[0], np.object_))
        tensors.append(tritonclient.InferInput(name, array.shape, kind))
        tensors[-1].set_data_from_numpy(array)
        answers = queue.Queue()
        with tritonclient.InferenceServerClient(server.grpc_url) as raw:
            raw.start_stream(lambda result, error, answers=answers: answers.put(error), stream_timeout=SECONDS)
            raw.async_stream_infer("text_to_video", tensors, enable_empty_final_response=True)
            error = answers.get(timeout=SECONDS)
            raw.stop_stream(cancel_requests=True)
        assert error is not None and "Deadline" not in str(error), case


@once_more_after_a_crash
def test_no_request_leaves_a_thread_here(server, grpc_client):
    """Refused and cancelled ones left tritonclient's."""
    threads = threading.active_count()
    for _ in range(20):
        with pytest.raises(InvalidRequestError):
            grpc_client.generate(VideoRequest(prompt="a", num_steps=-1))
        generation = grpc_client.stream(LONG)
        next(iter(generation))
        generation.close()
    deadline = time.monotonic() + SECONDS
    while threading.active_count() > threads:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


@pytest.mark.slow
def test_triton_frees_every_request(tritonserver, repository, tmp_path):
    """Then it stops by itself: a model with a request that was not freed is never unloaded."""
    log = tmp_path / "triton.log"

    def ask(number: int) -> None:
        client = VideoClient(f"grpc://{server.grpc_url}")
        for _ in range(250):
            with pytest.raises(InvalidRequestError):
                client.generate(VideoRequest(prompt="a", num_steps=-1))
        generation = client.stream(LONG)
        for _ in range(number):
            next(iter(generation))
        generation.close()

    with LocalServer(repository, models=("text_to_video",), stop_seconds=20, log=log) as server:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, range(8)))
    assert "successfully unloaded 'text_to_video'" in log.read_text()
    assert "Exit timeout expired" not in log.read_text()


def test_malformed_json_is_answered(server):
    url = f"http://{server.http_url}/v2/models/text_to_video/generate_stream"
    bodies = (b"", b"{", b"[]", b'{"prompt": 5}', b'{"prompt": ["a", "b"]}', b'{"seed": 1}', b"\xff")
    with httpx.Client(timeout=SECONDS) as http:
        for body in bodies:
            assert "error" in http.post(url, content=body).text, body


def test_the_service_still_works_after_all_that(client):
    """Runs after the tests above, in the same server."""
    assert len(client.generate(VideoRequest(prompt="a"))) == 1


def test_unknown_models_and_addresses_are_told_apart(server):
    with pytest.raises(ServiceError, match="no_such_model"):
        VideoClient(f"grpc://{server.grpc_url}", model="no_such_model").generate(VideoRequest(prompt="a"))
    with pytest.raises(UnavailableError):
        VideoClient("grpc://127.0.0.1:1")
    with pytest.raises(UnavailableError):
        VideoClient("http://127.0.0.1:1")


def seconds_until_free(client: VideoClient) -> float:
    began = time.monotonic()
    client.generate(VideoRequest(prompt="short", num_steps=1, num_frames=1))
    return time.monotonic() - began


@once_more_after_a_crash
def test_cancels_free_the_slot(server, client):
    """Each long request would take many seconds; after its cancel, a short one is served at once."""
    waits = []
    for last in (1, 8, 40):
        generation = client.stream(LONG)
        with pytest.raises(CancelledError):
            for event in generation:
                assert not isinstance(event, VideoResult)
                if event.step >= last:
                    generation.cancel()
        waits.append(seconds_until_free(client))
    assert max(waits) < 0.9 * client_seconds(client, LONG, share=0.01) / 0.01, "a slot stayed taken"


def client_seconds(client: VideoClient, request: VideoRequest, *, share: float) -> float:
    """How long a share of a request's steps takes."""
    began = time.monotonic()
    for event in client.stream(request):
        if event.step >= share * request.num_steps:
            return time.monotonic() - began
    raise AssertionError("the request ended early")


@once_more_after_a_crash
def test_cancelling_from_another_thread(server, client):
    generation = client.stream(LONG)
    with ThreadPoolExecutor(1) as threads, pytest.raises(CancelledError):
        for event in generation:
            if event.step == 1:
                threads.submit(generation.cancel)


@once_more_after_a_crash
def test_deadlines_end_a_request(server, client):
    with pytest.raises(DeadlineExceededError):
        client.generate(LONG, timeout=0.4)
    assert len(client.generate(VideoRequest(prompt="a"), timeout=60)) == 1


REQUESTS = [
    replace(
        VideoRequest(prompt=f"number {index}", seed=index),
        **[{}, {"num_frames": 1}, {"height": 8, "width": 8}, {"num_steps": 2, "guidance": 1.0}][index % 4],
    )
    for index in range(16)
]


def wanted(request: VideoRequest) -> dict:
    """What a request replaces of the defaults, as `generate` takes it."""
    names = ("num_frames", "height", "width", "num_steps", "guidance")
    return {name: value for name, value in request.to_inputs().items() if name in names}


def test_requests_of_eight_clients_are_neither_lost_nor_mixed_up(server, grpc_client, pipeline):
    """Two at once of each client, half of the clients over HTTP, while a long request lets them queue."""
    urls = [f"grpc://{server.grpc_url}", f"http://{server.http_url}"]
    clients = [VideoClient(urls[index % 2]) for index in range(8)]
    blocker = grpc_client.stream(LONG)
    next(iter(blocker))
    with ThreadPoolExecutor(len(REQUESTS)) as threads:
        responds = [
            threads.submit(client.generate, request, timeout=120)
            for client, request in zip(clients * 2, REQUESTS, strict=True)
        ]
        while num_waiting(server.ports) < len(REQUESTS):
            assert not any(answer.done() for answer in responds)
            time.sleep(0.05)
        blocker.close()
        results = [answer.result(timeout=120) for answer in responds]
    for request, videos in zip(REQUESTS, results, strict=True):
        assert [(video.prompt, video.seed) for video in videos] == [(request.prompt, request.seed)]
        is_image = request.num_frames == 1
        expected = pipeline([request.prompt], seeds=request.seed, **wanted(request))[0].video.astype(int)
        frames = iio.imread(videos[0].data, extension=".png")[None] if is_image else frames_of(videos[0].data)
        expected = expected if is_image else frames_of(encode_mp4(expected.astype(np.uint8), 8))
        # a batch's rounding differs from a single video's, and the codec can make a level or more of it
        assert np.abs(frames - expected).mean() < 1.5, request
    sizes = [videos[0].batch_size for videos in results]
    print(f"{sum(size > 1 for size in sizes)} of {len(sizes)} shared a batch, of up to {max(sizes)}")
    assert sum(size > 1 for size in sizes) >= len(REQUESTS) // 4


def test_a_full_queue_answers_unavailable(grpc_client):
    """48 may wait; of 60 more than the running batch, some are turned away at once, and the rest is served."""
    blocker = grpc_client.stream(LONG)
    next(iter(blocker))
    with ThreadPoolExecutor(60) as threads:

        def ask(seed):
            try:
                return grpc_client.generate(VideoRequest(prompt="a", seed=seed, num_steps=1, num_frames=1), timeout=120)
            except UnavailableError as error:
                return error

        responds = [threads.submit(ask, seed) for seed in range(60)]
        wait(responds, timeout=60, return_when=FIRST_COMPLETED)
        refused_while_busy = sum(answer.done() for answer in responds)
        blocker.close()
        results = [answer.result(timeout=120) for answer in responds]
    refused = [result for result in results if isinstance(result, UnavailableError)]
    assert 1 <= refused_while_busy <= len(refused) <= 12
    assert "queue" in str(refused[0])


def test_metrics_are_served(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports.metrics}/metrics") as answer:
        assert b'nv_inference_request_success{model="text_to_video"' in answer.read()


def test_a_crash_of_triton_fails_no_test(monkeypatch):
    """What `once_more_after_a_crash` repeats: a test whose server died meanwhile, and nothing else."""
    server, ran = mock.Mock(), []
    monkeypatch.setitem(conftest._KEPT, server, lambda: None)
    monkeypatch.setattr(conftest, "_SECONDS_TO_CRASH", 0.0)

    @once_more_after_a_crash
    def crashes_once(server):
        ran.append(server.process.pid)
        if len(ran) == 1:
            server.process.pid = 2
            raise UnavailableError("its connection broke")

    @once_more_after_a_crash
    def fails(server):
        ran.append(server.process.pid)
        raise UnavailableError("its queue is full")

    crashes_once(server=server)
    assert len(set(ran)) == 2
    with pytest.raises(UnavailableError, match="full"):
        fails(server=server)
    assert len(ran) == 3
