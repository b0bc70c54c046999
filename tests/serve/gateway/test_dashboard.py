"""The Grafana dashboard asks for what the gateway tells, and shows all of it."""

import json
import re
from pathlib import Path

import pytest
import yaml

from megadit.serve import gateway
from megadit.serve.gateway.metrics import Metrics

PATH = Path(gateway.__file__).parent / "dashboard.json"
PANELS = json.loads(PATH.read_text())["panels"]


@pytest.fixture(scope="module")
def told() -> dict[str, set[str]]:
    """Metric, as Prometheus keeps it -> its labels."""
    metrics = Metrics()
    metrics.watch(lambda: {("a", "queued"): 1}, lambda: {"http://triton": True}, lambda: True)
    metrics.request_seconds.labels("GET", "/").observe(1.0)
    metrics.webhook_attempts.labels("2xx")
    for family in (metrics.requests, metrics.videos, metrics.errors, metrics.interruptions, metrics.refusals):
        family.labels(*family._labelnames)
    metrics.stages.labels("queue", "a").observe(1.0)
    metrics.webhooks.labels("sent")
    found = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_asks_for_metrics_and_labels_that_there_are(panel, told):
    (target,) = panel["targets"]
    (name,) = re.findall(r"megadit_\w+", target["expr"])
    assert name in told
    wanted = set(re.findall(r"\w+", "".join(re.findall(r"by \(([^)]*)\)", target["expr"]))))
    assert wanted <= told[name]
    assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= wanted


def test_every_metric_is_shown(told):
    shown = " ".join(panel["targets"][0]["expr"] for panel in PANELS)
    beside = ("_created", "_sum", "_count")  # of a metric that is shown
    assert {name for name in told if not name.endswith(beside) and name not in shown} == set()


def test_panels_do_not_cover_each_other():
    places = [tuple(panel["gridPos"].values()) for panel in PANELS]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in PANELS})


RULES = yaml.safe_load((PATH.parent / "alerts.yaml").read_text())["groups"][0]["rules"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_metrics_and_labels_that_there_are(rule, told):
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"} and rule["annotations"]["summary"]
    names = re.findall(r"(megadit_\w+)(?:{(\w+)(?:=|!=|=~)\"[^\"]*\"})?", rule["expr"])
    assert names and rule["expr"].count("(") == rule["expr"].count(")")
    for name, label in names:
        assert name in told and (not label or label in told[name])
    assert re.fullmatch(r"\d+m", rule.get("for", "5m"))
