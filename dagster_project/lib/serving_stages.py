"""Bodies of the serving assets: build, smoke, shadow, promote. Imports torch, and bentoml in subprocesses."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bentos.build import BuiltBento, build_bento
from bentos.probe import probe, report_dict
from bentos.retrieval.runtime import EVENT, Answer, Engine, InlineUser, Request
from dagster_project.lib.index_stages import AUDIT_K, audit_data
from dagster_project.lib.recipes import recipe
from dagster_project.lib.resources import Home
from dagster_project.lib.staleness import digest
from dagster_project.lib.training import oracle_matrix
from dagster_project.lib.tuning_stages import RELEASE
from feature_repo.days import day_bounds_us
from models.artifact import write_json_atomically
from models.data import FrameData
from models.index.audit import non_inferiority, requests_at, true_clicks
from models.metrics import recall_at_k
from models.release import Pointer, promote, read_pointer
from models.schema import FeatureSchema

SERVED_K = 50


def build(home: Home, as_of: str) -> BuiltBento:
    """Build (or find) the Bento of the candidate of a day."""
    return build_bento(home.path, home.artifact(RELEASE, as_of).version)


def smoke(home: Home, as_of: str) -> dict[str, Any]:
    """Serve the candidate's Bento for real and compare its answers with the engine's."""
    data = audit_data(home, as_of)
    num_requests = recipe(home).smoke_requests
    rows = torch.randperm(data.num_rows, generator=torch.Generator().manual_seed(home.seed))[:num_requests]
    _, end_us = day_bounds_us(home.facts(), as_of)
    surfaces = data.schema.surfaces
    bodies = [
        {
            "user_id": int(data.users.user_id_U[data.user_code_R[row]]), "surface": surfaces[int(data.surface_R[row])],
            "k": SERVED_K, "timestamp_us": end_us,
        }
        for row in rows
    ]  # fmt: skip
    report = report_dict(probe(home.path, build(home, as_of).tag, bodies))
    write_json_atomically(_path(home, "smoke", as_of), report)
    return report


def shadow(home: Home, as_of: str) -> tuple[str, dict[str, Any]]:
    """Answer the same requests by the candidate and by what serves now; a version and the comparison."""
    candidate = home.artifact(RELEASE, as_of).version
    pointer = read_pointer(home.releases)
    data = audit_data(home, as_of)
    order = torch.randperm(data.num_rows, generator=torch.Generator().manual_seed(home.seed + 1))
    row_B = order[: recipe(home).audit_requests].numpy()
    truth_BN = oracle_matrix(home, data, row_B)
    logged = home.facts().positives_only
    names = [candidate] if pointer is None or pointer.version == candidate else [candidate, pointer.version]
    alone = "nothing else serves: there is nothing to be worse than"
    if logged and len(names) == 2 and Engine.load(home.artifacts, names[1]).schema != data.schema:
        alone = f"{names[1]} serves with an older feature schema, and logged requests hold the newest features only"
        names = names[:1]
    values, rows, answered = {}, [], {}
    for name in names:
        engine = Engine.load(home.artifacts, name)
        requests = _logged_requests(data, row_B) if logged else _requests(home, as_of, data, row_B, engine.schema)
        start = time.perf_counter()
        answers = engine.retrieve(requests)
        milliseconds = (time.perf_counter() - start) * 1e3 / len(requests)
        values[name], answered[name] = _values(engine, answers, data, row_B, truth_BN), answers
        rows.append(
            {
                "release": name, "value": float(np.nanmean(values[name])), "ms_per_request": milliseconds,
                "cost": float(np.mean([a.cost for a in answers])),
            }
        )  # fmt: skip
    verdict = _compare(names, values, data, row_B, home) if len(names) == 2 else {"passed": True, "reason": alone}
    report = {**verdict, "rows": rows, "candidate": candidate}
    report["recall"] = rows[0]["value"]
    report["overlap"] = _overlap(*(answered[name] for name in names)) if len(names) == 2 else 1.0
    write_json_atomically(_path(home, "shadow", as_of), report)
    return digest([names, [row["value"] for row in rows]]), report


def _requests(
    home: Home, as_of: str, data: FrameData, row_B: np.ndarray[Any, Any], schema: FeatureSchema
) -> list[Request]:
    """Requests as they would come now: users read from the online store at the end of the day.

    Each release reads the features of its own schema: what serves may be older than the newest feature.
    """
    from feature_repo.online import OnlineReader

    _, end_us = day_bounds_us(home.facts(), as_of)
    rows = torch.from_numpy(row_B)
    user_ids = data.users.user_id_U[data.user_code_R[rows]].tolist()
    users = OnlineReader(home.path, schema).read(user_ids, end_us)
    surfaces = [data.schema.surfaces[int(code)] for code in data.surface_R[rows]]
    return [Request(u, s, AUDIT_K, end_us) for u, s in zip(users, surfaces, strict=True)]


def _logged_requests(data: FrameData, row_B: np.ndarray[Any, Any]) -> list[Request]:
    """Requests as they came, before what the user then chose: without impressions nothing else can be found again."""
    rows = torch.from_numpy(row_B)
    user, time_us_B = data.user_batch(rows), data.time_us_R[rows].tolist()
    bound = user.history.start_B1.tolist()
    requests = []
    for row, time_us in enumerate(time_us_B):
        events = slice(bound[row], bound[row + 1])
        history = np.zeros(bound[row + 1] - bound[row], EVENT)
        history["item"], history["kind"] = user.history.item_E[events], user.history.kind_E[events]
        history["surface"] = user.history.surface_E[events]
        history["time"] = time_us // 1_000_000 - user.history.age_E[events].to(torch.int64)
        features = InlineUser(user.categorical_BC[row].numpy(), user.dense_BD[row].numpy(), history)
        surface = data.schema.surfaces[int(user.surface_B[row])]
        requests.append(Request(features, surface, AUDIT_K, int(time_us)))
    return requests


def _values(
    engine: Engine, answers: list[Answer], data: FrameData, row_B: np.ndarray[Any, Any],
    truth_BN: np.ndarray[Any, Any] | None,
) -> np.ndarray[Any, Any]:  # fmt: skip
    """Per request: expected clicks over those of the best ads, or recall of the user's clicks of the day."""
    code_BK = np.full((len(answers), AUDIT_K), -1, np.int64)
    for row, answer in enumerate(answers):
        code_BK[row, : len(answer.ad_ids)] = engine.code_of(answer.ad_ids)
    if truth_BN is None:
        return recall_at_k(code_BK, requests_at(data, row_B).relevant_BM)
    best_B = np.sort(np.partition(truth_BN, -AUDIT_K, axis=1)[:, -AUDIT_K:], axis=1).sum(axis=1)
    return np.asarray(true_clicks(code_BK, truth_BN) / np.maximum(best_B, 1e-12))


