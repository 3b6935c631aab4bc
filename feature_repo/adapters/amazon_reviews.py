"""Amazon reviews (2014, 5-core, numbering of S3-Rec) as a source: positives only, day-grain times, leave-one-out.

Source: He and McAuley, WWW 2016; McAuley et al., SIGIR 2015; the folder holds `interactions` and `items` as Parquet.
Decisions that the log forces:

- A review is an engagement of kind `review`; nobody knows what was shown, so there are no impressions.
- Partitions are quarters. The first holds everything before its end. The official protocol (last item of a user is
  the test, the last but one validation) ranks among all items and trains on all users' earlier ones, so it is no
  split by time: validation and test items become *known* in two partitions of their own after the last quarter.
- Times are whole days. A review gets its place among the user's reviews of that day as seconds, so that the order
  of the log is the order of histories. That order is an artefact (items of one day stand by ASIN): `reordered`
  gives the same log with the reviews of one user and day shuffled, which moves items between the splits, too.
- Items carry no creation time and are all candidates from the first partition on, as in the protocol.
- `n_interactions` has seen the test items and is never read; `tags` are a tagger's output and stand in for text only
  where a set has no titles.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from feature_repo.adapters.base import check_day, string_ids
from feature_repo.tables import CONTRACT, TIME, SourceFacts

FILES = ("interactions", "items")
SURFACE, KIND = "shop", "review"
FIRST, TRAINED, VALID, TEST = "2012-01-01", "2014-07-01", "2014-10-01", "2015-01-01"
NUM_NEGATIVES = 2
EMBEDDING_DIM = 64
CATEGORY_LEVELS = 3
SKIPPED_LEVELS = {"amazon_beauty": 1, "amazon_sports": 0}
"""Source -> category levels that all items share."""
HISTORY_LENGTH = 256
SHUFFLE_SEED = 0

Ints = NDArray[np.int64]


class AmazonReviews:
    """One category below `data_dir`, in the stored order or with the reviews of a user's day shuffled."""

    def __init__(self, name: str, data_dir: Path, *, shuffled: bool = False) -> None:
        if name not in SKIPPED_LEVELS:
            raise ValueError(f"name: {name!r} is unknown; known sets: {', '.join(SKIPPED_LEVELS)}")
        missing = [f"{file}.parquet" for file in FILES if not (data_dir / f"{file}.parquet").exists()]
        if missing:
            raise ValueError(f"data_dir: {data_dir} lacks {', '.join(missing)}")
        self.name, self.data_dir, self.shuffled = name, data_dir, shuffled

    def reordered(self) -> AmazonReviews:
        """The same log with the reviews that a user wrote on one day in random order."""
        return AmazonReviews(self.name, self.data_dir, shuffled=True)

    @functools.cached_property
    def facts(self) -> SourceFacts:
        """Facts of the set; numbers of users and items are those of its files."""
        num_items = pq.read_metadata(self.data_dir / "items.parquet").num_rows
        return SourceFacts(
            name=self.name,
            timezone="UTC",
            first_day=FIRST,
            last_day=TEST,
            surfaces=(SURFACE,),
            verticals=(SURFACE,),
            labels={KIND: 0},
            history_kinds=(KIND,),
            history_length=HISTORY_LENGTH,
            user_categorical=(),
            user_dense=(),
            ad_attributes=("has_brand", "log_title_words"),
            category_levels=CATEGORY_LEVELS,
            embedding_dim=EMBEDDING_DIM,
            evaluation_cut=TRAINED,
            negative_rate=NUM_NEGATIVES / num_items,
            max_ads=num_items,
            max_users=len(np.unique(self._log["user_id"].to_numpy())),
            has_oracle=False,
            grain="quarter",
            positives_only=True,
            num_negatives=NUM_NEGATIVES,
            repeats=False,
            training_through=TRAINED,
            shuffled_control=True,
        )

    def tables(self, day: str) -> Iterator[tuple[str, pa.Table]]:
        """Contract tables of a partition; raises ValueError for a day that is no partition."""
        first = check_day(self.facts, day) == 0
        yield "impressions", CONTRACT["impressions"].empty_table()
        yield "outcomes", CONTRACT["outcomes"].empty_table()
        yield "engagements", self._engagements(day)
        yield "ads", self._ads() if first else CONTRACT["ads"].empty_table()
        yield "users", CONTRACT["users"].empty_table()

    @functools.cached_property
    def _log(self) -> pa.Table:
        """Reviews by user in their order: user_id, item_id, day_s, event_id, place (of the user, from 0), from_end."""
        raw = pq.read_table(
            self.data_dir / "interactions.parquet", columns=["user_id", "item_id", "position", "timestamp"]
        )
        user, day_s = (raw[name].to_numpy().astype(np.int64) for name in ("user_id", "timestamp"))
        tie = raw["position"].to_numpy().astype(np.float64)
        by_position = np.lexsort((tie, user))
        if self.shuffled:
            tie = np.empty(len(user))
            tie[by_position] = np.random.default_rng(SHUFFLE_SEED).random(len(user))
            order = np.lexsort((tie, day_s, user))
        else:
            order = by_position
        user, day_s = user[order], day_s[order]
        start = np.flatnonzero(np.r_[True, user[1:] != user[:-1]])
        length = np.diff(np.r_[start, len(user)])
        place = np.arange(len(user)) - np.repeat(start, length)
        new_day = np.r_[True, (user[1:] != user[:-1]) | (day_s[1:] != day_s[:-1])]
        day_start = np.flatnonzero(new_day)
        within = np.arange(len(user)) - np.repeat(day_start, np.diff(np.r_[day_start, len(user)]))
        columns = {
            "user_id": user, "item_id": raw["item_id"].to_numpy().astype(np.int64)[order],
            "happened_s": day_s + within, "event_id": order.astype(np.int64), "place": place,
            "from_end": np.repeat(length, length) - 1 - place,
        }  # fmt: skip
        return pa.table(columns)

    def _engagements(self, day: str) -> pa.Table:
        """Reviews that became known in a partition: at their own time, or where the protocol puts their split."""
        start, end = (int(bound.timestamp()) for bound in self.facts.bounds(day))
        log = self._log
        happened_s, from_end = log["happened_s"].to_numpy(), log["from_end"].to_numpy()
        if day in (VALID, TEST):
            chosen = from_end == (1 if day == VALID else 0)
            known_s = np.full(len(happened_s), start)
        else:
            since = 0 if day == self.facts.first_day else start
            chosen, known_s = (from_end > 1) & (happened_s >= since) & (happened_s < end), happened_s
        rows = log.filter(pa.array(chosen))
        count = rows.num_rows
        columns = {
            "event_id": rows["event_id"], "user_id": rows["user_id"], "item_id": rows["item_id"],
            "kind": pa.repeat(KIND, count), "surface": pa.repeat(SURFACE, count),
            "timestamp": _times(happened_s[chosen]), "known_at": _times(known_s[chosen]),
            "sequence_number": rows["place"], "time_quality": pa.repeat("day", count),
        }  # fmt: skip
        return _conform("engagements", columns, count)

    def _ads(self) -> pa.Table:
        """All items: brand as advertiser, category path below the shared top, hashed words as creative embedding."""
        items = pq.read_table(self.data_dir / "items.parquet").sort_by("item_id")
        count = items.num_rows
        paths = [path[SKIPPED_LEVELS[self.name] :] for path in items["categories"].to_pylist()]
        brands = [brand or "" for brand in items["brand"].to_pylist()]
        titles = [
            title or tags or ""
            for title, tags in zip(items["title"].to_pylist(), items["tags"].to_pylist(), strict=True)
        ]
        words = [_words(" ".join([title, *path])) for title, path in zip(titles, paths, strict=True)]
        known = _times(np.full(count, int(self.facts.bounds(FIRST)[0].timestamp()) - 1))
        attributes = np.column_stack([[b != "" for b in brands], np.log1p([len(_words(t)) for t in titles]) / 3])
        columns = {
            "ad_id": pa.array(items["item_id"].to_numpy().astype(np.int64)), "created_at": known, "known_at": known,
            "advertiser_id": pa.array(_ids_or_zero(brands)),
            "campaign_id": pa.array(_ids_or_zero(["/".join(path) for path in paths])),
            "objective": pa.repeat("sales", count), "optimisation_event": pa.repeat(KIND, count),
            "format": pa.repeat("product", count),
            "category_path": pa.array([_path_ids(path) for path in paths], pa.list_(pa.int64())),
            "attributes": _lists(attributes.astype(np.float32)),
            "embedding": _lists(text_embeddings(words, EMBEDDING_DIM)), "title": pa.array(titles, pa.string()),
        }  # fmt: skip
        return _conform("ads", columns, count)


