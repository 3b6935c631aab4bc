"""Every rule of the contract: what it accepts, what it refuses, and what the refusal says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from feature_repo.contract import check, check_oracle
from feature_repo.tables import CONTRACT
from tests.feature_repo.contract_rows import DAY, FACTS, at, good_row, table_of, with_changes

BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("impressions", {"ad_id": -5}, "ad_id_non_negative"),
    ("impressions", {"user_id": -1}, "user_id_non_negative"),
    ("impressions", {"position": -1}, "position_non_negative"),
    ("impressions", {"surface": "reels"}, "surface_known"),
    ("impressions", {"timestamp": at(10, day=5)}, "timestamp_in_partition"),
    ("impressions", {"timestamp": at(0, day=7)}, "timestamp_in_partition"),
    ("impressions", {"propensity": 0.0}, "propensity_range"),
    ("impressions", {"propensity": 1.5}, "propensity_range"),
    ("impressions", {"propensity": float("nan")}, "propensity_range"),
    ("outcomes", {"label": "install"}, "label_known"),
    ("outcomes", {"value": float("nan")}, "value_finite"),
    ("outcomes", {"value": -1.0}, "value_finite"),
    ("outcomes", {"known_at": at(9)}, "event_before_known"),
    ("outcomes", {"known_at": at(1, day=7)}, "known_at_in_partition"),
    ("engagements", {"kind": "click"}, "kind_known"),
    ("engagements", {"surface": ""}, "surface_known"),
    ("engagements", {"timestamp": at(9.5)}, "time_before_known"),
    ("engagements", {"known_at": at(0, day=7)}, "known_at_in_partition"),
    ("engagements", {"known_at": None, "timestamp": None, "time_quality": "order"}, "known_at_in_partition"),
    ("engagements", {"timestamp": None}, "time_present"),
    ("engagements", {"time_quality": "guess"}, "time_quality_known"),
    ("engagements", {"sequence_number": -1}, "sequence_non_negative"),
    ("engagements", {"item_id": -1}, "item_id_non_negative"),
    ("ads", {"created_at": at(9)}, "created_before_known"),
    ("ads", {"retired_at": at(7)}, "retired_after_created"),
    ("ads", {"bid": float("inf")}, "bid_valid"),
    ("ads", {"budget": -2.0}, "budget_valid"),
    ("ads", {"category_path": [1, 2, 3, 4]}, "category_depth"),
    ("ads", {"category_path": [1, 0]}, "category_positive"),
    ("ads", {"category_path": [1, None]}, "category_positive"),
    ("ads", {"attributes": [0.1, 0.2]}, "attributes_length"),
    ("ads", {"attributes": [float("nan")]}, "attributes_finite"),
    ("ads", {"embedding": [1.0]}, "embedding_length"),
    ("ads", {"embedding": [1.0, float("inf")]}, "embedding_finite"),
    ("ads", {"advertiser_id": -1}, "advertiser_id_non_negative"),
    ("users", {"categorical": [1]}, "categorical_length"),
    ("users", {"categorical": [1, -1]}, "categorical_non_negative"),
    ("users", {"dense": []}, "dense_length"),
    ("users", {"dense": [None]}, "dense_finite"),
    ("users", {"valid_from": at(1, day=5)}, "valid_from_in_partition"),
]


@pytest.mark.parametrize("table", list(CONTRACT))
def test_good_rows_pass(table: str) -> None:
    rows = table_of(table, [good_row(table)])
    report = check(table, rows, FACTS, DAY)
    report.raise_if_broken()
    assert report.rows.equals(rows)
    assert report.num_dropped == 0
    assert set(report.counts.values()) == {0}


@pytest.mark.parametrize(("table", "changes", "rule"), BROKEN)
def test_each_rule_refuses(table: str, changes: dict[str, Any], rule: str) -> None:
    report = check(table, with_changes(table, **changes), FACTS, DAY)
    assert [(v.rule, v.count) for v in report.violations] == [(rule, 1)]
    (example,) = report.violations[0].examples
    assert 77 in example.values()
    with pytest.raises(ValueError, match=rf"{table}/{DAY}: {rule}: 1 row refused \(.+\); examples: \{{.*77"):
        report.raise_if_broken()


@pytest.mark.parametrize("table", list(CONTRACT))
def test_null_in_every_required_column_is_refused(table: str) -> None:
    for field in CONTRACT[table]:
        if field.nullable:
            continue
        loose = pa.schema([pa.field(f.name, f.type) for f in CONTRACT[table]])
        rows = pa.Table.from_pylist([{**good_row(table), field.name: None}], schema=loose)
        counts = check(table, rows, FACTS, DAY).counts
        assert counts[f"{field.name}_not_null"] == 1


def test_several_broken_rules_are_all_named_with_exact_counts() -> None:
    good = good_row("impressions")
    rows = [{**good, "request_id": i, "surface": "reels" if i < 5 else "feed"} for i in range(20)]
    rows[19]["position"] = -3
    report = check("impressions", table_of("impressions", rows), FACTS, DAY)
    assert {v.rule: v.count for v in report.violations} == {"surface_known": 5, "position_non_negative": 1}
    assert len(report.violations[1].examples) <= 3
    with pytest.raises(ValueError, match="surface_known: 5 rows") as refusal:
        report.raise_if_broken()
    assert "position_non_negative: 1 row " in str(refusal.value)


@pytest.mark.parametrize("table", list(CONTRACT))
def test_exact_repeats_are_dropped_and_counted(table: str) -> None:
    rows = with_changes(table)
    repeated = pa.concat_tables([rows, rows, rows.slice(1)])
    report = check(table, repeated, FACTS, DAY)
    report.raise_if_broken()
    assert report.num_dropped == 3
    assert report.rows.to_pylist() == rows.to_pylist()


def test_conflicting_repeat_of_a_key_is_refused() -> None:
    good = good_row("outcomes")
    rows = table_of("outcomes", [good, good, {**good, "value": 2.0}])
    report = check("outcomes", rows, FACTS, DAY)
    assert report.num_dropped == 1
    assert [(v.rule, v.count) for v in report.violations] == [("key_unique", 1)]
    assert sorted(e["value"] for e in report.violations[0].examples) == [1.0, 2.0]


def test_request_with_two_users_is_refused() -> None:
    good = good_row("impressions")
    rows = table_of("impressions", [good, {**good, "ad_id": 9, "user_id": 4}])
    report = check("impressions", rows, FACTS, DAY)
    assert [(v.rule, v.count) for v in report.violations] == [("request_consistent", 2)]


def test_first_day_holds_what_is_older() -> None:
    first = FACTS.first_day
    old = {"created_at": at(0, day=1), "known_at": at(0, day=1)}
    check("ads", table_of("ads", [{**good_row("ads"), **old}]), FACTS, first).raise_if_broken()
    check(
        "users", table_of("users", [{**good_row("users"), "valid_from": at(0, day=1)}]), FACTS, first
    ).raise_if_broken()
    timeless = {**good_row("engagements"), "timestamp": None, "known_at": None, "time_quality": "order"}
    check("engagements", table_of("engagements", [timeless]), FACTS, first).raise_if_broken()
    late = check("impressions", table_of("impressions", [{**good_row("impressions"), "timestamp": at(0, day=1)}]),
                 FACTS, first)  # fmt: skip
    assert [v.rule for v in late.violations] == ["timestamp_in_partition"]


def test_partition_day_follows_the_time_zone_of_the_source() -> None:
    shanghai = replace(FACTS, timezone="Asia/Shanghai")
    rows = table_of("impressions", [{**good_row("impressions"), "timestamp": at(17, day=5)}])
    check("impressions", rows, shanghai, DAY).raise_if_broken()
    assert check("impressions", rows, FACTS, DAY).violations


def test_schema_is_compared_before_any_value() -> None:
    good = table_of("users", [good_row("users")])
    wrong_type = good.set_column(0, "user_id", good["user_id"].cast(pa.int32()))
    missing = good.drop_columns(["dense"])
    extra = good.append_column("nick", pa.array(["a"]))
    shuffled = good.select(good.column_names[::-1])
    cases = [
        (wrong_type, "column_type", "type is int32, expected int64"),
        (missing, "column_missing", "column is missing"),
        (extra, "column_unknown", "column is not in the contract"),
        (shuffled, "column_order", "expected"),
    ]
    for rows, name, reason in cases:
        report = check("users", rows, FACTS, DAY)
        assert [v.rule for v in report.violations] == [name]
        assert reason in report.violations[0].reason
        with pytest.raises(ValueError, match=f"users/{DAY}: {name}"):
            report.raise_if_broken()


def test_unknown_table_and_day() -> None:
    rows = table_of("users", [good_row("users")])
    with pytest.raises(ValueError, match="'clicks' is not in the contract"):
        check("clicks", rows, FACTS, DAY)
    with pytest.raises(ValueError, match="'2026-02-01' is outside 2026-01-05 to 2026-01-07"):
        check("users", rows, FACTS, "2026-02-01")


def test_empty_tables_pass() -> None:
    for table, schema in CONTRACT.items():
        report = check(table, schema.empty_table(), FACTS, DAY)
        report.raise_if_broken()
        assert report.rows.num_rows == 0


def test_oracle_rules() -> None:
    check_oracle(table_of("oracle", [good_row("oracle")]), FACTS, DAY).raise_if_broken()
    wrong = check_oracle(with_changes("oracle", click=1.2), FACTS, DAY)
    assert [v.rule for v in wrong.violations] == ["click_probability"]
    more = check_oracle(with_changes("oracle", conversion=0.9), FACTS, DAY)
    assert [v.rule for v in more.violations] == ["conversion_probability"]
