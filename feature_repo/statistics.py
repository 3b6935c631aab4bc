"""Statistics of users and ads as of the end of a day, the published cut that training and serving both read.

SQL counts what became known on a day (`counts/<day>`); the windows are sums of daily counts, and the formulas are
here. Nothing after the cut enters. Counts are 0.5 * log(1 + n). Rates are logits smoothed towards the rate of the
whole source and centred on it, so 0 means "like everybody", which is also what a brand-new user or ad has:

    rate(k, n) = logit((k + a * p) / (n + a)) - logit(p)      p = rate of the source, a = strength

Shape legend: R rows (users or ads), K measures (impressions, engagements, then one a label), L labels, S statistics.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from feature_repo import columns
from feature_repo.days import (
    DAY_SECONDS,
    MICROSECONDS,
    attribution_days,
    codes_table,
    contract_rows,
    day_bounds_us,
    previous_day,
    trailing_days,
)
from feature_repo.feature_schema import ad_dense_names, groups_for, schema_for, user_dense_names
from feature_repo.lake import Lake, Partition
from feature_repo.sql import run_transform
from feature_repo.tables import TIME, SourceFacts

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]

WINDOW_DAYS = 7
USER_STRENGTH = 8.0
AD_STRENGTH = 20.0
ADVERTISER_STRENGTH = 20.0
CATEGORY_STRENGTH = 50.0
RECENCY_DAYS = 7.0
"""Recency is exp(-days since the last active day / 7); 0 for never."""

FIRST_LABEL = 2
"""Measures 0 and 1 are impressions and engagements."""


def measures(facts: SourceFacts) -> tuple[str, ...]:
    """Columns of the counts, in order."""
    return ("impressions", "engagements", *facts.labels)


def build_statistics(lake: Lake, facts: SourceFacts, day: str) -> tuple[Partition, Partition, Partition]:
    """Write `counts/<day>`, `user_features/<day>` and `ad_features/<day>`; row i is the user or ad of code i.

    Raises:
        ValueError: the catalogue of the day or the counts of the previous day are missing.
    """
    files = _count_day(lake, facts, day)
    counts = lake.write("counts", day, files, facts=_matched(lake, facts, day, files))
    users, ads = lake.read("catalogue", day, "users"), lake.read("catalogue", day, "ads")
    window = trailing_days(facts, day, WINDOW_DAYS)
    _, cut_us = day_bounds_us(facts, day)
    user_statistics = _user_statistics(lake, facts, day, window)
    ad_statistics = _ad_statistics(lake, facts, day, window, ads, cut_us)
    return (
        counts,
        lake.write("user_features", day, _user_features(users, user_statistics, facts, cut_us)),
        lake.write("ad_features", day, _ad_features(ads, ad_statistics, facts, cut_us)),
    )


def _count_day(lake: Lake, facts: SourceFacts, day: str) -> dict[str, pa.Table]:
    """Daily counts and running totals: files day_users, day_ads, total_users, total_ads."""
    before = previous_day(facts, day)
    # What an official protocol holds out is no feature of anybody: its partitions count nothing.
    counted = [day] if facts.may_train(day) else []
    rows = run_transform(
        "counts",
        {
            **{table: contract_rows(lake, table, counted) for table in ("impressions", "outcomes", "engagements")},
            "shown": contract_rows(lake, "impressions", attribution_days(facts, day)),
            "labels": codes_table(tuple(facts.labels)),
            "users": lake.paths("catalogue", [day], "users"),
            "ads": lake.paths("catalogue", [day], "ads"),
        },
    )
    size = lake.partition("catalogue", day).facts
    files: dict[str, pa.Table] = {}
    for role, num_rows in (("user", size["num_users"]), ("ad", size["num_ads"])):
        mine = rows.filter(pa.compute.is_valid(rows[f"{role}_code"]))
        place = mine[f"{role}_code"].to_numpy(), mine["measure"].to_numpy()
        timed_RK = np.zeros((num_rows, len(measures(facts))), np.int64)
        all_RK = np.zeros_like(timed_RK)
        timed_RK[place] = mine["num_timed"].to_numpy()
        all_RK[place] = mine["num_all"].to_numpy()
        active_R = timed_RK.any(axis=1)
        active_days_R, last_active_R = np.zeros(num_rows, np.int64), np.full(num_rows, -1, np.int64)
        if before:
            earlier = lake.read("counts", before, f"total_{role}s")
            all_RK[: earlier.num_rows] += _matrix(earlier, facts)
            active_days_R[: earlier.num_rows] = earlier["active_days"].to_numpy()
            last_active_R[: earlier.num_rows] = earlier["last_active"].to_numpy()
        last_active_R[active_R] = facts.days.index(day)
        files[f"day_{role}s"] = _counts_table(timed_RK, facts)
        files[f"total_{role}s"] = (
            _counts_table(all_RK, facts)
            .append_column("active_days", pa.array(active_days_R + active_R))
            .append_column("last_active", pa.array(last_active_R))
        )
    return files


def _matched(lake: Lake, facts: SourceFacts, day: str, files: dict[str, pa.Table]) -> dict[str, int]:
    """How many positive outcomes became known, and how many of them belong to an impression of the last days."""
    num_positive = 0
    if lake.has("outcomes", day):
        num_positive = int((lake.read("outcomes", day, columns=["value"])["value"].to_numpy() > 0).sum())
    return {
        "num_positive_outcomes": num_positive,
        "num_matched_outcomes": int(_matrix(files["day_ads"], facts)[:, FIRST_LABEL:].sum()),
    }


def _counts_table(count_RK: Counts, facts: SourceFacts) -> pa.Table:
    return pa.table({name: pa.array(count_RK[:, i]) for i, name in enumerate(measures(facts))})


def _matrix(rows: pa.Table, facts: SourceFacts) -> Counts:
    return np.column_stack([rows[name].to_numpy() for name in measures(facts)]).astype(np.int64)


def window_counts(lake: Lake, facts: SourceFacts, role: str, days: list[str], num_rows: int) -> Counts:
    """Counts of a role summed over days [R, K]; later codes are 0 on days before they were known."""
    sum_RK = np.zeros((num_rows, len(measures(facts))), np.int64)
    for day in days:
        count_RK = _matrix(lake.read("counts", day, f"day_{role}s"), facts)
        sum_RK[: len(count_RK)] += count_RK
    return sum_RK


def log_count(count: Counts) -> Floats:
    """0.5 * log(1 + n)."""
    logs: Floats = 0.5 * np.log1p(count.astype(np.float64))
    return logs


def source_rates(total_RK: Counts) -> Floats:
    """Rates of the whole source [L], themselves smoothed with 100 impressions at 1 %."""
    sum_K = total_RK.sum(axis=0).astype(np.float64)
    positive_L = sum_K[FIRST_LABEL:]
    rate_L: Floats = np.minimum((positive_L + 1.0) / (np.maximum(sum_K[0], positive_L) + 100.0), 0.99)
    return rate_L


def rate_logits(positive_RL: Counts, shown_R: Counts, prior_L: Floats, strength: float) -> Floats:
    """Smoothed, centred logits of rates [R, L]; more positives than impressions count as all of them."""
    num_RL = np.maximum(shown_R[:, None], positive_RL)
    rate_RL = (positive_RL + strength * prior_L) / (num_RL + strength)
    centred_RL: Floats = np.log(rate_RL / (1.0 - rate_RL)) - np.log(prior_L / (1.0 - prior_L))
    return centred_RL


def group_rates(total_RK: Counts, value_R: NDArray[np.int64], prior_L: Floats, strength: float) -> Floats:
    """Rates of the group that each row belongs to [R, L]; value 0 is no group and has 0."""
    distinct, place_R = np.unique(value_R, return_inverse=True)
    sum_VK = np.zeros((len(distinct), total_RK.shape[1]), np.int64)
    np.add.at(sum_VK, place_R, total_RK)
    rate_VL = rate_logits(sum_VK[:, FIRST_LABEL:], sum_VK[:, 0], prior_L, strength)
    rate_RL: Floats = np.where(value_R[:, None] == 0, 0.0, rate_VL[place_R])
    return rate_RL


def _shared_statistics(
    lake: Lake, facts: SourceFacts, role: str, day: str, window: list[str], strength: float
) -> tuple[Floats, pa.Table, Floats]:
    """Columns that users and ads share [R, S]: counts, all-time rates, the main label's rate of the window."""
    totals = lake.read("counts", day, f"total_{role}s")
    total_RK = _matrix(totals, facts)
    last_RK = _matrix(lake.read("counts", day, f"day_{role}s"), facts)
    week_RK = window_counts(lake, facts, role, window, len(total_RK))
    prior_L = source_rates(total_RK)
    main = slice(FIRST_LABEL, FIRST_LABEL + 1)
    statistics = np.column_stack(
        [
            *(log_count(count_RK[:, 0]) for count_RK in (last_RK, week_RK, total_RK)),
            *(log_count(count_RK[:, 1]) for count_RK in (last_RK, week_RK, total_RK)),
            log_count(total_RK[:, FIRST_LABEL]),
            rate_logits(total_RK[:, FIRST_LABEL:], total_RK[:, 0], prior_L, strength),
            rate_logits(week_RK[:, main], week_RK[:, 0], prior_L[:1], strength),
        ]
    )
    return statistics, totals, prior_L


