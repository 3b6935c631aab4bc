"""What a request demands of an answer beside relevance: which ads may be shown, bids, and diversity.

These are part of the search, not a filter behind it: nodes without an ad that may be shown are not visited, nodes
are ranked by what their dearest ad could bring, and a cap is met by the short list, so that an answer is as long as it
can be. Both searches read the same terms, so that a beam that holds every node still returns what the scan returns.

Shape legend: B requests, N ad codes, S slots, K nodes of a level, L levels, M candidates, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from models.index.publish import Index


@dataclass(frozen=True)
class Auction:
    """Ads are ranked by expected value, log(click probability x bid), instead of by score."""

    log_bid_S: Tensor
    log_best_LK: tuple[Tensor, ...]
    """Of every node, the largest bid among its ads."""


@dataclass(frozen=True)
class Cap:
    """At most `limit` ads that share a known value of a group: no advertiser fills an answer alone."""

    group: int
    """Column of the schema's groups."""
    limit: int


@dataclass(frozen=True)
class Terms:
    """The terms of a batch of requests; without any, the best ads are the answer."""

    excluded: Tensor | None = None
    """Ads that must not be answered (targeting, budget, pacing, blocked): a bitmap [N], or one a request [B, N]."""
    auction: Auction | None = None
    cap: Cap | None = None

    def __post_init__(self) -> None:
        """Raise ValueError where the cap admits nothing."""
        if self.cap is not None and self.cap.limit < 1:
            raise ValueError(f"cap.limit: {self.cap.limit} is not at least 1")


NO_TERMS = Terms()


def auction(index: Index, bid_N: Tensor) -> Auction:
    """Prepare bids (per click, any currency) of every ad code; ads without a positive bid can't win.

    Raises:
        ValueError: a bid of a published ad is negative, or not finite.
    """
    bid_S = bid_N[index.ad_code_S].double()
    wrong_S = ~torch.isfinite(bid_S) | (bid_S < 0.0)
    if bool(wrong_S.any()):
        slot = int(wrong_S.nonzero()[0])
        raise ValueError(f"bid: {float(bid_S[slot])} of ad {int(index.ad_id_S[slot])} is not a number of at least 0")
    log_bid_S = bid_S.log().float()
    best = []
    for level in index.levels:
        best_K = torch.full((level.num_nodes,), -torch.inf)
        best.append(best_K.scatter_reduce(0, level.node_S, log_bid_S, "amax"))
    return Auction(log_bid_S, tuple(best))


def ranked(score_BM: Tensor, log_bid_BM: Tensor | None) -> Tensor:
    """What candidates are ranked by: their score, or log(click probability x bid)."""
    return score_BM if log_bid_BM is None else functional.logsigmoid(score_BM) + log_bid_BM


def excluded_slots(index: Index, excluded: Tensor, slot_BM: Tensor) -> Tensor:
    """Whether each request's candidate slots are excluded, [B, M]."""
    code_BM = index.ad_code_S[slot_BM]
    return excluded[code_BM] if excluded.dim() == 1 else excluded.gather(1, code_BM)


def open_nodes(index: Index, excluded: Tensor) -> list[Tensor]:
    """Whether the nodes of every level hold an ad that is not excluded, [K] or [B, K] each."""
    allowed_XS = ~excluded[..., index.ad_code_S]
    found: list[Tensor] = []
    below_XK = allowed_XS
    for level in reversed(index.levels):
        total_XK = functional.pad(below_XK.to(torch.int32).cumsum(-1), (1, 0))
        count_XK = total_XK[..., level.child_start_K1[1:]] - total_XK[..., level.child_start_K1[:-1]]
        below_XK = count_XK > 0
        found.insert(0, below_XK)
    return found


def over_cap(index: Index, cap: Cap, slot_BX: Tensor, there_BX: Tensor) -> Tensor:
    """Which places of lists of slots, best first, have `limit` better ones with the same value, [B, X].

    Ads whose value is unknown (code 0) are never over; places that are not there don't count.
    """
    value_BX = torch.where(there_BX, index.group_SG[:, cap.group][slot_BX], 0)
    order_BX = torch.argsort(value_BX, dim=1, stable=True)
    sorted_BX = value_BX.gather(1, order_BX)
    first_BX = torch.searchsorted(sorted_BX, sorted_BX)
    rank_BX = torch.arange(slot_BX.shape[1], device=slot_BX.device) - first_BX
    over_BX = torch.zeros_like(there_BX).scatter(1, order_BX, rank_BX >= cap.limit)
    return over_BX & (value_BX > 0)
