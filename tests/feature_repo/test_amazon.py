"""Amazon reviews: a small log written here, and the real one where it is (skipped otherwise)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feature_repo.adapters.amazon_reviews import (
    FIRST,
    KIND,
    TEST,
    TRAINED,
    VALID,
    AmazonReviews,
    text_embeddings,
)
from feature_repo.adapters.base import Reorderable
from feature_repo.adapters.registry import open_source
from feature_repo.contract import check

SHARED = Path(os.environ.get("MIRACH_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not (SHARED / "amazon_beauty" / "interactions.parquet").exists(),
    reason=f"amazon_beauty is not below {SHARED} (set MIRACH_SHARED_DATA)",
)
DAY = 86_400
MAY_2013 = 1_367_366_400


def write_log(folder: Path, users: int = 3, length: int = 5) -> Path:
    """Users whose reviews 0 and 1 lie on one day of 2009, the others on one of 2013; items in ascending order."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        (u + 1, u + 1 + p, p + 1, MAY_2013 if p > 1 else MAY_2013 - 1500 * DAY)
        for u in range(users)
        for p in range(length)
    ]
    columns = dict(zip(("user_id", "item_id", "position", "timestamp"), zip(*rows, strict=True), strict=True))
    types = (pa.int32(), pa.int32(), pa.int16(), pa.int64())
    table = {n: pa.array(v, t) for (n, v), t in zip(columns.items(), types, strict=True)}
    pq.write_table(pa.table(table), folder / "interactions.parquet")
    count = users + length
    items = {
        "item_id": pa.array(range(1, count + 1), pa.int32()),
        "title": [f"red lamp {n}" for n in range(count)],
        "categories": [["Beauty", "Lamps", "Red"] if n else ["Beauty"] for n in range(count)],
        "brand": ["acme" if n % 2 else None for n in range(count)],
        "tags": ["lamp"] * count,
    }
    pq.write_table(pa.table(items), folder / "items.parquet")
    return folder


def checked(source: AmazonReviews) -> dict[str, dict[str, pa.Table]]:
    """Every table of every partition after the contract's check."""
    found: dict[str, dict[str, pa.Table]] = {}
    for day in source.facts.days:
        found[day] = {}
        for table, rows in source.tables(day):
            report = check(table, rows, source.facts, day)
            report.raise_if_broken()
            found[day][table] = report.rows
    return found


def sequences(partitions: dict[str, dict[str, pa.Table]]) -> dict[int, list[int]]:
    """Items of every user in the order in which they became known."""
    rows = pa.concat_tables([t["engagements"] for t in partitions.values()])
    known = np.maximum(*(rows[name].cast(pa.int64()).to_numpy() for name in ("timestamp", "known_at")))
    order = np.lexsort((known, rows["user_id"].to_numpy()))
    found: dict[int, list[int]] = {}
    for user, item in zip(rows["user_id"].to_numpy()[order], rows["item_id"].to_numpy()[order], strict=True):
        found.setdefault(int(user), []).append(int(item))
    return found


def test_quarters_then_validation_then_test(tmp_path: Path) -> None:
    source = AmazonReviews("amazon_beauty", write_log(tmp_path / "log"))
    facts = source.facts
    assert len(facts.days) == 13
    assert (facts.days[0], facts.days[-3:]) == (FIRST, [TRAINED, VALID, TEST])
    assert facts.positives_only
    assert not facts.repeats
    assert (facts.max_ads, facts.max_users) == (8, 3)
    assert facts.negative_rate == pytest.approx(facts.num_negatives / 8)
    found = checked(source)
    count = {day: tables["engagements"].num_rows for day, tables in found.items()}
    assert {day: n for day, n in count.items() if n} == {FIRST: 6, "2013-04-01": 3, VALID: 3, TEST: 3}
    assert sequences(found) == {u: [u, u + 1, u + 2, u + 3, u + 4] for u in (1, 2, 3)}
    last = found[TEST]["engagements"].to_pylist()[0]
    assert (last["kind"], last["time_quality"], last["sequence_number"]) == (KIND, "day", 4)
    assert last["timestamp"].timestamp() == MAY_2013 + 2, "third of the user's day: two seconds after midnight"
    assert last["known_at"].date().isoformat() == TEST


