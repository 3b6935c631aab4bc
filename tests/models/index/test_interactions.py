from __future__ import annotations

import math

import torch
from torch.testing import assert_close

from models.batch import AdTable, HistorySlice
from models.index.interactions import Interest, InterestCounter
from tests.models.index.small import small_ads, small_model, small_schema, small_users

DAY = 86_400.0


def _counted() -> tuple[Interest, AdTable]:
    """Row 0: ad 1 twice (now, one day old), ad 2 once (now). Row 1: nothing. Row 2: ad 0 once, two days old."""
    generator = torch.Generator().manual_seed(0)
    ads = small_ads(4, generator)
    ads.group_NG[:] = torch.tensor([[1, 5], [2, 5], [2, 0], [3, 6]])
    history = HistorySlice(
        start_B1=torch.tensor([0, 3, 3, 4]),
        item_E=torch.tensor([1, 1, 2, 0], dtype=torch.int32),
        kind_E=torch.zeros(4, dtype=torch.uint8),
        surface_E=torch.zeros(4, dtype=torch.uint8),
        age_E=torch.tensor([DAY, 0.0, 0.0, 2 * DAY]),
    )
    counter = InterestCounter(small_schema(), (DAY, 1e12))
    with torch.no_grad():
        counter.kind_weight_KC.fill_(math.log(math.e - 1.0))  # softplus of this is 1
        return counter(history, ads), ads


def test_counts_are_logs_of_recency_weighted_events() -> None:
    interest, _ = _counted()
    topic_CBV, advertiser_CBV = interest.counts
    assert topic_CBV.shape == (2, 3, 4)
    # topic 2 of row 0: ad 1 (half weight after a half-life, full when new) and ad 2
    assert_close(topic_CBV[0, 0, 2], torch.tensor(math.log1p(0.5 + 1.0 + 1.0)))
    assert_close(topic_CBV[1, 0, 2], torch.tensor(math.log1p(3.0)))
    # advertiser 5: ad 1 only, for ad 2's is unknown and never counts
    assert_close(advertiser_CBV[0, 0, 5], torch.tensor(math.log1p(1.5)))
    assert float(advertiser_CBV[:, :, 0].abs().sum()) == 0.0
    assert float(topic_CBV[:, 1].abs().sum()) == 0.0
    assert_close(topic_CBV[0, 2, 1], torch.tensor(math.log1p(0.25)))


def test_seen_visits_and_matches_agree_with_the_history() -> None:
    interest, ads = _counted()
    seen_CBM = interest.seen(torch.tensor([[1, 3], [1, 3], [0, 1]]))
    assert_close(seen_CBM[0], torch.tensor([[math.log1p(1.5), 0.0], [0.0, 0.0], [math.log1p(0.25), 0.0]]))
    position_N = torch.tensor([0, 1, 1, -1])
    visits_CBX = interest.visits(position_N, 2)
    assert_close(visits_CBX[1], torch.tensor([[0.0, math.log1p(3.0)], [0.0, 0.0], [math.log1p(1.0), 0.0]]))
    wanted_B = torch.tensor([1, 0, -1])
    assert_close(interest.matched_positions(position_N, wanted_B)[1, :, 0], torch.tensor([math.log1p(3.0), 0.0, 0.0]))
    code_B = torch.tensor([1, 0, 0])
    own_FB1 = interest.own(ads.group_NG[code_B][:, None])
    assert_close(interest.matched(ads.group_NG[code_B][:, :, None]), own_FB1)


def test_every_way_of_looking_up_gives_the_same_features() -> None:
    generator = torch.Generator().manual_seed(3)
    model, ads = small_model(), small_ads(30, generator)
    user = small_users(5, 30, generator)
    interest = model.counter(user.history, ads)
    code_BM = torch.arange(30).expand(5, -1)
    assert_close(interest.shared(ads.group_NG), interest.own(ads.group_NG[code_BM]))
    assert_close(interest.seen(code_BM), interest.visits(torch.arange(30), 30))
    value_MGR = torch.stack([ads.group_NG, ads.group_NG.roll(1, 0)], dim=2)
    weight_MGR = torch.rand(30, 2, 2, generator=generator)
    shared_FBM = interest.shared_nodes(value_MGR, weight_MGR)
    assert_close(interest.own_nodes(value_MGR[code_BM], weight_MGR[code_BM]), shared_FBM)
    place_B = torch.tensor([3, 1, 4, 1, 5])
    matched_FB1 = interest.matched(value_MGR[place_B], weight_MGR[place_B])
    assert_close(matched_FB1[:, :, 0], shared_FBM[:, torch.arange(5), place_B])
    for share_BV in interest.shares():
        assert float(share_BV.sum(1).max()) <= 1.0 + 1e-5


def test_rows_of_an_interest_are_its_rows() -> None:
    generator = torch.Generator().manual_seed(4)
    model, ads = small_model(), small_ads(20, generator)
    interest = model.counter(small_users(6, 20, generator).history, ads)
    chosen = torch.tensor([4, 0, 4])
    part = interest.rows(chosen)
    for whole_CBV, part_CBV in zip(interest.counts, part.counts, strict=True):
        assert_close(part_CBV, whole_CBV[:, chosen])
    code_BM = torch.arange(20).expand(3, -1)
    assert_close(part.seen(code_BM), interest.seen(torch.arange(20).expand(6, -1))[:, chosen])
