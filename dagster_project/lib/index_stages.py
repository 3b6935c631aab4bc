"""Bodies of the index assets: train the retrieval model, publish its index, audit it. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from dagster_project.lib.gem_stages import GEM, load_gem
from dagster_project.lib.progress import report_step
from dagster_project.lib.recipes import recipe
from dagster_project.lib.resources import Home
from dagster_project.lib.training import (
    frame_data,
    frame_days,
    made_artifact,
    new_artifact,
    oracle_matrix,
    published_ads,
    teacher_pairs,
)
from models.data import FrameData
from models.index.audit import (
    AuditReport,
    audit_index,
    beam_sweep,
    choices_to_sweep,
    choose_tiers,
    draw_requests,
)
from models.index.health import health_problems, index_health
from models.index.joint import TeacherPairs, TrainingReport, train_retrieval
from models.index.monn import RetrievalModel
from models.index.publish import Index, publish
from models.index.search import Beams
from models.index.storage import load_index, load_model, save_index, save_model

MODEL, INDEX = "index/retrieval_model", "index/hierarchical_index"
PAIRS_FILE = "pairs.safetensors"
AUDIT_K = 10


def training_days(home: Home, as_of: str) -> list[str]:
    """The newest days as of a day that have a training sample: what the retrieval model learns from."""
    days = home.facts().days[: home.facts().days.index(as_of) + 1]
    sampled = [day for day in days if home.lake.partition("training_frame", day).facts["num_kept"]]
    return sampled[-recipe(home).retrieval_days :]


def train(home: Home, as_of: str, code: str) -> tuple[str, TrainingReport]:
    """Train the retrieval model with its index on the newest days as of a day; its version and what happened."""
    values, days = recipe(home), training_days(home, as_of)
    config, data = values.preset.retrieval, list(frame_days(home, days))
    gem = load_gem(home, as_of)
    taught = config.training.distillation_weight > 0.0
    pairs = [
        teacher_pairs(gem, day, num_rows=values.pair_rows, ads_per_row=values.ads_per_row, seed=home.seed + number)
        for number, day in enumerate(data if taught else ())
    ]
    model, report = train_retrieval(
        config, home.feature_schema(), data, pairs=pairs, seed=home.seed, progress=_progress(MODEL)
    )
    with new_artifact(home, "retrieval_model", MODEL, as_of, code) as draft:
        save_model(model, draft.path)
        save_file(_flat(pairs), draft.path / PAIRS_FILE)
        draft.config = {"retrieval": config.to_dict(), "days": days, "seed": home.seed}
        draft.parents = {f"{GEM}/{as_of}": home.artifact(GEM, as_of).version}
        draft.metrics = report.to_dict()
    return made_artifact(draft).version, report


def train_control(home: Home, as_of: str) -> tuple[RetrievalModel, TrainingReport]:
    """The same scorer on the same rows and pairs, without any loss of the index."""
    stored = load_file(home.artifact(MODEL, as_of).file(PAIRS_FILE))
    days = training_days(home, as_of)
    known = range(len(days)) if stored else ()
    pairs = [TeacherPairs(stored[f"{n}.row"], stored[f"{n}.ad_code"], stored[f"{n}.logit"]) for n in known]
    return train_retrieval(
        recipe(home).preset.retrieval, home.feature_schema(), list(frame_days(home, days)), pairs=pairs,
        seed=home.seed, with_index=False, progress=_progress("control without an index"),
    )  # fmt: skip


def _progress(what: str) -> Callable[[int, int, dict[str, float]], None]:
    return lambda step, total, losses: report_step(what, step, total, sum(losses.values()))


def _flat(pairs: list[TeacherPairs]) -> dict[str, Tensor]:
    named = ((n, pair) for n, pair in enumerate(pairs))
    return {
        f"{n}.{name}": value.contiguous()
        for n, pair in named
        for name, value in (("row", pair.row_X), ("ad_code", pair.ad_code_XJ), ("logit", pair.logit_XJ))
    }


def open_model(home: Home, as_of: str) -> RetrievalModel:
    """The retrieval model as of a day."""
    return load_model(home.artifact(MODEL, as_of).path)


def open_index(home: Home, as_of: str) -> Index:
    """The index published as of a day."""
    return load_index(home.artifact(INDEX, as_of).path)


def audit_data(home: Home, day: str) -> FrameData:
    """Requests of a day with the ads as published at its end: what a release of that day searches."""
    return replace(frame_data(home, day), ads=published_ads(home, day))


def publish_index(home: Home, as_of: str, code: str) -> tuple[str, dict[str, Any]]:
    """Publish the index over the corpus of a day, audit it, and store both; its version and the audit."""
    model, data = open_model(home, as_of), audit_data(home, as_of)
    index = publish(model, data.ads)
    found = audit(home, model, index, data)
    with new_artifact(home, "hierarchical_index", INDEX, as_of, code) as draft:
        save_index(index, draft.path)
        draft.config = {"tiers": found["tiers"]}
        draft.parents = {f"{MODEL}/{as_of}": home.artifact(MODEL, as_of).version}
        draft.audit = found
    return made_artifact(draft).version, found


def stored_audit(home: Home, as_of: str) -> dict[str, Any]:
    """The audit that was stored with the index of a day."""
    return home.artifact(INDEX, as_of).manifest.audit


def standard_beams(home: Home, as_of: str) -> tuple[int, ...]:
    """Beams of the default tier."""
    return tuple(stored_audit(home, as_of)["tiers"]["standard"])


def audit(home: Home, model: RetrievalModel, index: Index, data: FrameData) -> dict[str, Any]:
    """Choose the tiers on calibration users, audit the default one on others, and measure the index's health."""
    values = recipe(home)
    parts = (values.calibration_requests, values.audit_requests)
    calibration, audited = draw_requests(data, parts, seed=home.seed)
    dearest = max(max_cost for _, max_cost in values.tiers.values())
    choices = choices_to_sweep(model, index, max_cost=dearest)
    points = beam_sweep(model, index, data, calibration, choices, k=AUDIT_K)
    tiers = choose_tiers(points, values.tiers)
    truth_BN = oracle_matrix(home, data, audited.row_B)
    report = audit_index(
        model, index, data, audited, beams=tiers["standard"].beams, k=AUDIT_K, probability_BN=truth_BN, seed=home.seed
    )
    health = index_health(model, index)
    return {
        "tiers": {name: list(point.beams) for name, point in tiers.items()},
        "sweep": [asdict(point) for point in points],
        "report": report.to_dict(),
        "health": health.to_dict(),
        "problems": list(health_problems(health, index.num_ads, values.health)),
        "num_ads": index.num_ads,
        "level_sizes": list(index.level_sizes),
        "floor": values.recall_floor,
        **headline(report),
    }


def headline(report: AuditReport) -> dict[str, float]:
    """The figures that the results table and the gates read."""
    clicks = {f"expected_clicks.{name}": interval.estimate for name, interval in report.expected_clicks.items()}
    recall = {f"recall_of_clicks.{name}": interval.estimate for name, interval in report.recall.items()}
    return {
        "recall_vs_exact": report.coverage.estimate,
        "recall_error": report.coverage.standard_error,
        "cost_share": report.cost,
        "ads_scored": report.ads_scored,
        **clicks,
        **recall,
    }


def in_words(beams: list[int], num_levels: int) -> str:
    """Beams as people read them."""
    return str(Beams.parse(beams, num_levels))


def frontier(points: list[dict[str, Any]], num_levels: int) -> list[dict[str, Any]]:
    """Points of a sweep that no cheaper point beats, cheapest first, with their beams in words."""
    best, kept = -1.0, []
    for point in sorted(points, key=lambda p: p["cost"]):
        if point["coverage"] > best:
            best = point["coverage"]
            kept.append({**point, "beams": in_words(point["beams"], num_levels)})
    return kept
