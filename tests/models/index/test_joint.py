from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from models.index.audit import answer, draw_requests
from models.index.config import RetrievalConfig, RetrievalTraining
from models.index.joint import TeacherPairs, next_engagements, train_retrieval
from models.index.losses import scale_gradient
from models.index.publish import publish
from models.metrics import auc, recall_at_k
from tests.models.index.small import small_config
from tests.models.worlds import make_world

WORLD = make_world(num_users=150, num_ads=200, num_days=3, rows_per_day=1500)
TRAINING = RetrievalTraining(
    batch_size=128, epochs=2, refresh_every=5, beam_rows=8, beam_every=2, beam_best=10, ads_per_step=128, queue_length=8
)
OF_INDEX = ("index.", "ensemble_LL", "sharpness_L", "preranker.")
CONFIG = replace(small_config(), training=TRAINING)


def _train(config: RetrievalConfig = CONFIG, **options: object):  # type: ignore[no-untyped-def]
    return train_retrieval(config, WORLD.schema, WORLD.days[:2], seed=0, **options)  # type: ignore[arg-type]


def test_joint_training_learns_clicks_and_an_index_that_finds_its_own_best_ads() -> None:
    seen: list[tuple[int, int]] = []
    model, report = _train(progress=lambda step, total, losses: seen.append((step, total)))
    assert seen[-1][0] == seen[-1][1] == report.num_steps
    data = WORLD.days[2]
    index = publish(model, data.ads)
    assert index.levels[0].num_nodes >= 3
    assert index.levels[1].num_nodes >= 12
    rows = data.rows()
    with torch.no_grad():
        state = model.user_state(data.user_batch(rows), data.ads)
        code_BM = data.ad_code_R[rows][:, None]
        feature = torch.cat([state.interest.own(data.ads.group_NG[code_BM]), state.interest.seen(code_BM)])
        logit_B = model.level(2).own(state.levels[2], model.ad_vectors(data.ads)[code_BM], feature)[:, 0]
    assert auc(data.label_RT[:, 0].numpy(), logit_B.numpy()) > 0.6
    (requests,) = draw_requests(data, [100], seed=0)
    beam, exact = answer(model, index, data, requests.row_B, [(2, 6), "exact"], k=5)
    covered = float(recall_at_k(beam.ad_code_BK, exact.ad_code_BK).mean())
    assert covered > 1.3 * float(beam.ads_B.mean()) / index.num_ads


def test_equal_seeds_train_equal_models_and_the_control_sees_the_same_rows() -> None:
    one, _ = _train()
    two, _ = _train()
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name
    control, report = _train(with_index=False)
    assert report.num_steps == _train(with_index=False)[1].num_steps
    assert "beam" not in report.losses
    fresh = _train(replace(CONFIG, training=replace(TRAINING, epochs=1)), with_index=False)[0]
    assert torch.equal(fresh.index.codebook_LKD[0], control.index.codebook_LKD[0])


@pytest.mark.parametrize("learner", ["joint", "em", "separate", "random"])
def test_without_gradient_from_the_levels_the_scorer_is_bit_for_bit_that_of_the_control(learner: str) -> None:
    model, _ = _train(replace(CONFIG, learner=learner))
    control, _ = _train(with_index=False)
    scorer = {n for n in model.state_dict() if not n.startswith((*OF_INDEX, "levels.0.", "levels.1."))}
    assert "levels.2.hidden_HX" in scorer
    for name in scorer:
        assert torch.equal(model.state_dict()[name], control.state_dict()[name]), name
    assert not torch.equal(model.level(0).hidden_HX, control.level(0).hidden_HX)


def test_a_gradient_from_the_levels_changes_the_scorer() -> None:
    model, _ = _train(replace(CONFIG, training=replace(TRAINING, trunk_gradient=1.0)))
    control, _ = _train(with_index=False)
    assert not torch.equal(model.level(2).hidden_HX, control.level(2).hidden_HX)


def test_a_teacher_moves_logits_towards_its_own() -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for day in WORLD.days[:2]:
        code_XJ = torch.randint(200, (300, 4), generator=generator)
        quality_XJ = day.ads.dense_NF[code_XJ, 0]
        pairs.append(TeacherPairs(torch.arange(300), code_XJ, 2.0 + quality_XJ))
    with_teacher = replace(CONFIG, training=replace(TRAINING, distillation_weight=1.0, learning_rate=0.02))
    _, report = _train(with_teacher, pairs=pairs, with_index=False)
    assert report.losses["distillation"] < 1.5  # from about 25: untrained logits lie near those of the click rate
    with pytest.raises(ValueError, match="pairs: 1 entries for 2 days"):
        _train(pairs=pairs[:1])


def test_a_warm_start_keeps_codebooks() -> None:
    model, _ = _train()
    still = replace(TRAINING, epochs=1, learning_rate=1e-9, table_learning_rate=1e-9, follow_rate=0.0, reseed_below=0.0)
    short = replace(CONFIG, training=still)
    again, report = train_retrieval(short, WORLD.schema, WORLD.days[:1], seed=1, initial=model)
    assert report.nodes_moved == 0
    torch.testing.assert_close(again.index.codebook_LKD[0], model.index.codebook_LKD[0], rtol=0.0, atol=1e-4)


def test_next_engagements_are_the_events_after_the_request() -> None:
    data = WORLD.days[0]
    rows = torch.arange(50)
    place, item = next_engagements(data, rows, 1000)
    for p, i in zip(place.tolist(), item.tolist(), strict=True):
        user, end = int(data.user_code_R[rows[p]]), int(data.end_offset_R[rows[p]])
        event = int(data.history.offset_U1[user]) + end
        assert int(data.history.item_E[event]) == i
        assert int(data.history.time_E[event]) >= int(data.time_us_R[rows[p]]) // 1_000_000
    assert len(next_engagements(data, rows, 5)[0]) == 5


def test_scaled_gradients() -> None:
    value = torch.tensor([2.0], requires_grad=True)
    (scale_gradient(value, 0.25) * 3.0).sum().backward()
    assert value.grad is not None
    assert float(value.grad) == pytest.approx(0.75)
    assert not scale_gradient(value, 0.0).requires_grad
    assert scale_gradient(value, 1.0) is value


def test_no_days_are_refused() -> None:
    with pytest.raises(ValueError, match="days"):
        train_retrieval(CONFIG, WORLD.schema, [], seed=0)
