"""Recall of audited requests against the full scan: computed here, shown by Evidently as plain columns.

Evidently's own ranking tests look at rank 1 whatever k is, and its recall is 1.0 when only retrieved rows are
passed; so each audited request becomes a row of numbers, and Evidently gets means, quantiles and history.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from models.metrics import clustered_standard_error
from monitoring import workspace

ROWS = pa.schema(
    [
        ("request_id", pa.int64()), ("user_id", pa.int64()), ("surface", pa.string()), ("tier", pa.string()),
        ("release", pa.string()), ("k", pa.int32()), ("recall_vs_exact", pa.float64()),
        ("coverage", pa.float64()), ("cost", pa.float64()), ("latency_ms", pa.float64()),
    ]
)  # fmt: skip
"""One audited request: `recall_vs_exact` is the share of the exact top k among the first k answered, `coverage`
the share of the exact top 10 anywhere in the answer."""

COVERAGE_K = 10


@dataclass(frozen=True)
class AuditedRequest:
    """What was answered and what the full scan would have answered, best first."""

    request_id: int
    user_id: int | None
    surface: str
    tier: str
    release: str
    answered: Sequence[int]
    exact: Sequence[int]
    cost: float
    latency_ms: float


@dataclass(frozen=True)
class RecallSlice:
    """Recall of a slice of audited requests."""

    slice: str
    """`all`, or `surface=feed`, `tier=lite`, `release=...`."""
    num_requests: int
    recall: float
    standard_error: float
    """Clustered by user; NaN for a single user."""
    quantile_5: float
    coverage: float
    cost: float
    latency_p99_ms: float


@dataclass(frozen=True)
class RecallReport:
    """Recall of a day, whole and by slice."""

    overall: RecallSlice
    slices: tuple[RecallSlice, ...]
    floor: float
    breaches: tuple[str, ...]
    """Slices whose recall is below the floor by more than two standard errors."""
    html: Path | None
    values: dict[str, Any] = field(default_factory=dict)


def audit_rows(requests: Sequence[AuditedRequest]) -> pa.Table:
    """Rows of schema `ROWS`; a request for which the full scan finds nothing has recall NaN."""
    return pa.Table.from_pylist([_row(r) for r in requests], schema=ROWS)


def _row(r: AuditedRequest) -> dict[str, Any]:
    return {
        "request_id": r.request_id, "user_id": r.user_id, "surface": r.surface, "tier": r.tier,
        "release": r.release, "k": len(r.exact), "recall_vs_exact": _share(r.answered[: len(r.exact)], r.exact),
        "coverage": _share(r.answered, r.exact[:COVERAGE_K]), "cost": r.cost, "latency_ms": r.latency_ms,
    }  # fmt: skip


def recall_report(
    rows: pa.Table, *, day: str, floor: float, home: Path | None = None, reference: pa.Table | None = None
) -> RecallReport:
    """Summarise audited requests, name the slices below the floor, and store the report when a home is given.

    Args:
        rows: of schema `ROWS`.
        day: partition key, the report's time.
        floor: the recall that must hold.
        home: `<home>/reports` gets the HTML and the workspace run.
        reference: rows of an earlier day, shown beside today's in the HTML.

    Raises:
        ValueError: no row has a recall.
    """
    usable = rows.filter(pc.invert(pc.is_nan(rows.column("recall_vs_exact"))))
    if usable.num_rows == 0:
        raise ValueError("rows: no audited request has a recall")
    overall = _slice("all", usable)
    slices = [
        _slice(f"{key}={value}", usable.filter(pc.equal(usable.column(key), value)))
        for key in ("release", "tier", "surface")
        for value in sorted(pc.unique(usable.column(key)).to_pylist())
    ]
    breaches = tuple(s.slice for s in (overall, *slices) if _is_below(s, floor))
    html, values = None, {}
    if home is not None:
        snapshot = _snapshot(usable, reference, day)
        html = home / "reports" / "recall" / f"recall-{day}.html"
        workspace.add_run(workspace.workspace_of(home), "recall", snapshot, name=f"recall {day}", html=html)
        values = workspace.metric_values(snapshot)
    return RecallReport(overall, tuple(slices), floor, breaches, html, values)


def _share(answered: Sequence[int], exact: Sequence[int]) -> float:
    return len(set(answered) & set(exact)) / len(exact) if exact else math.nan


def _is_below(found: RecallSlice, floor: float) -> bool:
    error = 0.0 if math.isnan(found.standard_error) else found.standard_error
    return found.recall + 2 * error < floor


def _slice(name: str, rows: pa.Table) -> RecallSlice:
    recall = _numbers(rows, "recall_vs_exact")
    request_id = rows.column("request_id").to_numpy()
    user = pc.fill_null(rows.column("user_id"), -1).to_numpy()
    cluster = np.where(user == -1, -2 - np.abs(request_id), user)
    return RecallSlice(
        slice=name,
        num_requests=rows.num_rows,
        recall=float(recall.mean()),
        standard_error=clustered_standard_error(recall, cluster),
        quantile_5=float(np.quantile(recall, 0.05)),
        coverage=float(_numbers(rows, "coverage").mean()),
        cost=float(_numbers(rows, "cost").mean()),
        latency_p99_ms=float(np.quantile(_numbers(rows, "latency_ms"), 0.99)),
    )


def _numbers(rows: pa.Table, column: str) -> NDArray[np.float64]:
    numbers: NDArray[np.float64] = rows.column(column).to_numpy().astype(np.float64)
    return numbers


def _snapshot(rows: pa.Table, reference: pa.Table | None, day: str) -> Any:
    workspace.silence()
    from evidently import DataDefinition, Dataset, Report
    from evidently.metrics import MeanValue, QuantileValue, RowCount

    numbers = ["recall_vs_exact", "coverage", "cost", "latency_ms"]
    definition = DataDefinition(numerical_columns=numbers, categorical_columns=["surface", "tier", "release"])
    columns = [*numbers, "surface", "tier", "release"]
    current = Dataset.from_pandas(rows.select(columns).to_pandas(), definition)
    earlier = None if reference is None else Dataset.from_pandas(reference.select(columns).to_pandas(), definition)
    metrics: list[Any] = [RowCount(), *(MeanValue(column=c) for c in numbers)]
    metrics += [QuantileValue(column="recall_vs_exact", quantile=0.05)]
    metrics += [QuantileValue(column="latency_ms", quantile=q) for q in (0.5, 0.95, 0.99)]
    report = Report(metrics, metadata={"day": day}, tags=["recall"])
    return report.run(current, earlier, timestamp=workspace.day_time(day), name=f"recall {day}")
