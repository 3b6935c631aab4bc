"""Tables that training reads, as numpy: users and ads as of a published cut, histories, and frame rows. No torch.

Shape legend: U users, N ads, C and A categorical columns of users and ads, D and F dense columns, M embedding width,
G groups, E events. Row = code; a code means the same user or ad on every day.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from feature_repo import columns
from feature_repo.days import day_bounds_us
from feature_repo.feature_schema import ad_dense_names, ad_statistic_names, rate_names, schema_for, user_statistic_names
from feature_repo.lake import Lake
from feature_repo.statistics import ad_age, ad_bid
from feature_repo.tables import SourceFacts

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class TrainingTables:
    """All users and ads of a catalogue with features as of a published cut; row = code."""

    user_id_U: Ints
    user_categorical_UC: Ints
    user_dense_UD: Floats
    ad_id_N: Ints
    ad_categorical_NA: Ints
    ad_dense_NF: Floats
    ad_embedding_NM: Floats
    ad_group_NG: NDArray[np.int32]
    ad_retired_N: NDArray[np.bool_]
    ad_created_us_N: Ints
    ad_bid_N: Floats


@dataclass(frozen=True)
class HistoryArrays:
    """Events of all users: those of user u are `[offset_U1[u], offset_U1[u + 1])`, in order of availability."""

    offset_U1: Ints
    item_E: NDArray[np.int32]
    time_E: Ints
    """Seconds since the epoch."""
    kind_E: NDArray[np.uint8]
    surface_E: NDArray[np.uint8]


def load_tables(lake: Lake, facts: SourceFacts, statistics_day: str | None, catalogue_day: str) -> TrainingTables:
    """Users and ads known by the end of `catalogue_day`, with the features published at the end of `statistics_day`.

    Rows of day d read the cut of d - 1: `load_tables(lake, facts, d - 1, d)`. Users and ads that are new since the
    cut have the attributes of `catalogue_day` and the statistics of a brand-new one; a new ad still has the rates
    of its advertiser and category as of the cut.

    Args:
        lake: holds `catalogue/<catalogue_day>` and, unless it is None, the features of `statistics_day`.
        facts: of the source.
        statistics_day: the last published cut; None on the first day.
        catalogue_day: `statistics_day` or a later day.
    """
    if statistics_day is not None and catalogue_day < statistics_day:
        raise ValueError(f"catalogue_day: {catalogue_day} is before statistics_day {statistics_day}")
    published = _published(lake, facts, statistics_day) if statistics_day else None
    if published is not None and statistics_day == catalogue_day:
        return published
    users, ads = lake.read("catalogue", catalogue_day, "users"), lake.read("catalogue", catalogue_day, "ads")
    if published is None:
        cut_us, _ = day_bounds_us(facts, catalogue_day)
        return _brand_new(users, ads, facts, cut_us)
    _, cut_us = day_bounds_us(facts, statistics_day or catalogue_day)
    old_ads = ads.slice(0, len(published.ad_id_N))
    new_ads = ads.slice(len(published.ad_id_N))
    fresh = _brand_new(users.slice(len(published.user_id_U)), new_ads, facts, cut_us)
    _inherit_rates(published, old_ads, fresh, new_ads, facts)
    return TrainingTables(
        **{name: np.concatenate([getattr(published, name), getattr(fresh, name)]) for name in _FIELDS}
    )


_FIELDS = tuple(TrainingTables.__dataclass_fields__)


def _published(lake: Lake, facts: SourceFacts, day: str) -> TrainingTables:
    schema = schema_for(facts)
    users, ads = lake.read("user_features", day), lake.read("ad_features", day)
    return TrainingTables(
        user_id_U=users["user_id"].to_numpy(),
        user_categorical_UC=_stack(users, "cat", [f.name for f in schema.categorical_of("user")], np.int64),
        user_dense_UD=_stack(users, "dense", [f.name for f in schema.dense_of("user")], np.float32),
        ad_id_N=ads["ad_id"].to_numpy(),
        ad_categorical_NA=_stack(ads, "cat", [f.name for f in schema.categorical_of("ad")], np.int64),
        ad_dense_NF=_stack(ads, "dense", [f.name for f in schema.dense_of("ad")], np.float32),
        ad_embedding_NM=columns.ad_embedding(ads, facts),
        ad_group_NG=_stack(ads, "group", [g.name for g in schema.groups], np.int32),
        ad_retired_N=ads["retired"].to_numpy(zero_copy_only=False),
        ad_created_us_N=ads["created_us"].to_numpy(),
        ad_bid_N=ads["bid"].to_numpy(),
    )


def _stack(rows: pa.Table, prefix: str, names: Sequence[str], dtype: type[np.generic]) -> NDArray[Any]:
    stacked: NDArray[Any] = np.empty((rows.num_rows, len(names)), dtype)
    for i, name in enumerate(names):
        stacked[:, i] = rows[f"{prefix}_{name}"].to_numpy()
    return stacked


def _brand_new(users: pa.Table, ads: pa.Table, facts: SourceFacts, cut_us: int) -> TrainingTables:
    ad_statistics_NS = np.zeros((ads.num_rows, len(ad_statistic_names(facts))))
    ad_statistics_NS[:, -2] = ad_age(ads, cut_us)
    ad_statistics_NS[:, -1] = ad_bid(ads)
    user_statistics_US = np.zeros((users.num_rows, len(user_statistic_names(facts))))
    groups = tuple(group.name for group in schema_for(facts).groups)
    return TrainingTables(
        user_id_U=users["user_id"].to_numpy(),
        user_categorical_UC=columns.user_categorical(users, facts),
        user_dense_UD=np.column_stack([columns.user_attributes(users, facts), user_statistics_US]).astype(np.float32),
        ad_id_N=ads["ad_id"].to_numpy(),
        ad_categorical_NA=columns.ad_categorical(ads, facts),
        ad_dense_NF=np.column_stack([columns.ad_attributes(ads, facts), ad_statistics_NS]).astype(np.float32),
        ad_embedding_NM=columns.ad_embedding(ads, facts),
        ad_group_NG=columns.ad_groups(ads, groups),
        ad_retired_N=pa.compute.fill_null(pa.compute.less_equal(ads["retired_us"], cut_us), False).to_numpy(),
        ad_created_us_N=ads["created_us"].to_numpy(),
        ad_bid_N=ads["bid"].to_numpy(),
    )


def _inherit_rates(
    published: TrainingTables, old_ads: pa.Table, fresh: TrainingTables, new_ads: pa.Table, facts: SourceFacts
) -> None:
    """Fill the advertiser's and category's rates of new ads from any published ad of the same group."""
    names = ad_dense_names(facts)
    for role, old_N, new_N in (
        ("advertiser", old_ads["advertiser_id"].to_numpy(), new_ads["advertiser_id"].to_numpy()),
        ("category", columns.deepest_category(old_ads, facts), columns.deepest_category(new_ads, facts)),
    ):
        place = [names.index(name) for name in rate_names(facts, role)]
        value_V, first_V = np.unique(old_N, return_index=True)
        if not len(value_V):
            continue
        found = np.minimum(np.searchsorted(value_V, new_N), len(value_V) - 1)
        hit_N = (value_V[found] == new_N) & (new_N != 0)
        rate_NL = published.ad_dense_NF[first_V[found]][:, place]
        fresh.ad_dense_NF[:, place] = np.where(hit_N[:, None], rate_NL, 0.0)


def load_history(lake: Lake, days: Sequence[str], num_users: int) -> HistoryArrays:
    """Merge the event log's segments of consecutive days, the first one included, by user.

    Args:
        lake: holds `event_log/<day>` for the days.
        days: in order from the source's first day; frame rows of the last day may index into it.
        num_users: users of the catalogue; those without events have an empty range.

    Raises:
        ValueError: an earlier segment is missing, so offsets of frames would be wrong.
    """
    segments = [lake.read("event_log", day, "users") for day in days]
    count_U = np.zeros(num_users, np.int64)
    for day, users in zip(days, segments, strict=True):
        code = users["user_code"].to_numpy()
        if not np.array_equal(count_U[code], users["num_before"].to_numpy()):
            raise ValueError(f"days: {list(days)} leave out segments that event_log/{day} builds on")
        count_U[code] += users["num_events"].to_numpy()
    offset_U1 = np.concatenate([[0], np.cumsum(count_U)])
    num_events = int(offset_U1[-1])
    item_E, time_E = np.empty(num_events, np.int32), np.empty(num_events, np.int64)
    kind_E, surface_E = np.empty(num_events, np.uint8), np.empty(num_events, np.uint8)
    for day, users in zip(days, segments, strict=True):
        num = users["num_events"].to_numpy()
        start = offset_U1[users["user_code"].to_numpy()] + users["num_before"].to_numpy()
        shift = start - (np.cumsum(num) - num)
        place = np.repeat(shift, num) + np.arange(int(num.sum()))
        events = lake.read("event_log", day, "events")
        item_E[place] = events["item_code"].to_numpy()
        time_E[place] = events["time_s"].to_numpy()
        kind_E[place] = events["kind"].to_numpy()
        surface_E[place] = events["surface"].to_numpy()
    return HistoryArrays(offset_U1, item_E, time_E, kind_E, surface_E)


def load_frame(lake: Lake, day: str, kept_only: bool = False) -> dict[str, NDArray[Any]]:
    """Columns of `training_frame/<day>` as numpy arrays, all rows or the training sample.

    `propensity` is NaN where it was not logged; `split` is an object array of text.
    """
    rows = lake.read("training_frame", day)
    if kept_only:
        rows = rows.filter(rows["keep"])
    return {name: rows[name].to_numpy() for name in rows.column_names}
