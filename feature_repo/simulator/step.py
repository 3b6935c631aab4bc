"""The closed loop: a day of requests answered by a given retrieval policy instead of the logging policy.

The policy retrieves candidates; a small ranker orders the eligible ones by bid times a noisy estimate of the
click probability; slots are filled greedily with logged exploration. The requests of a day are the same for
every policy, so two policies can be compared request by request. Legend: R requests, K candidates, B impressions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from feature_repo.simulator import rows
from feature_repo.simulator.config import SURFACES
from feature_repo.simulator.events import Impressions, Requests, World
from feature_repo.simulator.world import AD_BASE, AD_STEP, DAY_US, Floats, Ints, Population, indices, user_ids

NO_AD = -1
Policy = Callable[[Ints, list[str], Ints], Ints]
"""(user_ids [R], surfaces [R], timestamps_us [R]) -> ad_ids [R, K]; -1 pads short answers."""


@dataclass(frozen=True)
class StepConfig:
    """How a day is served."""

    explore: float = 0.1
    """Chance that a slot is filled uniformly from the eligible candidates."""
    ranker_noise: float = 0.5
    """Standard deviation of the ranker's error in log-odds."""
    chunk: int = 1024
    """Requests handed to the policy at once, in time order; budgets are settled after each chunk."""
    max_requests: int | None = None
    """Serve only the first requests of the day (None: all)."""


@dataclass(frozen=True)
class StepResult:
    """What a served day produced."""

    impressions: pa.Table
    outcomes: pa.Table
    """All outcomes of the day's impressions, also those that become known on the next day."""
    oracle: pa.Table
    num_requests: int
    num_refused: int
    """Candidates that were unknown to the hour: retired, not yet made, out of budget, or repeated."""
    expected_clicks: float
    expected_revenue: float
    """Sum of bid times true click probability."""


def step(world: World, index: int, policy: Policy, config: StepConfig, seed: int) -> StepResult:
    """Serve day number `index` through a policy.

    Raises:
        ValueError: the policy answers with the wrong shape or with an id that is no ad of this world.
    """
    population = world.population
    rng = np.random.default_rng([population.seed, 20, index, seed])
    requests = world.requests(index)
    total = min(len(requests.user), config.max_requests or len(requests.user))
    bids = bids_at(population, population.start_us + index * DAY_US)
    spent_C = np.zeros(int(population.ads.campaign.max()) + 1)
    parts: list[Impressions] = []
    refused, revenue = 0, 0.0
    for start in range(0, total, config.chunk):
        chunk = slice(start, min(start + config.chunk, total))
        candidates_RK = _retrieve(population, requests, chunk, policy)
        usable_RK = _usable(population, candidates_RK, requests.time_us[chunk], spent_C)
        refused += int((~usable_RK & (candidates_RK != NO_AD)).sum())
        shown = _serve(world, requests, chunk, candidates_RK, usable_RK, bids, config, rng)
        cost = bids[shown.ad] * shown.click
        np.add.at(spent_C, population.ads.campaign[shown.ad], cost)
        revenue += float(cost.sum())
        parts.append(shown)
    shown = _concatenate(parts)
    outcomes = world.outcomes(shown, rng)
    return StepResult(
        impressions=rows.impressions(population, index, shown),
        outcomes=rows.outcome_rows(
            index, shown, outcomes.impression, outcomes.label, outcomes.time_us, outcomes.known_us
        ),
        oracle=rows.oracle(index, shown),
        num_requests=total,
        num_refused=refused,
        expected_clicks=float(shown.click.sum()),
        expected_revenue=revenue,
    )


def bids_at(population: Population, time_us: int) -> Floats:
    """[N] bid of every ad at a time."""
    bids, changes = population.ads.bid.copy(), population.bid_changes
    before = changes.time_us < time_us
    bids[changes.ad[before]] = changes.bid[before]
    return bids


