"""The generic adapter: small logs written here, mapped, checked by the contract; and refusals that name the field."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feature_repo.adapters.base import string_ids
from feature_repo.adapters.generic import GenericSource
from feature_repo.adapters.registry import open_source
from feature_repo.contract import check
from feature_repo.features import build_day
from feature_repo.ingest import ingest_day
from feature_repo.lake import Lake
from feature_repo.training_tables import load_frame

SHARED = Path(os.environ.get("MIRACH_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "ipinyou.toml"

SHOWN = """\
who,what,when,place,clicked,price
ann,A,2026-03-01 09:00:00,home,1,2.5
ann,B,2026-03-01 09:00:00,home,0,
bob,A,2026-03-02 10:30:00,list,0,1.0
"""
SHOWN_LATER = """\
who,what,when,place,clicked,price
bob,C,2026-03-03 23:30:00,home,1,1.0
"""
MAPPING = """\
name = "shop"
timezone = "Europe/Berlin"
history_length = 20

[labels]
click = "clicked = 1"

[impressions]
files = "shown_*.csv"
user_id = "who"
ad_id = "what"
timestamp = "when"
surface = "place"

[engagements]
files = "views.parquet"
user_id = "user"
item_id = "item"
timestamp = "at"
time_format = "ms"
kind = "'view'"

[ads]
files = "ads.csv"
ad_id = "id"
advertiser_id = "brand"
category = ["top", "top || '/' || sub"]
bid = "bid"
dense = { weight = "ln(1 + weight)" }
"""
ADS = "id,brand,top,sub,bid,weight\nA,x,shoes,run,1.5,0\nB,x,shoes,walk,,1\nC,,hats,sun,2,\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A log of four impressions in two csv files, one view in Parquet, and three ads."""
    (tmp_path / "shown_1.csv").write_text(SHOWN)
    (tmp_path / "shown_2.csv").write_text(SHOWN_LATER)
    (tmp_path / "ads.csv").write_text(ADS)
    views = {"user": ["ann"], "item": ["C"], "at": [1_772_352_000_000]}
    pq.write_table(pa.table(views), tmp_path / "views.parquet")
    (tmp_path / "mirach.toml").write_text(MAPPING)
    return tmp_path


def tables(source: GenericSource) -> dict[str, dict[str, list[dict[str, object]]]]:
    """Every table of every day, after the contract's check."""
    found: dict[str, dict[str, list[dict[str, object]]]] = {}
    for day in source.facts.days:
        found[day] = {}
        for table, rows in source.tables(day):
            report = check(table, rows, source.facts, day)
            report.raise_if_broken()
            found[day][table] = report.rows.to_pylist()
    return found


def test_a_log_is_read_as_it_is_mapped(folder: Path) -> None:
    source = GenericSource(folder)
    facts = source.facts
    assert (facts.name, facts.timezone) == ("shop", "Europe/Berlin")
    assert facts.days == ["2026-03-01", "2026-03-02", "2026-03-03"]
    assert facts.surfaces == ("home", "all", "list"), "most frequent first; views have none"
    assert facts.history_kinds == ("view", "impression", "click")
    assert (facts.max_ads, facts.max_users, facts.category_levels) == (3, 2, 2)
    found = tables(source)
    first = found["2026-03-01"]
    assert [r["position"] for r in first["impressions"]] == [0, 1], "one request of two ads"
    assert len({r["request_id"] for r in first["impressions"]}) == 1
    assert first["impressions"][0]["timestamp"].isoformat() == "2026-03-01T08:00:00+00:00"  # type: ignore[attr-defined]
    assert [(r["ad_id"], r["label"]) for r in first["outcomes"]] == [(int(string_ids(["A"])[0]), "click")]
    assert first["engagements"][0]["item_id"] == int(string_ids(["C"])[0])
    assert len(found["2026-03-03"]["impressions"]) == 1


