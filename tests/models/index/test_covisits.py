"""Co-visits counted by hand, seen alike by every reader, and without a row's own part in training."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from models.batch import HistorySlice
from models.data import FrameData
from models.index.cost import candidate_cost
from models.index.covisits import SCALE, TOGETHER_SHARE, CoVisits, features
from models.index.joint import train_retrieval
from models.index.monn import RetrievalModel, aged_by_order
from models.index.publish import publish
from models.index.scoring import scan_scores
from models.index.search import beam_search, exact_search
from models.index.storage import load_model, save_model
from tests.models.index.small import random_index, small_ads, small_config, small_schema, small_users
from tests.models.worlds import make_world

# Users' sequences: 0: 1 2 3, 1: 1 2, 2: 2 3. Every event but a user's first is a row with the earlier ones before it.
SEQUENCES = ((1, 2, 3), (1, 2), (2, 3))


def by_hand() -> FrameData:
    """The three sequences as one day of positives over the ads of a random world."""
    world = make_world(num_users=3, num_ads=6, num_days=1, rows_per_day=10)
    day = world.days[0]
    items = [item for sequence in SEQUENCES for item in sequence]
    rows = [(user, place) for user, sequence in enumerate(SEQUENCES) for place in range(len(sequence))]
    length = torch.tensor([len(s) for s in SEQUENCES])
    history = replace(
        day.history,
        offset_U1=torch.nn.functional.pad(length.cumsum(0), (1, 0)),
        item_E=torch.tensor(items, dtype=torch.int32),
        time_E=torch.arange(len(items)),
        kind_E=torch.zeros(len(items), dtype=torch.uint8),
        surface_E=torch.zeros(len(items), dtype=torch.uint8),
    )
    count = len(rows)
    return replace(
        day,
        history=history,
        user_code_R=torch.tensor([user for user, _ in rows]),
        ad_code_R=torch.tensor(items),
        surface_R=torch.zeros(count, dtype=torch.int64),
        hour_R=torch.zeros(count, dtype=torch.int64),
        time_us_R=torch.full((count,), 10**9),
        end_offset_R=torch.tensor([place for _, place in rows]),
        label_RT=torch.ones(count, 2),
        mature_RT=torch.ones(count, 2),
        keep_R=torch.ones(count, dtype=torch.bool),
        teacher_RT=torch.full((count, 2), math.nan),
    )


def counted(max_neighbours: int = 8) -> CoVisits:
    table = CoVisits(decay=0.5)
    table.fill([by_hand()], history_length=8, max_neighbours=max_neighbours)
    return table


def value(table: CoVisits, item: int, other: int) -> list[float]:
    first, last = int(table.start_N1[item]), int(table.start_N1[item + 1])
    place = (table.neighbour_Z[first:last] == other).nonzero().squeeze(1)
    return table.value_ZK[first + int(place)].tolist() if len(place) else [0.0, 0.0]


def test_counts_are_those_of_the_sequences() -> None:
    table = counted()
    assert table.num_ads == 6
    # 1 is followed by 2 twice (of two), 2 by 3 twice (of two: user 1 stops there); 1 and 3 meet in user 0 only.
    assert value(table, 1, 2) == pytest.approx([1.0, 2 / math.sqrt(2 * 3)])
    assert value(table, 2, 3) == pytest.approx([1.0, 2 / math.sqrt(3 * 2)])
    assert value(table, 1, 3) == pytest.approx([0.0, 1 / math.sqrt(2 * 2)])
    assert value(table, 3, 1) == pytest.approx([0.0, 1 / math.sqrt(2 * 2)]), "together is symmetric, next is not"
    assert value(table, 0, 1) == [0.0, 0.0]


def test_only_the_best_neighbours_are_kept() -> None:
    table = counted(max_neighbours=1)
    assert len(table.neighbour_Z) == 3
    assert value(table, 1, 3) == [0.0, 0.0]
    assert value(table, 1, 2)[0] == 1.0


def totals(table: CoVisits, items: list[int], target: int | None) -> Tensor:
    """Summed values [ads, K] of one history."""
    start_B1 = torch.tensor([0, len(items)])
    row_E, item_E = torch.zeros(len(items), dtype=torch.int64), torch.tensor(items)
    target_B = None if target is None else torch.tensor([target])
    _, ad_X, value_XK = table.expand(start_B1, row_E, item_E, target_B)
    return torch.zeros(6, 2).index_add(0, ad_X, value_XK)


def test_older_events_weigh_less_and_only_the_newest_is_followed() -> None:
    total = totals(counted(), [1, 2], None)
    together = 1 / math.sqrt(2 * 2) * 0.5 + 2 / math.sqrt(3 * 2)
    assert total[3].tolist() == pytest.approx([1.0, together])


def test_a_training_row_does_not_see_itself() -> None:
    total = totals(counted(), [1, 2], 3)
    # Without user 0: 2 is followed by 3 once of two; together 2-3 once, 1-3 never.
    assert total[3].tolist() == pytest.approx([0.5, 1 / math.sqrt(3 * 2)], abs=1e-6)
    other = totals(counted(), [1, 2], None)
    assert_close(total[[1, 2]], other[[1, 2]], msg="other candidates keep their counts")


def test_features_are_log_odds_of_shares() -> None:
    total_K1 = torch.tensor([[0.1], [0.2]])
    mix = 0.1 + TOGETHER_SHARE * 0.2
    expected = [math.log1p(SCALE * v) for v in (0.1, 0.2, mix)]
    assert features(total_K1).squeeze(1).tolist() == pytest.approx(expected)
    assert features(torch.tensor([[-1e-7], [0.0]])).tolist() == [[0.0], [0.0], [0.0]]


def covisiting_model(seed: int = 0) -> tuple[RetrievalModel, int]:
    """A small untrained model with a random table of pairs."""
    num_ads, generator = 40, torch.Generator().manual_seed(seed)
    config = replace(small_config(), covisit_neighbours=8, exclude_seen=True, ages_by_order=True)
    model = RetrievalModel(config, small_schema(), seed)
    assert model.covisits is not None
    table = model.covisits
    table.start_N1 = torch.arange(num_ads + 1) * 8
    table.neighbour_Z = torch.randint(num_ads, (num_ads * 8,), generator=generator).to(torch.int32)
    table.value_ZK = torch.rand(num_ads * 8, 2, generator=generator)
    table.following_N, table.popularity_N = torch.ones(num_ads), torch.ones(num_ads)
    return model.eval(), num_ads


@torch.no_grad()
def test_every_reader_gives_the_same_features() -> None:
    model, num_ads = covisiting_model()
    generator = torch.Generator().manual_seed(1)
    ads, users = small_ads(num_ads, generator), small_users(5, num_ads, generator)
    interest = model.user_state(users, ads).interest
    every = torch.arange(num_ads)
    dense_FBN = interest.visits(every, num_ads)
    assert len(dense_FBN) == len(model.config.half_lives_s) + 3
    assert float(dense_FBN[-1].max()) > 1.0
    assert_close(interest.seen(every.expand(5, -1)), dense_FBN)
    for ad in (0, 7, 39):
        assert_close(interest.matched_positions(every, torch.full((5,), ad))[:, :, 0], dense_FBN[:, :, ad])
    chosen = interest.rows(torch.tensor([3, 1]))
    assert_close(chosen.visits(every, num_ads), dense_FBN[:, [3, 1]])


@torch.no_grad()
def test_a_beam_of_all_nodes_is_the_scan_and_leaves_out_what_was_seen() -> None:
    model, num_ads = covisiting_model()
    generator = torch.Generator().manual_seed(2)
    ads, users = small_ads(num_ads, generator), small_users(6, num_ads, generator)
    index, state = random_index(model, ads, generator), model.user_state(users, ads)
    exact = exact_search(model, index, state, 10)
    beam = beam_search(model, index, state, beams=index.level_sizes, k=10)
    assert torch.equal(beam.ad_code_BK, exact.ad_code_BK)
    assert_close(beam.score_BK, exact.score_BK, rtol=1e-6, atol=0.0)
    start_B1 = users.history.start_B1
    for row in range(6):
        seen = set(users.history.item_E[start_B1[row] : start_B1[row + 1]].tolist())
        assert not seen & set(exact.ad_code_BK[row].tolist())
    assert bool((scan_scores(model, index, state) > -1e9).all())


@torch.no_grad()
def test_the_table_is_stored_with_the_model(tmp_path: Path) -> None:
    model, num_ads = covisiting_model()
    save_model(model, tmp_path)
    again = load_model(tmp_path)
    assert again.covisits is not None
    assert torch.equal(again.covisits.value_ZK, model.covisits.value_ZK)
    generator = torch.Generator().manual_seed(3)
    ads, users = small_ads(num_ads, generator), small_users(3, num_ads, generator)
    index = publish(model, ads)
    before, after = (exact_search(m, index, m.user_state(users, ads), 5) for m in (model, again))
    assert torch.equal(before.score_BK, after.score_BK)


def test_the_features_cost_flops() -> None:
    plain, counting = small_config(), replace(small_config(), covisit_neighbours=8)
    assert candidate_cost(counting, 2).ad > candidate_cost(plain, 2).ad
    assert counting.num_features(2) == plain.num_features(2) + 3


def test_ages_by_order_count_events() -> None:
    history = HistorySlice(
        start_B1=torch.tensor([0, 3, 3, 5]), item_E=torch.arange(5), kind_E=torch.zeros(5), surface_E=torch.zeros(5),
        age_E=torch.rand(5),
    )  # fmt: skip
    assert aged_by_order(history).age_E.tolist() == [120.0, 60.0, 0.0, 60.0, 0.0]


def test_positives_only_training_learns_to_follow() -> None:
    """On a log in which ad a is always followed by ad a + 1, the softmax over drawn ads finds the next ad."""
    day = by_hand()
    num_ads, num_users, length = 30, 60, 6
    world = make_world(num_users=num_users, num_ads=num_ads, num_days=1, rows_per_day=10)
    first = torch.arange(num_users) * 7 % num_ads
    item_E = ((first[:, None] + torch.arange(length)) % num_ads).flatten().to(torch.int32)
    place = torch.arange(num_users * length) % length
    count = num_users * length
    day = replace(
        day, schema=world.schema, users=world.users, ads=world.ads,
        history=replace(
            day.history, offset_U1=torch.arange(num_users + 1) * length, item_E=item_E, time_E=torch.arange(count),
            kind_E=torch.zeros(count, dtype=torch.uint8), surface_E=torch.zeros(count, dtype=torch.uint8),
        ),
        user_code_R=torch.arange(num_users).repeat_interleave(length), ad_code_R=item_E.to(torch.int64),
        surface_R=torch.zeros(count, dtype=torch.int64), hour_R=torch.zeros(count, dtype=torch.int64),
        time_us_R=torch.full((count,), 10**9), end_offset_R=place, label_RT=torch.ones(count, 2),
        mature_RT=torch.ones(count, 2), keep_R=place < length - 1, teacher_RT=torch.full((count, 2), math.nan),
    )  # fmt: skip
    config = small_config()
    config = replace(
        config, covisit_neighbours=8, exclude_seen=True, ages_by_order=True, half_lives_s=(60.0,),
        training=replace(
            config.training, batch_size=32, epochs=8, impression_weight=0.0, sampled_ads=16, softmax_weight=1.0,
            engagement_weight=0.0, learning_rate=1e-2,
        ),
    )  # fmt: skip
    model, report = train_retrieval(config, world.schema, [day], seed=0)
    assert "impressions" not in report.losses
    assert "level_impressions" not in report.losses
    last = (~day.keep_R).nonzero().squeeze(1)
    index = publish(model, day.ads)
    with torch.no_grad():
        found = exact_search(model, index, model.user_state(day.user_batch(last), day.ads), 3)
    assert float((found.ad_code_BK == day.ad_code_R[last, None]).any(1).float().mean()) > 0.9
