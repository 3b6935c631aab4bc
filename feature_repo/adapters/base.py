"""What a source of data must offer: its facts, and the contract's tables of one day at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from feature_repo.tables import SourceFacts


class Source(Protocol):
    """A log that can be read day by day.

    `tables(day)` yields `(table, rows)` in the order of `tables.CONTRACT` (and `oracle` last, where
    `facts.has_oracle`), lazily: a reader that stops early pays only for what it took. Rows follow the
    contract's Arrow schemas; the same day always gives the same rows.
    """

    @property
    def facts(self) -> SourceFacts:
        """What the source says about itself."""
        ...

    def tables(self, day: str) -> Iterator[tuple[str, pa.Table]]:
        """Contract tables of a partition day.

        Raises:
            ValueError: the day is not one of `facts.days`.
        """
        ...


@runtime_checkable
class Reorderable(Protocol):
    """A source whose order within a day is an artefact (`facts.shuffled_control`)."""

    def reordered(self) -> Source:
        """The same log with the events of one user and day in random order."""
        ...


def check_day(facts: SourceFacts, day: str) -> int:
    """Index of a partition day in `facts.days`; raises ValueError that names the range."""
    try:
        return facts.days.index(day)
    except ValueError:
        raise ValueError(
            f"day: {day!r} is not a day of source {facts.name!r}; it has {facts.first_day} to {facts.last_day}"
        ) from None


def string_ids(values: Iterable[str]) -> NDArray[np.int64]:
    """Map strings to non-negative int64 ids: the first 63 bits of BLAKE2b, the same on every machine."""
    digests = (hashlib.blake2b(v.encode(), digest_size=8).digest() for v in values)
    return np.array([int.from_bytes(d, "little") & (2**63 - 1) for d in digests], dtype=np.int64)


def mixed_ids(*columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Derive non-negative int64 ids from integer columns by chained SplitMix64 finalisers (vectorised)."""
    state = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        state = (state ^ column.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(1)).astype(np.int64)
