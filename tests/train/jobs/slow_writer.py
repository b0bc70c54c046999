"""`megadit train` on a disk that takes its time: slow_writer.py FOLDER ARGUMENTS...

The n-th checkpoint is written once the file FOLDER/n is there.
"""

import sys
import time
from itertools import count
from pathlib import Path

from megadit.models.megatron import cpu_shim

if __name__ == "__main__":
    cpu_shim.install()
    from megadit.train.checkpoints import writer as background_write

    write, numbers = background_write.BackgroundWrite._write, count(1)

    def slow_write(self):
        allowed = Path(sys.argv[1]) / str(next(numbers))
        while not allowed.exists():
            time.sleep(0.01)
        write(self)

    background_write.BackgroundWrite._write = slow_write
    from megadit.train.__main__ import main

    raise SystemExit(main(sys.argv[2:]))
