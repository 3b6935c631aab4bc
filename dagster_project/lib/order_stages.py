"""The order control: the same retrieval model learned and judged with the events of a day in another order.

Day-grain logs are stored in some order within a day, and where that order is an artefact (Amazon reviews stand by
product number) a model may learn it. The control builds the features of the reordered log in a lake of its own, trains
the same configuration on it, and judges it on that log's own last items. Imports torch.
"""

from __future__ import annotations

from typing import Any

from dagster_project.lib.control_stages import last_item_recall
from dagster_project.lib.index_stages import standard_beams
from dagster_project.lib.recipes import recipe
from dagster_project.lib.resources import Home
from dagster_project.lib.training import lake_frame
from feature_repo.adapters.base import Reorderable
from feature_repo.features import build_day
from feature_repo.ingest import ingest_day
from feature_repo.lake import Lake
from models.index.joint import train_retrieval


def judge_reordered(home: Home, day: str, as_of: str) -> dict[str, Any]:
    """Recall of the control on the reordered log's last partition: by the full scan and by the default tier's beams."""
    lake = reordered_lake(home)
    sampled = [d for d in home.facts().days if d <= as_of and lake.partition("training_frame", d).facts["num_kept"]]
    learnt = sampled[-recipe(home).retrieval_days :]
    data = [lake_frame(lake.root, d, learnt[-1]) for d in learnt]
    model, training = train_retrieval(recipe(home).preset.retrieval, home.feature_schema(), data, seed=home.seed)
    found = last_item_recall(model, lake_frame(lake.root, day, day), standard_beams(home, as_of))
    return {**found, "training_seconds": training.seconds}


def reordered_lake(home: Home) -> Lake:
    """Contract tables and features of the reordered source in `<home>/reordered/lake`.

    Raises:
        ValueError: the source has one order only.
    """
    source = home.open_source()
    if not isinstance(source, Reorderable):
        raise ValueError(f"source: {home.source!r} can't be reordered, but its facts say that its order is an artefact")
    other, lake = source.reordered(), Lake(home.path / "reordered" / "lake")
    for day in other.facts.days:
        ingest_day(lake, other, day)
        build_day(lake, other.facts, day)
    return lake
