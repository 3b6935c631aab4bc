"""Two-resolution sequences: recent events stay raw, older ones are read in learned chunks that double in length.

The chunk that holds the events ranked R*2^j to R*2^(j+1) from the newest becomes q tokens by attention
pooling with learned queries, so 1,000 events cost R + q*log2(1000/R) tokens and every event is touched once,
in the jagged slice, without padding. (GEM's "pyramid-parallel" block; its layer shapes are not published.)

Pooling weights exp(s) depend on the ad and the kind of an event, not on its place. They are folded into a
table of the distinct (ad, kind) pairs of the batch, so pooling all events is one segment sum of table rows.

Shape legend: B rows, E events, R raw events kept a row, J chunks a row (J - 1 old ones and the recent one),
P distinct (ad, kind) pairs, q pooling queries, T tokens, d width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.batch import HistorySlice
from models.gem.embeddings import age_bucket, local_codes, transposed_sum

NUM_AGE_BUCKETS = 16
_MAX_SCORE = 6.0


class _SegmentSum(torch.autograd.Function):
    """Sum of table rows over contiguous segments; backward is the same sum over the transposed structure."""

    @staticmethod
    def forward(ctx: Any, table_Pd: Tensor, index_E: Tensor, bound_S1: Tensor) -> Tensor:
        ctx.save_for_backward(index_E, bound_S1)
        ctx.num_table_rows = table_Pd.shape[0]
        return functional.embedding_bag(index_E, table_Pd, bound_S1, mode="sum", include_last_offset=True)

    @staticmethod
    def backward(ctx: Any, grad_Sd: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        index_E, bound_S1 = ctx.saved_tensors
        segment_E = torch.repeat_interleave(torch.arange(len(bound_S1) - 1), bound_S1.diff())
        grad = transposed_sum(grad_Sd, index_E, segment_E, ctx.num_table_rows)
        return grad, None, None


def segment_sum(table_Pd: Tensor, index_E: Tensor, bound_S1: Tensor) -> Tensor:
    """`out[s] = sum of table[index[e]] for e in [bound[s], bound[s + 1])`, [S, d]; bounds cover all events."""
    out: Tensor = _SegmentSum.apply(table_Pd, index_E, bound_S1)  # type: ignore[no-untyped-call]
    return out


def num_chunks(history_length: int, num_recent: int) -> int:
    """J: the recent chunk and the doubling older ones that `history_length` events need."""
    return 1 + max(0, math.ceil(math.log2(max(1.0, history_length / num_recent))))


def chunk_bounds(start_B1: Tensor, num_recent: int, num_chunks: int) -> Tensor:
    """First event of every chunk, oldest chunk first, [B*J + 1]: a partition of all events in their order."""
    first_B, last_B = start_B1[:-1], start_B1[1:]
    # Chunk j (from the oldest) begins R*2^(J-1-j) events before the end; the oldest takes whatever is left.
    reach_J = num_recent * 2 ** torch.arange(num_chunks - 1, -1, -1)
    begin_BJ = torch.maximum(last_B[:, None] - reach_J, first_B[:, None])
    begin_BJ[:, 0] = first_B
    return torch.cat([begin_BJ.flatten(), start_B1[-1:]])


@dataclass(frozen=True)
class SequenceTokens:
    """Tokens of a jagged history: chunks (oldest first), then raw events (oldest first, right-aligned)."""

    token_BTd: Tensor
    valid_BT: Tensor
    """False where a row has no events for the token."""


class Pyramid(nn.Module):
    """History slices -> tokens [B, J*q + R, d]."""

    def __init__(
        self, *, num_kinds: int, num_surfaces: int, history_length: int, width: int, num_recent: int, num_queries: int
    ) -> None:
        super().__init__()
        self.num_kinds = num_kinds
        self.num_recent = num_recent
        self.num_queries = num_queries
        self.num_chunks = num_chunks(history_length, num_recent)
        self.num_surfaces = num_surfaces
        self.kind_Kd = nn.Parameter(0.02 * torch.randn(num_kinds, width))
        # Surface and age bucket of a raw event, read by a product with one-hot rows: few rows, many readers.
        self.place_Ad = nn.Parameter(0.02 * torch.randn(num_surfaces + NUM_AGE_BUCKETS, width))
        self.slot_Rd = nn.Parameter(torch.zeros(num_recent, width))
        self.chunk_Jqd = nn.Parameter(torch.zeros(self.num_chunks, num_queries, width))
        self.query = nn.Linear(width, num_queries)
        self.count = nn.Linear(1, width)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.num_chunks * self.num_queries + self.num_recent

    def forward(self, history: HistorySlice, item_E: Tensor, vector_Md: Tensor) -> SequenceTokens:
        """Tokens of histories whose events have items `item_E`, rows of `vector_Md` [M, d]."""
        kind_E = history.kind_E.to(torch.int64)
        pair_P, (pair_E,) = local_codes(vector_Md.shape[0] * self.num_kinds, item_E * self.num_kinds + kind_E)
        pair_Pd = vector_Md.index_select(0, pair_P // self.num_kinds) + self.kind_Kd.index_select(
            0, pair_P % self.num_kinds
        )
        chunk_Btd, chunk_valid_Bt = self._chunks(history.start_B1, pair_E, pair_Pd)
        raw_BRd, raw_valid_BR = self._recent(history, pair_E, pair_Pd)
        return SequenceTokens(torch.cat([chunk_Btd, raw_BRd], dim=1), torch.cat([chunk_valid_Bt, raw_valid_BR], dim=1))

    def _chunks(self, start_B1: Tensor, pair_E: Tensor, pair_Pd: Tensor) -> tuple[Tensor, Tensor]:
        num_rows, width = start_B1.shape[0] - 1, pair_Pd.shape[1]
        # Bounded scores need no maximum over the chunk before the exponential.
        weight_Pq = torch.exp(_MAX_SCORE * torch.tanh(self.query(pair_Pd) / _MAX_SCORE))
        table_Pqd = weight_Pq[:, :, None] * pair_Pd[:, None, :]
        table = torch.cat([table_Pqd.flatten(1), weight_Pq], dim=1)
        bound = chunk_bounds(start_B1, self.num_recent, self.num_chunks)
        total = segment_sum(table, pair_E, bound)
        sum_BJqd = total[:, : self.num_queries * width].view(num_rows, self.num_chunks, self.num_queries, width)
        weight_BJq = total[:, self.num_queries * width :].view(num_rows, self.num_chunks, self.num_queries)
        count_BJ = bound.diff().view(num_rows, self.num_chunks)
        mean_BJqd = sum_BJqd / weight_BJq.clamp(min=1e-6)[..., None]
        size_BJd = self.count(torch.log1p(count_BJ.to(torch.float32))[..., None])
        token = mean_BJqd + self.chunk_Jqd + size_BJd[:, :, None, :]
        valid_Bt = (count_BJ > 0)[:, :, None].expand(-1, -1, self.num_queries)
        return token.flatten(1, 2), valid_Bt.flatten(1, 2)

    def _recent(self, history: HistorySlice, pair_E: Tensor, pair_Pd: Tensor) -> tuple[Tensor, Tensor]:
        position_BR = history.start_B1[1:, None] - torch.arange(self.num_recent, 0, -1)
        valid_BR = position_BR >= history.start_B1[:-1, None]
        if pair_E.shape[0] == 0:
            return self.slot_Rd.expand(valid_BR.shape[0], -1, -1), valid_BR
        position_BR = position_BR.clamp(min=0)
        place_BRA = torch.zeros(*position_BR.shape, self.place_Ad.shape[0])
        place_BRA.scatter_(2, history.surface_E[position_BR].to(torch.int64)[..., None], 1.0)
        age_BR = age_bucket(history.age_E[position_BR], NUM_AGE_BUCKETS) + self.num_surfaces
        place_BRA.scatter_(2, age_BR[..., None], 1.0)
        raw_BRd = pair_Pd.index_select(0, pair_E[position_BR].flatten()).view(*position_BR.shape, -1)
        return raw_BRd + place_BRA @ self.place_Ad + self.slot_Rd, valid_BR
