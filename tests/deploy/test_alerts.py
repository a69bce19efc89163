"""The alerts of deploy/ fire when they should, and at no other time; and each metric of deploy/ exists."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import pytest
import yaml
from support.clients import Browser, Start
from support.collections import NOTES
from support.deployment import DEPLOY

RULES: Final = DEPLOY / "prometheus/alerts.yml"
DASHBOARD: Final = DEPLOY / "grafana.json"
MONITOR: Final = DEPLOY.parent / "docs/how-to/monitor.md"
NODE: Final = 'instance="a:8081",job="pysync"'


class Case(NamedTuple):
    """An alert that fires at the time `at` if the series are `fires`, a value a minute, and not if they are
    `silent`. It then has these labels, besides its name, and says this."""

    fires: dict[str, str]
    silent: dict[str, str]
    labels: dict[str, str]
    summary: str
    at: str = "30m"


def node(name: str, labels: str = "") -> str:
    """A series of the node."""
    return f"{name}{{{NODE}{',' * bool(labels)}{labels}}}"


INSTANCE: Final = {"instance": "a:8081", "job": "pysync"}
REQUESTS: Final = "pysync_requests_total"
BUCKETS: Final = "pysync_request_seconds_bucket"
CASES: Final = {
    "PysyncDown": Case({node("up"): "0x60"}, {node("up"): "1x28 0 1x30"}, INSTANCE, "a:8081 does not answer"),
    "PysyncNotReady": Case(
        {node("pysync_ready"): "0x60"},
        {node("pysync_ready"): "1x28 0 1x30"},
        INSTANCE,
        "a:8081 cannot read and write what requests do",
    ),
    "PysyncErrors": Case(
        {node(REQUESTS, 'status="200"'): "0+98x60", node(REQUESTS, 'status="503"'): "0+2x60"},
        {node(REQUESTS, 'status="200"'): "0+998x60", node(REQUESTS, 'status="503"'): "0+2x60"},
        {},
        "2% of the requests fail",
    ),
    "PysyncSlow": Case(
        {
            node(BUCKETS, 'action="pull",le="1.0"'): "0+90x60",
            node(BUCKETS, 'action="pull",le="2.5"'): "0+100x60",
            node(BUCKETS, 'action="pull",le="+Inf"'): "0+100x60",
        },
        {
            node(BUCKETS, 'action="pull",le="1.0"'): "0+100x60",
            node(BUCKETS, 'action="pull",le="2.5"'): "0+100x60",
            node(BUCKETS, 'action="pull",le="+Inf"'): "0+100x60",
        },
        {"action": "pull"},
        "one of 100 requests to pull takes longer than 2.35s",
    ),
    "PysyncCorruptObjects": Case(
        {node("pysync_corrupt_objects_total", 'kind="file",found_by="scrub"'): "0x20 1x40"},
        {node("pysync_corrupt_objects_total", 'kind="file",found_by="scrub"'): "1x60"},
        {"kind": "file", "found_by": "scrub"},
        "a stored file is damaged",
    ),
    "PysyncPluginFailures": Case(
        {node("pysync_plugin_failures_total", 'plugin="p",hook="after_write"'): "0x20 1x40"},
        {node("pysync_plugin_failures_total", 'plugin="p",hook="after_write"'): "0 1x59"},
        {"plugin": "p", "hook": "after_write"},
        "the hook after_write of the plugin p fails",
    ),
    "PysyncProjectionFailures": Case(
        {node("pysync_projection_failures_total", 'projection="titles"'): "0x20 1x40"},
        {node("pysync_projection_failures_total", 'projection="titles"'): "0 1x59"},
        {"projection": "titles"},
        "the projection titles lacks something",
    ),
    "PysyncProjectionBehind": Case(
        {node("pysync_projection_lag_seconds"): "90x60"},
        {node("pysync_projection_lag_seconds"): "90x27 0 90x30"},
        {},
        "lists are 1m 30s behind",
    ),
    "PysyncWebhookBehind": Case(
        {node("pysync_webhook_lag_seconds", 'webhook="search"'): "0+60x60"},
        {node("pysync_webhook_lag_seconds", 'webhook="search"'): "0+60x27 0 400x30"},
        {"webhook": "search"},
        "the receiver of the webhook search has accepted nothing for 30m 0s",
    ),
    "PysyncWorkerReplacements": Case(
        {node("pysync_worker_replacements_total", 'reason="stalled"'): "0x20 1x40"},
        {node("pysync_worker_replacements_total", 'reason="stalled"'): "1x60"},
        {"instance": "a:8081", "reason": "stalled"},
        "a worker of a:8081 was replaced: stalled",
    ),
    "PysyncWriteTimeouts": Case(
        {node("pysync_write_timeouts_total"): "0x20 1x40"},
        {node("pysync_write_timeouts_total"): "0 1x59"},
        {"instance": "a:8081"},
        "writes of a:8081 take too long",
    ),
    "PysyncCoordinatorDown": Case(
        {node("pysync_coordinator_up"): "0x60"},
        {node("pysync_coordinator_up"): "1x29 0 1x30"},
        INSTANCE,
        "a:8081 does not reach Redis",
    ),
    "PysyncBackupBehind": Case(
        {node("pysync_backup_lag_seconds"): "0+20x60"},
        {node("pysync_backup_lag_seconds"): "0 60 120 5x57"},
        {},
        "the backup is 10m 0s behind",
    ),
    "PysyncBackupFailures": Case(
        {node("pysync_backup_failures_total"): "0+1x60"},
        {node("pysync_backup_failures_total"): "0x12 1x48"},  # once, and then no more
        {},
        "the backup fails again and again",
    ),
    "PysyncBackupUnreadableObjects": Case(
        {node("pysync_backup_unreadable_objects"): "1x60"},
        {node("pysync_backup_unreadable_objects"): "0x60"},
        {},
        "1 objects are missing in the backup",
    ),
    "PysyncDiskSpace": Case(
        {node("pysync_disk_free_bytes", 'folder="./data"'): "900000000x60"},
        {node("pysync_disk_free_bytes", 'folder="./data"'): "50000000000-1000000x500"},  # 34 days left
        INSTANCE | {"folder": "./data"},
        "the disk of ./data at a:8081 is full, or will be within a day",
    ),
}
FILLING: Final = Case(
    {node("pysync_disk_free_bytes", 'folder="./data"'): "50000000000-50000000x500"},  # 16 hours left
    {node("pysync_disk_free_bytes", 'folder="./data"'): "50000000000x500"},
    INSTANCE | {"folder": "./data"},
    "the disk of ./data at a:8081 is full, or will be within a day",
    at="60m",
)


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def test_every_alert_is_tested_and_explained() -> None:
    named = [alert["alert"] for alert in alerts()]
    assert sorted(named) == sorted(CASES)
    explained = re.findall(r"`(Pysync\w+)`", MONITOR.read_text())
    assert set(explained) == set(named)


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "case"), [*CASES.items(), ("PysyncDiskSpace", FILLING)], ids=[*CASES, "PysyncDiskSpace-filling"]
)
def test_alert_fires_when_it_should_and_is_silent_else(
    promtool: str, tmp_path: Path, name: str, case: Case
) -> None:
    fired = {"exp_labels": case.labels, "exp_annotations": {"summary": case.summary}}
    tests = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": key, "values": value} for key, value in series.items()],
                "alert_rule_test": [{"eval_time": case.at, "alertname": name, "exp_alerts": expected}],
            }
            for series, expected in ((case.fires, [fired]), (case.silent, []))
        ],
    }
    path = tmp_path / "test.yml"
    path.write_text(json.dumps(tests))
    done = subprocess.run([promtool, "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


async def test_metrics_of_alerts_and_of_the_dashboard_exist(
    start: Start, session: aiohttp.ClientSession
) -> None:
    page = await Browser(await start({"collections": [NOTES]}), session).request("GET", "/metrics")
    endings = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    types = re.findall(r"^# TYPE (\w+) (\w+)$", page.body.decode(), re.M)
    exposed = {name + ending for name, kind in types for ending in endings[kind]}
    for path in (RULES, DASHBOARD):
        named = set(re.findall(r"\bpysync_[a-z_]+", path.read_text()))
        assert len(named) > 10
        assert named <= exposed, path.name


@pytest.mark.process
def test_prometheus_understands_the_queries_of_the_dashboard(promtool: str, tmp_path: Path) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    rules = [
        {"record": f"query_{number}", "expr": query.replace("$__rate_interval", "5m")}
        for number, query in enumerate(queries)
    ]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run([promtool, "check", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
