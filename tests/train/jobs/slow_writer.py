"""`megadit train` on a disk that takes its time: slow_writer.py SECONDS ARGUMENTS..."""

import sys
import time

from megadit.models.megatron import cpu_shim

if __name__ == "__main__":
    cpu_shim.install()
    from megadit.train.checkpoints import writer as background_write

    write = background_write.BackgroundWrite._write

    def slow_write(self):
        time.sleep(float(sys.argv[1]))
        write(self)

    background_write.BackgroundWrite._write = slow_write
    from megadit.train.__main__ import main

    raise SystemExit(main(sys.argv[2:]))
