from __future__ import annotations

import math

import numpy as np
import pytest

from feature_repo.feature_schema import power_of_two, schema_for
from feature_repo.features import build_day
from feature_repo.lake import Lake
from feature_repo.statistics import AD_STRENGTH, USER_STRENGTH, group_rates, rate_logits
from feature_repo.training_tables import load_tables
from tests.feature_repo.handmade import (
    DAY1,
    DAY2,
    DAY3,
    FACTS,
    ad,
    engagement,
    impression,
    new_lake,
    outcome,
    user,
    write,
)

SCHEMA = schema_for(FACTS)
USER_DENSE = [field.name for field in SCHEMA.dense_of("user")]
AD_DENSE = [field.name for field in SCHEMA.dense_of("ad")]


def logit(p: float) -> float:
    return math.log(p / (1 - p))


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Day 1: three impressions, one click known in time, one known on day 2. Day 2: a new ad and a new user."""
    lake = new_lake(tmp_path_factory.mktemp("statistics"))
    write(
        lake, DAY1, users=[user(1), user(2)],
        ads=[ad(11), ad(12, advertiser=8, category=(4,), bid=2.5), ad(13, bid=None)],
        impressions=[
            impression(100, 11, 1, "01 10:00"),
            impression(100, 12, 1, "01 10:00", 1),
            impression(101, 11, 2, "01 23:50"),
        ],
        outcomes=[outcome(100, 11, "01 10:01")],
        engagements=[engagement(1, 1, 13, None), engagement(2, 1, 13, "01 09:00")],
    )  # fmt: skip
    write(
        lake, DAY2, ads=[ad(10, "02 05:00")],
        impressions=[impression(200, 10, 3, "02 10:00")],
        outcomes=[outcome(101, 11, "01 23:55", "02 00:05")],
    )  # fmt: skip
    for day in (DAY1, DAY2, DAY3):
        build_day(lake, FACTS, day)
    return lake


def users(lake: Lake, day: str, name: str) -> list[float]:
    return lake.read("user_features", day)[f"dense_{name}"].to_pylist()


def ads(lake: Lake, day: str, name: str) -> list[float]:
    return lake.read("ad_features", day)[f"dense_{name}"].to_pylist()


def test_counts_are_known_by_the_cut(lake: Lake) -> None:
    half_log = [0.5 * math.log1p(n) for n in range(4)]
    assert users(lake, DAY1, "user_impressions_1d") == pytest.approx([half_log[2], half_log[1]])
    assert users(lake, DAY1, "user_click_all") == pytest.approx([half_log[1], 0.0])  # user 2's is known on day 2
    assert users(lake, DAY2, "user_click_all") == pytest.approx([half_log[1], half_log[1], 0.0])
    assert users(lake, DAY2, "user_impressions_1d") == pytest.approx([0.0, 0.0, half_log[1]])
    assert users(lake, DAY2, "user_impressions_7d") == pytest.approx([half_log[2], half_log[1], half_log[1]])
    # An engagement without a time happened before the day: in the total, not in a window.
    assert ads(lake, DAY1, "ad_engagements_1d") == pytest.approx([0.0, 0.0, half_log[1]])
    assert ads(lake, DAY1, "ad_engagements_all") == pytest.approx([0.0, 0.0, half_log[2]])


def test_rates_are_smoothed_and_centred(lake: Lake) -> None:
    prior = (1 + 1.0) / (3 + 100.0)
    own = logit((1 + AD_STRENGTH * prior) / (2 + AD_STRENGTH)) - logit(prior)
    other = logit(AD_STRENGTH * prior / (1 + AD_STRENGTH)) - logit(prior)
    assert ads(lake, DAY1, "ad_click_rate") == pytest.approx([own, other, 0.0])
    # Ads 11 and 13 share an advertiser: together 2 impressions and 1 click.
    assert ads(lake, DAY1, "advertiser_click_rate") == pytest.approx([own, other, own])
    user_rate = logit((1 + USER_STRENGTH * prior) / (2 + USER_STRENGTH)) - logit(prior)
    assert users(lake, DAY1, "user_click_rate")[0] == pytest.approx(user_rate)


def test_windows_forget_and_recency_fades(lake: Lake) -> None:
    assert users(lake, DAY1, "user_recency") == pytest.approx([1.0, 1.0])
    faded = [math.exp(-2 / 7), math.exp(-1 / 7), math.exp(-1 / 7)]  # the click of user 2 became known on day 2
    assert users(lake, DAY3, "user_recency") == pytest.approx(faded)
    assert users(lake, DAY3, "user_active_days") == pytest.approx([0.5 * math.log1p(n) for n in (1, 2, 1)])
    assert users(lake, DAY3, "user_impressions_1d") == [0.0, 0.0, 0.0]


def test_seven_days_are_seven_days() -> None:
    from feature_repo.days import trailing_days

    assert trailing_days(FACTS, DAY3, 2) == [DAY2, DAY3]
    assert trailing_days(FACTS, DAY3, 7) == [DAY1, DAY2, DAY3]


def test_rows_of_a_day_read_the_cut_of_the_day_before(lake: Lake) -> None:
    tables = load_tables(lake, FACTS, DAY1, DAY2)
    published = load_tables(lake, FACTS, DAY1, DAY1)
    np.testing.assert_array_equal(tables.user_dense_UD[:2], published.user_dense_UD)
    np.testing.assert_array_equal(tables.ad_dense_NF[:3], published.ad_dense_NF)
    assert published.ad_bid_N.tolist() == [1.0, 2.5, 0.0]
    assert tables.ad_bid_N.tolist() == [1.0, 2.5, 0.0, 1.0]
    today = load_tables(lake, FACTS, DAY2, DAY2)
    assert (today.user_dense_UD[:2] != published.user_dense_UD).any()


def test_a_new_ad_has_attributes_and_brand_new_statistics(lake: Lake) -> None:
    tables = load_tables(lake, FACTS, DAY1, DAY2)
    assert tables.ad_id_N.tolist() == [11, 12, 13, 10]
    assert tables.ad_categorical_NA[3, :3].tolist() == [3, 7, 70]
    np.testing.assert_allclose(tables.ad_embedding_NM[3], [1.0, 0.1])
    new = dict(zip(AD_DENSE, tables.ad_dense_NF[3], strict=True))
    sibling = dict(zip(AD_DENSE, tables.ad_dense_NF[0], strict=True))
    inherited = [name for name in AD_DENSE if name.startswith(("advertiser_", "category_"))]
    assert {name: new[name] for name in inherited} == {name: sibling[name] for name in inherited}
    assert new["quality"] == 0.25
    assert new["ad_bid"] == pytest.approx(math.log(2.0))
    rest = set(AD_DENSE) - set(inherited) - {"quality", "ad_bid"}
    assert {new[name] for name in rest} == {0.0}
    assert tables.user_id_U.tolist() == [1, 2, 3]
    assert (tables.user_dense_UD[2] == 0.0).all()


def test_the_first_day_has_no_statistics(lake: Lake) -> None:
    tables = load_tables(lake, FACTS, None, DAY1)
    assert tables.ad_bid_N.tolist() == [1.0, 2.5, 0.0]
    assert tables.user_dense_UD.tolist() == [[0.5] + [0.0] * (len(USER_DENSE) - 1)] * 2
    assert (tables.ad_dense_NF[:, AD_DENSE.index("ad_impressions_1d") : AD_DENSE.index("ad_age")] == 0.0).all()
    with pytest.raises(ValueError, match="catalogue_day: 2026-01-01 is before statistics_day 2026-01-02"):
        load_tables(lake, FACTS, DAY2, DAY1)


def test_columns_follow_the_schema(lake: Lake) -> None:
    rows = lake.read("ad_features", DAY2)
    names = [f"cat_{f.name}" for f in SCHEMA.categorical_of("ad")] + [f"dense_{name}" for name in AD_DENSE]
    assert rows.column_names[: 1 + len(names)] == ["ad_id", *names]
    assert rows.column_names[1 + len(names) :] == [
        "embedding", "group_category_1", "group_category_2", "group_advertiser", "retired", "created_us", "bid",
        "published_at", "created_at", "event_timestamp_us",
    ]  # fmt: skip
    assert rows["cat_ad_id"].to_pylist() == [0, 1, 2, 3]  # the code, as in histories
    assert rows["published_at"][0].as_py().isoformat() == "2026-01-03T00:00:00+00:00"


def test_schema_shares_one_table_between_ads_and_histories() -> None:
    ad_field = SCHEMA.categorical_of("ad")[0]
    assert (ad_field.name, ad_field.table, ad_field.num_rows) == ("ad_id", "item", SCHEMA.item_rows)
    assert SCHEMA.item_rows == 64
    assert [power_of_two(n) for n in (1, 8, 9, 80_000)] == [8, 8, 16, 131_072]
    assert [group.name for group in SCHEMA.groups] == ["category_1", "category_2", "advertiser"]
    names = [field.name for field in SCHEMA.dense]
    assert len(set(names)) == len(names)


def test_rates_stay_finite_without_impressions() -> None:
    positive = np.array([[0], [5], [100_000]])
    rates = rate_logits(positive, np.array([0, 2, 0]), np.array([0.02]), 20.0)[:, 0]
    assert np.isfinite(rates).all()
    assert rates[0] == 0.0
    assert (np.diff(rates) > 0).all()
    total = np.array([[10, 0, 5], [10, 0, 0], [0, 0, 0]])
    grouped = group_rates(total, np.array([4, 4, 0]), np.array([0.1]), 20.0)[:, 0]
    assert grouped.tolist() == pytest.approx([logit(7 / 40) - logit(0.1)] * 2 + [0.0])
