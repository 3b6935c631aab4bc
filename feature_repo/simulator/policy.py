"""Which ads are eligible in an hour, and the logging policy that draws from them with known propensities.

A slot is filled from a mixture of three distributions over the E eligible ads of the hour: uniform with
`explore`, popularity within the parent topic of one of the user's interests with `target`, popularity alone
with the rest. Interests are those of the day before, at parent level: what an ad platform knows coarsely.
The mass of an interest without eligible ads goes to popularity. Legend: E eligible ads, R slots, T leaf topics.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from feature_repo.simulator.world import HOUR_US, Floats, Ints, Population


@dataclass(frozen=True)
class Pool:
    """Ads eligible during one hour, sorted by leaf topic, with cumulative popularity."""

    ad_E: Ints
    cumulative: Floats
    """[E + 1]; entry i is the popularity of all ads before i."""
    leaf_start: Ints
    """[T + 1] first position of each leaf topic."""
    advertiser_order: Ints
    """[E] positions sorted by advertiser."""
    advertiser_cumulative: Floats
    advertiser_start: Ints

    @property
    def size(self) -> int:
        """Number of eligible ads."""
        return len(self.ad_E)

    def draw_between(self, start_R: Ints, end_R: Ints, uniform_R: Floats) -> Ints:
        """Draw an ad by popularity from positions [start, end); -1 where the range is empty."""
        return _inverse(self.cumulative, self.ad_E, start_R, end_R, uniform_R)

    def draw_topic(self, topic_R: Ints, leaves_per_topic: int, uniform_R: Floats) -> Ints:
        """Draw by popularity within a topic that holds `leaves_per_topic` leaves; -1 where it is empty."""
        first = topic_R * leaves_per_topic
        return self.draw_between(self.leaf_start[first], self.leaf_start[first + leaves_per_topic], uniform_R)

    def draw_popular(self, uniform_R: Floats) -> Ints:
        """Draw by popularity from all eligible ads."""
        zero = np.zeros(len(uniform_R), dtype=np.int64)
        return self.draw_between(zero, zero + self.size, uniform_R)

    def draw_advertiser(self, advertiser_R: Ints, uniform_R: Floats) -> Ints:
        """Draw by popularity among an advertiser's ads; -1 where it has none."""
        return _inverse(
            self.advertiser_cumulative, self.ad_E[self.advertiser_order],
            self.advertiser_start[advertiser_R], self.advertiser_start[advertiser_R + 1], uniform_R,
        )  # fmt: skip


def _inverse(cumulative: Floats, ads: Ints, start_R: Ints, end_R: Ints, uniform_R: Floats) -> Ints:
    low, high = cumulative[start_R], cumulative[end_R]
    position = np.searchsorted(cumulative, low + uniform_R * (high - low), side="right") - 1
    position = np.clip(position, start_R, np.maximum(end_R - 1, start_R))
    return np.where(end_R > start_R, ads[np.minimum(position, len(ads) - 1)], -1)


class LoggingPolicy:
    """The policy that made the log of a world."""

    def __init__(self, population: Population) -> None:
        self.population = population
        ads = population.ads
        self._by_leaf = np.argsort(ads.leaf, kind="stable")
        self._num_advertisers = len(population.advertiser_trust)

    def pool(self, hour_us: int) -> Pool:
        """Ads eligible in the hour that starts at `hour_us`: made before it starts, not retired before it ends."""
        ads, config = self.population.ads, self.population.config
        live = (ads.created_us < hour_us) & (ads.retired_us >= hour_us + HOUR_US)
        ad_E = self._by_leaf[live[self._by_leaf]]
        order = np.argsort(ads.advertiser[ad_E], kind="stable")
        sorted_advertiser = ads.advertiser[ad_E[order]]
        return Pool(
            ad_E=ad_E,
            cumulative=np.concatenate([[0.0], np.cumsum(ads.popularity[ad_E])]),
            leaf_start=np.searchsorted(ads.leaf[ad_E], np.arange(config.num_leaves + 1)),
            advertiser_order=order,
            advertiser_cumulative=np.concatenate([[0.0], np.cumsum(ads.popularity[ad_E[order]])]),
            advertiser_start=np.searchsorted(sorted_advertiser, np.arange(self._num_advertisers + 1)),
        )

    def draw(self, pool: Pool, user_R: Ints, day: int, rng: np.random.Generator) -> tuple[Ints, Floats]:
        """Fill R slots: the drawn ads and the propensity with which each was drawn."""
        config = self.population.config
        parent_RI, share_RI = self._coarse_interests(user_R, day)
        arm = rng.random(len(user_R))
        uniform = rng.random(len(user_R))
        ad = pool.draw_popular(uniform)
        chosen = (rng.random((len(user_R), 1)) > np.cumsum(share_RI, axis=1)[:, :-1]).sum(axis=1)
        topical = pool.draw_topic(parent_RI[np.arange(len(user_R)), chosen], config.topics[2], uniform)
        ad = np.where((arm < config.target) & (topical >= 0), topical, ad)
        explored = pool.ad_E[np.minimum((uniform * pool.size).astype(np.int64), pool.size - 1)]
        ad = np.where(arm >= 1.0 - config.explore, explored, ad)
        return ad, self.propensity(pool, user_R, ad, day)

    def propensity(self, pool: Pool, user_R: Ints, ad_R: Ints, day: int) -> Floats:
        """Probability with which the policy puts an eligible ad into a slot of the user."""
        config = self.population.config
        parent_RI, share_RI = self._coarse_interests(user_R, day)
        first_RI = parent_RI * config.topics[2]
        mass_RI = (
            pool.cumulative[pool.leaf_start[first_RI + config.topics[2]]] - pool.cumulative[pool.leaf_start[first_RI]]
        )
        weight_R, total = self.population.ads.popularity[ad_R], pool.cumulative[-1]
        same_RI = parent_RI == self.population.parent[ad_R][:, None]
        empty_R = (share_RI * (mass_RI <= 0)).sum(axis=1)
        topical_R = (share_RI * same_RI / np.where(mass_RI > 0, mass_RI, np.inf)).sum(axis=1) * weight_R
        popular = 1.0 - config.explore - config.target + config.target * empty_R
        return np.asarray(config.explore / pool.size + popular * weight_R / total + config.target * topical_R)

    def _coarse_interests(self, user_R: Ints, day: int) -> tuple[Ints, Floats]:
        users, leaves = self.population.users, self.population.config.topics[2]
        weight_RI = users.weight_UI[user_R]
        return (
            users.interest_DUI[max(day - 1, 0), user_R] // leaves,
            np.asarray(weight_RI / weight_RI.sum(axis=1, keepdims=True)),
        )
