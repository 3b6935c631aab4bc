"""The catalogue: every ad and user known by the end of a day, with append-only codes.

A code is the row of the ad or user in every table and tensor of that day and of all later days. Groups (category
levels, advertiser) get contiguous append-only codes as well; 0 means unknown or beyond the group's upper bound.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from feature_repo.days import contract_rows, day_bounds_us, previous_day
from feature_repo.feature_schema import groups_for
from feature_repo.lake import Lake, Partition
from feature_repo.sql import run_transform
from feature_repo.tables import SourceFacts
from models.schema import Group

CATEGORY_COLUMNS = 3
"""Category levels that the catalogue keeps."""

_EMPTY_ADS = pa.schema(
    [
        ("ad_code", pa.int32()), ("ad_id", pa.int64()), ("created_us", pa.int64()), ("retired_us", pa.int64()),
        ("retired", pa.bool_()), ("advertiser_id", pa.int64()), ("campaign_id", pa.int64()),
        ("objective", pa.string()), ("format", pa.string()),
        *((f"category_{level + 1}", pa.int64()) for level in range(CATEGORY_COLUMNS)),
        ("bid", pa.float32()), ("attributes", pa.list_(pa.float32())), ("embedding", pa.list_(pa.float32())),
    ]
)  # fmt: skip
_EMPTY_USERS = pa.schema(
    [
        ("user_code", pa.int32()), ("user_id", pa.int64()),
        ("categorical", pa.list_(pa.int64())), ("dense", pa.list_(pa.float32())),
    ]
)  # fmt: skip
_EMPTY_GROUPS = pa.schema([("group", pa.string()), ("value", pa.int64()), ("code", pa.int32())])


def build_catalogue(lake: Lake, facts: SourceFacts, day: str) -> Partition:
    """Write `catalogue/<day>`: ads, users, and the codes of group values.

    Raises:
        ValueError: the previous day has no catalogue, or an ad or user has lists of a wrong length.
    """
    if facts.category_levels > CATEGORY_COLUMNS:
        raise ValueError(f"category_levels: {facts.category_levels} is more than {CATEGORY_COLUMNS}")
    before = previous_day(facts, day)
    start_us, end_us = day_bounds_us(facts, day)
    shared = {table: contract_rows(lake, table, [day]) for table in ("impressions", "engagements")}
    ads = run_transform(
        "catalogue_ads",
        {
            **shared,
            "ads": contract_rows(lake, "ads", [day]),
            "previous": lake.paths("catalogue", [before], "ads") if before else _EMPTY_ADS.empty_table(),
        },
        {
            "day_start_us": start_us,
            "end_us": end_us,
            "no_attributes": [0.0] * len(facts.ad_attributes),
            "no_embedding": [0.0] * facts.embedding_dim,
        },
    )
    users = run_transform(
        "catalogue_users",
        {
            **shared,
            "users": contract_rows(lake, "users", [day]),
            "previous": lake.paths("catalogue", [before], "users") if before else _EMPTY_USERS.empty_table(),
        },
        {"no_categorical": [0] * len(facts.user_categorical), "no_dense": [0.0] * len(facts.user_dense)},
    )
    _check_widths(ads, "ads", {"attributes": len(facts.ad_attributes), "embedding": facts.embedding_dim})
    _check_widths(users, "users", {"categorical": len(facts.user_categorical), "dense": len(facts.user_dense)})
    known = lake.read("catalogue", before, "groups") if before else _EMPTY_GROUPS.empty_table()
    ads, groups = _with_groups(ads, groups_for(facts), known)
    return lake.write(
        "catalogue", day, {"ads": ads, "users": users, "groups": groups},
        facts={"num_ads": ads.num_rows, "num_users": users.num_rows},
    )  # fmt: skip


def _check_widths(rows: pa.Table, table: str, widths: Mapping[str, int]) -> None:
    for column, width in widths.items():
        lengths = rows[column].combine_chunks().value_lengths().to_numpy(zero_copy_only=False)
        wrong = np.flatnonzero(lengths != width)
        if len(wrong):
            key = rows.column_names[1]
            raise ValueError(
                f"{table}.{column}: {len(wrong)} rows do not have {width} values; "
                f"{key}={rows[key][int(wrong[0])].as_py()} has {lengths[wrong[0]]}"
            )


def _with_groups(ads: pa.Table, groups: tuple[Group, ...], known: pa.Table) -> tuple[pa.Table, pa.Table]:
    names = known["group"].to_numpy(zero_copy_only=False)
    parts = []
    for group in groups:
        column = "advertiser_id" if group.name == "advertiser" else group.name
        mine = known.filter(pa.array(names == group.name, pa.bool_()))
        codes_N, value_V, code_V = extend_codes(
            ads[column].to_numpy(), mine["value"].to_numpy(), mine["code"].to_numpy(), group.num_codes
        )
        ads = ads.append_column(f"group_{group.name}", pa.array(codes_N, pa.int32()))
        parts.append(
            pa.table(
                {
                    "group": pa.array([group.name] * len(value_V), pa.string()),
                    "value": pa.array(value_V, pa.int64()),
                    "code": pa.array(code_V, pa.int32()),
                }
            )
        )
    return ads, pa.concat_tables(parts)


def extend_codes(
    value_N: NDArray[np.int64], known_V: NDArray[np.int64], code_V: NDArray[np.int32], num_codes: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]]:
    """Give values contiguous codes: known ones keep theirs, new ones follow in order of appearance.

    Value 0 is unknown and has code 0; so have values beyond `num_codes`.

    Returns:
        Codes of `value_N`, and the extended list of values with their codes.
    """
    distinct, first = np.unique(value_N, return_index=True)
    fresh = ~np.isin(distinct, known_V) & (distinct != 0)
    appended = distinct[fresh][np.argsort(first[fresh])][: max(0, num_codes - 1 - len(known_V))]
    value_V = np.concatenate([known_V.astype(np.int64), appended])
    codes = np.concatenate(
        [code_V.astype(np.int32), np.arange(len(known_V) + 1, len(value_V) + 1, dtype=np.int32)]
    )  # fmt: skip
    if not len(value_V):
        return np.zeros(len(value_N), np.int32), value_V, codes
    order = np.argsort(value_V)
    place_N = np.minimum(np.searchsorted(value_V[order], value_N), len(value_V) - 1)
    hit_N = value_V[order][place_N] == value_N
    return np.where(hit_N, codes[order][place_N], 0).astype(np.int32), value_V, codes
