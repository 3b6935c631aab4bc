"""From plain numpy columns to tensors: tables of users and ads, histories, and the rows of one day.

The arrays come from the training frame and the published feature cuts; row i of a table is code i. This module
knows nothing of where they are stored.

Shape legend: R rows of a day, B rows of a batch, T tasks, U users, N ads, E events; others as in models/batch.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.batch import AdTable, Batch, History, UserBatch, UserTable, gather_history
from models.schema import FeatureSchema

Columns = Mapping[str, NDArray[Any]]
"""Arrays by name; `vars()` of the features side's dataclasses is one."""


def _tensor(values: NDArray[Any], dtype: torch.dtype) -> Tensor:
    # Arrow hands out read-only buffers; torch wants to own what it may write to.
    return torch.from_numpy(np.array(values, copy=True)).to(dtype)


def _column(columns: Columns, name: str, dtype: torch.dtype) -> Tensor:
    if name not in columns:
        raise ValueError(f"column {name!r} is missing; there are {sorted(columns)}")
    return _tensor(columns[name], dtype)


def _stack(columns: Columns, names: list[str], dtype: torch.dtype) -> Tensor:
    return torch.stack([_column(columns, name, dtype) for name in names], dim=1).contiguous()


def _matrix(columns: Columns, name: str, width: int, dtype: torch.dtype) -> Tensor:
    values = _column(columns, name, dtype)
    if values.ndim != 2 or values.shape[1] != width:
        raise ValueError(f"{name}: shape {tuple(values.shape)}, the schema says {width} columns")
    return values


def to_user_table(arrays: Columns, schema: FeatureSchema) -> UserTable:
    """Arrays user_id_U, user_categorical_UC, user_dense_UD -> UserTable.

    Raises:
        ValueError: an array is missing, a number of columns differs from the schema, or a dense value isn't finite.
    """
    names = [f.name for f in schema.dense_of("user")]
    dense_UD = _matrix(arrays, "user_dense_UD", len(names), torch.float32)
    _check_finite("user", dense_UD, names)
    num_fields = len(schema.categorical_of("user"))
    return UserTable(
        user_id_U=_column(arrays, "user_id_U", torch.int64),
        categorical_UC=_matrix(arrays, "user_categorical_UC", num_fields, torch.int64),
        dense_UD=dense_UD,
    )


def to_ad_table(arrays: Columns, schema: FeatureSchema) -> AdTable:
    """Arrays ad_id_N, ad_categorical_NA, ad_dense_NF, ad_embedding_NM, ad_group_NG, ad_retired_N, ad_created_us_N,
    ad_bid_N -> AdTable.

    Raises:
        ValueError: an array is missing, a number of columns differs from the schema, or a dense value isn't finite.
    """
    names = [f.name for f in schema.dense_of("ad")]
    dense_NF = _matrix(arrays, "ad_dense_NF", len(names), torch.float32)
    _check_finite("ad", dense_NF, names)
    num_fields = len(schema.categorical_of("ad"))
    return AdTable(
        ad_id_N=_column(arrays, "ad_id_N", torch.int64),
        categorical_NA=_matrix(arrays, "ad_categorical_NA", num_fields, torch.int64),
        dense_NF=dense_NF,
        embedding_NM=_matrix(arrays, "ad_embedding_NM", schema.embedding_dim, torch.float32),
        group_NG=_matrix(arrays, "ad_group_NG", len(schema.groups), torch.int64),
        retired_N=_column(arrays, "ad_retired_N", torch.bool),
        created_us_N=_column(arrays, "ad_created_us_N", torch.int64),
        bid_N=_column(arrays, "ad_bid_N", torch.float32),
    )