def text_embeddings(words: Sequence[Sequence[str]], dim: int) -> NDArray[np.float32]:
    """Unit vectors [items, dim]: the sum of a random sign vector for each distinct word, weighted by its rarity.

    A random projection of TF-IDF (Johnson-Lindenstrauss): dot products are about those of the bags of words. Texts
    without words are zero.
    """
    seen = Counter(word for text in words for word in set(text))
    vocabulary = sorted(seen)
    seeds = string_ids(vocabulary)
    place = {word: number for number, word in enumerate(vocabulary)}
    sign_VD = (
        np.stack([np.random.default_rng(seed).choice((-1.0, 1.0), dim) for seed in seeds])
        if seen
        else np.zeros((0, dim))
    )
    rarity_V = np.log(len(words) / np.array([seen[word] for word in vocabulary], np.float64))
    vector_ND = np.zeros((len(words), dim))
    for row, text in enumerate(words):
        known = sorted({place[word] for word in text})
        vector_ND[row] = rarity_V[known] @ sign_VD[known] if known else 0.0
    norm_N = np.linalg.norm(vector_ND, axis=1, keepdims=True)
    unit_ND: NDArray[np.float32] = (vector_ND / np.maximum(norm_N, 1e-9)).astype(np.float32)
    return unit_ND


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _ids_or_zero(names: Sequence[str]) -> Ints:
    """Ids of names, 0 for empty ones."""
    return np.where([name == "" for name in names], 0, string_ids(names)).astype(np.int64)


def _path_ids(path: Sequence[str]) -> list[int]:
    """Ids of the first levels of a category path; an id stands for the path down to its level."""
    return [int(i) for i in string_ids("/".join(path[: n + 1]) for n in range(min(len(path), CATEGORY_LEVELS)))]


def _times(seconds: Ints) -> pa.Array:
    return pa.array(seconds.astype(np.int64) * 1_000_000).cast(TIME)


def _lists(values: NDArray[np.float32]) -> pa.Array:
    offsets = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
    return pa.ListArray.from_arrays(offsets, values.reshape(-1))


def _conform(table: str, columns: dict[str, pa.Array], count: int) -> pa.Table:
    """Columns in the contract's order and types; those that the source lacks are null."""
    schema = CONTRACT[table]
    arrays = [columns[f.name].cast(f.type) if f.name in columns else pa.nulls(count, f.type) for f in schema]
    return pa.Table.from_arrays(arrays, schema=schema)
