"""Requests with images, clips and masks: the videos of `generate`, and hostile files that harm nobody."""

import random
import signal
from dataclasses import replace

import numpy as np
import pytest

from megadit.infer.conditioning.items import ConditioningItem
from megadit.infer.media.reader import MediaReader
from megadit.infer.media.untrusted import decode
from megadit.infer.media.video_io import read_video
from megadit.models.bundle import Bundle
from megadit.models.diffusion.conditioning_settings import CONDITIONING, MEDIA, ConditioningOptions, MediaLimits
from megadit.models.shared.cli import verbs
from megadit.models.shared.cli.setting import settings_of
from megadit.models.shared.errors import UserError
from megadit.serve.ask import conditioning_values
from megadit.serve.backend.engine import Engine
from megadit.serve.client import VideoClient
from megadit.serve.contract import INPUTS, VideoRequest
from megadit.serve.events import InvalidRequestError
from megadit.serve.repository.build import service_info
from megadit.train.data.packs.conditioning import KINDS

from .backend.test_engine import Asker, run
from .media import GIF, HALF, HOSTILE, MASK, MP4, OTHER_PNG, PNG


@pytest.fixture(scope="module")
def engine(able, able_dir):
    bundle = Bundle.open(able_dir)
    return Engine(able, service_info(bundle, bundle.defaults, None))


FRAME, LAST, NINE = decode(PNG, MediaLimits()), decode(OTHER_PNG, MediaLimits()), decode(MP4, MediaLimits())
RIGHT_HALF = HALF[None, ..., 0] > 0
FIRST_FRAME = ConditioningItem(frames=FRAME, kind="first_frame")
LAST_FRAME = ConditioningItem(frames=LAST, kind="last_frame")
CASES = {
    "text": ({}, ()),
    "first frame": ({"image": PNG}, (FIRST_FRAME,)),
    "both ends": ({"image": PNG, "last_image": OTHER_PNG}, (FIRST_FRAME, LAST_FRAME)),
    "keyframes": (
        {"keyframe": (b"0:" + PNG, b"4:" + OTHER_PNG)},
        (
            ConditioningItem(frames=FRAME, kind="keyframe", frame=0),
            ConditioningItem(frames=LAST, kind="keyframe", frame=4),
        ),
    ),
    "continuation": ({"continue_video": MP4, "keep_frames": 5}, (ConditioningItem(frames=NINE, keep_frames=5),)),
    "end": ({"lead_to_video": MP4}, (ConditioningItem(frames=NINE, kind="suffix", keep_frames=4),)),
    "mask": ({"video": MP4, "mask": MASK}, (ConditioningItem(frames=NINE, kind="inpaint", mask=RIGHT_HALF),)),
    "edit": ({"video": MP4, "prompt": "", "instruction": "a red seven"}, (ConditioningItem(frames=NINE, kind="edit"),)),
    "two scales": (
        {"video": MP4, "prompt": "", "instruction": "a red seven", "image_guidance": 1.5},
        (ConditioningItem(frames=NINE, kind="edit"),),
    ),
    "made anew": (
        {"input_video": GIF, "strength": 0.5},
        (ConditioningItem(frames=decode(GIF, MediaLimits()), strength=0.5),),
    ),
}
"""What a request gives, and what `generate` is given for the same video."""


def expected_of(able, name: str) -> np.ndarray:
    """uint8 THWC of `generate`, with frames that nothing was encoded of."""
    fields, given = CASES[name]
    settings = {"num_frames": 9} | {key: value for key, value in fields.items() if key == "image_guidance"}
    return able(["a red seven"], seeds=5, conditioning=given or None, **settings)[0].video


def request_of(name: str) -> VideoRequest:
    return VideoRequest(**{"prompt": "a red seven", "seed": 5, "num_frames": 9} | CASES[name][0])


def test_every_given_option_is_an_input_and_an_option_of_ask():
    assert [each.name for each in INPUTS if each.is_media] == list(MEDIA)
    assert (
        CONDITIONING.keys() <= {each.name for each in INPUTS}
        and CONDITIONING.keys() == settings_of(ConditioningOptions).keys()
    )