def test_items_are_complete_on_the_first_partition(tmp_path: Path) -> None:
    found = checked(AmazonReviews("amazon_beauty", write_log(tmp_path / "log")))
    ads: list[dict[str, Any]] = found[FIRST]["ads"].to_pylist()
    assert [a["ad_id"] for a in ads] == list(range(1, 9))
    assert ads[0]["category_path"] == [], "the level that all items share is no category"
    assert len(ads[1]["category_path"]) == 2
    assert ads[0]["advertiser_id"] == 0
    assert ads[1]["advertiser_id"] == ads[3]["advertiser_id"] > 0
    assert ads[1]["attributes"] == pytest.approx([1.0, np.log1p(3) / 3])
    assert all(tables["ads"].num_rows == 0 for day, tables in found.items() if day != FIRST)


def test_the_shuffled_log_permutes_a_user_s_day_and_nothing_else(tmp_path: Path) -> None:
    source = AmazonReviews("amazon_beauty", write_log(tmp_path / "log", users=40))
    assert isinstance(source, Reorderable)
    stored, shuffled = sequences(checked(source)), sequences(checked(source.reordered()))
    assert stored != shuffled
    assert source.reordered().facts == source.facts
    for user, items in stored.items():
        for part in (slice(0, 2), slice(2, 5)):
            assert sorted(shuffled[user][part]) == sorted(items[part])
    assert shuffled == sequences(checked(source.reordered())), "the same order every time"
    assert len({tuple(np.argsort(items[2:])) for items in shuffled.values()}) > 3


def test_missing_files_and_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lacks interactions.parquet, items.parquet"):
        AmazonReviews("amazon_beauty", tmp_path)
    with pytest.raises(ValueError, match=r"'amazon_toys' is unknown; known sets: amazon_beauty, amazon_sports"):
        AmazonReviews("amazon_toys", tmp_path)
    with pytest.raises(ValueError, match=r"data_dir: the amazon_beauty source needs the folder"):
        open_source("amazon_beauty")


def test_text_embeddings_keep_likeness() -> None:
    texts = [["nail", "polish", "red"], ["nail", "polish", "blue"], ["dog", "food"], [], ["nail", "polish", "red"]]
    vector_ND = text_embeddings(texts, 64)
    assert vector_ND.shape == (5, 64)
    assert np.linalg.norm(vector_ND, axis=1) == pytest.approx([1, 1, 1, 0, 1])
    assert np.array_equal(vector_ND[0], vector_ND[4])
    assert vector_ND[0] @ vector_ND[1] > vector_ND[0] @ vector_ND[2] + 0.1


@needs_data
def test_the_real_splits_are_the_official_ones() -> None:
    folder = SHARED / "amazon_beauty"
    raw = pq.read_table(folder / "interactions.parquet")
    source = AmazonReviews("amazon_beauty", folder)
    by_split = {
        "train": [row for day in source.facts.days[:-2] for row in _pairs(source, day)],
        "valid": _pairs(source, VALID),
        "test": _pairs(source, TEST),
    }
    for split, pairs in by_split.items():
        mine = raw.filter(pa.compute.equal(raw["split"], split))
        expected = set(zip(mine["user_id"].to_pylist(), mine["item_id"].to_pylist(), strict=True))
        assert len(pairs) == len(expected)
        assert set(pairs) == expected, split
    assert source.facts.max_ads == 12_101
    assert source.facts.max_users == 22_363


def _pairs(source: AmazonReviews, day: str) -> list[tuple[int, int]]:
    rows = dict(source.tables(day))["engagements"]
    return list(zip(rows["user_id"].to_pylist(), rows["item_id"].to_pylist(), strict=True))


def test_the_registry_opens_it_by_name(tmp_path: Path) -> None:
    source = open_source("amazon_sports", data_dir=write_log(tmp_path))
    assert isinstance(source, AmazonReviews)
    assert source.facts.name == "amazon_sports"
    assert source.facts.max_users == 3
