from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from models.index.config import LEARNERS, RetrievalTraining
from models.index.joint import train_retrieval
from models.index.learners import ad_paths
from models.index.monn import RetrievalModel
from models.index.publish import publish
from models.index.search import beam_search, exact_search
from tests.models.index.small import small_ads, small_config, small_schema
from tests.models.worlds import make_world

WORLD = make_world(num_users=120, num_ads=150, num_days=2, rows_per_day=1200)
TRAINING = RetrievalTraining(
    batch_size=128, epochs=2, refresh_every=4, beam_rows=8, beam_every=2, beam_best=10, ads_per_step=64, queue_length=8
)
CONFIG = replace(small_config(), training=TRAINING)


def _train(learner: str, **options: object):  # type: ignore[no-untyped-def]
    config = replace(CONFIG, learner=learner)
    return train_retrieval(config, WORLD.schema, WORLD.days[:1], seed=0, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("learner", LEARNERS)
def test_every_learner_gives_an_index_whose_full_beam_is_the_scan(learner: str) -> None:
    model, report = _train(learner)
    data = WORLD.days[1]
    index = publish(model, data.ads)
    assert report.num_steps > 0
    assert index.num_ads == int((~data.ads.retired_N).sum())
    state = model.user_state(data.user_batch(torch.arange(20)), data.ads)
    beam = beam_search(model, index, state, beams=index.level_sizes, k=7)
    exact = exact_search(model, index, state, 7)
    assert torch.equal(beam.ad_code_BK, exact.ad_code_BK)


def test_a_separate_index_leaves_the_scorer_as_the_control_has_it() -> None:
    separate, report = _train("separate")
    control, _ = _train("separate", with_index=False)
    assert "softmax" not in report.losses
    moved = [n for n, value in separate.state_dict().items() if not torch.equal(value, control.state_dict()[n])]
    assert moved
    assert all(
        name.startswith(("levels.0.", "levels.1.", "ensemble_LL", "sharpness_L", "index.", "preranker."))
        for name in moved
    )


def test_codebooks_of_em_move_at_its_rounds_only() -> None:
    seen: list[torch.Tensor] = []
    model = RetrievalModel(replace(CONFIG, learner="em"), WORLD.schema, 0)

    def watch(step: int, total: int, losses: dict[str, float]) -> None:
        seen.append(model.index.codebook_LKD[0].detach().clone())

    _train("em", build=lambda config, schema, seed: model, progress=watch)
    changes = sum(not torch.equal(a, b) for a, b in itertools.pairwise(seen))
    assert 1 <= changes <= TRAINING.em_rounds


def test_natural_paths_are_category_then_advertiser_and_random_ones_are_even() -> None:
    generator = torch.Generator().manual_seed(0)
    ads = small_ads(4_000, generator)
    natural = RetrievalModel(replace(small_config((5, 7)), learner="natural"), small_schema()).eval()
    path_NL = ad_paths(natural, ads, natural.ad_vectors(ads))
    assert torch.equal(path_NL, ads.group_NG % torch.tensor([5, 7]))
    random = RetrievalModel(replace(small_config((5, 7)), learner="random"), small_schema()).eval()
    drawn_NL = ad_paths(random, ads, random.ad_vectors(ads))
    count_X = torch.bincount(drawn_NL[:, 0] * 7 + drawn_NL[:, 1], minlength=35)
    assert int(count_X.min()) > 0.7 * 4_000 / 35
    assert int(count_X.max()) < 1.3 * 4_000 / 35
    again = replace(ads, ad_id_N=ads.ad_id_N.flip(0))
    assert torch.equal(ad_paths(random, again, random.ad_vectors(again)), drawn_NL.flip(0))


def test_nodes_without_codebooks_are_the_means_of_their_ads() -> None:
    generator = torch.Generator().manual_seed(1)
    ads = small_ads(60, generator)
    model = RetrievalModel(replace(small_config((3, 2)), learner="natural"), small_schema()).eval()
    index = publish(model, ads)
    level = index.levels[1]
    for node in range(level.num_nodes):
        mean_Qd = index.vector_SQd[level.node_S == node].mean(0)
        torch.testing.assert_close(level.vector_KQd[node], mean_Qd)


def test_an_unknown_learner_is_refused() -> None:
    with pytest.raises(ValueError, match="learner: 'tree' is unknown; known learners: joint, em, separate"):
        replace(small_config(), learner="tree")