def _compare(
    names: list[str], values: dict[str, np.ndarray[Any, Any]], data: FrameData, row_B: np.ndarray[Any, Any], home: Home
) -> dict[str, Any]:
    ours, theirs = values[names[0]], values[names[1]]
    known = ~(np.isnan(ours) | np.isnan(theirs))
    user_B = data.user_code_R[torch.from_numpy(row_B)].numpy()
    margin = recipe(home).shadow_margin
    verdict = non_inferiority(ours[known], theirs[known], user_B[known], margin=margin, seed=home.seed)
    return {
        "passed": verdict.passed, "reason": f"candidate over serving: {verdict.reason}",
        "ratio": verdict.ratio.estimate, "ratio_low": verdict.ratio.low, "standard_error": verdict.ratio.standard_error,
    }  # fmt: skip


def _overlap(ours: list[Answer], theirs: list[Answer]) -> float:
    return float(np.mean([len({*a.ad_ids} & {*b.ad_ids}) / AUDIT_K for a, b in zip(ours, theirs, strict=True)]))


def shadow_of(home: Home, as_of: str) -> dict[str, Any]:
    """The shadow comparison of a day's candidate."""
    return _read(_path(home, "shadow", as_of))


def promote_candidate(home: Home, as_of: str) -> tuple[Pointer, list[dict[str, Any]]]:
    """Read everything that was measured on the candidate again and move the pointer, or refuse.

    Raises:
        RuntimeError: names every reason; the pointer stays where it was.
    """
    release = home.artifact(RELEASE, as_of)
    rows = audit_of(home, as_of)
    refused = [f"{row['gate']}: {row['found']}" for row in rows if not row["passed"]]
    if refused:
        raise RuntimeError(f"release {release.version} as of {as_of} is refused: {'; '.join(refused)}")
    return promote(home.releases, release.version, as_of), rows


def audit_of(home: Home, as_of: str) -> list[dict[str, Any]]:
    """Every gate of a candidate from what is stored: gate, whether it passed, what was found."""
    release = home.artifact(RELEASE, as_of)
    index, tuning = release.manifest.audit["index"], release.manifest.audit["tuning"]
    rows = [
        ("index health", not index["problems"], "; ".join(index["problems"]) or "no collapse"),
        (
            "recall against exact", index["recall_vs_exact"] + 2 * index["recall_error"] >= index["floor"],
            f"{index['recall_vs_exact']:.3f} (SE {index['recall_error']:.3f}), floor {index['floor']}",
        ),
        ("tuning", not tuning["kept"] or tuning["gain"]["low"] > -tuning["margin"], tuning["reason"]),
        *_measured(home, as_of, release.version),
    ]  # fmt: skip
    return [{"gate": gate, "passed": passed, "found": found} for gate, passed, found in rows]


def _measured(home: Home, as_of: str, version: str) -> list[tuple[str, bool, str]]:
    rows = []
    for gate, owner in (("smoke", "release"), ("shadow", "candidate")):
        path = _path(home, gate, as_of)
        report = _read(path) if path.exists() else {}
        if report.get(owner) != version:
            rows.append((gate, False, f"was not measured on release {version}"))
        elif gate == "smoke":
            clean = report["errors"] == 0 and report["mismatches"] == 0
            rows.append((gate, clean, f"{report['errors']} errors, {report['mismatches']} mismatches"))
        else:
            rows.append((gate, report["passed"], report["reason"]))
    return rows


def _path(home: Home, kind: str, as_of: str) -> Path:
    return home.reports / kind / f"{as_of}.json"


def _read(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text())
    return report
