"""A small random world with a learnable preference, in the column layout of the training frame."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.batch import AdTable, History, UserTable
from models.data import FrameData, to_ad_table, to_history, to_user_table
from models.schema import Categorical, Dense, FeatureSchema, Group, Task

DAY_S = 86_400
FIRST_S = 1_767_225_600
KINDS = ("view", "like", "click")
SURFACES = ("feed", "stories")
NUM_TOPICS = 8


@dataclass(frozen=True)
class World:
    """Days of frame rows over one history, and the true click probability of every row."""

    schema: FeatureSchema
    users: UserTable
    ads: AdTable
    history: History
    days: list[FrameData]
    probability: list[NDArray[np.float64]]


def world_schema(num_ads: int, num_users: int, history_length: int) -> FeatureSchema:
    return FeatureSchema(
        source="toy",
        categorical=(
            Categorical("user_id", "user", num_users + 1, "user_id"),
            Categorical("country", "user", 8, "country"),
            Categorical("ad_id", "ad", num_ads + 1, "item"),
            Categorical("advertiser", "ad", 64, "advertiser"),
            Categorical("format", "ad", 4, "format"),
        ),
        dense=(Dense("activity", "user"), Dense("quality", "ad"), Dense("age", "ad")),
        groups=(Group("topic", NUM_TOPICS + 1), Group("advertiser", 64)),
        embedding_dim=6,
        history_length=history_length,
        kinds=KINDS,
        surfaces=SURFACES,
        tasks=(Task("click", 3600), Task("conversion", 86_400)),
        item_rows=num_ads + 1,
    )


@dataclass(frozen=True)
class Tables:
    """Arrays of users and ads as the features side gives them."""

    user_id_U: NDArray[Any]
    user_categorical_UC: NDArray[Any]
    user_dense_UD: NDArray[Any]
    ad_id_N: NDArray[Any]
    ad_categorical_NA: NDArray[Any]
    ad_dense_NF: NDArray[Any]
    ad_embedding_NM: NDArray[Any]
    ad_group_NG: NDArray[Any]
    ad_retired_N: NDArray[Any]
    ad_created_us_N: NDArray[Any]
    ad_bid_N: NDArray[Any]


@dataclass(frozen=True)
class Events:
    """Arrays of all histories."""

    offset_U1: NDArray[Any]
    item_E: NDArray[Any]
    time_E: NDArray[Any]
    kind_E: NDArray[Any]
    surface_E: NDArray[Any]


def _histories(
    rng: np.random.Generator, interest: NDArray[np.float64], topic: NDArray[np.int64], mean_history: int, num_days: int
) -> Events:
    num_users = len(interest)
    length = np.minimum(rng.lognormal(np.log(mean_history), 0.6, num_users).astype(np.int64), 12 * mean_history)
    offset = np.concatenate(([0], np.cumsum(length)))
    user = np.repeat(np.arange(num_users), length)
    wanted = (rng.random(len(user))[:, None] > np.cumsum(interest[user], axis=1)).sum(axis=1).clip(0, NUM_TOPICS - 1)
    by_topic = [np.flatnonzero(topic == t) for t in range(NUM_TOPICS)]
    item = np.zeros(len(user), dtype=np.int32)
    for t, members in enumerate(by_topic):
        mine = wanted == t
        item[mine] = rng.choice(members, mine.sum()) if len(members) else rng.integers(0, len(topic), mine.sum())
    time = FIRST_S - 20 * DAY_S + rng.integers(0, (20 + num_days) * DAY_S, len(user))
    order = np.lexsort((time, user))
    return Events(
        offset_U1=offset,
        item_E=item[order],
        time_E=time[order],
        kind_E=rng.integers(0, len(KINDS), len(user)),
        surface_E=rng.integers(0, len(SURFACES), len(user)),
    )


def _frame(
    rng: np.random.Generator, day: int, logit_UN: Any, events: Events, rows: int, rate: float
) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64]]:
    num_users, num_ads = logit_UN.shape
    user = rng.integers(0, num_users, rows)
    ad = rng.integers(0, num_ads, rows)
    surface = rng.integers(0, len(SURFACES), rows)
    second = np.sort(rng.integers(0, DAY_S, rows)) + FIRST_S + day * DAY_S
    logit = logit_UN[user, ad] + 0.8 * surface
    probability = 1.0 / (1.0 + np.exp(-logit))
    click = rng.random(rows) < probability
    end_offset = np.zeros(rows, dtype=np.int64)
    for row, (u, now) in enumerate(zip(user, second, strict=True)):
        times = events.time_E[events.offset_U1[u] : events.offset_U1[u + 1]]
        end_offset[row] = np.searchsorted(times, now, side="left")
    frame = {
        "user_code": user,
        "ad_code": ad,
        "surface": surface,
        "hour": (second // 3600) % 24,
        "timestamp_us": second * 1_000_000,
        "end_offset": end_offset,
        "label_click": click,
        "label_conversion": click & (rng.random(rows) < 0.3),
        "mature_click": np.ones(rows, dtype=bool),
        "mature_conversion": rng.random(rows) < 0.9,
        "keep": click | (rng.random(rows) < rate),
    }
    return frame, probability


def _bids(seed: int, num_ads: int) -> NDArray[np.float64]:
    """Every fifth ad or so has none."""
    rng = np.random.default_rng([seed, 1])
    return rng.lognormal(0.0, 1.5, num_ads) * (rng.random(num_ads) < 0.8)


def make_world(
    *,
    seed: int = 0,
    num_users: int = 120,
    num_ads: int = 90,
    num_days: int = 3,
    rows_per_day: int = 1500,
    mean_history: int = 30,
    history_length: int = 100,
    negative_rate: float = 0.5,
) -> World:
    """Users like topics, which their histories show; ads have a topic and a quality; stories click more."""
    rng = np.random.default_rng(seed)
    schema = world_schema(num_ads, num_users, history_length)
    topic = rng.integers(0, NUM_TOPICS, num_ads)
    interest = rng.dirichlet(np.full(NUM_TOPICS, 0.3), num_users)
    quality = rng.normal(size=num_ads)
    advertiser = rng.integers(1, 64, num_ads)
    logit_UN = -3.0 + 4.0 * interest[:, topic] + 0.7 * quality[None, :]
    tables = Tables(
        user_id_U=np.arange(num_users) + 10_000,
        user_categorical_UC=np.stack([np.arange(num_users) + 1, rng.integers(0, 8, num_users)], axis=1),
        user_dense_UD=rng.normal(size=(num_users, 1)),
        ad_id_N=np.arange(num_ads) + 50_000,
        ad_categorical_NA=np.stack([np.arange(num_ads), advertiser, rng.integers(0, 4, num_ads)], axis=1),
        ad_dense_NF=np.stack([quality + 0.3 * rng.normal(size=num_ads), rng.normal(size=num_ads)], axis=1),
        ad_embedding_NM=rng.normal(size=(num_ads, 6)),
        ad_group_NG=np.stack([topic + 1, advertiser], axis=1),
        ad_retired_N=np.zeros(num_ads, dtype=bool),
        ad_created_us_N=np.full(num_ads, FIRST_S * 1_000_000),
        ad_bid_N=_bids(seed, num_ads),
    )
    users, ads = to_user_table(vars(tables), schema), to_ad_table(vars(tables), schema)
    events = _histories(rng, interest, topic, mean_history, num_days)
    history = to_history(vars(events))
    days, probabilities = [], []
    for day in range(num_days):
        frame, probability = _frame(rng, day, logit_UN, events, rows_per_day, negative_rate)
        days.append(FrameData.from_columns(schema, frame, users, ads, history, negative_rate=negative_rate))
        probabilities.append(probability)
    return World(schema, users, ads, history, days, probabilities)
