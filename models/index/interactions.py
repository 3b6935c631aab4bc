"""Interaction features of a user and a candidate, from the user's history (I2IF, HSNN arXiv 2408.06653 section 3).

The history is weighted once a request: every event counts by its kind and its age, in C channels of different
half-life. A feature is log(1 + weight of the events that share a value with the candidate): its category, its
advertiser, the ad itself; for nodes, their most frequent values weighted by the share of their ads that have them
(virtual features of HILL, arXiv 2604.12965), and all ads of the node. Many candidates look their values up in dense
counts, one gather a group whatever the length of the history; the one candidate of a training row is compared
with the events directly. Where the model counted co-visits (`models/index/covisits.py`), three more features say how
the candidate, or the ads of a node together, follow from the history. Features come first in every tensor, so that the
towers behind them are plain matrix products.

Shape legend: B requests, E events, G groups, V codes of a group, C channels (half-lives), S distinct
(request, ad) pairs of the histories, M candidates, R values kept per node and group, N ads, K channels of co-visits,
V' = C, or C + 3 with co-visits: features of the candidate itself, F = G C + V' features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.batch import AdTable, HistorySlice
from models.index import covisits
from models.index.covisits import CoVisits
from models.schema import FeatureSchema


@dataclass(frozen=True)
class Interest:
    """Weighted events of B histories; rows are contiguous and ascending."""

    start_B1: Tensor
    row_E: Tensor
    item_E: Tensor
    group_EG: Tensor
    weight_EC: Tensor
    num_codes_G: tuple[int, ...]
    """Largest group code of the ads + 1."""
    num_ads: int
    covisits: CoVisits | None = None
    target_B: Tensor | None = None
    """Training only: the positive of each row (-1: none), whose own part in the co-visits is left out."""

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.start_B1) - 1

    @property
    def num_channels(self) -> int:
        """C."""
        return self.weight_EC.shape[1]

    @cached_property
    def counts(self) -> tuple[Tensor, ...]:
        """Dense log counts per group [C, B, V]; code 0 (unknown) is always 0."""
        counts = []
        for g, num_codes in enumerate(self.num_codes_G):
            known = self.group_EG[:, g] > 0
            counts.append(self._total(self.group_EG[:, g], num_codes, known))
        return tuple(counts)

    @cached_property
    def distinct(self) -> tuple[Tensor, Tensor]:
        """Ascending `row * num_ads + ad` of the ads in the histories [S] and their total weights [S, C]."""
        key_S, place_E = torch.unique(self.row_E * self.num_ads + self.item_E, return_inverse=True)
        weight_SC = self.weight_EC.new_zeros((len(key_S), self.num_channels))
        return key_S, weight_SC.index_add(0, place_E, self.weight_EC)

    @cached_property
    def related(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row, ad and value [K] of every co-visited ad of every event."""
        assert self.covisits is not None
        return self.covisits.expand(self.start_B1, self.row_E, self.item_E, self.target_B)

    @cached_property
    def related_pairs(self) -> tuple[Tensor, Tensor]:
        """Ascending `row * num_ads + ad` of the co-visited ads and their total values [pairs, K]."""
        row_X, ad_X, value_XK = self.related
        key_Z, place_X = torch.unique(row_X * self.num_ads + ad_X, return_inverse=True)
        return key_Z, value_XK.new_zeros((len(key_Z), value_XK.shape[1])).index_add(0, place_X, value_XK)

    @torch.no_grad()
    def shares(self) -> list[Tensor]:
        """Share of each code in the history per group, [B, V], by the slowest channel; not differentiable."""
        weight_E = self.weight_EC[:, -1]
        mass_B = weight_E.new_zeros(self.num_rows).index_add(0, self.row_E, weight_E)
        share_E = weight_E / mass_B.clamp(min=1e-6)[self.row_E]
        shares = []
        for g, num_codes in enumerate(self.num_codes_G):
            share_X = share_E.new_zeros(self.num_rows * num_codes)
            share_X = share_X.index_add_(0, self.row_E * num_codes + self.group_EG[:, g], share_E)
            shares.append(share_X.view(self.num_rows, num_codes))
        return shares

    def _total(self, position_E: Tensor, num_positions: int, kept_E: Tensor) -> Tensor:
        event_X = kept_E.nonzero().squeeze(1)
        place_X = self.row_E[event_X] * num_positions + position_E[event_X]
        weight_XC, size = self.weight_EC[event_X], self.num_rows * num_positions
        totals = [weight_XC.new_zeros(size).index_add(0, place_X, weight_X) for weight_X in weight_XC.unbind(1)]
        return torch.log1p(torch.stack(totals)).view(self.num_channels, self.num_rows, num_positions)

    def shared(self, code_MG: Tensor) -> Tensor:
        """Group features [G C, B, M] of candidates that are the same for every request."""
        return torch.cat([count.index_select(2, code_MG[:, g]) for g, count in enumerate(self.counts)])

    def own(self, code_BMG: Tensor) -> Tensor:
        """Group features [G C, B, M] of each request's own candidates."""
        code_GBM = code_BMG.movedim(2, 0)
        return torch.cat(
            [count.gather(2, code_GBM[g].expand(len(count), -1, -1)) for g, count in enumerate(self.counts)]
        )

    def shared_nodes(self, value_MGR: Tensor, weight_MGR: Tensor) -> Tensor:
        """Group features [G C, B, M] of nodes: log counts averaged with the nodes' value weights."""
        total: Tensor | None = None
        for value_MG, weight_MG in zip(value_MGR.unbind(2), weight_MGR.unbind(2), strict=True):
            weight_F1M = weight_MG.T.repeat_interleave(self.num_channels, 0)[:, None]
            part_FBM = self.shared(value_MG) * weight_F1M
            total = part_FBM if total is None else total + part_FBM
        assert total is not None
        return total

    def own_nodes(self, value_BMGR: Tensor, weight_BMGR: Tensor) -> Tensor:
        """The same for each request's own nodes."""
        total: Tensor | None = None
        for value_BMG, weight_BMG in zip(value_BMGR.unbind(3), weight_BMGR.unbind(3), strict=True):
            weight_FBM = weight_BMG.movedim(2, 0).repeat_interleave(self.num_channels, 0)
            part_FBM = self.own(value_BMG) * weight_FBM
            total = part_FBM if total is None else total + part_FBM
        assert total is not None
        return total

    def matched(self, value_BGR: Tensor, weight_BGR: Tensor | None = None) -> Tensor:
        """Group features [G C, B, 1] of one candidate a request, without dense counts (R = 1 for ads)."""
        num_rows, num_groups, num_values = value_BGR.shape
        wanted_EGR = value_BGR[self.row_E]
        same_EGR = (wanted_EGR == self.group_EG[:, :, None]) & (wanted_EGR > 0)
        event_X, group_X, value_X = same_EGR.nonzero(as_tuple=True)
        place_X = (self.row_E[event_X] * num_groups + group_X) * num_values + value_X
        total = self.weight_EC.new_zeros((num_rows * num_groups * num_values, self.num_channels))
        total = total.index_add(0, place_X, self.weight_EC[event_X])
        feature_BGRC = torch.log1p(total).view(num_rows, num_groups, num_values, self.num_channels)
        if weight_BGR is not None:
            feature_BGRC = feature_BGRC * weight_BGR[..., None]
        return feature_BGRC.sum(2).flatten(1).T[:, :, None]

    def matched_positions(self, position_N: Tensor, wanted_B: Tensor) -> Tensor:
        """Features [V', B, 1]: how often the history visited one position a request (-1: none)."""
        position_E = position_N[self.item_E]
        event_X = ((position_E == wanted_B[self.row_E]) & (position_E >= 0)).nonzero().squeeze(1)
        total = self.weight_EC.new_zeros((self.num_rows, self.num_channels))
        total = total.index_add(0, self.row_E[event_X], self.weight_EC[event_X])
        visits_CB1 = torch.log1p(total).T[:, :, None]
        if self.covisits is None:
            return visits_CB1
        row_X, ad_X, value_XK = self.related
        position_X = position_N[ad_X]
        kept_X = ((position_X == wanted_B[row_X]) & (position_X >= 0)).nonzero().squeeze(1)
        total_BK = value_XK.new_zeros((self.num_rows, value_XK.shape[1]))
        total_BK = total_BK.index_add(0, row_X[kept_X], value_XK[kept_X])
        return torch.cat([visits_CB1, covisits.features(total_BK.T)[:, :, None]])

    def visits(self, position_N: Tensor, num_positions: int) -> Tensor:
        """How often the history visited each position, and how it follows from it, [V', B, positions].

        `position_N` maps ad codes to positions (slots of the index, nodes of a level, ...), -1 to none.
        """
        position_E = position_N[self.item_E]
        visits_CBX = self._total(position_E, num_positions, position_E >= 0)
        if self.covisits is None:
            return visits_CBX
        row_X, ad_X, value_XK = self.related
        position_X = position_N[ad_X]
        kept_X = (position_X >= 0).nonzero().squeeze(1)
        place_X = row_X[kept_X] * num_positions + position_X[kept_X]
        size = self.num_rows * num_positions
        totals = [value_X.new_zeros(size).index_add(0, place_X, value_X) for value_X in value_XK[kept_X].unbind(1)]
        total_KBX = torch.stack(totals).view(-1, self.num_rows, num_positions)
        return torch.cat([visits_CBX, covisits.features(total_KBX)])

    def seen(self, code_BM: Tensor) -> Tensor:
        """How often each request's own candidate ads stand in its history, and follow from it, [V', B, M]."""
        row_B1 = torch.arange(self.num_rows, device=code_BM.device)[:, None]
        wanted_X = (row_B1 * self.num_ads + code_BM).flatten()
        visits_CX = torch.log1p(_look_up(*self.distinct, wanted_X)).T
        if self.covisits is not None:
            visits_CX = torch.cat([visits_CX, covisits.features(_look_up(*self.related_pairs, wanted_X).T)])
        return visits_CX.reshape(-1, *code_BM.shape)

    def holds(self, code_BM: Tensor) -> Tensor:
        """Whether each request's own candidate ads stand in its history, [B, M]."""
        seen_BN = torch.zeros((self.num_rows, self.num_ads), dtype=torch.bool, device=code_BM.device)
        seen_BN[self.row_E, self.item_E] = True
        return seen_BN.gather(1, code_BM)

    def rows(self, row_X: Tensor) -> Interest:
        """The interest of some requests, renumbered in the given order."""
        start_X, length_X = self.start_B1[row_X], self.start_B1.diff()[row_X]
        start_X1 = functional.pad(torch.cumsum(length_X, 0), (1, 0))
        owner_E = torch.repeat_interleave(torch.arange(len(row_X), device=row_X.device), length_X)
        place_E = (start_X - start_X1[:-1])[owner_E] + torch.arange(len(owner_E), device=row_X.device)
        return Interest(
            start_B1=start_X1,
            row_E=owner_E,
            item_E=self.item_E[place_E],
            group_EG=self.group_EG[place_E],
            weight_EC=self.weight_EC[place_E],
            num_codes_G=self.num_codes_G,
            num_ads=self.num_ads,
            covisits=self.covisits,
            target_B=None if self.target_B is None else self.target_B[row_X],
        )


