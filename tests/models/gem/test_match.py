"""Match features against counts made by hand."""

from __future__ import annotations

import math

import torch

from models.batch import AdTable, HistorySlice
from models.gem.match import match_features, num_match_features


def _ads(groups: list[list[int]]) -> AdTable:
    num = len(groups)
    return AdTable(
        ad_id_N=torch.arange(num), categorical_NA=torch.zeros(num, 0, dtype=torch.int64), dense_NF=torch.zeros(num, 0),
        embedding_NM=torch.zeros(num, 0), group_NG=torch.tensor(groups), retired_N=torch.zeros(num, dtype=torch.bool),
        created_us_N=torch.zeros(num, dtype=torch.int64), bid_N=torch.zeros(num),
    )  # fmt: skip


def _shares(matched_ages: list[float], all_ages: list[float]) -> list[float]:
    """log(1 + 8 share) for half-lives of half a day and a week."""
    values = []
    for half_life in (43_200.0, 604_800.0):
        matched, total = (sum(2.0 ** (-age / half_life) for age in ages) for ages in (matched_ages, all_ages))
        values.append(math.log1p(8.0 * matched / (total + 0.1)))
    return values


def test_counts_by_hand() -> None:
    # Ads 0 and 1 share topic 1; ad 2 has topic 2; ad 3 is of unknown topic.
    ads = _ads([[1], [1], [2], [0]])
    first, second = [7200.0, 3600.0, 100.0, 0.0], [50.0, 20.0]
    history = HistorySlice(
        start_B1=torch.tensor([0, 4, 6]),
        item_E=torch.tensor([0, 1, 2, 0, 3, 3], dtype=torch.int32),
        kind_E=torch.tensor([0, 1, 0, 0, 1, 1], dtype=torch.uint8),
        surface_E=torch.zeros(6, dtype=torch.uint8),
        age_E=torch.tensor(first + second),
    )
    features = match_features(history, ads, torch.tensor([1, 3]), num_kinds=2, num_recent=2) / 0.5
    assert features.shape == (2, num_match_features(1, 2))
    assert features.dtype == torch.float32
    log = math.log1p
    # Row 0, candidate 1. Itself: one event of kind 1, not recent, one hour ago.
    # Topic 1: kinds 0, 1, 0, one of them recent, the last one just now. All: kinds 0 three times, 1 once.
    itself = [0.0, log(1), 0.0, 8.0 - log(1), *_shares([3600.0], first)]
    topic = [log(2), log(1), log(1), 8.0, *_shares([7200.0, 3600.0, 0.0], first)]
    torch.testing.assert_close(features[0], torch.tensor([*itself, *topic, log(3), log(1)]))
    # Row 1, candidate 3: itself twice, both recent; an unknown topic matches nothing.
    itself = [0.0, log(2), log(2), 8.0 - log(20.0 / 3600.0), *_shares(second, second)]
    torch.testing.assert_close(features[1], torch.tensor([*itself, *[0.0] * 6, 0.0, log(2)]))


def test_empty_histories_give_zeros() -> None:
    history = HistorySlice(
        torch.tensor([0, 0]), torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.uint8),
        torch.zeros(0, dtype=torch.uint8), torch.zeros(0),
    )  # fmt: skip
    features = match_features(history, _ads([[1]]), torch.tensor([0]), num_kinds=2, num_recent=2)
    assert float(features.abs().sum()) == 0.0
