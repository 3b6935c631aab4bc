"""The tail of a history: merging pushed events into it, and joining it to the packed batch history.

Plain numpy, no store: the rules that the online reader, a replay and the tests share.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from feature_repo.days import MICROSECONDS
from feature_repo.history_bytes import HISTORY_EVENT

PUSHED_EVENT = np.dtype([("event_id", "<i8"), ("time_us", "<i8"), ("item", "<i4"), ("kind", "u1"), ("surface", "u1")])
"""An event as it is pushed: item is the ad code, kind and surface are codes of the schema."""

TAIL_KEY = np.dtype([("event_id", "<i8"), ("time_us", "<i8")])
"""What the tail keeps beside its 10 bytes an event, to order and to recognise it."""

_RAW = np.dtype((np.void, HISTORY_EVENT.itemsize))


def merge_tail(
    tail: NDArray[Any], keys: NDArray[Any], events: NDArray[Any], history_length: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Merge pushed events into a tail: one event an id (the first one stays), by (time, event_id), newest kept.

    Args:
        tail: `HISTORY_EVENT` rows.
        keys: `TAIL_KEY` rows beside them.
        events: `PUSHED_EVENT` rows in any order.
        history_length: how many of the newest events stay.
    """
    new_tail, new_keys = np.empty(len(events), HISTORY_EVENT), np.empty(len(events), TAIL_KEY)
    for name in ("item", "kind", "surface"):
        new_tail[name] = events[name]
    new_tail["time"] = events["time_us"] // MICROSECONDS
    for name in ("event_id", "time_us"):
        new_keys[name] = events[name]
    all_tail, all_keys = np.concatenate([tail, new_tail]), np.concatenate([keys, new_keys])
    _, first = np.unique(all_keys["event_id"], return_index=True)
    order = first[np.lexsort((all_keys["event_id"][first], all_keys["time_us"][first]))][-history_length:]
    return all_tail[order], all_keys[order]


def join_history(history: NDArray[Any], tail: NDArray[Any], history_length: int, now_s: int) -> NDArray[Any]:
    """Batch history followed by those events of the tail that it does not hold; the newest `history_length`.

    That is the order of the event log: what became known after the cut stands behind what was known before it.
    Where the batch history is full, events of the tail that are not younger than its oldest were cut off and stay out.
    Events from after `now_s` are dropped.
    """
    if len(tail) and len(history):
        tail = _not_in(tail, history)
        if len(history) >= history_length:
            tail = tail[tail["time"] > history["time"].min()]
    joined = np.concatenate([history, tail]) if len(tail) else history
    if len(joined) and joined["time"].max() > now_s:
        joined = joined[joined["time"] <= now_s]
    return joined[-history_length:]


def _not_in(tail: NDArray[Any], history: NDArray[Any]) -> NDArray[Any]:
    """Events of the tail that do not occur, byte for byte, in the history."""
    recent = history[history["time"] >= tail["time"].min()]
    held = set(recent.view(_RAW).tolist())
    return tail[[event not in held for event in tail.view(_RAW).tolist()]]
