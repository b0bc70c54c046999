"""Run as a process: converts SOURCE to OUT, and prints the most anonymous memory beyond that at the start, in bytes."""

import sys
import threading
from pathlib import Path

from megadit.models.commands.convert import main


def anonymous() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def watch(most: list[int], ended: threading.Event) -> None:
    while not ended.wait(0.005):
        most[0] = max(most[0], anonymous())


if __name__ == "__main__":
    before, most, ended = anonymous(), [0], threading.Event()
    watcher = threading.Thread(target=watch, args=(most, ended))
    watcher.start()
    code = main(sys.argv[1:])
    ended.set()
    watcher.join()
    print(max(0, most[0] - before))
    raise SystemExit(code)
