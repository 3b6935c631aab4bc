"""The simulated world: determinism, the contract, the oracle, the logging policy and the closed loop."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from feature_repo.contract import check, check_oracle
from feature_repo.simulator.config import SURFACES, preset
from feature_repo.simulator.source import SimulatorSource
from feature_repo.simulator.step import NO_AD, Policy, StepConfig
from feature_repo.simulator.world import AD_BASE, AD_STEP, DAY_US, HOUR_US, USER_BASE, USER_STEP, indices
from feature_repo.tables import CONTRACT

Tables = dict[str, pa.Table]


@pytest.fixture(scope="module")
def source() -> SimulatorSource:
    return SimulatorSource.open("tiny", seed=3)


@pytest.fixture(scope="module")
def days(source: SimulatorSource) -> list[Tables]:
    return [dict(source.tables(day)) for day in source.facts.days]


def microseconds(rows: pa.Table, column: str) -> np.ndarray:
    return np.asarray(rows[column].cast(pa.int64()).to_numpy())


def every(days: list[Tables], table: str) -> pa.Table:
    return pa.concat_tables([d[table] for d in days])


def test_a_day_needs_only_the_seed(source: SimulatorSource, days: list[Tables]) -> None:
    again = SimulatorSource.open("tiny", seed=3)
    for index in (9, 2):
        for table, rows in again.tables(source.facts.days[index]):
            assert rows.equals(days[index][table]), (table, index)
    other = dict(SimulatorSource.open("tiny", seed=4).tables(source.facts.days[2]))
    assert not other["impressions"].equals(days[2]["impressions"])


def test_every_table_of_every_day_keeps_the_contract(source: SimulatorSource, days: list[Tables]) -> None:
    for day, tables in zip(source.facts.days, days, strict=True):
        assert list(tables) == [*CONTRACT, "oracle"]
        for table in CONTRACT:
            report = check(table, tables[table], source.facts, day)
            report.raise_if_broken()
            assert report.num_dropped == 0
        check_oracle(tables["oracle"], source.facts, day).raise_if_broken()


def test_oracle_table_is_the_click_probability(source: SimulatorSource, days: list[Tables]) -> None:
    for tables in days[::6]:
        shown, oracle = tables["impressions"], tables["oracle"]
        assert shown["request_id"].equals(oracle["request_id"])
        assert shown["ad_id"].equals(oracle["ad_id"])
        again = source.world.click_probability(
            shown["user_id"].to_numpy(), shown["ad_id"].to_numpy(), shown["surface"].to_pylist(),
            microseconds(shown, "timestamp"),
        )  # fmt: skip
        assert again.dtype == np.float64
        np.testing.assert_array_equal(again, oracle["click"].to_numpy())


def test_click_matrix_equals_single_pairs(source: SimulatorSource) -> None:
    population = source.world.world.population
    users = np.arange(0, 600, 37) * USER_STEP + USER_BASE
    ads = np.arange(0, 500, 11) * AD_STEP + AD_BASE
    for surface, hours in (("feed", 5), ("search", 24 * 9 + 13), ("stories", 24 * 40)):
        time_us = population.start_us + hours * HOUR_US + 17
        block = source.world.click_matrix(users, surface, time_us, ads)
        count = block.size
        pairs = source.world.click_probability(
            np.repeat(users, len(ads)), np.tile(ads, len(users)), [surface] * count, np.full(count, time_us)
        )
        np.testing.assert_allclose(block.reshape(-1), pairs, rtol=1e-12)


def test_recorded_conversions_are_clicks_that_convert_in_time(source: SimulatorSource, days: list[Tables]) -> None:
    shown, truth = days[4]["impressions"], days[4]["oracle"]
    then = source.world.conversion_probability(
        shown["user_id"].to_numpy(), shown["ad_id"].to_numpy(), microseconds(shown, "timestamp")
    )
    in_time = 1.0 - np.exp(-5.5 * 3600 / source.world.world.population.config.conversion_delay_s)
    np.testing.assert_allclose(truth["conversion"].to_numpy(), truth["click"].to_numpy() * then * in_time, rtol=1e-6)


def test_interest_of_one_pair_by_hand(source: SimulatorSource) -> None:
    world, config = source.world.world, source.config
    users, ads = world.population.users, world.population.ads
    leaves, parents = config.topics[2], config.topics[1]
    for user, ad in ((4, 10), (77, 300), (599, 499)):
        day, hour = 6, 15
        time_us = np.array([world.population.start_us + day * DAY_US + hour * HOUR_US])
        best = 0.0
        for i in range(config.num_interests):
            mine, other = int(users.interest_DUI[day, user, i]), int(ads.leaf[ad])
            if mine == other:
                similarity = 1.0
            elif mine // leaves == other // leaves:
                similarity = config.parent_similarity
            elif mine // (leaves * parents) == other // (leaves * parents):
                similarity = config.top_similarity
            else:
                similarity = 0.0
            phase = 1 + 0.35 * np.cos((hour - users.phase_UI[user, i]) * 2 * np.pi / 24)
            best = max(best, float(users.weight_UI[user, i] * phase * similarity))
        found = world.preference.interest(np.array([user]), np.array([ad]), time_us)
        assert found[0] == pytest.approx(best, abs=1e-12)


def test_preference_is_no_dot_product(source: SimulatorSource) -> None:
    """A matrix of log-odds of d-dimensional user and ad vectors plus biases has rank d + 2; this one is far above."""
    world = source.world.world
    time_us = world.population.start_us + 3 * DAY_US
    block = world.preference.click_block(np.arange(300), np.arange(400), 0, time_us)
    logits = np.log(block / (1 - block))
    logits -= logits.mean(axis=0) + logits.mean(axis=1, keepdims=True) - logits.mean()
    values = np.linalg.svd(logits, compute_uv=False)
    assert int((np.cumsum(values**2) / (values**2).sum() < 0.99).sum()) > 40


def test_click_rate_and_oracle_entropy_are_in_range(days: list[Tables]) -> None:
    p = every(days, "oracle")["click"].to_numpy()
    base = p.mean()
    entropy = -(base * np.log(base) + (1 - base) * np.log(1 - base))
    loss = -(p * np.log(p) + (1 - p) * np.log(1 - p)).mean()
    assert 0.01 < base < 0.03
    assert 0.78 < loss / entropy < 0.90
    clicks = int((np.array(every(days, "outcomes")["label"].to_pylist()) == "click").sum())
    assert abs(clicks - p.sum()) < 4 * np.sqrt((p * (1 - p)).sum())


def test_surfaces_differ_as_configured(source: SimulatorSource, days: list[Tables]) -> None:
    surface = np.array(every(days, "impressions")["surface"].to_pylist())
    click = every(days, "oracle")["click"].to_numpy()
    for name, wanted in zip(SURFACES, source.config.surface_ctr, strict=True):
        assert click[surface == name].mean() == pytest.approx(wanted, rel=0.3)


def test_outcomes_follow_their_impressions_within_the_windows(source: SimulatorSource, days: list[Tables]) -> None:
    shown = every(days, "impressions")
    at = dict(zip(zip(shown["request_id"].to_pylist(), shown["ad_id"].to_pylist(), strict=True),
                  microseconds(shown, "timestamp"), strict=True))  # fmt: skip
    outcomes = every(days, "outcomes")
    keys = list(zip(outcomes["request_id"].to_pylist(), outcomes["ad_id"].to_pylist(), strict=True))
    delay_s = (microseconds(outcomes, "event_time") - np.array([at[k] for k in keys])) / 1e6
    label = np.array(outcomes["label"].to_pylist())
    for name, window in source.facts.labels.items():
        assert delay_s[label == name].min() > 0
        assert delay_s[label == name].max() < window
    assert delay_s[label == "conversion"].mean() > 20 * delay_s[label == "click"].mean()
    clicked = {k for k, name in zip(keys, label, strict=True) if name == "click"}
    converted = {k for k, name in zip(keys, label, strict=True) if name == "conversion"}
    assert converted
    assert converted <= clicked


def test_late_events_move_to_the_day_they_became_known(days: list[Tables]) -> None:
    late = 0
    for index, tables in enumerate(days):
        rows = tables["engagements"]
        late += int((rows["event_id"].to_numpy() // 1_000_000_000 < index).sum())
    ids = every(days, "engagements")["event_id"].to_numpy()
    assert late > 0
    assert len(np.unique(ids)) == len(ids)


def test_impressions_only_of_live_ads_and_joined_users(source: SimulatorSource, days: list[Tables]) -> None:
    population = source.world.world.population
    shown = every(days, "impressions")
    ad = indices(shown["ad_id"].to_numpy(), AD_BASE, AD_STEP, len(population.ads.leaf), "ad_id")
    user = indices(shown["user_id"].to_numpy(), USER_BASE, USER_STEP, source.config.num_users, "user_id")
    time_us = microseconds(shown, "timestamp")
    assert (population.ads.created_us[ad] < time_us).all()
    assert (population.ads.retired_us[ad] > time_us).all()
    assert (population.users.joined_us[user] < time_us).all()
    born = population.ads.created_us[ad] > population.start_us
    assert born.any(), "new ads must be shown on the log"


def test_change_log_of_ads_tells_the_whole_story(source: SimulatorSource, days: list[Tables]) -> None:
    population = source.world.world.population
    log = every(days, "ads")
    assert set(log["ad_id"].to_pylist()) == set((np.arange(len(population.ads.leaf)) * AD_STEP + AD_BASE).tolist())
    retired = log.filter(pa.compute.is_valid(log["retired_at"]))
    assert retired.num_rows == int((population.ads.retired_us < population.start_us + 14 * DAY_US).sum()) > 50
    per_ad = Counter(log["ad_id"].to_pylist())
    assert max(per_ad.values()) >= 3, "bids change"
    new_share = [d["ads"]["created_at"].cast(pa.int64()).to_numpy() >= population.start_us for d in days[1:]]
    assert 0.02 <= np.mean([n.sum() for n in new_share]) / source.config.num_ads <= 0.06
    assert len(set(log["title"].to_pylist())) > 30


def test_engagements_are_five_times_the_impressions_and_follow_interests(
    source: SimulatorSource, days: list[Tables]
) -> None:
    population = source.world.world.population
    events = every(days, "engagements")
    assert events.num_rows / every(days, "impressions").num_rows == pytest.approx(5.0, rel=0.1)
    user = indices(events["user_id"].to_numpy(), USER_BASE, USER_STEP, source.config.num_users, "user_id")
    item = indices(events["item_id"].to_numpy(), AD_BASE, AD_STEP, len(population.ads.leaf), "item_id")
    time_us = microseconds(events, "timestamp")
    preference = source.world.world.preference
    mine = preference.interest(user, item, time_us).mean()
    strangers = preference.interest(np.roll(user, 1000), item, time_us).mean()
    assert mine > 2 * strangers
    kind = np.array(events["kind"].to_pylist())
    match = preference.interest(user, item, time_us)
    assert match[kind == "like"].mean() > match[kind == "view"].mean()
    assert set(kind) == {"view", "like", "share", "purchase"}


def test_propensities_of_a_slot_sum_to_one(source: SimulatorSource) -> None:
    world, config = source.world.world, source.config
    for hour in (0, 24 * 13 + 20):
        pool = world.policy.pool(world.population.start_us + hour * HOUR_US)
        for user in (0, 99, 500):
            each = world.policy.propensity(pool, np.full(pool.size, user), pool.ad_E, hour // 24)
            assert each.sum() == pytest.approx(1.0, abs=1e-9)
            assert each.min() >= config.explore / pool.size
    assert config.explore >= 0.1


def test_draws_follow_the_logged_propensities(source: SimulatorSource) -> None:
    world = source.world.world
    pool = world.policy.pool(world.population.start_us + 5 * DAY_US)
    count = 60_000
    ad, propensity = world.policy.draw(pool, np.full(count, 7), 5, np.random.default_rng(0))
    expected = world.policy.propensity(pool, np.full(pool.size, 7), pool.ad_E, 5) * count
    drawn = np.bincount(ad, minlength=len(world.population.ads.leaf))[pool.ad_E]
    chi_squared = ((drawn - expected) ** 2 / expected).sum()
    assert abs(chi_squared - pool.size) < 6 * np.sqrt(2 * pool.size)
    np.testing.assert_allclose(propensity, world.policy.propensity(pool, np.full(count, 7), ad, 5))


def test_interests_drift_but_slowly(source: SimulatorSource) -> None:
    interest = source.world.world.population.users.interest_DUI
    moved = (interest[1:] != interest[:-1]).mean()
    assert 0.01 < moved < source.config.drift
    assert (interest[-1] != interest[0]).mean() > 0.2


def test_unknown_ids_days_and_surfaces_are_named(source: SimulatorSource) -> None:
    time_us = np.array([source.world.world.population.start_us])
    user, ad = np.array([USER_BASE]), np.array([AD_BASE])
    with pytest.raises(ValueError, match="user_id: 7 is not an id of this world"):
        source.world.click_probability(np.array([7]), ad, ["feed"], time_us)
    with pytest.raises(ValueError, match="ad_id: 1 is not an id"):
        source.world.click_matrix(user, "feed", int(time_us[0]), np.array([1]))
    with pytest.raises(ValueError, match="surface: 'reels' is unknown; known surfaces: feed, stories, search"):
        source.world.click_probability(user, ad, ["reels"], time_us)
    with pytest.raises(ValueError, match="'2025-01-01' is not a day of source 'simulator'"):
        next(source.tables("2025-01-01"))


def test_longer_horizon_is_only_a_parameter() -> None:
    month = SimulatorSource(replace(preset("tiny"), num_days=30, num_impressions=3_000), seed=0)
    assert len(month.facts.days) == 30
    assert month.facts.evaluation_cut == month.facts.days[-2]
    assert dict(month.tables(month.facts.days[-1]))["impressions"].num_rows > 20


def random_policy(source: SimulatorSource, day: str, count: int) -> Policy:
    live = source.world.eligible_ads(int(source.facts.bounds(day)[0].timestamp()) * 1_000_000)
    rng = np.random.default_rng(1)
    return lambda users, surfaces, times: rng.choice(live, (len(users), count))


def oracle_policy(source: SimulatorSource, day: str, count: int) -> Policy:
    live = source.world.eligible_ads(int(source.facts.bounds(day)[0].timestamp()) * 1_000_000)

    def answer(users: np.ndarray, surfaces: list[str], times: np.ndarray) -> np.ndarray:
        rows = [source.world.click_matrix(users[i : i + 1], surfaces[i], int(times[i]), live)[0]
                for i in range(len(users))]  # fmt: skip
        return live[np.argsort(-np.stack(rows), axis=1)[:, :count]]

    return answer


def test_step_shows_what_the_policy_retrieves(source: SimulatorSource) -> None:
    day, index = source.facts.days[5], 5
    result = source.step(day, oracle_policy(source, day, 20), config=StepConfig(max_requests=300))
    plain = source.step(day, random_policy(source, day, 20), config=StepConfig(max_requests=300))
    assert result.num_requests == plain.num_requests == 300
    check("impressions", result.impressions, source.facts, day).raise_if_broken()
    check_oracle(result.oracle, source.facts, day).raise_if_broken()
    assert result.expected_clicks > 1.3 * plain.expected_clicks
    shown = result.impressions
    again = source.world.click_probability(
        shown["user_id"].to_numpy(), shown["ad_id"].to_numpy(), shown["surface"].to_pylist(),
        microseconds(shown, "timestamp"),
    )  # fmt: skip
    np.testing.assert_array_equal(again, result.oracle["click"].to_numpy())
    assert result.expected_clicks == pytest.approx(again.sum())
    requests = source.world.world.requests(index)
    assert set(shown["request_id"].to_pylist()) == {index * 1_000_000_000 + i for i in range(300)}
    slots = np.array(source.config.slots)[requests.surface[:300]].sum()
    assert shown.num_rows == slots


def test_step_is_deterministic_and_logs_exploration(source: SimulatorSource) -> None:
    day, config = source.facts.days[5], StepConfig(max_requests=400, chunk=128)
    one = source.step(day, random_policy(source, day, 10), config=config, seed=1)
    two = source.step(day, random_policy(source, day, 10), config=config, seed=1)
    assert one.impressions.equals(two.impressions)
    assert one.outcomes.equals(two.outcomes)
    propensity = one.impressions["propensity"].to_numpy()
    explored = propensity < 0.5
    assert 0.03 < explored.mean() < 0.15
    assert propensity.min() >= 0.1 / 10 - 1e-6
    first = propensity[one.impressions["position"].to_numpy() == 0]
    assert first.max() == pytest.approx(0.9 + 0.1 / 10, abs=0.01)


def test_step_refuses_what_cannot_be_shown(source: SimulatorSource) -> None:
    day = source.facts.days[10]
    population = source.world.world.population
    start_us = population.start_us + 10 * DAY_US
    gone = np.flatnonzero(population.ads.retired_us < start_us)[0] * AD_STEP + AD_BASE
    future = np.flatnonzero(population.ads.created_us > start_us + DAY_US)[0] * AD_STEP + AD_BASE
    live = source.world.eligible_ads(start_us + DAY_US)
    live = live[np.isin(live, source.world.eligible_ads(start_us))][:2]

    def policy(users: np.ndarray, surfaces: list[str], times: np.ndarray) -> np.ndarray:
        return np.tile(np.array([gone, future, live[0], live[0], live[1], NO_AD]), (len(users), 1))

    result = source.step(day, policy, config=StepConfig(max_requests=50))
    assert set(result.impressions["ad_id"].to_pylist()) <= set(live.tolist())
    assert result.num_refused == 50 * 3
    with pytest.raises(ValueError, match=r"policy: answered with shape \(3,\)"):
        source.step(day, lambda u, s, t: np.zeros(3, dtype=np.int64))
    with pytest.raises(ValueError, match="ad_id: 5 is not an id"):
        source.step(day, lambda u, s, t: np.full((len(u), 2), 5))
