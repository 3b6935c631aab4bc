from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from models.index.config import RetrievalConfig
from models.index.monn import Standardise, newest
from tests.models.index.small import small_ads, small_config, small_model, small_users


def test_three_ways_of_scoring_agree() -> None:
    generator = torch.Generator().manual_seed(0)
    model, ads = small_model(), small_ads(25, generator)
    state = model.user_state(small_users(6, 25, generator), ads)
    vector_NQd = model.ad_vectors(ads)
    code_BM = torch.arange(25).expand(6, -1)
    feature_FBM = torch.cat([state.interest.own(ads.group_NG[code_BM]), state.interest.seen(code_BM)])
    over = model.level(2)
    shared_BM = over.shared(state.levels[2], vector_NQd, feature_FBM)
    assert shared_BM.shape == (6, 25)
    assert float(shared_BM.detach().std()) > 0.05
    assert_close(over.own(state.levels[2], vector_NQd[code_BM], feature_FBM), shared_BM, rtol=1e-4, atol=1e-5)
    assert_close(over.exactly(state.levels[2], vector_NQd[code_BM], feature_FBM), shared_BM, rtol=1e-4, atol=1e-5)


def test_exact_scores_do_not_depend_on_the_other_candidates() -> None:
    generator = torch.Generator().manual_seed(1)
    model, ads = small_model(), small_ads(25, generator)
    state = model.user_state(small_users(3, 25, generator), ads)
    over, vector_NQd = model.level(2), model.ad_vectors(ads)

    def score(code_BM: torch.Tensor) -> torch.Tensor:
        feature_FBM = torch.cat([state.interest.own(ads.group_NG[code_BM]), state.interest.seen(code_BM)])
        return over.exactly(state.levels[2], vector_NQd[code_BM], feature_FBM)

    whole_BM = score(torch.arange(25).expand(3, -1))
    for width in (1, 2, 3, 7):
        part_BM = score(torch.arange(5, 5 + width).expand(3, -1))
        assert torch.equal(part_BM, whole_BM[:, 5 : 5 + width])


def test_a_batch_of_users_is_its_users() -> None:
    generator = torch.Generator().manual_seed(2)
    model, ads = small_model(), small_ads(25, generator)
    state = model.user_state(small_users(5, 25, generator), ads)
    part = state.rows(torch.tensor([3, 1]))
    assert part.num_rows == 2
    assert_close(part.levels[0].vector_BPd, state.levels[0].vector_BPd[[3, 1]])
    assert_close(part.interest.counts[0], state.interest.counts[0][:, [3, 1]])


def test_ad_vectors_are_standardised_over_ads_and_content_moves_them() -> None:
    generator = torch.Generator().manual_seed(2)
    model, ads = small_model(), small_ads(30, generator)
    in_training_ND = model.train().ad_vectors(ads).flatten(1)
    assert_close(in_training_ND.mean(0), torch.zeros(16), atol=1e-5, rtol=0.0)
    assert_close(in_training_ND.var(0, correction=0), torch.full((16,), 1 / 8), atol=1e-3, rtol=0.0)
    model.ad_vectors(ads, torch.tensor([0]))  # one ad says nothing about the spread of ads
    vector_NQd = model.eval().ad_vectors(ads)
    before = vector_NQd[3].clone()
    ads.embedding_NM[3] += 1.0
    assert float((model.ad_vectors(ads, torch.tensor([3]))[0] - before).detach().norm()) > 1e-3


def test_histories_are_cut_at_the_newest_events() -> None:
    generator = torch.Generator().manual_seed(5)
    history = small_users(6, 25, generator, mean_length=10).history
    cut = newest(history, 3)
    for row in range(6):
        mine = history.item_E[history.start_B1[row] : history.start_B1[row + 1]][-3:]
        assert torch.equal(cut.item_E[cut.start_B1[row] : cut.start_B1[row + 1]], mine)
    assert newest(history, 1000) is history


def test_equal_seeds_give_equal_models_and_do_not_touch_the_global_generator() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    one, two, other = small_model(seed=1), small_model(seed=1), small_model(seed=2)
    assert torch.equal(torch.rand(1), expected)
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name
    assert not torch.equal(one.level(0).vectors.weight, other.level(0).vectors.weight)


def test_configuration_survives_json_and_refuses_wrong_lengths() -> None:
    config = small_config((3, 5))
    assert RetrievalConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match="hidden"):
        RetrievalConfig(level_sizes=(4, 4), hidden=(8, 8))
    with pytest.raises(ValueError, match="level_sizes"):
        RetrievalConfig(level_sizes=(), hidden=(8,), num_user_vectors=(2,))


def test_standardisation_follows_slowly_after_its_first_sample() -> None:
    layer = Standardise(1, momentum=0.1)
    layer(torch.tensor([[1.0], [3.0]]))
    assert layer.mean_D.tolist() == [2.0]
    assert layer.variance_D.tolist() == [1.0]
    for _ in range(20):
        layer(torch.tensor([[2.0], [2.0]]))
    before = float(layer.mean_D)
    layer(torch.tensor([[12.0], [12.0]]))
    assert float(layer.mean_D) == pytest.approx(before + 0.1 * (12.0 - before))
    frozen = layer.eval()(torch.tensor([[100.0]]))
    assert float(frozen) == pytest.approx((100.0 - float(layer.mean_D)) / float(layer.variance_D + 1e-6) ** 0.5)