def _user_statistics(lake: Lake, facts: SourceFacts, day: str, window: list[str]) -> Floats:
    shared_US, totals, _ = _shared_statistics(lake, facts, "user", day, window, USER_STRENGTH)
    last_active_U = totals["last_active"].to_numpy()
    since_U = facts.days.index(day) - last_active_U
    recency_U = np.where(last_active_U < 0, 0.0, np.exp(-since_U / RECENCY_DAYS))
    return np.column_stack([shared_US, log_count(totals["active_days"].to_numpy()), recency_U])


def _ad_statistics(lake: Lake, facts: SourceFacts, day: str, window: list[str], ads: pa.Table, cut_us: int) -> Floats:
    shared_NS, totals, prior_L = _shared_statistics(lake, facts, "ad", day, window, AD_STRENGTH)
    total_NK = _matrix(totals, facts)
    advertiser_NL = group_rates(total_NK, ads["advertiser_id"].to_numpy(), prior_L, ADVERTISER_STRENGTH)
    category_NL = group_rates(total_NK, columns.deepest_category(ads, facts), prior_L, CATEGORY_STRENGTH)
    return np.column_stack([shared_NS, advertiser_NL, category_NL, ad_age(ads, cut_us), ad_bid(ads)])


def ad_age(ads: pa.Table, cut_us: int) -> Floats:
    """0.5 * log(1 + days between creation and the cut), 0 for ads created later [N]."""
    age_days = np.maximum(cut_us - ads["created_us"].to_numpy(), 0) / (DAY_SECONDS * MICROSECONDS)
    age_N: Floats = 0.5 * np.log1p(age_days)
    return age_N


