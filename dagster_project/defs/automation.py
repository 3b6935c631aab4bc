"""Jobs, the daily schedule, and the sensor that evaluates automation conditions.

The runner and the UI launch the same jobs. Both the schedule and the sensor act on the latest partition only.
"""

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from dagster_project.lib.assets import JOB_TAG
from dagster_project.lib.partitions import DAYS, DAYS_BY_VERTICAL, FACTS


def _job(name: str, partitions: dg.PartitionsDefinition[str], description: str) -> UnresolvedAssetJobDefinition:
    """A job makes the assets that carry its name."""
    selection = dg.AssetSelection.tag(JOB_TAG, name)
    return dg.define_asset_job(name, selection=selection, partitions_def=partitions, description=description)


ingest_job = _job("ingest", DAYS, "The contract's tables of a day, or of a range of days in one run.")
daily_job = _job(
    "daily", DAYS, "Features of a day; yesterday's foundation model labels it, is judged on it, then learns from it."
)
frozen_job = _job("frozen", DAYS, "The foundation model as of the evaluation cut, judged on all test days.")
transfer_job = _job("transfer", DAYS, "The domain model as of a day.")
verticals_job = _job("verticals", DAYS_BY_VERTICAL, "The student of one vertical as of a day.")
release_job = _job("release", DAYS, "A release as of a day: index, tuning, Bento, shadow comparison, promotion.")
held_out_job = _job("held_out", DAYS, "Yesterday's index, and its scorer's control, judged on a day not seen.")
monitoring_job = _job("monitoring", DAYS, "What the served release did on a day: requests, outcomes, drift, recall.")
# Coarser partitions are made at their end: Dagster takes a time of day for days only.
BY_DAY = FACTS.grain == "day"
daily_schedule = dg.build_schedule_from_partitioned_job(daily_job, hour_of_day=1 if BY_DAY else None, name="every_day")
ingest_schedule = dg.build_schedule_from_partitioned_job(
    ingest_job, hour_of_day=0 if BY_DAY else None, minute_of_hour=30 if BY_DAY else None, name="every_day_ingest"
)


@dg.definitions
def automation() -> dg.Definitions:
    """Everything runs in process: steps of one day share what they imported."""
    return dg.Definitions(
        executor=dg.in_process_executor,
        jobs=[
            ingest_job,
            daily_job,
            frozen_job,
            transfer_job,
            verticals_job,
            release_job,
            held_out_job,
            monitoring_job,
        ],
        schedules=[ingest_schedule, daily_schedule],
        sensors=[
            dg.AutomationConditionSensorDefinition(
                "automation",
                target=dg.AssetSelection.all(),
                default_status=dg.DefaultSensorStatus.RUNNING,
                minimum_interval_seconds=60,
            )
        ],
    )
