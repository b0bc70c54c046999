"""How often a key may ask: a bucket of tokens for each key, in this process, by the monotonic clock."""

import threading
import time


class Rates:
    """Counts requests by key; several gateways each count their own."""

    def __init__(self) -> None:
        self._buckets: dict[str, tuple[float, float]] = {}
        """Key -> tokens that were left, and when."""
        self._lock = threading.Lock()

    def take(self, key_id: str, per_minute: int) -> float:
        """0 if the key may ask now, which is then counted; else the seconds until it may.

        A key that was silent for a minute may ask `per_minute` times at once.
        """
        now = time.monotonic()
        with self._lock:
            tokens, since = self._buckets.get(key_id, (float(per_minute), now))
            tokens = min(per_minute, tokens + (now - since) * per_minute / 60)
            is_allowed = tokens >= 1
            self._buckets[key_id] = (tokens - is_allowed, now)
        return 0.0 if is_allowed else (1 - tokens) * 60 / per_minute
