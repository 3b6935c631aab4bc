"""The population of a simulated world: topics, ads and users, drawn once from (configuration, seed).

Everything here is indexed by position; public ids are affine in the index (`user_ids`, `ad_ids`), so that code
which confuses an id with a row fails at once. Legend: U users, N ads over all days, I interests, D days,
F formats, T leaf topics, A advertisers.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from feature_repo.simulator.config import FORMATS, SURFACES, SimulatorConfig

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DAY_US = 86_400_000_000
HOUR_US = 3_600_000_000
NEVER = np.iinfo(np.int64).max
USER_BASE, USER_STEP = 10_000_019, 17
AD_BASE, AD_STEP = 500_000_003, 13
AGE_BANDS, GENDERS, REGIONS, DEVICES = 6, 3, 24, 4


@dataclass(frozen=True)
class Ads:
    """All ads of the horizon, oldest first. Times are epoch microseconds."""

    created_us: Ints
    retired_us: Ints
    leaf: Ints
    advertiser: Ints
    campaign: Ints
    format: Ints
    objective: Ints
    log_price: Floats
    quality: Floats
    """Latent; the creative embedding shows it with noise."""
    wear: Floats
    """How fast the creative tires its audience."""
    popularity: Floats
    bid: Floats
    """First bid; `bid_day` and `bid_next` change it once per drawn row."""
    budget: Floats
    landing: Floats
    """Latent quality of the landing page: drives conversions; `attributes` show it with noise."""
    attributes_N2: NDArray[np.float32]
    embedding_NE: NDArray[np.float32]


@dataclass(frozen=True)
class BidChanges:
    """Change log of bids: rows sorted by time."""

    ad: Ints
    time_us: Ints
    bid: Floats


@dataclass(frozen=True)
class Users:
    """All users of the horizon; `interest_DUI` is the latent state that drifts from day to day."""

    joined_us: Ints
    activity: Floats
    """Mean 1."""
    interest_DUI: Ints
    weight_UI: Floats
    phase_UI: Floats
    """Hour of the day at which an interest is strongest."""
    taste_UF: Floats
    log_price: Floats
    favourites: Ints
    """[U, 3] advertisers."""
    device: Ints
    surface_share: Floats
    """[U, S]."""
    categorical_UC: Ints
    dense_UD: NDArray[np.float32]


@dataclass(frozen=True)
class Population:
    """Ads, users and the tables of effects that the preference function reads."""

    config: SimulatorConfig
    seed: int
    start_us: int
    ads: Ads
    bid_changes: BidChanges
    users: Users
    advertiser_trust: Floats
    device_format: Floats
    """[DEVICES, F] log-odds."""
    surface_format: Floats
    """[S, F] multiplier of a user's taste for the format."""

    @property
    def parent(self) -> Ints:
        """Parent topic of each ad."""
        return self.ads.leaf // self.config.topics[2]

    def day_index(self, times_us: Ints) -> Ints:
        """Day number of each time, cut to the horizon."""
        return np.clip((times_us - self.start_us) // DAY_US, 0, self.config.num_days - 1)


def user_ids(index: Ints) -> Ints:
    """Public ids of users."""
    return index * USER_STEP + USER_BASE


def ad_ids(index: Ints) -> Ints:
    """Public ids of ads (and of organic items, which are the content of ads)."""
    return index * AD_STEP + AD_BASE


def indices(ids: Ints, base: int, step: int, count: int, name: str) -> Ints:
    """Positions of public ids; raises ValueError with the first unknown id."""
    index, rest = np.divmod(np.asarray(ids, dtype=np.int64) - base, step)
    bad = (rest != 0) | (index < 0) | (index >= count)
    if bad.any():
        raise ValueError(f"{name}: {np.asarray(ids)[bad].flat[0]} is not an id of this world")
    return index


def build_population(config: SimulatorConfig, seed: int) -> Population:
    """Draw the whole population. Equal arguments give equal arrays."""
    start = datetime.fromisoformat(config.first_day).replace(tzinfo=UTC)
    start_us = int(start.timestamp()) * 1_000_000
    topic = np.random.default_rng([seed, 1])
    num_advertisers = max(config.num_ads // 25, 12)
    parents = config.topics[0] * config.topics[1]
    parent_share = _zipf_shares(topic, parents, 0.7)
    homes_A2 = topic.choice(parents, size=(num_advertisers, 2), p=parent_share)
    trust = topic.normal(0, 1, num_advertisers)
    surface_format = np.array([[0.8, 0.9, 1.0, 0.6], [0.5, 1.4, 0.5, 0.7], [1.0, 0.4, 0.8, 1.2]])
    assert surface_format.shape == (len(SURFACES), len(FORMATS))
    ads = _draw_ads(config, np.random.default_rng([seed, 2]), start_us, homes_A2, trust)
    return Population(
        config=config,
        seed=seed,
        start_us=start_us,
        ads=ads,
        bid_changes=_draw_bid_changes(config, np.random.default_rng([seed, 3]), start_us, ads),
        users=_draw_users(config, np.random.default_rng([seed, 4]), start_us, ads, parent_share),
        advertiser_trust=trust,
        device_format=topic.normal(0, 0.3, (DEVICES, len(FORMATS))),
        surface_format=surface_format,
    )


def _zipf_shares(rng: np.random.Generator, count: int, exponent: float) -> Floats:
    shares = rng.permutation(np.arange(1, count + 1, dtype=np.float64) ** -exponent)
    return np.asarray(shares / shares.sum())


def _topic_vectors(config: SimulatorConfig, rng: np.random.Generator) -> Floats:
    """[T, E]: a leaf's vector is its own part plus that of its parent and of its top topic."""
    tops, parents, leaves = config.topics
    dim = config.embedding_dim
    top = np.repeat(rng.normal(0, 1.0, (tops, dim)), parents * leaves, axis=0)
    parent = np.repeat(rng.normal(0, 0.8, (tops * parents, dim)), leaves, axis=0)
    return np.asarray(top + parent + rng.normal(0, 0.7, (config.num_leaves, dim)))


def _draw_ads(config: SimulatorConfig, rng: np.random.Generator, start_us: int, homes_A2: Ints, trust: Floats) -> Ads:
    created = _creation_times(config, rng, start_us)
    count = len(created)
    life_days = rng.exponential(1.0 / config.new_ad_share, count)
    retired = np.maximum(created, start_us) + HOUR_US + (life_days * DAY_US).astype(np.int64)
    retired[retired >= start_us + config.num_days * DAY_US] = NEVER
    # campaigns: three per advertiser; price, objective and budget belong to the campaign
    num_campaigns = len(homes_A2) * 3
    campaign = rng.choice(num_campaigns, size=count, p=_zipf_shares(rng, num_campaigns, 0.5))
    advertiser = campaign // 3
    home = homes_A2[advertiser, (rng.random(count) < 0.3).astype(np.int64)]
    leaf = home * config.topics[2] + np.minimum(
        rng.exponential(config.topics[2] / 3, count).astype(np.int64), config.topics[2] - 1
    )
    quality = rng.normal(0, 1, count)
    landing = rng.normal(0, 1, count)
    log_price = rng.normal(0, 1, num_campaigns)[campaign] + rng.normal(0, 0.35, count)
    order = np.argsort(np.argsort(-(0.5 * quality + rng.normal(0, 1, count))))
    popularity = (order + 1 + config.popularity_offset * count) ** -config.popularity_exponent
    embedding = _topic_vectors(config, rng)[leaf] + rng.normal(0, 0.35, (count, config.embedding_dim))
    embedding += np.outer(quality, rng.normal(0, 1, config.embedding_dim)) * 0.35
    attributes = np.stack([log_price, trust[advertiser] * 0.5 + landing * 0.5 + rng.normal(0, 0.5, count)], axis=1)
    return Ads(
        created_us=created,
        retired_us=retired,
        leaf=leaf,
        advertiser=advertiser,
        campaign=campaign,
        format=rng.choice(len(FORMATS), size=count, p=[0.4, 0.3, 0.2, 0.1]),
        objective=rng.choice(3, size=num_campaigns, p=[0.2, 0.4, 0.4])[campaign],
        log_price=log_price,
        quality=quality,
        wear=rng.gamma(2.0, 0.5, count),
        popularity=popularity / popularity.sum(),
        bid=rng.lognormal(0.0, 0.5, num_campaigns)[campaign] * rng.lognormal(0.0, 0.2, count),
        budget=rng.lognormal(5.0, 1.0, num_campaigns)[campaign],
        landing=landing,
        attributes_N2=np.clip(attributes, -5, 5).astype(np.float32),
        embedding_NE=np.clip(embedding, -5, 5).astype(np.float32),
    )


def _creation_times(config: SimulatorConfig, rng: np.random.Generator, start_us: int) -> Ints:
    """Ads of the start were made in the 60 days before; then a share of them appears every day."""
    old = start_us - 1 - (rng.beta(1.0, 1.6, config.num_ads) * 60 * DAY_US).astype(np.int64)
    per_day = round(config.num_ads * config.new_ad_share)
    new = [start_us + day * DAY_US + rng.integers(0, DAY_US, size=per_day) for day in range(config.num_days)]
    return np.sort(np.concatenate([old, *new]))


def _draw_bid_changes(config: SimulatorConfig, rng: np.random.Generator, start_us: int, ads: Ads) -> BidChanges:
    ad, time_us = [], []
    for day in range(config.num_days):
        begin = start_us + day * DAY_US
        live = np.flatnonzero((ads.created_us < begin) & (ads.retired_us >= begin + DAY_US))
        chosen = np.sort(rng.choice(live, size=round(len(live) * config.bid_change_share), replace=False))
        ad.append(chosen)
        time_us.append(begin + rng.integers(0, DAY_US, size=len(chosen)))
    all_ads, all_times = np.concatenate(ad), np.concatenate(time_us)
    order = np.argsort(all_times, kind="stable")
    bids = ads.bid[all_ads] * rng.lognormal(0.0, 0.3, len(all_ads))
    return BidChanges(ad=all_ads[order], time_us=all_times[order], bid=bids[order])


def _draw_users(
    config: SimulatorConfig, rng: np.random.Generator, start_us: int, ads: Ads, parent_share: Floats
) -> Users:
    count, num_interests = config.num_users, config.num_interests
    tops, parents, leaves = config.topics
    age, gender = rng.integers(1, AGE_BANDS + 1, count), rng.integers(1, GENDERS + 1, count)
    group = (age - 1) * GENDERS + gender - 1
    # what a demographic group likes: the topics' shares, tilted group by group at the top level
    tilt_GP = np.repeat(rng.normal(0, 0.7, (AGE_BANDS * GENDERS, tops)), parents, axis=1)
    share_GP = parent_share * np.exp(tilt_GP)
    cumulative_GP = np.cumsum(share_GP / share_GP.sum(axis=1, keepdims=True), axis=1)
    parent_UI = (rng.random((count, num_interests, 1)) > cumulative_GP[group][:, None, :-1]).sum(axis=2)
    first_UI = parent_UI * leaves + rng.integers(0, leaves, (count, num_interests))
    weight_UI = np.sort(rng.uniform(0.45, 1.0, (count, num_interests)), axis=1)[:, ::-1]
    joined = start_us - 1 - (rng.exponential(400, count) * DAY_US).astype(np.int64)
    late = rng.random(count) < config.new_user_share
    joined[late] = start_us + rng.integers(0, config.num_days * DAY_US, size=int(late.sum()))
    activity = rng.lognormal(0.0, config.activity_sigma, count)
    mean_events = config.num_impressions * config.organic_ratio / count * 14 / config.num_days
    activity = np.minimum(activity / activity.mean(), config.max_user_events / mean_events)
    log_price = rng.normal(0, 1, count)
    device = rng.choice(DEVICES, size=count, p=[0.4, 0.3, 0.2, 0.1])
    declared = np.where(rng.random(count) < 0.6, first_UI[:, 0] // (parents * leaves) + 1, 0)
    tenure = np.log1p(np.maximum(start_us - joined, 0) / DAY_US)
    observed = [tenure / 2, log_price + rng.normal(0, 0.7, count), np.log(activity) + rng.normal(0, 0.5, count)]
    shares = np.array(config.surface_share) * rng.gamma(4.0, 0.25, (count, len(SURFACES)))
    advertiser_share = np.asarray(np.bincount(ads.advertiser, weights=ads.popularity), dtype=np.float64)
    return Users(
        joined_us=joined,
        activity=activity / activity.mean(),
        interest_DUI=_drift(config, rng, first_UI),
        weight_UI=np.ascontiguousarray(weight_UI),
        phase_UI=rng.uniform(0, 24, (count, num_interests)),
        taste_UF=rng.normal(0, 1, (count, len(FORMATS))),
        log_price=log_price,
        favourites=_choose(rng, advertiser_share, (count, 3)),
        device=device,
        surface_share=shares / shares.sum(axis=1, keepdims=True),
        categorical_UC=np.stack([age, gender, rng.integers(1, REGIONS + 1, count), device + 1, declared], axis=1),
        dense_UD=np.clip(np.stack(observed, axis=1), -5, 5).astype(np.float32),
    )


def _drift(config: SimulatorConfig, rng: np.random.Generator, first_UI: Ints) -> Ints:
    """[D, U, I]: every day an interest may move, mostly to a sibling leaf."""
    leaves, days = config.topics[2], [first_UI]
    for _ in range(1, config.num_days):
        previous = days[-1]
        sibling = previous // leaves * leaves + rng.integers(0, leaves, previous.shape)
        anywhere = rng.integers(0, config.num_leaves, previous.shape)
        target = np.where(rng.random(previous.shape) < 0.7, sibling, anywhere)
        days.append(np.where(rng.random(previous.shape) < config.drift, target, previous))
    return np.stack(days)


def _choose(rng: np.random.Generator, weights: Floats, shape: tuple[int, ...]) -> Ints:
    """Weighted draws with replacement by inversion."""
    cumulative = np.cumsum(weights)
    return np.asarray(np.searchsorted(cumulative, rng.random(shape) * cumulative[-1], side="right"))
