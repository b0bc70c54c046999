"""Adapters that requests name: each video gets its own, whatever shares its batch, and the base stays the base."""

import itertools
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megadit.infer.commands.check_adapter import problem_of
from megadit.infer.media.video_io import encode_mp4
from megadit.infer.pipeline import adapters as adapter_cache
from megadit.infer.pipeline import batches
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.models.bundle import Bundle
from megadit.models.convert.adapters.files import read_adapter, with_base, write_adapter
from megadit.models.lora.adapters import adapter_names
from megadit.models.lora.named import adapters_in, find_adapter
from megadit.models.shared.cli import verbs
from megadit.models.shared.errors import UserError
from megadit.serve.backend.engine import Engine
from megadit.serve.client import VideoClient
from megadit.serve.contract import VideoRequest
from megadit.serve.events import AdapterNotFoundError, InvalidRequestError
from megadit.serve.launch.local_server import LocalServer
from megadit.serve.repository.build import build_repository, service_info
from megadit.serve.repository.model_config import Scheduling
from tests.bundles import write_pair_bundle
from tests.infer.conftest import make_adapter

from .backend.test_engine import Asker, run
from .test_triton import frames_of


@pytest.fixture
def engine(bundle_dir, adapter_dir):
    bundle = Bundle.open(bundle_dir)
    info = service_info(bundle, bundle.defaults, None, adapters=adapter_dir)
    return Engine(TextToVideo.from_pretrained(bundle_dir, device="cpu"), info, adapters=adapter_dir)


@pytest.fixture
def frames(monkeypatch):
    """Videos are frames as they are, before they are encoded."""
    monkeypatch.setattr("megadit.serve.backend.engine.encode_mp4", lambda video, fps, metadata: video.tobytes())


REQUEST = VideoRequest(prompt="a red seven", seed=5)
CASES = {"none": (), "one": ("one",), "two": ("two:0.5",), "two of them": ("one:0.7", "three:-1"), "three": ("three",)}


def asker(name: str, **fields) -> Asker:
    return Asker(replace(REQUEST, adapters=CASES[name], **fields))


def array(asker: Asker) -> np.ndarray:
    assert asker.endings == [None], asker.endings
    return np.frombuffer(asker.videos[0].data, np.uint8).astype(int)


def test_a_batch_of_adapters_is_each_alone(engine, frames, bundle_dir, adapter_dir):
    """And each is the video of `generate`; nothing of one is left in the next."""
    together = {name: asker(name) for name in CASES}
    run(engine, *together.values())
    assert {each.videos[0].batch_size for each in together.values()} == {len(CASES)}
    pipeline = TextToVideo.from_pretrained(bundle_dir, device="cpu")
    for name, texts in CASES.items():
        scales = VideoRequest(prompt="", adapters=texts).adapter_scales()
        scales = {str(find_adapter(adapter_dir, each, 1 << 30)): scale for each, scale in scales.items()}
        expected = pipeline(["a red seven"], seeds=5, adapters=scales)[0].video
        assert np.abs(array(together[name]) - expected.reshape(-1)).max() <= 1, name
    assert len({each.videos[0].data for each in together.values()}) == len(CASES), "each changes something"
    assert together["two of them"].videos[0].settings["adapters"] == [
        {"name": "one", "scale": 0.7}, {"name": "three", "scale": -1.0}
    ]  # fmt: skip
    assert "adapters" not in together["none"].videos[0].settings


def test_a_student_beside_its_teacher_is_called_as_it_says(engine, frames, bundle_dir, adapter_dir, tmp_path):
    """Whether a client leaves out what it does not ask for, or not; what it asks for stands."""
    asked = {"sampler": "consistency", "sigmas": [20.0, 2.0], "num_steps": 2, "guidance": 1.0, "eta": 0.0}
    write_adapter(tmp_path / "learnt", replace(read_adapter(adapter_dir / "one"), defaults=asked))
    bundle = Bundle.open(bundle_dir)
    engine.info = service_info(bundle, bundle.defaults, None, adapters=tmp_path)
    engine.adapters = tmp_path
    request = replace(REQUEST, adapters=("learnt",))
    askers = [Asker(each) for each in (request, engine.info.filled(request), replace(request, num_steps=3))]
    run(engine, *askers)
    expected = engine.pipeline(["a red seven"], seeds=5, adapters={str(tmp_path / "learnt"): 1.0})[0]
    assert expected.settings.sigmas == (20, 2) and expected.settings.guidance == 1
    for each in askers[:2]:
        assert np.abs(array(each) - expected.video.reshape(-1)).max() <= 1
    assert [len(each.steps) for each in askers] == [2, 2, 3]
    assert engine.info.filled(replace(REQUEST, adapters=("learnt:0",))).num_steps == bundle.defaults.num_steps


