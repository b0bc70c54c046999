"""How often a key may ask, at whichever gateways of a store: a bucket of tokens for each key, kept in the store.

A gateway takes as many tokens at once as the key gets in a second, so that a fast key does not cost a write for each
request. All come from the one bucket: together the gateways let a key ask no more than its limit.
"""

import threading
from collections import Counter

from sqlalchemy import select, update
from sqlalchemy.exc import SQLAlchemyError

from megadit.serve.gateway.logs import log
from megadit.serve.gateway.store.clock import store_seconds
from megadit.serve.gateway.store.database import KEYS, Database, in_a_line


class Rates:
    """Part of one gateway in the counting."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._held: Counter[str] = Counter()
        """Key -> tokens that were taken from its bucket and not yet used."""
        self._lock = threading.Lock()

    def take(self, key_id: str, per_minute: int) -> float:
        """Return 0 if the key may ask now, which is then counted; else the seconds until it may.

        A key that was silent for a minute may ask `per_minute` times at once. While the store cannot be written (a full
        disk), nothing is counted: what is finished is still served, and nothing new is taken anyway.
        """
        if self._take_token(key_id):
            return 0.0
        try:
            taken, seconds = self._fetch(key_id, per_minute)
        except SQLAlchemyError as error:
            log("store failed", reason=in_a_line(error))
            return 0.0
        if taken:
            with self._lock:
                self._held[key_id] += taken - 1
        return seconds

    def _take_token(self, key_id: str) -> bool:
        with self._lock:
            is_held = self._held[key_id] > 0
            self._held[key_id] -= is_held
        return is_held

    def _fetch(self, key_id: str, per_minute: int) -> tuple[int, float]:
        """Tokens taken from the bucket, and the seconds until there is one if there was none."""
        with self._database.writing() as connection:
            bucket = select(KEYS.c.tokens, KEYS.c.tokens_tick).where(KEYS.c.id == key_id).with_for_update()
            tokens, since = connection.execute(bucket).one()
            now = store_seconds(connection)
            tokens = per_minute if tokens is None else min(per_minute, tokens + (now - since) * per_minute / 60)
            if tokens < 1:
                return 0, (1 - tokens) * 60 / per_minute
            taken = min(int(tokens), max(1, per_minute // 60))
            rest = {"tokens": tokens - taken, "tokens_tick": now}
            connection.execute(update(KEYS).where(KEYS.c.id == key_id).values(**rest))
        return taken, 0.0
