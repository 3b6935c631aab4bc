"""Co-visitation between ads: which ads follow which, and which stand together in histories (I2IF of HSNN).

On sparse logs a richer product of towers learns nothing that counting does not know better: a first-order Markov
table with item-kNN beats published sequence models there. So the counts are features of the interaction tower. They
are counted once from the training sample, are part of the model (buffers of its weights), and are read by the
scan, the beam and the service in the same way. Channels of a pair (history ad i, candidate c), K = 2:

  next      n(i then c) / n(i then anything), from the newest event only (first-order Markov)
  together  n(i with c) / sqrt(n(i) n(c)), cosine of item-kNN, events weighted by `decay` ** rank

A training row's own event is among the counts. It is taken out again by adding what it contributed with a minus
sign, so that a row sees what all others did (leave-one-out target encoding); otherwise the tower would learn to
trust a count that is the label.

Shape legend: B requests, E events, X (request, ad) pairs with a value, N ads, Z stored pairs, K channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from models.batch import gather_history
from models.data import FrameData

NUM_CHANNELS = 2
TOGETHER_SHARE = 0.3
"""Weight of `together` beside `next` in the mix."""
SCALE = 100.0
"""Features are log(1 + SCALE * value): one shared user in a hundred is one unit of odds."""
BUFFERS = ("start_N1", "neighbour_Z", "value_ZK", "following_N", "popularity_N")


class CoVisits(nn.Module):
    """The table of pairs as buffers; empty until `fill` or until weights are loaded."""

    start_N1: Tensor
    neighbour_Z: Tensor
    value_ZK: Tensor
    following_N: Tensor
    popularity_N: Tensor

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("start_N1", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("neighbour_Z", torch.zeros(0, dtype=torch.int32))
        self.register_buffer("value_ZK", torch.zeros((0, NUM_CHANNELS)))
        self.register_buffer("following_N", torch.zeros(0))
        self.register_buffer("popularity_N", torch.zeros(0))

    @property
    def num_ads(self) -> int:
        """N, the ads that were known when the pairs were counted; newer ones have no neighbours."""
        return len(self.start_N1) - 1

    def resize(self, stored: Mapping[str, Tensor], prefix: str) -> None:
        """Make the buffers as large as those of stored weights, which then can be loaded."""
        for name in BUFFERS:
            if f"{prefix}{name}" in stored:
                setattr(self, name, torch.zeros_like(stored[f"{prefix}{name}"]))

    @torch.no_grad()
    def fill(self, days: Sequence[FrameData], *, history_length: int, max_neighbours: int) -> None:
        """Count pairs of the training samples of all days; `max_neighbours` of each ad are kept, best first."""
        num_ads = len(days[-1].ads.ad_id_N)
        parts = [_pairs(day, history_length) for day in days]
        before_X, after_X, newest_X = (np.concatenate([part[i] for part in parts]) for i in range(3))
        popularity_N = np.bincount(np.concatenate([part[3] for part in parts]), minlength=num_ads)
        following_N = np.bincount(before_X[newest_X], minlength=num_ads)
        next_key, next_count = np.unique(before_X[newest_X] * num_ads + after_X[newest_X], return_counts=True)
        both = np.concatenate([before_X * num_ads + after_X, after_X * num_ads + before_X])
        key_Z, together_Z = np.unique(both, return_counts=True)
        item_Z, other_Z = key_Z // num_ads, key_Z % num_ads
        value_ZK = np.zeros((len(key_Z), NUM_CHANNELS), np.float32)
        value_ZK[np.searchsorted(key_Z, next_key), 0] = next_count
        value_ZK[:, 0] /= np.maximum(following_N[item_Z], 1)
        value_ZK[:, 1] = together_Z / np.sqrt(np.maximum(popularity_N[item_Z] * popularity_N[other_Z], 1.0))
        kept = _best(item_Z, value_ZK[:, 0] + TOGETHER_SHARE * value_ZK[:, 1], max_neighbours)
        item_Z, other_Z, value_ZK = item_Z[kept], other_Z[kept], value_ZK[kept]
        self.start_N1 = torch.from_numpy(np.searchsorted(item_Z, np.arange(num_ads + 1)))
        self.neighbour_Z = torch.from_numpy(other_Z.astype(np.int32))
        self.value_ZK = torch.from_numpy(value_ZK)
        self.following_N = torch.from_numpy(np.maximum(following_N, 1).astype(np.float32))
        self.popularity_N = torch.from_numpy(np.maximum(popularity_N, 1).astype(np.float32))

    @torch.no_grad()
    def expand(
        self, start_B1: Tensor, row_E: Tensor, item_E: Tensor, target_B: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Row [X], ad [X] and value [X, K] of every neighbour of every event; the same pair may come several times.

        `target_B` (-1: none) takes each row's own contribution to its target out of the counts.
        """
        rank_E = start_B1[1:][row_E] - 1 - torch.arange(len(row_E), device=row_E.device)
        weight_EK = torch.stack([(rank_E == 0).float(), self.decay ** rank_E.float()], dim=1)
        known_E = item_E < self.num_ads
        row_E, item_E, weight_EK = row_E[known_E], item_E[known_E], weight_EK[known_E]
        first_E = self.start_N1[item_E]
        count_E = self.start_N1[item_E + 1] - first_E
        event_X = torch.repeat_interleave(torch.arange(len(item_E), device=item_E.device), count_E)
        place_X = torch.arange(len(event_X), device=item_E.device) + (first_E - count_E.cumsum(0) + count_E)[event_X]
        row_X, ad_X = row_E[event_X], self.neighbour_Z[place_X].to(torch.int64)
        value_XK = self.value_ZK[place_X] * weight_EK[event_X]
        if target_B is None:
            return row_X, ad_X, value_XK
        own_E = target_B[row_E] >= 0
        row_Y, item_Y = row_E[own_E], item_E[own_E]
        target_Y = target_B[row_Y]
        cosine_Y = (self.popularity_N[item_Y] * self.popularity_N[target_Y]).rsqrt()
        share_YK = torch.stack([self.following_N[item_Y].reciprocal(), cosine_Y], dim=1)
        own_YK = -share_YK * weight_EK[own_E]
        return torch.cat([row_X, row_Y]), torch.cat([ad_X, target_Y]), torch.cat([value_XK, own_YK])


