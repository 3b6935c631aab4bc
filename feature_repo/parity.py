"""Train/serve parity: users as the online reader sees them against the offline cut and event log."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from feature_repo.days import day_bounds_us
from feature_repo.feature_schema import schema_for
from feature_repo.lake import Lake
from feature_repo.tables import SourceFacts
from feature_repo.training_tables import load_history, load_tables


@dataclass(frozen=True)
class ParityReport:
    """How many users were compared and what differs."""

    users: int
    events: int
    different_features: int
    different_histories: int
    unknown: int
    """Users that the reader does not know although the cut has them."""
    first_difference: str
    superseded_by: str | None
    """Day of a newer cut that is online instead; nothing was compared then."""

    @property
    def passed(self) -> bool:
        """Everything that was compared is equal."""
        return self.users > 0 and not (self.different_features or self.different_histories or self.unknown)


def check_parity(
    home: Path, lake: Lake, facts: SourceFacts, day: str, *, num_users: int = 200, seed: int = 0
) -> ParityReport:
    """Read a random sample of users online at the end of `day` and compare with the lake, exactly.

    Events that were pushed since the cut would be differences of the tail, so users with a tail event after the cut
    must not exist yet: the check runs before a cut serves.
    """
    from feature_repo.online import OnlineReader
    from feature_repo.store import online_state

    state = online_state(home)
    if state is not None and state.day > day:
        return ParityReport(0, 0, 0, 0, 0, "", state.day)
    schema = schema_for(facts)
    _, cut_us = day_bounds_us(facts, day)
    tables = load_tables(lake, facts, day, day)
    history = load_history(lake, facts.days[: facts.days.index(day) + 1], len(tables.user_id_U))
    chosen = np.random.default_rng(seed).permutation(len(tables.user_id_U))[:num_users]
    online = OnlineReader(home, schema).read([int(u) for u in tables.user_id_U[chosen]], cut_us)
    different = {"features": 0, "histories": 0, "unknown": 0}
    first, num_events = "", 0
    for code, user in zip(chosen, online, strict=True):
        begin = max(history.offset_U1[code], history.offset_U1[code + 1] - schema.history_length)
        events = slice(begin, history.offset_U1[code + 1])
        num_events += events.stop - events.start
        what = ""
        if not user.known:
            what = "unknown"
        elif not (
            np.array_equal(user.categorical, tables.user_categorical_UC[code])
            and np.array_equal(user.dense, tables.user_dense_UD[code])
        ):
            what = "features"
        elif not _same_events(user.history, history.item_E[events], history.time_E[events], history.kind_E[events]):
            what = "histories"
        if what:
            different[what] += 1
            first = first or f"user {user.user_id}: {what} differ online"
    return ParityReport(
        len(online), num_events, different["features"], different["histories"], different["unknown"], first, None
    )


def _same_events(online: np.ndarray, item: np.ndarray, time: np.ndarray, kind: np.ndarray) -> bool:  # type: ignore[type-arg]
    """Equal as sets of events: online they are ordered by time, offline by availability."""
    if len(online) != len(item):
        return False
    ours = np.lexsort((kind, item, time))
    theirs = np.lexsort((online["kind"], online["item"], online["time"]))
    return all(
        np.array_equal(online[name][theirs], values[ours])
        for name, values in (("item", item), ("time", time), ("kind", kind))
    )
