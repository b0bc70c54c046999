"""A process that is given too little memory ends with one line that says what helps; `generate` and `export` alike."""

import subprocess
import sys

import pytest

from megadit.models.machine import enough_memory
from megadit.models.shared.errors import UserError
from megadit.models.shared.resources import ANYWAY

SCRIPT = """
import resource, sys
import torch
from megadit.export import command as export
from megadit.infer.generate import command as generate

verb, *arguments = sys.argv[1:]
torch.ones(64, 64) @ torch.ones(64, 64)  # its threads take memory of their own
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + (400 << 20), resource.RLIM_INFINITY))
sys.exit({"generate": generate, "export": export}[verb].main(arguments))
"""


def error_of(*arguments: object) -> str:
    """The line that a command ends with."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, *map(str, arguments)], capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(errors) == 1 and "Traceback" not in done.stderr, done.stderr
    return errors[0]


@pytest.mark.slow
def test_a_video_that_has_no_room(bundle_dir):
    size = ("--height", 2048, "--width", 2048, "--num_frames", 17, "--num_steps", 1)
    error = error_of("generate", "--checkpoint_path", bundle_dir, "--prompt", "hi", *size, "--device", "cpu", ANYWAY)
    assert error.startswith("error: not enough memory (") and "--num_frames" in error


@pytest.mark.slow
def test_an_export_that_has_no_room(bundle_dir, tmp_path):
    pytest.importorskip("onnxruntime")
    sizes = ("--profile", "height=16,2048,2048", "--profile", "width=16,2048,2048")
    error = error_of("export", bundle_dir, tmp_path / "out", *sizes, ANYWAY)
    assert error.startswith("error: not enough memory (") and "--profile" in error
    assert not (tmp_path / "out").exists()


def test_other_failures_stay_as_they_are():
    with pytest.raises(RuntimeError, match="shapes"), enough_memory("nothing"):
        raise RuntimeError("shapes differ")
    with pytest.raises(UserError, match="^out of memory cards$"), enough_memory("nothing"):
        raise UserError("out of memory cards")
    with pytest.raises(UserError, match=r"^not enough memory \(MemoryError\): buy some$"), enough_memory("buy some"):
        raise MemoryError
