"""Bodies of the tuning assets: collect node data, tune, judge against controls, write the candidate release."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from bentos.retrieval.release import make_release
from dagster_project.lib.index_stages import (
    AUDIT_K,
    INDEX,
    MODEL,
    audit_data,
    open_index,
    open_model,
    standard_beams,
    stored_audit,
)
from dagster_project.lib.recipes import recipe
from dagster_project.lib.resources import Home
from dagster_project.lib.training import made_artifact, new_artifact, oracle_matrix
from models.artifact import Artifact
from models.data import FrameData
from models.index.audit import answer, requests_at, true_clicks
from models.index.monn import RetrievalModel
from models.index.publish import Index
from models.index.storage import save_model
from models.metrics import recall_at_k
from models.tuning.node_data import NodeDataConfig, collect_node_data, node_data_quality
from models.tuning.tune import TuningVerdict, click_pairs, judge, random_pairs, split_by_time, tune

NODES, RELEASE = "tuning/node_data", "tuning/tuned_release"
EARLIER_SHARE = 0.5
"""Part of the day, by time, that node data come from; the rest decides whether tuning is kept."""
MARGIN = 0.01
"""Loss of the metric that matters, as a share of what the best ads would get."""
Floats = NDArray[np.float64]


def collect(home: Home, as_of: str, code: str) -> tuple[str, int, list[dict[str, Any]]]:
    """Node data of the day's earlier part; the version, the number of pairs, and the quality of each level."""
    model, index, data = open_model(home, as_of), open_index(home, as_of), audit_data(home, as_of)
    earlier, later = split_by_time(data, (EARLIER_SHARE, 1.0 - EARLIER_SHARE))
    rows = earlier[-recipe(home).node_requests :]
    pairs = collect_node_data(model, index, data, rows, NodeDataConfig(beams=standard_beams(home, as_of)))
    clicked = later[data.label_RT[later, 0] > 0.5]
    quality = node_data_quality(pairs, index, data.user_code_R[clicked].numpy(), data.ad_code_R[clicked].numpy())
    with new_artifact(home, "node_data", NODES, as_of, code) as draft:
        pq.write_table(pairs, draft.path / "pairs.parquet")
        draft.parents = {f"{INDEX}/{as_of}": home.artifact(INDEX, as_of).version}
        draft.metrics = {"quality": [asdict(level) for level in quality]}
    return made_artifact(draft).version, pairs.num_rows, [asdict(level) for level in quality]


def make_candidate(home: Home, as_of: str, code: str) -> tuple[str, dict[str, Any]]:
    """Tune, judge, and write the candidate release; its version and the tuning report."""
    model, index, data = open_model(home, as_of), open_index(home, as_of), audit_data(home, as_of)
    tuned, report = _tune(home, as_of, model, index, data)
    artifact = home.artifact(MODEL, as_of)
    if report["kept"]:
        artifact = _store_tuned(home, as_of, tuned, artifact, code)
    audit = stored_audit(home, as_of)
    release = make_release(
        home.artifacts, schema=home.feature_schema(), model=artifact, index=home.artifact(INDEX, as_of), ads=data.ads,
        as_of=as_of, timezone=home.facts().timezone, tiers=audit["tiers"], tuned=report["kept"],
        parents={f"{NODES}/{as_of}": home.artifact(NODES, as_of).version},
        metrics={name: value for name, value in audit.items() if isinstance(value, float)},
        audit={"index": audit, "tuning": report}, code_version=code,
    )  # fmt: skip
    home.remember(RELEASE, as_of, release)
    return release.version, report


def tuning_report(home: Home, as_of: str) -> dict[str, Any]:
    """What tuning brought, as stored with the candidate."""
    report: dict[str, Any] = home.artifact(RELEASE, as_of).manifest.audit["tuning"]
    return report


def _store_tuned(home: Home, as_of: str, tuned: RetrievalModel, untuned: Artifact, code: str) -> Artifact:
    with home.artifacts.create("retrieval_model", schema=home.feature_schema(), code_version=code) as draft:
        save_model(tuned, draft.path)
        draft.config = {**untuned.manifest.config, "tuned": asdict(recipe(home).tuning)}
        draft.parents = {f"{MODEL}/{as_of}": untuned.version, f"{NODES}/{as_of}": home.artifact(NODES, as_of).version}
    return made_artifact(draft)


def _tune(
    home: Home, as_of: str, model: RetrievalModel, index: Index, data: FrameData
) -> tuple[RetrievalModel, dict[str, Any]]:
    values, beams = recipe(home), standard_beams(home, as_of)
    earlier, later = split_by_time(data, (EARLIER_SHARE, 1.0 - EARLIER_SHARE))
    pairs = pq.read_table(home.artifact(NODES, as_of).file("pairs.parquet"))
    candidates = {"untuned": model, "tuned": tune(model, index, data, pairs, values.tuning, seed=home.seed)}
    controls = {
        "random pairs": random_pairs(pairs, index, seed=home.seed),
        "recent clicks": click_pairs(index, data, earlier),
    }
    for name, control in controls.items():
        if control.num_rows:
            candidates[name] = tune(model, index, data, control, values.tuning, seed=home.seed)
    rows = later[torch.randperm(len(later), generator=torch.Generator().manual_seed(home.seed))]
    row_B = rows[: values.audit_requests].numpy()
    truth_BN = oracle_matrix(home, data, row_B)
    found = {name: _measure(one, index, data, row_B, beams, truth_BN) for name, one in candidates.items()}
    user_B = data.user_code_R[torch.from_numpy(row_B)].numpy()
    verdict = _judge(found, "tuned", user_B, home.seed)
    table = []
    for name, (metric_B, covered_B) in found.items():
        gain = _judge(found, name, user_B, home.seed).gain
        table.append(
            {
                "model": name, "metric": float(np.nanmean(metric_B)), "coverage": float(np.nanmean(covered_B)),
                "gain": gain.estimate, "low": gain.low, "high": gain.high,
            }
        )  # fmt: skip
    report = {
        "kept": verdict.kept, "reason": verdict.reason, "gain": asdict(verdict.gain), "margin": MARGIN, "rows": table,
        "metric": "expected clicks" if home.facts().has_oracle else "recall of clicks",
    }  # fmt: skip
    return candidates["tuned"], report


def _judge(found: dict[str, tuple[Floats, Floats]], name: str, user_B: NDArray[np.int64], seed: int) -> TuningVerdict:
    (metric_B, covered_B), (untuned_B, untuned_covered_B) = found[name], found["untuned"]
    return judge(metric_B, untuned_B, user_B, margin=MARGIN, coverage=(covered_B, untuned_covered_B), seed=seed)


def _measure(
    model: RetrievalModel, index: Index, data: FrameData, row_B: NDArray[np.int64], beams: tuple[int, ...],
    truth_BN: NDArray[np.float32] | None,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Per request: the real-label metric of the beam's answer, and its coverage of the exact one."""
    beam, exact = answer(model, index, data, row_B, [beams, "exact"], k=AUDIT_K)
    covered_B = recall_at_k(beam.ad_code_BK, exact.ad_code_BK)
    if truth_BN is None:
        return recall_at_k(beam.ad_code_BK, requests_at(data, row_B).relevant_BM), covered_B
    best_B = np.sort(np.partition(truth_BN, -AUDIT_K, axis=1)[:, -AUDIT_K:], axis=1).sum(axis=1)
    return true_clicks(beam.ad_code_BK, truth_BN) / np.maximum(best_B, 1e-12), covered_B