def to_history(arrays: Columns) -> History:
    """Arrays offset_U1, item_E, time_E, kind_E, surface_E -> History (item int32, time int64, kind and surface uint8).

    Raises:
        ValueError: the offsets don't end at the number of events.
    """
    history = History(
        offset_U1=_column(arrays, "offset_U1", torch.int64),
        item_E=_column(arrays, "item_E", torch.int32),
        time_E=_column(arrays, "time_E", torch.int64),
        kind_E=_column(arrays, "kind_E", torch.uint8),
        surface_E=_column(arrays, "surface_E", torch.uint8),
    )
    if int(history.offset_U1[-1]) != len(history.item_E):
        raise ValueError(f"offset: ends at {int(history.offset_U1[-1])}, there are {len(history.item_E)} events")
    return history


def _check_finite(role: str, dense: Tensor, names: list[str]) -> None:
    bad = ~torch.isfinite(dense).all(dim=0)
    if bool(bad.any()):
        raise ValueError(f"dense {role} features are not finite: {[n for n, b in zip(names, bad, strict=True) if b]}")


@dataclass(frozen=True)
class FrameData:
    """The impressions of one day with everything needed to make batches of them. Row = row of the training frame."""

    schema: FeatureSchema
    users: UserTable
    ads: AdTable
    history: History
    user_code_R: Tensor
    ad_code_R: Tensor
    surface_R: Tensor
    hour_R: Tensor
    time_us_R: Tensor
    end_offset_R: Tensor
    label_RT: Tensor
    mature_RT: Tensor
    keep_R: Tensor
    """True for rows of the training sample."""
    teacher_RT: Tensor
    """Logits of the teacher, NaN where there are none."""
    negative_rate: float
    """Probability with which rows without the main label are kept."""
    drawn_negatives: bool = False
    """True for positives-only logs: rows without the main label were drawn from all ads, in every row of the day."""

    @classmethod
    def from_columns(
        cls,
        schema: FeatureSchema,
        frame: Columns,
        users: UserTable,
        ads: AdTable,
        history: History,
        *,
        negative_rate: float,
        drawn_negatives: bool = False,
    ) -> FrameData:
        """Build from the columns of a training frame (user_code, ad_code, surface, hour, timestamp_us, end_offset,
        keep, label_<task>, mature_<task>).

        Raises:
            ValueError: `negative_rate` is outside (0, 1], a column is missing, or a code is outside its table.
        """
        if not 0.0 < negative_rate <= 1.0:
            raise ValueError(f"negative_rate: {negative_rate} is outside (0, 1]")
        user_code_R = _column(frame, "user_code", torch.int64)
        ad_code_R = _column(frame, "ad_code", torch.int64)
        for name, code, size in (
            ("user_code", user_code_R, len(users.user_id_U)),
            ("ad_code", ad_code_R, len(ads.ad_id_N)),
        ):
            if len(code) and (int(code.min()) < 0 or int(code.max()) >= size):
                raise ValueError(f"{name}: values {int(code.min())}..{int(code.max())}, the table has {size} rows")
        num_rows = len(user_code_R)
        tasks = [t.name for t in schema.tasks]
        return cls(
            schema=schema,
            users=users,
            ads=ads,
            history=history,
            user_code_R=user_code_R,
            ad_code_R=ad_code_R,
            surface_R=_column(frame, "surface", torch.int64),
            hour_R=_column(frame, "hour", torch.int64),
            time_us_R=_column(frame, "timestamp_us", torch.int64),
            end_offset_R=_column(frame, "end_offset", torch.int64),
            label_RT=_stack(frame, [f"label_{t}" for t in tasks], torch.float32),
            mature_RT=_stack(frame, [f"mature_{t}" for t in tasks], torch.float32),
            keep_R=_column(frame, "keep", torch.bool),
            teacher_RT=torch.full((num_rows, len(tasks)), math.nan),
            negative_rate=negative_rate,
            drawn_negatives=drawn_negatives,
        )

    @property
    def judged_offset(self) -> float:
        """What metrics add to true logits so that they are those of the rows that exist.

        0 where the rows are all impressions. Drawn negatives make the rows a sample of all (request, ad) pairs, and
        its log-odds are higher; metrics then compare with drawn negatives and must say so.
        """
        return -math.log(self.negative_rate) if self.drawn_negatives else 0.0

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.user_code_R)

    def with_teacher(self, teacher_RT: Tensor) -> FrameData:
        """The same day with teacher logits [R, T] (NaN where unlabelled)."""
        if teacher_RT.shape != self.label_RT.shape:
            raise ValueError(f"teacher: shape {tuple(teacher_RT.shape)}, expected {tuple(self.label_RT.shape)}")
        return replace(self, teacher_RT=teacher_RT.to(torch.float32))

    def only_surface(self, surface: int) -> FrameData:
        """The same day with a training sample of one surface: what a vertical trains on."""
        return replace(self, keep_R=self.keep_R & (self.surface_R == surface))

    def rows(self, *, kept_only: bool = False, surface: int | None = None) -> Tensor:
        """Row numbers, ascending: of the training sample only, of one surface only."""
        wanted_R = self.keep_R if kept_only else torch.ones_like(self.keep_R)
        if surface is not None:
            wanted_R = wanted_R & (self.surface_R == surface)
        return wanted_R.nonzero().squeeze(1)

    def user_batch(self, rows_B: Tensor) -> UserBatch:
        """The user side of the given rows: attributes, statistics, history up to the request, context."""
        user_code_B = self.user_code_R[rows_B]
        return UserBatch(
            categorical_BC=self.users.categorical_UC[user_code_B],
            dense_BD=self.users.dense_UD[user_code_B],
            history=gather_history(
                self.history,
                user_code_B,
                self.end_offset_R[rows_B],
                self.time_us_R[rows_B],
                self.schema.history_length,
            ),
            surface_B=self.surface_R[rows_B],
            hour_B=self.hour_R[rows_B],
        )

    def batch(self, rows_B: Tensor) -> Batch:
        """The given rows as a batch.

        `logit_offset_B` is -log(negative_rate): sampling multiplies the odds of the main label by its inverse,
        so a logit plus the offset fits the sample and the logit alone is true (King and Zeng 2001, prior
        correction). Rows outside the training sample get the same offset; don't train on them.
        """
        return Batch(
            user=self.user_batch(rows_B),
            ad_code_B=self.ad_code_R[rows_B],
            label_BT=self.label_RT[rows_B],
            mature_BT=self.mature_RT[rows_B],
            logit_offset_B=torch.full((len(rows_B),), -math.log(self.negative_rate)),
            teacher_BT=self.teacher_RT[rows_B],
        )

    def batches(
        self, batch_size: int, *, generator: torch.Generator | None = None, rows: Tensor | None = None
    ) -> Iterator[Batch]:
        """All given rows (default: the training sample) in batches, shuffled when a generator is given.

        The last batch may be smaller; none is empty.
        """
        rows_R = self.rows(kept_only=True) if rows is None else rows
        if generator is not None:
            rows_R = rows_R[torch.randperm(len(rows_R), generator=generator)]
        for first in range(0, len(rows_R), batch_size):
            yield self.batch(rows_R[first : first + batch_size])

    def pairs(self, rows_B: Tensor, ad_code_B: Tensor) -> Batch:
        """Unlabelled pairs: the user side of given rows with other ads. No label is mature, no teacher is set."""
        num_tasks = len(self.schema.tasks)
        return Batch(
            user=self.user_batch(rows_B),
            ad_code_B=ad_code_B,
            label_BT=torch.zeros((len(rows_B), num_tasks)),
            mature_BT=torch.zeros((len(rows_B), num_tasks)),
            logit_offset_B=torch.zeros(len(rows_B)),
            teacher_BT=torch.full((len(rows_B), num_tasks), math.nan),
        )

    def random_pairs(self, num_pairs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Uniformly drawn rows and live ads for `pairs`: what a retrieval scores, unlike what was shown."""
        live = (~self.ads.retired_N).nonzero().squeeze(1)
        rows_B = torch.randint(self.num_rows, (num_pairs,), generator=generator)
        return rows_B, live[torch.randint(len(live), (num_pairs,), generator=generator)]
