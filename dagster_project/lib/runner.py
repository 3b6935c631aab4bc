"""Run the whole loop in this process, day by day, through the same jobs that the UI launches.

Only stale (asset, partition) pairs are selected. What was made is recorded in the home's Dagster instance, so a run
that failed is resumed by the next one, and the UI shows all of it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg
from dagster import AssetKey, DagsterInstance
from dagster._core.errors import DagsterExecutionInterruptedError
from dagster._core.execution.execute_in_process_result import ExecuteInProcessResult

from dagster_project.lib.assets import WORK_SECONDS
from dagster_project.lib.errors import StageFailedError
from dagster_project.lib.refusals import CONTRACT
from dagster_project.lib.resources import Home
from dagster_project.lib.staleness import Ledger, Node, stale

QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
RANGE_START = "dagster/asset_partition_range_start"
RANGE_END = "dagster/asset_partition_range_end"
OURS = {"mirach/started_by": "make run"}


@dataclass
class Step:
    """One run of one job: its partition (a day, a range of days, or a day by a vertical), what it made, how long."""

    job: str
    partition: str
    made: dict[str, str]
    """Node -> why."""
    skipped: int
    wall_s: float = 0.0
    work_s: dict[str, float] = field(default_factory=dict)
    """Asset or check -> seconds of its own work."""


@dataclass
class Runner:
    """Executes jobs on one home. `report` is called with every step, before (wall_s = 0) and after it ran."""

    definitions: dg.Definitions
    instance: DagsterInstance
    home: Home
    report: Callable[[Step], None]
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.instance, self.definitions.resolve_asset_graph())
        self._end_dead_runs()

    def _end_dead_runs(self) -> None:
        """Close runs that a killed process left open: only one process at a time holds a home's lock."""
        alive = [dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.NOT_STARTED]
        for run in self.instance.get_runs(dg.RunsFilter(tags=OURS, statuses=alive)):
            self.instance.report_run_canceled(run, message="the process of this run was killed")

    def keys(self, job: str, without: Iterable[str] = ()) -> list[AssetKey]:
        """Assets of a job, parents first, less those named."""
        graph = self.ledger.graph
        selected = self.definitions.resolve_job_def(job).asset_layer.selected_asset_keys
        left_out = set(without)
        return [k for k in graph.toposorted_asset_keys if k in selected and k.to_user_string() not in left_out]

    def run(self, job: str, partition: str, keys: Sequence[AssetKey]) -> None:
        """Make what is stale among `keys` for one partition."""
        wanted = [Node(key, partition) for key in keys]
        reasons = stale(self.ledger, wanted, self._settings_of)
        self._execute(job, [partition], reasons, len(wanted))

    def run_days(self, job: str, days: Sequence[str], keys: Sequence[AssetKey]) -> None:
        """Make what is stale among `keys` for many days, each unbroken range of stale days as one run."""
        reasons = stale(self.ledger, [Node(key, day) for day in days for key in keys], self._settings_of)
        missing = {node.partition for node in reasons}
        runs: list[list[str]] = []
        for position, day in enumerate(days):
            if day not in missing:
                continue
            if runs and runs[-1][-1] == days[position - 1]:
                runs[-1].append(day)
            else:
                runs.append([day])
        for chunk in runs or [[days[-1]]]:
            chosen = {node: why for node, why in reasons.items() if node.partition in chunk}
            self._execute(job, chunk, chosen, len(keys) * len(chunk))

    def _settings_of(self, key: AssetKey) -> str:
        return self.home.settings_digest(key.path[0])

    def _execute(self, job: str, days: Sequence[str], reasons: dict[Node, str], num_wanted: int) -> None:
        name = days[0] if len(days) == 1 else f"{days[0]}..{days[-1]}"
        step = Step(job, name, {str(node): why for node, why in reasons.items()}, num_wanted - len(reasons))
        self.steps.append(step)
        if not reasons:
            return
        self.report(step)
        keys = sorted({node.key for node in reasons})
        start = time.perf_counter()
        result = self._run_job(job, days, keys)
        step.wall_s = round(time.perf_counter() - start, 3)
        step.work_s = _work_seconds(result)
        self.ledger.forget(keys)
        if not result.success:
            raise _failure(result, step)
        self.report(step)

    def _run_job(self, job: str, days: Sequence[str], keys: Sequence[AssetKey]) -> ExecuteInProcessResult:
        span = {} if len(days) == 1 else {RANGE_START: days[0], RANGE_END: days[-1]}
        try:
            return self.definitions.resolve_job_def(job).execute_in_process(
                run_config=QUIET,
                instance=self.instance,
                partition_key=days[0] if len(days) == 1 else None,
                asset_selection=keys,
                raise_on_error=False,
                tags={**OURS, **span},
            )
        except DagsterExecutionInterruptedError as interrupted:
            raise KeyboardInterrupt from interrupted


def _work_seconds(result: ExecuteInProcessResult) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for event in result.get_asset_materialization_events():
        data = event.step_materialization_data.materialization
        seconds[data.asset_key.to_user_string()] += _seconds(data.metadata)
    for check in result.get_asset_check_evaluations():
        seconds[f"{check.asset_key.to_user_string()}:{check.check_name}"] += _seconds(check.metadata)
    return dict(seconds)


def _seconds(metadata: Any) -> float:
    value = metadata.get(WORK_SECONDS)
    return float(value.value) if value is not None else 0.0


def _failure(result: ExecuteInProcessResult, step: Step) -> StageFailedError:
    """What went wrong in plain words: failed checks with their numbers, or the innermost error of the first step."""
    for check in result.get_asset_check_evaluations():
        if not check.passed and check.severity == dg.AssetCheckSeverity.ERROR:
            facts = ", ".join(
                f"{k}={v.value}" for k, v in check.metadata.items() if not isinstance(v.value, (list, dict))
            )
            name = f"check {check.check_name} of {check.asset_key.to_user_string()}"
            message = f"{step.job} {step.partition}: {name} failed: {check.description or ''} ({facts})"
            return StageFailedError(message, user_error=check.check_name == CONTRACT)
    for event in result.all_events:
        if event.is_step_failure and event.step_failure_data.error is not None:
            error = event.step_failure_data.error
            while error.cause is not None:
                error = error.cause
            message = f"{step.job} {step.partition}: {event.step_key}: {error.message.strip()}"
            return StageFailedError(message, user_error=error.cls_name in ("ValueError", "RefusedError"))
    return StageFailedError(f"{step.job} {step.partition}: the run failed; `make ui` shows its log", user_error=False)