def _look_up(key_S: Tensor, value_SC: Tensor, wanted_X: Tensor) -> Tensor:
    """Values [X, C] of wanted keys; 0 where a key isn't among the ascending ones."""
    if len(key_S) == 0:
        return value_SC.new_zeros((len(wanted_X), value_SC.shape[1]))
    place_X = torch.searchsorted(key_S, wanted_X).clamp(max=len(key_S) - 1)
    return value_SC[place_X] * (key_S[place_X] == wanted_X)[:, None]


class InterestCounter(nn.Module):
    """Weights the events of histories. Learns how much an event of each kind counts in each channel."""

    half_life_C: Tensor

    def __init__(self, schema: FeatureSchema, half_lives_s: tuple[float, ...]) -> None:
        super().__init__()
        self.num_groups = len(schema.groups)
        self.kind_weight_KC = nn.Parameter(torch.full((max(1, len(schema.kinds)), len(half_lives_s)), 0.5413))
        self.register_buffer("half_life_C", torch.tensor(half_lives_s, dtype=torch.float32), persistent=False)

    @property
    def num_features(self) -> int:
        """F."""
        return (self.num_groups + 1) * len(self.half_life_C)

    def forward(self, history: HistorySlice, ads: AdTable) -> Interest:
        """Weigh the histories of B requests; items are ad codes of `ads`."""
        item_E = history.item_E.to(torch.int64)
        row_E = torch.repeat_interleave(
            torch.arange(history.num_rows, device=item_E.device), history.start_B1.diff(), output_size=len(item_E)
        )
        kind_EC = functional.softplus(self.kind_weight_KC)[history.kind_E.to(torch.int64)]
        return Interest(
            start_B1=history.start_B1,
            row_E=row_E,
            item_E=item_E,
            group_EG=ads.group_NG[item_E],
            weight_EC=kind_EC * torch.exp2(-history.age_E[:, None] / self.half_life_C),
            # Codes are contiguous: the largest one bounds the counts far below what the schema admits.
            num_codes_G=tuple(int(code) + 1 for code in ads.group_NG.amax(0)) if len(ads.ad_id_N) else (),
            num_ads=len(ads.ad_id_N),
        )
