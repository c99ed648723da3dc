"""Metrics, alert rules and dashboard, checked by promtool: names, expressions, and the alert of each condition."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from bench import scrape
from tests.support.host import TREE, Node

from . import fetched

METRICS = TREE / "packaging/metrics"
RULES = METRICS / "alerts.yaml"
SHARE = {"container": "train", "id": "abc", "instance": "n1", "uuid": "GPU-1"}
DEVICE = {"device": "0", "instance": "n1", "uuid": "GPU-1"}
HOST = {"instance": "n1"}


# A healthy host: series in promtool's notation `START+STEPxTIMES`, a sample a minute
QUIET = {
    "gpushare_exceeded_total": (SHARE, "0x60"),
    "gpushare_memory_over_bytes": (SHARE, "0x60"),
    "gpushare_memory_used_bytes": (SHARE, "90x60"),
    "gpushare_memory_limit_bytes": (SHARE, "100x60"),
    "gpushare_oom_total": (SHARE, "7x60"),
    "gpushare_throttled_seconds_total": (SHARE, "5+6x60"),
    "gpushare_device_memory_unshared_bytes": (DEVICE, "1000000x60"),
    "gpushare_refused_starts_total": (HOST, "0 1 2 2x60"),
    "gpushare_damaged_leases": (HOST, "0x60"),
    "gpushare_driver_up": (HOST, "1x60"),
    "gpushare_state_up": (HOST, "1x60"),
    "gpushare_reconcile_timestamp_seconds": (HOST, "0+60x60"),
}
# A fault -> its alert, and the time when it fires
CASES = {
    "bypass counter": ("GpushareLimitExceeded", "10m", {"gpushare_exceeded_total": "0 0 0 0 0 1x60"}),
    "current bypass": ("GpushareLimitExceeded", "10m", {"gpushare_memory_over_bytes": "1x60"}),
    "limit nearly reached": ("GpushareMemoryNearLimit", "20m", {"gpushare_memory_used_bytes": "96x60"}),
    "limit reached": ("GpushareAllocationsRefused", "10m", {"gpushare_oom_total": "0 0 0 0 0 1x60"}),
    "refused starts": ("GpushareStartsRefused", "10m", {"gpushare_refused_starts_total": "0+1x60"}),
    "throttled": ("GpushareThrottled", "50m", {"gpushare_throttled_seconds_total": "0+40x60"}),
    "use outside shares": ("GpushareUnsharedMemory", "20m", {"gpushare_device_memory_unshared_bytes": "2000000000x60"}),
    "damaged lease": ("GpushareLeaseDamaged", "10m", {"gpushare_damaged_leases": "1x60"}),
    "no driver": ("GpushareBlind", "10m", {"gpushare_driver_up": "0x60"}),
    "no state": ("GpushareBlind", "10m", {"gpushare_state_up": "0x60"}),
    "no measurement": ("GpushareBlind", "20m", {"gpushare_reconcile_timestamp_seconds": "0x60"}),
}


def promtool(*args: str | Path, text: str = "") -> tuple[int, str]:
    return fetched.call(fetched.program("prometheus", "usr/bin/promtool"), *args, text=text)


def rules() -> dict[str, Any]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def test_rules_are_valid() -> None:
    assert promtool("check", "rules", RULES) == (0, f"Checking {RULES}\n  SUCCESS: {len(rules())} rules found\n\n")


def named(name: str, labels: dict[str, str]) -> str:
    return name + "{" + ",".join(f'{label}="{value}"' for label, value in labels.items()) + "}"


def expected(alert: str, at: str, labels: dict[str, str] | None) -> dict[str, Any]:
    """The alert with its templates filled by these labels; None: no alert."""
    rule = rules()[alert]
    if labels is None:
        return {"alertname": alert, "eval_time": at, "exp_alerts": []}
    says = dict(rule["annotations"])
    for label, value in labels.items():
        says = {key: text.replace(f"{{{{ $labels.{label} }}}}", value) for key, text in says.items()}
    found = {"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": says}
    return {"alertname": alert, "eval_time": at, "exp_alerts": [found]}


def test_each_condition_fires_only_its_alert(tmp_path: Path) -> None:
    """A host with one fault has only that fault's alert; a healthy host has none."""
    assert {alert for alert, _, _ in CASES.values()} == rules().keys()
    tests = []
    for what, (alert, at, amiss) in {**CASES, "no fault": ("", "55m", {})}.items():
        series = {name: (labels, amiss.get(name, values)) for name, (labels, values) in QUIET.items()}
        labels_of = dict.fromkeys([alert], *(QUIET[name][0] for name in amiss))
        tests.append(
            {
                "name": what,
                "interval": "1m",
                "input_series": [
                    {"series": named(name, labels), "values": values} for name, (labels, values) in series.items()
                ],
                "alert_rule_test": [expected(name, at, labels_of.get(name)) for name in rules()],
            }
        )
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    assert promtool("test", "rules", file) == (0, f"Unit Testing:  {file}\n  SUCCESS\n\n")


def test_dashboard_expressions_are_valid_promql(tmp_path: Path) -> None:
    dashboard = json.loads((METRICS / "dashboard.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    variables = {"__rate_interval": "5m", **{one["name"]: "x" for one in dashboard["templating"]["list"]}}
    for name, value in variables.items():
        asked = [re.sub(rf"\$({name}\b|\{{{name}[^}}]*}})", value, text) for text in asked]
    groups = [
        {
            "name": "g",
            "rules": [{"record": f"gpushare:x{number}", "expr": text} for number, text in enumerate(asked)],
        }
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": groups}))
    code, said = promtool("check", "rules", file)
    assert (code, f"SUCCESS: {len(asked)} rules found" in said) == (0, True), said


def test_served_metrics_pass_promtool(simhost: Path, make_node: Callable[..., Node]) -> None:
    """All metrics, for a hundred shares, by promtool's rules."""
    node = make_node(simhost)
    scrape.fill(node)
    done = node.cli("export", "--once")
    assert done.returncode == 0, done.stderr
    assert promtool("check", "metrics", text=done.stdout) == (0, "")
    code, said = promtool("check", "metrics", text="# TYPE x_mb gauge\nx_mb 1\n")
    assert code != 0 and "abbreviated units" in said, "it does look"