def test_ads_carry_what_is_mapped_and_unknown_else(folder: Path) -> None:
    ads = {r["ad_id"]: r for r in tables(GenericSource(folder))["2026-03-01"]["ads"]}
    a, b, c = (ads[int(string_ids([name])[0])] for name in "ABC")
    assert a["advertiser_id"] == b["advertiser_id"] == int(string_ids(["x"])[0])
    assert c["advertiser_id"] == 0
    assert a["category_path"][0] == b["category_path"][0] != c["category_path"][0]  # type: ignore[index]
    assert a["category_path"][1] != b["category_path"][1]  # type: ignore[index]
    assert (a["bid"], b["bid"]) == (1.5, None)
    assert b["attributes"] == pytest.approx([0.6931472])
    assert c["attributes"] == [0.0]


def test_frames_are_built_from_it(folder: Path, tmp_path: Path) -> None:
    source, lake = open_source("generic", data_dir=folder / "mirach.toml"), Lake(tmp_path / "lake")
    for day in source.facts.days:
        ingest_day(lake, source, day)
        build_day(lake, source.facts, day)
    frame = load_frame(lake, "2026-03-03")
    assert frame["label_click"].tolist() == [1.0]
    assert frame["end_offset"].tolist() == [1], "bob's impression of the day before"