def test_of_two_networks_each_has_its_own(frames, bundle_dir, tmp_path):
    """By name; an adapter that says for which of them it was trained is that one's alone."""
    write_pair_bundle(bundle_dir, tmp_path / "pair")
    folder, pair = tmp_path / "adapters", Bundle.open(tmp_path / "pair")
    for seed in (1, 2):
        make_adapter(folder / f"{seed}.safetensors", pair.path, seed, base=False)
    own = with_base(read_adapter(folder / "2.safetensors"), pair, "low=2")
    write_adapter(folder / "own", own)
    info = service_info(pair, pair.defaults, None, adapters=folder)
    assert info.adapters.forms == ("", "high=", "low=") and own.base in info.adapters.base
    assert problem_of(folder / "own", info.adapters.network, info.adapters.base) is None
    engine = Engine(TextToVideo.from_pretrained(pair, device="cpu"), info, adapters=folder)
    cases = {
        ("high=1:0.5", "low=2"): {f"high={folder / '1.safetensors'}": 0.5, f"low={folder / '2.safetensors'}": 1.0},
        ("1:0.5", "low=own"): {str(folder / "1.safetensors"): 0.5, f"low={folder / 'own'}": 1.0},
    }
    for asked, scales in cases.items():
        run(engine, each := Asker(replace(REQUEST, adapters=asked)))
        expected = engine.pipeline(["a red seven"], seeds=5, adapters=scales)[0].video
        assert np.array_equal(array(each), expected.reshape(-1)), asked
        assert each.videos[0].settings["adapters"][1] == {"name": asked[1], "scale": 1.0}
    run(engine, wrong := Asker(replace(REQUEST, adapters=("own",))))
    assert "was trained with one of the experts" in str(wrong.endings) and "low=own" in str(wrong.endings)
    one = service_info(Bundle.open(bundle_dir), pair.defaults, None, adapters=folder)
    with pytest.raises(UserError, match="adapter high=1: this service has one network for all noise levels: use 1"):
        one.check_adapters(replace(REQUEST, adapters=("high=1",)))