def _retrieve(population: Population, requests: Requests, chunk: slice, policy: Policy) -> Ints:
    """[R, K] positions of the ads that the policy proposes; `NO_AD` where it has none."""
    surfaces = [SURFACES[s] for s in requests.surface[chunk]]
    answer_RK = np.asarray(policy(user_ids(requests.user[chunk]), surfaces, requests.time_us[chunk]), dtype=np.int64)
    if answer_RK.ndim != 2 or len(answer_RK) != len(surfaces):
        raise ValueError(f"policy: answered with shape {answer_RK.shape} for {len(surfaces)} requests; expected [R, K]")
    known = answer_RK != NO_AD
    found_RK = np.full(answer_RK.shape, NO_AD)
    found_RK[known] = indices(answer_RK[known], AD_BASE, AD_STEP, len(population.ads.leaf), "ad_id")
    return found_RK


def _usable(population: Population, ad_RK: Ints, time_us_R: Ints, spent_C: Floats) -> NDArray[np.bool_]:
    """[R, K] whether a candidate may be shown: it exists, is live, has budget, and is the first of its copies."""
    ads, now = population.ads, time_us_R[:, None]
    usable = (ad_RK != NO_AD) & (ads.created_us[ad_RK] < now) & (ads.retired_us[ad_RK] > now)
    usable &= (spent_C < _budget(population, len(spent_C)))[ads.campaign[ad_RK]]
    order = np.argsort(ad_RK, axis=1, kind="stable")
    ordered = np.take_along_axis(ad_RK, order, axis=1)
    repeated = np.zeros(ad_RK.shape, dtype=bool)
    np.put_along_axis(repeated, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
    return np.asarray(usable & ~repeated)


def _budget(population: Population, count: int) -> Floats:
    budget = np.zeros(count)
    budget[population.ads.campaign] = population.ads.budget
    return budget


def _serve(
    world: World,
    requests: Requests,
    chunk: slice,
    ad_RK: Ints,
    usable_RK: NDArray[np.bool_],
    bids: Floats,
    config: StepConfig,
    rng: np.random.Generator,
) -> Impressions:
    """Rank and fill the slots of a chunk of requests."""
    user, surface, time_us = requests.user[chunk], requests.surface[chunk], requests.time_us[chunk]
    num_requests, num_candidates = ad_RK.shape
    flat = [np.repeat(x, num_candidates) for x in (user, surface, time_us)]
    logits = world.preference.click_logits(flat[0], ad_RK.reshape(-1), flat[1], flat[2]).reshape(ad_RK.shape)
    estimate = 1.0 / (1.0 + np.exp(-(logits + rng.normal(0, config.ranker_noise, ad_RK.shape))))
    value_RK = np.where(usable_RK, bids[ad_RK] * estimate, -np.inf)
    slots = np.array(world.population.config.slots)[surface]
    row = np.arange(num_requests)
    found: list[tuple[Ints, Ints, Ints, Floats]] = []
    for position in range(int(slots.max(initial=0))):
        left_R = np.isfinite(value_RK).sum(axis=1)
        best_R = value_RK.argmax(axis=1)
        random_R = np.where(np.isfinite(value_RK), rng.random(ad_RK.shape), -1.0).argmax(axis=1)
        chosen_R = np.where(rng.random(num_requests) < config.explore, random_R, best_R)
        filled = np.flatnonzero((position < slots) & (left_R > 0))
        chosen = chosen_R[filled]
        propensity = config.explore / left_R[filled] + (1.0 - config.explore) * (chosen == best_R[filled])
        found.append((filled, ad_RK[filled, chosen], np.full(len(filled), position), propensity))
        value_RK[row[filled], chosen] = -np.inf
    request, ad, position_B, propensity_B = (np.concatenate(x) for x in zip(*found, strict=True))
    order = np.lexsort((position_B, request))
    request = request[order]
    return world.score(
        request + chunk.start, user[request], ad[order], position_B[order], surface[request], time_us[request],
        propensity_B[order],
    )  # fmt: skip


def _concatenate(parts: list[Impressions]) -> Impressions:
    names = list(Impressions.__dataclass_fields__)
    return Impressions(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in names})