def test_requests_of_every_kind_in_one_batch_are_those_of_generate(engine, able, monkeypatch):
    """Frames as they are, before they are encoded."""
    made = {}
    monkeypatch.setattr(
        "megadit.serve.backend.engine.encode_mp4",
        lambda video, fps, metadata: made.setdefault(len(made), video).tobytes(),
    )
    askers = {name: Asker(request_of(name)) for name in CASES}
    twice = Asker(replace(request_of("first frame"), num_videos=2))
    run(engine, *askers.values(), twice)
    assert all(asker.endings == [None] for asker in (*askers.values(), twice)), [a.endings for a in askers.values()]
    for name, asker in askers.items():
        served = np.frombuffer(asker.videos[0].data, np.uint8).reshape(9, 16, 24, 3)
        assert np.abs(served.astype(int) - expected_of(able, name)).max() <= 1, name
    different = {asker.videos[0].data for asker in askers.values()}
    assert len(different) == len(CASES), "each changes something"
    assert twice.videos[0].data == askers["first frame"].videos[0].data and len(twice.videos) == 2
    assert askers["first frame"].videos[0].batch_size == 3, "those of which the same places are given share a batch"


FAULTS = [
    ({"image": PNG, "continue_video": MP4}, "give image or continue_video, not both"),
    ({"input_video": MP4, "last_image": PNG}, "give input_video (video-to-video) or other"),
    ({"mask": MASK}, "mask needs video"),
    ({"strength": 0.5}, "strength needs input_video"),
    ({"instruction": "make it red"}, "instruction needs video"),
    ({"instruction": "make it red", "video": MP4}, "instruction replaces the prompt"),
    ({"input_video": MP4, "strength": 1.5}, "strength=1.5"),
    ({"continue_video": MP4, "keep_frames": -1}, "keep_frames=-1"),
    ({"continue_video": MP4, "keep_frames": 9}, "leaves none of"),
    ({"keyframe": (PNG,)}, "must be the number of a frame and a file"),
    ({"keyframe": (b"9:" + PNG,)}, "the video has the frames 0 to 8"),
    ({"video": MP4, "num_frames": 13}, "has 9 frames, 13 are needed"),
    ({"video": MP4, "mask": PNG[:60]}, "is no png"),
    *(({"image": data}, "") for data in HOSTILE.values()),
]


def test_media_at_fault_fail_alone(engine):
    bad = [Asker(replace(request_of("text"), **fields)) for fields, _ in FAULTS]
    good = Asker(request_of("first frame"))
    control = Asker(replace(request_of("text"), video=MP4, mask=GIF, num_frames=5))
    run(engine, *bad, good, control)
    assert len(good.videos) == len(control.videos) == 1 and good.endings == control.endings == [None]
    for asker, (fields, told) in zip(bad, FAULTS, strict=True):
        error = asker.endings[0]
        assert isinstance(error, InvalidRequestError) and told in str(error), (list(fields), error)
        assert len(str(error)) < 300 and "\n" not in str(error) and not asker.events


def test_a_network_that_takes_nothing_is_held_to_frames_as_generate_does(pipeline, bundle_dir):
    bundle = Bundle.open(bundle_dir)
    engine = Engine(pipeline, service_info(bundle, bundle.defaults, None))
    assert engine.info.conditionings == ()
    held, refused = Asker(request_of("first frame")), Asker(request_of("both ends"))
    run(engine, held, refused)
    assert held.endings == [None] and "was not trained for last_frame (supported: none)" in str(refused.endings[0])


def test_the_files_of_a_request_have_one_limit_together(engine, able):
    pixels = FRAME.size // 3 + NINE.size // 3
    strict = Engine(able, replace(engine.info, limits=replace(engine.info.limits, max_media_pixels=pixels)))
    few = Asker(replace(request_of("mask"), mask=b"", prompt="a"))
    many = Asker(request_of("mask"))
    run(strict, few, many)
    assert few.endings == [None], "the control"
    more = Asker(replace(request_of("mask"), last_image=PNG))
    run(strict, more)
    assert many.endings == [None] and "together" not in str(more.endings) and "pixels" in str(more.endings[0])
    size = Engine(able, replace(engine.info, limits=replace(engine.info.limits, max_media_bytes=len(MP4))))
    run(size, both := Asker(request_of("mask")))
    assert "bytes" in str(both.endings[0])


# ---------------------------------------------------------------------------------------------------- the reader


@pytest.fixture(scope="module")
def reader():
    reader = MediaReader(MediaLimits())
    yield reader
    reader.close()


