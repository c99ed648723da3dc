"""Prometheus metrics: names obey promtool's rules; alerts and dashboard use only existing metrics."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpushare.cli import metrics
from gpushare.cli.export import Watched
from gpushare.cli.options import Paths
from gpushare.core import constants
from gpushare.core.errors import GpushareError
from gpushare.state import leases, log
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from tests.support.host import TREE
from tests.unit import pure
from tests.unit.clihost import GIB, frozen, init, start, state

__all__ = ["frozen", "init", "start", "state"]  # fixtures
PACKAGED = TREE / "packaging" / "metrics"
NAMES = {one.name: one for one in metrics.METRICS}

# Rules of client_golang's linter testutil/promlint, which `promtool check metrics` runs: forbidden parts of a name
NOT_BASE = r"(minutes?|hours?|days?|weeks?|percent(age)?|kelvins?|fahrenheit|bits?|calories|inches|kilobytes?|[mun]s)"
RULES = {
    "its type": r"_(gauge|counter|histogram|summary|untyped)(_|$)",
    "an abbreviated unit": r"_(s|ms|us|ns|sec|b|kb|mb|gb|tb|pb|m|h|d)(_|$)",
    "a unit that is not a base unit": rf"_{NOT_BASE}(_|$)",
    "a prefix before a unit": r"_(milli|micro|nano|kilo|mega|giga|kibi|mebi|gibi)[a-z]",
    "capital letters": r"[A-Z]",
    "a colon, which is for recording rules": r":",
    "the endings of histograms": r"_(bucket|count|sum)$",
}


@pytest.mark.parametrize("one", metrics.METRICS, ids=lambda one: one.name)
def test_metric_name_obeys_promtool(one: metrics.Metric) -> None:
    assert re.fullmatch(r"gpushare_[a-z_]+", one.name) and one.help.endswith(".") | ("; " in one.help)
    for what, pattern in RULES.items():
        assert not re.search(pattern, one.name), f"{one.name} has {what}"
    assert not {"le", "quantile", *(label for label in one.labels if label.startswith("__"))} & set(one.labels)


@pytest.mark.parametrize("name", ["x_mb", "x_ms_total", "x_gauge", "xUsed", "x_percent", "x_count", "x_milliwatts"])
def test_bad_name_matches_a_rule(name: str) -> None:
    assert any(re.search(pattern, name) for pattern in RULES.values())


def expressions() -> Iterator[tuple[str, str]]:
    for group in yaml.safe_load((PACKAGED / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    dashboard = json.loads((PACKAGED / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]


@pytest.mark.parametrize(("where", "text"), [*expressions()])
def test_alerts_and_dashboard_use_existing_metrics(where: str, text: str) -> None:
    asked = set(re.findall(r"gpushare_\w+", text))
    assert asked and asked <= NAMES.keys(), where
    for name in asked:
        rated = re.search(rf"(rate|increase)\({name}\b", text)
        assert bool(rated) == name.endswith("_total"), f"{where}: {name}"


def test_alerts_use_existing_labels() -> None:
    for group in yaml.safe_load((PACKAGED / "alerts.yaml").read_text())["groups"]:
        assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"])
        for rule in group["rules"]:
            have = set.intersection(*(set(NAMES[name].labels) for name in re.findall(r"gpushare_\w+", rule["expr"])))
            used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
            assert used <= have | {"instance"}, rule["alert"]


def test_each_alert_has_a_runbook() -> None:
    page = (TREE / "docs/operate.md").read_text()
    for group in yaml.safe_load((PACKAGED / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"]["runbook"] == f"docs/operate.md#{rule['alert'].lower()}"
            assert f"\n### {rule['alert']}\n" in page


def test_refused_starts_are_counted(tmp_path: Path) -> None:
    """Also of a container that is refused again under its id; gpushare forgets the oldest."""
    (tmp_path / "errors").mkdir()
    paths = Paths(str(tmp_path / "config.yaml"), str(tmp_path))
    metric, at = metrics.Metrics(paths, "1"), 0

    def refused(name: str) -> int:
        nonlocal at
        at += 1
        log.record(str(tmp_path), name, "gpushare: no", GpushareError("no"))
        os.utime(tmp_path / "errors" / name, ns=(at, at))
        return metric._count_refusals()

    assert [refused(name) for name in ("a", "b", "b")] == [1, 2, 3] and metric._count_refusals() == 3
    (tmp_path / "errors/a").unlink()
    assert metric._count_refusals() == 3
    metric = metrics.Metrics(paths, "1")  # the exporter starts again
    assert metric._count_refusals() == 0 and refused("c") == 1


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((PACKAGED / "dashboard.json").read_text())["panels"]
    return found


def test_legends_use_existing_labels() -> None:
    """Each series has its host, and one of a container its name."""
    for panel in panels():
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert len(set(legends)) == len(legends), panel["title"]
        for target in panel["targets"]:
            labels = NAMES[re.findall(r"gpushare_\w+", target["expr"])[0]].labels
            used = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert used <= {*labels, "instance"}, panel["title"]
            if panel["type"] == "timeseries":
                assert used == ({"name", "slot", "instance"} if "name" in labels else {"device", "instance"})


HOST = '{cluster=~"$cluster", instance=~"$instance"'
POD = ', namespace=~"$namespace", pod=~"$pod"'


def test_dashboard_has_variables_that_every_series_obeys() -> None:
    """Cluster and host, and for series of a container its namespace and pod. `.*` matches a missing label too."""
    variables = {
        one["name"]: one for one in json.loads((PACKAGED / "dashboard.json").read_text())["templating"]["list"]
    }
    assert variables["datasource"]["query"] == "prometheus"
    assert list(variables) == ["datasource", "cluster", "instance", "namespace", "pod"]
    for name in list(variables)[1:]:
        one = variables[name]
        assert one["multi"] and one["includeAll"] and one["allValue"] == ".*" and one["query"].endswith(f", {name})")
    for panel in panels():
        for target in panel["targets"]:
            series = re.findall(r"(gpushare_\w+)({[^}]*})", target["expr"])
            assert len(series) == len(re.findall("gpushare_", target["expr"])) > 0
            for name, selector in series:
                assert selector == HOST + (POD if "pod" in NAMES[name].labels else "") + "}", panel["title"]


# End of a metric's name -> the unit of its panel, unless the expression divides two of them
UNITS = {"_bytes": "bytes", "_ratio": "percentunit", "_seconds_total": "percentunit", "_celsius": "celsius",
         "_watts": "watt", "_containers": "short", "_up": "short", "_oom_total": "short"}  # fmt: skip


def test_dashboard_units_fit_the_metrics() -> None:
    for panel in panels():
        for target in panel["targets"]:
            expr = target["expr"]
            (unit,) = {
                unit for name in re.findall(r"gpushare_\w+", expr) for end, unit in UNITS.items() if name.endswith(end)
            }
            if " / " in expr:
                unit = "percentunit"
            elif expr.startswith("count("):
                unit = "short"
            assert panel["fieldConfig"]["defaults"]["unit"] == unit, panel["title"]


# Title -> the values at which the colour changes: of single numbers, and where a value calls for action
THRESHOLDS = {
    "Containers": [None],
    "Memory granted": [None, 0.9, 1.001],
    "Containers over their limit": [None, 1],
    "Driver answers": [None, 1],
    "Memory, relative to the limit": [None, 0.9, 1.001],
    "Waiting for the compute limit": [None, 0.5],
    "Refused allocations": [None, 1],
    "Memory over the limit, by the driver's count": [None, 1],
    "Temperature": [None, 80, 90],
}


def test_dashboard_thresholds_mark_what_calls_for_action() -> None:
    found = {}
    for panel in panels():
        shown = panel["fieldConfig"]["defaults"]
        if "thresholds" in shown:
            steps = shown["thresholds"]["steps"]
            found[panel["title"]] = [step["value"] for step in steps]
            assert len({step["color"] for step in steps}) == len(steps), panel["title"]
            drawn = shown.get("custom", {}).get("thresholdsStyle", {}).get("mode")
            assert panel["type"] == "stat" or drawn == "line", f"{panel['title']}: a graph draws its thresholds"
    assert found == THRESHOLDS


def test_dashboard_shows_flags_as_words() -> None:
    words = {
        panel["title"]: {key: word["text"] for key, word in one["options"].items()}
        for panel in panels()
        for one in panel["fieldConfig"]["defaults"].get("mappings", [])
    }
    assert words == {"Driver answers": {"0": "no", "1": "yes"}, "Containers over their limit": {"0": "none"}}
    flags = {name for name in NAMES if name.endswith("_up")}
    for panel in panels():
        if set(re.findall(r"gpushare_\w+", panel["targets"][0]["expr"])) & flags:
            assert panel["title"] in words


def test_dashboard_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    panels = json.loads((PACKAGED / "dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells


Samples = dict[tuple[str, str, str], tuple[float, dict[str, str]]]


def scraped(state: Path) -> Samples:
    """Parse as OpenMetrics, whose parser is strict: (name, id, slot) -> (value, labels)."""
    registry = CollectorRegistry()
    registry.register(metrics.Metrics(Paths("/none.yaml", str(state)), "1.2"))
    found: Samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            key = sample.name, sample.labels.get("id", sample.labels.get("device", "")), sample.labels.get("slot", "")
            assert key not in found, f"{key} twice"
            found[key] = sample.value, dict(sample.labels)
    return found


def in_pod(state: Path, folder: Path, name: str, **annotations: Any) -> None:
    """Write the container's bundle as an engine does."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"annotations": annotations}))
    path = state / "containers" / name / "lease.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "bundle": str(folder), "cri": name != "claims"}))


