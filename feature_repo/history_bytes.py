"""The packed form of a history, as Feast stores it: 10 bytes an event, little-endian, oldest first.

The layout is that of the event log: item_code int32, time_s uint32, kind uint8, surface uint8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from feature_repo.training_tables import HistoryArrays
from models.schema import HISTORY_BYTES_PER_EVENT

HISTORY_EVENT = np.dtype([("item", "<i4"), ("time", "<u4"), ("kind", "u1"), ("surface", "u1")])
"""One event of a history."""

assert HISTORY_EVENT.itemsize == HISTORY_BYTES_PER_EVENT


def pack_histories(history: HistoryArrays, history_length: int) -> pa.BinaryArray:
    """The newest `history_length` events of every user; row = user code, empty where there are none."""
    count_U = np.diff(history.offset_U1)
    kept_U = np.minimum(count_U, history_length)
    offset_U1 = np.concatenate([[0], np.cumsum(kept_U)])
    begin_U = history.offset_U1[1:] - kept_U
    place_E = np.repeat(begin_U - offset_U1[:-1], kept_U) + np.arange(int(offset_U1[-1]))
    event_E = np.empty(len(place_E), HISTORY_EVENT)
    event_E["item"] = history.item_E[place_E]
    event_E["time"] = history.time_E[place_E]
    event_E["kind"] = history.kind_E[place_E]
    event_E["surface"] = history.surface_E[place_E]
    offsets = pa.py_buffer((offset_U1 * HISTORY_EVENT.itemsize).astype(np.int64))
    large = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(count_U), [None, offsets, pa.py_buffer(event_E)])
    return large.cast(pa.binary())


def unpack_history(packed: bytes) -> NDArray[Any]:
    """Inverse for one user: a read-only structured array of `HISTORY_EVENT`."""
    return np.frombuffer(packed, HISTORY_EVENT)
