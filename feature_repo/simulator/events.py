"""One day of a world: sessions of organic events, ad requests among them, impressions and their outcomes.

Every user opens a Poisson number of sessions; a session lies on one surface, follows one interest most of the
time, and asks for ads now and then. All randomness of a day comes from (seed, day), so days can be made in any
order. Legend: S sessions, E events, R requests, B impressions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from feature_repo.simulator.config import HOUR_SHARE, SimulatorConfig
from feature_repo.simulator.policy import LoggingPolicy, Pool
from feature_repo.simulator.preference import Preference, solve_intercept
from feature_repo.simulator.world import DAY_US, HOUR_US, Floats, Ints, Population

SECOND_US = 1_000_000
ATTRIBUTION_S = 5.5 * 3600
"""A conversion is recorded up to 5.5 hours after its click, thus within 6 hours of the impression."""
CLICK_CUT_S = 1799.0


@dataclass(frozen=True)
class Engagements:
    """Organic events of a day, sorted by time."""

    user: Ints
    item: Ints
    kind: Ints
    surface: Ints
    time_us: Ints
    known_us: Ints


@dataclass(frozen=True)
class Requests:
    """Ad requests of a day, sorted by time."""

    user: Ints
    surface: Ints
    time_us: Ints


@dataclass(frozen=True)
class Impressions:
    """Ads shown, sorted by (time, request, position), with their true probabilities."""

    request: Ints
    """Position of the request in the day's `Requests`."""
    user: Ints
    ad: Ints
    position: Ints
    surface: Ints
    time_us: Ints
    propensity: Floats
    click: Floats
    conversion: Floats
    """Probability that the impression leads to a recorded conversion."""


@dataclass(frozen=True)
class Outcomes:
    """Clicks (label 0) and conversions (label 1) of a day's impressions, sorted by the time they become known."""

    impression: Ints
    label: Ints
    time_us: Ints
    known_us: Ints


@dataclass(frozen=True)
class DayEvents:
    """Everything that happens because of one day."""

    engagements: Engagements
    impressions: Impressions
    outcomes: Outcomes


@dataclass(frozen=True)
class _Sessions:
    user: Ints
    surface: Ints
    focus: Ints
    """Interest that the session follows."""
    num_events: Ints
    start_us: Ints


