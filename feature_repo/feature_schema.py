"""The feature schema of a source: which columns the models read, in which order, with which table sizes.

Everything follows from `SourceFacts`, so a home has one schema from its first day on. Statistics are centred so
that a brand-new user or ad has 0 in each of them (the age and the bid of an ad are its own).
"""

from __future__ import annotations

from feature_repo.tables import SourceFacts
from models.schema import Categorical, Dense, FeatureSchema, Group, Task

WINDOWS = ("1d", "7d", "all")
"""Windows of the counts: the last day, the last seven days, everything up to the cut."""

CATEGORY_CODES = (256, 1024, 4096)
"""Upper bounds of distinct categories at level 1, 2, and 3 or deeper."""

ADVERTISER_CODES = 8192
"""Upper bound of distinct advertisers that histories are compared by."""

USER_ATTRIBUTE_VALUES = 1024
AD_LABEL_VALUES = 64


def schema_for(facts: SourceFacts) -> FeatureSchema:
    """The feature schema of a source.

    Table sizes are the next power of two from four times the expected cardinality. The raw value of `ad_id` is
    the ad *code*, the number that histories carry too, so that both reach the same row of table `item`.
    """
    item_rows = power_of_two(4 * facts.max_ads)
    return FeatureSchema(
        source=facts.name,
        categorical=(*_user_categorical(facts), *_ad_categorical(facts, item_rows), *_context_categorical(facts)),
        dense=(
            *(Dense(name, "user") for name in user_dense_names(facts)),
            *(Dense(name, "ad") for name in ad_dense_names(facts)),
        ),
        groups=groups_for(facts),
        embedding_dim=facts.embedding_dim,
        history_length=facts.history_length,
        kinds=facts.history_kinds,
        surfaces=facts.surfaces,
        tasks=tuple(Task(name, window_s) for name, window_s in facts.labels.items()),
        item_rows=item_rows,
    )


def power_of_two(at_least: int) -> int:
    """The smallest power of two that is not below `at_least` (and at least 8)."""
    return 1 << (max(at_least, 8) - 1).bit_length()


def _user_categorical(facts: SourceFacts) -> tuple[Categorical, ...]:
    attribute_rows = power_of_two(4 * USER_ATTRIBUTE_VALUES)
    return (
        Categorical("user_id", "user", power_of_two(4 * facts.max_users), "user"),
        *(Categorical(name, "user", attribute_rows, name) for name in facts.user_categorical),
    )


def _ad_categorical(facts: SourceFacts, item_rows: int) -> tuple[Categorical, ...]:
    label_rows = power_of_two(4 * AD_LABEL_VALUES)
    return (
        Categorical("ad_id", "ad", item_rows, "item"),
        Categorical("advertiser_id", "ad", power_of_two(2 * facts.max_ads), "advertiser"),
        Categorical("campaign_id", "ad", power_of_two(2 * facts.max_ads), "campaign"),
        Categorical("objective", "ad", label_rows, "objective"),
        Categorical("format", "ad", label_rows, "format"),
        *(
            Categorical(f"category_{level}", "ad", power_of_two(4 * category_codes(level)), f"category_{level}")
            for level in range(1, facts.category_levels + 1)
        ),
    )


def _context_categorical(facts: SourceFacts) -> tuple[Categorical, ...]:
    return (
        Categorical("surface", "context", power_of_two(4 * len(facts.surfaces)), "surface"),
        Categorical("hour", "context", power_of_two(4 * 24), "hour"),
    )


def category_codes(level: int) -> int:
    """Upper bound of distinct categories at a level, counted from 1."""
    return CATEGORY_CODES[min(level, len(CATEGORY_CODES)) - 1]


def groups_for(facts: SourceFacts) -> tuple[Group, ...]:
    """Attributes by which history and candidate are compared: every category level, and the advertiser."""
    return (
        *(Group(f"category_{level}", category_codes(level)) for level in range(1, facts.category_levels + 1)),
        Group("advertiser", min(ADVERTISER_CODES, power_of_two(facts.max_ads))),
    )


def count_names(facts: SourceFacts, role: str) -> tuple[str, ...]:
    """Names of the seven count columns of a user or an ad, in order."""
    return (
        *(f"{role}_impressions_{window}" for window in WINDOWS),
        *(f"{role}_engagements_{window}" for window in WINDOWS),
        f"{role}_{facts.main_label}_all",
    )


def rate_names(facts: SourceFacts, role: str) -> tuple[str, ...]:
    """Names of the all-time rates of a role, one a label, in the order of the labels."""
    return tuple(f"{role}_{label}_rate" for label in facts.labels)


def user_statistic_names(facts: SourceFacts) -> tuple[str, ...]:
    """Statistics of a user in column order."""
    return (
        *count_names(facts, "user"),
        *rate_names(facts, "user"),
        f"user_{facts.main_label}_rate_7d",
        "user_active_days",
        "user_recency",
    )


def ad_statistic_names(facts: SourceFacts) -> tuple[str, ...]:
    """Statistics of an ad in column order: its own, those of its advertiser and category, its age and bid."""
    return (
        *count_names(facts, "ad"),
        *rate_names(facts, "ad"),
        f"ad_{facts.main_label}_rate_7d",
        *rate_names(facts, "advertiser"),
        *rate_names(facts, "category"),
        "ad_age",
        "ad_bid",
    )


def user_dense_names(facts: SourceFacts) -> tuple[str, ...]:
    """Dense columns of a user: the source's own attributes, then statistics."""
    return (*facts.user_dense, *user_statistic_names(facts))


def ad_dense_names(facts: SourceFacts) -> tuple[str, ...]:
    """Dense columns of an ad: the source's own attributes, then statistics."""
    return (*facts.ad_attributes, *ad_statistic_names(facts))