@pytest.mark.parametrize("asked", [{"autoguidance": "run"}, {"autoguidance": "/etc/shadow"}, {"noise_scale": 1e38}])
def test_an_adapter_has_a_service_open_no_path(engine, bundle_dir, adapter_dir, tmp_path, monkeypatch, asked):
    """Whether it lies in the folder since before or not; nothing is opened, converted or told of what exists."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "adapters"
    write_adapter(folder / "learnt", replace(read_adapter(adapter_dir / "one"), defaults=asked))
    bundle = Bundle.open(bundle_dir)
    engine.info, engine.adapters = service_info(bundle, bundle.defaults, None, adapters=folder), folder
    assert engine.info.adapters.defaults == {}
    asker = Asker(replace(REQUEST, adapters=("learnt",)))
    run(engine, asker)
    assert not asker.videos and "the adapter 'learnt' cannot be used" in str(asker.endings)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoints"]


def test_the_work_of_a_request_counts_what_its_adapters_hold(engine, bundle_dir, adapter_dir, tmp_path):
    """A rank of thousands costs a network that is small as much as many steps do; usual ones are free."""
    bundle = Bundle.open(bundle_dir)
    make_adapter(tmp_path / "large", bundle_dir, 1, rank=700)
    make_adapter(tmp_path / "wide", bundle_dir, 2, rank=300)
    shutil.copytree(adapter_dir / "one", tmp_path / "small")
    settings = bundle.defaults
    most = settings.num_frames * settings.height * settings.width * settings.num_steps
    engine.info = service_info(bundle, settings, {"max_work": most}, adapters=tmp_path)
    engine.adapters = tmp_path
    ask = partial(replace, VideoRequest(prompt="a"))
    assert engine.check(ask(adapters=("small",)))[0].num_steps == settings.num_steps
    with pytest.raises(UserError, match="rank 700; this service supports up to 512"):
        engine.check(ask(adapters=("large",)))
    with pytest.raises(UserError, match="pixel steps with these adapters; this service does up to"):
        engine.check(ask(adapters=("wide",)))
    roomy = replace(engine.info.limits, max_work=100 * most, max_adapter_rank=700)
    engine.info = replace(engine.info, limits=roomy)
    engine.check(ask(adapters=("wide", "large")))
    assert "rank 700" in problem_of(
        tmp_path / "large", engine.info.adapters.network, engine.info.adapters.base, max_rank=512
    )


def test_a_batch_is_no_more_work_than_its_requests_apart(engine, frames, bundle_dir, adapter_dir, tmp_path):
    """Large adapters of several requests are neither computed nor held together, and nobody pays for a stranger's."""
    shutil.copytree(adapter_dir, tmp_path / "all")
    for name in ("first", "second"):
        make_adapter(tmp_path / "all" / name, bundle_dir, 7, rank=300)
    engine.info = replace(engine.info, limits=replace(engine.info.limits, max_work=10**12))
    engine.adapters = tmp_path / "all"
    held = []
    engine.pipeline._adapters.held = partial(_noting, engine.pipeline._adapters.held, held)
    asked = {"large": ("first",), "none": (), "small": ("one",), "same": ("first:0.5",), "other": ("second",)}
    askers = {name: Asker(replace(REQUEST, adapters=adapters)) for name, adapters in asked.items()}
    run(engine, *askers.values())
    assert {name: each.videos[0].batch_size for name, each in askers.items()} == {
        "none": 2, "small": 2, "large": 2, "same": 2, "other": 1
    }  # fmt: skip
    assert [{Path(path).name for path in paths} for paths in held[-3:]] == [{"one"}, {"first"}, {"second"}]


def _noting(real, noted, paths):
    noted.append(paths)
    return real(paths)


def test_an_adapter_counts_by_its_bytes_in_memory(engine, bundle_dir, tmp_path):
    """One of 8 bits each takes four times its file."""
    make_adapter(tmp_path / "plain.safetensors", bundle_dir, 1, rank=64)
    tensors = load_file(tmp_path / "plain.safetensors")
    with safe_open(tmp_path / "plain.safetensors", "pt") as file:
        metadata = file.metadata()
    save_file(
        {name: value.to(torch.float8_e4m3fn) for name, value in tensors.items()},
        tmp_path / "small.safetensors",
        metadata,
    )
    engine.adapters = tmp_path
    size = (tmp_path / "small.safetensors").stat().st_size
    engine.info = replace(engine.info, limits=replace(engine.info.limits, max_adapter_bytes=2 * size))
    with pytest.raises(UserError, match="bytes of memory; this service allows"):
        engine.check(replace(REQUEST, adapters=("small",)))


def test_rows_that_change_adapters_are_seen(engine, frames, monkeypatch):
    """Of requests with no, one and two adapters in one batch: those whose rows change places get each other's videos,
    which a comparison with each alone cannot miss."""
    quick = partial(asker, num_steps=2)
    alone = {name: quick(name) for name in CASES}
    for each in alone.values():
        run(engine, each)
    real = batches._scales
    for swapped in [(), *itertools.pairwise(CASES), ("none", "two of them")]:
        order = dict(zip(CASES, CASES, strict=True)) | dict(zip(swapped, swapped[::-1], strict=True))
        rows = [list(CASES).index(name) for name in order.values()]
        monkeypatch.setattr(batches, "_scales", lambda scales, names, rows=rows: real([scales[r] for r in rows], names))
        together = {name: quick(name) for name in CASES}
        run(engine, *together.values())
        assert {each.videos[0].batch_size for each in together.values()} == {len(CASES)}
        differs = {name: np.abs(array(together[name]) - array(alone[name])).max() for name in CASES}
        assert {name for name in CASES if differs[name] > 1} == set(swapped), differs
        got = {name: np.abs(array(together[name]) - array(alone[order[name]])).max() for name in CASES}
        assert max(got.values()) <= 1, got


