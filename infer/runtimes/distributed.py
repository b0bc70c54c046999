"""Distributed denoiser: this process starts ranks, calls them together, and restarts them after a failure.

The ranks form device groups. Each group computes some rows of a batch (guidance makes two rows of each video); the
ranks of a group split the network's matrices and the tokens of a video (`shared_torch.py`). Sampling, text encoding and
the tokenizer stay in this process. A rank that dies or fails ends all of them, since others may wait for it for ever.
They are then started again, and the lost requests are sent once more.

Shapes: B batch, C latent channels, T/H/W latent frames, height, width.
"""

import math
import os
import pickle
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from megadit.infer.runtimes.options import RuntimeOptions
from megadit.models.bundle import Bundle
from megadit.models.configs.adapter import AdapterConfig
from megadit.models.networks.conditioning import Conditioning
from megadit.models.shared.addresses import free_ports
from megadit.models.shared.cli.command import python_module
from megadit.models.shared.errors import UserError
from megadit.models.shared.resources import rank_environment

START_SECONDS, CALL_SECONDS = 600.0, 600.0
"""Seconds of loading the network, and of one call, after which the ranks are considered lost."""
_SECONDS_AFTER_A_FAILURE = 5.0
"""Seconds to wait after a failure for another rank to end, whose end is then the reason."""
PATIENCE = 30.0
"""Seconds in which a rank must answer a ping, even while it computes."""
PING = b"are you there?"
PONG = b"yes"
"""Bytes that are not a pickle."""
Question = tuple[str, tuple]
"""(a method of `rank.Rank`, its arguments)"""


class LostRankError(RuntimeError):
    """A rank ended, or does not respond."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePlacement:
    """Placement of a network's ranks on devices."""

    devices: tuple[str, ...]
    """Device of each rank."""
    tensor: int = 1
    """Ranks of a device group that split the network's matrices."""
    context: int = 1
    """Ranks of a device group that split the tokens of a video."""

    def __post_init__(self) -> None:
        if min(self.tensor, self.context) < 1 or not self.devices or len(self.devices) % self.per_share:
            raise UserError(
                f"{len(self.devices)} ranks cannot be divided into device groups of {self.tensor} x {self.context} "
                f"(tensor x context): use a multiple of {self.tensor * self.context}"
            )

    @property
    def per_share(self) -> int:
        return self.tensor * self.context

    @property
    def num_shares(self) -> int:
        return len(self.devices) // self.per_share


