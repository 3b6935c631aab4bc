"""Arrays of a world as Arrow tables of the contract."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from feature_repo.simulator.config import FORMATS, KINDS, LABEL_WINDOWS, SURFACES
from feature_repo.simulator.events import DayEvents, Impressions
from feature_repo.simulator.world import DAY_US, NEVER, REGIONS, Ints, Population, ad_ids, user_ids
from feature_repo.tables import CONTRACT, ORACLE

OBJECTIVES = (("awareness", "impression"), ("traffic", "click"), ("sales", "conversion"))
ID_STEP = 1_000_000_000
"""Request and event ids are day number * ID_STEP + position in the day."""
SYLLABLES = ("ka", "lo", "mi", "ra", "tu", "ve", "sha", "no", "pe", "dri", "so", "lu", "be", "zan", "ti", "go")


def table(name: str, columns: dict[str, object]) -> pa.Table:
    """Build a contract table from columns in schema order; integers become timestamps where the schema says so."""
    schema = ORACLE if name == "oracle" else CONTRACT[name]
    arrays = []
    for field in schema:
        values = columns[field.name]
        if isinstance(values, (pa.Array, pa.ChunkedArray)):
            arrays.append(values)
        elif pa.types.is_timestamp(field.type):
            stamps = np.asarray(values)
            arrays.append(pa.array(stamps, mask=stamps == NEVER).cast(field.type))
        else:
            arrays.append(pa.array(values, type=field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def names(codes: Ints, values: Sequence[str]) -> pa.Array:
    """Codes as strings."""
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int8)), pa.array(list(values))).cast(pa.string())


def matrix(values: NDArray[np.float32] | Ints) -> pa.Array:
    """[R, C] as a list column."""
    offsets = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.reshape(-1)))


def impressions(population: Population, index: int, shown: Impressions) -> pa.Table:
    """Impressions of a day."""
    return table(
        "impressions",
        {
            "request_id": index * ID_STEP + shown.request,
            "ad_id": ad_ids(shown.ad),
            "position": shown.position.astype(np.int16),
            "user_id": user_ids(shown.user),
            "surface": names(shown.surface, SURFACES),
            "timestamp": shown.time_us,
            "propensity": shown.propensity.astype(np.float32),
            "split": pa.nulls(len(shown.ad), pa.string()),
        },
    )


def oracle(index: int, shown: Impressions) -> pa.Table:
    """True probabilities of a day's impressions, in their order."""
    return table(
        "oracle",
        {
            "request_id": index * ID_STEP + shown.request,
            "ad_id": ad_ids(shown.ad),
            "click": shown.click,
            "conversion": shown.conversion,
        },
    )


def outcomes(population: Population, index: int, recent: Sequence[tuple[int, DayEvents]]) -> pa.Table:
    """Outcomes known on day `index`, of the impressions of the given days."""
    parts = []
    for day, events in recent:
        known, rows = events.outcomes, _known_on(population, index, events.outcomes.known_us)
        parts.append(outcome_rows(day, events.impressions, known.impression[rows], known.label[rows],
                                  known.time_us[rows], known.known_us[rows]))  # fmt: skip
    return pa.concat_tables(parts).combine_chunks()


def outcome_rows(day: int, shown: Impressions, row: Ints, label: Ints, time_us: Ints, known_us: Ints) -> pa.Table:
    """Outcome rows of impressions `row` of a day."""
    return table(
        "outcomes",
        {
            "request_id": day * ID_STEP + shown.request[row],
            "ad_id": ad_ids(shown.ad[row]),
            "label": names(label, list(LABEL_WINDOWS)),
            "value": np.ones(len(row), dtype=np.float32),
            "event_time": time_us,
            "known_at": known_us,
        },
    )


def engagements(population: Population, index: int, recent: Sequence[tuple[int, DayEvents]]) -> pa.Table:
    """Engagements known on day `index`."""
    parts = []
    for day, events in recent:
        e = events.engagements
        rows = np.flatnonzero(_known_on(population, index, e.known_us))
        parts.append(
            table(
                "engagements",
                {
                    "event_id": day * ID_STEP + rows,
                    "user_id": user_ids(e.user[rows]),
                    "item_id": ad_ids(e.item[rows]),
                    "kind": names(e.kind[rows], KINDS),
                    "surface": names(e.surface[rows], SURFACES),
                    "timestamp": e.time_us[rows],
                    "known_at": e.known_us[rows],
                    "sequence_number": rows,
                    "time_quality": names(np.zeros(len(rows), dtype=np.int64), ["exact"]),
                },
            )
        )
    return pa.concat_tables(parts).combine_chunks()


