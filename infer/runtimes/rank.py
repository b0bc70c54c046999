"""A rank: a process that holds a denoiser, or its shard of one, and serves requests of `distributed.py`.

Usage: python -m megadit.infer.runtimes.rank NUMBER, the file descriptor of a connected socket. Requests and responses
are pickled: no other process has the socket. The rank ends when the other end of the socket closes, even while it
computes.

Shapes: B batch, C latent channels, T/H/W latent frames, height, width.
"""

import os
import pickle
import queue
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from torch import Tensor

from megadit.infer.runtimes.distributed import PING, PONG
from megadit.infer.runtimes.load import load_denoiser
from megadit.infer.runtimes.options import RuntimeOptions
from megadit.infer.runtimes.torch import find_dtype, use_device
from megadit.infer.sampling.guidance import Denoiser
from megadit.models.bundle import Bundle
from megadit.models.configs.adapter import AdapterConfig
from megadit.models.networks.conditioning import Conditioning
from megadit.models.shared.errors import UserError


@dataclass(slots=True, eq=False)
class Rank:
    """One rank of a distributed denoiser, whose methods are called by name."""

    denoiser: Denoiser | None = None
    reports: bool = True
    """Whether it returns results: the ranks of a device group have the same ones."""
    conditions: dict[int, Conditioning] = field(default_factory=dict)
    """Number of conditions -> the conditions; what denoisers cache for conditions lives as long as these."""

    def load(self, bundle: str, reports: bool, options: RuntimeOptions) -> None:
        """Loads the denoiser of a bundle (`load_denoiser`).

        Raises:
            UserError: if there is none that runs here, or ranks cannot share it this way.
        """
        self.reports = reports
        device, dtype = use_device(options.device), find_dtype(options.dtype)
        self.denoiser = load_denoiser(Bundle.open(bundle), options, device=device, dtype=dtype)

    def denoise(
        self, x_BCTHW: Tensor, sigma_B: Tensor, number: int, condition: Conditioning | None, living: set[int]
    ) -> Tensor | None:
        """Clean latents x0_BCTHW, float32, on the CPU. `condition` is sent once, later calls name it by `number`;
        conditions that are not in `living` are dropped."""
        if condition is not None:
            self.conditions[number] = condition
        self.conditions = {kept: self.conditions[kept] for kept in self.conditions.keys() & living}
        x0_BCTHW = self.denoiser(x_BCTHW, sigma_B, self.conditions[number])
        return x0_BCTHW.cpu() if self.reports else None

    def load_adapter(self, name: str, state: Mapping[str, Tensor], adapter: AdapterConfig, expert: str | None) -> None:
        of_one = {} if expert is None else {"expert": expert}
        self.denoiser.load_adapter(name, state, adapter, **of_one)

    def remove_adapter(self, name: str) -> None:
        self.denoiser.remove_adapter(name)


def serve(connection: Connection) -> None:
    """Serve requests until the connection ends, which ends the process."""
    sending, questions, rank = threading.Lock(), queue.SimpleQueue(), Rank()
    threading.Thread(target=_receive, args=[connection, sending, questions], daemon=True).start()
    while True:
        what, arguments = questions.get()
        try:
            answer, error = getattr(rank, what)(*arguments), None
        except UserError as mistake:
            answer, error = None, UserError(str(mistake))
        except Exception as failure:
            traceback.print_exc()
            answer, error = None, RuntimeError(f"{type(failure).__name__}: {failure}")
        with sending:
            connection.send_bytes(pickle.dumps((answer, error)))


def _receive(connection: Connection, sending: threading.Lock, questions: queue.SimpleQueue) -> None:
    """Thread that answers pings, and ends the process when the connection ends: the work itself may wait for another
    rank for ever."""
    while True:
        try:
            message = connection.recv_bytes()
            if message != PING:
                questions.put(pickle.loads(message))
                continue
            with sending:
                connection.send_bytes(PONG)
        except (EOFError, OSError):
            os._exit(1)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
