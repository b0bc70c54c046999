"""Adapters that requests name: each video gets its own, whatever shares its batch, and the base stays the base."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from megadit.infer import adapters as shelf
from megadit.infer.pipeline import TextToVideo
from megadit.models.adapters import adapter_names
from megadit.models.bundle.bundle import Bundle
from megadit.models.named_adapters import adapters_in
from megadit.models.shared.errors import UserError
from megadit.serve.build_repository import build_repository, service_info
from megadit.serve.contract import AdapterNotFoundError, InvalidRequestError, VideoRequest
from megadit.serve.engine import Engine
from tests.infer.conftest import make_adapter

from .test_engine import Asker, run


@pytest.fixture(scope="module")
def folder(bundle_dir, tmp_path_factory):
    """A folder of a service: one adapter as a folder, two as files."""
    folder = tmp_path_factory.mktemp("adapters")
    make_adapter(folder / "one", bundle_dir, 1)
    make_adapter(folder / "two.safetensors", bundle_dir, 2, kind="dora", rank=3)
    make_adapter(folder / "three.safetensors", bundle_dir, 3, patterns=("blocks.*self_attention.[qkv]",))
    return folder


@pytest.fixture
def engine(bundle_dir, folder):
    bundle = Bundle.open(bundle_dir)
    info = service_info(bundle, bundle.defaults, None, adapters=folder)
    return Engine(TextToVideo.load(bundle_dir, device="cpu"), info, adapters=folder)


@pytest.fixture
def frames(monkeypatch):
    """Videos are frames as they are, before they are encoded."""
    monkeypatch.setattr("megadit.serve.engine.encode_mp4", lambda video, fps, metadata: video.tobytes())


REQUEST = VideoRequest(prompt="a red seven", seed=5)
CASES = {
    "none": (),
    "one": ("one",),
    "two": ("two:0.5",),
    "two of them": ("one:0.7", "three:-1"),
    "three": ("three",),
}


def asker(name: str, **fields) -> Asker:
    return Asker(replace(REQUEST, adapters=CASES[name], **fields))


def array(asker: Asker) -> np.ndarray:
    assert asker.endings == [None], asker.endings
    return np.frombuffer(asker.videos[0].data, np.uint8).astype(int)


def test_a_batch_of_adapters_is_each_alone(engine, frames, bundle_dir, folder):
    """And each is the video of `generate`; nothing of one is left in the next."""
    together = {name: asker(name) for name in CASES}
    run(engine, *together.values())
    assert {each.videos[0].batch_size for each in together.values()} == {len(CASES)}
    pipeline = TextToVideo.load(bundle_dir, device="cpu")
    paths = {"one": folder / "one", "two": folder / "two.safetensors", "three": folder / "three.safetensors"}
    for name, texts in CASES.items():
        scales = VideoRequest(prompt="", adapters=texts).adapter_scales()
        scales = {str(paths[each]): scale for each, scale in scales.items()}
        expected = pipeline.generate(["a red seven"], seeds=5, adapters=scales)[0].video
        assert np.abs(array(together[name]) - expected.reshape(-1)).max() <= 1, name
    assert len({each.videos[0].data for each in together.values()}) == len(CASES), "each changes something"
    assert together["two of them"].videos[0].settings["adapters"] == [
        {"name": "one", "scale": 0.7}, {"name": "three", "scale": -1.0}
    ]  # fmt: skip
    assert "adapters" not in together["none"].videos[0].settings


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
    read = []
    real = shelf.read_adapter_of
    monkeypatch.setattr(shelf, "read_adapter_of", lambda path, bundle: read.append(path) or real(path, bundle))
    dit = engine.pipeline.denoiser._denoiser.dit
    for _ in range(2):
        run(engine, *map(asker, CASES))
    assert len(read) == len(adapter_names(dit)) == 3
    engine.pipeline._adapters._kept_bytes = 0
    run(engine, asker("one"))
    assert len(read) == 4 and not adapter_names(dit), "beyond the bytes all go that nobody uses"
    engine.pipeline._adapters._kept_bytes = 10**9
    monkeypatch.setattr(shelf, "KEPT", 2)
    for name in ("one", "two", "three", "two", "three"):
        run(engine, asker(name))
    assert len(read) == 7 and len(adapter_names(dit)) == 2, "beyond their number the oldest"
    run(engine, asker("one"))
    assert len(read) == 8


def test_adapters_at_fault_fail_alone(engine, folder, bundle_dir, tmp_path):
    own = tmp_path / "folder"
    shutil.copytree(folder, own)
    make_adapter(tmp_path / "outside.safetensors", bundle_dir, 4)
    (own / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    (own / "pickle").mkdir()
    (own / "pickle" / "adapter_model.bin").write_bytes(b"\x80\x04.")
    (own / "noise.safetensors").write_bytes(bytes(range(256)))
    (own / "large.safetensors").write_bytes(bytes(2 << 20))
    engine.adapters = own
    engine.info = replace(engine.info, limits=replace(engine.info.limits, max_adapter_bytes=1 << 20))
    faults = {
        "nowhere": "adapter not found: there is no adapter 'nowhere'",
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
    bad["many"], faults["many"] = (
        Asker(replace(REQUEST, adapters=tuple("abcde"))),
        "service takes up to 4",
    )
    good = [asker("one"), asker("none")]
    run(engine, *bad.values(), *good)
    for name, each in bad.items():
        (error,) = each.endings
        assert isinstance(error, InvalidRequestError) and faults[name] in str(error), (name, error)
        assert len(str(error)) < 400 and "\n" not in str(error) and str(own) not in str(error)
        assert isinstance(error, AdapterNotFoundError) == (name == "nowhere") and not each.videos
    assert all(each.endings == [None] for each in good)
    assert "one" in adapters_in(own) and "pickle" in adapters_in(own)


def test_an_adapter_of_other_weights_is_refused(engine, folder, bundle_dir, tmp_path):
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
    assert "takes no adapters" in str(each.endings[0])
    with pytest.raises(UserError, match="is no folder"):
        build_repository(bundle_dir, tmp_path / "models", adapters=tmp_path / "nowhere")