def ad_bid(ads: pa.Table) -> Floats:
    """log(1 + bid) [N]."""
    bid_N: Floats = np.log1p(np.maximum(ads["bid"].to_numpy().astype(np.float64), 0.0))
    return bid_N


def _published(cut_us: int, num_rows: int) -> dict[str, pa.Array]:
    """When a row became known: the cut itself, thrice (Feast's event time, its creation time, and in microseconds)."""
    cut = pa.array(np.full(num_rows, cut_us), pa.int64())
    return {"published_at": cut.cast(TIME), "created_at": cut.cast(TIME), "event_timestamp_us": cut}


def _named(prefix: str, names: tuple[str, ...], values: NDArray[Any]) -> dict[str, pa.Array]:
    return {f"{prefix}_{name}": pa.array(np.ascontiguousarray(values[:, i])) for i, name in enumerate(names)}


def _user_features(users: pa.Table, statistics_US: Floats, facts: SourceFacts, cut_us: int) -> pa.Table:
    dense_UD = np.column_stack([columns.user_attributes(users, facts), statistics_US])
    names = tuple(field.name for field in schema_for(facts).categorical_of("user"))
    return pa.table(
        {
            "user_id": users["user_id"],
            **_named("cat", names, columns.user_categorical(users, facts)),
            **_named("dense", user_dense_names(facts), columns.finite("user_features", dense_UD)),
            **_published(cut_us, users.num_rows),
        }
    )


def _ad_features(ads: pa.Table, statistics_NS: Floats, facts: SourceFacts, cut_us: int) -> pa.Table:
    dense_NF = np.column_stack([columns.ad_attributes(ads, facts), statistics_NS])
    names = tuple(field.name for field in schema_for(facts).categorical_of("ad"))
    embedding_NM = columns.ad_embedding(ads, facts)
    embedding: dict[str, pa.Array] = {}
    if facts.embedding_dim:
        flat = pa.array(embedding_NM.reshape(-1), pa.float32())
        embedding["embedding"] = pa.FixedSizeListArray.from_arrays(flat, facts.embedding_dim)
    return pa.table(
        {
            "ad_id": ads["ad_id"],
            **_named("cat", names, columns.ad_categorical(ads, facts)),
            **_named("dense", ad_dense_names(facts), columns.finite("ad_features", dense_NF)),
            **embedding,
            **{f"group_{group.name}": ads[f"group_{group.name}"] for group in groups_for(facts)},
            "retired": ads["retired"],
            "created_us": ads["created_us"],
            "bid": ads["bid"],
            **_published(cut_us, ads.num_rows),
        }
    )