class DistributedDenoiser:
    """D(x; sigma) computed by ranks that this process starts; called like `TorchDenoiser`."""

    def __init__(
        self,
        bundle: Bundle,
        placement: DevicePlacement,
        options: RuntimeOptions,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """The denoiser of `bundle` with results on `device`, by ranks with these options.

        Raises:
            UserError: if the network cannot be divided this way, or cannot be loaded.
        """
        self.device, self.dtype = device, dtype
        self._bundle, self._device_placement, self._options = bundle, placement, options
        self._adapters: dict[str, tuple[Mapping[str, Tensor], AdapterConfig, str | None]] = {}
        """Adapters by name, for ranks that are started again."""
        self._numbers: weakref.WeakKeyDictionary[Conditioning, int] = weakref.WeakKeyDictionary()
        self._next_number = count()
        self._group = self._started()

    @torch.no_grad()
    def __call__(self, x_BCTHW: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Clean latents x0 (float32, on `device`); inputs may be on any device."""
        if conditioning not in self._numbers:
            self._numbers[conditioning] = next(self._next_number)
        number, living = self._numbers[conditioning], set(self._numbers.values())
        shares = [
            share.tolist() for share in torch.arange(len(conditioning)).tensor_split(self._device_placement.num_shares)
        ]

        def question(places: list[int], is_new: bool) -> Question | None:
            """Request for some rows. Indexing copies them: a slice would be pickled with the whole tensor."""
            if not places:
                return None
            condition = conditioning.at(places).to("cpu") if is_new else None
            return "denoise", (x_BCTHW[places].cpu(), sigma_B[places].cpu(), number, condition, living)

        def questions(group: _Group) -> list[Question | None]:
            of_shares = [question(places, number not in group.notified) for places in shares]
            group.notified = group.notified & living | {number}
            return [asked for asked in of_shares for _ in range(self._device_placement.per_share)]

        replies = self._ask(questions)
        return torch.cat([x0 for x0 in replies if x0 is not None]).to(self.device)

    def load_adapter(
        self, name: str, state: Mapping[str, Tensor], adapter: AdapterConfig, *, expert: str | None = None
    ) -> None:
        """Attach an adapter to the network of every rank; with two experts, to `expert` ("high" or "low") or both. The
        conditions hold its scale for each video.

        Raises:
            UserError: for one that does not fit the network.
        """
        self._ask_all("load_adapter", name, state, adapter, expert)
        self._adapters[name] = state, adapter, expert

    def remove_adapter(self, name: str) -> None:
        """Detach an adapter."""
        try:
            self._ask_all("remove_adapter", name)
        finally:  # not before: ranks started meanwhile repeat the request, and must have it
            del self._adapters[name]

    def _ask_all(self, what: str, *arguments: Any) -> None:
        self._ask(lambda group: [(what, arguments)] * len(self._device_placement.devices))

    def _ask(self, questions: "Callable[[_Group], list[Question | None]]") -> list[Any]:
        """Return the response of each rank; lost ranks are started again once, and asked again.

        Raises:
            LostRankError: if ranks are lost again.
        """
        try:
            return self._asked(questions)
        except LostRankError as error:
            print(f"{error}; starting the ranks again", file=sys.stderr, flush=True)
            return self._asked(questions)

    def _asked(self, questions: "Callable[[_Group], list[Question | None]]") -> list[Any]:
        try:
            self._group = self._group or self._started()
        except UserError as error:  # not a mistake in the request
            raise LostRankError(f"the ranks cannot be started again: {error}") from error
        try:
            return self._group.ask(questions(self._group), CALL_SECONDS)
        except BaseException as error:
            if not (isinstance(error, UserError) and self._group.is_idle):  # a response may still come, or never
                self._group.end()
                self._group = None
            raise

    def _started(self) -> "_Group":
        placement, path = self._device_placement, str(self._bundle.path)
        group, dtype = _Group(placement), str(self.dtype).removeprefix("torch.")
        sizes = {"tensor_parallel": placement.tensor, "context_parallel": placement.context}
        options = [replace(self._options, device=device, dtype=dtype, **sizes) for device in placement.devices]
        try:
            loads = [("load", (path, not rank % placement.per_share, own)) for rank, own in enumerate(options)]
            group.ask(loads, START_SECONDS)
            for name, adapter in self._adapters.items():
                group.ask([("load_adapter", (name, *adapter))] * len(loads), CALL_SECONDS)
        except BaseException:
            group.end()
            raise
        return group


class _Group:
    """The running ranks of a denoiser; if one ends, the group ends."""

    def __init__(self, placement: DevicePlacement) -> None:
        self.notified: set[int] = set()
        """Conditions that the ranks have received, by number."""
        self._waiting: dict[Connection, int] = {}
        """Ranks with a response outstanding."""
        self._heard: set[Connection] = set()
        self._processes: list[subprocess.Popen] = []
        self._connections: list[Connection] = []
        self.end = weakref.finalize(self, _end, self._processes, self._connections)
        ports = free_ports(placement.num_shares)
        for number, device in enumerate(placement.devices):
            share, place = divmod(number, placement.per_share)
            self._start(_environment(placement, device, place, ports[share]))

    def _start(self, environment: Mapping[str, str]) -> None:
        ours, theirs = Pipe()
        with socket.socket(fileno=os.dup(ours.fileno())) as ends:  # else a rank that hangs would block this
            for limit in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                ends.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", math.ceil(PATIENCE), 0))
        self._connections.append(ours)
        with theirs:
            command = python_module("megadit.infer.runtimes.rank", str(theirs.fileno()))
            self._processes.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
            )

    def ask(self, questions: Sequence[Question | None], seconds: float) -> list[Any]:
        """Return the response of each rank to its request; None where there is no request.

        Raises:
            UserError: if a rank raises one.
            LostRankError: if a rank ended, is silent, or does not respond within `seconds`.
            RuntimeError: if a rank failed.

        After an error, ranks may wait for one another for ever, unless `is_idle`.
        """
        self._waiting = {self._connections[rank]: rank for rank, asked in enumerate(questions) if asked is not None}
        replies, mistakes, failures = [None] * len(questions), [], []
        for rank in self._waiting.values():
            self._send(rank, pickle.dumps(questions[rank]))
        silent, deadline = set(), time.monotonic() + seconds
        while self._waiting:
            is_amiss = bool(failures or mistakes)
            left = max(0.0, deadline - time.monotonic())
            answering = wait(list(self._waiting), _SECONDS_AFTER_A_FAILURE if is_amiss else min(PATIENCE, left))
            if not answering and is_amiss:
                break
            if not answering:
                if silent:
                    raise LostRankError(f"{self._named(silent)} has been silent for {PATIENCE:g} s")
                if not left:
                    raise LostRankError(f"{self._named(self._waiting)} has not responded within {seconds:g} s")
                silent = self._waiting.keys() & self._heard  # a rank that is starting cannot answer pings yet
                for connection in silent:
                    self._send(self._waiting[connection], PING)
            for connection in answering:
                rank = self._waiting[connection]
                with self._counted_as_lost(rank):
                    message = connection.recv_bytes()
                self._heard.add(connection)
                silent.discard(connection)
                if message == PONG:
                    continue
                del self._waiting[connection]
                replies[rank], error = pickle.loads(message)
                if error is not None:
                    (mistakes if isinstance(error, UserError) else failures).append(error)
        if failures or mistakes:
            raise (failures or mistakes)[0]
        return replies

    @property
    def is_idle(self) -> bool:
        """Whether no response is outstanding."""
        return not self._waiting

    def _send(self, rank: int, message: bytes) -> None:
        with self._counted_as_lost(rank):
            self._connections[rank].send_bytes(message)

    def _named(self, connections: Collection[Connection]) -> str:
        return f"rank {min(self._waiting[connection] for connection in connections)} of {len(self._processes)}"

    @contextmanager
    def _counted_as_lost(self, rank: int) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:
            raise LostRankError(f"rank {rank} of {len(self._processes)} hangs in the middle of a message") from None
        except (EOFError, OSError):
            raise LostRankError(f"rank {rank} of {len(self._processes)} ended") from None


def _end(processes: list[subprocess.Popen], connections: list[Connection]) -> None:
    for connection in connections:
        connection.close()
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def _environment(placement: DevicePlacement, device: str, place: int, port: int) -> dict[str, str]:
    """Environment of the rank at this place of its device group; the port identifies the group's process group."""
    place_of_gpu = torch.device(device).index or 0
    world = {"RANK": place, "WORLD_SIZE": placement.per_share, "LOCAL_RANK": place_of_gpu, "MASTER_PORT": port}
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in world.items()}}
    if device == "cpu":  # else each would use all cores
        environment |= rank_environment(len(placement.devices))
    return environment
