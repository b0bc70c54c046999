"""What an export is compared at: the sizes of its profile, as far as they are soon computed, planned before."""

from dataclasses import replace
from math import prod
from types import SimpleNamespace

import onnx
import pytest
import torch
from onnx import TensorProto
from torch import nn

from megadit.export import build, compared
from megadit.export import signatures as contract
from megadit.export.build import ExportSettings, check_memory
from megadit.export.compared import compared_defaults, compared_sizes, fitted_defaults
from megadit.export.graph_checks import opened_by, where_it_runs
from megadit.export.networks import DecoderGraph, EncoderGraph, in_float32
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json
from megadit.models.tokenizers import Autoencoder
from tests.export.test_quantize import write_product
from tests.exports import export_denoiser

LARGE = {"num_frames": 81, "height": 480, "width": 832}


def profiles_of(bundle, *given):
    defaults = contract.default_profiles(bundle, bundle.load_tokenizer(), bundle.load_text_encoder())
    return contract.parse_profiles(given, defaults)


def size(settings):
    return settings.num_frames, settings.height, settings.width


def test_a_small_video_is_compared_at_the_best_of_its_profile(tiny_bundle):
    tokenizer = tiny_bundle.load_tokenizer()
    assert compared_defaults(tiny_bundle, profiles_of(tiny_bundle), tokenizer) == tiny_bundle.defaults
    profiles = profiles_of(tiny_bundle, "frames=5,5,9", "height=32,32,64", "width=32,48,64")
    assert size(compared_defaults(tiny_bundle, profiles, tokenizer)) == (5, 32, 48)
    assert fitted_defaults(tiny_bundle, profiles_of(tiny_bundle)) == (tiny_bundle.defaults, None)
    defaults, note = fitted_defaults(tiny_bundle, profiles)
    assert "leaves out the bundle's own height 16, width 24: OUT makes 5 frames of 32x48 by default" in note
    assert size(defaults) == (5, 32, 48)


def test_a_large_one_is_compared_smaller(tiny_bundle):
    bundle = replace(tiny_bundle, defaults=replace(tiny_bundle.defaults, **LARGE))
    tokenizer, profiles = bundle.load_tokenizer(), profiles_of(bundle)
    made = compared_defaults(bundle, profiles, tokenizer)
    assert prod(size(made)) <= compared.MOST_PIXELS < prod(LARGE.values())
    networks = contract.specs(profiles, bundle.config, tokenizer)
    tokenizer.latent_shape(*size(made))  # which refuses what is no size
    for spec in networks.values():
        for extreme in ("min", "opt", "max"):
            sizes = {name: getattr(axis, extreme) for name, axis in spec.axes.items()}
            found = compared_sizes(spec, sizes, bundle.config, 16)
            assert all(spec.axes[name].admits(each) for name, each in found.items())
            assert all(found[name] <= each for name, each in sizes.items()) and found.get("text") == sizes.get("text")
            assert (found == sizes) == (extreme == "min") or spec.is_denoiser


def test_a_long_call_is_compared_smaller(tiny_bundle, monkeypatch):
    """Attention makes a call long before its tokens times width are many."""
    bundle = replace(tiny_bundle, defaults=replace(tiny_bundle.defaults, **LARGE))
    (spec, *_) = contract.specs(profiles_of(bundle), bundle.config, bundle.load_tokenizer()).values()
    largest = {name: axis.max for name, axis in spec.axes.items()}

    def num_tokens():
        found = compared_sizes(spec, largest, bundle.config, 16)
        return prod(found[name] // spec.axes[name].step for name in ("batch", "time", "height", "width"))

    before = num_tokens()
    monkeypatch.setattr(compared, "MOST_FLOPS", 1 << 30)
    assert num_tokens() < before / 2
    monkeypatch.setattr(compared, "MOST_FLOPS", 1)
    assert compared_sizes(spec, largest, bundle.config, 16) == {
        name: axis.max if name == "text" else axis.min for name, axis in spec.axes.items()
    }, "the smallest is always compared"


def test_what_cannot_be_compared_is_refused_before_anything_is_exported(tiny_bundle, monkeypatch):
    monkeypatch.setattr(compared, "free_memory", lambda device: 1 << 10)
    with pytest.raises(UserError, match=r"comparing a video of 5 frames of 16x24 .* smaller sizes \(--profile\)"):
        check_memory(tiny_bundle.path, ExportSettings())


@pytest.mark.slow
def test_a_profile_may_leave_out_the_default_size(shallow, tmp_path, capsys):
    out = export_denoiser(shallow.path, tmp_path / "out", profiles=("height=32", "width=32"), video_steps=1)
    assert size(out.defaults) == (5, 32, 32) and size(shallow.defaults) == (5, 16, 24)
    video = read_json(out.path / "megadit.json")["export"]["onnx"]["report"]["video"]
    assert (video["num_frames"], video["height"], video["width"]) == (5, 32, 32)
    assert "NOTE: --profile leaves out" in capsys.readouterr().err
    x, *_ = onnx.load(out.path / "onnx/denoiser.onnx").graph.input
    assert [bool(side.dim_param) for side in x.type.tensor_type.shape.dim] == [True, False, True, False, False]


def test_an_autoencoder_is_exported_in_float32(tiny_bundle):
    """Whatever it is stored in, and would be computed in."""
    network = SimpleNamespace(module=nn.Linear(2, 2, dtype=torch.bfloat16), stored=torch.bfloat16)
    stored = Autoencoder(kind=None, network=network, sigma_data=1.0)
    assert stored.dtype == "auto" and in_float32(stored).dtype == "float32"
    assert DecoderGraph(stored).tokenizer.dtype == EncoderGraph(stored).tokenizer.dtype == "float32"
    assert network.module.weight.dtype == torch.float32, "before it is traced"
    haar = tiny_bundle.load_tokenizer()
    assert in_float32(haar) is haar


def test_bfloat16_says_where_it_runs(tmp_path):
    write_product(tmp_path / "half.onnx", TensorProto.BFLOAT16)
    write_product(tmp_path / "full.onnx")
    opened = opened_by(tmp_path / "half.onnx")
    assert "NOT_IMPLEMENTED" in opened["CPUExecutionProvider"]
    assert "is for GPUs" in (note := where_it_runs("denoiser", opened)) and "--precision fp32 or fp16" in note
    assert where_it_runs("denoiser", opened_by(tmp_path / "full.onnx")) is None
    assert build.where_it_runs is where_it_runs
