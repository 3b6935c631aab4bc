from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from models.index.losses import (
    beam_loss,
    click_softmax,
    distillation_loss,
    engagement_loss,
    ensemble_loss,
    forward,
    impression_loss,
    node_softmax,
    pseudo_ad_losses,
    score_nodes,
    scorer_losses,
)
from models.index.monn import RetrievalModel
from models.index.publish import publish
from models.index.scoring import all_node_logits
from models.index.search import exact_search
from tests.models.index.small import small_config
from tests.models.worlds import World, make_world

WORLD = make_world(num_users=40, num_ads=50, num_days=1, rows_per_day=200)


def _model(world: World = WORLD) -> RetrievalModel:
    return RetrievalModel(small_config(), world.schema, 0)


def test_the_offset_makes_sampled_logits_true() -> None:
    """With negatives kept at rate r, the loss is least at the true logit: its gradient vanishes there."""
    batch = WORLD.days[0].batch(torch.arange(200))
    rate, truth = 0.5, 0.1
    num_clicks = 100
    kept_negatives = round(num_clicks / truth * (1 - truth) * rate)
    size = num_clicks + kept_negatives
    label_B1 = (torch.arange(size) < num_clicks).float()[:, None]
    sampled = replace(
        batch, label_BT=label_B1, mature_BT=torch.ones(size, 1), logit_offset_B=torch.full((size,), -math.log(rate))
    )
    logit = torch.tensor(math.log(truth / (1 - truth)), requires_grad=True)
    impression_loss(logit.expand(size), sampled).backward()
    assert logit.grad is not None
    assert abs(float(logit.grad)) < 1e-4


def test_immature_rows_do_not_count() -> None:
    batch = WORLD.days[0].batch(torch.arange(4))
    none = replace(batch, mature_BT=torch.zeros_like(batch.mature_BT))
    assert float(impression_loss(torch.tensor([9.0, -9.0, 3.0, 0.0]), none)) == 0.0


def test_softmax_weights_candidates_by_what_they_stand_for() -> None:
    logit_YX = torch.tensor([[1.0, 2.0, 0.0]])
    weight_X = torch.tensor([1.0, 3.0, 2.0])
    expected = -math.log(3 * math.e**2 / (math.e + 3 * math.e**2 + 2))
    assert float(click_softmax(logit_YX, weight_X.log(), torch.tensor([1]))) == pytest.approx(expected, rel=1e-5)
    assert float(click_softmax(logit_YX[:0], weight_X.log(), torch.zeros(0, dtype=torch.int64))) == 0.0


def test_scorer_logits_of_clicked_rows_are_those_of_search() -> None:
    model, data = _model().eval(), WORLD.days[0]
    rows = torch.arange(60)
    with torch.no_grad():
        step = forward(model, data.batch(rows), data.ads)
        losses, logit_YU = scorer_losses(model, step)
        index = publish(model, data.ads)
        state = model.user_state(data.user_batch(rows[step.row_Y]), data.ads)
        scan = exact_search(model, index, state, 50, ad_scorer=True)
    place_N = torch.full((50,), -1)
    place_N[step.code_U] = torch.arange(len(step.code_U))
    for row in range(len(step.row_Y)):
        shared = place_N[scan.ad_code_BK[row]]
        assert_close(logit_YU[row, shared[shared >= 0]], scan.score_BK[row, shared >= 0], rtol=1e-4, atol=1e-5)
    assert set(losses) == {"impressions", "softmax"}
    weight_U = step.log_weight_U.exp()
    batch = step.batch
    shown = torch.where(batch.label_BT[:, 0] > 0.5, 1.0, 2.0).sum()  # negatives are kept at one in two
    assert_close(weight_U.sum(), shown)


def test_distillation_ignores_pairs_without_a_teacher() -> None:
    model, data = _model(), WORLD.days[0]
    code_BJ = torch.randint(50, (6, 4), generator=torch.Generator().manual_seed(0))
    batch = data.pairs(torch.arange(6), code_BJ[:, 0])
    nothing = distillation_loss(model, batch, data.ads, code_BJ, torch.full((6, 4), math.nan))
    assert float(nothing.detach()) == 0.0
    teacher_BJ = torch.zeros(6, 4)
    teacher_BJ[3:] = math.nan
    half = distillation_loss(model, batch, data.ads, code_BJ, teacher_BJ)
    only = distillation_loss(
        model, data.pairs(torch.arange(3), code_BJ[:3, 0]), data.ads, code_BJ[:3], torch.zeros(3, 4)
    )
    # statistics of the batch standardise the ads, so both are taken in evaluation mode
    model.eval()
    half = distillation_loss(model, batch, data.ads, code_BJ, teacher_BJ)
    only = distillation_loss(
        model, data.pairs(torch.arange(3), code_BJ[:3, 0]), data.ads, code_BJ[:3], torch.zeros(3, 4)
    )
    assert_close(half, only, rtol=1e-4, atol=1e-6)


def test_engagements_are_corrected_by_their_frequency() -> None:
    model, data = _model().eval(), WORLD.days[0]
    trunk_XT = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    item_X = torch.tensor([1, 1, 2, 3, 1, 2, 1, 1])
    with torch.no_grad():
        model.engagement.weight.zero_()
        model.engagement.bias.zero_()
        uniform_N = torch.full((50,), -math.log(50))
        loss = engagement_loss(model, trunk_XT, data.ads, item_X, uniform_N)
        assert float(loss) == pytest.approx(math.log(3), rel=1e-5)
        popular_N = torch.full((50,), 0.01).log()
        popular_N[1] = math.log(0.5)
        # popular items are discounted, so that missing their extra weight costs more than log 3
        assert float(engagement_loss(model, trunk_XT, data.ads, item_X, popular_N)) > math.log(3)


