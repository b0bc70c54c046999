"""A denoiser on several ranks, processes that this one starts: it calls them together, and survives their loss.

The ranks form shares, each of which answers for some videos of a batch (guidance makes two rows of each); those
of one share split the network's matrices and the tokens of a video (`shared_torch.py`). Sampling, texts and the
tokenizer stay with this process. A rank that dies, or fails, ends them all, since others may wait for it for ever. They
are then started again, and what was asked of the lost ones is asked once more.

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
from dataclasses import dataclass
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from megadit.models.bundle import Bundle
from megadit.models.configs.adapter import AdapterConfig
from megadit.models.networks.conditioning import Conditioning
from megadit.models.shared.cores import rank_environment
from megadit.models.shared.errors import UserError
from megadit.models.shared.ports import free_ports

START_SECONDS, CALL_SECONDS = 600.0, 600.0
"""Seconds of loading the network, and of one call, after which the ranks count as lost."""
_SECONDS_AFTER_A_FAILURE = 5.0
"""Seconds after a failure in which another rank may be seen to have ended, which then was the reason."""
PATIENCE = 30.0
"""Seconds in which a rank answers a ping, whatever it is doing."""
PING = b"are you there?"
PONG = b"yes"
"""Bytes that are no pickle."""
Question = tuple[str, tuple]
"""(a method of `rank.Rank`, its arguments)"""


class LostRankError(RuntimeError):
    """A rank ended, or does not answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePlacement:
    """Placement of a network's ranks on devices."""

    devices: tuple[str, ...]
    """Device of each rank."""
    tensor: int = 1
    """Ranks of a share that split the network's matrices."""
    context: int = 1
    """Ranks of a share that split the tokens of a video."""

    def __post_init__(self) -> None:
        if min(self.tensor, self.context) < 1 or not self.devices or len(self.devices) % self.per_share:
            raise UserError(
                f"{len(self.devices)} ranks cannot be divided into shares of {self.tensor} x {self.context} (tensor x "
                f"context): take a multiple of {self.tensor * self.context}"
            )

    @property
    def per_share(self) -> int:
        return self.tensor * self.context

    @property
    def num_shares(self) -> int:
        return len(self.devices) // self.per_share