def features(total_KX: Tensor) -> Tensor:
    """Features [3, ...] of summed values [K, ...]: the channels and their mix, on a log scale."""
    total_KX = total_KX.clamp(min=0.0)
    return torch.log1p(SCALE * torch.cat([total_KX, mixed(total_KX)[None]]))


def mixed(total_KX: Tensor) -> Tensor:
    """The mix [...] of summed values [K, ...]: how much an ad follows from a history."""
    return total_KX[0] + TOGETHER_SHARE * total_KX[1]


def _pairs(day: FrameData, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_], Any]:
    """History ad, target ad and whether the event is the newest, for every event before a positive; and the targets."""
    rows = day.rows(kept_only=True)
    rows = rows[day.label_RT[rows, 0] > 0.5]
    history = gather_history(
        day.history, day.user_code_R[rows], day.end_offset_R[rows], day.time_us_R[rows], length
    )  # fmt: skip
    row_E = torch.repeat_interleave(torch.arange(len(rows)), history.start_B1.diff())
    newest_E = torch.arange(len(row_E)) == history.start_B1[1:][row_E] - 1
    target_B = day.ad_code_R[rows]
    return (
        history.item_E.to(torch.int64).numpy(), target_B[row_E].numpy(), newest_E.numpy(), target_B.numpy(),
    )  # fmt: skip


def _best(item_Z: NDArray[np.int64], score_Z: NDArray[np.float32], limit: int) -> NDArray[np.int64]:
    """Places, ascending, of the `limit` pairs of every item with the highest score."""
    order = np.lexsort((-score_Z, item_Z))
    first_Z = np.searchsorted(item_Z[order], item_Z[order])
    return np.sort(order[np.arange(len(order)) - first_Z < limit])
