"""`megadit benchmark generate`: its figures agree with each other, and the machine stands beside them."""

import json

import pytest

from megadit.infer.benchmarks import generate as benchmark_generate
from megadit.infer.benchmarks.generate import DECODER, ENCODER, NETWORK, WHOLE, MetricValue, parts
from megadit.models.flops import forward_flops
from megadit.models.packing.segments import Segment


def test_figures_of_a_bundle(bundle_dir, pipeline, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    out, trace = tmp_path / "figures.json", tmp_path / "trace.json"
    arguments = [str(bundle_dir), "--rounds", "1", "--device", "cpu", "--num_steps", "2", "--prompt", "a red seven"]
    assert benchmark_generate.main([*arguments, "--json", str(out), "--trace", str(trace)]) == 0
    record, shown = json.loads(out.read_text()), capsys.readouterr().out
    measurements = {one["what"]: one for one in record["measurements"]}
    assert measurements.keys() == {NETWORK, DECODER, ENCODER, WHOLE}
    call = measurements[NETWORK]
    grid = pipeline.config.token_grid(2, 8, 12)  # 5 frames of 16 x 24, latents of 4x, 2x, 2x
    flops = forward_flops(Segment(grid, 3), pipeline.config) + forward_flops(Segment(grid, 0), pipeline.config)
    assert call["tflops"] * call["median"] * 1e12 == pytest.approx(flops)
    assert call["tokens_per_second"] * call["median"] == pytest.approx(2 * grid[0] * grid[1] * grid[2])
    assert measurements[WHOLE]["tflops"] is None
    assert sum(record["operations"].values()) == pytest.approx(1) and "matrix products" in record["operations"]
    assert record["rates"]["data sheet"] is None and record["rates"]["matrix products"] > 0
    assert record["machine"]["commit"] is None or record["machine"]["commit"] in shown
    assert "MFU" in shown and "traceEvents" in json.loads(trace.read_text())


def test_parts_of_a_video_come_from_the_medians():
    def measurement(what, median):
        return MetricValue(
            runtime="eager",
            what=what,
            median=median,
            lowest=median,
            highest=median,
            tokens_per_second=None,
            tflops=None,
            peak_gpu_gb=None,
        )

    measurements = [measurement(NETWORK, 0.2), measurement(DECODER, 0.5), measurement(WHOLE, 4.0)]
    assert parts(measurements, 10)["eager"] == pytest.approx({"denoiser": 0.5, "decoder": 0.125, "all else": 0.375})


def test_options_reach_what_is_timed(bundle_dir, monkeypatch):
    class TimedError(Exception):
        pass

    def load_pipelines(bundle, *how):
        asked.append(how)

    def measure(pipelines, *what):
        asked.append(what)
        raise TimedError

    asked = []
    monkeypatch.setattr(benchmark_generate, "load_pipelines", load_pipelines)
    monkeypatch.setattr(benchmark_generate, "measure", measure)
    monkeypatch.setattr(benchmark_generate, "use_device", lambda name: f"the device {name}")

    def timed(*more):
        asked.clear()
        with pytest.raises(TimedError):
            benchmark_generate.main([str(bundle_dir), *more])
        return list(asked)

    plain = timed()
    for option in (
        *(["--runtime", "onnx"], ["--device", "cpu"], ["--dtype", "bfloat16"], ["--prompt", "a clip"]),
        *(["--rounds", "9"], ["--num_steps", "7"], ["--num_frames", "9"], ["--height", "32"], ["--width", "32"]),
    ):
        assert timed(*option) != plain, option
    assert timed() == plain
