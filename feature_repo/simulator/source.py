"""The simulator as a source: a world's days as tables of the contract, and its oracle by public ids."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from datetime import date, timedelta

import numpy as np
import pyarrow as pa

from feature_repo.adapters.base import check_day
from feature_repo.simulator import rows
from feature_repo.simulator.config import KINDS, LABEL_WINDOWS, SURFACES, SimulatorConfig, preset
from feature_repo.simulator.events import DayEvents, World
from feature_repo.simulator.preference import surface_index
from feature_repo.simulator.step import Policy, StepConfig, StepResult, step
from feature_repo.simulator.world import (
    AD_BASE,
    AD_STEP,
    USER_BASE,
    USER_STEP,
    Floats,
    Ints,
    build_population,
    indices,
)
from feature_repo.simulator.world import ad_ids as ad_ids_of
from feature_repo.tables import SourceFacts

USER_CATEGORICAL = ("age_band", "gender", "region", "device", "declared_topic")
USER_DENSE = ("tenure", "price_level", "activity")
AD_ATTRIBUTES = ("log_price", "landing")


class Oracle:
    """The known preference function of a world, addressed by public ids."""

    def __init__(self, world: World) -> None:
        self.world = world

    def click_probability(
        self, user_ids: Ints, ad_ids: Ints, surfaces: Sequence[str] | Ints, timestamps_us: Ints
    ) -> Floats:
        """True click probability of each (user, ad, surface, time).

        Args:
            user_ids: [R] public user ids.
            ad_ids: [R] public ad ids.
            surfaces: [R] surface names, or their positions in `facts.surfaces`.
            timestamps_us: [R] epoch microseconds; days outside the horizon use the nearest day's interests.

        Returns:
            [R] float64.

        Raises:
            ValueError: an id or a surface is unknown.
        """
        position = surfaces if isinstance(surfaces, np.ndarray) else surface_index(list(surfaces))
        return self.world.preference.click(
            self._users(user_ids), self._ads(ad_ids), position.astype(np.int64), np.asarray(timestamps_us)
        )

    def conversion_probability(self, user_ids: Ints, ad_ids: Ints, timestamps_us: Ints) -> Floats:
        """[R] true probability that a click leads to a conversion (recorded or lost)."""
        return self.world.preference.conversion_given_click(
            self._users(user_ids), self._ads(ad_ids), np.asarray(timestamps_us)
        )

    def click_matrix(self, user_ids: Ints, surface: str, timestamp_us: int, ad_ids: Ints) -> Floats:
        """[U, N] true click probability of every user with every ad, at one surface and time."""
        return self.world.preference.click_block(
            self._users(user_ids), self._ads(ad_ids), int(surface_index([surface])[0]), timestamp_us
        )

    def eligible_ads(self, timestamp_us: int) -> Ints:
        """Public ids of the ads that could be shown at a time, sorted."""
        ads = self.world.population.ads
        return ad_ids_of(np.flatnonzero((ads.created_us < timestamp_us) & (ads.retired_us > timestamp_us)))

    def _users(self, user_ids: Ints) -> Ints:
        return indices(user_ids, USER_BASE, USER_STEP, self.world.population.config.num_users, "user_id")

    def _ads(self, ad_ids: Ints) -> Ints:
        return indices(ad_ids, AD_BASE, AD_STEP, len(self.world.population.ads.leaf), "ad_id")


class SimulatorSource:
    """Days of a simulated world. Everything is a function of (configuration, seed)."""

    def __init__(self, config: SimulatorConfig, seed: int) -> None:
        self.config = config
        self.seed = seed
        self.world = Oracle(World(build_population(config, seed)))
        self._day = functools.lru_cache(maxsize=2)(self.world.world.day)

    @classmethod
    def open(cls, preset_name: str, seed: int) -> SimulatorSource:
        """Build the world of a preset."""
        return cls(preset(preset_name), seed)

    @property
    def facts(self) -> SourceFacts:
        """Facts of the simulated log."""
        config = self.config
        first = date.fromisoformat(config.first_day)
        return SourceFacts(
            name="simulator",
            timezone="UTC",
            first_day=config.first_day,
            last_day=(first + timedelta(days=config.num_days - 1)).isoformat(),
            surfaces=SURFACES,
            verticals=SURFACES,
            labels=dict(LABEL_WINDOWS),
            history_kinds=(*KINDS, "click", "conversion"),
            history_length=config.history_length,
            user_categorical=USER_CATEGORICAL,
            user_dense=USER_DENSE,
            ad_attributes=AD_ATTRIBUTES,
            category_levels=3,
            embedding_dim=config.embedding_dim,
            evaluation_cut=(first + timedelta(days=config.num_days - 2)).isoformat(),
            negative_rate=0.2,
            max_ads=len(self.world.world.population.ads.leaf),
            max_users=config.num_users,
            has_oracle=True,
        )

    def events(self, index: int) -> DayEvents:
        """Raw events of day number `index` (the last two are kept in memory)."""
        return self._day(index)

    def step(self, day: str, policy: Policy, *, config: StepConfig | None = None, seed: int = 0) -> StepResult:
        """Serve a day through a retrieval policy instead of the logging policy (see `step.step`)."""
        return step(self.world.world, check_day(self.facts, day), policy, config or StepConfig(), seed)

    def tables(self, day: str) -> Iterator[tuple[str, pa.Table]]:
        """Tables of a day; outcomes and engagements are those that became known on it."""
        index = check_day(self.facts, day)
        population = self.world.world.population
        events = self.events(index)
        yield "impressions", rows.impressions(population, index, events.impressions)
        recent = [(i, self.events(i)) for i in (index - 1, index) if i >= 0]
        yield "outcomes", rows.outcomes(population, index, recent)
        yield "engagements", rows.engagements(population, index, recent)
        yield "ads", rows.ads(population, index)
        yield "users", rows.users(population, index)
        yield "oracle", rows.oracle(index, events.impressions)
