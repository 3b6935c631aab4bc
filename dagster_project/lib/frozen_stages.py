"""The frozen evaluation: GEM as of the source's evaluation cut on all test days together. Imports torch.

This is the protocol of a log with an official split: weights learn from training days only. Statistics are shown
twice: as published daily (what serving reads on each test day) and frozen at the cut.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dagster_project.lib.gem_stages import load_gem
from dagster_project.lib.resources import Home
from dagster_project.lib.training import frame_data, frozen_frame_data
from models import metrics
from models.training.loop import predict


def test_days(home: Home) -> list[str]:
    """Days after the evaluation cut."""
    return [day for day in home.facts().days if day > home.facts().evaluation_cut]


def judge_frozen(home: Home) -> dict[str, Any]:
    """Metrics of the main label, with daily and with frozen statistics: overall, and one row a surface."""
    facts, schema = home.facts(), home.feature_schema()
    gem = load_gem(home, facts.evaluation_cut)
    names = ("label", "user", "surface", "daily", "frozen", "rates")
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
    rates = [i for i, f in enumerate(schema.dense_of("ad")) if f.name == f"ad_{facts.main_label}_rate"]
    user_rates = [i for i, f in enumerate(schema.dense_of("user")) if f.name == f"user_{facts.main_label}_rate"]
    for day in test_days(home):
        data, frozen = frame_data(home, day), frozen_frame_data(home, day, facts.evaluation_cut)
        mature_R = data.mature_RT[:, 0].numpy() > 0
        parts["label"].append(data.label_RT[:, 0].numpy()[mature_R])
        parts["user"].append(data.user_code_R.numpy()[mature_R])
        parts["surface"].append(data.surface_R.numpy()[mature_R])
        parts["daily"].append(predict(gem, data)[:, 0].numpy()[mature_R] + data.judged_offset)
        parts["frozen"].append(predict(gem, frozen)[:, 0].numpy()[mature_R] + data.judged_offset)
        rate_R = frozen.users.dense_UD[frozen.user_code_R][:, user_rates].sum(1)
        rate_R = rate_R + frozen.ads.dense_NF[frozen.ad_code_R][:, rates].sum(1)
        parts["rates"].append(rate_R.numpy()[mature_R])
    columns = {name: np.concatenate(values) for name, values in parts.items()}
    rows = [_row("all", columns, np.ones(len(columns["label"]), bool))]
    for code, surface in enumerate(schema.surfaces):
        chosen = columns["surface"] == code
        if len(np.unique(columns["label"][chosen])) == 2:
            rows.append(_row(surface, columns, chosen))
    return {"trained_through": facts.evaluation_cut, "test_days": test_days(home), "rows": rows, **_headline(rows[0])}


def _row(name: str, columns: dict[str, NDArray[Any]], chosen: NDArray[np.bool_]) -> dict[str, Any]:
    label, user = columns["label"][chosen], columns["user"][chosen]
    found: dict[str, Any] = {"slice": name, "rows": len(label), "rate": float(label.mean())}
    for statistics in ("daily", "frozen"):
        logit = columns[statistics][chosen]
        found[f"auc.{statistics}"] = metrics.auc(label, logit)
        found[f"gauc.{statistics}"] = metrics.gauc(label, logit, user)
        found[f"ne.{statistics}"] = metrics.normalised_entropy(label, logit)
    found["auc.sum_of_rates"] = metrics.auc(label, columns["rates"][chosen])
    return found


def _headline(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("slice", "rows")}
