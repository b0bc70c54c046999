"""`megadit train` whose first rank suspends itself once a step is told: stops_itself.py STEP ARGUMENTS...

With STEP 0, once a step is told while a checkpoint stands.
"""

import os
import signal
import sys
from pathlib import Path

from megadit.models.megatron import cpu_shim

if __name__ == "__main__":
    cpu_shim.install()
    from megadit.models.megatron.checkpoint import find_checkpoints
    from megadit.train.monitoring.metrics import Metrics

    last, arguments, log = int(sys.argv[1]), sys.argv[2:], Metrics.log
    out = next(word.partition("=")[2] for word in arguments if word.startswith("train.output_dir="))

    def log_and_stop(self, values):
        log(self, values)
        is_due = values["step"] == last if last else find_checkpoints(Path(out) / "checkpoints")
        if is_due and os.environ.get("RANK", "0") == "0":
            os.kill(os.getpid(), signal.SIGSTOP)

    Metrics.log = log_and_stop
    from megadit.train.__main__ import main

    raise SystemExit(main(arguments))
