"""What the orchestration adds to a training preset: how many days and requests a stage works with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dagster_project.lib.resources import Home
from models.index.audit import TIER_TARGETS
from models.index.health import HealthLimits
from models.training.presets import Preset, open_preset
from models.tuning.tune import TuningConfig

ALL_DAYS = 1_000
"""Sparse logs: the retrieval model learns from all of them."""


@dataclass(frozen=True)
class Recipe:
    """All trained and audited assets of one preset."""

    preset: Preset
    retrieval_days: int
    """Newest days that the retrieval model learns from."""
    pair_rows: int
    """Rows a day for which the foundation model scores unlabelled ads."""
    ads_per_row: int
    calibration_requests: int
    """Requests on which the tiers' beams are chosen; their users are not audited."""
    audit_requests: int
    held_out_requests: int
    """Requests of the next day on which the index is judged and its scorer compared with the control's."""
    node_requests: int
    """Requests whose best nodes become the data of test-time tuning."""
    shadow_margin: float
    """Share of its worth that a candidate may lose against what serves: above what two trainings differ by."""
    smoke_requests: int
    """Requests that a new Bento must answer as the engine does."""
    served_requests: int
    """Requests of a day that are sent to the promoted release."""
    tuning: TuningConfig
    tiers: Mapping[str, tuple[float, float]]
    """Tier -> target coverage and largest cost, as a share of the full scan."""
    health: HealthLimits
    """From where on an index counts as collapsed; eight nodes can't be as even as a thousand."""
    recall_floor: float
    """What the default tier must find of the full scan's answer."""


def recipe(home: Home) -> Recipe:
    """The recipe of a home; raises ValueError that lists the known presets."""
    facts = home.facts()
    positives_only = facts.positives_only
    preset = open_preset(home.preset, home.source, positives_only=positives_only)
    preset = replace(preset, retrieval=replace(preset.retrieval, exclude_seen=not facts.repeats))
    if home.preset == "tiny":
        training = replace(preset.retrieval.training, batch_size=48, epochs=2, refresh_every=10, ads_per_step=256)
        if positives_only:
            training = replace(training, batch_size=256, epochs=1, min_steps=200, sampled_ads=128, final_rate=0.1)
        retrieval = replace(preset.retrieval, level_sizes=(8, 8), training=training)
        return Recipe(
            replace(preset, retrieval=retrieval), retrieval_days=10, pair_rows=150, ads_per_row=8,
            calibration_requests=60, audit_requests=120, held_out_requests=150, node_requests=120,
            shadow_margin=0.4, smoke_requests=40, served_requests=60,
            tuning=TuningConfig(num_steps=10, rows_per_step=32), recall_floor=0.5,
            health=HealthLimits(max_largest_share=0.5, min_effective_share=0.3),
            tiers={"lite": (0.6, 0.3), "standard": (0.85, 0.6), "full": (0.95, 0.9)},
        )  # fmt: skip
    if positives_only:
        return Recipe(
            preset, retrieval_days=ALL_DAYS, pair_rows=500, ads_per_row=16, calibration_requests=120,
            audit_requests=600, held_out_requests=2_000, node_requests=1_500, shadow_margin=0.1, smoke_requests=100,
            served_requests=1_000, tuning=TuningConfig(), recall_floor=0.8,
            tiers=TIER_TARGETS, health=HealthLimits(),
        )  # fmt: skip
    return Recipe(
        preset, retrieval_days=12, pair_rows=2_000, ads_per_row=16, calibration_requests=200, audit_requests=600,
        held_out_requests=2_000, node_requests=1_500, shadow_margin=0.04, smoke_requests=200, served_requests=1_000,
        tuning=TuningConfig(), recall_floor=0.8,
        tiers=TIER_TARGETS, health=HealthLimits(),
    )  # fmt: skip
