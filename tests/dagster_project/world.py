"""A small asset graph on days, made by the same factory as the real one."""

from pathlib import Path

import dagster as dg

from dagster_project.lib.assets import Made, Verdict, stage_asset, stage_check
from dagster_project.lib.resources import Home

DAYS = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-05")
BEFORE = dg.TimeWindowPartitionMapping(start_offset=-1, end_offset=-1, allow_nonexistent_upstream_partitions=True)
EARLIER = dg.TimeWindowPartitionMapping(start_offset=-4, end_offset=0, allow_nonexistent_upstream_partitions=True)
ALL_DAYS = ["2026-01-01", "2026-01-02", "2026-01-03", "2026-01-04"]


class World:
    """`raw` -> `chain` (reads its own yesterday) -> `model` (reads all earlier days); content comes from `values`."""

    def __init__(self, root: Path) -> None:
        self.values: dict[str, str] = {}
        self.calls: list[str] = []
        self.passes = True
        self.home = Home(root=str(root), source="test", preset="tiny", seed=0)
        self.codes = {"raw": "1", "chain": "1", "model": "1"}

    def _made(self, name: str, day: str) -> Made:
        self.calls.append(f"{name} {day}")
        return Made(self.values.get(f"{name} {day}", "same"), {"dagster/row_count": 1})

    def definitions(self) -> dg.Definitions:
        """Declared anew, so that a changed code version is seen."""

        @stage_asset("g", "raw", deps=[], kinds=set(), code=self.codes["raw"], job="all", partitions=DAYS)
        def raw(home: Home, day: str) -> Made:
            """Raw."""
            return self._made("raw", day)

        chain_deps = [["g", "raw"], dg.AssetDep(["g", "chain"], partition_mapping=BEFORE)]

        @stage_asset("g", "chain", deps=chain_deps, kinds=set(), code=self.codes["chain"], job="all", partitions=DAYS)
        def chain(home: Home, day: str) -> Made:
            """Chain."""
            return self._made("chain", day)

        model_deps = [dg.AssetDep(["g", "raw"], partition_mapping=EARLIER)]

        @stage_asset("g", "model", deps=model_deps, kinds=set(), code=self.codes["model"], job="all", partitions=DAYS)
        def model(home: Home, day: str) -> Made:
            """Model."""
            return self._made("model", day)

        @stage_check("g", "raw", "fine", partitions=DAYS)
        def fine(home: Home, day: str) -> Verdict:
            """Fine."""
            return Verdict(self.passes, "as told", {"number": 7})

        job = dg.define_asset_job("all", selection=dg.AssetSelection.tag("mirach/job", "all"), partitions_def=DAYS)
        return dg.Definitions([raw, chain, model], asset_checks=[fine], jobs=[job], resources={"home": self.home})