def test_driver_counts_as_down_until_it_is_queried(state: Path) -> None:
    assert scraped(state)["gpushare_driver_up", "", ""][0] == 0


def test_kubernetes_names_are_labels_only_under_cri(state: Path, start: Callable[..., Path], tmp_path: Path) -> None:
    keys = (constants.CONTAINER_NAME_ANNOTATIONS, constants.POD_NAME_ANNOTATIONS, constants.POD_NAMESPACE_ANNOTATIONS)
    for engine in (0, 1):
        name = f"k{engine}"
        start(name, pure.share(0, 0, GIB))
        in_pod(state, tmp_path / name, name, **dict(zip((key[engine] for key in keys), ("main", "train-0", "ml"))))
    start("odd", pure.share(0, 0, GIB))
    in_pod(state, tmp_path / "odd", "odd", **{keys[0][0]: 'a"\n\\}\ud800 1', keys[1][0]: 7, keys[2][0]: ["x"]})
    start("bare", pure.share(0, 0, GIB))
    start("claims", pure.share(0, 0, GIB))  # by annotations of its image, under an engine that is no CRI
    in_pod(state, tmp_path / "claims", "claims", **{key[0]: "x" for key in keys})
    start("torn", pure.share(0, 0, GIB))
    in_pod(state, tmp_path / "torn", "torn")
    (tmp_path / "torn" / "config.json").write_text("[" * 100_000)
    seen = scraped(state)

    def named(name: str) -> tuple[str, ...]:
        labels = seen["gpushare_memory_limit_bytes", name, "0"][1]
        return labels["container"], labels["pod"], labels["namespace"]

    assert named("k0") == named("k1") == ("main", "train-0", "ml")  # two pods of one name: ids distinguish them
    assert named("odd") == ('a"\n\\}\\ud800 1', "", "")
    assert [named(name) for name in ("bare", "torn", "claims")] == [
        (name, "", "") for name in ("bare", "torn", "claims")
    ]
    labels = {one: seen["gpushare_memory_limit_bytes", one, "0"][1] for one in ("k0", "bare")}
    assert (labels["k0"]["name"], labels["bare"]["name"]) == ("ml/train-0/main", "bare")


def test_unreadable_state_is_a_metric(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: str) -> Any:
        raise GpushareError("no")

    monkeypatch.setattr(leases, "view", broken)
    assert scraped(state)["gpushare_state_up", "", ""][0] == 0


def test_server_with_threads_does_not_fork(state: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The server queries the child that exists, even after the configuration changed."""
    config = tmp_path / "c.yaml"
    config.write_text("version: 1\n")
    watched = Watched(Paths(str(config), str(state)))

    class Asker:
        def read(self, library: str) -> Any:
            return {}

    watched.asker = Asker()  # type: ignore[assignment]
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("fork"))
    watched.update()
    config.write_text("version: 1\nreconcile: {action: stop}\n")
    watched.update()
    assert watched.metrics.seen.gpus == {}
