"""How a history and a candidate match: counts of events that share the candidate's attributes.

Interaction features of HSNN's I2IF kind (arXiv 2408.06653 section 3): for the candidate itself and for every
group (advertiser, category, ...) the number of events of each kind with the candidate's code, the age of the
last one, the number among the recent ones, and their share of the history with weights that halve with age.
They are what a dot product of towers can't represent.

Shape legend: B rows, E events, G groups, H = G + 1 attributes (the ad itself first), K kinds, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.batch import AdTable, HistorySlice

_LONG_AGO_LOG_HOURS = 8.0
_SCALE = 0.5
_SHARE_SCALE = 8.0
HALF_LIVES_S = (43_200.0, 604_800.0)
"""Half a day and a week: sudden and lasting interests."""


def num_match_features(num_groups: int, num_kinds: int) -> int:
    """F."""
    return (num_groups + 1) * (num_kinds + 2 + len(HALF_LIVES_S)) + num_kinds


def match_features(history: HistorySlice, ads: AdTable, ad_code_B: Tensor, num_kinds: int, num_recent: int) -> Tensor:
    """Features [B, F], float32, about 0..5: per attribute K log counts by kind, log count among the last
    `num_recent` events, closeness in time of the last match, and shares of the history by half-life; then K log
    counts of all events."""
    num_rows, start_B1 = history.num_rows, history.start_B1
    row_E = torch.repeat_interleave(torch.arange(num_rows, dtype=torch.int32), start_B1.diff())
    item_E = history.item_E
    decay = [_Decay(history, row_E, half_life) for half_life in HALF_LIVES_S]
    columns = []
    for attribute in range(ads.group_NG.shape[1] + 1):
        if attribute == 0:
            same_E = item_E == ad_code_B.to(item_E.dtype).index_select(0, row_E)
        else:
            code_N = ads.group_NG[:, attribute - 1].to(torch.int32)
            # Unknown candidates get -1, which no event has.
            wanted_B = code_N[ad_code_B].masked_fill(code_N[ad_code_B] == 0, -1)
            same_E = code_N.index_select(0, item_E) == wanted_B.index_select(0, row_E)
        match_X = same_E.nonzero().squeeze(1)
        row_X = row_E[match_X].to(torch.int64)
        columns.append(_attribute_features(history, match_X, row_X, num_kinds, num_recent))
        columns.append(torch.stack([d.share(match_X, row_X) for d in decay], dim=1))
    total_BK = _count_by_kind(history.kind_E, row_E, num_rows, num_kinds)
    columns.append(torch.log1p(total_BK))
    return torch.cat(columns, dim=1) * _SCALE


class _Decay:
    """Weights of events that halve with age, and the share of them that a set of events has."""

    def __init__(self, history: HistorySlice, row_E: Tensor, half_life_s: float) -> None:
        self.weight_E = torch.exp2(history.age_E * (-1.0 / half_life_s))
        self.total_B = torch.bincount(row_E, self.weight_E, minlength=history.num_rows) + 0.1

    def share(self, match_X: Tensor, row_X: Tensor) -> Tensor:
        """log(1 + 8 share) [B] of the matched events."""
        matched_B = torch.bincount(row_X, self.weight_E[match_X], minlength=len(self.total_B))
        return torch.log1p(_SHARE_SCALE * matched_B / self.total_B)


def _count_by_kind(kind_E: Tensor, row_E: Tensor, num_rows: int, num_kinds: int) -> Tensor:
    counts = torch.bincount(row_E.to(torch.int64) * num_kinds + kind_E, minlength=num_rows * num_kinds)
    return counts.view(num_rows, num_kinds).to(torch.float32)


def _attribute_features(
    history: HistorySlice, match_X: Tensor, row_X: Tensor, num_kinds: int, num_recent: int
) -> Tensor:
    num_rows = history.num_rows
    count_BK = _count_by_kind(history.kind_E[match_X], row_X, num_rows, num_kinds)
    is_recent_X = match_X >= history.start_B1[1:][row_X] - num_recent
    recent_B = torch.bincount(row_X[is_recent_X], minlength=num_rows).to(torch.float32)
    hours_X = torch.log1p(history.age_E[match_X] / 3600.0)
    last_B = torch.full((num_rows,), _LONG_AGO_LOG_HOURS).scatter_reduce_(0, row_X, hours_X, "amin")
    closeness_B = _LONG_AGO_LOG_HOURS - last_B.clamp(max=_LONG_AGO_LOG_HOURS)
    return torch.cat([torch.log1p(count_BK), torch.log1p(recent_B)[:, None], closeness_B[:, None]], dim=1)
