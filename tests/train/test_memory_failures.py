"""A run that is given too little memory ends with one line, which names the settings that take less."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
from megadit.train.engine import loop
from megadit.train.__main__ import main

build = loop.build_training

def with_little_left(*arguments):
    training = build(*arguments)
    in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (100 << 20), resource.RLIM_INFINITY))
    return training

loop.build_training = with_little_left
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_packs_that_have_no_room(tmp_path):
    settings = ("data.seq_length=400000", "validation.interval=0", f"train.output_dir={tmp_path / 'run'}")
    command = ["--recipe", "digits_tiny", "--mock", "data.num_workers=0", *settings]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *command], capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(errors) == 1 and "Traceback" not in done.stderr, done.stderr
    assert errors[0].startswith("error: no memory for packs of data.seq_length=400,000 tokens, data.micro_batch_size=")
