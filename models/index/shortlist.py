"""The last step of both searches: a short list of the candidates, scored again pair by pair, sorted, and cut.

The short list is long enough that rounding can't have pushed a winner off it; the pair scores have a fixed order of
summation and ties are broken by ad id. So a beam that holds every node returns the same ads in the same order as
the scan, whatever the terms.

Shape legend: B requests, M candidates, X places of the short list, K results.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from models.index.monn import RetrievalModel, UserState
from models.index.publish import Index
from models.index.scoring import pair_scores
from models.index.terms import Cap, Terms, excluded_slots, over_cap, ranked

SLACK = 16
"""Results scored again beyond the K asked for."""
ROUNDING = 2e-5
"""Relative difference that two orders of summation may make in a score."""


def finish(
    model: RetrievalModel, index: Index, state: UserState, slot_BM: Tensor, score_BM: Tensor, k: int, terms: Terms, *,
    with_path: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Ad codes and values [B, k] of the best of each request's candidate slots, given their scores (-inf: absent)."""
    score_BM = score_BM.masked_fill(barred(model, index, state, slot_BM, terms), -torch.inf)
    value_BM = ranked(score_BM, log_bids(terms, slot_BM))
    place_BX = _short_list(index, slot_BM, value_BM, k, terms.cap)
    slot_BX, there_BX = slot_BM.gather(1, place_BX), value_BM.gather(1, place_BX) > -torch.inf
    exact_BX = pair_scores(model, index, state, slot_BX, with_path=with_path)
    exact_BX = ranked(exact_BX, log_bids(terms, slot_BX)).masked_fill(~there_BX, -torch.inf)
    order_BX = torch.argsort(index.ad_id_S[slot_BX], dim=1, stable=True)
    order_BX = order_BX.gather(1, _descending(exact_BX.gather(1, order_BX)))
    slot_BX, exact_BX = slot_BX.gather(1, order_BX), exact_BX.gather(1, order_BX)
    if terms.cap is not None:
        over_BX = over_cap(index, terms.cap, slot_BX, exact_BX > -torch.inf)
        exact_BX = exact_BX.masked_fill(over_BX, -torch.inf)
        order_BX = _descending(exact_BX)
        slot_BX, exact_BX = slot_BX.gather(1, order_BX), exact_BX.gather(1, order_BX)
    value_BK = exact_BX[:, :k]
    code_BK = index.ad_code_S[slot_BX[:, :k]].masked_fill(value_BK == -torch.inf, -1)
    missing = max(0, k - code_BK.shape[1])
    return functional.pad(code_BK, (0, missing), value=-1), functional.pad(value_BK, (0, missing), value=-torch.inf)


def barred(model: RetrievalModel, index: Index, state: UserState, slot_BM: Tensor, terms: Terms) -> Tensor:
    """Whether each request's candidate slots may not be answered, [B, M]: seen, where that bars them, or excluded."""
    barred_BM = torch.zeros_like(slot_BM, dtype=torch.bool)
    if model.config.exclude_seen:
        barred_BM |= state.interest.holds(index.ad_code_S[slot_BM])
    if terms.excluded is not None:
        barred_BM |= excluded_slots(index, terms.excluded, slot_BM)
    return barred_BM


def log_bids(terms: Terms, slot_BM: Tensor) -> Tensor | None:
    """Logs of the bids of candidate slots, None without an auction."""
    return None if terms.auction is None else terms.auction.log_bid_S[slot_BM]


def _descending(value_BX: Tensor) -> Tensor:
    return torch.argsort(value_BX, dim=1, descending=True, stable=True)


def _short_list(index: Index, slot_BM: Tensor, value_BM: Tensor, k: int, cap: Cap | None) -> Tensor:
    """Places of the best values, [B, >= k]: long enough that rounding can't have pushed a winner off it."""
    num_candidates = value_BM.shape[1]
    length = min(num_candidates, k + SLACK)
    while True:
        best_BX, place_BX = value_BM.topk(length, dim=1)
        if length == num_candidates:
            return place_BX
        admitted_BX = best_BX > -torch.inf
        if cap is not None:
            admitted_BX &= ~over_cap(index, cap, slot_BM.gather(1, place_BX), admitted_BX)
        filled_BX = admitted_BX.cumsum(1) >= k
        winner_B, last_B = best_BX.masked_fill(~filled_BX, -torch.inf).amax(1), best_BX[:, -1]
        if bool((last_B < winner_B - ROUNDING * (1.0 + winner_B.abs())).logical_or(last_B == -torch.inf).all()):
            return place_BX
        length = min(num_candidates, 4 * length)
