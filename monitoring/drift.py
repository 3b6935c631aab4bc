"""Feature drift of a day against a reference: Evidently report, explicit methods and thresholds.

Evidently drops missing values before it compares and picks methods by sample size; so the missing share is
compared beside it, method and thresholds are given, and samples below `min_rows` raise no alarm. Columns that
are all null on one side would break the report: they are left out and reported (as an alarm when only today's
are). Categorical columns with many values are compared by hash bucket, and the share of today's rows whose
value the reference never saw stands beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from monitoring import workspace

if TYPE_CHECKING:
    import pandas as pd

NUM_BUCKETS = 32


@dataclass(frozen=True)
class DriftConfig:
    """Which columns are compared, how, and from where on it counts."""

    numerical: tuple[str, ...]
    categorical: tuple[str, ...]
    embedding: str | None = None
    """A list column, compared by its centroid."""
    method: str = "psi"
    threshold: float = 0.2
    """Population stability index from which a column counts as drifted."""
    drift_share: float = 0.3
    """Share of drifted columns from which there is an alarm."""
    embedding_threshold: float = 0.25
    """In units of the reference's spread."""
    missing_threshold: float = 0.05
    """Rise of a column's missing share that is an alarm."""
    max_values: int = 50
    """Categorical columns with more values are compared by hash bucket."""
    max_rows: int = 20_000
    min_rows: int = 500
    seed: int = 0


def infer_config(table: pa.Table, **settings: Any) -> DriftConfig:
    """Columns by the prefixes of the feature tables: `dense_`, `cat_`, `group_`, and `embedding`."""
    names = table.column_names
    return DriftConfig(
        numerical=tuple(n for n in names if n.startswith("dense_")),
        categorical=tuple(n for n in names if n.startswith(("cat_", "group_"))),
        embedding="embedding" if "embedding" in names else None,
        **settings,
    )


@dataclass(frozen=True)
class DriftReport:
    """What was compared and what drifted."""

    name: str
    num_reference: int
    num_current: int
    scores: dict[str, float]
    """Column -> drift score by the configured method."""
    drifted: tuple[str, ...]
    drifted_share: float
    missing: dict[str, float]
    """Column -> share of today's rows without a value."""
    new_values: dict[str, float]
    """Categorical column -> share of today's rows whose value the reference never saw."""
    embedding_shift: float | None
    dropped: tuple[str, ...]
    """All-null columns, left out of the report."""
    alarms: tuple[str, ...]
    """Why this is an alarm; empty when it is none."""
    html: Path | None
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def alarm(self) -> bool:
        """Whether somebody should look."""
        return bool(self.alarms)


def drift_report(
    reference: pa.Table,
    current: pa.Table,
    *,
    name: str,
    day: str,
    config: DriftConfig | None = None,
    home: Path | None = None,
) -> DriftReport:
    """Compare today's rows with the reference's, and store report and HTML when a home is given.

    Args:
        reference: rows that models were trained on; same columns as `current`.
        current: rows of the day.
        name: what is compared (`user_features`, `ad_features`, `scores`); one HTML a name and day.
        day: partition key, the report's time.
        config: columns and thresholds; inferred from the reference's column names by default.
        home: `<home>/reports` gets the HTML and the workspace run.

    Raises:
        ValueError: a table is empty, or a configured column is missing; names it.
    """
    settings = config or infer_config(reference)
    _check(reference, current, settings)
    old, new = (_sample(t, settings) for t in (reference, current))
    dropped = _all_null(old, settings) | _all_null(new, settings)
    fresh_nulls = sorted(_all_null(new, settings) - _all_null(old, settings))
    numerical = [c for c in settings.numerical if c not in dropped]
    categorical = [c for c in settings.categorical if c not in dropped]
    embedding = settings.embedding if settings.embedding not in dropped else None
    frames = [
        _frame(t, numerical, categorical, embedding, settings, _large(old, categorical, settings)) for t in (old, new)
    ]
    snapshot = _run(frames[0], frames[1], numerical, categorical, settings, day, name)
    values = workspace.metric_values(snapshot)
    scores = {c: float(values[f"ValueDrift({c})"]) for c in (*numerical, *categorical)}
    missing = {c: _missing(new, c) for c in (*numerical, *categorical)}
    more_missing = [c for c in missing if missing[c] - _missing(old, c) > settings.missing_threshold]
    drifted = tuple(c for c in scores if scores[c] >= settings.threshold)
    shift = values.get("EmbeddingShift")
    enough = min(old.num_rows, new.num_rows) >= settings.min_rows
    share = len(drifted) / max(len(scores), 1)
    alarms = _alarms(settings, share, drifted, shift, more_missing, fresh_nulls) if enough else ()
    html = None
    if home is not None:
        html = home / "reports" / "drift" / f"{name}-{day}.html"
        workspace.add_run(workspace.workspace_of(home), "drift", snapshot, name=f"{name} {day}", html=html)
    return DriftReport(
        name=name, num_reference=reference.num_rows, num_current=current.num_rows, scores=scores, drifted=drifted,
        drifted_share=share, missing=missing, new_values={c: _new_values(old, new, c) for c in categorical},
        embedding_shift=shift, dropped=tuple(sorted(dropped)), alarms=alarms, html=html, values=values,
    )  # fmt: skip