class DistributedDenoiser:
    """D(x; sigma) by ranks of this process's own; called exactly like `TorchDenoiser`."""

    def __init__(
        self,
        bundle: Bundle,
        placement: DevicePlacement,
        *,
        device: torch.device,
        dtype: torch.dtype,
        **options: Any,
    ) -> None:
        """The denoiser of `bundle`, whose results lie on `device`; `options` are those of `load_denoiser`.

        Raises:
            UserError: if the network does not divide so, or cannot be loaded.
        """
        self.device, self.dtype = device, dtype
        self._bundle, self._device_placement, self._options = bundle, placement, options
        self._adapters: dict[str, tuple[Mapping[str, Tensor], AdapterConfig, str | None]] = {}
        """Adapters by name: ranks that are started again need them."""
        self._numbers: weakref.WeakKeyDictionary[Conditioning, int] = weakref.WeakKeyDictionary()
        self._next_number = count()
        self._group = self._started()

    @torch.no_grad()
    def __call__(self, x_BCTHW: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Clean latents x0 (float32, on `device`); the inputs may lie anywhere."""
        if conditioning not in self._numbers:
            self._numbers[conditioning] = next(self._next_number)
        number, living = self._numbers[conditioning], set(self._numbers.values())
        shares = [
            share.tolist() for share in torch.arange(len(conditioning)).tensor_split(self._device_placement.num_shares)
        ]

        def question(places: list[int], is_new: bool) -> Question | None:
            """Question about some videos. Picked by place, they are copies: a slice would be sent with the whole."""
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
        """Attach an adapter to the network of every rank, of a pair to `expert` ("high" or "low") or both; conditions
        hold its scale for each video.

        Raises:
            UserError: for one that does not fit the network.
        """
        self._ask_all("load_adapter", name, state, adapter, expert)
        self._adapters[name] = state, adapter, expert

    def remove_adapter(self, name: str) -> None:
        """Detach an adapter."""
        try:
            self._ask_all("remove_adapter", name)
        finally:  # not before: ranks that are started meanwhile are asked again, and must have it
            del self._adapters[name]

    def _ask_all(self, what: str, *arguments: Any) -> None:
        self._ask(lambda group: [(what, arguments)] * len(self._device_placement.devices))

    def _ask(self, questions: "Callable[[_Group], list[Question | None]]") -> list[Any]:
        """Return the answer of each rank; where ranks are lost, the answers of those started in their place.

        Raises:
            LostRankError: if these are lost, too.
        """
        try:
            return self._asked(questions)
        except LostRankError as error:
            print(f"{error}; starting the ranks again", file=sys.stderr, flush=True)
            return self._asked(questions)

    def _asked(self, questions: "Callable[[_Group], list[Question | None]]") -> list[Any]:
        try:
            self._group = self._group or self._started()
        except UserError as error:  # no mistake of what is asked
            raise LostRankError(f"the ranks cannot be started again: {error}") from error
        try:
            return self._group.ask(questions(self._group), CALL_SECONDS)
        except BaseException as error:
            if not (isinstance(error, UserError) and self._group.is_idle):  # an answer may be on its way, or never come
                self._group.end()
                self._group = None
            raise

    def _started(self) -> "_Group":
        group, options = _Group(self._device_placement), self._options
        sizes = {"tensor_parallel": self._device_placement.tensor, "context_parallel": self._device_placement.context}
        dtype = str(self.dtype).removeprefix("torch.")
        try:
            loads = [
                (
                    "load",
                    (
                        str(self._bundle.path),
                        not rank % self._device_placement.per_share,
                        device,
                        dtype,
                        options | sizes,
                    ),
                )
                for rank, device in enumerate(self._device_placement.devices)
            ]
            group.ask(loads, START_SECONDS)
            for name, adapter in self._adapters.items():
                group.ask([("load_adapter", (name, *adapter))] * len(loads), CALL_SECONDS)
        except BaseException:
            group.end()
            raise
        return group


class _Group:
    """The ranks of a denoiser, from their start to their end, which is also that of the group."""

    def __init__(self, placement: DevicePlacement) -> None:
        self.notified: set[int] = set()
        """Conditions that the ranks have received, by number."""
        self._waiting: dict[Connection, int] = {}
        """Ranks that owe an answer."""
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
        with socket.socket(fileno=os.dup(ours.fileno())) as ends:  # else of one that stands still for ever
            for limit in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                ends.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", math.ceil(PATIENCE), 0))
        self._connections.append(ours)
        with theirs:
            command = [sys.executable, "-m", "megadit.infer.runtimes.rank", str(theirs.fileno())]
            self._processes.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
            )

    def ask(self, questions: Sequence[Question | None], seconds: float) -> list[Any]:
        """Return the answer of each rank to its question; None where it is asked nothing.

        Raises:
            UserError: where a rank does.
            LostRankError: if one ended, is silent, or does not answer within `seconds`.
            RuntimeError: if one failed.

        After these, ranks may wait for one another for ever, unless `is_idle`.
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
                    raise LostRankError(f"{self._named(self._waiting)} has not answered within {seconds:g} s")
                silent = self._waiting.keys() & self._heard  # one that starts cannot say so yet
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
        """Whether no rank owes an answer."""
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
            raise LostRankError(f"rank {rank} of {len(self._processes)} stands still within a message") from None
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
    """Environment of the rank at this place of its share: a world of its own, which is found by the port."""
    place_of_gpu = torch.device(device).index or 0
    world = {"RANK": place, "WORLD_SIZE": placement.per_share, "LOCAL_RANK": place_of_gpu, "MASTER_PORT": port}
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in world.items()}}
    if device == "cpu":  # else each would take all cores
        environment |= rank_environment(len(placement.devices))
    return environment
