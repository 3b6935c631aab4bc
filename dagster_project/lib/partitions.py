"""Partitions: days of the source in its own time zone, and days by vertical.

They are known when the code location loads: from the home's `lake/source.json` once something was ingested,
before that from the facts that the source states about itself. Adapters are light; nothing heavy is imported.
"""

from __future__ import annotations

import math
from datetime import date

import dagster as dg

from dagster_project.lib.settings import Settings, read_settings
from feature_repo.tables import SourceFacts, has_facts, next_key, read_facts

CRONS = {"day": "0 0 * * *", "month": "0 0 1 * *", "quarter": "0 0 1 */3 *", "year": "0 0 1 1 *"}
"""When a partition of each grain starts."""


def known_facts(settings: Settings) -> SourceFacts:
    """Facts of the source, from the lake or from the source itself.

    Raises:
        ValueError: the source is unknown, or its raw files are not where `DATA_DIR` says.
    """
    if has_facts(settings.lake):
        return read_facts(settings.lake)
    from feature_repo.adapters.registry import open_source

    source = open_source(settings.source, preset=settings.preset, data_dir=settings.data_dir, seed=settings.seed)
    return source.facts


def day_partitions(facts: SourceFacts) -> dg.TimeWindowPartitionsDefinition:
    """One partition a day (or month, quarter, year) of the log, both ends included."""
    end = next_key(date.fromisoformat(facts.last_day), facts.grain).isoformat()
    if facts.grain == "day":
        return dg.DailyPartitionsDefinition(start_date=facts.first_day, end_date=end, timezone=facts.timezone)
    return dg.TimeWindowPartitionsDefinition(
        start=facts.first_day, end=end, fmt="%Y-%m-%d", cron_schedule=CRONS[facts.grain], timezone=facts.timezone
    )


def vertical_partitions(facts: SourceFacts, days: dg.TimeWindowPartitionsDefinition) -> dg.MultiPartitionsDefinition:
    """`as_of` day by vertical."""
    return dg.MultiPartitionsDefinition(
        {"as_of": days, "vertical": dg.StaticPartitionsDefinition(list(facts.verticals))}
    )


SETTINGS = read_settings()
FACTS = known_facts(SETTINGS)
DAYS = day_partitions(FACTS)
DAYS_BY_VERTICAL = vertical_partitions(FACTS, DAYS)

NO_RATES = (
    "not a gate here: the log has positives only, so the rate is that of drawn negatives and no probability of anything"
)
"""Why gates on calibration pass for positives-only sources."""

PREVIOUS_DAY = dg.TimeWindowPartitionMapping(start_offset=-1, end_offset=-1, allow_nonexistent_upstream_partitions=True)
"""Day d reads day d-1; the first day reads nothing."""
EARLIER_DAYS = dg.TimeWindowPartitionMapping(
    start_offset=-len(FACTS.days), end_offset=0, allow_nonexistent_upstream_partitions=True
)
"""Day d reads every day up to and including d."""
ATTRIBUTION_DAYS = dg.TimeWindowPartitionMapping(
    start_offset=-(math.ceil(max(FACTS.labels.values()) / 86_400) + 1),
    end_offset=0,
    allow_nonexistent_upstream_partitions=True,
)
"""Day d reads the impressions that its outcomes may belong to."""
SAME_AS_OF = dg.MultiToSingleDimensionPartitionMapping(partition_dimension_name="as_of")


def previous_day(day: str) -> str | None:
    """The partition before `day`, or None on the first one."""
    position = FACTS.days.index(day)
    return FACTS.days[position - 1] if position else None