def _alarms(
    settings: DriftConfig, share: float, drifted: Sequence[str], shift: float | None,
    more_missing: Sequence[str], fresh_nulls: Sequence[str],
) -> tuple[str, ...]:  # fmt: skip
    found = []
    if share >= settings.drift_share:
        found.append(f"{share:.0%} of the columns drifted: {', '.join(drifted[:8])}")
    if shift is not None and shift >= settings.embedding_threshold:
        found.append(f"the embedding's centroid moved by {shift:.2f} of its spread")
    found += [f"{column} is missing more often" for column in more_missing]
    found += [f"{column} has no value at all" for column in fresh_nulls]
    return tuple(found)


def _check(reference: pa.Table, current: pa.Table, settings: DriftConfig) -> None:
    wanted = [*settings.numerical, *settings.categorical, *([settings.embedding] if settings.embedding else [])]
    for side, table in (("reference", reference), ("current", current)):
        if table.num_rows == 0:
            raise ValueError(f"{side}: no rows to compare")
        missing = [c for c in wanted if c not in table.column_names]
        if missing:
            raise ValueError(f"{side}: columns missing: {', '.join(missing)}")
    if not settings.numerical and not settings.categorical:
        raise ValueError("config: no column to compare")


def _sample(table: pa.Table, settings: DriftConfig) -> pa.Table:
    if table.num_rows <= settings.max_rows:
        return table
    rows = np.random.default_rng(settings.seed).choice(table.num_rows, settings.max_rows, replace=False)
    return table.take(pa.array(np.sort(rows)))


def _all_null(table: pa.Table, settings: DriftConfig) -> set[str]:
    names = [*settings.numerical, *settings.categorical, *([settings.embedding] if settings.embedding else [])]
    return {c for c in names if _missing(table, c) == 1.0}


def _missing(table: pa.Table, column: str) -> float:
    values = table.column(column)
    nulls = float(values.null_count)
    if pa.types.is_floating(values.type):
        nulls = float(pc.sum(pc.cast(pc.is_null(values, nan_is_null=True), pa.int64())).as_py())
    return nulls / float(table.num_rows)


def _large(reference: pa.Table, categorical: Sequence[str], settings: DriftConfig) -> set[str]:
    return {c for c in categorical if pc.count_distinct(reference.column(c)).as_py() > settings.max_values}


def _new_values(reference: pa.Table, current: pa.Table, column: str) -> float:
    known = pc.unique(reference.column(column))
    old = pc.is_in(current.column(column), value_set=known)
    return 1.0 - float(pc.mean(pc.cast(old, pa.float64())).as_py())


def _frame(
    table: pa.Table, numerical: Sequence[str], categorical: Sequence[str], embedding: str | None,
    settings: DriftConfig, large: set[str],
) -> pd.DataFrame:  # fmt: skip
    import pandas as pd

    columns: dict[str, Any] = {c: table.column(c).to_pandas().astype("float64") for c in numerical}
    for column in categorical:
        values = table.column(column).to_pandas()
        if column in large:
            values = pd.util.hash_array(values.to_numpy()) % NUM_BUCKETS
        columns[column] = pd.Series(values).astype("string").astype("object")
    frame = pd.DataFrame(columns)
    if embedding is not None:
        rows = table.column(embedding).drop_null().combine_chunks()
        values = rows.flatten().to_numpy(zero_copy_only=False)
        matrix = values.reshape(len(rows), len(values) // len(rows))
        names = [f"{embedding}_{i}" for i in range(matrix.shape[1])]
        frame = pd.concat([frame, pd.DataFrame(matrix, columns=names)], axis=1)
    return frame


def _run(
    reference: pd.DataFrame, current: pd.DataFrame, numerical: Sequence[str], categorical: Sequence[str],
    settings: DriftConfig, day: str, name: str,
) -> Any:  # fmt: skip
    workspace.silence()
    from evidently import DataDefinition, Dataset, Report
    from evidently.metrics import DriftedColumnsCount, MissingValueCount, RowCount, ValueDrift

    from monitoring.embedding_metric import EmbeddingShift

    columns = [*numerical, *categorical]
    vectors = [c for c in reference.columns if c not in columns]
    metrics: list[Any] = [
        RowCount(),
        DriftedColumnsCount(
            columns=columns, num_method=settings.method, num_threshold=settings.threshold,
            cat_method=settings.method, cat_threshold=settings.threshold, drift_share=settings.drift_share,
        ),
    ]  # fmt: skip
    metrics += [ValueDrift(column=c, method=settings.method, threshold=settings.threshold) for c in columns]
    metrics += [MissingValueCount(column=c) for c in columns]
    if vectors:
        metrics.append(EmbeddingShift(columns=vectors))
    definition = DataDefinition(numerical_columns=[*numerical, *vectors], categorical_columns=list(categorical))
    sides = [Dataset.from_pandas(frame, definition) for frame in (current, reference)]
    report = Report(metrics, metadata={"table": name, "day": day}, tags=[name])
    return report.run(*sides, timestamp=workspace.day_time(day), name=f"{name} {day}")
