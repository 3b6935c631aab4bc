"""The order control: the same retrieval model learned and judged with the events of a day in another order.

Day-grain logs are stored in some order within a day, and where that order is an artefact (Amazon reviews stand by
product number) a model may learn it. The control builds the features of the reordered log in a lake of its own, trains
the same configuration on it, and judges it on that log's own last items. Imports torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dagster_project.lib.index_stages import AUDIT_K, standard_beams
from dagster_project.lib.recipes import recipe
from dagster_project.lib.resources import Home
from dagster_project.lib.training import lake_frame
from feature_repo.adapters.base import Reorderable
from feature_repo.features import build_day
from feature_repo.ingest import ingest_day
from feature_repo.lake import Lake
from models.data import FrameData
from models.index.audit import Scan, answer, requests_at
from models.index.joint import train_retrieval
from models.index.monn import RetrievalModel
from models.index.publish import publish
from models.metrics import recall_at_k


def judge_reordered(home: Home, day: str, as_of: str) -> dict[str, Any]:
    """Recall of the control on the reordered log's last partition: by the full scan and by the default tier's beams."""
    lake = reordered_lake(home)
    facts = home.facts()
    learnt = [d for d in facts.days if d <= as_of and facts.may_train(d)][-recipe(home).retrieval_days :]
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


def last_item_recall(model: RetrievalModel, data: FrameData, beams: tuple[int, ...]) -> dict[str, float]:
    """Recall of a day's positives among ten ads, by the full scan and by a beam, with the beam's coverage and cost."""
    row_B = (data.label_RT[:, 0] > 0.5).nonzero().squeeze(1).numpy()
    ways: list[tuple[int, ...] | Scan] = ["exact", beams]
    exact, beam = answer(model, publish(model, data.ads), data, row_B, ways, k=AUDIT_K)
    relevant_BM = requests_at(data, row_B).relevant_BM
    return {
        "requests": len(row_B),
        "exact": float(np.nanmean(recall_at_k(exact.ad_code_BK, relevant_BM))),
        "index": float(np.nanmean(recall_at_k(beam.ad_code_BK, relevant_BM))),
        "coverage": float(np.nanmean(recall_at_k(beam.ad_code_BK, exact.ad_code_BK))),
        "cost": float(beam.cost_B.mean()),
    }