def test_nothing_of_an_adapter_stays(engine, frames):
    """No adapter is the base bit for bit, before and after; A, B, A gives A again."""
    first, *_ = made = [asker(name) for name in ("none", "one", "two", "one", "none")]
    for each in made:
        run(engine, each)
    none, one, _, again, after = (each.videos[0].data for each in made)
    assert one == again and none == after and first.endings == [None]
    base = Engine(engine.pipeline, replace(engine.info, adapters=None))
    run(base, plain := Asker(REQUEST))
    assert plain.videos[0].data == none


def test_adapters_are_read_once_and_the_oldest_dropped(engine, monkeypatch):
    read, quick = [], partial(asker, num_steps=1)
    real = adapter_cache.read_adapter_of
    monkeypatch.setattr(adapter_cache, "read_adapter_of", lambda path, bundle: read.append(path) or real(path, bundle))
    dit = engine.pipeline.denoiser._denoiser.dit
    for _ in range(2):
        run(engine, *map(quick, CASES))
    assert len(read) == len(adapter_names(dit)) == 3
    engine.pipeline._adapters._cached_bytes = 0
    run(engine, quick("one"))
    assert len(read) == 4 and not adapter_names(dit), "beyond the bytes all go that nobody uses"
    engine.pipeline._adapters._cached_bytes = 10**9
    monkeypatch.setattr(adapter_cache, "MAX_ADAPTERS", 2)
    for name in ("one", "two", "three", "two", "three"):
        run(engine, quick(name))
    assert len(read) == 7 and len(adapter_names(dit)) == 2, "beyond their number the oldest"
    run(engine, quick("one"))
    assert len(read) == 8


