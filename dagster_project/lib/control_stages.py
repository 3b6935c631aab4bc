"""The retrieval model judged on a day that it has not seen, against the same scorer trained without an index.

Degrading the scorer is exactly what makes an index easy to search, so coverage counts only when the joint scorer
keeps what the control has. Imports torch.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dagster_project.lib.index_stages import AUDIT_K, open_model, standard_beams, train_control
from dagster_project.lib.recipes import recipe
from dagster_project.lib.resources import Home
from dagster_project.lib.training import frame_data, oracle_matrix
from models.data import FrameData
from models.index.audit import (
    Requests,
    Scan,
    answer,
    audit_index,
    draw_requests,
    non_inferiority,
    true_clicks,
)
from models.index.monn import RetrievalModel
from models.index.publish import publish
from models.metrics import recall_at_k

MARGIN = 0.02


def judge(home: Home, day: str, as_of: str) -> dict[str, Any]:
    """Audit the index of `as_of` on requests of the next day, and compare its ad scorer with the control's.

    Ads are scored by expected clicks where an oracle knows them, else by the share of clicked ads found.
    """
    data = frame_data(home, day)
    (requests,) = draw_requests(data, (recipe(home).held_out_requests,), seed=home.seed + 1)
    truth_BN = oracle_matrix(home, data, requests.row_B)
    model = open_model(home, as_of)
    index = publish(model, data.ads)
    report = audit_index(
        model, index, data, requests, beams=standard_beams(home, as_of), k=AUDIT_K, probability_BN=truth_BN,
        seed=home.seed,
    )  # fmt: skip
    control, training = train_control(home, as_of)
    joint_B = _worth(model, data, requests, truth_BN)
    control_B = _worth(control, data, requests, truth_BN)
    known_B = ~np.isnan(joint_B) & ~np.isnan(control_B)
    verdict = non_inferiority(
        joint_B[known_B], control_B[known_B], requests.user_B[known_B], margin=MARGIN, seed=home.seed
    )
    positives = last_item_recall(model, data, standard_beams(home, as_of)) if home.facts().positives_only else {}
    return {
        "positives": positives, "coverage": asdict(report.coverage), "cost": report.cost,
        "ads_scored": report.ads_scored, "nodes_scored": report.nodes_scored, "requests": int(known_B.sum()),
        "expected_clicks": {name: asdict(value) for name, value in report.expected_clicks.items()},
        "recall_of_clicks": {name: asdict(value) for name, value in report.recall.items()},
        "measure": "recall of clicked ads" if truth_BN is None else "expected clicks",
        "joint": float(joint_B[known_B].mean()), "control": float(control_B[known_B].mean()),
        "ratio": asdict(verdict.ratio), "passed": verdict.passed, "reason": verdict.reason,
        "control_seconds": training.seconds,
    }  # fmt: skip


def _worth(
    model: RetrievalModel, data: FrameData, requests: Requests, truth_BN: NDArray[np.float32] | None
) -> NDArray[np.float64]:
    """What each answer of the ad scorer's full scan is worth; NaN where the request has no clicked ad to find."""
    (found,) = answer(model, publish(model, data.ads), data, requests.row_B, ["ad_scorer"], k=AUDIT_K)
    if truth_BN is None:
        return recall_at_k(found.ad_code_BK, requests.relevant_BM)
    return true_clicks(found.ad_code_BK, truth_BN)


def last_item_recall(model: RetrievalModel, data: FrameData, beams: tuple[int, ...]) -> dict[str, float]:
    """Recall of each positive of a day among ten ads by the full scan and a beam, with coverage and cost."""
    row_B = (data.label_RT[:, 0] > 0.5).nonzero().squeeze(1).numpy()
    ways: list[tuple[int, ...] | Scan] = ["exact", beams]
    exact, beam = answer(model, publish(model, data.ads), data, row_B, ways, k=AUDIT_K)
    relevant_BM = data.ad_code_R[torch.from_numpy(row_B)][:, None].numpy()
    return {
        "requests": len(row_B),
        "exact": float(np.nanmean(recall_at_k(exact.ad_code_BK, relevant_BM))),
        "index": float(np.nanmean(recall_at_k(beam.ad_code_BK, relevant_BM))),
        "coverage": float(np.nanmean(recall_at_k(beam.ad_code_BK, exact.ad_code_BK))),
        "cost": float(beam.cost_B.mean()),
    }
