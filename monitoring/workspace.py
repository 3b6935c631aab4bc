"""The Evidently workspace: one project a topic, dashboards made by code, reports kept with their history.

`evidently ui --workspace <home>/reports/workspace --host 127.0.0.1 --port 8000` shows it (`make monitor`).
The page shows no tabs, so each topic is a project; text panels are its headings. Needs no network: telemetry is
switched off before Evidently is imported (which takes seconds, so functions import it).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

Topic = Literal["drift", "recall"]


@dataclass(frozen=True)
class Line:
    """One line of a plot: a metric with the labels that single it out."""

    legend: str
    metric: str
    labels: tuple[tuple[str, str], ...] = ()
    tags: tuple[str, ...] = ()
    """Only runs with these tags."""


@dataclass(frozen=True)
class Panel:
    """One plot of a dashboard; without lines it is a heading."""

    title: str
    lines: tuple[Line, ...] = ()
    kind: Literal["line", "bar", "counter", "text"] = "line"
    size: Literal["full", "half"] = "half"


@dataclass(frozen=True)
class Dashboard:
    """A project's name, description and panels."""

    topic: Topic
    description: str
    panels: tuple[Panel, ...]


def _column(legend: str, metric: str, column: str, **labels: str) -> Line:
    return Line(legend, metric, (("column", column), *labels.items()))


DRIFT_TABLES = ("user_features", "ad_features", "requests")
"""Tables that have panels in the drift dashboard; a run carries its table's name as a tag."""


def _drift_panels(table: str) -> tuple[Panel, ...]:
    """Panels of one table: a plot shows one line for a metric, whatever its tags, so tables don't share plots."""
    share, count = ((("value_type", value),) for value in ("share", "count"))
    return (
        Panel(table.replace("_", " "), kind="text", size="full"),
        Panel("Share of drifted columns", (Line("share", "DriftedColumnsCount", share, (table,)),)),
        Panel("Drifted columns", (Line("columns", "DriftedColumnsCount", count, (table,)),), kind="bar"),
    )


DASHBOARDS: dict[Topic, Dashboard] = {
    "drift": Dashboard(
        "drift",
        "Features and answers of a day against the reference",
        (
            *(panel for table in DRIFT_TABLES for panel in _drift_panels(table)),
            Panel("creatives", kind="text", size="full"),
            Panel("Embedding centroid shift", (Line("ads", "EmbeddingShift", (), ("ad_features",)),), size="full"),
        ),
    ),
    "recall": Dashboard(
        "recall",
        "Audited requests: what the index found of what a full scan finds, at what cost",
        (
            Panel("Recall and cost", kind="text", size="full"),
            Panel("Mean recall against exact", (_column("mean", "MeanValue", "recall_vs_exact"),)),
            Panel(
                "Worst requests: 5 % quantile of recall",
                (_column("5 %", "QuantileValue", "recall_vs_exact", quantile="0.05"),),
            ),
            Panel("Cost against a full scan", (_column("mean", "MeanValue", "cost"),)),
            Panel("Latency p99, ms", (_column("p99", "QuantileValue", "latency_ms", quantile="0.99"),)),
            Panel("Audited requests", (Line("rows", "RowCount"),), kind="bar"),
        ),
    ),
}


@dataclass(frozen=True)
class StoredRun:
    """Where a report went."""

    project_id: str
    run_id: str
    html: Path


def silence() -> None:
    """Switch Evidently's telemetry off; call before importing it."""
    os.environ.setdefault("DO_NOT_TRACK", "1")


def open_project(workspace: Path, topic: Topic) -> Any:
    """The Evidently project of a topic, made with its dashboard when it does not exist yet."""
    silence()
    from evidently.ui.workspace import Workspace

    workspace.mkdir(parents=True, exist_ok=True)
    repair(workspace)
    opened = Workspace.create(str(workspace))
    name = f"mirach {topic}"
    for project in opened.search_project(name):
        if project.name == name:
            return project
    project = opened.create_project(name, DASHBOARDS[topic].description)
    for panel in DASHBOARDS[topic].panels:
        project.dashboard.add_panel(_panel(panel))
    project.save()
    return project


