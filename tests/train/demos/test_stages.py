"""What demos take of the machine: ranks, and settings of its GPUs; and how signals end them."""

import signal

import pytest
import torch

from megadit.train.config.load import resolve_config
from megadit.train.demos import stages
from megadit.train.plan import hardware


@pytest.mark.parametrize(("num_gpus", "num_cores", "expected"), [(0, 1, 1), (0, 16, 2), (1, 16, 1), (8, 4, 2)])
def test_ranks_are_gpus_or_cores(num_gpus, num_cores, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(hardware, "available_cores", lambda: num_cores)
    assert hardware.ranks_that_gain() == expected


@pytest.mark.parametrize("recipe", ["digits", "digits_conditioned", "shapes"])
def test_settings_of_gpus_go_with_the_recipes(recipe, monkeypatch):
    assert stages._settings_of_gpus() == () or torch.cuda.is_available()
    monkeypatch.setattr(stages, "has_cuda_graphs", lambda: True)
    config = resolve_config(recipe, overrides=stages._settings_of_gpus())
    tokens, smallest = config.data.seq_length, 16  # of an image
    assert config.train.precision == "bf16" and config.parallel.cuda_graph_max_segments >= tokens // smallest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_unwinds_a_stage(number, tmp_path):
    """Also one that works in the process of the demo."""
    unwound = []

    def work(demo):
        try:
            signal.raise_signal(number)
        finally:
            unwound.append(demo)

    demo = stages.TrainingDemo(out=tmp_path / "out")
    with pytest.raises(SystemExit) as ended:
        stages.run_stages(demo, [stages.Stage("work", "work", work, lambda demo: [demo.bundle])])
    assert ended.value.code == 128 + number and unwound == [demo] and signal.getsignal(number) == signal.SIG_DFL
