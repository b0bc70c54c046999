"""`megadit doctor --distributed` on ranks that fail as machines do; what RANK 2, 3 and 4 suffer from is simulated.

Usage: sick_ranks.py FOLDER, on every rank. There they wait for one another: who starts late is not sick.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megadit.infer.inspect import interconnect
from megadit.infer.inspect.doctor import main

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
all_reduce = dist.all_reduce

interconnect.PATIENCE, interconnect.REPEATS = timedelta(seconds=30), 2


def slow_all_reduce(values):
    time.sleep(1)
    return all_reduce(values)


def wrong_product(*arguments):
    place = interconnect_try(*arguments)
    return interconnect.Place(**{**interconnect.asdict(place), "fault": "computes a wrong product"})


interconnect_try = interconnect.try_device

if RANK == 2:
    dist.all_reduce = slow_all_reduce
if RANK == 4:
    interconnect.try_device = wrong_product

folder = Path(sys.argv[1])
(folder / f"rank{RANK}").touch()
while len(list(folder.iterdir())) < WORLD_SIZE:
    time.sleep(0.05)
if RANK == 3:
    raise SystemExit(0)  # dead before the first word
raise SystemExit(main(["--distributed"]))