def repair(workspace: Path) -> list[Path]:
    """Remove what a killed process left half-written: Evidently writes in place, and its UI stops at a broken file.

    A project without all of its panels and without a run was being made; a run's file that is no JSON was being
    written, and the next report of that day writes it again.

    Returns:
        What was removed.
    """
    removed = [path for path in workspace.glob("*/snapshots/*.json") if _parsed(path) is None]
    for path in removed:
        path.unlink()
    panels = {f"mirach {topic}": len(dashboard.panels) for topic, dashboard in DASHBOARDS.items()}
    for project in (path for path in workspace.iterdir() if path.is_dir()):
        described = _parsed(project / "metadata.json")
        shown = len((_parsed(project / "dashboard.json") or {}).get("panels", []))
        unfinished = described is None or shown < panels.get(described.get("name", ""), 0)
        if unfinished and not list(project.glob("snapshots/*.json")):
            shutil.rmtree(project)
            removed.append(project)
    return removed


def _parsed(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return content


def add_run(
    workspace: Path, topic: Topic, snapshot: Any, *, name: str, html: Path, replace: Sequence[str] = ()
) -> StoredRun:
    """Store a snapshot in its project and its HTML beside it.

    A run of the same name replaces the earlier one, so that a re-run of a day leaves one point in the plots.
    """
    from evidently.ui.workspace import Workspace

    project = open_project(workspace, topic)
    opened = Workspace.create(str(workspace))
    stale = {name, *replace}
    for run_id in opened.list_runs(project.id):
        run = opened.get_run(project.id, run_id)
        if run is not None and run.name in stale:
            opened.delete_run(project.id, run_id)
    reference = opened.add_run(project.id, snapshot, include_data=False, name=name)
    html.parent.mkdir(parents=True, exist_ok=True)
    temporary = html.with_name(f".{html.name}.tmp")
    snapshot.save_html(str(temporary))
    os.replace(temporary, html)
    return StoredRun(str(project.id), str(reference.id), html)


def metric_values(snapshot: Any) -> dict[str, Any]:
    """Plain numbers of a snapshot: `Metric(column)` -> float, or a mapping for metrics with several values."""
    found: dict[str, Any] = {}
    for metric in snapshot.dict()["metrics"]:
        kind = metric["config"]["type"].rpartition(":")[2].rpartition(".")[2]
        parts = [str(metric["config"][key]) for key in ("column", "quantile") if key in metric["config"]]
        found[f"{kind}({', '.join(parts)})" if parts else kind] = plain(metric["value"])
    return found


def plain(value: Any) -> Any:
    """Numpy scalars as Python ones, through mappings."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    return value.item() if hasattr(value, "item") else value


def ui_command(home: Path, port: int = 8000) -> list[str]:
    """The command that shows the workspace of a home."""
    return [
        "evidently", "ui", "--workspace", str(home / "reports" / "workspace"), "--host", "127.0.0.1",
        "--port", str(port),
    ]  # fmt: skip


def workspace_of(home: Path) -> Path:
    """Folder of the workspace of a home."""
    return home / "reports" / "workspace"


def day_time(day: str) -> datetime:
    """Noon of a day: where its point stands on the dashboards' time axis."""
    return datetime.fromisoformat(f"{day}T12:00:00")


def _panel(panel: Panel) -> Any:
    from evidently.sdk.models import PanelMetric
    from evidently.sdk.panels import bar_plot_panel, counter_panel, line_plot_panel, text_panel

    values = [
        PanelMetric(legend=line.legend, metric=line.metric, metric_labels=dict(line.labels), tags=list(line.tags))
        for line in panel.lines
    ]
    match panel.kind:
        case "text":
            return text_panel(title=panel.title, size=panel.size)
        case "bar":
            return bar_plot_panel(title=panel.title, values=values, size=panel.size)
        case "counter":
            return counter_panel(title=panel.title, values=values, size=panel.size)
    return line_plot_panel(title=panel.title, values=values, size=panel.size)
