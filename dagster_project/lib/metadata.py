"""Results as Dagster metadata: numbers that plot, tables, and line charts drawn as small SVG pictures."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import dagster as dg

COLOURS = ("#4F43DD", "#E5484D", "#0E9888", "#B87700")


def table(rows: Sequence[Mapping[str, Any]]) -> dg.TableMetadataValue:
    """Rows as a table, with every column that some row has. Numbers are rounded for reading."""
    names = list(dict.fromkeys(str(name) for row in rows for name in row)) or ["empty"]
    records = [dg.TableRecord({name: _cell(row.get(name)) for name in names}) for row in rows]
    columns = [dg.TableColumn(name, _column_type([row.data[name] for row in records])) for name in names]
    return dg.MetadataValue.table(records=records, schema=dg.TableSchema(columns=columns))


def _cell(value: Any) -> str | int | float | bool | None:
    if value is None or isinstance(value, (bool, int)):
        return value
    number = _number(value)
    return number if number is not None else str(value)


def _column_type(values: Sequence[object]) -> str:
    kinds = {type(value) for value in values if value is not None}
    return {bool: "bool", int: "int", float: "float"}.get(kinds.pop(), "string") if len(kinds) == 1 else "string"


def _number(value: Any) -> float | int | None:
    """A finite Python number, rounded to 6 significant digits, or None."""
    try:
        number = value.item() if hasattr(value, "item") else value
    except (ValueError, RuntimeError):
        return None
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
        return None
    return number if isinstance(number, int) else float(f"{number:.6g}")


def numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, dg.MetadataValue[Any]]:
    """Flat numeric metadata from a mapping, nested mappings joined by dots; what is no finite number is left out."""
    flat: dict[str, dg.MetadataValue[Any]] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(numbers(value, f"{name}."))
        elif (number := _number(value)) is not None:
            flat[name] = dg.MetadataValue.int(number) if isinstance(number, int) else dg.MetadataValue.float(number)
    return flat


def chart(title: str, series: Mapping[str, Sequence[float]], labels: Sequence[str] = ()) -> dg.MarkdownMetadataValue:
    """A line chart as a base64 SVG in markdown: one line a series, `labels` under the first and the last point."""
    picture = base64.b64encode(svg(title, series, labels).encode()).decode()
    return dg.MetadataValue.md(f"![{title}](data:image/svg+xml;base64,{picture})")


def svg(title: str, series: Mapping[str, Sequence[float]], labels: Sequence[str] = ()) -> str:
    """The chart itself, 480 x 220. Points that are not finite are left out."""
    finite = [v for values in series.values() for v in values if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    span = (high - low) or max(abs(high), 1.0) * 0.1
    low, high = low - 0.05 * span, high + 0.05 * span
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="480" height="220" font-family="sans-serif" font-size="11">',
        '<rect width="480" height="220" fill="white"/>',
        f'<text x="56" y="16" font-size="13" font-weight="bold">{escape(title)}</text>',
    ]
    for fraction in (0.0, 0.5, 1.0):
        y = 180 - 150 * fraction
        parts.append(f'<line x1="56" x2="464" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="50" y="{y + 4}" text-anchor="end">{low + fraction * (high - low):.4g}</text>')
    for i, (name, values) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        parts.append(_line(values, low, high, colour))
        parts.append(f'<text x="{56 + 110 * i}" y="212" fill="{colour}">{escape(name)}</text>')
    if labels:
        parts.append(f'<text x="56" y="196">{escape(labels[0])}</text>')
        parts.append(f'<text x="464" y="196" text-anchor="end">{escape(labels[-1])}</text>')
    return "".join([*parts, "</svg>"])


def _line(values: Sequence[float], low: float, high: float, colour: str) -> str:
    step = 408 / max(len(values) - 1, 1)
    points = [
        (56 + step * i, 180 - 150 * (value - low) / (high - low))
        for i, value in enumerate(values)
        if math.isfinite(value)
    ]
    if len(points) == 1:
        return f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="3" fill="{colour}"/>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