def test_node_scores_of_training_are_those_of_search() -> None:
    model, data = _model().eval(), WORLD.days[0]
    index = publish(model, data.ads)
    with torch.no_grad():
        state = model.user_state(data.user_batch(torch.arange(7)), data.ads)
        nodes = score_nodes(model, index, state, beam_width=2)
        weight = model.ensemble_weights()[1, 0]
        root_YK = all_node_logits(model, index, state, 0)
        assert_close(nodes.logit_LYK[0], root_YK)
        leaf = index.levels[1]
        parent_X = torch.repeat_interleave(
            torch.arange(len(index.levels[0].path_KL)), index.levels[0].child_start_K1.diff()
        )
        assert_close(nodes.score_LYK[1], all_node_logits(model, index, state, 1) + weight * root_YK[:, parent_X])
    assert nodes.visited_LYK[0].all()
    kept = root_YK.topk(2, dim=1).indices
    for row in range(7):
        parents = set(parent_X[nodes.visited_LYK[1][row]].tolist())
        assert parents == set(kept[row].tolist())
    assert leaf.num_nodes == nodes.visited_LYK[1].shape[1]


def test_losses_of_levels_reach_what_they_should() -> None:
    model, data = _model(), WORLD.days[0]
    index = publish(model, data.ads)
    step = forward(model, data.batch(torch.arange(100)), data.ads)
    _, logit_YU = scorer_losses(model, step)
    training = replace(model.config.training, beam_rows=8, beam_best=5)

    def gradients(loss: torch.Tensor) -> set[str]:
        model.zero_grad(set_to_none=True)
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        return {
            n for n, p in model.named_parameters() if p.grad is not None and float(p.grad.to_dense().abs().sum()) > 0
        }

    quantised = model.index(step.vector_UQd.detach().flatten(1), 1.0)
    impressions, gap = pseudo_ad_losses(model, step, index, quantised.pseudo_LND)
    reached = gradients(impressions)
    assert {"index.codebook_LKD.0", "index.codebook_LKD.1", "levels.0.vectors.weight"} <= reached
    assert "ad_tower.net.0.weight" not in reached
    assert not any(name.startswith("levels.2") for name in reached)
    assert not any(name.startswith("levels.2") for name in gradients(gap))
    nodes = score_nodes(model, index, step.clicked, 2)
    log_shown_N = torch.zeros(50)
    assert "index.codebook_LKD.1" in gradients(node_softmax(index, step, nodes, log_shown_N))
    assert gradients(ensemble_loss(model, index, step, logit_YU, nodes)) == {"ensemble_LL"}
    reached = gradients(beam_loss(model, index, step.clicked, nodes, training, 0))
    assert "levels.1.output_H" in reached
    assert "ad_tower.net.0.weight" not in reached
    assert not any(name.startswith("levels.2") for name in reached)


def test_beam_loss_is_least_when_nodes_rank_like_their_ads() -> None:
    model, data = _model().eval(), WORLD.days[0]
    index = publish(model, data.ads)
    training = replace(model.config.training, beam_rows=4, beam_best=3, beam_scan=1)
    with torch.no_grad():
        state = model.user_state(data.user_batch(torch.arange(4)), data.ads)
        nodes = score_nodes(model, index, state, 4)
        best = exact_search(model, index, state, 3)
        scores = []
        for level in index.levels:
            target = torch.zeros(4, level.num_nodes).scatter_add(
                1, level.node_N[best.ad_code_BK], torch.full((4, 3), 1 / 3)
            )
            scores.append(torch.where(target > 0, target.log(), -1e4))
        perfect = replace(nodes, score_LYK=tuple(scores))
        worse = replace(nodes, score_LYK=tuple(torch.zeros_like(s) for s in scores))
        assert float(beam_loss(model, index, state, perfect, training, 0)) < float(
            beam_loss(model, index, state, worse, training, 0)
        )


def test_only_the_first_clicked_rows_reach_the_levels() -> None:
    model, data = _model().eval(), WORLD.days[0]
    index = publish(model, data.ads)
    with torch.no_grad():
        step = forward(model, data.batch(torch.arange(100)), data.ads)
        assert len(step.row_Y) > 5
        few = step.first(5)
        assert torch.equal(few.row_Y, step.row_Y[:5])
        whole, part = score_nodes(model, index, step.clicked, 2), score_nodes(model, index, few.clicked, 2)
        assert_close(part.logit_LYK[1], whole.logit_LYK[1][:5], rtol=1e-4, atol=1e-5)
    assert len(step.first(1000).row_Y) == len(step.row_Y)


def test_beam_loss_turns_through_all_ads() -> None:
    """Over all turns, each ad of the corpus is scanned once; the targets of a turn are nodes of its sample."""
    model, data = _model().eval(), WORLD.days[0]
    index = publish(model, data.ads)
    training = replace(model.config.training, beam_rows=4, beam_best=8, beam_scan=4)
    with torch.no_grad():
        state = model.user_state(data.user_batch(torch.arange(4)), data.ads)
        nodes = score_nodes(model, index, state, 4)
        losses = {float(beam_loss(model, index, state, nodes, training, turn)) for turn in range(4)}
        again = float(beam_loss(model, index, state, nodes, training, 4))
    assert len(losses) > 1
    assert again in losses
