"""A mapping file: which files and columns of somebody's log are which fields of the contract.

TOML, about twenty lines (docs/bring_your_data.md has a worked example). A field's value is a column name or any DuckDB
expression over the columns of its files. What is missing, misspelt or unreadable is refused with table, field,
value and what there is instead.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping as Map
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from feature_repo.tables import GRAINS

FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "impressions": (("user_id", "ad_id", "timestamp"), ("request_id", "position", "surface", "propensity", "split")),
    "engagements": (("user_id", "item_id", "timestamp"), ("kind", "surface")),
    "ads": (
        ("ad_id",), ("advertiser_id", "campaign_id", "objective", "format", "category", "bid", "dense", "title"),
    ),
    "users": (("user_id",), ("categorical", "dense")),
}  # fmt: skip
"""Table -> fields that it must and may have."""

NAMED = ("categorical", "dense")
"""Fields that hold several named expressions: `dense = { price = "ln(1 + price) / 3" }`."""
LISTS = ("category", *NAMED)
"""Fields that hold several expressions; a category path is a list, from the broadest level on."""

SETTINGS = ("files", "where", "time_format")
HEAD = ("name", "timezone", "grain", "positive", "repeats", "history_length", "negative_rate", "negatives", "labels")
EPOCHS = {"s": 1_000_000, "ms": 1_000, "us": 1}
"""Time format -> microseconds of its unit; other formats are `iso` and strptime patterns."""
MAX_LEVELS = 3


@dataclass(frozen=True)
class TableMapping:
    """One table: its files, a condition on rows, and the expression of each field."""

    name: str
    files: tuple[Path, ...]
    where: str
    time_format: str
    fields: Map[str, Map[str, str]]
    """Field -> name -> expression; fields with one expression have it under their own name."""

    def has(self, name: str) -> bool:
        """Whether a field is mapped."""
        return name in self.fields

    def one(self, name: str) -> str:
        """The expression of a field that has one."""
        return self.fields[name][name]

    def many(self, name: str) -> Map[str, str]:
        """Name -> expression of a field that holds several; empty when it isn't mapped."""
        return self.fields.get(name, {})


@dataclass(frozen=True)
class Mapping:
    """A whole mapping file."""

    path: Path
    name: str
    timezone: str
    grain: str = "day"
    positive: str = ""
    """Positives-only logs: the engagement kind that is the label."""
    repeats: bool = True
    history_length: int = 200
    negative_rate: float = 1.0
    negatives: int = 4
    labels: Map[str, str] = field(default_factory=dict)
    """Label -> expression over the impressions' columns, true where the label is positive."""
    tables: Map[str, TableMapping] = field(default_factory=dict)

    @property
    def positives_only(self) -> bool:
        """Whether the log holds no impressions."""
        return "impressions" not in self.tables


def read_mapping(path: Path) -> Mapping:
    """Read and check a mapping file; files are relative to its folder.

    Raises:
        ValueError: names the file, the table and the field that is missing, unknown or wrong.
    """
    try:
        raw = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: is not TOML: {error}") from error
    unknown = [key for key in raw if key not in (*HEAD, *FIELDS)]
    if unknown:
        raise ValueError(f"{path}: {unknown[0]!r} is unknown; known: {', '.join((*HEAD, *FIELDS))}")
    for key in ("name", "timezone"):
        if not isinstance(raw.get(key), str):
            raise ValueError(f"{path}: {key} is missing: a text is needed, found {raw.get(key)!r}")
    head = {key: value for key, value in raw.items() if key in HEAD}
    tables = {key: _table(path, key, raw[key]) for key in FIELDS if key in raw}
    mapping = Mapping(path=path, **head, tables=tables)
    _check_head(mapping)
    return mapping


def _check_head(mapping: Mapping) -> None:
    path = mapping.path
    try:
        ZoneInfo(mapping.timezone)
    except (ZoneInfoNotFoundError, ValueError) as error:
        raise ValueError(f"{path}: timezone = {mapping.timezone!r} is no IANA time zone") from error
    if mapping.grain not in GRAINS:
        raise ValueError(f"{path}: grain = {mapping.grain!r}; known grains: {', '.join(GRAINS)}")
    if mapping.positives_only:
        if "engagements" not in mapping.tables:
            raise ValueError(f"{path}: neither [impressions] nor [engagements] is mapped: there are no events")
        if not mapping.positive:
            raise ValueError(
                f"{path}: positive is missing: without [impressions] it must name the engagement kind to be retrieved"
            )
    elif not mapping.labels:
        raise ValueError(f'{path}: [labels] is missing: impressions need at least one, e.g. click = "clicked > 0"')
    if not 0.0 < mapping.negative_rate <= 1.0:
        raise ValueError(f"{path}: negative_rate = {mapping.negative_rate} is outside (0, 1]")


def _table(path: Path, name: str, raw: Any) -> TableMapping:
    required, optional = FIELDS[name]
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: {name} must be a table: [{name}]")
    for key in raw:
        if key not in (*SETTINGS, *required, *optional):
            raise ValueError(
                f"{path}: [{name}] {key} is unknown; fields: {', '.join((*SETTINGS, *required, *optional))}"
            )
    missing = [key for key in ("files", *required) if key not in raw]
    if missing:
        raise ValueError(f"{path}: [{name}] lacks {', '.join(missing)}; it has {', '.join(raw) or 'nothing'}")
    fields = {key: _expressions(path, name, key, raw[key]) for key in raw if key not in SETTINGS}
    if len(fields.get("category", {})) > MAX_LEVELS:
        raise ValueError(f"{path}: [{name}] category has {len(fields['category'])} levels, at most {MAX_LEVELS} fit")
    files = _files(path, name, raw["files"])
    return TableMapping(name, files, str(raw.get("where", "true")), str(raw.get("time_format", "iso")), fields)


def _expressions(path: Path, table: str, key: str, value: Any) -> dict[str, str]:
    found: dict[str, Any]
    if key in NAMED:
        wanted, found = "a table of name = expression", value if isinstance(value, dict) else {"": None}
    elif key in LISTS:
        wanted, found = (
            "a list of texts",
            {str(n): v for n, v in enumerate(value if isinstance(value, list) else [value])},
        )
    else:
        wanted, found = "a text", {key: value}
    if not all(isinstance(v, str) and v for v in found.values()) or not all(
        n.isidentifier() for n in found if key in NAMED
    ):
        raise ValueError(f"{path}: [{table}] {key} = {value!r}, {wanted} is needed")
    return found


def _files(path: Path, table: str, value: Any) -> tuple[Path, ...]:
    patterns = value if isinstance(value, list) else [value]
    found: list[Path] = []
    for pattern in patterns:
        target = path.parent / str(pattern)
        matches = sorted(target.parent.glob(target.name))
        if not matches:
            raise ValueError(f"{path}: [{table}] files: nothing matches {target}")
        found += matches
    kinds = {_kind(file) for file in found}
    if len(kinds) != 1 or None in kinds:
        raise ValueError(f"{path}: [{table}] files must be all Parquet, or all csv or tsv: {[f.name for f in found]}")
    return tuple(found)


def _kind(file: Path) -> str | None:
    suffixes = [suffix for suffix in file.suffixes if suffix != ".gz"]
    return {".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}.get(suffixes[-1] if suffixes else "")
