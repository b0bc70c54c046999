"""What operators see: the level of each event, who hung up, how long requests take, what runs."""

import ast
import contextlib
import json
import logging
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from megadit.serve import gateway as package
from megadit.serve.gateway.logs import LEVELS, log, log_as_json

QUIET = {"gateway drains", "gateway ended", "gateway started", "job cancelled", "job started", "request"}
"""Events of a service in good health."""


def events() -> dict[str, list[bool]]:
    """Every event that the gateway logs by a literal name -> whether an error comes with it, at each place."""
    found: dict[str, list[bool]] = {}
    for path in Path(package.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "log" and node.args:
                if isinstance(node.args[0], ast.Constant):
                    found.setdefault(node.args[0].value, []).append(any(word.arg == "error" for word in node.keywords))
    return found


def test_every_event_has_a_level_or_is_one_of_good_health():
    assert set(events()) - LEVELS.keys() == QUIET
    assert not [event for event, with_error in events().items() if any(with_error) and event in QUIET]


@pytest.mark.parametrize(("event", "level"), [("store failed", "error"), ("webhook failed", "warning"), ("x", "info")])
def test_the_level_is_in_the_line(event, level, capsys):
    logger = logging.getLogger("megadit.gateway")
    with contextlib.closing(_restored(logger)):
        log_as_json()
        log(event, job="a")
    assert json.loads(capsys.readouterr().err)["level"] == level


def _restored(logger):
    handlers, level, propagate = logger.handlers, logger.level, logger.propagate

    class Restore:
        def close(self):
            logger.handlers, logger.level, logger.propagate = handlers, level, propagate

    return Restore()


def value(gateway, name: str, **labels) -> float:
    return gateway.metrics.registry.get_sample_value(name, labels) or 0.0


def test_a_client_that_hangs_up_in_its_post_is_no_fault_of_ours(gateway, url, new_key, eventually, caplog):
    caplog.set_level(logging.INFO, "megadit.gateway")
    head = f"POST /v1/videos HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {new_key()[0]}\r\n"
    head += "Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
    with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port)) as client:
        client.sendall(head.encode())
    labels = {"method": "POST", "route": "/v1/videos"}
    eventually(lambda: value(gateway, "megadit_http_requests_total", **labels, status="499") == 1)
    assert not value(gateway, "megadit_http_requests_total", **labels, status="500")
    assert value(gateway, "megadit_http_request_seconds_count", **labels) == 1
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_the_version_is_told(gateway):
    (sample,) = [
        sample for family in gateway.metrics.registry.collect() for sample in family.samples
        if sample.name == "megadit_build_info"
    ]  # fmt: skip
    assert set(sample.labels) == {"version", "python"}