def test_adapters_at_fault_fail_alone(engine, adapter_dir, bundle_dir, tmp_path):
    own = tmp_path / "folder"
    shutil.copytree(adapter_dir, own)
    make_adapter(tmp_path / "outside.safetensors", bundle_dir, 4)
    (own / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    (own / "pickle").mkdir()
    (own / "pickle" / "adapter_model.bin").write_bytes(b"\x80\x04.")
    (own / "noise.safetensors").write_bytes(bytes(range(256)))
    (own / "large.safetensors").write_bytes(bytes(2 << 20))
    engine.adapters = own
    engine.info = replace(engine.info, limits=replace(engine.info.limits, max_adapter_bytes=1 << 20))
    faults = {
        "nowhere": "there is no adapter 'nowhere'",
        "../outside": "no path",
        "/etc/passwd": "no path",
        ".one": "no path",
        "x" * 200: "no path",
        "link": "a link out of its folder",
        "pickle": "other files than safetensors are not read",
        "noise": "the adapter 'noise' cannot be used",
        "large": "2,097,152 bytes; this service takes 1,048,576",
        "one:nan": "must be a finite number",
        "one:1e39": "not finite",
    }
    bad = {name: Asker(replace(REQUEST, adapters=(name,))) for name in faults}
    bad["twice"], faults["twice"] = Asker(replace(REQUEST, adapters=("one", "one:2"))), "given twice"
    bad["many"], faults["many"] = (Asker(replace(REQUEST, adapters=tuple("abcde"))), "service supports up to 4")
    good = [asker("one"), asker("none")]
    run(engine, *bad.values(), *good)
    for name, each in bad.items():
        (error,) = each.endings
        assert isinstance(error, InvalidRequestError) and faults[name] in str(error), (name, error)
        assert len(str(error)) < 400 and "\n" not in str(error) and str(own) not in str(error)
        assert isinstance(error, AdapterNotFoundError) == (name == "nowhere") and not each.videos
    assert all(each.endings == [None] for each in good)
    assert "one" in adapters_in(own) and "pickle" in adapters_in(own)


def test_an_adapter_of_other_weights_is_refused(engine, adapter_dir, bundle_dir, tmp_path):
    engine.adapters = tmp_path
    path = tmp_path / "other.safetensors"
    make_adapter(path, bundle_dir, 4)
    engine.pipeline._adapters._bundle = replace(Bundle.open(bundle_dir))
    head, tail = path.read_bytes().split(b'\\"fingerprint\\": \\"', 1)
    path.write_bytes(head + b'\\"fingerprint\\": \\"' + b"0" * 16 + tail[16:])
    run(engine, each := Asker(replace(REQUEST, adapters=("other",))))
    assert "trained with other weights (0000000000000000)" in str(each.endings[0])


def test_a_service_without_a_folder_takes_none(engine, bundle_dir, tmp_path):
    engine.info = replace(engine.info, adapters=None)
    run(engine, each := asker("one"))
    assert "supports no adapters" in str(each.endings[0])
    with pytest.raises(UserError, match="is not a folder"):
        build_repository(bundle_dir, tmp_path / "models", adapters=tmp_path / "nowhere")


# ------------------------------------------------------------------------------------------------ a real tritonserver


def test_served_videos_are_those_of_generate(server, bundle_dir, adapter_dir, tmp_path, monkeypatch):
    """Over gRPC and HTTP, together and one after the other; what is asked without adapters is the base bit for bit."""
    urls = (f"grpc://{server.grpc_url}", f"http://{server.http_url}")
    clients = [VideoClient(url) for url in urls]
    with ThreadPoolExecutor(len(CASES)) as threads:
        asked = [replace(REQUEST, adapters=texts) for texts in CASES.values()]
        made = threads.map(lambda client, each: client.generate(each), itertools.cycle(clients), asked)
        together = dict(zip(CASES, made, strict=True))
    pipeline = TextToVideo.from_pretrained(bundle_dir, device="cpu")
    base = frames_of(encode_mp4(pipeline(["a red seven"], seeds=5)[0].video, 8))
    alone = []
    for client in clients:
        assert np.array_equal(frames_of(client.generate(REQUEST)[0].data), base)
        alone += [client.generate(replace(REQUEST, adapters=CASES[name]))[0].data for name in ("one", "two")]
        with pytest.raises(AdapterNotFoundError, match="there is no adapter 'nowhere'"):
            client.generate(replace(REQUEST, adapters=("nowhere",)))
        with pytest.raises(InvalidRequestError, match="no path"):
            client.generate(replace(REQUEST, adapters=("../one",)))
        assert client.adapters() == ["one", "three", "two"]
    assert alone[:2] == alone[2:], "A, B, A"
    for name, texts in CASES.items():
        scales = VideoRequest(prompt="", adapters=texts).adapter_scales()
        paths = {str(find_adapter(adapter_dir, each, 1 << 30)): scale for each, scale in scales.items()}
        expected = encode_mp4(pipeline(["a red seven"], seeds=5, adapters=paths)[0].video, 8)
        assert np.abs(frames_of(together[name][0].data) - frames_of(expected)).max() <= 1, name
    monkeypatch.chdir(tmp_path)
    for url in urls:
        ask = ["serve", "ask", "a red seven", "--seed", "5", "--url", url]
        assert verbs.main([*ask, "--adapter", "one:0.7", "--adapter", "three:-1", "-o", "theirs.mp4"]) == 0
        theirs = frames_of((tmp_path / "theirs.mp4").read_bytes())
        assert np.abs(theirs - frames_of(together["two of them"][0].data)).max() <= 1
    assert verbs.main([*ask, "--adapter", "nowhere"]) == 2


@pytest.mark.slow
def test_requests_of_different_numbers_of_adapters_share_a_batch(tritonserver, bundle_dir, adapter_dir, tmp_path):
    """Triton waits long enough for three of them, and not at all once they are there."""
    scheduling = Scheduling(device="cpu", max_batch_size=3, batching_seconds=60)
    repository = build_repository(bundle_dir, tmp_path / "models", scheduling=scheduling, adapters=adapter_dir)
    with LocalServer(repository, log=tmp_path / "triton.log", stop_seconds=3) as server:
        asked = [replace(REQUEST, adapters=CASES[name]) for name in ("none", "one", "two of them")]
        with ThreadPoolExecutor(len(asked)) as threads:
            made = list(threads.map(VideoClient(f"grpc://{server.grpc_url}").generate, asked))
    assert [videos[0].batch_size for videos in made] == [3] * 3
    assert [len(videos[0].settings.get("adapters", ())) for videos in made] == [0, 1, 2]
