"""The store's clock, and liveness of gateways: both use monotonic clocks.

A jump of the wall clock would expire results, change quotas or make running gateways look dead.
"""

import time

from sqlalchemy import Connection, delete, select, update

from megadit.models.shared.errors import UserError
from megadit.serve.gateway.store.database import CLOCK, GATEWAYS, Database

SECONDS_TO_CLAIM = 3.0
"""Seconds of a few heartbeats."""
_SECONDS = select(CLOCK.c.seconds)


def store_seconds(connection: Connection) -> float:
    """Total seconds during which any gateway of this store was running."""
    return connection.execute(_SECONDS).scalar_one()


class Heart:
    """One gateway's heartbeat: it advances the store's clock, and detects dead gateways.

    `beat` is called about every second. A gateway whose count of beats did not change for `patience` seconds of this
    process's monotonic clock is dead.
    """

    def __init__(self, database: Database, name: str, *, patience: float = 15.0) -> None:
        self._database, self._name, self._patience = database, name, patience
        self._clock: tuple[float, float] | None = None
        """The store's clock as it was last seen or set, and when."""
        self._others: dict[str, tuple[int, float]] = {}
        """Name -> its count of beats, and when that count was first seen."""

    def claim(self) -> None:
        """Takes the name, and starts the heartbeat; if the name is known, waits for beats of another gateway first.
        Raises UserError if another gateway with this name is running."""
        before = self._beats()
        for _ in range(0 if before is None else 20):  # looks, not a deadline: this process may be paused, too
            time.sleep(SECONDS_TO_CLAIM / 20)
            if self._beats() not in (before, None):
                raise UserError(
                    f"a gateway with the name {self._name} is running and would lose its jobs: give another --name"
                )
        self.beat()

    def leave(self) -> None:
        """Releases the name, so that the next gateway with it need not wait."""
        with self._database.writing() as connection:
            connection.execute(delete(GATEWAYS).where(GATEWAYS.c.name == self._name))

    def _beats(self) -> int | None:
        own = select(GATEWAYS.c.beats).where(GATEWAYS.c.name == self._name)
        with self._database.reading() as connection:
            return connection.execute(own).scalar_one_or_none()

    def beat(self) -> list[str]:
        """Counts a beat, advances the clock, and returns the dead gateways that are not buried yet."""
        now = time.monotonic()
        with self._database.writing() as connection:
            self._advance(connection, now)
            counted = update(GATEWAYS).where(GATEWAYS.c.name == self._name).values(beats=GATEWAYS.c.beats + 1)
            if not connection.execute(counted).rowcount:
                connection.execute(GATEWAYS.insert().values(name=self._name, beats=0))
            beats = dict(connection.execute(select(GATEWAYS.c.name, GATEWAYS.c.beats)).all())
            return self._dead(beats, now)

    def bury(self, name: str) -> bool:
        """Forgets a dead gateway, after its jobs were taken over; False if it came back, or another has buried it."""
        is_dead = (GATEWAYS.c.name == name) & (GATEWAYS.c.beats == self._others[name][0])
        with self._database.writing() as connection:
            return connection.execute(delete(GATEWAYS).where(is_dead)).rowcount == 1

    def _advance(self, connection: Connection, now: float) -> None:
        """Adds the time since this gateway's last beat, unless another gateway has advanced the clock since."""
        seconds = store_seconds(connection)
        if self._clock is not None and self._clock[0] == seconds:
            elapsed = now - self._clock[1]
            connection.execute(update(CLOCK).where(CLOCK.c.seconds == seconds).values(seconds=seconds + elapsed))
            seconds += elapsed
        self._clock = (seconds, now)

    def _dead(self, beats: dict[str, int], now: float) -> list[str]:
        beats = {name: count for name, count in beats.items() if name != self._name}
        self._others = {
            name: self._others[name] if name in self._others and self._others[name][0] == count else (count, now)
            for name, count in beats.items()
        }
        return [name for name, (_, since) in self._others.items() if now - since > self._patience]
