"""Tensors that models read: tables of users and ads, histories, rows, and the batches gathered from them.

Shape legend: B rows of a batch, U users, N ads, E events, A categorical and F dense fields of ads,
C categorical and D dense fields of users, G groups, M creative embedding width, T tasks.
A user's or ad's code is its row in the tables; codes are append-only, so a code means the same thing every day.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class UserTable:
    """All users as of one published cut; row = user code."""

    user_id_U: Tensor
    categorical_UC: Tensor
    dense_UD: Tensor


@dataclass(frozen=True)
class AdTable:
    """All ads as of one published cut; row = ad code (= item code of histories)."""

    ad_id_N: Tensor
    categorical_NA: Tensor
    dense_NF: Tensor
    embedding_NM: Tensor
    group_NG: Tensor
    """Contiguous group codes, int64; 0 is unknown."""
    retired_N: Tensor
    created_us_N: Tensor
    bid_N: Tensor
    """Bid per click in the source's currency, float32; 0 where an ad has none."""


@dataclass(frozen=True)
class History:
    """Events of all users, stored once, sorted by (user, available_at, timestamp, event_id).

    Events of user u are `[offset[u], offset[u + 1])`; the first n of them are what was known when
    `end_offset` was n.
    """

    offset_U1: Tensor
    item_E: Tensor
    time_E: Tensor
    """Seconds since the epoch, int64 in memory."""
    kind_E: Tensor
    surface_E: Tensor


@dataclass(frozen=True)
class HistorySlice:
    """Jagged histories of B rows, oldest event first: row b owns `[start_B1[b], start_B1[b + 1])`."""

    start_B1: Tensor
    item_E: Tensor
    kind_E: Tensor
    surface_E: Tensor
    age_E: Tensor
    """Seconds between the event and the request, float32, >= 0."""

    @property
    def num_rows(self) -> int:
        """B."""
        return self.start_B1.shape[0] - 1


@dataclass(frozen=True)
class UserBatch:
    """Everything the user side of a request is: attributes, statistics, history, context."""

    categorical_BC: Tensor
    dense_BD: Tensor
    history: HistorySlice
    surface_B: Tensor
    hour_B: Tensor
    """Local hour of day, 0..23, int64."""

    def to(self, device: torch.device) -> UserBatch:
        """The same on another device."""
        moved: UserBatch = _to(self, device)
        return moved


@dataclass(frozen=True)
class Batch:
    """A batch of (user, ad) pairs with labels. Pair b is user row b with ad `ad_code_B[b]`."""

    user: UserBatch
    ad_code_B: Tensor
    label_BT: Tensor
    """0/1 float32."""
    mature_BT: Tensor
    """1 where the label is known for sure (attribution window passed), else 0."""
    logit_offset_B: Tensor
    """Added to a logit in the loss so that training on down-sampled negatives stays calibrated."""
    teacher_BT: Tensor
    """Teacher's logits, NaN where there is none."""

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        moved: Batch = _to(self, device)
        return moved


def _to(value: Any, device: torch.device) -> Any:
    moved = {}
    for f in fields(value):
        part = getattr(value, f.name)
        moved[f.name] = part.to(device) if isinstance(part, Tensor) else _to(part, device)
    return type(value)(**moved)


def gather_history(
    history: History, user_code_B: Tensor, end_offset_B: Tensor, time_us_B: Tensor, max_length: int
) -> HistorySlice:
    """The last `max_length` events before `end_offset` of each row, as a jagged slice without padding."""
    first_B = history.offset_U1[user_code_B]
    length_B = end_offset_B.clamp(max=max_length)
    start_B1 = torch.zeros(len(user_code_B) + 1, dtype=torch.int64)
    torch.cumsum(length_B, 0, out=start_B1[1:])
    begin_B = first_B + end_offset_B - length_B
    row_E = torch.repeat_interleave(torch.arange(len(user_code_B)), length_B)
    position_E = begin_B[row_E] + torch.arange(int(start_B1[-1])) - start_B1[row_E]
    age_E = (time_us_B // 1_000_000)[row_E] - history.time_E[position_E]
    return HistorySlice(
        start_B1=start_B1,
        item_E=history.item_E[position_E],
        kind_E=history.kind_E[position_E],
        surface_E=history.surface_E[position_E],
        age_E=age_E.clamp(min=0).to(torch.float32),
    )
