"""The dtype that `auto` means: that of the weights, where the device computes it."""

import re
import warnings
from types import SimpleNamespace

import pytest
import torch

from megadit.infer.evaluate.generated import BundleMaker
from megadit.infer.generate.command import main
from megadit.infer.generate.outputs import read_record
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.runtimes import options as chosen
from megadit.infer.runtimes.options import chosen_dtype, print_dtype, stored_dtype
from megadit.models import machine
from megadit.models.machine import auto_dtype
from megadit.models.shared.errors import UserError
from megadit.serve.repository.build import main as build_repository
from tests.bundles import write_tiny_bundle
from tests.half_products import without_half_products

F32, F16, BF16, F8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
GPU = torch.device("cuda", 0)
SIZE = ["--num_steps", "1", "--num_frames", "1", "--height", "16", "--width", "16", "--device", "cpu"]


@pytest.mark.parametrize(
    ("device", "can", "stored", "expected"),
    [
        ("cpu", True, F32, F32), ("cpu", True, BF16, BF16), ("cpu", False, BF16, F32), ("cpu", True, F16, F32),
        ("cpu", True, F8, BF16), ("cpu", False, F8, F32), ("cpu", True, torch.float64, F32),
        ("cuda", (9, 0), BF16, BF16), ("cuda", (8, 0), BF16, BF16), ("cuda", (7, 5), BF16, F32),
        ("cuda", (7, 5), F16, F16), ("cuda", (9, 0), F32, F32), ("cuda", (8, 6), F8, BF16), ("cuda", (7, 5), F8, F32),
    ],
)  # fmt: skip
def test_the_choice(device, can, stored, expected, monkeypatch):
    monkeypatch.setattr(machine, "multiplies", lambda dtype: dtype == F32 or can)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: can)
    assert auto_dtype(torch.device(device), stored) == expected


@pytest.fixture(params=[BF16, F32], ids=str)
def bundle(request, tmp_path):
    return write_tiny_bundle(tmp_path / "bundle", dtype=request.param)


@pytest.mark.parametrize("can", [True, False])
def test_commands_and_pipelines_choose_and_tell(bundle, can, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(chosen, "auto_dtype", lambda device, stored: stored if can else F32)
    stored = stored_dtype(bundle)
    expected = "bfloat16" if can and stored == BF16 else "float32"
    assert chosen_dtype("auto", bundle, "cpu") == expected and chosen_dtype("auto", bundle, "cpu", "onnx") == "float32"
    assert chosen_dtype("float16", bundle, "cpu") == "float16"
    with pytest.raises(UserError, match="dtype 'int4' is unknown"):
        chosen_dtype("int4", bundle, "cpu")
    pipeline = TextToVideo.from_pretrained(bundle, device="cpu")
    assert str(pipeline.denoiser.dtype) == f"torch.{expected}"
    out = tmp_path / "a.png"
    assert main(["--checkpoint_path", str(bundle.path), "--prompt", "a", "--video_save_path", str(out), *SIZE]) == 0
    told = capsys.readouterr().err
    assert (f"computes in {expected}" in told) == (stored == BF16)
    assert read_record(out)["dtype"] == expected, "what --repeat takes"
    maker = BundleMaker(bundle, device="cpu", dtype=print_dtype("auto", bundle, "cpu"))
    assert maker.about(bundle.defaults)["dtype"] == expected


def test_an_autoencoder_computes_as_it_is_stored(monkeypatch):
    from megadit.models.tokenizers import autoencoder

    asked = []
    network = SimpleNamespace(on=lambda device, dtype: asked.append(dtype), stored=BF16)
    monkeypatch.setattr(autoencoder, "auto_dtype", lambda device, stored: stored)
    for dtype, stored in (("auto", BF16), ("auto", F16), ("auto", F32), ("float32", BF16)):
        network.stored = stored
        for device in ("cuda", "cpu"):
            autoencoder.Autoencoder(kind=None, network=network, sigma_data=1.0, dtype=dtype)._on(torch.device(device))
    assert asked == [BF16, F32, F32, F32, F32, F32, F32, F32]


@pytest.mark.parametrize(
    ("wide", "with_products", "expected"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_avx512_without_bfloat16s_products_multiplies_none(wide, with_products, expected, monkeypatch):
    """oneDNN says that it supports bfloat16 there, but converts every number; without AVX-512 its word is taken."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: wide)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: with_products)
    assert machine._has_products(BF16) == expected


def test_commands_say_in_a_line_what_an_emulated_dtype_costs(bundle, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(warnings, "showwarning", lambda *args, **more: told.append(warnings.formatwarning(*args[:4])))
    monkeypatch.setattr(warnings, "filters", [])
    size = ["--prompt", "a", "--video_save_path", str(tmp_path / "a.png"), *SIZE]
    serving = [str(bundle.path), str(tmp_path / "models"), "--device", "cpu"]
    with without_half_products():
        for command, words in ((main, ["--checkpoint_path", str(bundle.path), *size]), (build_repository, serving)):
            assert command([*words, "--dtype", "float32"]) == 0 and not told
            assert command([*words, "--dtype", "bfloat16"]) == 0
            expected = r"warning: this processor does not multiply bfloat16: .* about \d+ times as long .*, too\n"
            assert re.fullmatch(expected, told.pop()) and not told
