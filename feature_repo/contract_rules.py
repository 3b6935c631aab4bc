"""The rules of the contract: named SQL predicates that every row of a table keeps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from feature_repo.tables import TIME_QUALITIES, SourceFacts

CAUSAL = "nothing is known before it happens"


@dataclass(frozen=True)
class Predicate:
    """A rule that every row keeps: `sql` is true for good rows; NULL counts as broken."""

    name: str
    sql: str
    reason: str


def oracle_predicates() -> list[Predicate]:
    """Rules of the simulator's oracle."""
    return [
        Predicate("click_probability", "click BETWEEN 0 AND 1", "a probability lies within 0 and 1"),
        Predicate("conversion_probability", "conversion BETWEEN 0 AND click", "a conversion follows a click"),
    ]


def predicates(table: str, facts: SourceFacts, day: str) -> list[Predicate]:
    """Rules of a table on a partition day, beyond its schema, its key and its columns that may not be null."""
    start, end = (f"TIMESTAMPTZ '{t.isoformat()}'" for t in facts.bounds(day))
    first = day == facts.first_day
    within = {"impressions": "timestamp", "outcomes": "known_at", "ads": "known_at", "users": "valid_from"}
    rules: list[Predicate] = []
    if table in within:
        rules.append(_day_rule(within[table], start, end, open_start=first and table in ("ads", "users")))
    makers = {
        "impressions": _impression_rules, "outcomes": _outcome_rules, "ads": _ad_rules, "users": _user_rules,
    }  # fmt: skip
    if table == "engagements":
        return _engagement_rules(facts, start, end, first)
    return [*rules, *makers[table](facts)]


def _day_rule(column: str, start: str, end: str, *, open_start: bool) -> Predicate:
    sql = f"{column} < {end}" if open_start else f"{column} >= {start} AND {column} < {end}"
    bound = f"before {end}" if open_start else f"within [{start}, {end})"
    return Predicate(f"{column}_in_partition", sql, f"{column} must lie {bound}")


def _ids(*columns: str) -> list[Predicate]:
    return [Predicate(f"{c}_non_negative", f"{c} >= 0", "ids are hashed to non-negative int64") for c in columns]


def _impression_rules(facts: SourceFacts) -> list[Predicate]:
    return [
        *_ids("request_id", "ad_id", "user_id"),
        Predicate("position_non_negative", "position >= 0", "positions count from 0"),
        Predicate("surface_known", f"surface IN {_names(facts.surfaces)}", f"surfaces are {', '.join(facts.surfaces)}"),
        Predicate(
            "propensity_range",
            "propensity IS NULL OR (propensity > 0 AND propensity <= 1)",
            "a propensity is a positive probability",
        ),
    ]


def _outcome_rules(facts: SourceFacts) -> list[Predicate]:
    return [
        *_ids("request_id", "ad_id"),
        Predicate("label_known", f"label IN {_names(facts.labels)}", f"labels are {', '.join(facts.labels)}"),
        Predicate("value_finite", "isfinite(value) AND value >= 0", "values are finite and not negative"),
        Predicate("event_before_known", "event_time <= known_at", CAUSAL),
    ]


def _engagement_rules(facts: SourceFacts, start: str, end: str, first: bool) -> list[Predicate]:
    day = f"known_at >= {start} AND known_at < {end}"
    if first:
        day = f"known_at IS NULL OR known_at < {end}"
    labels = () if facts.positives_only else facts.labels
    kinds = [k for k in facts.history_kinds if k not in labels and k != "impression"]
    return [
        *_ids("event_id", "user_id", "item_id"),
        Predicate("known_at_in_partition", day, "the partition is the day on which an event became known"),
        Predicate("time_before_known", "timestamp IS NULL OR timestamp <= known_at", CAUSAL),
        Predicate(
            "time_quality_known", f"time_quality IN {_names(TIME_QUALITIES)}", f"one of {', '.join(TIME_QUALITIES)}"
        ),
        Predicate(
            "time_present",
            "timestamp IS NOT NULL OR time_quality = 'order'",
            "only events of quality 'order' lack a time",
        ),
        Predicate("kind_known", f"kind IN {_names(kinds)}", f"engagement kinds are {', '.join(kinds)}"),
        Predicate("surface_known", f"surface IN {_names(facts.surfaces)}", f"surfaces are {', '.join(facts.surfaces)}"),
        Predicate("sequence_non_negative", "sequence_number >= 0", "sequence numbers count from 0"),
    ]


def _ad_rules(facts: SourceFacts) -> list[Predicate]:
    width = len(facts.ad_attributes)
    return [
        *_ids("ad_id", "advertiser_id", "campaign_id"),
        Predicate("created_before_known", "created_at <= known_at", CAUSAL),
        Predicate(
            "retired_after_created", "retired_at IS NULL OR retired_at >= created_at", "an ad ends after it starts"
        ),
        Predicate("bid_valid", "bid IS NULL OR (isfinite(bid) AND bid >= 0)", "bids are finite and not negative"),
        Predicate(
            "budget_valid",
            "budget IS NULL OR (isfinite(budget) AND budget >= 0)",
            "budgets are finite and not negative",
        ),
        Predicate(
            "category_depth",
            f"len(category_path) <= {facts.category_levels}",
            f"at most {facts.category_levels} levels",
        ),
        Predicate("category_positive", _all("category_path", "x > 0"), "category ids are positive; 0 means missing"),
        Predicate("attributes_length", f"len(attributes) = {width}", f"{width} attributes: {facts.ad_attributes}"),
        Predicate("attributes_finite", _all("attributes", "isfinite(x)"), "attributes are finite"),
        Predicate(
            "embedding_length",
            f"len(embedding) IN (0, {facts.embedding_dim})",
            f"an embedding is empty or has {facts.embedding_dim} numbers",
        ),
        Predicate("embedding_finite", _all("embedding", "isfinite(x)"), "embeddings are finite"),
    ]


def _user_rules(facts: SourceFacts) -> list[Predicate]:
    categorical, dense = facts.user_categorical, facts.user_dense
    return [
        *_ids("user_id"),
        Predicate(
            "categorical_length", f"len(categorical) = {len(categorical)}", f"one value for each of {categorical}"
        ),
        Predicate("categorical_non_negative", _all("categorical", "x >= 0"), "codes are not negative; 0 means unknown"),
        Predicate("dense_length", f"len(dense) = {len(dense)}", f"one value for each of {dense}"),
        Predicate("dense_finite", _all("dense", "isfinite(x)"), "numbers are finite"),
    ]


def _all(column: str, condition: str) -> str:
    """SQL that holds when no entry of a list breaks the condition (a NULL entry does)."""
    return f"len(list_filter({column}, lambda x: ({condition}) IS NOT TRUE)) = 0"


def _names(values: Iterable[str]) -> str:
    quoted = ", ".join("'" + v.replace("'", "''") + "'" for v in values)
    return f"({quoted})" if quoted else "(NULL)"


def not_null(schema: pa.Schema) -> list[Predicate]:
    """One rule for each column that may not be null (Arrow itself lets nulls into such columns)."""
    return [
        Predicate(f"{f.name}_not_null", f"{f.name} IS NOT NULL", f"{f.name} may not be null")
        for f in schema
        if not f.nullable
    ]