def ads(population: Population, index: int) -> pa.Table:
    """The change log of ads of a day: new ones, new bids, retirements. The first day also holds all older ads."""
    a, changes = population.ads, population.bid_changes
    begin, end = _bounds(population, index)
    new = np.flatnonzero((a.created_us < end) & ((a.created_us >= begin) | (index == 0)))
    changed = np.flatnonzero((changes.time_us >= begin) & (changes.time_us < end))
    gone = np.flatnonzero((a.retired_us >= begin) & (a.retired_us < end))
    last_bid = a.bid.copy()
    before = changes.time_us < end
    last_bid[changes.ad[before]] = changes.bid[before]
    ad = np.concatenate([new, changes.ad[changed], gone])
    kind = np.repeat([0, 1, 2], [len(new), len(changed), len(gone)])
    known_us = np.concatenate([a.created_us[new], changes.time_us[changed], a.retired_us[gone]])
    bid = np.concatenate([a.bid[new], changes.bid[changed], last_bid[gone]])
    order = np.lexsort((ad, known_us))
    ad, kind, known_us, bid = ad[order], kind[order], known_us[order], bid[order]
    topics = population.config.topics
    leaf = a.leaf[ad]
    path = np.stack([leaf // (topics[1] * topics[2]), leaf // topics[2], leaf], axis=1) + 1
    objective = a.objective[ad]
    return table(
        "ads",
        {
            "ad_id": ad_ids(ad),
            "created_at": a.created_us[ad],
            "retired_at": np.where(kind == 2, a.retired_us[ad], NEVER),
            "known_at": known_us,
            "advertiser_id": a.advertiser[ad] + 1,
            "campaign_id": a.campaign[ad] + 1,
            "objective": names(objective, [o for o, _ in OBJECTIVES]),
            "optimisation_event": names(objective, [e for _, e in OBJECTIVES]),
            "format": names(a.format[ad], FORMATS),
            "category_path": matrix(path),
            "bid": bid.astype(np.float32),
            "budget": a.budget[ad].astype(np.float32),
            "attributes": matrix(a.attributes_N2[ad]),
            "embedding": matrix(a.embedding_NE[ad]),
            "title": pa.array(_titles(population, ad)),
        },
    )


def users(population: Population, index: int) -> pa.Table:
    """The change log of users of a day: who joined (all earlier ones on the first day), whose attributes changed."""
    u = population.users
    begin, end = _bounds(population, index)
    rng = np.random.default_rng([population.seed, 12, index])
    joined = np.flatnonzero((u.joined_us < end) & ((u.joined_us >= begin) | (index == 0)))
    settled = np.flatnonzero(u.joined_us < begin) if index > 0 else np.zeros(0, dtype=np.int64)
    chance = population.config.user_change_share
    changed = settled[rng.random(len(settled)) < chance]
    user = np.concatenate([joined, changed])
    categorical, dense = u.categorical_UC[user], u.dense_UD[user]
    moved = np.arange(len(user)) >= len(joined)
    categorical[moved, 2] = rng.integers(1, REGIONS + 1, int(moved.sum()))
    dense[moved, 1] = np.clip(dense[moved, 1] + rng.normal(0, 0.3, int(moved.sum())), -5, 5)
    return table(
        "users",
        {
            "user_id": user_ids(user),
            "valid_from": np.concatenate([u.joined_us[joined], rng.integers(begin, end, len(changed))]),
            "categorical": matrix(categorical),
            "dense": matrix(dense),
        },
    )


def _bounds(population: Population, index: int) -> tuple[int, int]:
    begin = population.start_us + index * DAY_US
    return begin, begin + DAY_US


def _known_on(population: Population, index: int, known_us: Ints) -> NDArray[np.bool_]:
    begin, end = _bounds(population, index)
    return np.asarray((known_us >= begin) & (known_us < end))


def _word(code: int) -> str:
    base = len(SYLLABLES)
    return SYLLABLES[code % base] + SYLLABLES[code // base % base] + SYLLABLES[code // base**2 % base]


def _titles(population: Population, ad: Ints) -> list[str]:
    """Three words: one of the top topic, one of the parent, one of the leaf."""
    topics = population.config.topics
    leaf_words = [_word(1 + 7 * t) for t in range(population.config.num_leaves)]
    return [
        f"{_word(4001 + t // (topics[1] * topics[2]))} {_word(2003 + t // topics[2])} {leaf_words[t]}"
        for t in population.ads.leaf[ad].tolist()
    ]
