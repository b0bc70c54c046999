"""Log lines in JSON, one for each request and each event of a job, with the request's id."""

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Any

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
_LOGGER = logging.getLogger("megadit.gateway")


LEVELS = {
    **dict.fromkeys(
        (
            "files of a job not read", "files of a job not stored", "housekeeping failed", "no job started",
            "request failed",
            "result not read", "result not stored", "run failed", "store failed", "the web server ended by itself",
            "webhook given up",
        ),
        logging.ERROR,
    ),
    **dict.fromkeys(
        (
            "job interrupted", "job lost its gateway", "no picture of a result", "result not removed",
            "server is unhealthy", "webhook failed",
        ),
        logging.WARNING,
    ),
}  # fmt: skip
"""Event -> level warning or error; all others are logged at level info."""


def log(event: str, *, error: BaseException | None = None, level: int | None = None, **fields: Any) -> None:
    """Writes one line, by default at the level of its event; with the traceback of `error`."""
    level = LEVELS.get(event, logging.INFO) if level is None else level
    _LOGGER.log(level, event, extra={"fields": fields}, exc_info=error)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "request_id": REQUEST_ID.get(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps({name: value for name, value in line.items() if value is not None}, default=str)


def log_as_json() -> None:
    """Sends logs of the gateway and its web server to standard error, as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json())
    levels = {_LOGGER.name: logging.INFO, "uvicorn.error": logging.INFO, "opentelemetry": logging.WARNING}
    for logger, level in ((logging.getLogger(name), level) for name, level in levels.items()):
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False
