"""Two networks split by noise level (Wan 2.2): each has a graph of its own, which passes the gate and is asked where it
should be."""

import pickle
import shutil

import pytest

from megadit.export.layers import changed_weight, weight_hashes
from megadit.export.networks import build_network
from megadit.export.quantize import calibrate
from megadit.export.verify import sampled_levels
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.runtimes.network_spec import DENOISERS
from megadit.models.bundle import Bundle, update_manifest
from megadit.models.shared.errors import UserError
from tests.bundles import write_pair_bundle
from tests.infer.conftest import make_adapter


def latents(bundle, runtime="torch", **settings):
    (video,) = TextToVideo.from_pretrained(bundle, device="cpu", runtime=runtime)(["a red seven"], seeds=3, **settings)
    return video.latents_CTHW


def distance(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.slow
def test_both_networks_pass_the_gate(exported_pair):
    report = exported_pair.manifest["export"]["onnx"]["report"]
    for name in DENOISERS:
        cases = report[name]["cases"]
        assert len([case for case in cases if case.startswith("sigma")]) == 7
        assert all(error["F"] <= 1e-4 for error in cases.values())
    assert report["video"]["psnr"] >= 50


@pytest.mark.slow
def test_each_graph_has_the_weights_of_its_network(exported_pair):
    tokenizer = exported_pair.load_tokenizer()
    for name in DENOISERS:
        hashes = weight_hashes(build_network(name, exported_pair, tokenizer, None))
        for other in DENOISERS:
            layer = changed_weight(exported_pair.path / f"onnx/{other}.onnx", hashes)
            assert (layer is None) == (name == other)


@pytest.mark.slow
def test_graphs_are_asked_by_noise_level(exported_pair, tmp_path):
    expected = latents(exported_pair)
    assert distance(latents(exported_pair, "onnx"), expected) <= 1e-4
    for change in ({"guidance": 1.0}, {"low_guidance": 1.0}):
        assert distance(latents(exported_pair, "onnx", **change), latents(exported_pair, **change)) <= 1e-4
        assert distance(latents(exported_pair, **change), expected) > 1e-2, "each network has a guidance of its own"
    copied = pickle.loads(pickle.dumps(TextToVideo.from_pretrained(exported_pair, device="cpu", runtime="onnx")))
    assert distance(copied(["a red seven"], seeds=3)[0].latents_CTHW, expected) <= 1e-4
    shutil.copytree(exported_pair.path, tmp_path / "swapped")
    swapped = Bundle.open(tmp_path / "swapped")
    for name, other in zip(DENOISERS, reversed(DENOISERS), strict=True):
        shutil.copy(exported_pair.path / f"onnx/{name}.onnx", swapped.path / f"onnx/{other}.onnx")
    assert distance(latents(swapped, "onnx"), expected) > 1e-2, "negative control"


@pytest.mark.slow
def test_graphs_of_other_weights_are_refused(exported_pair, tmp_path):
    """Of either network."""
    for part in exported_pair.networks:
        path = tmp_path / part
        shutil.copytree(exported_pair.path, path)
        files = exported_pair.manifest["files"]
        name = f"{part}/model.safetensors"
        update_manifest(path, files=files | {name: {**files[name], "sha256": "0" * 64}})
        with pytest.raises(UserError, match="made from other weights"):
            TextToVideo.from_pretrained(path, device="cpu", runtime="onnx")


def test_ranges_of_8_bits_are_those_that_a_network_meets(tiny_bundle, tmp_path):
    write_pair_bundle(tiny_bundle.path, tmp_path / "pair")
    pair = Bundle.open(tmp_path / "pair")
    ranges = [calibrate(pair, ["a red seven"], name) for name in DENOISERS]
    assert ranges[0].keys() == ranges[1].keys() and all(ranges[0][layer] != ranges[1][layer] for layer in ranges[0])
    low, high = (sampled_levels(name, pair) for name in reversed(DENOISERS))
    assert low == (pair.defaults.sigma_min, pair.boundary) and high == (pair.boundary, pair.defaults.sigma_max)


@pytest.mark.slow
def test_each_graph_has_its_adapters(exported_pair, tmp_path):
    """One for each network, or one for both: as in torch; the room of each network is its own."""
    one, two = (make_adapter(tmp_path / f"{seed}", exported_pair.path, seed, base=False, rank=3) for seed in (1, 2))
    cases = ({f"high={one}": 0.5, f"low={two}": 0.7}, {one: 0.6}, {f"low={one}": 0.5}, {})
    found = [latents(exported_pair, "onnx", adapters=scales) for scales in cases]
    assert (
        max(distance(ours, latents(exported_pair, adapters=asked)) for ours, asked in zip(found, cases, strict=True))
        < 1e-4
    )
    assert min(distance(ours, found[-1]) for ours in found[:-1]) > 1e-2, "negative control"
    with pytest.raises(UserError, match="rank 6 together, the exported networks at most 4"):
        latents(exported_pair, "onnx", adapters={f"high={one}": 1.0, two: 1.0})