@pytest.mark.parametrize("name", ["a.png", "a.gif", "a.mp4"])
def test_frames_are_those_of_a_file(reader, tmp_path, name):
    data = {"a.png": PNG, "a.gif": GIF, "a.mp4": MP4}[name]
    (tmp_path / name).write_bytes(data)
    frames = reader.read(data)
    assert np.array_equal(frames, read_video(tmp_path / name)[0]) and frames.flags.writeable


def test_hostile_and_mutated_files_end_in_one_line(reader, request):
    """`--cases N` changes N files at random."""
    chance, outcomes = random.Random(0), {"read": 0, "refused": 0}
    for name, data in HOSTILE.items():
        with pytest.raises(UserError):
            print(name, reader.read(data).shape)
    for _ in range(request.config.getoption("--cases") or 60):
        data = bytearray(chance.choice([PNG, GIF, MP4, MASK]))
        for _ in range(chance.choice([1, 3, 30])):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if chance.random() < 0.2:
            del data[chance.randrange(len(data)) :]
        try:
            reader.read(bytes(data))
            outcomes["read"] += 1
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 200
            outcomes["refused"] += 1
    print(outcomes)
    assert outcomes["read"] and outcomes["refused"]
    assert np.array_equal(reader.read(PNG), FRAME)


def test_a_decoder_that_dies_or_hangs_costs_its_file_alone(monkeypatch):
    reader = MediaReader(MediaLimits())
    reader.read(PNG)
    worker = reader._free.get()
    first = worker._process
    reader._free.put(worker)
    first.kill()
    first.wait()
    assert np.array_equal(reader.read(PNG), FRAME), "one that is gone is replaced"
    worker._process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr("megadit.infer.media.reader._SECONDS", 0.2)
    with pytest.raises(UserError, match="crashed or took too long"):
        reader.read(MP4)
    monkeypatch.undo()
    assert np.array_equal(reader.read(PNG), FRAME)
    reader.close()
    assert worker._process is None


def test_options_of_ask_become_the_files_themselves(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    options = ConditioningOptions(image=str(tmp_path / "a.png"), keyframe=(f"3:{tmp_path / 'a.png'}",), keep_frames=2)
    assert conditioning_values(options) == {"image": PNG, "keyframe": (b"3:" + PNG,), "keep_frames": 2}
    with pytest.raises(UserError, match="--image=nowhere.png cannot be read"):
        conditioning_values(ConditioningOptions(image="nowhere.png"))


# ------------------------------------------------------------------------------------------------ a real tritonserver


@pytest.mark.slow
def test_served_videos_are_those_of_generate(able_server, able, able_dir, tmp_path, monkeypatch):
    """Through gRPC and HTTP, one after the other and all at once; and the commands."""
    from concurrent.futures import ThreadPoolExecutor

    from megadit.infer.media.video_io import encode_mp4

    from .test_triton import frames_of

    pytest.importorskip("tritonclient.grpc")
    expected = {name: frames_of(encode_mp4(expected_of(able, name), 8)) for name in CASES}
    for url in (f"grpc://{able_server.grpc_url}", f"http://{able_server.http_url}"):
        client = VideoClient(url)
        with ThreadPoolExecutor(len(CASES)) as threads:
            videos = dict(zip(CASES, threads.map(client.generate, map(request_of, CASES)), strict=True))
        for name, (video,) in videos.items():
            assert np.abs(frames_of(video.data) - expected[name]).max() <= 1, (url, name)
        for data in HOSTILE.values():
            with pytest.raises(InvalidRequestError):
                client.generate(replace(request_of("text"), image=data))
        assert client.info().conditionings == tuple(KINDS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").write_bytes(PNG)
    common = ["--image", "a.png", "--keyframe", "4:a.png", "--num_frames", "9", "--seed", "5"]
    ask = ["serve", "ask", "a red seven", *common, "--url", able_server.grpc_url, "-o", "theirs.mp4"]
    assert verbs.main(ask) == 0
    generate = ["generate", "--checkpoint_path", str(able_dir), "--device", "cpu", "--prompt", "a red seven", *common]
    assert verbs.main([*generate, "--video_save_path", "ours.mp4"]) == 0
    ours, theirs = (frames_of((tmp_path / name).read_bytes()) for name in ("ours.mp4", "theirs.mp4"))
    assert np.abs(ours - theirs).max() <= 1
    assert verbs.main([*ask[:2], "--url", able_server.grpc_url]) == 2, "neither prompt nor instruction"