class World:
    """A population with its logging policy and its calibrated preference function."""

    def __init__(self, population: Population) -> None:
        self.population = population
        self.policy = LoggingPolicy(population)
        self.preference = self._calibrate()

    def day(self, index: int) -> DayEvents:
        """All events of day number `index`."""
        rng = self._rng(10, index)
        engagements, requests = self.organic(index, rng)
        impressions = self._logged_impressions(index, requests, rng)
        return DayEvents(engagements, impressions, self.outcomes(impressions, rng))

    def requests(self, index: int) -> Requests:
        """The ad requests of a day, the same as those of `day`."""
        return self.organic(index, self._rng(10, index))[1]

    def organic(self, index: int, rng: np.random.Generator) -> tuple[Engagements, Requests]:
        """Organic events and ad requests of a day."""
        config = self.population.config
        sessions = self._sessions(index, rng)
        session_E = np.repeat(np.arange(len(sessions.user)), sessions.num_events)
        gaps_us = (np.exp(rng.normal(np.log(config.gap_median_s), config.gap_sigma, len(session_E))) + 0.5) * SECOND_US
        elapsed = np.cumsum(gaps_us.astype(np.int64))
        first_E = np.cumsum(sessions.num_events) - sessions.num_events
        time_us = sessions.start_us[session_E] + elapsed - elapsed[first_E][session_E]
        day_end = self.population.start_us + (index + 1) * DAY_US
        keep = np.flatnonzero(time_us < day_end - 2 * SECOND_US)
        order = keep[np.argsort(time_us[keep], kind="stable")]
        session_E, time_us = session_E[order], time_us[order]
        user_E, surface_E = sessions.user[session_E], sessions.surface[session_E]
        asks = np.flatnonzero(rng.random(len(order)) < _request_rate(config))
        requests = Requests(user_E[asks], surface_E[asks], time_us[asks] + SECOND_US)
        item_E = self._organic_items(index, user_E, sessions.focus[session_E], time_us, rng)
        kind_E = self._kinds(user_E, item_E, time_us, rng)
        delay_s = rng.uniform(0.1, 3.0, len(order))
        late = rng.random(len(order)) < config.late_share
        delay_s[late] = np.minimum(60 + rng.exponential(2400, int(late.sum())), 6 * 3600)
        known_us = time_us + (delay_s * SECOND_US).astype(np.int64)
        return Engagements(user_E, item_E, kind_E, surface_E, time_us, known_us), requests

    def score(
        self, request: Ints, user: Ints, ad: Ints, position: Ints, surface: Ints, time_us: Ints, propensity: Floats
    ) -> Impressions:
        """Impressions with their true probabilities."""
        click = self.preference.click(user, ad, surface, time_us)
        then = self.preference.conversion_given_click(user, ad, time_us)
        recorded = 1.0 - np.exp(-ATTRIBUTION_S / self.population.config.conversion_delay_s)
        return Impressions(request, user, ad, position, surface, time_us, propensity, click, click * then * recorded)

    def outcomes(self, shown: Impressions, rng: np.random.Generator) -> Outcomes:
        """Draw clicks and conversions. Conversions after the attribution time are lost, as in a real log."""
        config = self.population.config
        clicked = np.flatnonzero(rng.random(len(shown.click)) < shown.click)
        delay_s = np.minimum(1.0 + rng.exponential(config.click_delay_s, len(clicked)), CLICK_CUT_S)
        click_us = shown.time_us[clicked] + (delay_s * SECOND_US).astype(np.int64)
        then = self.preference.conversion_given_click(shown.user[clicked], shown.ad[clicked], shown.time_us[clicked])
        wait_s = rng.exponential(config.conversion_delay_s, len(clicked))
        converts = (rng.random(len(clicked)) < then) & (wait_s < ATTRIBUTION_S)
        conversion_us = click_us[converts] + (wait_s[converts] * SECOND_US).astype(np.int64)
        time_us = np.concatenate([click_us, conversion_us])
        known_us = time_us + rng.integers(SECOND_US // 10, 5 * SECOND_US, len(time_us))
        impression = np.concatenate([clicked, clicked[converts]])
        label = np.repeat(np.array([0, 1]), [len(clicked), int(converts.sum())])
        order = np.argsort(known_us, kind="stable")
        return Outcomes(impression[order], label[order], time_us[order], known_us[order])

    def _rng(self, stream: int, index: int) -> np.random.Generator:
        return np.random.default_rng([self.population.seed, stream, index])

    def _sessions(self, index: int, rng: np.random.Generator) -> _Sessions:
        p, config = self.population, self.population.config
        begin = p.start_us + index * DAY_US
        active = p.users.activity * (p.users.joined_us < begin)
        total = config.num_impressions * config.organic_ratio / config.num_days
        mean = active / active.sum() * total / config.session_events * 1.02
        user_S = np.repeat(np.arange(config.num_users), rng.poisson(mean))
        share_S = np.cumsum(p.users.surface_share[user_S], axis=1)
        surface_S = (rng.random((len(user_S), 1)) > share_S[:, :-1]).sum(axis=1)
        hour_share = np.cumsum(HOUR_SHARE)
        hour_S = np.searchsorted(hour_share, rng.random(len(user_S)) * hour_share[-1], side="right")
        turn = (hour_S[:, None] - p.users.phase_UI[user_S]) * (2 * np.pi / 24)
        weight_SI = np.cumsum(p.users.weight_UI[user_S] * (1.0 + 0.35 * np.cos(turn)), axis=1)
        focus_S = (rng.random((len(user_S), 1)) * weight_SI[:, -1:] > weight_SI[:, :-1]).sum(axis=1)
        return _Sessions(
            user=user_S,
            surface=surface_S,
            focus=focus_S,
            num_events=rng.geometric(1.0 / config.session_events, len(user_S)),
            start_us=begin + hour_S * HOUR_US + rng.integers(0, HOUR_US, len(user_S)),
        )

    def _organic_items(self, index: int, user_E: Ints, focus_E: Ints, time_us: Ints, rng: np.random.Generator) -> Ints:
        """What people look at: mostly topics of their interests, some of a favourite advertiser, some hits."""
        p, config = self.population, self.population.config
        _, parents, leaves = config.topics
        stray = rng.random(len(user_E)) < 0.3
        interest = np.where(stray, rng.integers(0, config.num_interests, len(user_E)), focus_E)
        leaf_E = p.users.interest_DUI[index, user_E, interest]
        favourite_E = p.users.favourites[user_E, rng.integers(0, 3, len(user_E))]
        arm, uniform = rng.random(len(user_E)), rng.random(len(user_E))
        item = np.full(len(user_E), -1)
        for rows, pool in self._by_hour(index, time_us):
            u, a = uniform[rows], arm[rows]
            leaf = pool.draw_topic(leaf_E[rows], 1, u)
            parent = pool.draw_topic(leaf_E[rows] // leaves, leaves, u)
            top = pool.draw_topic(leaf_E[rows] // (leaves * parents), leaves * parents, u)
            parent = np.where(parent < 0, top, parent)
            levels = np.select([a < 0.45, a < 0.63, a < 0.72], [np.where(leaf < 0, parent, leaf), parent, top], -1)
            levels = np.where((a >= 0.72) & (a < 0.82), pool.draw_advertiser(favourite_E[rows], u), levels)
            item[rows] = np.where(levels < 0, pool.draw_popular(u), levels)
        return item

    def _kinds(self, user_E: Ints, item_E: Ints, time_us: Ints, rng: np.random.Generator) -> Ints:
        """View, like, share or purchase; the stronger kinds follow the match of user and item."""
        p = self.population
        match = self.preference.interest(user_E, item_E, time_us)
        distance = (p.users.log_price[user_E] - p.ads.log_price[item_E]) ** 2
        quality = p.ads.quality[item_E]
        logits = np.stack(
            [-3.6 + 1.8 * match + 0.5 * quality, -5.0 + 1.8 * match + 0.4 * quality,
             -6.0 + 2.0 * match + 2.0 * np.exp(-0.8 * distance)], axis=1,
        )  # fmt: skip
        happens = rng.random(logits.shape) < 1.0 / (1.0 + np.exp(-logits))
        return np.asarray((happens * np.array([1, 2, 3])).max(axis=1))

    def _logged_impressions(self, index: int, requests: Requests, rng: np.random.Generator) -> Impressions:
        slots = np.array(self.population.config.slots)[requests.surface]
        request_B = np.repeat(np.arange(len(slots)), slots)
        position_B = np.arange(len(request_B)) - np.repeat(np.cumsum(slots) - slots, slots)
        user_B, time_us = requests.user[request_B], requests.time_us[request_B]
        ad_B, propensity_B = np.zeros(len(request_B), dtype=np.int64), np.zeros(len(request_B))
        for rows, pool in self._by_hour(index, time_us):
            ad_B[rows], propensity_B[rows] = self.policy.draw(pool, user_B[rows], index, rng)
        # slots are drawn independently; a request shows an ad once
        keep = np.sort(np.unique(request_B * len(self.population.ads.leaf) + ad_B, return_index=True)[1])
        return self.score(
            request_B[keep], user_B[keep], ad_B[keep], position_B[keep], requests.surface[request_B[keep]],
            time_us[keep], propensity_B[keep],
        )  # fmt: skip

    def _by_hour(self, index: int, time_us: Ints) -> list[tuple[slice, Pool]]:
        """Rows (sorted by time) and eligible ads of every hour that has rows."""
        begin = self.population.start_us + index * DAY_US
        edges = np.searchsorted(time_us, begin + np.arange(25) * HOUR_US)
        return [
            (slice(int(edges[h]), int(edges[h + 1])), self.policy.pool(begin + h * HOUR_US))
            for h in range(24)
            if edges[h + 1] > edges[h]
        ]

    def _calibrate(self, sample: int = 12_000) -> Preference:
        """Solve the intercepts so that first-day traffic of each surface has the configured click rate."""
        p, config = self.population, self.population.config
        rng = self._rng(11, 0)
        active = np.cumsum(p.users.activity)
        user = np.searchsorted(active, rng.random(sample) * active[-1], side="right")
        hour = np.sort(rng.choice(24, size=sample, p=np.array(HOUR_SHARE) / sum(HOUR_SHARE)))
        time_us = p.start_us + hour * HOUR_US
        ad = np.zeros(sample, dtype=np.int64)
        for rows, pool in self._by_hour(0, time_us):
            ad[rows] = self.policy.draw(pool, user[rows], 0, rng)[0]
        bare = Preference(p, np.zeros(len(config.surface_ctr)), 0.0)
        intercepts = []
        for surface, rate in enumerate(config.surface_ctr):
            effects = bare.click_logits(user, ad, np.full(sample, surface), time_us)
            intercepts.append(solve_intercept(effects, rate))
        solved = Preference(p, np.array(intercepts), 0.0)
        weight = solved.click(user, ad, np.zeros(sample, dtype=np.int64), time_us)
        effects = solved.conversion_effects(user, ad, time_us)
        clicked = np.searchsorted(np.cumsum(weight), rng.random(sample) * weight.sum(), side="right")
        return Preference(p, np.array(intercepts), solve_intercept(effects[np.minimum(clicked, sample - 1)],
                                                                   config.conversion_rate))  # fmt: skip


def _request_rate(config: SimulatorConfig) -> float:
    """Ad requests per organic event, so that impressions come out at 1 / organic_ratio of the engagements."""
    slots = float(np.dot(config.surface_share, config.slots))
    return 1.0 / (config.organic_ratio * slots)
