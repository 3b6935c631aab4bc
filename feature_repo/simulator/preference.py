"""The known preference function: the true probability that a user clicks an ad, and converts.

Log-odds of a click of user u on ad a on surface s at time t (day d, hour h):

    b[s] + alpha[s] * interest + 0.4 * taste[u, format] * surface_format[s, format] + device_format[device, format]
    + 0.8 * favourite(u, advertiser) + 0.7 * (0.3 + interest) * kernel(price) + 0.3 * quality * (0.4 + interest)
    + hour[s, h] - 0.18 * wear * log1p(age in days / 7)

`interest` is the *maximum* over the user's interests of weight * phase(h) * similarity, where similarity is 1 for
the same leaf topic, less for the same parent or top topic; `kernel` is a Gaussian of the distance of log prices.
Neither the maximum, the kernel nor the products are dot products of a user and an ad vector. The position within
a request has no effect. Legend: U users, N ads, T leaf topics, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feature_repo.simulator.config import SURFACES
from feature_repo.simulator.world import DAY_US, HOUR_US, Floats, Ints, Population

ALPHA = np.array([2.2, 1.6, 2.8])
"""Weight of the interest by surface: search is driven by intent, stories by format."""
HOUR_PHASE = np.array([20.0, 22.0, 11.0])
"""Hour at which each surface is at its best."""
PRICE_WIDTH = 0.8
TASTE, FAVOURITE, PRICE, QUALITY, FATIGUE = 0.4, 0.8, 0.7, 0.3, 0.18
"""Weights of the terms, as in the formula above."""


@dataclass(frozen=True)
class Preference:
    """Oracle of a population. Arguments are positions (not public ids) of users, ads and surfaces."""

    population: Population
    intercept_S: Floats
    conversion_intercept: float

    def interest(self, user_R: Ints, ad_R: Ints, time_us_R: Ints) -> Floats:
        """[R] strength of the best matching interest at that hour, about 0 to 1.3."""
        p, config = self.population, self.population.config
        strength_RI = self._strength(user_R, _hour(time_us_R))
        leaf_RI = p.users.interest_DUI[p.day_index(time_us_R), user_R]
        return np.asarray((strength_RI * _similarity(config.topics, config.parent_similarity, config.top_similarity,
                                                     leaf_RI, p.ads.leaf[ad_R][:, None])).max(axis=1))  # fmt: skip

    def click_logits(self, user_R: Ints, ad_R: Ints, surface_R: Ints, time_us_R: Ints) -> Floats:
        """[R] log-odds of a click."""
        p = self.population
        kind, hour_R = p.ads.format[ad_R], _hour(time_us_R)
        taste = p.users.taste_UF[user_R, kind] * p.surface_format[surface_R, kind]
        return _combine(
            base=self.intercept_S[surface_R] + _hour_effect(surface_R, hour_R) - self._fatigue(ad_R, time_us_R),
            alpha=ALPHA[surface_R],
            interest=self.interest(user_R, ad_R, time_us_R),
            format_effect=TASTE * taste + p.device_format[p.users.device[user_R], kind],
            favourite=(p.users.favourites[user_R] == p.ads.advertiser[ad_R][:, None]).any(axis=1),
            kernel=_kernel(p.users.log_price[user_R] - p.ads.log_price[ad_R]),
            quality=p.ads.quality[ad_R],
        )

    def click(self, user_R: Ints, ad_R: Ints, surface_R: Ints, time_us_R: Ints) -> Floats:
        """[R] probability of a click."""
        return _sigmoid(self.click_logits(user_R, ad_R, surface_R, time_us_R))

    def conversion_given_click(self, user_R: Ints, ad_R: Ints, time_us_R: Ints) -> Floats:
        """[R] probability that a click leads to a conversion at all, within the window or later."""
        return _sigmoid(self.conversion_intercept + self.conversion_effects(user_R, ad_R, time_us_R))

    def conversion_effects(self, user_R: Ints, ad_R: Ints, time_us_R: Ints) -> Floats:
        """[R] log-odds of a conversion given a click, without the intercept."""
        p = self.population
        kernel = _kernel(p.users.log_price[user_R] - p.ads.log_price[ad_R])
        trust = p.advertiser_trust[p.ads.advertiser[ad_R]]
        return np.asarray(
            1.2 * self.interest(user_R, ad_R, time_us_R) + 1.6 * kernel + 0.4 * trust + 0.5 * p.ads.landing[ad_R]
        )

    def click_block(self, user_U: Ints, ad_N: Ints, surface: int, time_us: int) -> Floats:
        """[U, N] probability of a click for every pair at one surface and time."""
        p = self.population
        when = np.array([time_us])
        hour, day = int(_hour(when)[0]), int(p.day_index(when)[0])
        kind = p.ads.format[ad_N]
        taste_UF = TASTE * p.users.taste_UF[user_U] * p.surface_format[surface]
        favourite_UA = np.zeros((len(user_U), len(p.advertiser_trust)))
        np.put_along_axis(favourite_UA, p.users.favourites[user_U], 1.0, axis=1)
        surface_part = self.intercept_S[surface] + _hour_effect(np.array([surface]), np.array([hour]))
        return _sigmoid(
            _combine(
                base=surface_part - self._fatigue(ad_N, np.full(len(ad_N), time_us)),
                alpha=ALPHA[surface],
                interest=self._topic_interest(user_U, day, hour)[:, p.ads.leaf[ad_N]],
                format_effect=(taste_UF + p.device_format[p.users.device[user_U]])[:, kind],
                favourite=favourite_UA[:, p.ads.advertiser[ad_N]],
                kernel=_kernel(p.users.log_price[user_U][:, None] - p.ads.log_price[ad_N][None, :]),
                quality=p.ads.quality[ad_N],
            )
        )

    def _strength(self, user_R: Ints, hour_R: Ints) -> Floats:
        """[R, I] weight of each interest at an hour."""
        users = self.population.users
        turn = (hour_R[:, None] - users.phase_UI[user_R]) * (2 * np.pi / 24)
        return np.asarray(users.weight_UI[user_R] * (1.0 + 0.35 * np.cos(turn)))

    def _topic_interest(self, user_U: Ints, day: int, hour: int) -> Floats:
        """[U, T] interest of every user in every leaf topic."""
        p, config = self.population, self.population.config
        strength_UI = self._strength(user_U, np.full(len(user_U), hour))
        leaf_UI = p.users.interest_DUI[day, user_U]
        topics_T = np.arange(config.num_leaves)
        best_UT = np.zeros((len(user_U), config.num_leaves))
        for i in range(leaf_UI.shape[1]):
            similarity_UT = _similarity(
                config.topics, config.parent_similarity, config.top_similarity, leaf_UI[:, i, None], topics_T[None]
            )
            np.maximum(best_UT, strength_UI[:, i, None] * similarity_UT, out=best_UT)
        return best_UT

    def _fatigue(self, ad_R: Ints, time_us_R: Ints) -> Floats:
        ads = self.population.ads
        age_days = np.maximum(time_us_R - ads.created_us[ad_R], 0) / DAY_US
        return np.asarray(FATIGUE * ads.wear[ad_R] * np.log1p(age_days / 7.0))


def _combine(
    *,
    base: Floats,
    alpha: Floats,
    interest: Floats,
    format_effect: Floats,
    favourite: NDArray[Any],
    kernel: Floats,
    quality: Floats,
) -> Floats:
    """Log-odds from the terms; arrays broadcast, so that pairs [R] and blocks [U, N] share one formula."""
    logits = base + alpha * interest + format_effect + FAVOURITE * favourite
    return np.asarray(logits + PRICE * (0.3 + interest) * kernel + QUALITY * quality * (0.4 + interest))


def _hour(time_us: Ints) -> Ints:
    """Hour of the day (UTC) of a time."""
    return np.asarray(time_us % DAY_US // HOUR_US)


def _similarity(topics: tuple[int, int, int], parent: float, top: float, left: Ints, right: Ints) -> Floats:
    """Similarity of leaf topics by the lowest level that they share (arrays broadcast)."""
    _, parents, leaves = topics
    same_leaf, same_parent = left == right, left // leaves == right // leaves
    same_top = left // (leaves * parents) == right // (leaves * parents)
    return np.asarray(top * same_top + (parent - top) * same_parent + (1.0 - parent) * same_leaf)


def _kernel(distance: Floats) -> Floats:
    return np.asarray(np.exp(distance * distance * (-0.5 / PRICE_WIDTH**2)))


def _hour_effect(surface: Ints, hour: Ints) -> Floats:
    return np.asarray(0.25 * np.cos((hour - HOUR_PHASE[surface]) * (2 * np.pi / 24)))


def _sigmoid(logits: Floats) -> Floats:
    return np.asarray(1.0 / (1.0 + np.exp(-logits)))


def solve_intercept(effects: Floats, target: float) -> float:
    """Intercept at which the mean of sigmoid(intercept + effects) equals `target` (bisection, 60 steps)."""
    assert 0 < target < 1
    assert len(effects) > 0
    low, high = -30.0, 30.0
    for _ in range(60):
        middle = (low + high) / 2
        if float(_sigmoid(middle + effects).mean()) < target:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def surface_index(surfaces: list[str]) -> Ints:
    """Positions of surface names; raises ValueError with the first unknown one."""
    positions = {name: i for i, name in enumerate(SURFACES)}
    unknown = [s for s in surfaces if s not in positions]
    if unknown:
        raise ValueError(f"surface: {unknown[0]!r} is unknown; known surfaces: {', '.join(SURFACES)}")
    return np.array([positions[s] for s in surfaces], dtype=np.int64)
