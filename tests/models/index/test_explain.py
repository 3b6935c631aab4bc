from __future__ import annotations

import pytest
import torch

from models.index.explain import found_ads, purity, view, visits
from models.index.publish import build_index
from models.index.search import beam_search
from models.index.terms import Terms
from tests.models.index.small import random_index, small_ads, small_model, small_users
from tests.models.index.test_covisits import covisiting_model


def test_purity_of_a_tree_by_topic_is_one_and_that_of_the_random_tree_is_not() -> None:
    ads = small_ads(60, torch.Generator().manual_seed(0))
    ads.group_NG[:, 0] = torch.arange(60) // 15 + 1
    model = small_model((4, 2))
    path_NL = torch.stack([ads.group_NG[:, 0] - 1, torch.arange(60) % 2], dim=1)
    index = build_index(model, ads, model.ad_vectors(ads), path_NL, ~ads.retired_N)
    first, second = purity(index, ["topic", "advertiser"])
    assert (first.num_nodes, second.num_nodes) == (4, 8)
    assert first.learned["topic"] == second.learned["topic"] == pytest.approx(1.0)
    assert first.random["topic"] < 0.6


def test_purity_is_weighted_by_the_ads_of_nodes() -> None:
    ads = small_ads(6, torch.Generator().manual_seed(0))
    ads.group_NG[:, 0] = torch.tensor([1, 1, 2, 3, 4, 4])
    model = small_model((2, 1))
    path_NL = torch.stack([torch.tensor([0, 0, 0, 0, 1, 1]), torch.zeros(6, dtype=torch.int64)], dim=1)
    index = build_index(model, ads, model.ad_vectors(ads), path_NL, ~ads.retired_N)
    # Four ads of which two share a topic, and two that share theirs: (2 + 2) / 6.
    assert purity(index, ["topic", "advertiser"])[0].learned["topic"] == pytest.approx(4 / 6)
    node = view(index, 1, 0, ["topic", "advertiser"])
    assert node.num_ads == 4
    assert node.values["topic"] == [(1, 0.5), (2, 0.25), (3, 0.25)]
    assert node.representative in ads.ad_id_N[:4].tolist()
    with pytest.raises(ValueError, match=r"node: 2 is not one of 0 .. 1 of level 1"):
        view(index, 1, 2, ["topic", "advertiser"])
    with pytest.raises(ValueError, match=r"level: 3 is not one of 1 .. 2"):
        view(index, 3, 0, ["topic", "advertiser"])


def test_visits_are_the_nodes_of_the_beam_best_first() -> None:
    generator = torch.Generator().manual_seed(2)
    ads, users = small_ads(80, generator), small_users(3, 80, generator)
    model = small_model((4, 4))
    index = random_index(model, ads, generator)
    state = model.user_state(users, ads)
    walked = visits(model, index, state, beams=(2, 3), k=5)
    found = beam_search(model, index, state, beams=(2, 3), k=5)
    assert [[len(level) for level in levels] for levels in walked] == [[2, 3]] * 3
    for row, levels in enumerate(walked):
        assert [v.node.node for v in levels[1]] == found.beam_LBW[1][row].tolist()
        scores = [v.score for v in levels[1]]
        assert scores == sorted(scores, reverse=True)
        assert [v.node.num_ads for v in levels[1]] == [
            int((index.levels[1].node_S == v.node.node).sum()) for v in levels[1]
        ]


def test_ads_of_an_answer_come_from_the_beam_or_are_related() -> None:
    model, num_ads = covisiting_model()
    generator = torch.Generator().manual_seed(2)
    ads, users = small_ads(num_ads, generator), small_users(6, num_ads, generator)
    index = random_index(model, ads, generator)
    with torch.no_grad():
        state = model.user_state(users, ads)
    terms = Terms(torch.arange(num_ads) % 4 == 0)
    found = beam_search(model, index, state, beams=(1, 2, 5), k=num_ads, terms=terms)
    walked = visits(model, index, state, beams=(1, 2, 5), k=num_ads, terms=terms)
    sources = set()
    for row, (answer, levels) in enumerate(zip(found_ads(index, found), walked, strict=True)):
        code_K = found.ad_code_BK[row][found.ad_code_BK[row] >= 0]
        assert not bool((code_K % 4 == 0).any())
        assert [ad.ad_id for ad in answer] == ads.ad_id_N[code_K].tolist()
        assert [ad.score for ad in answer] == found.score_BK[row, : len(code_K)].tolist()
        leaves = {visit.node.node for visit in levels[-1]}
        for code, ad in zip(code_K.tolist(), answer, strict=True):
            assert list(ad.path) == [int(level.node_N[code]) for level in index.levels]
            assert ad.source == ("beam" if ad.path[-1] in leaves else "related")
        sources |= {ad.source for ad in answer}
    assert sources == {"beam", "related"}
