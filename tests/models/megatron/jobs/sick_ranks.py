"""`megadit doctor --distributed` on ranks that fail as machines do; what RANK 2, 3 and 4 suffer from is simulated."""

import os
import time
from datetime import timedelta

import torch.distributed as dist

from megadit.models.megatron import interconnect
from megadit.serve.doctor import main

RANK = int(os.environ["RANK"])
SICK = os.environ.get("SICK") == "1"
all_reduce = dist.all_reduce

interconnect.PATIENCE = timedelta(seconds=20)


def slow_all_reduce(values):
    time.sleep(0.5)
    return all_reduce(values)


def wrong_product(*arguments):
    place = interconnect_try(*arguments)
    return interconnect.Place(**{**interconnect.asdict(place), "fault": "computes a wrong product"})


interconnect_try = interconnect.try_device

if SICK and RANK == 2:
    dist.all_reduce = slow_all_reduce
if SICK and RANK == 3:
    raise SystemExit(0)  # dead before the first word
if SICK and RANK == 4:
    interconnect.try_device = wrong_product
raise SystemExit(main(["--distributed"]))