def test_a_log_without_impressions_needs_the_kind_that_counts(folder: Path) -> None:
    head, tail = MAPPING.split("[labels]")[0], MAPPING.partition("[ads]")[2]
    rows = [f"u{n % 4},i{n % 3},2026-03-0{1 + n % 3} 0{n % 9}:00,buy\n" for n in range(12)]
    (folder / "events.csv").write_text("who,what,when,kind\n" + "".join(rows))
    events = (
        '[engagements]\nfiles = "events.csv"\nuser_id = "who"\nitem_id = "what"\ntimestamp = "when"\nkind = "kind"\n'
    )
    path = folder / "mirach.toml"
    path.write_text(f"{head}\n{events}")
    with pytest.raises(ValueError, match=r"positive is missing: without .impressions. it must name"):
        GenericSource(folder)
    path.write_text(f'positive = "sale"\n{head}\n{events}')
    with pytest.raises(ValueError, match=r"positive = 'sale' is no kind of \[engagements\]: \['buy'\]"):
        _ = GenericSource(folder).facts
    path.write_text(f'positive = "buy"\nrepeats = false\n{head}\n{events}[ads]{tail}')
    source = GenericSource(folder)
    assert source.facts.positives_only
    assert not source.facts.repeats
    assert source.facts.negative_rate == pytest.approx(4 / 6)
    assert sum(len(day["engagements"]) for day in tables(source).values()) == 12


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('user_id = "who"', 'userid = "who"', r"\[impressions\] userid is unknown; fields: .*user_id"),
        ('ad_id = "what"\n', "", r"\[impressions\] lacks ad_id; it has files, user_id"),
        ('ad_id = "what"', 'ad_id = "product"', r'\[impressions\] ad_id = .product.*"product".*the files have who'),
        ("shown_*.csv", "seen_*.csv", r"\[impressions\] files: nothing matches .*seen_"),
        ('name = "shop"', 'title = "shop"', "'title' is unknown; known: name"),
        ("Europe/Berlin", "Mars/Olympus", "timezone = 'Mars/Olympus' is no IANA time zone"),
        ('click = "clicked = 1"', "", r"\[labels\] is missing"),
        ('name = "shop"', "name = shop", "is not TOML"),
        ("dense = {", 'dense = ["x"] #', r"\[ads\] dense = .'x'., a table of name = expression is needed"),
        ('name = "shop"', "name = 7", "name is missing: a text is needed, found 7"),
        ('name = "shop"', 'name = "shop"\ngrain = "week"', "grain = 'week'; known grains: day"),
        ('name = "shop"', 'name = "shop"\nnegative_rate = 0.0', r"negative_rate = 0.0 is outside \(0, 1\]"),
        ("[ads]\nfiles", "users = 3\n[ads]\nfiles", r"\[engagements\] users is unknown"),
        ("name = ", "ads = 3\nname = ", "is not TOML"),
        ('"views.parquet"', '["views.parquet", "ads.csv"]', r"\[engagements\] files must be all Parquet, or all csv"),
        ('["top", "top || \'/\' || sub"]', '["top", "top", "top", "top", "top"]', r"category has 5 levels, at most"),
        ('surface = "place"', 'surface = "place"\ntime_format = "%d.%m.%Y"', r"\[impressions\] can't be read"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, old: str, new: str, message: str) -> None:
    assert old in MAPPING
    (folder / "mirach.toml").write_text(MAPPING.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        _ = GenericSource(folder).facts


def test_a_table_that_is_a_number_and_a_log_without_events_are_named(folder: Path) -> None:
    path = folder / "mirach.toml"
    head, _, rest = MAPPING.partition("[impressions]")
    path.write_text(f"users = 3\n{head}[impressions]{rest}")
    with pytest.raises(ValueError, match=r"users must be a table: \[users\]"):
        GenericSource(folder)
    path.write_text(head)
    with pytest.raises(ValueError, match="there are no events"):
        GenericSource(folder)


def test_conditions_that_nothing_passes_are_named(folder: Path) -> None:
    text = MAPPING.replace('"shown_*.csv"', '"shown_*.csv"\nwhere = "false"')
    (folder / "mirach.toml").write_text(text.replace('"views.parquet"', '"views.parquet"\nwhere = "false"'))
    with pytest.raises(ValueError, match="no row passes the conditions: there are no events"):
        _ = GenericSource(folder).facts


def test_surfaces_beyond_the_limit_are_counted(folder: Path) -> None:
    rows = "".join(f"ann,A,2026-03-01 09:00:00,place{n},0,1\n" for n in range(300))
    (folder / "shown_1.csv").write_text(SHOWN + rows)
    with pytest.raises(ValueError, match=r"surface has 30\d values, at most \d+ fit: map coarser ones"):
        _ = GenericSource(folder).facts


def test_null_ids_are_counted(folder: Path) -> None:
    (folder / "shown_2.csv").write_text(SHOWN_LATER + ",C,2026-03-03 10:00:00,home,0,1\n")
    with pytest.raises(ValueError, match=r"\[impressions\] user_id = 'who' is null in 1 of 5 rows, the first of"):
        _ = GenericSource(folder).facts


def test_too_short_a_log_and_too_many_surfaces_are_refused(folder: Path) -> None:
    (folder / "mirach.toml").write_text(MAPPING.replace('name = "shop"', 'name = "shop"\ngrain = "month"'))
    with pytest.raises(ValueError, match=r"covers 1 partitions of grain 'month'.*try a finer grain"):
        _ = GenericSource(folder).facts
    with pytest.raises(ValueError, match=r"there is no mapping file .*bring_your_data"):
        GenericSource(folder / "nowhere")


@pytest.mark.skipif(
    not (SHARED / "ipinyou_samples").exists(), reason=f"ipinyou_samples is not below {SHARED} (set MIRACH_SHARED_DATA)"
)
def test_the_example_of_the_documentation_reads_a_real_ad_log(tmp_path: Path) -> None:
    text = EXAMPLE.read_text().replace("../../data/raw", str(SHARED))
    (tmp_path / "mirach.toml").write_text(text)
    found = tables(GenericSource(tmp_path))
    assert sum(len(day["impressions"]) for day in found.values()) == 12_526
    assert sum(len(day["outcomes"]) for day in found.values()) == 5
    assert len(found["2013-10-19"]["ads"]) == 22
    (tmp_path / "mirach.toml").write_text(text.replace("where = \"source = 'DLF'\"", ""))
    with pytest.raises(ValueError, match="user_id = 'user_id' is null in 52,493 of 65,019 rows"):
        _ = GenericSource(tmp_path).facts
